"""Where the files of a lake lie: what tables, row stores, `clean` and `verify` ask of a folder or an object store.

A file is named by its path below `root`. Files are of two kinds:

- Most never change (Parquet files): `write_new_file`, `fetch`, `download_missing_files`, `check_size`, `find_damage`.
  Their size and hash stand in a manifest or in their name, and are known before they are read.
- Small files are replaced as a whole: `read` and `replace`, `manifest` and `replace_manifest`, `mark`. `Version` tells
  which content was read, so that a writer notices who was faster.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from stat import S_ISREG
from typing import NamedTuple

from toolformer_dag.files import (
    StorageError,
    WriteError,
    encode_file_name,
    hold_file_lock,
    require_regular_file,
    write_file_atomically,
)
from toolformer_dag.lake import parquet
from toolformer_dag.processes import is_process_running

DAMAGED_SUFFIX = ".damaged"
"""The end of the name of a file that was set aside."""
PARTS_FOLDER = "files"
"""The folder of a table that has a folder of each part."""
CLAIMS_FOLDER = "lake-claims"
"""The folder of the claims that runs hold (`Storage.hold_claim`); the hyphen keeps it apart from the lanes."""

RunInBackground = Callable[[Callable[[], None]], None]
"""Takes a write and does it in the background, as `LakeSession.write_in_background` does."""


class WriteConflict(StorageError):
    """A small file was replaced by another writer since it was read."""

    def __init__(self, file_location: str) -> None:
        super().__init__(f"{file_location} was replaced by another run; run again")


@dataclass(frozen=True, slots=True)
class Version:
    """Identifies a content of a small file, so that a writer can notice that the file has changed since it was read.

    Attributes:
        e_tag: In an object store, the tag of the content. In a folder, the first line of a manifest, which has a hash
            of its other lines.
        version_number: The number of the version, in object stores that count versions.
    """

    e_tag: str | None = None
    version_number: str | None = None


NO_FILE_VERSION = Version()
"""The version of a file that does not exist. In a folder, also the version of every file that is no manifest."""


class FileToFetch(NamedTuple):
    """A file to download, which never changes.

    Attributes:
        path: The path of its copy on this machine.
        size_bytes: Its size in bytes.
        hash: The hash of its content.
    """

    path: Path
    size_bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that exists in the lake.

    Attributes:
        path: Its path. For an object, the path of its copy on this machine.
        size_bytes: Its size in bytes.
        modified_timestamp: When it was written, in seconds since 1970 by the clock of the disk or store.
    """

    path: Path
    size_bytes: int
    modified_timestamp: float


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """The result of checking a file for damage.

    Attributes:
        path: The path of the file.
        size_bytes: Its size in bytes.
        reason: What is wrong with the file, or None if it is as it was written.
    """

    path: Path
    size_bytes: int
    reason: str | None


class Storage:
    """The files of a lake in a folder that all processes see under the same path.

    `object_storage.ObjectStorage` has the same methods for an object store. Docstrings here say where it differs.
    Methods that write a whole file raise WriteError, in an object store ObjectStoreError. Others raise OSError.

    Attributes:
        root: The folder.
    """

    first_wins = False
    """Whether the first of two writers of a part wins, so that the second raises LostRace. Otherwise the last wins."""
    lists_atomically = False
    """Whether `list_file_names` shows up to a thousand files as they are at one moment.

    Otherwise files may be added or removed while they are listed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def require_access(self) -> None:
        """Check that the lake can be used.

        Raises:
            StorageError: There is a file in place of the folder.
        """
        if self.root.is_file():
            raise StorageError(f"{self.root} is a file; set paths.lake to a folder")

    def format_location(self, path: Path) -> str:
        """Return where a file lies, for messages to users."""
        return str(path)

    def read(self, path: Path) -> tuple[bytes, Version]:
        """Return the content of a small file and its version.

        Raises:
            FileNotFoundError: There is no such file.
            OSError: It cannot be read.
        """
        require_regular_file(path)
        return path.read_bytes(), NO_FILE_VERSION

    def replace(self, path: Path, content: bytes, expected_version: Version) -> Version:
        """Replace a small file as a whole: readers see the old content or the new one.

        Args:
            path: The path of the file.
            content: The new content.
            expected_version: The version that the caller has read. Only an object store compares it, and raises
                WriteConflict if the file has another version by now.

        Returns:
            The new version.
        """
        write_file_atomically(path, content)
        return NO_FILE_VERSION

    def manifest(self, path: Path, bypass_cache: bool = False) -> tuple[bytes, Version]:
        """Read a manifest, the list of the parts of a table.

        Args:
            path: The path of the manifest.
            bypass_cache: Not used here, where the file itself is always read. Over an object store it means the same,
                and otherwise a copy on this machine may be read.

        Returns:
            The content, and its version, which is its first line.

        Raises:
            FileNotFoundError: There is no such manifest.
            OSError: It cannot be read.
        """
        require_regular_file(path)
        content = path.read_bytes()
        return content, _parse_manifest_version(content)

    def replace_manifest(self, path: Path, content: bytes, expected_version: Version) -> Version:
        """Replace a manifest, unless another writer was faster.

        Args:
            path: The path of the manifest.
            content: The new content.
            expected_version: The version that is replaced, or NO_FILE_VERSION if there must be no manifest yet.

        Returns:
            The new version: the first line of the manifest, which has a hash of the other lines.

        Raises:
            WriteConflict: The manifest has another version by now.
        """
        with hold_file_lock(path.with_name(f".{path.name}.lock")):
            present_version = NO_FILE_VERSION
            with suppress(FileNotFoundError), path.open("rb") as stream:
                present_version = _parse_manifest_version(stream.readline())

            if present_version != expected_version:
                raise WriteConflict(self.format_location(path))
            write_file_atomically(path, content)

        return _parse_manifest_version(content)

    def mark(self, path: Path, content: bytes, run_in_background: RunInBackground | None = None) -> None:
        """Write a small file that always has the same content, or renew its time if it is there.

        A recent time shows that the file is in use.

        Args:
            path: The path of the file.
            content: Its content.
            run_in_background: Runs the write in the background. Only used over an object store.
        """
        try:
            os.utime(path)  # now
        except FileNotFoundError:
            write_file_atomically(path, content)
        except OSError as error:
            raise WriteError(path, error) from error

    def write_new_file(self, path: Path, content: bytes, run_in_background: RunInBackground | None = None) -> None:
        """Write a file that never changes. It is written completely or not at all.

        Args:
            path: The path of the file.
            content: Its content.
            run_in_background: Runs the upload in the background. Only used over an object store.
        """
        write_file_atomically(path, content)

    def fetch(self, path: Path, size_bytes: int, expected_hash: str, row_store_name: str | None = None) -> Path:
        """Return the path at which a Parquet file can be opened, which in a folder is `path` itself.

        An object store downloads the file if necessary, and checks the copy by the other arguments, which are not used
        here.

        Args:
            path: The path of the file.
            size_bytes: The size that it must have.
            expected_hash: The hash that its content must have.
            row_store_name: The row store that it must have been written for, if it is one of computed rows.

        Raises:
            UnreadableFile: Only in an object store: the file is missing or damaged.
        """
        return path

    def download_missing_files(self, files_to_fetch: Iterable[FileToFetch]) -> None:
        """Download many files at once, so that `fetch` then finds them on this machine. A folder does nothing."""

    def check_size(self, path: str, size_bytes: int) -> None:
        """Check that a Parquet file has a certain size and ends like a Parquet file.

        Raises:
            UnreadableFile: It does not, or it is missing.
        """
        parquet.check_size_and_footer(path, size_bytes)

    def find_damage(
        self, path: str, size_bytes: int, expected_hash: str, changed_since_ns: int, row_store_name: str | None = None
    ) -> str | None:
        """Check whether a Parquet file still has the content that was written.

        Args:
            path: The path of the file.
            size_bytes: The size that it must have, in bytes.
            expected_hash: The hash that its content must have.
            changed_since_ns: A time in nanoseconds since 1970. If the file has not changed since then, only its size
                is compared. An object store always reads the file.
            row_store_name: The row store that it must have been written for, if it is one of computed rows.

        Returns:
            What is wrong with the file, or None if nothing is.
        """
        return parquet.find_damage(path, size_bytes, expected_hash, changed_since_ns, row_store_name)

    def exists(self, path: Path) -> bool:
        """Return whether a file exists."""
        return path.is_file()

    def read_modified_timestamp(self, path: Path) -> float:
        """Return when a file was written, in seconds since 1970.

        Raises:
            FileNotFoundError: There is no such file.
        """
        return path.stat().st_mtime

    def list_file_names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, in no particular order."""
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []

    def iter_files(self, include_all_parts: bool = True) -> Iterator[StoredFile]:
        """Yield every file of the lake, in no particular order.

        Args:
            include_all_parts: Yield the files of every part of a table. Otherwise a folder may yield only the files
                of one part per table, which is faster and enough to find the names of all tables.
        """
        return _iter_files_below(
            str(self.root), os.path.realpath(self.root), walked_paths=set(), include_all_parts=include_all_parts
        )

    def remove(self, *paths: Path) -> None:
        """Delete files. Missing files are skipped."""
        for path in paths:
            path.unlink(missing_ok=True)

    def set_aside(self, path: Path) -> None:
        """Rename a damaged file by adding ".damaged" to its name. Nothing happens if there is no such file."""
        damaged_path = path.with_name(f"{path.name}{DAMAGED_SUFFIX}")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(damaged_path)
            damaged_path.touch()  # a new time, at which the grace period of `clean` begins

    @contextmanager
    def hold_claim(self, claim_name: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold a claim, such as that of the GPU, during the `with` block: no other run over this lake has it meanwhile.

        If runs are on several machines, their file system has to share `flock` between them, as NFS does.

        Args:
            claim_name: The name of the claim, such as "gpu".
            on_wait: Called once with who holds the claim, if this has to wait.
        """
        lock_path = self.root / CLAIMS_FOLDER / f"{encode_file_name(claim_name)}.lock"
        with ExitStack() as held_locks:
            # Take the lock if it is free.
            was_free = held_locks.enter_context(self.hold_lock(lock_path, blocking=False))

            # Otherwise say who holds it, and wait.
            if not was_free:
                on_wait(_describe_holder(lock_path))
                held_locks.enter_context(self.hold_lock(lock_path))

            _write_holder(lock_path)  # so that other processes can say for whom they wait
            yield

    def write_beside(self, write: Callable[[], None]) -> None:
        """Run a small write. An object store runs it in the background, one at a time."""
        write()

    def wait_for_background_write(self) -> None:
        """Wait for the write of `write_beside`, if an object store runs one. Raises the error of that write."""

    def hold_lock(self, lock_path: Path, blocking: bool = True) -> AbstractContextManager[bool]:
        """Hold a lock during the `with` block.

        Over an object store, the lock only holds among the processes of this machine.

        Args:
            lock_path: The lock file.
            blocking: Wait until the lock is free. Otherwise the block runs in any case.

        Returns:
            A context that yields whether the lock is held.
        """
        return hold_file_lock(lock_path, blocking)


def _iter_files_below(
    folder_path: str, real_path: str, walked_paths: set[str], include_all_parts: bool
) -> Iterator[StoredFile]:
    """Yield the regular files in a folder and below. Links are followed, but no folder is walked twice.

    Args:
        folder_path: The path of the folder.
        real_path: Its path without links.
        walked_paths: The real paths of all folders walked so far. This one is added.
        include_all_parts: List every part of a table. Otherwise only the files of one part are listed.
    """
    if real_path in walked_paths:
        return
    walked_paths.add(real_path)

    # The folder "files" of a table has a folder for each part. One that has files shows that there is a table.
    is_parts_folder = real_path.endswith(f"/{PARTS_FOLDER}")
    stops_at_first_part = is_parts_folder and not include_all_parts

    for entry in _list_entries(folder_path):
        if not _is_folder(entry):
            yield from _iter_file_if_regular(entry)
            continue

        has_files = False
        real_entry_path = _resolve_real_path(entry, real_path)
        for file in _iter_files_below(entry.path, real_entry_path, walked_paths, include_all_parts):
            has_files = True
            yield file

        if has_files and stops_at_first_part:
            return


def _resolve_real_path(entry: os.DirEntry[str], real_folder_path: str) -> str:
    """Return the path of a folder entry without links.

    Args:
        entry: The entry.
        real_folder_path: The path of its folder without links.
    """
    if entry.is_symlink():
        return os.path.realpath(entry.path)
    return f"{real_folder_path}/{entry.name}"


def _list_entries(folder_path: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, or [] if it is gone or cannot be read."""
    try:
        with os.scandir(folder_path) as entries:
            return list(entries)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _iter_file_if_regular(entry: os.DirEntry[str]) -> Iterator[StoredFile]:
    """Yield a folder entry with its size and time, if it is a regular file and still exists."""
    try:
        status = entry.stat()
    except OSError:  # removed by another process meanwhile, or a link to itself
        return

    if S_ISREG(status.st_mode):
        yield StoredFile(Path(entry.path), status.st_size, status.st_mtime)


def describe_this_process() -> str:
    """Return a text that names this process and its machine, for people who wait for it."""
    return f"process {os.getpid()} on {gethostname()}, in {Path.cwd()}"


def _write_holder(claim_path: Path) -> None:
    """Write into a lock file which process holds the lock. Errors are ignored, because only people read it."""
    with suppress(OSError):
        claim_path.write_text(describe_this_process(), "utf-8")


def _describe_holder(claim_path: Path) -> str:
    """Describe the process that holds a claim, the right of one run to use something alone, such as the GPU.

    If the process has ended but the claim is still held, a process that it started holds it. The description says so.

    Args:
        claim_path: The lock file, in which the holder has written who it is.
    """
    description = claim_path.read_text("utf-8", "replace")

    # `describe_this_process` has written this. The pattern only fits a process of this machine.
    match = re.match(rf"process (\d+) on {re.escape(gethostname())},", description)
    if match is None or is_process_running(int(match[1])):
        return description
    return f"{description}, which has ended; end what it left running, which holds its place"


def _parse_manifest_version(manifest_content: bytes) -> Version:
    """Return the version of a manifest: its first line, which has a hash of the other lines.

    Returns:
        NO_FILE_VERSION if the content is empty.
    """
    if not manifest_content:
        return NO_FILE_VERSION

    first_line, _, _ = manifest_content.partition(b"\n")
    return Version(first_line.decode(errors="replace"))
