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
from toolformer_dag.identity import compute_content_hash
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.session import NewRowFile, get_current_session
from toolformer_dag.lake.storage import CheckedFile, RunInBackground, Storage

log = logging.getLogger(__name__)
IDENTITY_FILE_NAME = "identity.json"
"""The file of a row store that says what determines its values."""
MERGE_LOCK_NAME = ".merge.lock"
"""The lock of the process that merges files."""
MAX_ATTEMPTS = 20
"""How often files are looked up, or listed, again where others merge them meanwhile."""
MERGE_AT = 64
"""From how many small files on they are merged into one."""
MAX_LISTED_FILES = 900
"""The most files that an object store lists in one answer, with a margin."""
FULL_FILE_BYTES = 2**24
"""A file of this size is not merged any more. A merge takes the oldest files up to there: less than twice as much."""
ROW_FILE_NAME_PATTERN = re.compile(
    r"([0-9a-f]{16})-(?:(?:chunk|merged|run[1-9][0-9]*)-)?([0-9a-f]{32})-([0-9]+)\.parquet"
)
"""The name of a file: time, hash and size. Earlier releases named the kind of a file too."""


@dataclass(frozen=True, slots=True, order=True)
class RowFile:
    """A file of a row store. Files sort by age.

    Attributes:
        written_ns: When its oldest rows were written, in nanoseconds since 1970.
        hash: The hash of its content.
        size_bytes: The size of its content in bytes.
        name: The file name, which holds all of this.
    """

    written_ns: int
    hash: str
    size_bytes: int
    name: str


def parse_row_file_name(file_name: str) -> RowFile | None:
    """Parse the name of a file of rows, `<time in hexadecimal>-<hash>-<size in bytes>.parquet`.

    Returns:
        None if it is the name of any other file.
    """
    match = ROW_FILE_NAME_PATTERN.fullmatch(file_name)
    if match is None:
        return None
    return RowFile(written_ns=int(match[1], 16), hash=match[2], size_bytes=int(match[3]), name=file_name)


class RowStore:
    """Rows that are computed once, looked up by a key, in append-only Parquet files. `Lake.open_row_store` opens one.

    Example:
        missing_keys = store.find_missing_keys(keys)  # their rows have to be computed
        store.append_rows(computed_rows)
        rows = store.read_stored_rows(keys)

    Attributes:
        storage: The folder or object store that holds the files.
        name: The path of the store in the lake. Its last part is a fingerprint of what determines the rows.
        folder: The folder of the files.
        key_columns: The columns by which rows are looked up, the first ones of `schema`.
        schema: All columns with their types.
        damage_notes: Which damaged files this object has set aside, and why, in words. It grows while rows are read.
    """

    def __init__(self, storage: Storage, name: str, key_columns: Sequence[str], schema: pl.Schema) -> None:
        self.storage = storage
        self.name = name
        self.folder = storage.root / name
        self.key_columns = list(key_columns)
        self.schema = schema
        self.damage_notes: list[str] = []

    def find_missing_keys(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the keys that have no stored row, each once, in their order.

        Args:
            keys: The keys to look up. Other columns than the key columns are ignored.

        Raises:
            StorageError: The rows cannot be read.
        """
        requested_keys = keys.select(self.key_columns).unique(maintain_order=True)
        stored_keys = self._read_rows_with_retries(requested_keys, self.key_columns)
        return requested_keys.join(stored_keys, on=self.key_columns, how="anti", maintain_order="left")

    def read_stored_rows(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the stored rows of some keys, one per key, in no particular order.

        Args:
            keys: The keys to look up. Keys without a stored row are left out of the result.

        Raises:
            StorageError: The rows cannot be read.
        """
        requested_keys = keys.select(self.key_columns).unique()
        return self._read_rows_with_retries(requested_keys, self.schema.names())

    def append_rows(self, rows: pl.DataFrame) -> None:
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

        self._write_file(rows, written_ns=time.time_ns())

        if len(self._list_small_files()) >= MERGE_AT:
            self._merge_small_files()

    def list_files(self) -> list[RowFile]:
        """Return the files of the store, the oldest first."""
        row_files = (parse_row_file_name(name) for name in self.storage.list_file_names(self.folder))
        return sorted(row_file for row_file in row_files if row_file is not None)

    def iter_checked_files(self, changed_since_ns: int = 0) -> Iterator[CheckedFile]:
        """Check every file of the store. Files that another process merges meanwhile are left out.

        Args:
            changed_since_ns: A time in nanoseconds since 1970. If a file has not changed since then, only its size
                is compared.

        Yields:
            Each file, with what is wrong with it or None.
        """
        for row_file in self.list_files():
            path = self.folder / row_file.name
            damage = self.storage.find_damage(
                str(path),
                size_bytes=row_file.size_bytes,
                expected_hash=row_file.hash,
                changed_since_ns=changed_since_ns,
                row_store_name=self.name,
            )
            was_merged_away = damage is not None and not self.storage.exists(path)
            if not was_merged_away:
                yield CheckedFile(path, row_file.size_bytes, damage)

    def _read_rows_with_retries(self, keys: pl.DataFrame, column_names: Sequence[str]) -> pl.DataFrame:
        """Read the rows that are stored under some keys. If several files have a key, the oldest file counts.

        If another process merges files meanwhile, this starts again with the new files.

        Args:
            keys: The keys, in the key columns.
            column_names: The columns to return.

        Raises:
            StorageError: Other processes merged files during each of MAX_ATTEMPTS attempts.
        """
        for _ in range(MAX_ATTEMPTS):
            paths = self._find_readable_paths(self._list_cached_files())
            if paths is not None:  # None: a file is gone
                with suppress(FileNotFoundError):  # a file was merged into another one since it was listed
                    return self._read_rows_from_files(paths, keys, column_names)

            # The session's list of files is out of date.
            self.forget_listed_files()

        raise StorageError(
            f"{self.storage.format_location(self.folder)}: others merge its files all the time; run again"
        )

    def _read_rows_from_files(
        self, paths: Sequence[Path], keys: pl.DataFrame, column_names: Sequence[str]
    ) -> pl.DataFrame:
        """Read the rows with some keys from Parquet files. If several files have a key, the first one counts.

        Args:
            paths: The files.
            keys: The keys, in the key columns.
            column_names: The columns to return.

        Raises:
            FileNotFoundError: A file is gone.
        """
        # First select by the first key column alone, which leaves few rows to compare with whole keys.
        first_key_values = keys[self.key_columns[0]].unique()
        candidate_rows = self._scan_files(paths, first_key_values, column_names)

        rows = candidate_rows.join(keys, on=self.key_columns, how="semi", maintain_order="left")
        return rows.unique(self.key_columns, keep="first", maintain_order=True)

    def _scan_files(
        self, paths: Sequence[Path], first_key_values: pl.Series, column_names: Sequence[str]
    ) -> pl.DataFrame:
        """Read the rows whose first key column has one of some values, from all files, in the order of the files.

        Args:
            paths: The Parquet files.
            first_key_values: The values.
            column_names: The columns to return.
        """
        has_requested_value = pl.col(self.key_columns[0]).is_in(first_key_values.implode())

        # Begin with a frame without rows, because there may be no file.
        empty_rows = self.schema.to_frame().lazy()
        scans = [empty_rows.select(column_names)]
        for path in paths:
            scan = pl.scan_parquet(path, glob=False)
            scans.append(scan.select(column_names).filter(has_requested_value))

        return pl.concat(scans).collect(engine="streaming")

    def _merge_small_files(self) -> None:
        """Merge the oldest small files, so that a lookup has to open few files.

        Nothing happens if another process is merging.
        """
        with self.storage.hold_lock(self.folder / MERGE_LOCK_NAME, blocking=False) as is_alone:
            if not is_alone:
                return

            # List the files again: another process may have merged them before the lock was taken.
            small_files = self._list_small_files()
            if len(small_files) >= MERGE_AT:
                self._merge_files(_select_files_to_merge(small_files))

    def _merge_files(self, row_files: Sequence[RowFile]) -> None:
        """Replace files by a single one with all their rows, one per key.

        Nothing happens if one of the files is gone or damaged.

        Args:
            row_files: The files, the oldest first. The caller holds the lock.
        """
        paths = self._find_readable_paths(row_files)
        self.forget_listed_files()  # the next lookup of this session lists the files again
        if paths is None:
            return

        # The merged file has to be written before the others are removed.
        merged_name = self._write_file(self._read_oldest_rows(paths), written_ns=row_files[0].written_ns)
        self._wait_for_writes()

        # If the other files have no row that the first one lacks, the merged file has the same time and hash, and so
        # the same name, as the first one. Then that file must not be removed.
        replaced_paths = [self.folder / row_file.name for row_file in row_files if row_file.name != merged_name]
        self.storage.remove(*replaced_paths)

    def _read_oldest_rows(self, paths: Sequence[Path]) -> pl.DataFrame:
        """Return the rows of Parquet files, one per key. If several files have a key, the first file counts."""
        rows = pl.concat(pl.read_parquet(path, columns=self.schema.names()) for path in paths)
        return rows.unique(self.key_columns, keep="first", maintain_order=True)

    def _write_file(self, rows: pl.DataFrame, written_ns: int) -> str:
        """Write rows to a new file.

        Args:
            rows: The rows.
            written_ns: When the oldest of them were computed, in nanoseconds since 1970. It goes into the file name.

        Returns:
            The name of the file.
        """
        content = parquet.encode_rows(rows, self.name)
        file_name = f"{written_ns:016x}-{compute_content_hash(content)}-{len(content)}.parquet"

        self.storage.write_new_file(self.folder / file_name, content, _get_background_writer())
        self.add_listed_file(file_name)
        self._report_new_file(file_name)
        return file_name

    def _report_new_file(self, file_name: str) -> None:
        """In a worker process, note a new file for the report to the leading process. Elsewhere nothing happens."""
        open_session = get_current_session()
        if open_session and open_session.unsent_news is not None:
            open_session.unsent_news.append(NewRowFile(store_name=self.name, file_name=file_name))

    def _find_readable_paths(self, row_files: Collection[RowFile]) -> list[Path] | None:
        """Find the paths of files, making sure that each can be opened.

        Returns:
            The paths, or None if a file was merged away, or was damaged and is now set aside.
        """
        paths = []
        for row_file in row_files:
            with suppress(UnreadableFile):  # go on, so that all damaged files are set aside
                paths.append(self._fetch_readable_path(row_file))

        all_are_readable = len(paths) == len(row_files)
        return paths if all_are_readable else None

    def _fetch_readable_path(self, row_file: RowFile) -> Path:
        """Return the path of a file on this machine, after its content was checked.

        Raises:
            UnreadableFile: The file is missing or damaged. A damaged file is set aside.
        """
        path = self.folder / row_file.name
        try:
            path = self.storage.fetch(path, row_file.size_bytes, row_file.hash, self.name)
            parquet.verify_file(path, row_file.size_bytes, row_file.hash, self.name)
        except UnreadableFile as error:
            if self.storage.exists(path):
                self._set_aside(path, error)
            raise
        return path

    def _set_aside(self, path: Path, error: UnreadableFile) -> None:
        """Rename a damaged file, so that its rows count as missing, and note it in `damage_notes`."""
        note = f"{self.storage.format_location(path)} {error}; set aside, its rows are computed again"
        log.warning(note)
        self.damage_notes.append(note)
        self.storage.set_aside(path)

    def _list_cached_files(self) -> list[RowFile]:
        """Return the files, the oldest first. A session lists them once, and adds the files that it writes."""
        open_session = get_current_session()
        if open_session is None:
            return sorted(self._list_settled_files())
        return sorted(open_session.get_or_compute(self._files_cache_key, self._list_settled_files))

    def add_listed_file(self, file_name: str) -> None:
        """Add a new file to the list of files that the session remembers, if it has listed them already."""
        open_session = get_current_session()
        row_file = parse_row_file_name(file_name)
        if open_session and row_file:
            listed_files = open_session.cache_by_place.get(self._files_cache_key, set())
            listed_files.add(row_file)

    def forget_listed_files(self) -> None:
        """Let the session list the files again at the next lookup."""
        open_session = get_current_session()
        if open_session:
            open_session.cache_by_place.pop(self._files_cache_key, None)

    def _list_small_files(self) -> list[RowFile]:
        """Return the files that may still be merged, the oldest first."""
        return [file for file in self._list_cached_files() if file.size_bytes < FULL_FILE_BYTES]

    def _list_settled_files(self) -> set[RowFile]:
        """List the files of the folder again and again until two lists agree.

        Other processes may merge files while they are being listed. After MAX_ATTEMPTS lists, the last one counts.
        """
        # Files that this session is still writing would be missing.
        self._wait_for_writes()
        row_files = self.list_files()

        # Some object stores list so many files as they are at one moment. Then one list is enough.
        is_listed_at_one_moment = self.storage.lists_atomically and len(row_files) < MAX_LISTED_FILES
        if is_listed_at_one_moment:
            return set(row_files)

        for _ in range(MAX_ATTEMPTS):
            previous_files = row_files
            row_files = self.list_files()
            if row_files == previous_files:
                break
        return set(row_files)

    def _wait_for_writes(self) -> None:
        """Wait until the session has written its files of rows."""
        open_session = get_current_session()
        if open_session:
            open_session.settle(in_order=True)

    @property
    def _files_cache_key(self) -> str:
        """The key in `LakeSession.cache_by_place` under which the session remembers the set of listed files."""
        return f"{self.storage.format_location(self.folder)} files"


def _get_background_writer() -> RunInBackground | None:
    """Return a function that runs a write in the background, in the order of the calls, or None outside a batch."""
    open_session = get_current_session()
    if open_session is None or not open_session.is_batching:
        return None
    return partial(open_session.write_in_background, in_order=True)


def _select_files_to_merge(row_files: Sequence[RowFile]) -> list[RowFile]:
    """Take files from the beginning until together they have FULL_FILE_BYTES.

    The file that reaches this size is included.
    """
    selected_files: list[RowFile] = []
    total_bytes = 0
    for row_file in row_files:
        if total_bytes >= FULL_FILE_BYTES:
            break
        selected_files.append(row_file)
        total_bytes += row_file.size_bytes
    return selected_files
