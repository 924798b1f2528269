"""Collect the rows of a table until they are enough for a frame."""

from dataclasses import dataclass, field
from typing import Any

import polars as pl


@dataclass
class RowBatch:
    """Rows that become a frame together, once there are enough of them.

    Attributes:
        max_rows: the number of rows from which on it is full.
        max_characters: the number of characters of their texts from which on it is full.
        rows: the rows so far, each a value by column.
        character_count: the number of characters of their texts so far.
    """

    max_rows: int
    max_characters: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    character_count: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the rows are enough for a frame."""
        return len(self.rows) >= self.max_rows or self.character_count >= self.max_characters

    def add_row(self, row: dict[str, Any], text: str) -> None:
        """Add a row.

        Args:
            row: The row, a value by column.
            text: The long text of the row, whose characters are counted.
        """
        self.rows.append(row)
        self.character_count += len(text)

    def take_frame(self, schema: pl.Schema) -> pl.DataFrame:
        """Return the rows as a frame with these columns, and begin anew without rows."""
        frame = pl.DataFrame(self.rows, schema=schema)
        self.rows = []
        self.character_count = 0
        return frame
