"""A forecast with its interval, from groups of a sample that were computed for real."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

GROUPS = 4
"""Parts of the sample, whose differences tell the range of the forecast."""
STUDENT = 3.18
"""The 97.5 % point of Student's distribution for as many groups."""


class Range(NamedTuple):
    """A forecast with its 95 % interval."""

    value: float = 0
    low: float = 0
    high: float = 0


def spread(group_costs: Sequence[float]) -> float:
    """Return half of the 95 % interval of the sum of GROUPS groups, as a share of the sum.

    As an example, .13 for groups that cost 90, 100, 110 and 100.
    """
    standard_error: float = stdev(group_costs) / GROUPS**0.5
    average = mean(group_costs)
    return STUDENT * standard_error / (average or 1.0)


def build_range(value: float, half: float) -> Range:
    """Return a forecast with an interval. half: half of the interval, as a share of the value."""
    return Range(value, low=value * max(0.0, 1 - half), high=value * (1 + half))
