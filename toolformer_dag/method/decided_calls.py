"""decided_calls: why each scored call stays or not, as the filter stores it. The warehouse shows these reasons."""

from collections.abc import Sequence
from typing import Final

import polars as pl

from toolformer_dag.lake.warehouse_table import WarehouseTable

DECIDED: Final = "decided_calls"
"""The table of a lane that is published beside filtered_calls: every scored call with its reason."""
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
    """Declare the reasons in the lake tables `sources`, such as "calculator/decided_calls", for the warehouse.

    The warehouse has no table of this name and so no columns of it: its rows are read while the table `decisions` is
    filled, whose column `reason` holds them (warehouse_filling.py).
    """
    return WarehouseTable(
        name=DECIDED,
        comment="Every scored call with the reason why filtered_calls does not keep it.",
        columns={},
        schema=DECIDED_SCHEMA,
        sources=tuple(sources),
        by_shard=True,
    )
