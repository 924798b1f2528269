"""What a table of the warehouse is made of: tables of the lake, a query over their rows, comments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

ALL_ROWS_SQL = "FROM rows"
"""The query that takes the rows of the lake as they are."""


@dataclass(frozen=True, slots=True)
class WarehouseTable:
    """A table of the warehouse (the DuckDB file for queries), which is filled with the rows of tables of the lake.

    Attributes:
        name: The name of the table.
        comment: The comment of the table.
        comments_by_column: The comments of the columns in the warehouse.
        schema: The columns of the rows in the lake, with their types.
        source_names: The names of the lake tables. Empty if the rows follow from records of parts.
        select_sql: The query that turns the rows of the lake into those of the warehouse. It reads from `rows`.
        views_sql: Further statements, run after those that create the views of the warehouse.
        is_measured: Whether the rows are measurements, which a later job makes anew. Until then, parts that an earlier
            release has written may lack columns, which are null in the warehouse.
        has_part_per_shard: Whether each part of the lake tables is a shard (slice of the corpus). The column `shard`
            then has its name.
        keeps_row_numbers: Whether other tables hold row numbers of this one. Then its rows stay in their places when
            the file is copied, and no shard of it may be removed or changed.
        score_sql_by_lane: For a table of scored calls: the SQL expression of its `delta`, by the key of the lane (a
            tool with its settings). Lanes with the score of the paper are left out.
    """

    name: str
    comment: str
    comments_by_column: Mapping[str, str]
    schema: pl.Schema
    source_names: tuple[str, ...]
    select_sql: str = ALL_ROWS_SQL
    views_sql: str = ""
    is_measured: bool = False
    has_part_per_shard: bool = False
    keeps_row_numbers: bool = False
    score_sql_by_lane: Mapping[str, str] = field(default_factory=dict)

    def list_determining_values(self) -> Mapping[str, object]:
        """Return everything that the table depends on, apart from its rows and the SQL of scores."""
        return {
            "comment": self.comment,
            "columns": dict(self.comments_by_column),
            "schema": {name: str(dtype) for name, dtype in self.schema.items()},
            "select": self.select_sql,
            "views": self.views_sql,
        }
