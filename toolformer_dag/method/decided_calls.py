"""Declare decided_calls, the table with the filter's reason for each scored call, which the warehouse shows."""

from collections.abc import Sequence
from typing import Final

import polars as pl

from toolformer_dag.lake.warehouse_table import WarehouseTable

DECIDED: Final = "decided_calls"
"""The table of a lane that is published beside filtered_calls: every scored call with its reason."""
LIMIT_PREFIX: Final = "beyond_"
"""How reasons of calls begin that helped and are left out by a limit alone, such as beyond_examples."""
DECIDED_SCHEMA = pl.Schema(
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
"""The key of a scored call; `reason`: the first that keeps it out, null where it stays."""


def decided_table(sources: Sequence[str]) -> WarehouseTable:
    """Describe an input of the warehouse: the rows that say why a scored call was not kept.

    They fill the column `reason` of the table `decisions`. The warehouse itself has no table of this name.

    Args:
        sources: The tables of the lake that hold the rows, such as "calculator/decided_calls".
    """
    return WarehouseTable(
        name=DECIDED,
        comment="Every scored call with the reason why filtered_calls does not keep it.",
        columns={},
        schema=DECIDED_SCHEMA,
        sources=tuple(sources),
        by_shard=True,
    )
