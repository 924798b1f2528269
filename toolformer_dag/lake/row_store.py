"""Rows that are computed once: append-only Parquet files under one fingerprint, looked up by key.

    <rows>/<fingerprint>/identity.json   what determines the values
    <rows>/<fingerprint>/<file>.parquet  one per committed chunk; 64 of them are merged into one

A killed writer loses what it had not appended. Two writers may compute the same row: the older file counts. A damaged
file is set aside (`.damaged`), and its rows count as missing. A file is deleted only after a file with all its rows is
on the disk, so a reader that misses a file finds its rows under another name.
"""

import logging
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from toolformer_dag.files import locked, write_whole
from toolformer_dag.identity import content_hash
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile

log = logging.getLogger(__name__)

IDENTITY = "identity.json"
DAMAGED = ".damaged"
LOCK = ".merge.lock"
MERGE_AT = 64
"""Chunks that are merged into one file: lookups and listings stay fast however small the chunks are."""
CHUNK, MERGED = "chunk", "merged"
NAME = re.compile(rf"([0-9a-f]{{16}})-({CHUNK}|{MERGED})-([0-9a-f]{{32}})-([0-9]+)\.parquet")
NUMBER = "__file"


@dataclass(frozen=True, slots=True, order=True)
class RowFile:
    """A file whose name says its age, kind, content and size, so that no index has to be kept. Files sort by age.

    `written` in nanoseconds since 1970, `hash` of the content, `bytes` of the file.
    """

    written: int
    kind: str
    hash: str
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.written:016x}-{self.kind}-{self.hash}-{self.bytes}.parquet"


def new_row_file(kind: str, content: bytes, written: int | None = None) -> RowFile:
    """Return the name of a file with this content; `written` defaults to now."""
    return RowFile(time.time_ns() if written is None else written, kind, content_hash(content), len(content))


def parse_row_file(name: str) -> RowFile | None:
    """Read `RowFile.name`; None for any other file."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    written, kind, digest, size = match.groups()
    return RowFile(int(written, 16), kind, digest, int(size))


class KeyIndex:
    """The keys of all known files, in memory: about 50 bytes for a key of a digest and two numbers."""

    def __init__(self, key: Sequence[str]) -> None:
        self._key = list(key)
        self._files: dict[RowFile, pl.DataFrame] = {}
        self._whole: pl.DataFrame | None = None

    @property
    def files(self) -> list[RowFile]:
        """Known files, the oldest first."""
        return sorted(self._files)

    def add(self, file: RowFile, keys: pl.DataFrame) -> None:
        """Learn the keys of a file."""
        self._files[file] = keys.select(self._key)
        self._whole = None

    def forget(self, files: Iterable[RowFile]) -> None:
        """Drop files that are gone."""
        for file in files:
            self._files.pop(file, None)
            self._whole = None

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return those of `keys` that no file holds, in their order, each once."""
        wanted = keys.select(self._key).unique(maintain_order=True)
        if not self._files:
            return wanted
        return wanted.join(self._table(), on=self._key, how="anti", maintain_order="left")

    def located(self, keys: pl.DataFrame) -> list[tuple[RowFile, pl.DataFrame]]:
        """Return the oldest file of every stored key: file, the keys to take from it."""
        if not self._files:
            return []
        found = keys.select(self._key).unique().join(self._table(), on=self._key, how="inner")
        oldest = found.sort(NUMBER).unique(self._key, keep="first")
        files = self.files
        groups = oldest.partition_by(NUMBER, as_dict=True, include_key=False)
        return [(files[int(number)], group) for (number,), group in sorted(groups.items())]

    def _table(self) -> pl.DataFrame:
        if self._whole is None:
            numbered = enumerate(self.files)
            frames = [self._files[file].with_columns(pl.lit(i, pl.UInt32).alias(NUMBER)) for i, file in numbered]
            self._whole = pl.concat(frames, rechunk=True)
        return self._whole


class RowStore:
    """The rows of one fingerprint. `name`: their path in the lake; `damaged`: what this object set aside, and why."""

    def __init__(self, folder: Path, name: str, key: Sequence[str], schema: pl.Schema) -> None:
        self.folder = folder
        self.name = name
        self.key = list(key)
        self.schema = schema
        self.damaged: list[str] = []
        self._index = KeyIndex(key)

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return those of `keys` (at least the key columns) that are not stored, in their order, each once."""
        self._refresh()
        return self._index.missing(keys)

    def stored(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows stored under `keys`, one per key, in no particular order."""
        while True:
            self._refresh()
            try:
                frames = [self._take(file, wanted) for file, wanted in self._index.located(keys)]
            except UnreadableFile:  # merged away by another process, or set aside: look again
                continue
            return pl.concat(frames) if frames else self.schema.to_frame()

    def append(self, rows: pl.DataFrame) -> None:
        """Commit a chunk: it is on the disk when this returns. Raises WriteError, ValueError for another schema."""
        if rows.schema != self.schema:
            raise ValueError(f"{self.folder}: rows have {rows.schema}, the store has {self.schema}")
        if rows.is_empty():
            return
        self._write(rows, CHUNK)
        if len(self._chunks()) >= MERGE_AT:
            self._merge()

    def damaged_files(self, since: int = 0) -> list[tuple[Path, str]]:
        """Read the files that changed `since` then and return the damaged ones, with reasons; set nothing aside."""
        files = [(self.folder / file.name, file) for file in self._listed()]
        found = [(path, parquet.damage(path, file.bytes, file.hash, since)) for path, file in files]
        return [(path, reason) for path, reason in found if reason is not None]

    def _write(self, rows: pl.DataFrame, kind: str, written: int | None = None) -> None:
        encoded = parquet.encode(rows)
        file = new_row_file(kind, encoded, written)
        write_whole(self.folder / file.name, encoded)
        self._index.add(file, rows)

    def _take(self, file: RowFile, keys: pl.DataFrame) -> pl.DataFrame:
        """Raise UnreadableFile, after setting a damaged file aside."""
        rows = self._read(file)
        return rows.join(keys, on=self.key, how="semi").unique(self.key, keep="first", maintain_order=True)

    def _read(self, file: RowFile, columns: Sequence[str] | None = None) -> pl.DataFrame:
        path = self.folder / file.name
        try:
            return parquet.read(path, file.bytes, file.hash, columns)
        except UnreadableFile as error:
            if path.exists():
                self._set_aside(path, str(error))
            raise

    def _set_aside(self, path: Path, reason: str) -> None:
        note = f"{path} {reason}; set aside, its rows are computed again"
        log.warning(note)
        self.damaged.append(note)
        aside = path.with_name(f"{path.name}{DAMAGED}")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(aside)
            aside.touch()  # `clean` counts from now

    def _refresh(self) -> None:
        """Learn new files, forget those that are gone."""
        known, there = set(self._index.files), set(self._listed())
        self._index.forget(known - there)
        for file in sorted(there - known):
            try:
                self._index.add(file, self._read(file, self.key))
            except UnreadableFile:
                continue

    def _listed(self) -> list[RowFile]:
        if not self.folder.is_dir():
            return []
        files = (parse_row_file(path.name) for path in self.folder.iterdir())
        return [file for file in files if file is not None]

    def _chunks(self) -> list[RowFile]:
        return [file for file in self._index.files if file.kind == CHUNK]

    def _merge(self) -> None:
        """Put one file in the place of many; leave it to whoever is already doing so."""
        with locked(self.folder / LOCK, wait=False) as mine:
            if mine:
                self._refresh()
                self._merge_chunks(self._chunks())

    def _merge_chunks(self, chunks: Sequence[RowFile]) -> None:
        try:
            rows = pl.concat([self._read(file) for file in chunks])
        except (UnreadableFile, ValueError):  # nothing left to merge, or a damaged file, which is set aside by now
            return
        self._write(rows.unique(self.key, keep="first", maintain_order=True), MERGED, written=chunks[0].written)
        for file in chunks:
            (self.folder / file.name).unlink(missing_ok=True)
        self._index.forget(chunks)
