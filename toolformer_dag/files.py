"""Files that are complete or absent, locks between processes, and the errors of writing and reading them."""

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote
from uuid import uuid4

from toolformer_dag.identity import content_hash, file_hash, remembered_hashes, stream_hash

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}(?:\.\w+)*")
"""The name of an unfinished file; `clean` removes those that a killed process left."""


class UserError(Exception):
    """A mistake that a person can mend: the message names the thing, the reason and the remedy.

    The command line shows it as one message, without a traceback.
    """


class StorageError(UserError):
    """Base of every error about files and the lake. The message names the file, the reason and the remedy."""


LIMITS = (
    ("ulimit -n", resource.RLIMIT_NOFILE, (errno.EMFILE, errno.ENFILE), "open files"),
    ("ulimit -u", resource.RLIMIT_NPROC, (errno.EAGAIN,), "processes and threads"),
    ("ulimit -v", resource.RLIMIT_AS, (errno.ENOMEM,), "memory"),
)
"""How the shell sets a limit, its number, the errors of whoever meets it, and what it limits."""
LIMIT_WORDS = {
    "Too many open files": errno.EMFILE,
    "can't start new thread": errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
    "can't allocate memory": errno.ENOMEM,
    "Cannot allocate memory": errno.ENOMEM,
    "not enough memory": errno.ENOMEM,
    "could not allocate": errno.ENOMEM,
}
"""What libraries say where they tell no number: torch, DuckDB, Rust, Python's threads."""


def limit_met(error: BaseException) -> str | None:
    """Name the limit of this process that an error tells of; None for any other error."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    words = (code for word, code in LIMIT_WORDS.items() if word in str(error))
    number = next(words, None) if number is None else number
    for name, limit, numbers, what in LIMITS:
        if number in numbers:
            soft, _ = resource.getrlimit(limit)
            size = "none" if soft == resource.RLIM_INFINITY else soft // (1024 if limit == resource.RLIMIT_AS else 1)
            return f"there are not enough {what} ({name}: {size}); raise that limit"
    return None


NEEDED_THREADS = 32
"""Threads that a command may start beside one per core; the libraries' pools are as large as the machine."""
AMPLE = 10_000
"""A limit of processes from which on nothing is tried."""


def require_threads() -> None:
    """Raise UserError where fewer threads may be started than a command needs, as `ulimit -u` has it.

    Asked before any library is: some hang there, or abort, and name no limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or soft > AMPLE:
        return
    ended, count = threading.Event(), NEEDED_THREADS + (os.cpu_count() or 1)
    started = [threading.Thread(target=ended.wait, daemon=True) for _ in range(count)]
    try:
        for thread in started:
            thread.start()
    except RuntimeError as error:
        raise UserError(f"a command may need {count} threads: {limit_met(error)} and run again") from error
    finally:
        ended.set()


class WriteError(StorageError):
    """A write that failed; what was committed before is still there."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = limit_met(error) or "free space or correct the rights"
        super().__init__(
            f"cannot write {path}: {error.strerror or error}; {remedy} and run again, what was committed before stays"
        )


class ReadError(StorageError):
    """A file that exists and could not be read this time; it is left where it is."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = limit_met(error) or "correct the rights or the disk"
        super().__init__(
            f"cannot read {path}: {error.strerror or error}; {remedy} and run again, the file was left as it is"
        )


class NotPlain(StorageError):
    """An identity or a record that holds a value without a place in JSON."""

    def __init__(self, owner: str, reason: str) -> None:
        super().__init__(
            f"{owner}: {reason}; what its rows are made from is written as JSON: turn the value into text, a number, "
            "a list or a mapping, in identity() where it is a tool's"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: a reader sees the old file or the new one, after a power loss too.

    Temporary file, fsync, rename, fsync of the folder. Raises WriteError, and then leaves no temporary file behind.
    """
    temporary = beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise WriteError(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_output(path: Path, content: bytes, option: str, force: bool) -> None:
    """Write a file that a person named by `option`; an existing one is replaced with `force` alone.

    What is no regular file, such as a pipe or /dev/stdout, is written through, and a link is followed. Raises
    UserError, WriteError.
    """
    if irregular(path) not in (None, "folder"):
        try:
            path.write_bytes(content)
        except OSError as error:
            raise WriteError(path, error) from error
        return
    if path.exists() and not force:
        raise UserError(
            f"{option} {path}: there is such a file, and it stays; name another, or replace it with --force"
        )
    write_whole(path.resolve(), content)


def beside(path: Path, suffix: str = "") -> Path:
    """Return a new path in the same folder, for a file that is not finished."""
    return path.with_name(f".tmp-{uuid4().hex}{suffix}")


def replace_whole(fresh: Path, path: Path) -> None:
    """Rename the finished file `fresh` to `path`, synced to the disk before and after."""
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def replace_folder(folder: Path, fresh: Path) -> None:
    """Replace `folder` by `fresh`, a folder of the same disk: write everything to disk, then rename. Raises OSError.

    `folder` is missing for a moment between two renames, but never incomplete.
    """
    for path in [*fresh.rglob("*"), fresh]:
        sync(path)
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    fresh.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_. -]*")
"""Names that `file_name` leaves as they are: most."""


def file_name(name: str) -> str:
    """Turn any name into a readable file name that cannot hide, climb or nest; `plain_name` reads it back.

    Letters of any script stay as they are: quoted they take three times the bytes, of which a file name has 255.
    """
    if PLAIN.fullmatch(name):
        return name
    quoted = "".join(char if char > "~" and char.isprintable() else quote(char, safe=" ,+=@") for char in name)
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def plain_name(file: str) -> str:
    """Return the name that `file_name` was given."""
    return unquote(file)


KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}


def irregular(path: Path) -> str | None:
    """Return what stands in the place of a regular file, such as "named pipe"; None for a file or nothing at all.

    To open a pipe or some devices waits for ever.
    """
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:  # gone, a broken link, or in a folder without rights: opening says so
        return None


def require_regular(path: Path) -> None:
    """Raise OSError for what `irregular` names, so that it is refused as a file that cannot be read."""
    if kind := irregular(path):
        raise OSError(f"it is a {kind}, not a regular file")


def as_json(owner: str, value: object, sort_keys: bool = False, indent: int | None = 1) -> bytes:
    """Encode as JSON, a line per field. Raises NotPlain, which names `owner`, for a value without a place in JSON."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, sort_keys=sort_keys).encode()
    except (TypeError, ValueError, RecursionError) as error:  # an unknown type, half a character, a circle
        raise NotPlain(owner, str(error)) from error


SEAL = "seal"


def sealed(owner: str, value: Mapping[str, object]) -> bytes:
    """Encode fields, at least one, as JSON with the hash of the rest before them. Raises NotPlain, naming `owner`."""
    body = as_json(owner, value)
    return _seal_line(content_hash(body)) + body[1:]


def unsealed(content: bytes) -> dict[str, Any]:
    """Read `sealed`. Raises ValueError for anything else: a truncated file, a flipped bit, another format."""
    try:
        value = json.loads(content)
        seal = value.pop(SEAL)
    except (RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is no record: {error!r}") from error
    line = _seal_line(seal)
    if not content.startswith(line) or content_hash(b"{" + content[len(line) :]) != seal:
        raise ValueError("is damaged: its content is not what was written")
    return dict(value)


def _seal_line(seal: object) -> bytes:
    """Return how a sealed record begins, in the place of its brace."""
    return f'{{\n "{SEAL}": "{seal}",'.encode()


FILES = "files"
"""The field of a sealed record that holds the hashes of the files beside it: of each `file_hash`, or its bytes and
`content_hash`."""


def hashes_beside(record: Path) -> dict[str, str]:
    """Hash every other file in the folder of `record`, by name, for its field FILES. Raises OSError."""
    return {path.name: file_hash(path) for path in sorted(record.parent.iterdir()) if path != record}


def files_beside(record: Path, again: bool = False) -> Iterator[tuple[Path, bool]]:
    """Yield the files that the sealed `record` names, and whether each holds what was written.

    A file whose size and times did not change since it was hashed is read again only with `again`. The record itself
    is the only file yielded where it is damaged.
    """
    try:
        require_regular(record)
        hashes = unsealed(record.read_bytes())[FILES]
    except (OSError, ValueError, KeyError):
        yield record, False
        return
    for name, wanted in hashes.items():
        yield record.parent / name, _holds(record.parent / name, wanted, again)


def damaged_beside(record: Path, again: bool = False) -> list[Path]:
    """Return the files of `files_beside` that are missing or damaged."""
    return [path for path, whole in files_beside(record, again) if not whole]


def _holds(file: Path, wanted: str | list[Any], again: bool) -> bool:
    try:
        require_regular(file)
        if isinstance(wanted, str):
            return file_hash(file, again) == wanted
        return bool((stream_hash(file) if again else remembered_hashes(file).content) == wanted[1])
    except OSError:
        return False


def changed_unseen(files: Iterable[Path]) -> Path | None:
    """Read files that are about to be used; return the first that is not what its hash was taken from.

    Identities hold hashes that may have been taken long ago (`file_hash`). What is read here stays in the system's
    memory, so that loading reads it from there. Raises OSError.
    """
    return next((file for file in files if stream_hash(file) != remembered_hashes(file).content), None)


READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_opening, _lock_files = threading.Lock(), set[IO[bytes]]()


def _let_go() -> None:
    """Close the lock files of the parent in a child that was forked: it would hold their locks as long as it lives."""
    for stream in _lock_files:
        stream.close()
    _lock_files.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go)


@contextmanager
def _lock_file(path: Path, mode: str) -> Iterator[IO[bytes]]:
    """Open a file to be locked, which no child inherits. Raises OSError."""
    with _opening:
        stream: IO[bytes] = path.open(mode, buffering=0)
        _lock_files.add(stream)
    try:
        yield stream
    finally:
        _lock_files.discard(stream)
        stream.close()


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path` inside the block; yield False at once if another process has it and `wait` is false.

    The kernel releases the lock when its holder dies, however it ends; processes that it forked hold nothing. Where
    nothing can be written, as in a snapshot, an existing lock file is held and a missing one is not needed.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(_lock_file(path, "ab"))
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            if not path.is_file():
                yield True
                return
            stream = stack.enter_context(_lock_file(path, "rb"))
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
