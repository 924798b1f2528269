"""How calls are sampled (paper, section 2)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """Plain sampling from M is the paper's; `top_p` below 1 keeps the smallest set of tokens with that probability.

    A sample without "]" after `max_call_tokens` tokens is discarded. All fields determine the rows: fingerprint them.
    Raises ValueError for impossible values. Greedy decoding is not covered: samples of one position would be equal.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_call_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.max_call_tokens < 1:
            raise ValueError(f"max_call_tokens is {self.max_call_tokens}; it must be at least 1")
