"""Rows that are computed once: append-only Parquet files under one fingerprint, looked up by key.

    <rows>/<fingerprint>/identity.json   what determines the values
    <rows>/<fingerprint>/<file>.parquet  one per committed chunk, and the runs into which chunks are merged

A log-structured merge tree: 64 chunks become a run of level 1, eight runs of a level one of the next, so the number of
files that can hold a key grows with the logarithm of the rows. A lookup reads the row groups that can hold the keys it
is asked for, and no list of all keys is ever kept.

A killed writer loses what it had not appended. Two writers may compute the same row: the older file counts. A damaged
file is set aside (`.damaged`), and its rows count as missing. A file is deleted only after files with all its rows are
on the disk, so a reader that misses a file finds its rows under another name. Two processes that merge the same files
write the same names; the lock only saves work.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import polars as pl

from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.row_files import (
    BLOCKS_READ,
    CHUNK,
    HASH,
    HASHES,
    RUN,
    Blocks,
    RowFile,
    blocks_of,
    encode_run,
    hashed,
    new_row_file,
    parse_row_file,
    read_blocks,
)
from toolformer_dag.lake.storage import Storage

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

IDENTITY = "identity.json"
LOCK = ".merge.lock"
MERGE_AT = 64
"""Chunks that are merged into a run."""
RUNS_AT = 8
"""Runs of a level that are merged into one of the next."""
RUN_BYTES = 2**22
"""About how large a file of a run is: what a merge holds in memory at a time, and what a damaged file costs."""


class RowStore:
    """The rows of one fingerprint. `name`: their path in the lake; `damaged`: what this object set aside, and why."""

    def __init__(self, storage: Storage, name: str, key: Sequence[str], schema: pl.Schema) -> None:
        self.storage = storage
        self.folder = storage.root / name
        self.name = name
        self.key = list(key)
        self.schema = schema
        self.damaged: list[str] = []
        self._blocks: dict[RowFile, Blocks] = {}

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return those of `keys` (at least the key columns) that are not stored, in their order, each once."""
        _, left = self._looked_up(keys, self.key)
        return left

    def stored(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows stored under `keys`, one per key, in no particular order."""
        found, _ = self._looked_up(keys, self.schema.names())
        return found

    def append(self, rows: pl.DataFrame) -> None:
        """Commit a chunk: it is on the disk when this returns. Raises WriteError, ValueError for another schema."""
        if rows.schema != self.schema:
            raise ValueError(f"{self.folder}: rows have {rows.schema}, the store has {self.schema}")
        if rows.is_empty():
            return
        self._write(CHUNK, parquet.encode(rows))
        if self._mergeable():
            self._merge()

    def chunks(self) -> list[int]:
        """Return the bytes of each chunk that is not merged yet."""
        return [file.bytes for file in self._listed() if file.level == 0]

    def damaged_files(self, since: int = 0) -> list[tuple[Path, str]]:
        """Read the files that changed `since` then and return the damaged ones, with reasons; set nothing aside.

        A file that is gone meanwhile was merged into another.
        """
        files = [(self._path(file), file) for file in self._listed()]
        found = [(path, self.storage.damage(path, file.bytes, file.hash, since)) for path, file in files]
        return [(path, reason) for path, reason in found if reason is not None and self.storage.exists(path)]

    def _looked_up(self, keys: pl.DataFrame, columns: Sequence[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The rows found, and the keys that are not stored: each key is taken from the oldest file that has it."""
        asked = keys.select(self.key).unique(maintain_order=True)
        while True:
            left, found = hashed(asked, self.key[0]), [self.schema.to_frame().select(columns)]
            wanted = left[HASH].unique().sort().to_numpy()
            try:
                for file, blocks in self._known():
                    held = blocks.holding(wanted)
                    for rows in self._held(file, held, left, columns):
                        found.append(rows)
                        left = left.join(rows, on=self.key, how="anti", maintain_order="left")
                    if held:
                        wanted = left[HASH].unique().sort().to_numpy()
            except UnreadableFile:  # merged away by another process, or set aside: look again
                continue
            return pl.concat(found), left.drop(HASH)

    def _held(
        self, file: RowFile, blocks: Sequence[int], keys: pl.DataFrame, columns: Sequence[str]
    ) -> Iterator[pl.DataFrame]:
        """The rows under `keys` in these blocks. Raises UnreadableFile, after setting a damaged file aside."""
        for some in _portions(file, blocks):
            rows = self._read(file, partial(read_blocks, blocks=some, columns=columns))
            rows = rows.join(keys, on=self.key, how="semi", maintain_order="left")
            yield rows.unique(self.key, keep="first", maintain_order=True)

    def _known(self) -> list[tuple[RowFile, Blocks]]:
        """All files, the oldest first. Raises UnreadableFile for one that went after it was listed, or is damaged."""
        places = partial(blocks_of, column=self.key[0])
        there = self._all_listed()
        self._blocks = {file: blocks for file, blocks in self._blocks.items() if file in there}
        for file in there:
            if file not in self._blocks:
                self._blocks[file] = self._read(file, places)
        return [(file, self._blocks[file]) for file in there]

    def _write(self, kind: str, content: bytes, written: int | None = None) -> None:
        file = new_row_file(kind, content, written)
        self.storage.add(self._path(file), content)

    def _read(self, file: RowFile, read: Callable[[RowFile, Path], Answer]) -> Answer:
        path = self._path(file)
        try:
            return read(file, self.storage.fetch(path, file.bytes, file.hash))
        except UnreadableFile as error:
            if self.storage.exists(path):
                self._set_aside(path, str(error))
            raise

    def _set_aside(self, path: Path, reason: str) -> None:
        note = f"{self.storage.shown(path)} {reason}; set aside, its rows are computed again"
        log.warning(note)
        self.damaged.append(note)
        self.storage.set_aside(path)

    def _path(self, file: RowFile) -> Path:
        return self.folder / file.name

    def _listed(self) -> list[RowFile]:
        """The files that are there, the oldest first."""
        files = map(parse_row_file, self.storage.names(self.folder))
        return sorted(file for file in files if file is not None)

    def _all_listed(self) -> list[RowFile]:
        """The same, listed until two listings agree.

        A folder is read in pieces: where a merge ends between two of them, one listing may have neither the run, which
        is too new, nor the files in whose place it was put.
        """
        before, there = None, self._listed()
        while there != before:
            before, there = there, self._listed()
        return there

    def _mergeable(self) -> list[RowFile]:
        """The files of the lowest level that has too many."""
        levels: dict[int, list[RowFile]] = {}
        for file in self._listed():
            levels.setdefault(file.level, []).append(file)
        for level, files in sorted(levels.items()):
            if len({file.written for file in files}) >= (RUNS_AT if level else MERGE_AT):
                return files
        return []

    def _merge(self) -> None:
        """Put one run in the place of many files, as often as there are too many; one process at a time."""
        with self.storage.alone(self.folder / LOCK, wait=False) as mine:
            while mine and (files := self._mergeable()):
                try:
                    self._write_run(files)
                except UnreadableFile:  # damaged, and set aside by now
                    return
                for file in files:
                    self.storage.remove(self._path(file))

    def _write_run(self, files: Sequence[RowFile]) -> None:
        """Write the rows of `files`, a range of hashes at a time, so that memory holds the rows of one file."""
        kind, written = f"{RUN}{files[0].level + 1}", files[0].written
        blocks = [self._read(file, partial(blocks_of, column=self.key[0])) for file in files]
        ranges = -(-sum(file.bytes for file in files) // RUN_BYTES)
        for number in range(ranges):
            begin, end = HASHES * number // ranges, HASHES * (number + 1) // ranges
            frames = [
                rows
                for file, its in zip(files, blocks, strict=True)
                for some in _portions(file, its.between(begin, end))
                for rows in [self._range(file, some, begin, end)]
            ]
            rows = pl.concat([self._hashed_schema().to_frame(), *frames])
            if not rows.is_empty():
                rows = rows.unique(self.key, keep="first", maintain_order=True).sort(HASH, *self.key)
                self._write(kind, encode_run(rows), written)

    def _range(self, file: RowFile, blocks: Sequence[int], begin: int, end: int) -> pl.DataFrame:
        """The rows of these blocks whose hashes lie in [begin, end)."""
        columns = self._hashed_schema().names() if file.level else self.schema.names()
        rows = self._read(file, partial(read_blocks, blocks=blocks, columns=columns))
        rows = rows if file.level else hashed(rows, self.key[0])
        return rows.select(self._hashed_schema().names()).filter(pl.col(HASH).is_between(begin, end - 1))

    def _hashed_schema(self) -> pl.Schema:
        return pl.Schema({HASH: pl.UInt64(), **self.schema})


def _portions(file: RowFile, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    """The blocks to read at a time; a chunk is read as a whole."""
    size = BLOCKS_READ if file.level else max(1, len(blocks))
    return (blocks[at : at + size] for at in range(0, len(blocks), size))
