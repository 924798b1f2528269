"""The model's probabilities of the next token: of ` [`, which begins a call, and of the likeliest tokens."""

from dataclasses import dataclass, field
from typing import NamedTuple


class StartScore(NamedTuple):
    """The model's probability of ` [`, which begins a tool call, and its rank: how many tokens were likelier."""

    probability: float
    rank: int


@dataclass(slots=True)
class TokenScores:
    """The model's probabilities outside calls, by token index: the number of tokens written since the last call.

    - `start_probabilities`: p of ` [`, where it was recorded; the `min_probability` of tools is compared with it.
    - `starts`: p of ` [` and its rank, if the rules trace them.
    - `likeliest`: log p by token, the likeliest first, if the rules keep the likeliest tokens.
    """

    start_probabilities: dict[int, float] = field(default_factory=dict)
    starts: dict[int, StartScore] = field(default_factory=dict)
    likeliest: dict[int, dict[int, float]] = field(default_factory=dict)
