"""Declare decided_calls, the table with the filter's reason for each scored call, which the warehouse shows."""

from collections.abc import Sequence
from typing import Final

import polars as pl

from toolformer_dag.lake.warehouse_table import WarehouseTable

DECIDED_CALLS_TABLE: Final = "decided_calls"
"""The table of a lane that is published beside filtered_calls: every scored call with its reason."""
LIMIT_PREFIX: Final = "beyond_"
"""How reasons of calls begin that helped and are left out by a limit alone, such as beyond_examples."""
DECIDED_CALLS_SCHEMA = pl.Schema(
    {
        "tool": pl.String(),
        "shard": pl.String(),
        "digest": pl.String(),
        "segment": pl.Int32(),
        "position": pl.Int32(),
        "sample": pl.Int32(),
        "reason": pl.String(),
    }
)
"""The key of a scored call, and `reason`: the first reason that keeps the call out, null if it stays."""


def build_decided_table(source_tables: Sequence[str]) -> WarehouseTable:
    """Describe an input of the warehouse: the rows that say why a scored call was not kept.

    They fill the column `reason` of the table `decisions`. The warehouse itself has no table of this name.

    Args:
        source_tables: The tables of the lake that hold the rows, such as "calculator/decided_calls".
    """
    return WarehouseTable(
        name=DECIDED_CALLS_TABLE,
        comment="Every scored call with the reason why filtered_calls does not keep it.",
        comments_by_column={},
        schema=DECIDED_CALLS_SCHEMA,
        source_names=tuple(source_tables),
        has_part_per_shard=True,
    )
