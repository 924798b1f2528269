"""The model's probabilities at the places of a stretch: of a call's beginning ` [`, and of the likeliest tokens."""

from dataclasses import dataclass, field
from typing import NamedTuple


class StartScore(NamedTuple):
    """The model's probability of ` [`, with which a tool call begins, and how many tokens were likelier (`rank`)."""

    probability: float
    rank: int


@dataclass(slots=True)
class PlaceScores:
    """The model's probabilities outside calls, by place: the number of tokens of the stretch before the next one.

    - `p_starts`: p of ` [`, if it was noted there; the `min_probability` of tools is compared with it.
    - `starts`: p of ` [` and its rank, if the rules trace them.
    - `likeliest`: log p by token, the likeliest first, if the rules keep the likeliest tokens.
    """

    p_starts: dict[int, float] = field(default_factory=dict)
    starts: dict[int, StartScore] = field(default_factory=dict)
    likeliest: dict[int, dict[int, float]] = field(default_factory=dict)
