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

    Attributes:
        start_probability_by_index: The model's p of ` [`, where it was recorded. It is compared with the minimum that a
            tool needs.
        start_score_by_index: The model's p of ` [` and its rank, if the rules trace them.
        likeliest_by_index: Log p by token, the likeliest first, if the rules keep the likeliest tokens.
    """

    start_probability_by_index: dict[int, float] = field(default_factory=dict)
    start_score_by_index: dict[int, StartScore] = field(default_factory=dict)
    likeliest_by_index: dict[int, dict[int, float]] = field(default_factory=dict)
