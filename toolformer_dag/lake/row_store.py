"""Row stores: rows that are computed once, in append-only Parquet files under one fingerprint, looked up by key.

    <rows>/<fingerprint>/identity.json   what determines the values
    <rows>/<fingerprint>/<file>.parquet  the rows of a commit, or of many

A file is named by when it was written, the hash of its content and its size. MERGE_AT small files are merged into one;
full ones stay. A lookup scans the first key column of every file. Each file's hash is compared once per process, and so
is the row store that the file says it was written for.

- A killed writer loses what it had not appended.
- Two writers may compute the same row: the older file counts.
- A damaged file is set aside (`.damaged`), and its rows count as missing.
- A file is deleted only after one with all its rows is on the disk, so a reader that misses a file finds its rows under
  another name.

In a session (see session.py) the files are listed once; files that are written in it are noted.
"""

import logging
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl

from toolformer_dag.files import StorageError
from toolformer_dag.identity import content_hash
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.session import NewRowFile, get_current_session
from toolformer_dag.lake.storage import CheckedFile, Later, Storage

log = logging.getLogger(__name__)
IDENTITY = "identity.json"
"""The file of a row store that says what determines its values."""
LOCK = ".merge.lock"
"""The lock of the process that merges files."""
MOST_TRIES = 20
"""How often files are looked up, or listed, again where others merge them meanwhile."""
MERGE_AT = 64
"""From how many small files on they are merged into one."""
LISTED_AT_ONCE = 900
"""Files that a store tells in one answer."""
FULL_BYTES = 2**24
"""A file of this size is not merged any more. A merge takes the oldest files up to there: less than twice as much."""
NAME = re.compile(r"([0-9a-f]{16})-(?:(?:chunk|merged|run[1-9][0-9]*)-)?([0-9a-f]{32})-([0-9]+)\.parquet")
"""The name of a file: time, hash and size. Earlier releases named the kind of a file too."""


@dataclass(frozen=True, slots=True, order=True)
class RowFile:
    """A file of rows. Files sort by age.

    - `written`: when its oldest rows were, in nanoseconds since 1970
    - `hash`, `bytes`: of its content
    """

    written: int
    hash: str
    bytes: int
    name: str


def parse_row_file(name: str) -> RowFile | None:
    """Parse the name of a file of rows; return None for any other file."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    return RowFile(written=int(match[1], 16), hash=match[2], bytes=int(match[3]), name=name)


class RowStore:
    """The rows of one fingerprint: a key, and what was computed under it.

    `Lake.rows` opens one. `key` are the first columns of `schema`.

        missing = store.missing(keys)        # these have to be computed
        store.append(computed)               # commits them
        rows = store.stored(keys)

    - `name`: its path in the lake
    - `damaged`: what this object has set aside, and why, in words; it grows while rows are read
    """

    def __init__(self, storage: Storage, name: str, key: Sequence[str], schema: pl.Schema) -> None:
        self.storage = storage
        self.name = name
        self.folder = storage.root / name
        self.key = list(key)
        self.schema = schema
        self.damaged: list[str] = []

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the keys that have no stored row, in their order, each once. keys: at least the key columns."""
        requested = keys.select(self.key).unique(maintain_order=True)
        stored = self._read_rows_with_retries(requested, self.key)
        return requested.join(stored, on=self.key, how="anti", maintain_order="left")

    def stored(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows stored under `keys`, one per key, in no particular order; keys without a row are left out."""
        return self._read_rows_with_retries(keys.select(self.key).unique(), self.schema.names())

    def append(self, rows: pl.DataFrame) -> None:
        """Store rows. If there are many small files by then, they are merged into one.

        The rows are on the disk when this returns. In a batch over an object store, they are uploaded in the
        background.

        Raises:
            WriteError: The rows cannot be written.
            ValueError: The rows have another schema than the store.
        """
        if rows.schema != self.schema:
            raise ValueError(f"{self.folder}: rows have {rows.schema}, the store has {self.schema}")
        if rows.is_empty():
            return

        self._write(rows, written=time.time_ns())

        if len(self._list_small_files()) >= MERGE_AT:
            self._merge()

    def files(self) -> list[RowFile]:
        """Return the files that are there, the oldest first."""
        row_files = (parse_row_file(name) for name in self.storage.names(self.folder))
        return sorted(file for file in row_files if file is not None)

    def checked_files(self, since: int = 0) -> Iterator[CheckedFile]:
        """Check every file of the store. Files that another process merges meanwhile are left out.

        Args:
            since: A time in nanoseconds since 1970. Only the size is compared of files that have not changed
                since then.

        Yields:
            Each file, with what is wrong with it.
        """
        for file in self.files():
            path = self.folder / file.name
            reason = self.storage.damage(str(path), size=file.bytes, digest=file.hash, since=since, owner=self.name)
            was_merged_away = reason is not None and not self.storage.exists(path)
            if not was_merged_away:
                yield CheckedFile(path, file.bytes, reason)

    def _read_rows_with_retries(self, keys: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """Read the rows that are stored under some keys. If several files have a key, the oldest file counts.

        If another process merges files meanwhile, this starts again with the new files.

        Args:
            keys: The keys, in the key columns.
            columns: The columns to return.

        Raises:
            StorageError: Others merged files during each of MOST_TRIES attempts.
        """
        for _ in range(MOST_TRIES):
            paths = self._find_readable_paths(self._list_held_files())
            try:
                if paths is not None:  # None: a file is gone
                    return self._read_rows(paths, keys, columns)
            except FileNotFoundError:  # a file was merged into another one since its path was read
                pass

            # The files that the session has listed are not all there any more.
            self.refresh()
        raise StorageError(f"{self.storage.shown(self.folder)}: others merge its files all the time; run again")

    def _read_rows(self, paths: Sequence[Path], keys: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """Read the rows with some keys from Parquet files. If several files have a key, the first one counts.

        Args:
            paths: The files.
            keys: The keys, in the key columns.
            columns: The columns to return.

        Raises:
            FileNotFoundError: A file is gone.
        """
        # Read candidates by the first key column alone, which leaves few rows to compare with whole keys.
        first_key_values = keys[self.key[0]].unique()
        candidates = self._scan(paths, first_key_values, columns)

        rows = candidates.join(keys, on=self.key, how="semi", maintain_order="left")
        return rows.unique(self.key, keep="first", maintain_order=True)

    def _scan(self, paths: Sequence[Path], first_key_values: pl.Series, columns: Sequence[str]) -> pl.DataFrame:
        """Read the rows whose first key column has one of some values.

        Args:
            paths: The Parquet files.
            first_key_values: The values.
            columns: The columns to return.
        """
        has_value = pl.col(self.key[0]).is_in(first_key_values.implode())

        without_rows = self.schema.to_frame().lazy()  # there may be no file
        scans = [without_rows.select(columns)]
        for path in paths:
            scan = pl.scan_parquet(path, glob=False)
            scans.append(scan.select(columns).filter(has_value))

        return pl.concat(scans).collect(engine="streaming")

    def _merge(self) -> None:
        """Merge the oldest small files, so that a lookup has to open few files.

        Nothing happens if another process is merging.
        """
        with self.storage.alone(self.folder / LOCK, wait=False) as is_alone:
            if not is_alone:
                return

            # List the files again: another process may have merged them before the lock was taken.
            small_files = self._list_small_files()
            if len(small_files) >= MERGE_AT:
                self._merge_files(_select_up_to_full(small_files))

    def _merge_files(self, files: Sequence[RowFile]) -> None:
        """Replace files by a single one with all their rows, one per key.

        Nothing happens if one of the files is gone or damaged.

        Args:
            files: The files, the oldest first. The caller holds the lock.
        """
        paths = self._find_readable_paths(files)
        self.refresh()  # the next lookup of this session lists the files again
        if paths is None:
            return

        merged_name = self._write(self._read_oldest_rows(paths), written=files[0].written)
        # The merged file has to be there before the others are removed.
        self._finish_writes()

        # A name is made of time and hash: where the other files have no row that the first lacks, the merged file has
        # the name of the first, and is not removed.
        replaced = [self.folder / file.name for file in files if file.name != merged_name]
        self.storage.remove(*replaced)

    def _read_oldest_rows(self, paths: Sequence[Path]) -> pl.DataFrame:
        """Return the rows of Parquet files, a row per key; where several files have a key, the first counts."""
        rows = pl.concat(pl.read_parquet(path, columns=self.schema.names()) for path in paths)
        return rows.unique(self.key, keep="first", maintain_order=True)

    def _write(self, rows: pl.DataFrame, written: int) -> str:
        """Write rows to a new file.

        Args:
            rows: The rows.
            written: When the oldest of them were computed, in nanoseconds since 1970. It goes into the file name.

        Returns:
            The name of the file.
        """
        content = parquet.encode(rows, self.name)
        name = f"{written:016x}-{content_hash(content)}-{len(content)}.parquet"

        self.storage.add(self.folder / name, content, _get_background_writer())
        self.note(name)
        self._tell_leading_process(name)
        return name

    def _tell_leading_process(self, name: str) -> None:
        """Let a worker process report a file that it has written; nothing elsewhere."""
        open_session = get_current_session()
        if open_session and open_session.news is not None:
            open_session.news.append(NewRowFile(store=self.name, file=name))

    def _find_readable_paths(self, files: Collection[RowFile]) -> list[Path] | None:
        """Find the paths of files, making sure that each can be opened.

        Returns:
            The paths, or None if a file was merged away, or was damaged and is now set aside.
        """
        paths = []
        for file in files:
            with suppress(UnreadableFile):
                paths.append(self._fetch_readable_path(file))
        return paths if len(paths) == len(files) else None

    def _fetch_readable_path(self, file: RowFile) -> Path:
        """Return the path of a file on this machine, after its content was checked.

        Raises:
            UnreadableFile: The file is missing or damaged. A damaged file is set aside.
        """
        path = self.folder / file.name
        try:
            path = self.storage.fetch(path, file.bytes, file.hash, self.name)
            parquet.verify(path, file.bytes, file.hash, self.name)
        except UnreadableFile as error:
            if self.storage.exists(path):
                self._set_aside(path, error)
            raise
        return path

    def _set_aside(self, path: Path, error: UnreadableFile) -> None:
        """Rename a damaged file, so that its rows count as missing, and note it in `damaged`."""
        note = f"{self.storage.shown(path)} {error}; set aside, its rows are computed again"
        log.warning(note)
        self.damaged.append(note)
        self.storage.set_aside(path)

    def _list_held_files(self) -> list[RowFile]:
        """Return the files by age; a session lists them once and adds what is written in it."""
        open_session = get_current_session()
        if open_session is None:
            return sorted(self._list_settled_files())
        return sorted(open_session.once(self._held_key, self._list_settled_files))

    def note(self, name: str) -> None:
        """Add a file that was written to those that the session has listed; nothing where it has not listed them."""
        open_session = get_current_session()
        file = parse_row_file(name)
        if open_session and file:
            open_session.held.get(self._held_key, set()).add(file)

    def refresh(self) -> None:
        """Let the session list the files again at the next lookup."""
        open_session = get_current_session()
        if open_session:
            open_session.held.pop(self._held_key, None)

    def _list_small_files(self) -> list[RowFile]:
        """Return the files that may still be merged, the oldest first."""
        return [file for file in self._list_held_files() if file.bytes < FULL_BYTES]

    def _list_settled_files(self) -> set[RowFile]:
        """List the files of the folder again and again until two lists agree.

        Others may merge files while they are being listed. After MOST_TRIES lists, the last one counts.
        """
        # Files that this session is still writing would be missing.
        self._finish_writes()
        files = self.files()

        # One request lists all files as they are at one moment, so that one list is enough.
        is_listed_at_one_moment = self.storage.lists_at_once and len(files) < LISTED_AT_ONCE
        if is_listed_at_one_moment:
            return set(files)

        for _ in range(MOST_TRIES):
            files_before = files
            files = self.files()
            if files == files_before:
                break
        return set(files)

    def _finish_writes(self) -> None:
        """Wait until the session has written its files of rows."""
        open_session = get_current_session()
        if open_session:
            open_session.settle(in_order=True)

    @property
    def _held_key(self) -> str:
        """The key in `LakeSession.held` of the files that the session has listed, a set of RowFile."""
        return f"{self.storage.shown(self.folder)} files"


def _get_background_writer() -> Later | None:
    """Return what runs a write in the background, first in, first out; None outside a batch."""
    open_session = get_current_session()
    if open_session is None or not open_session.batching:
        return None
    return partial(open_session.later, in_order=True)


def _select_up_to_full(files: Sequence[RowFile]) -> list[RowFile]:
    """Take files from the beginning until they have FULL_BYTES together.

    The file that reaches this size is included.
    """
    chosen: list[RowFile] = []
    total_bytes = 0
    for file in files:
        if total_bytes >= FULL_BYTES:
            break
        chosen.append(file)
        total_bytes += file.bytes
    return chosen
