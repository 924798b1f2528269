"""Rows that are computed once: append-only Parquet files under one fingerprint, looked up by key.

    <rows>/<fingerprint>/identity.json   what determines the values
    <rows>/<fingerprint>/<file>.parquet  the rows of a commit, or of many

A file is named by when it was written, the hash of its content and its size. 64 small files are put into one; full ones
stay. A lookup scans the first key column of every file; a file's hash is compared once per process, and its store: the
file says for which it was written.

A killed writer loses what it had not appended. Two writers may compute the same row: the older file counts. A damaged
file is set aside (`.damaged`), and its rows count as missing. A file is deleted only after one with all its rows is on
the disk, so a reader that misses a file finds its rows under another name.
"""

import logging
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import polars as pl

from toolformer_dag.files import StorageError
from toolformer_dag.identity import content_hash
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.session import current
from toolformer_dag.lake.storage import CheckedFile, Storage

log = logging.getLogger(__name__)
IDENTITY, LOCK = "identity.json", ".merge.lock"
LOOKS = 20
"""How often a lookup looks again where files are merged away under it."""
MERGE_AT = 64
"""Small files that are put into one."""
LISTED_AT_ONCE = 900
"""Files that a store tells in one answer."""
FULL_BYTES = 2**24
"""A file of this size is not merged any more. A merge takes the oldest files up to there: less than twice as much."""
NAME = re.compile(r"([0-9a-f]{16})-(?:(?:chunk|merged|run[1-9][0-9]*)-)?([0-9a-f]{32})-([0-9]+)\.parquet")
"""Earlier releases named the kind of a file too."""


@dataclass(frozen=True, slots=True, order=True)
class RowFile:
    """A file by its age in nanoseconds since 1970, the hash of its content and its size. Files sort by age."""

    written: int
    hash: str
    bytes: int
    name: str


def parse_row_file(name: str) -> RowFile | None:
    """Read the name of a file of rows; None for any other file."""
    match = NAME.fullmatch(name)
    return RowFile(int(match[1], 16), match[2], int(match[3]), name) if match else None


class RowStore:
    """The rows of one fingerprint. `name`: their path in the lake; `damaged`: what this object set aside, and why."""

    def __init__(self, storage: Storage, name: str, key: Sequence[str], schema: pl.Schema) -> None:
        self.storage, self.folder, self.name = storage, storage.root / name, name
        self.key, self.schema = list(key), schema
        self.damaged: list[str] = []

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return those of `keys` (at least the key columns) that are not stored, in their order, each once."""
        asked = keys.select(self.key).unique(maintain_order=True)
        return asked.join(self._rows(asked, self.key), on=self.key, how="anti", maintain_order="left")

    def stored(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows stored under `keys`, one per key, in no particular order."""
        return self._rows(keys.select(self.key).unique(), self.schema.names())

    def append(self, rows: pl.DataFrame) -> None:
        """Commit a chunk: it is on the disk when this returns. Raises WriteError, ValueError for another schema.

        In a batch an object store gets it soon, after the chunks before it and before a manifest is written.
        """
        if rows.schema != self.schema:
            raise ValueError(f"{self.folder}: rows have {rows.schema}, the store has {self.schema}")
        if not rows.is_empty():
            self._write(rows, time.time_ns())
            if len(self._small()) >= MERGE_AT:
                self._merge()

    def files(self) -> list[RowFile]:
        """Return the files that are there, the oldest first."""
        return sorted(filter(None, map(parse_row_file, self.storage.names(self.folder))))

    def checked_files(self, since: int = 0) -> Iterator[CheckedFile]:
        """Read the files that changed `since` then; set nothing aside.

        A file that is gone meanwhile was merged into another.
        """
        for file in self.files():
            path = self.folder / file.name
            reason = self.storage.damage(str(path), file.bytes, file.hash, since, self.name)
            if reason is None or self.storage.exists(path):
                yield CheckedFile(path, file.bytes, reason)

    def _rows(self, keys: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """The rows under `keys`, of each key the oldest. Raises StorageError where others merge all the time."""
        first, empty = self.key[0], self.schema.to_frame().lazy().select(columns)
        asked = pl.col(first).is_in(keys[first].unique().implode())
        for _ in range(LOOKS):
            paths = self._readable(self._held())
            if paths is not None:
                scans = [pl.scan_parquet(path, glob=False).select(columns).filter(asked) for path in paths]
                with suppress(FileNotFoundError):  # merged away since
                    scanned = pl.concat([empty, *scans]).collect(engine="streaming")
                    rows = scanned.join(keys, on=self.key, how="semi", maintain_order="left")
                    return rows.unique(self.key, keep="first", maintain_order=True)
            self.refresh()
        raise StorageError(f"{self.storage.shown(self.folder)}: others merge its files all the time; run again")

    def _merge(self) -> None:
        """Put one file in the place of many small ones; one process at a time."""
        with self.storage.alone(self.folder / LOCK, wait=False) as mine:
            files = self._small() if mine else []
            if len(files) < MERGE_AT:
                return
            ends = accumulate(file.bytes for file in files)
            files = [file for file, end in zip(files, ends, strict=True) if end - file.bytes < FULL_BYTES]
            paths = self._readable(files)
            self.refresh()
            if paths is None:
                return
            rows = pl.concat(pl.read_parquet(path, columns=self.schema.names()) for path in paths)
            merged = self._write(rows.unique(self.key, keep="first", maintain_order=True), files[0].written)
            self._settle()
            gone = {file.name for file in files} - {merged}  # it is among them where the others repeat its rows
            self.storage.remove(*(self.folder / name for name in gone))

    def _write(self, rows: pl.DataFrame, written: int) -> str:
        content = parquet.encode(rows, self.name)
        name = f"{written:016x}-{content_hash(content)}-{len(content)}.parquet"
        around = current()
        beside = partial(around.later, in_order=True) if around and around.batching else None
        self.storage.add(self.folder / name, content, beside)
        self.note(name)
        if around and around.news is not None:
            around.news.append((self.name, name))
        return name

    def _readable(self, files: Collection[RowFile]) -> list[Path] | None:
        """The paths of the files; None where one was merged away, or is damaged and set aside by now."""
        paths = []
        for file in files:
            with suppress(UnreadableFile):
                paths.append(self._opened(file))
        return paths if len(paths) == len(files) else None

    def _opened(self, file: RowFile) -> Path:
        """Return a file to scan. Raises UnreadableFile, after setting it aside where it is damaged."""
        path = self.folder / file.name
        try:
            path = self.storage.fetch(path, file.bytes, file.hash, self.name)
            parquet.verify(path, file.bytes, file.hash, self.name)
        except UnreadableFile as error:
            if self.storage.exists(path):
                note = f"{self.storage.shown(path)} {error}; set aside, its rows are computed again"
                log.warning(note)
                self.damaged.append(note)
                self.storage.set_aside(path)
            raise
        return path

    def _held(self) -> list[RowFile]:
        """The files by age; in a session those at its beginning, and those noted in it since."""
        around = current()
        return sorted(around.once(self._place, self._listed) if around else self._listed())

    def note(self, name: str) -> None:
        """Let the session know of a file that was written in it."""
        around, made = current(), parse_row_file(name)
        if around and made:
            around.held.get(self._place, set()).add(made)

    def refresh(self) -> None:
        """Let a session list the files again at the next lookup."""
        if around := current():
            around.held.pop(self._place, None)

    def _small(self) -> list[RowFile]:
        return [file for file in self._held() if file.bytes < FULL_BYTES]

    def _listed(self) -> set[RowFile]:
        """The same as `files`; listed until two listings agree, since a merge may end while a folder is read."""
        self._settle()
        there = self.files()
        for _ in range(0 if self.storage.lists_at_once and len(there) < LISTED_AT_ONCE else LOOKS):
            before, there = there, self.files()
            if there == before:
                break
        return set(there)

    def _settle(self) -> None:
        """Wait for the files that the session has not uploaded yet."""
        if around := current():
            around.settle(in_order=True)

    @property
    def _place(self) -> str:
        return f"{self.storage.shown(self.folder)} files"
