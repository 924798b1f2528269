"""Rejected items, counted by shard and reason; they travel in the record of the partition they belong to."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

Rejected = Counter[tuple[str, str]]
"""(shard, reason) -> how many."""


def counted(frame: pl.DataFrame, reason: str = "reason") -> Rejected:
    """Rows of `frame` (shard, reason) whose reason is not null."""
    rows = frame.filter(pl.col(reason).is_not_null()).group_by("shard", reason).len().rows()
    return Counter({(shard, why): count for shard, why, count in rows})


def encode(rejected: Rejected) -> list[dict[str, Any]]:
    """For the record of a partition, in a fixed order."""
    return [{"shard": shard, "reason": reason, "count": n} for (shard, reason), n in sorted(rejected.items()) if n]


def decode(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Reads what `encode` put into a record."""
    rejections: Sequence[Mapping[str, Any]] = record.get("rejections", [])
    return rejections


def by_reason(rejected: Iterable[tuple[tuple[str, str], int]]) -> dict[str, int]:
    """Summed over shards."""
    total: Counter[str] = Counter()
    for (_, reason), count in rejected:
        total[reason] += count
    return dict(sorted(total.items()))
