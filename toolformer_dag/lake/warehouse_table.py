"""What a table of the warehouse is made of: tables of the lake, a query over their rows, comments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

ROWS = "FROM rows"
"""The query that takes the rows of the lake as they are."""


@dataclass(frozen=True, slots=True)
class WarehouseTable:
    """A table of the warehouse: the rows of lake tables, through `select` (which reads from `rows`).

    columns: name -> comment, of the columns in the warehouse.
    schema: of the rows in the lake.
    sources: names of the lake tables; none for a table whose rows follow from records.
    views: further statements, run after those that make the warehouse's views.
    measured: whether the rows are measurements, which a later job makes anew: until then parts of an earlier release
    may lack columns, which are null.
    by_shard: whether the parts are shards, which the column `shard` names.
    keeps_places: whether other tables hold row numbers of this one. Its rows stay where they are as long as the file is
    copied, so that no shard of it may go or change.
    scores: of a table of scored calls, by key of the lane, the SQL expression that its `delta` holds; lanes with the
    paper's score are left out.
    """

    name: str
    comment: str
    columns: Mapping[str, str]
    schema: pl.Schema
    sources: tuple[str, ...]
    select: str = ROWS
    views: str = ""
    measured: bool = False
    by_shard: bool = False
    keeps_places: bool = False
    scores: Mapping[str, str] = field(default_factory=dict)

    def determining(self) -> Mapping[str, object]:
        """Return what the copy depends on beside the rows and the text of a score."""
        return {
            "comment": self.comment,
            "columns": dict(self.columns),
            "schema": {name: str(dtype) for name, dtype in self.schema.items()},
            "select": self.select,
            "views": self.views,
        }
