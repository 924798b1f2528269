"""Where the files of a lake lie: what tables, row stores, `clean` and `verify` ask of a folder or an object store.

A file is named by its path below `root`. Files are of two kinds. Most never change: their content has a hash that is
known before they are read. The others, such as manifests, are replaced as a whole; `Version` tells which content was
read, so that a writer notices who was faster.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from stat import S_ISREG

from toolformer_dag.files import StorageError, WriteError, file_name, locked, require_regular, write_whole
from toolformer_dag.lake import parquet
from toolformer_dag.processes import exists

ASIDE = ".damaged"
"""The end of the name of a file that was set aside."""


PARTS = "files"
"""The folder of a table that has a folder of each part."""
CLAIMS = "lake-claims"
"""The folder of what runs hold; the hyphen keeps it apart from the lanes."""


Later = Callable[[Callable[[], None]], None]
"""Does what it gets beside what goes on."""


class Overtaken(StorageError):
    """A small file was replaced by another writer since it was read."""

    def __init__(self, file: str) -> None:
        super().__init__(f"{file} was replaced by another run; run again")


@dataclass(frozen=True, slots=True)
class Version:
    """Which content of a small file was read; ABSENT: there was none."""

    e_tag: str | None = None
    number: str | None = None


ABSENT = Version()


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
    """A folder that all processes see under the same path. Raises WriteError, ReadError, ObjectStoreError.

    `object_storage.ObjectStorage` asks an object store the same.
    """

    first_wins = False
    """Whether the first of two writers of a part wins and the second raises LostRace; else the last wins."""
    lists_at_once = False
    """Whether `names` of up to a thousand files tells what was there at one moment."""

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
        """Return the content of a small file, and which it is. Raises FileNotFoundError, OSError."""
        require_regular(path)
        return path.read_bytes(), ABSENT

    def replace(self, path: Path, content: bytes, before: Version) -> Version:
        """Replace a small file as a whole. An object store raises Overtaken where it is not `before` any more."""
        write_whole(path, content)
        return ABSENT

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        """Return the content of a manifest as `read` does; in a session, but for `anew`, as it was at its beginning."""
        require_regular(path)
        content = path.read_bytes()
        return content, _first_line(content)

    def replace_manifest(self, path: Path, content: bytes, before: Version) -> Version:
        """Replace a manifest and return which it is. Raises Overtaken where it is not `before` any more."""
        with locked(path.with_name(f".{path.name}.lock")):
            present = ABSENT
            with suppress(FileNotFoundError), path.open("rb") as stream:
                present = _first_line(stream.readline())
            if present != before:
                raise Overtaken(self.shown(path))
            write_whole(path, content)
        return _first_line(content)

    def mark(self, path: Path, content: bytes, later: Later | None = None) -> None:
        """Write a small file that always has this content, and note that it is in use now; `later` as for `add`."""
        try:
            os.utime(path)
        except FileNotFoundError:
            write_whole(path, content)
        except OSError as error:
            raise WriteError(path, error) from error

    def add(self, path: Path, content: bytes, later: Later | None = None) -> None:
        """Write a file that never changes: it is there as a whole when this returns, or not at all.

        `later`: by which an object store may put it, once this machine has its copy.
        """
        write_whole(path, content)

    def fetch(self, path: Path, size: int, digest: str, owner: str | None = None) -> Path:
        """Return where a Parquet file can be opened. Of an object, the copy has the hash `digest`.

        Raises UnreadableFile where it is gone.
        """
        return path

    def bring(self, files: Iterable[tuple[Path, int, str]]) -> None:
        """Make ready what `fetch` will ask for, many files at once; what is missing or damaged `fetch` tells."""

    def check(self, path: str, size: int) -> None:
        """Raise UnreadableFile where a Parquet file is missing or has another size."""
        parquet.check(path, size)

    def damage(self, path: str, size: int, digest: str, since: int, owner: str | None = None) -> str | None:
        """Return what is wrong with a Parquet file; see `parquet.damage`. An object is always read."""
        return parquet.damage(path, size, digest, since, owner)

    def exists(self, path: Path) -> bool:
        """Return whether a file is there."""
        return path.is_file()

    def changed(self, path: Path) -> float:
        """Return when a file was written, as StoredFile does. Raises FileNotFoundError."""
        return path.stat().st_mtime

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, in no particular order."""
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []

    def files(self, all_parts: bool = True) -> Iterator[StoredFile]:
        """Yield every file below `root`; a link to a folder that was walked is left out.

        Without `all_parts`, of the folder of a table's parts one that has a file: it tells that there is a table.
        """
        return _below(str(self.root), os.path.realpath(self.root), set(), all_parts)

    def remove(self, *paths: Path) -> None:
        """Delete files; nothing happens where there are none."""
        for path in paths:
            path.unlink(missing_ok=True)

    def set_aside(self, path: Path) -> None:
        """Add ASIDE to the name of a file; nothing happens where there is none."""
        aside = path.with_name(f"{path.name}{ASIDE}")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(aside)
            aside.touch()  # `clean` counts from now

    @contextmanager
    def claimed(self, name: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold the claim `name` on the lake inside the block, against every run over it, wherever it was started.

        Where another run holds it, `on_wait` is called with who that is, and this waits. The kernel ends a claim with
        its holder. Of several machines, this takes a file system whose `flock` they share, as NFS has it.
        """
        path = self.root / CLAIMS / f"{file_name(name)}.lock"
        with ExitStack() as stack:
            if not stack.enter_context(self.alone(path, wait=False)):
                on_wait(_holder(path))
                stack.enter_context(self.alone(path))
            with suppress(OSError):
                path.write_text(this_process(), "utf-8")
            yield

    def write_beside(self, write: Callable[[], None]) -> None:
        """Do what writes a little; over an object store, beside what goes on, once the one before has ended."""
        write()

    def wait_for_writes(self) -> None:
        """Wait for what is written beside. Raises what it raised."""

    def alone(self, path: Path, wait: bool = True) -> AbstractContextManager[bool]:
        """Hold the lock `path` inside the block, as `files.locked` does.

        In an object store it holds among the processes of this machine: it saves work, and `replace` decides.
        """
        return locked(path, wait)


def _below(folder: str, place: str, walked: set[str], all_parts: bool) -> Iterator[StoredFile]:
    """Yield the files in `folder`, whose path without links is `place`."""
    if place in walked:
        return
    walked.add(place)
    try:
        with os.scandir(folder) as listed:
            entries = list(listed)
    except OSError:  # gone since, or without rights
        return
    for entry in entries:
        if _is_folder(entry):
            inner = os.path.realpath(entry.path) if entry.is_symlink() else f"{place}/{entry.name}"
            inside = _below(entry.path, inner, walked, all_parts)
            if (first := next(inside, None)) is not None:
                yield first
                yield from inside
                if not all_parts and place.endswith(f"/{PARTS}"):
                    return
        elif file := _stored(entry):
            yield file


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link to itself
        return entry.is_dir()
    return False


def _stored(entry: os.DirEntry[str]) -> StoredFile | None:
    with suppress(OSError):  # merged or finished by another process since it was listed, or a link to itself
        status = entry.stat()
        if S_ISREG(status.st_mode):
            return StoredFile(Path(entry.path), status.st_size, status.st_mtime)
    return None


def this_process() -> str:
    """Say which process this is, for people who wait for it."""
    return f"process {os.getpid()} on {gethostname()}, in {Path.cwd()}"


def _holder(claim: Path) -> str:
    """Say who holds a claim, and whether it has ended where it was a process of this machine."""
    said = claim.read_text("utf-8", "replace")
    here = re.match(rf"process (\d+) on {re.escape(gethostname())},", said)
    gone = here is not None and not exists(int(here[1]))
    return f"{said}, which has ended; end what it left running, which holds its place" if gone else said


def _first_line(content: bytes) -> Version:
    """Which content a manifest has: its first line holds the hash of the others."""
    return Version(content.partition(b"\n")[0].decode(errors="replace")) if content else ABSENT
