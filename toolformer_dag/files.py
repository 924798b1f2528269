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
from typing import IO, Any, NamedTuple
from urllib.parse import quote, unquote
from uuid import uuid4

from toolformer_dag.identity import content_hash, file_hash, read_remembered_hashes, stream_hash

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}(?:\.\w+)*")
"""The name of an unfinished file; `clean` removes those that a killed process left."""


class UserError(Exception):
    """A mistake that a person can mend: the message names the thing, the reason and the remedy.

    The command line shows it as one message, without a traceback.
    """


class StorageError(UserError):
    """Base of every error about files and the lake. The message names the file, the reason and the remedy."""


class Limit(NamedTuple):
    """A limit that the shell sets for a process."""

    command: str  # shows and sets the limit
    number: int  # the limit's number for `resource.getrlimit`
    errors: tuple[int, ...]  # the error numbers that a process gets where it meets the limit
    what: str  # what the limit counts, in words
    unit: int = 1  # what the command counts in, where it is not single bytes or things


LIMITS = (
    Limit("ulimit -n", resource.RLIMIT_NOFILE, (errno.EMFILE, errno.ENFILE), "open files"),
    Limit("ulimit -u", resource.RLIMIT_NPROC, (errno.EAGAIN,), "processes and threads"),
    Limit("ulimit -v", resource.RLIMIT_AS, (errno.ENOMEM,), "memory", unit=1024),
)
LIMIT_WORDS = {
    "Too many open files": errno.EMFILE,
    "can't start new thread": errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
    "can't allocate memory": errno.ENOMEM,
    "Cannot allocate memory": errno.ENOMEM,
    "not enough memory": errno.ENOMEM,
    "could not allocate": errno.ENOMEM,
}
"""Words in messages of torch, DuckDB, Rust and Python's threads, which name no error number, and that number."""


def explain_limit_met(error: BaseException) -> str | None:
    """Return which limit of this process caused an error, with the remedy; None for any other error.

    For example "there are not enough open files (ulimit -n: 1024); raise that limit".
    """
    error_number = _find_error_number(error)
    for limit in LIMITS:
        if error_number in limit.errors:
            return (
                f"there are not enough {limit.what} ({limit.command}: {_format_limit_value(limit)}); raise that limit"
            )
    return None


def _format_limit_value(limit: Limit) -> str:
    """Return the value of a limit as its command shows it, or "none"."""
    soft_limit, _ = resource.getrlimit(limit.number)
    return "none" if soft_limit == resource.RLIM_INFINITY else str(soft_limit // limit.unit)


def _find_error_number(error: BaseException) -> int | None:
    """Return the system's number of an error: its `errno`, or else what its message tells (LIMIT_WORDS)."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    number: int | None = getattr(error, "errno", None)
    if number is not None:
        return number
    message = str(error)
    for words, number_of_words in LIMIT_WORDS.items():
        if words in message:
            return number_of_words
    return None


NEEDED_THREADS = 32
"""Threads that a command may start in addition to one per core, for the thread pools of libraries."""
AMPLE = 10_000
"""A limit of processes that is high enough not to be tried."""


def require_threads() -> None:
    """Raise UserError where this process cannot start as many threads as a command needs (`ulimit -u`).

    Call it before libraries are imported, some of which hang or abort at the limit. Where the limit is below AMPLE,
    the threads are really started.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft_limit == resource.RLIM_INFINITY or soft_limit > AMPLE:
        return
    count = NEEDED_THREADS + (os.cpu_count() or 1)
    try:
        _start_threads(count)
    except RuntimeError as error:
        raise UserError(f"a command may need {count} threads: {explain_limit_met(error)} and run again") from error


def _start_threads(count: int) -> None:
    """Start threads that all live until the last is started, then end. Raises RuntimeError where the system refuses."""
    may_end = threading.Event()
    try:
        for _ in range(count):
            threading.Thread(target=may_end.wait, daemon=True).start()
    finally:
        may_end.set()


class WriteError(StorageError):
    """A write that failed. What was committed before is still there."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = explain_limit_met(error) or "free space or correct the rights"
        super().__init__(
            f"cannot write {path}: {error.strerror or error}; {remedy} and run again, what was committed before stays"
        )


class ReadError(StorageError):
    """A file that exists and could not be read this time. It is left as it is."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = explain_limit_met(error) or "correct the rights or the disk"
        super().__init__(
            f"cannot read {path}: {error.strerror or error}; {remedy} and run again, the file was left as it is"
        )


class NotPlain(StorageError):
    """An identity or a record with a value that JSON cannot express. `owner` in the message is whose value it is."""

    def __init__(self, owner: str, reason: str) -> None:
        super().__init__(
            f"{owner}: {reason}; what its rows are made from is written as JSON: turn the value into text, a number, "
            "a list or a mapping, in identity() where it is a tool's"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to the file `path` atomically: a reader sees the old file or the new one, after a power loss too.

    Folders are created where they are missing. Raises WriteError, and then leaves no temporary file.
    """
    temporary = build_temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(temporary, content)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise WriteError(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on the disk. Raises OSError."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_output(path: Path, content: bytes, option: str, force: bool) -> None:
    """Write the file that a person named on the command line; replace an existing one only with `force`.

    option: such as "--out", for the message. A pipe or a device is written to as it is.

    Raises UserError where the file exists and must stay, and WriteError.
    """
    is_pipe_or_device = irregular(path) not in (None, "folder")  # None: a regular file, or nothing
    if is_pipe_or_device:
        _write_to_stream(path, content)
        return
    if path.exists() and not force:
        raise UserError(
            f"{option} {path}: there is such a file, and it stays; name another, or replace it with --force"
        )
    write_whole(path.resolve(), content)


def _write_to_stream(path: Path, content: bytes) -> None:
    """Write to a pipe or a device. Raises WriteError."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise WriteError(path, error) from error


def build_temporary_path(path: Path, suffix: str = "") -> Path:
    """Return an unused path in the folder of `path`, such as `.tmp-<32 digits>`, for an unfinished file.

    suffix: how the name ends, such as ".parquet". See TEMPORARY.
    """
    return path.with_name(f".tmp-{uuid4().hex}{suffix}")


def replace_whole(fresh: Path, path: Path) -> None:
    """Rename the finished file `fresh` to `path`. File and folder are synced, so that a power loss loses neither."""
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def replace_folder(folder: Path, fresh: Path) -> None:
    """Put the finished folder `fresh` in the place of `folder`, which may be missing; both lie on the same disk.

    Everything is synced first. `folder` may be missing for a moment, but is never incomplete. Raises OSError.
    """
    for path in fresh.rglob("*"):
        sync(path)
    sync(fresh)
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    fresh.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_. -]*")
"""Names that `file_name` returns unchanged: letters, digits, `_`, `-`, and after the first sign also `.` and space."""
SAFE = " ,+=@"
"""Signs beside letters, digits and `_.-~` that a file name may have."""


def file_name(name: str) -> str:
    """Turn any name into a readable file name; `decode_file_name` turns it back.

    What could hide the file or leave its folder is written as %XX: `a/b` becomes `a%2Fb`. Letters of any script stay.
    """
    if PLAIN.fullmatch(name):
        return name
    quoted = "".join(_quote_character(char) for char in name)
    if quoted.startswith("."):
        return f"%2E{quoted[1:]}"
    return quoted


def _quote_character(char: str) -> str:
    """Return a character as it stands in a file name: a visible one outside of ASCII as it is."""
    is_foreign_letter = char > "~" and char.isprintable()
    return char if is_foreign_letter else quote(char, safe=SAFE)


def decode_file_name(file: str) -> str:
    """Return the name that `file_name` turned into this file name."""
    return unquote(file)


KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}
"""Types of what a path may name beside a regular file, in words."""


def irregular(path: Path) -> str | None:
    """Return what a path names in place of a regular file, such as "folder" or "named pipe"; else None.

    Ask before opening, because opening a pipe, and some devices, waits for ever.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # missing, a broken link, or in a folder without rights
        return None
    return KINDS.get(stat.S_IFMT(mode))


def require_regular(path: Path) -> None:
    """Raise OSError for a folder, a pipe, a device or a socket: it is reported as a file that cannot be read."""
    kind = irregular(path)
    if kind is not None:
        raise OSError(f"it is a {kind}, not a regular file")


def as_json(owner: str, value: object, sort_keys: bool = False, indent: int | None = 1) -> bytes:
    """Encode a value as JSON in UTF-8; with the default `indent`, a line per field.

    owner: whose value it is, for the message. Raises NotPlain for a value that JSON cannot express.
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, sort_keys=sort_keys).encode()
    except (TypeError, ValueError, RecursionError) as error:  # an unknown type, half a character, a circle
        raise NotPlain(owner, str(error)) from error


SEAL = "seal"
"""The first field of a sealed record: the `content_hash` of the record without this line."""


def seal_record(owner: str, value: Mapping[str, object]) -> bytes:
    """Encode a record as JSON, with a hash of its content as the first field; `unseal_record` reads it.

    For example `{"rows": 3}` becomes

        {
         "seal": "<hash of the record as JSON>",
         "rows": 3
        }

    value: the record's fields, at least one. owner: whose record it is. Raises NotPlain, which names `owner`.
    """
    body = as_json(owner, value)
    without_brace = body[1:]
    return _encode_seal_line(content_hash(body)) + without_brace


def unseal_record(content: bytes) -> dict[str, Any]:
    """Return the record that `seal_record` encoded, without the seal.

    Raises ValueError for anything else: a truncated record, a flipped bit, another format.
    """
    try:
        record = json.loads(content)
        seal = record.pop(SEAL)
    except (RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is no record: {error!r}") from error
    if not _is_intact(content, seal):
        raise ValueError("is damaged: its content is not what was written")
    return dict(record)


def _is_intact(content: bytes, seal: object) -> bool:
    """Return whether a sealed record is as it was written: its seal is the hash of its brace and its other lines."""
    prefix = _encode_seal_line(seal)
    body = b"{" + content[len(prefix) :]
    return content.startswith(prefix) and content_hash(body) == seal


def _encode_seal_line(seal: object) -> bytes:
    """Return how a sealed record begins: the brace of its JSON, and its seal."""
    return f'{{\n "{SEAL}": "{seal}",'.encode()


FILES = "files"
"""The field of a sealed record that lists the files beside it, by name, with their hashes: the `file_hash` of each, or
a list of its size in bytes and its `content_hash`."""


def hash_files_beside(record: Path) -> dict[str, str]:
    """Return the `file_hash` of every other file in the folder of `record`, by name, for its field FILES.

    Raises OSError.
    """
    files = sorted(record.parent.iterdir())
    return {file.name: file_hash(file) for file in files if file != record}


def iter_files_beside(record: Path, again: bool = False) -> Iterator[tuple[Path, bool]]:
    """Yield each file that a sealed record lists (FILES), and whether it holds what was written.

    again: read every file, also where size and times did not change. A damaged record is yielded alone.
    """
    try:
        require_regular(record)
        # By name of the file, its hash: a text, or [size in bytes, hash] (see `_is_whole`).
        listed_hashes = unseal_record(record.read_bytes())[FILES]
    except (OSError, ValueError, KeyError):
        yield record, False
        return
    for name, listed_hash in listed_hashes.items():
        file = record.parent / name
        yield file, _is_whole(file, listed_hash, again=again)


def list_damaged_beside(record: Path, again: bool = False) -> list[Path]:
    """Return the files of `iter_files_beside` that are missing or damaged."""
    return [file for file, is_whole in iter_files_beside(record, again) if not is_whole]


def _is_whole(file: Path, listed_hash: str | list[Any], *, again: bool) -> bool:
    """Return whether a file has the hash that a record lists for it; False for a file that cannot be read.

    - listed_hash: a text is the file's `file_hash`; a list is [size in bytes, `content_hash`].
    - again: read the file. Else a hash is trusted that was remembered when it had the same size and times.
    """
    try:
        require_regular(file)
        if isinstance(listed_hash, str):
            return file_hash(file, again) == listed_hash
        _size, listed_content_hash = listed_hash
        content_hash_now = stream_hash(file) if again else read_remembered_hashes(file).content
        return bool(content_hash_now == listed_content_hash)
    except OSError:
        return False


def find_changed_unseen(files: Iterable[Path]) -> Path | None:
    """Read files and return the first whose content differs from its remembered hash; None where all are whole.

    Call it right before loading, which then takes the files from the system's cache. Raises OSError.
    """
    for file in files:
        if stream_hash(file) != read_remembered_hashes(file).content:
            return file
    return None


READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""The errors of opening a file for writing where this process may only read."""


class _LockFiles:
    """The lock files that this process has open.

    A forked child inherits open files, and with them the locks, which it would hold as long as it lives. So it closes
    its copies first. No file is opened during a fork: the child would not know of it.
    """

    def __init__(self) -> None:
        self._files = set[IO[bytes]]()
        self._guard = threading.Lock()
        os.register_at_fork(
            before=self._guard.acquire,
            after_in_parent=self._guard.release,
            after_in_child=self._close_in_child,
        )

    @contextmanager
    def open(self, path: Path, mode: str) -> Iterator[IO[bytes]]:
        """Open a file that is about to be locked, and close it after the block. Raises OSError."""
        with self._guard:
            file: IO[bytes] = path.open(mode, buffering=0)
            self._files.add(file)
        try:
            yield file
        finally:
            self._files.discard(file)
            file.close()

    def _close_in_child(self) -> None:
        """Close all files in a forked child, which then holds no lock."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._guard.release()  # the child inherits it as it was acquired before the fork


_lock_files = _LockFiles()


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Lock the file `path` during the block, which one process at a time enters. Yield whether it is locked.

    wait: wait for another process to release the lock; else False is yielded at once.

    The kernel releases the lock when its holder ends. In a folder that this process may not write to, a missing lock
    file is not needed: True is yielded. Raises OSError.
    """
    with ExitStack() as stack:
        file = _open_to_lock(path, stack)
        if file is None:
            yield True
            return
        mode = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.flock(file, mode)
        except BlockingIOError:
            yield False
            return
        yield True


def _open_to_lock(path: Path, stack: ExitStack) -> IO[bytes] | None:
    """Open a lock file until `stack` ends; it is made where it is missing. Raises OSError.

    A file that this process may only read is opened for reading. Return None where it is missing and cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(_lock_files.open(path, "ab"))
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
    if path.is_file():  # a lock needs no right to write
        return stack.enter_context(_lock_files.open(path, "rb"))
    return None
