"""Which part file holds the row of a key: the key columns of every part, each read once per process."""

from collections.abc import Iterable, Sequence

import polars as pl

from toolformer_dag.storage.row_part import RowPart

PART = "__part"


class KeyIndex:
    """Keys of all known parts in memory: about 50 bytes for a key of a digest and two numbers."""

    def __init__(self, key: Sequence[str]) -> None:
        self._key = list(key)
        self._parts: dict[RowPart, pl.DataFrame] = {}
        self._whole: pl.DataFrame | None = None

    @property
    def parts(self) -> list[RowPart]:
        """Known parts, the oldest first."""
        return sorted(self._parts)

    def add(self, part: RowPart, keys: pl.DataFrame) -> None:
        """Learns the keys of a part."""
        self._parts[part] = keys.select(self._key)
        self._whole = None

    def forget(self, parts: Iterable[RowPart]) -> None:
        """Drops parts that are gone."""
        for part in parts:
            self._parts.pop(part, None)
            self._whole = None

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Those of `keys` that no part holds, in their order, each once."""
        wanted = keys.select(self._key).unique(maintain_order=True)
        if not self._parts:
            return wanted
        return wanted.join(self._table(), on=self._key, how="anti", maintain_order="left")

    def located(self, keys: pl.DataFrame) -> list[tuple[RowPart, pl.DataFrame]]:
        """The oldest part of every stored key: part, the keys to take from it."""
        if not self._parts:
            return []
        found = keys.select(self._key).unique().join(self._table(), on=self._key, how="inner")
        oldest = found.sort(PART).unique(self._key, keep="first")
        parts = self.parts
        groups = oldest.partition_by(PART, as_dict=True, include_key=False)
        return [(parts[int(number)], group) for (number,), group in sorted(groups.items())]

    def _table(self) -> pl.DataFrame:
        if self._whole is None:
            numbered = enumerate(self.parts)
            frames = [self._parts[part].with_columns(pl.lit(i, pl.UInt32).alias(PART)) for i, part in numbered]
            self._whole = pl.concat(frames, rechunk=True)
        return self._whole
