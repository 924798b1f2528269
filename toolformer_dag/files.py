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
    """Find the limit of this process that caused an error, if one did.

    Returns:
        Which limit it is and what to do, or None for any other error.

    Example:
        "there are not enough open files (ulimit -n: 1024); raise that limit"
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
    """Find the system's number of an error, such as errno.ENOMEM.

    Returns:
        The `errno` of the error. Without one, the number that belongs to words of its message
        (LIMIT_WORDS), or None if there are no such words.
    """
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
    """Check that this process can start as many threads as a command needs (`ulimit -u`).

    Call it before libraries are imported, because some of them hang or abort at the limit.

    Raises:
        UserError: There are too few threads.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft_limit == resource.RLIM_INFINITY or soft_limit > AMPLE:
        return

    # The limit is low, so try it out: start the threads.
    count = NEEDED_THREADS + (os.cpu_count() or 1)
    try:
        _start_threads(count)
    except RuntimeError as error:
        raise UserError(f"a command may need {count} threads: {explain_limit_met(error)} and run again") from error


def _start_threads(count: int) -> None:
    """Start threads that all stay alive until the last one is started, then let them end.

    Raises:
        RuntimeError: The system refuses to start one of them.
    """
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
    """Write a file as a whole: readers see the old content or the new one, even after a power loss.

    Missing folders are created.

    Raises:
        WriteError: The file cannot be written. No temporary file is left.
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
    """Write the file that a person named on the command line.

    A pipe or a device is written to as it is.

    Args:
        path: The file.
        content: Its content.
        option: Such as "--out". Only used in the error message.
        force: Replace an existing file.

    Raises:
        UserError: The file exists, and `force` is not set.
        WriteError: The file cannot be written.
    """
    # `irregular` returns None for a regular file, and if there is nothing.
    is_pipe_or_device = irregular(path) not in (None, "folder")
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
    """Put a finished folder in the place of another one on the same disk.

    Everything is written to the disk first. For a moment `folder` may be missing, but it is never incomplete.

    Args:
        folder: The folder to replace, which may be missing.
        fresh: The finished folder. It is renamed.

    Raises:
        OSError: The folder cannot be replaced.
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
    """Turn any name into a readable file name.

    Characters that could hide the file or leave its folder are written as %XX. Letters of any script stay
    as they are. `decode_file_name` does the reverse.

    Example:
        file_name("a/b")  # "a%2Fb"
    """
    if PLAIN.fullmatch(name):
        return name
    quoted = "".join(_quote_character(char) for char in name)
    # A leading dot would hide the file.
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
    """Return what a path names if it is not a regular file, such as "folder" or "named pipe".

    Ask this before opening a file, because opening a pipe, and some devices, waits for ever.

    Returns:
        The kind in words, or None for a regular file and for a path that names nothing.
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
    """Encode a value as JSON in UTF-8.

    Args:
        owner: Whose value it is. Only used in the error message.
        value: The value.
        sort_keys: Sort the keys of all mappings.
        indent: As in `json.dumps`. With the default, each field has a line of its own.

    Raises:
        NotPlain: JSON cannot express the value.
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, sort_keys=sort_keys).encode()
    except (TypeError, ValueError, RecursionError) as error:  # an unknown type, half a character, a circle
        raise NotPlain(owner, str(error)) from error


SEAL = "seal"
"""The first field of a sealed record: the `content_hash` of the record without this line."""


def seal_record(owner: str, value: Mapping[str, object]) -> bytes:
    """Encode a record as JSON, with a hash of its content as the first field.

    `unseal_record` reads it.

    Args:
        owner: Whose record it is. Only used in the error message.
        value: The fields of the record, at least one.

    Raises:
        NotPlain: JSON cannot express the record.

    Example:
        `{"rows": 3}` becomes

            {
             "seal": "<hash of the record as JSON>",
             "rows": 3
            }
    """
    body = as_json(owner, value)
    without_brace = body[1:]
    return _encode_seal_line(content_hash(body)) + without_brace


def unseal_record(content: bytes) -> dict[str, Any]:
    """Decode a record that `seal_record` has encoded, without the seal.

    Raises:
        ValueError: The content is something else, such as a truncated record or one with a flipped bit.
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
    """Check the files that a sealed record lists (in the field FILES), which lie in the same folder.

    Args:
        record: The file of the record.
        again: Read every file, even if its size and times have not changed since its hash was computed.

    Yields:
        Each file, and whether it holds what was written. If the record itself is damaged, only the record.
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
    """Return whether a file has the hash that a record lists for it.

    A file that cannot be read is not whole.

    Args:
        file: The file.
        listed_hash: Either the `file_hash` as text, or a list of the size in bytes and the `content_hash`.
        again: Read the file. Otherwise a remembered hash is trusted if size and times are still the same.
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
    """Read files, to find the first one whose content does not have its remembered hash any more.

    Call this right before the files are loaded, because they are then in the system's cache.

    Returns:
        That file, or None if all files are whole.

    Raises:
        OSError: A file cannot be read.
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
        """Open a file that is about to be locked, and close it after the `with` block.

        Raises:
            OSError: The file cannot be opened.
        """
        # No fork can happen while the guard is held, so that a child knows of every open file.
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
    """Lock a file during the `with` block, which only one process at a time can enter.

    The kernel releases the lock when the process ends. If the lock file is missing in a folder where this
    process may not write, nothing is locked and the block is entered as if it were.

    Args:
        path: The lock file. It is created if it is missing.
        wait: Wait until another process releases the lock.

    Yields:
        True if the lock is held. False only if another process holds it and `wait` is not set.

    Raises:
        OSError: The file cannot be opened or locked.
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
    """Open a lock file, creating it if it is missing.

    A file that this process may only read is opened for reading, which is enough for a lock.

    Args:
        path: The lock file.
        stack: Closes the file when it ends.

    Returns:
        The file, or None if it is missing and cannot be created for lack of rights.

    Raises:
        OSError: The file cannot be opened for another reason.
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
