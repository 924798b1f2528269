"""The identity of what a partition holds: a hash of its rows, whatever files they are cut into."""

from collections.abc import Collection
from hashlib import blake2b

import polars as pl


class ContentHash:
    """Rows in order -> 16 hexadecimal characters; column names and types count, `volatile` columns do not.

    Volatile is what measures a run, such as seconds, and would make equal results look different.
    """

    def __init__(self, volatile: Collection[str] = ()) -> None:
        self._volatile = tuple(volatile)
        self._hash = blake2b(digest_size=8)
        self._schema = ""

    def update(self, frame: pl.DataFrame) -> None:
        """Adds rows. How they are spread over calls makes no difference. Raises ValueError for another schema."""
        kept = frame.drop(self._volatile, strict=False)
        schema = str([(name, str(dtype)) for name, dtype in kept.schema.items()])
        if not self._schema:
            self._hash.update(schema.encode())
        elif schema != self._schema:
            raise ValueError(f"a partition has one schema: {self._schema} and then {schema}")
        self._schema = schema
        if kept.height:
            self._hash.update(kept.write_ndjson().encode())

    def hexdigest(self) -> str:
        """The hash of all rows so far."""
        return self._hash.hexdigest()
