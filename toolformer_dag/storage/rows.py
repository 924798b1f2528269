"""Rows that are paid for once: append-only parts under one fingerprint, looked up by key.

    <stage>/<fingerprint>/identity.json   what determines the values
    <stage>/<fingerprint>/<part>.parquet  one per committed chunk; 64 of them are merged into one

A killed writer loses what it had not appended. Two writers may compute the same row: the older part counts. A part that
was cut short is put aside (`.damaged`), and its rows count as missing. A part is deleted only after a part with all its
rows is on the disk, so a reader that misses a file finds its rows under another name.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

import polars as pl
from upath import UPath

from toolformer_dag.storage import parquet
from toolformer_dag.storage.files import local, write_whole
from toolformer_dag.storage.key_index import KeyIndex
from toolformer_dag.storage.lock import locked
from toolformer_dag.storage.parquet import UnreadablePart
from toolformer_dag.storage.row_part import CHUNK, MERGED, RowPart, new_part, parse_name

log = logging.getLogger(__name__)

DAMAGED = ".damaged"
LOCK = ".merge.lock"
MERGE_AT = 64
"""Chunks that are merged into one part: lookups and listings stay fast however small the chunks are."""


class RowStore:
    """The rows of one fingerprint. `name` is their path in the lake; `damaged` what this object put aside, and why."""

    def __init__(self, folder: UPath, name: str, key: Sequence[str], schema: pl.Schema) -> None:
        self.folder = folder
        self.name = name
        self.key = list(key)
        self.schema = schema
        self.damaged: list[str] = []
        self._index = KeyIndex(key)

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Those of `keys` (at least the key columns) that are not stored, in their order, each once."""
        self._refresh()
        return self._index.missing(keys)

    def stored(self, keys: pl.DataFrame) -> pl.DataFrame:
        """The rows stored under `keys`, one per key, in no particular order."""
        while True:
            self._refresh()
            try:
                frames = [self._take(part, wanted) for part, wanted in self._index.located(keys)]
            except UnreadablePart:  # merged away by another process, or put aside: look again
                continue
            return pl.concat(frames) if frames else self.schema.to_frame()

    def append(self, rows: pl.DataFrame) -> None:
        """Commits a chunk: it is on the disk when this returns. Raises WriteError, ValueError for another schema."""
        if rows.schema != self.schema:
            raise ValueError(f"{self.folder}: rows have {rows.schema}, the store has {self.schema}")
        if rows.is_empty():
            return
        self._write(rows, CHUNK)
        if len(self._chunks()) >= MERGE_AT:
            self._merge()

    def _write(self, rows: pl.DataFrame, kind: str, written: int | None = None) -> None:
        encoded = parquet.encode(rows)
        part = new_part(kind, len(encoded), written)
        write_whole(self.folder / part.name, encoded)
        self._index.add(part, rows)

    def _take(self, part: RowPart, keys: pl.DataFrame) -> pl.DataFrame:
        """Raises UnreadablePart, after putting a damaged part aside."""
        rows = self._read(part)
        return rows.join(keys, on=self.key, how="semi").unique(self.key, keep="first", maintain_order=True)

    def _read(self, part: RowPart, columns: Sequence[str] | None = None) -> pl.DataFrame:
        path = self.folder / part.name
        try:
            return parquet.read(path, part.bytes, columns)
        except UnreadablePart as error:
            if path.exists():
                self._put_aside(path, str(error))
            raise

    def _put_aside(self, path: UPath, reason: str) -> None:
        note = f"{path} {reason}; put aside, its rows are computed again"
        log.warning(note)
        self.damaged.append(note)
        aside = path.with_name(f"{path.name}{DAMAGED}")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(aside)
            aside.touch()  # `clean` counts from now

    def _refresh(self) -> None:
        """Learns new parts, forgets those that are gone."""
        known, there = set(self._index.parts), set(self._listed())
        self._index.forget(known - there)
        for part in sorted(there - known):
            try:
                self._index.add(part, self._read(part, self.key))
            except UnreadablePart:
                continue

    def _listed(self) -> list[RowPart]:
        if not self.folder.is_dir():
            return []
        parts = (parse_name(path.name) for path in self.folder.iterdir())
        return [part for part in parts if part is not None]

    def _chunks(self) -> list[RowPart]:
        return [part for part in self._index.parts if part.kind == CHUNK]

    def _merge(self) -> None:
        """One part in the place of many. Not on object stores, and left to whoever is at it already."""
        folder = local(self.folder)
        if folder is None:
            return
        with locked(folder / LOCK, wait=False) as mine:
            if mine:
                self._refresh()
                self._merge_chunks(self._chunks())

    def _merge_chunks(self, chunks: Sequence[RowPart]) -> None:
        try:
            rows = pl.concat([self._read(part) for part in chunks])
        except (UnreadablePart, ValueError):  # nothing left to merge, or a damaged part, which is put aside by now
            return
        self._write(rows.unique(self.key, keep="first", maintain_order=True), MERGED, written=chunks[0].written)
        for part in chunks:
            (self.folder / part.name).unlink(missing_ok=True)
        self._index.forget(chunks)
