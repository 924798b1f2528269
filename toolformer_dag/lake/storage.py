"""Where the files of a lake lie: what tables, row stores, `clean` and `verify` ask of a folder or an object store.

A file is named by its path below `root`. Files are of two kinds:

- Most never change (Parquet files): `add`, `fetch`, `bring`, `check`, `damage`. Their size and hash stand in a manifest
  or in their name, and are known before they are read.
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

from toolformer_dag.files import StorageError, WriteError, file_name, locked, require_regular, write_whole
from toolformer_dag.lake import parquet
from toolformer_dag.processes import exists

ASIDE = ".damaged"
"""The end of the name of a file that was set aside."""
PARTS = "files"
"""The folder of a table that has a folder of each part."""
CLAIMS = "lake-claims"
"""The folder of the claims that runs hold (`Storage.claimed`); the hyphen keeps it apart from the lanes."""

Later = Callable[[Callable[[], None]], None]
"""Takes a write and does it in the background, as `LakeSession.later` does."""


class Overtaken(StorageError):
    """A small file was replaced by another writer since it was read."""

    def __init__(self, file: str) -> None:
        super().__init__(f"{file} was replaced by another run; run again")


@dataclass(frozen=True, slots=True)
class Version:
    """Which content of a small file was read.

    - `e_tag`: in an object store the tag of the content; in a folder the first line of a manifest, which has its hash
    - `number`: in an object store that counts versions, the number of this one
    """

    e_tag: str | None = None
    number: str | None = None


NO_FILE = Version()
"""The version where there was no file. In a folder, every version but those of manifests."""


class FileToFetch(NamedTuple):
    """A file that never changes: where it lies, its size in bytes and the hash of its content."""

    path: Path
    bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is there. `changed`: when it was written, by the disk's or store's clock, in seconds since 1970."""

    path: Path
    bytes: int
    changed: float


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file that was read to its end: its bytes, and what is wrong with it; None where it is what was written."""

    path: Path
    bytes: int
    reason: str | None


class Storage:
    """The files of a lake in a folder that all processes see under the same path.

    `object_storage.ObjectStorage` has the same methods over an object store; what differs there stands in the docstring
    of a method. Methods raise WriteError and ReadError, over an object store ObjectStoreError.
    """

    first_wins = False
    """Whether the first of two writers of a part wins and the second raises LostRace; else the last wins."""
    lists_at_once = False
    """Whether `names` of up to a thousand files are those of one moment; else files may come and go meanwhile."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def require_access(self) -> None:
        """Raise StorageError where a file is in the lake's place."""
        if self.root.is_file():
            raise StorageError(f"{self.root} is a file; set paths.lake to a folder")

    def shown(self, path: Path) -> str:
        """Return where a file lies, for people."""
        return str(path)

    def read(self, path: Path) -> tuple[bytes, Version]:
        """Return the content of a small file and its version. Raises FileNotFoundError, OSError."""
        require_regular(path)
        return path.read_bytes(), NO_FILE

    def replace(self, path: Path, content: bytes, before: Version) -> Version:
        """Replace a small file as a whole: readers see the old content or the new one.

        Args:
            path: The path of the file.
            content: The new content.
            before: The version that the caller has read. Only an object store compares it, and raises Overtaken
                if the file has another version by now.

        Returns:
            The new version.
        """
        write_whole(path, content)
        return NO_FILE

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        """Read a manifest, the list of the parts of a table.

        Args:
            path: The path of the manifest.
            anew: Only used over an object store: read the object itself. Otherwise a session asks only once
                which manifests have changed.

        Returns:
            The content and its version.

        Raises:
            FileNotFoundError: There is no such manifest.
            OSError: It cannot be read.
        """
        require_regular(path)
        content = path.read_bytes()
        return content, _parse_version(content)

    def replace_manifest(self, path: Path, content: bytes, before: Version) -> Version:
        """Replace a manifest, unless another writer was faster.

        Args:
            path: The path of the manifest.
            content: The new content.
            before: The version that is replaced, or NO_FILE if there must be no manifest yet.

        Returns:
            The new version: the first line of the manifest, which holds a hash of the other lines.

        Raises:
            Overtaken: The manifest has another version by now.
        """
        with locked(path.with_name(f".{path.name}.lock")):
            # NO_FILE stays the version if there is no file.
            current_version = NO_FILE
            with suppress(FileNotFoundError), path.open("rb") as stream:
                current_version = _parse_version(stream.readline())

            if current_version != before:
                raise Overtaken(self.shown(path))
            write_whole(path, content)
        return _parse_version(content)

    def mark(self, path: Path, content: bytes, later: Later | None = None) -> None:
        """Write a small file that always has the same content, or renew its time if it is there.

        A recent time shows that the file is in use.

        Args:
            path: The path of the file.
            content: Its content.
            later: Runs the write in the background. Only used over an object store.
        """
        try:
            os.utime(path)  # now
        except FileNotFoundError:
            write_whole(path, content)
        except OSError as error:
            raise WriteError(path, error) from error

    def add(self, path: Path, content: bytes, later: Later | None = None) -> None:
        """Write a file that never changes: it is there as a whole when this returns, or not at all.

        later: over an object store, what uploads the file in the background.
        """
        write_whole(path, content)

    def fetch(self, path: Path, size: int, digest: str, owner: str | None = None) -> Path:
        """Return where a Parquet file can be opened; an object store downloads it where this machine has no copy.

        A folder compares nothing. An object store raises UnreadableFile where the file is gone or its hash is another.
        """
        return path

    def bring(self, files: Iterable[FileToFetch]) -> None:
        """Over an object store, download many files at once; `fetch` then finds them here, and tells of damage."""

    def check(self, path: str, size: int) -> None:
        """Raise UnreadableFile where a Parquet file is missing or has another size."""
        parquet.check(path, size)

    def damage(self, path: str, size: int, digest: str, since: int, owner: str | None = None) -> str | None:
        """Return what is wrong with a Parquet file, as `parquet.damage` does. An object is always read."""
        return parquet.damage(path, size, digest, since, owner)

    def exists(self, path: Path) -> bool:
        """Return whether a file is there."""
        return path.is_file()

    def changed(self, path: Path) -> float:
        """Return when a file was written, in seconds since 1970. Raises FileNotFoundError."""
        return path.stat().st_mtime

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, in no particular order."""
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []

    def files(self, all_parts: bool = True) -> Iterator[StoredFile]:
        """Yield every file below `root`, in no particular order; a folder that is linked twice is walked once.

        all_parts: yield the files of every part of a table; else a folder may yield only one part per table.
        """
        return _walk(str(self.root), os.path.realpath(self.root), walked=set(), all_parts=all_parts)

    def remove(self, *paths: Path) -> None:
        """Delete files; nothing happens where there are none."""
        for path in paths:
            path.unlink(missing_ok=True)

    def set_aside(self, path: Path) -> None:
        """Add ASIDE to the name of a file; nothing happens where there is none."""
        aside = path.with_name(f"{path.name}{ASIDE}")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(aside)
            aside.touch()  # the grace period of `clean` begins now

    @contextmanager
    def claimed(self, name: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold a claim during the `with` block: no other run over this lake has it meanwhile.

        If runs are on several machines, their file system has to share `flock` between them, as NFS does.

        Args:
            name: The name of the claim, such as "gpu".
            on_wait: Called once with who holds the claim, if this has to wait.
        """
        path = self.root / CLAIMS / f"{file_name(name)}.lock"
        with ExitStack() as locks:
            was_free = locks.enter_context(self.alone(path, wait=False))  # then this process has locked it

            if not was_free:
                on_wait(_describe_holder(path))
                locks.enter_context(self.alone(path))  # waits

            _write_holder(path)  # for people who wait: who holds the claim
            yield

    def write_beside(self, write: Callable[[], None]) -> None:
        """Run a small write; over an object store in the background, one at a time."""
        write()

    def wait_for_writes(self) -> None:
        """Wait for the write of `write_beside`. Raises what it raised."""

    def alone(self, path: Path, wait: bool = True) -> AbstractContextManager[bool]:
        """Hold the lock `path` inside the block; yields whether it is held, which without `wait` it may not be.

        Over an object store it holds among the processes of this machine only.
        """
        return locked(path, wait)


def _walk(folder: str, real_path: str, walked: set[str], all_parts: bool) -> Iterator[StoredFile]:
    """Yield the regular files in a folder and below. Links are followed, but no folder is walked twice.

    Args:
        folder: The path of the folder.
        real_path: Its path without links.
        walked: The real paths of all folders walked so far. This one is added.
        all_parts: List every part of a table. Otherwise only the files of one part are listed.
    """
    if real_path in walked:
        return
    walked.add(real_path)

    # Below PARTS lies a folder per part of a table: one with files shows that there is a table.
    stops_at_first_folder = not all_parts and real_path.endswith(f"/{PARTS}")

    for entry in _list_entries(folder):
        if not _is_folder(entry):
            yield from _iter_regular_file(entry)
            continue

        has_files = False
        for file in _walk(entry.path, _resolve_real_path(entry, real_path), walked, all_parts):
            has_files = True
            yield file

        # The files of one part are enough.
        if has_files and stops_at_first_folder:
            return


def _resolve_real_path(entry: os.DirEntry[str], real_folder: str) -> str:
    """Return the path of an entry without links. real_folder: that of the folder that it is in."""
    return os.path.realpath(entry.path) if entry.is_symlink() else f"{real_folder}/{entry.name}"


def _list_entries(folder: str) -> list[os.DirEntry[str]]:
    """Return what a folder holds; nothing where it is gone, or may not be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _iter_regular_file(entry: os.DirEntry[str]) -> Iterator[StoredFile]:
    """Yield the entry if it is a regular file that is still there."""
    try:
        status = entry.stat()
    except OSError:  # merged or finished by another process, or a link to itself
        return
    if S_ISREG(status.st_mode):
        yield StoredFile(Path(entry.path), status.st_size, status.st_mtime)


def describe_this_process() -> str:
    """Say which process this is, for people who wait for it."""
    return f"process {os.getpid()} on {gethostname()}, in {Path.cwd()}"


def _write_holder(claim: Path) -> None:
    """Write into a lock file which process holds it, if it can be written: people read it, and the lock counts."""
    with suppress(OSError):
        claim.write_text(describe_this_process(), "utf-8")


def _describe_holder(claim: Path) -> str:
    """Describe the process that holds a claim.

    If that process has ended, a process that it left running holds the claim. The description says so.

    Args:
        claim: The lock file, in which the holder has written who it is.
    """
    holder = claim.read_text("utf-8", "replace")
    # The form of `describe_this_process`, where it is a process of this machine.
    match = re.match(rf"process (\d+) on {re.escape(gethostname())},", holder)
    if match is None or exists(int(match[1])):
        return holder
    return f"{holder}, which has ended; end what it left running, which holds its place"


def _parse_version(content: bytes) -> Version:
    """Return the version of a manifest: its first line, which holds the hash of the others."""
    if not content:
        return NO_FILE
    first_line, _, _ = content.partition(b"\n")
    return Version(first_line.decode(errors="replace"))
