"""Collect the rows of a table until they are enough for a frame."""

from dataclasses import dataclass, field
from typing import Any

import polars as pl


@dataclass
class RowBatch:
    """Rows that become a frame together, once there are enough of them.

    Attributes:
        most_rows: the number of rows from which on it is full.
        most_characters: the number of characters of their texts from which on it is full.
        rows: the rows so far, each a value by column.
        characters: the number of characters of their texts so far.
    """

    most_rows: int
    most_characters: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    characters: int = 0

    @property
    def is_full(self) -> bool:
        """Return whether the rows are enough for a frame."""
        return len(self.rows) >= self.most_rows or self.characters >= self.most_characters

    def add(self, row: dict[str, Any], text: str) -> None:
        """Add a row. text: the long text of the row, whose characters are counted."""
        self.rows.append(row)
        self.characters += len(text)

    def take(self, schema: pl.Schema) -> pl.DataFrame:
        """Return the rows as a frame with these columns, and begin anew without rows."""
        frame = pl.DataFrame(self.rows, schema=schema)
        self.rows = []
        self.characters = 0
        return frame
