"""Where the files of a lake lie: what tables, row stores, `clean` and `verify` ask of a folder or an object store.

A file is named by its path below `root`. In an object store `root` is a folder of copies on this machine: the object is
what counts, a copy is made when the file is opened, and the folder may be deleted at any time.

Files are of two kinds. Most never change: their content has a hash that is known before they are read. The others, such
as pointers, are small and are replaced as a whole; `Version` tells which content was read, so that a writer notices who
was faster.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Protocol, TypeVar

from toolformer_dag.files import StorageError, WriteError, locked, write_whole
from toolformer_dag.lake import parquet
from toolformer_dag.lake.session import session

FOLDER = "table-manifests"
"""Where the manifests of tables lie; the hyphen keeps it apart from the lanes, which lie beside it."""
DAMAGED = ".damaged"
"""The end of the name of a file that was set aside."""


Answer = TypeVar("Answer")
_seen: ContextVar[dict[tuple[str, str], Any] | None] = ContextVar("seen", default=None)
"""What the glance of this thread has been told: (question, where the file lies) -> answer."""


@contextmanager
def glance() -> Iterator[None]:
    """Remember inside the block what `once` was told; a block within another one shares it."""
    around = _seen.get()
    token = _seen.set({} if around is None else around)
    try:
        with session():
            yield
    finally:
        _seen.reset(token)


def once(question: str, place: str, ask: Callable[[], Answer]) -> Answer:
    """Return the answer; within a glance the one that was given before."""
    seen = _seen.get()
    if seen is None:
        return ask()
    if (question, place) not in seen:
        seen[question, place] = ask()
    answer: Answer = seen[question, place]
    return answer


class Overtaken(StorageError):
    """A small file was replaced by another writer since it was read."""


@dataclass(frozen=True, slots=True)
class Version:
    """Which content of a small file was read; ABSENT: there was none. A folder tells none apart."""

    e_tag: str | None = None
    number: str | None = None


ABSENT = Version()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is there. `changed`: when it was written, in seconds since 1970, by the clock of the disk or store.

    `withdrawn`: whether it is only the mark of one that is gone.
    """

    path: Path
    bytes: int
    changed: float
    withdrawn: bool = False


class Storage(Protocol):
    """The files of a lake below `root`. Raises WriteError, ReadError, ObjectStoreError."""

    root: Path

    def shown(self, path: Path) -> str:
        """Return where a file lies, for people."""

    def read(self, path: Path) -> tuple[bytes, Version]:
        """Return the content of a small file, and which it is. Raises FileNotFoundError, OSError."""

    def replace(self, path: Path, content: bytes, before: Version) -> Version:
        """Replace a small file as a whole. An object store raises Overtaken where it is not `before` any more."""

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        """Return the content of a manifest as `read` does; in a session, but for `anew`, as it was at its beginning."""

    def replace_manifest(self, path: Path, content: bytes, before: Version) -> Version:
        """Replace a manifest and return which it is. Raises Overtaken where it is not `before` any more."""

    def mark(self, path: Path, content: bytes) -> None:
        """Write a small file that always has this content, and note that it is in use now."""

    def add(self, path: Path, content: bytes) -> None:
        """Write a file that never changes: it is there as a whole when this returns, or not at all."""

    def fetch(self, path: Path, size: int, digest: str) -> Path:
        """Return where a Parquet file can be opened. Of an object, the copy has the hash `digest`.

        Raises UnreadableFile where it is gone.
        """

    def check(self, path: Path, size: int) -> None:
        """Raise UnreadableFile where a Parquet file is missing or has another size."""

    def damage(self, path: Path, size: int, digest: str, since: int) -> str | None:
        """Return what is wrong with a Parquet file; see `parquet.damage`. An object is always read."""

    def exists(self, path: Path) -> bool:
        """Return whether a file is there."""

    def changed(self, path: Path) -> float:
        """Return when a file was written, as StoredFile does. Raises FileNotFoundError."""

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, in no particular order."""

    def files(self) -> Iterator[StoredFile]:
        """Yield every file below `root`."""

    def remove(self, path: Path) -> None:
        """Delete a file; nothing happens where there is none."""

    def bring(self, files: Sequence[tuple[Path, int, str]]) -> None:
        """Make ready what `fetch` will ask for, many files at once; what is missing or damaged `fetch` tells."""

    def set_aside(self, path: Path) -> None:
        """Add DAMAGED to the name of a file; nothing happens where there is none."""

    def at_a_glance(self) -> AbstractContextManager[None]:
        """Look at each part once inside the block, which only reads, and ask an object store for each name once.

        For what looks at the same pointers again and again: what others change meanwhile is seen after the block.
        """

    def alone(self, path: Path, wait: bool = True) -> AbstractContextManager[bool]:
        """Hold the lock `path` inside the block, as `files.locked` does.

        In an object store it holds among the processes of this machine: it saves work, and `replace` decides.
        """


def _first_line(content: bytes) -> Version:
    """Which content a manifest has: its first line holds the hash of the others."""
    return Version(content.partition(b"\n")[0].decode(errors="replace")) if content else ABSENT


class FolderStorage:
    """A folder that all processes see under the same path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def shown(self, path: Path) -> str:
        return str(path)

    def read(self, path: Path) -> tuple[bytes, Version]:
        return path.read_bytes(), ABSENT

    def replace(self, path: Path, content: bytes, before: Version) -> Version:
        write_whole(path, content)
        return ABSENT

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        content = path.read_bytes()
        return content, _first_line(content)

    def replace_manifest(self, path: Path, content: bytes, before: Version) -> Version:
        with locked(path.with_name(f".{path.name}.lock")):
            with path.open("rb") if path.exists() else nullcontext(BytesIO()) as stream:
                if _first_line(stream.readline()) != before:
                    raise Overtaken(f"{path} was replaced by another run; run again")
            write_whole(path, content)
        return _first_line(content)

    def mark(self, path: Path, content: bytes) -> None:
        try:
            os.utime(path)
        except FileNotFoundError:
            write_whole(path, content)
        except OSError as error:
            raise WriteError(path, error) from error

    def add(self, path: Path, content: bytes) -> None:
        write_whole(path, content)

    def fetch(self, path: Path, size: int, digest: str) -> Path:
        return path

    def check(self, path: Path, size: int) -> None:
        parquet.check(path, size)

    def damage(self, path: Path, size: int, digest: str, since: int) -> str | None:
        return parquet.damage(path, size, digest, since)

    def exists(self, path: Path) -> bool:
        return path.is_file()

    def changed(self, path: Path) -> float:
        return path.stat().st_mtime

    def names(self, folder: Path) -> list[str]:
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []

    def files(self) -> Iterator[StoredFile]:
        for folder, _, names in os.walk(self.root, followlinks=True):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # merged or finished by another process since it was listed
                    status = path.stat()
                    if not S_ISDIR(status.st_mode):
                        yield StoredFile(path, status.st_size, status.st_mtime)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def bring(self, files: Sequence[tuple[Path, int, str]]) -> None:
        """Nothing: they are here."""

    def set_aside(self, path: Path) -> None:
        aside = path.with_name(f"{path.name}{DAMAGED}")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(aside)
            aside.touch()  # `clean` counts from now

    def at_a_glance(self) -> AbstractContextManager[None]:
        return glance()

    def alone(self, path: Path, wait: bool = True) -> AbstractContextManager[bool]:
        return locked(path, wait)
