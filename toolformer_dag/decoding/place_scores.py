"""What the model said at the places of a stretch: how likely a call was, and which tokens were the likeliest."""

from dataclasses import dataclass, field
from typing import NamedTuple


class StartScore(NamedTuple):
    """The model's p of ` [`, and how many tokens were more likely."""

    probability: float
    rank: int


@dataclass(slots=True)
class PlaceScores:
    """What the model said outside calls, by place: the number of tokens that the stretch had there.

    - `p_starts`: p of ` [`, where it was noted; `min_probability` of a tool is compared with it.
    - `starts`: p of ` [` and its rank, where the rules trace them.
    - `likeliest`: log p by token, the likeliest first, where the rules keep the likeliest.
    """

    p_starts: dict[int, float] = field(default_factory=dict)
    starts: dict[int, StartScore] = field(default_factory=dict)
    likeliest: dict[int, dict[int, float]] = field(default_factory=dict)
