"""A forecast with its interval, from groups of a sample that were computed for real."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

GROUP_COUNT = 4
"""The number of groups into which the sample is split. Their differences tell the range of the forecast."""
STUDENT_QUANTILE = 3.18
"""The 97.5 % point of Student's distribution for as many groups."""


class Range(NamedTuple):
    """A forecast with its 95 % interval."""

    value: float = 0
    low: float = 0
    high: float = 0


def compute_relative_half_interval(group_costs: Sequence[float]) -> float:
    """Return half of the 95 % interval of the sum of the groups' costs, as a share of the sum.

    For example, 0.13 for groups that cost 90, 100, 110 and 100.

    Args:
        group_costs: The cost of each of the GROUP_COUNT groups.
    """
    standard_error: float = stdev(group_costs) / GROUP_COUNT**0.5
    half_interval = STUDENT_QUANTILE * standard_error

    # As a share, the interval of the average is also that of the sum.
    average_cost = mean(group_costs) or 1.0  # avoids a division by 0 if all groups cost nothing
    return half_interval / average_cost


def build_range(value: float, relative_half_interval: float) -> Range:
    """Return a forecast with its interval, which does not reach below 0.

    Args:
        value: The forecast.
        relative_half_interval: Half of the interval, as a share of the value.
    """
    low_factor = max(0.0, 1 - relative_half_interval)
    high_factor = 1 + relative_half_interval
    return Range(value, low=value * low_factor, high=value * high_factor)
