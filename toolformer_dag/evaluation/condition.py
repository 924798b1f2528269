"""Under what condition a benchmark is asked. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Condition:
    """`k` as in decoding; 0 is the paper's "disabled", also right for models that know no calls."""

    name: str
    k: int
