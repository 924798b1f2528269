"""What the engine is asked and what it answers: sampling, proposals, losses. Imports no torch."""

import math
from dataclasses import dataclass
from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray


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


def uniforms(seed: int, digest: str, position: int, sample: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for sample j at position i of the text `digest`; a longer draw begins with a shorter.

    Bits of SHAKE-128 over the four names, 53 of every 64: the same with every version of numpy and torch.
    """
    stream = shake_128(f"{seed}\0{digest}\0{position}\0{sample}".encode()).digest(8 * count)
    return (np.frombuffer(stream, "<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def select_positions(probabilities: NDArray[np.floating], tau_s: float, k: int) -> list[int]:
    """I = {i : p_i > tau_s}, at most the `k` most probable of them, ascending. Of equals the earlier is taken."""
    above = np.flatnonzero(probabilities > tau_s)
    likeliest = above[np.argsort(-probabilities[above], kind="stable")[:k]]
    return sorted(likeliest.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class ProposalRequest:
    """A text x with n tokens. `digest` seeds its random streams.

    `probabilities` (n) and `stored`, pairs of (position, sample), are what has been paid for before: they are not
    computed again.
    """

    text: str
    digest: str
    probabilities: NDArray[np.float32] | None = None
    stored: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class SampledCall:
    """Sample `sample` at position i = `position` (0-based, before token x_i).

    `body` is the text between " [" and "]"; it is None with the reason "no_end" where no "]" came in time.
    """

    position: int
    sample: int
    body: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """`probabilities` (n) holds p_i, `offsets` (n) the character at which x_i begins.

    p_i is 0 where x_i begins inside a character: no call can stand there. `samples` leaves out what was stored.
    `reason` is "does_not_fit" where prompt, text twice and call exceed the context, "not_finite" where some p_i is no
    number (a dtype that overflows), or "empty"; then all else is empty.
    """

    probabilities: NDArray[np.float32]
    offsets: NDArray[np.int32]
    samples: tuple[SampledCall, ...]
    reason: str | None = None


def refused(reason: str) -> Proposal:
    """A proposal with nothing but a reason."""
    return Proposal(np.zeros(0, np.float32), np.zeros(0, np.int32), (), reason)


WINDOW_WEIGHTS = (1 / 3, 4 / 15, 1 / 5, 2 / 15, 1 / 15)
"""w_0..w_4 = max(0, 1 - 0.2 t), normalised over all t (paper, section 4.1); every later weight is zero."""


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A call to `tool` (its name in the text) with `input` and `result`, before token x_i of `text`, i = `position`."""

    text: str
    position: int
    tool: str
    input: str
    result: str


@dataclass(frozen=True, slots=True)
class CallLosses:
    """L_i(empty), L_i(e(c)), L_i(e(c, r)) in nats.

    With `upper_bound`, L_i(e(c)) was not computed (NaN), because the call is hopeless already: `delta` is then
    L_i(empty) - L+, below zero, and the true one is at most that. With `reason` "does_not_fit" all three are NaN.
    """

    loss_empty: float
    loss_call: float
    loss_result: float
    upper_bound: bool = False
    reason: str | None = None

    @property
    def loss_minus(self) -> float:
        """L- = min(L_i(empty), L_i(e(c)))."""
        return self.loss_empty if self.upper_bound else min(self.loss_empty, self.loss_call)

    @property
    def loss_plus(self) -> float:
        """L+ = L_i(e(c, r))."""
        return self.loss_result

    @property
    def delta(self) -> float:
        """L- - L+: by how much the result helps. The call is kept where this is at least tau_f."""
        return self.loss_minus - self.loss_plus


UNFIT = CallLosses(math.nan, math.nan, math.nan, reason="does_not_fit")
"""For a call whose e(c, r) and text do not fit the context together."""
