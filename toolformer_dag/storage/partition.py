"""The parts of a table: one per shard, or a single one."""

WHOLE = "all"
"""The partition of a table that has none."""


def behind(words: str, partition: str) -> str:
    """`WORDS 'PARTITION'`, or nothing for WHOLE, of which no person knows."""
    return "" if partition == WHOLE else f"{words} {partition!r}"
