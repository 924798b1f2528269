"""How much went through the model, and what for."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class TokenCounts:
    """Tokens through the model by kind (padding not counted) and passes; decoding steps are counted apart.

    prompt: heads of P(x); positions: texts behind the head; samples: decoded tokens; loss_*: the three losses.
    """

    prompt: int = 0
    positions: int = 0
    samples: int = 0
    loss_empty: int = 0
    loss_call: int = 0
    loss_result: int = 0
    passes: int = 0
    decoding_steps: int = 0

    def add(self, kind: str, tokens: int) -> None:
        """Counts `tokens` of `kind`, one of the fields."""
        setattr(self, kind, getattr(self, kind) + tokens)

    def as_dict(self) -> dict[str, int]:
        """For metadata and reports."""
        return asdict(self)
