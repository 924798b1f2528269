"""The DuckDB file that people query."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import dagster as dg

from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import build


class WarehouseResource(dg.ConfigurableResource["WarehouseResource"]):
    """The warehouse file: built beside the old one and renamed over it."""

    database: str

    def build(self, lake: Lake, lanes: Sequence[str], partitions: Sequence[str]) -> Mapping[str, int]:
        """Rows per table after the build."""
        return build(lake, lanes, partitions, Path(self.database))
