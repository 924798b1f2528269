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

from toolformer_dag.identity import compute_content_hash, compute_file_content_hash, file_hash, read_remembered_hashes

TEMPORARY_NAME_PATTERN = re.compile(r"\.tmp-[0-9a-f]{32}(?:\.\w+)*")
"""The name of an unfinished file; `clean` removes those that a killed process left."""


class UserError(Exception):
    """A mistake that a person can mend: the message names the thing, the reason and the remedy.

    The command line shows it as one message, without a traceback.
    """


class StorageError(UserError):
    """Base of every error about files and the lake. The message names the file, the reason and the remedy."""


class Limit(NamedTuple):
    """A limit that the shell sets for a process, such as the number of open files.

    Attributes:
        command: The shell command that shows and sets the limit.
        resource_number: The number of the limit for `resource.getrlimit`.
        error_numbers: The `errno` of the errors that a process gets when it meets the limit.
        description: What the limit counts, in words.
        unit: How many bytes or things the command counts as one.
    """

    command: str
    resource_number: int
    error_numbers: tuple[int, ...]
    description: str
    unit: int = 1


LIMITS = (
    Limit("ulimit -n", resource.RLIMIT_NOFILE, (errno.EMFILE, errno.ENFILE), "open files"),
    Limit("ulimit -u", resource.RLIMIT_NPROC, (errno.EAGAIN,), "processes and threads"),
    Limit("ulimit -v", resource.RLIMIT_AS, (errno.ENOMEM,), "memory", unit=1024),
)
ERROR_NUMBER_BY_WORDS = {
    "Too many open files": errno.EMFILE,
    "can't start new thread": errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
    "can't allocate memory": errno.ENOMEM,
    "Cannot allocate memory": errno.ENOMEM,
    "not enough memory": errno.ENOMEM,
    "could not allocate": errno.ENOMEM,
}
"""The error numbers that belong to words in messages of torch, DuckDB, Rust and Python's threads, which have none."""


def explain_exceeded_limit(error: BaseException) -> str | None:
    """Explain an error by the limit of this process that caused it, if one did.

    Returns:
        Which limit it is and what to do, or None for any other error.

    Example:
        "there are not enough open files (ulimit -n: 1024); raise that limit"
    """
    error_number = _find_error_number(error)
    for limit in LIMITS:
        if error_number in limit.error_numbers:
            value = _format_limit_value(limit)
            return f"there are not enough {limit.description} ({limit.command}: {value}); raise that limit"
    return None


def _format_limit_value(limit: Limit) -> str:
    """Return the value of a limit as its shell command shows it, or "none" if nothing is limited."""
    soft_limit, _hard_limit = resource.getrlimit(limit.resource_number)
    if soft_limit == resource.RLIM_INFINITY:
        return "none"
    return str(soft_limit // limit.unit)


def _find_error_number(error: BaseException) -> int | None:
    """Find the system's number of an error, such as errno.ENOMEM.

    Returns:
        The `errno` of the error. Without one, the number that belongs to words of its message
        (ERROR_NUMBER_BY_WORDS), or None if there are no such words.
    """
    if isinstance(error, MemoryError):
        return errno.ENOMEM

    error_number: int | None = getattr(error, "errno", None)
    if error_number is not None:
        return error_number

    message = str(error)
    for words, number_of_words in ERROR_NUMBER_BY_WORDS.items():
        if words in message:
            return number_of_words
    return None


NEEDED_THREADS = 32
"""Threads that a command may start in addition to one per core, for the thread pools of libraries."""
AMPLE_PROCESS_LIMIT = 10_000
"""A limit of processes that is high enough not to be tried."""


def require_threads() -> None:
    """Check that this process can start as many threads as a command needs (`ulimit -u`).

    Call it before libraries are imported, because some of them hang or abort at the limit.

    Raises:
        UserError: There are too few threads.
    """
    soft_limit, _hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft_limit == resource.RLIM_INFINITY or soft_limit > AMPLE_PROCESS_LIMIT:
        return

    # The limit is low, so start the threads to see whether it is high enough.
    thread_count = NEEDED_THREADS + (os.cpu_count() or 1)
    try:
        _start_threads(thread_count)
    except RuntimeError as error:
        explanation = explain_exceeded_limit(error)
        raise UserError(f"a command may need {thread_count} threads: {explanation} and run again") from error


def _start_threads(thread_count: int) -> None:
    """Find out whether this process may have so many threads at once, by starting them.

    All stay alive until the last one has started, and then end.

    Raises:
        RuntimeError: The system refuses to start one of them.
    """
    may_end = threading.Event()
    try:
        for _ in range(thread_count):
            threading.Thread(target=may_end.wait, daemon=True).start()
    finally:
        may_end.set()


class WriteError(StorageError):
    """A file cannot be written. What was committed before is still there."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = explain_exceeded_limit(error) or "free space or correct the rights"
        super().__init__(
            f"cannot write {path}: {error.strerror or error}; {remedy} and run again, what was committed before stays"
        )


class ReadError(StorageError):
    """A file exists, but could not be read this time. It is left as it is."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = explain_exceeded_limit(error) or "correct the rights or the disk"
        super().__init__(
            f"cannot read {path}: {error.strerror or error}; {remedy} and run again, the file was left as it is"
        )


class NotPlain(StorageError):
    """An identity or a record has a value that JSON cannot express. The message begins with its owner."""

    def __init__(self, owner: str, reason: str) -> None:
        super().__init__(
            f"{owner}: {reason}; what its rows are made from is written as JSON: turn the value into text, a number, "
            "a list or a mapping, in identity() where it is a tool's"
        )


def write_file_atomically(path: Path, content: bytes) -> None:
    """Write a file as a whole: readers see the old content or the new one, even after a power loss.

    Missing folders are created.

    Raises:
        WriteError: The file cannot be written. No temporary file is left.
    """
    temporary = build_temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_and_sync(temporary, content)
        temporary.replace(path)
        sync_to_disk(path.parent)
    except OSError as error:
        raise WriteError(path, error) from error
    finally:
        # After a success, the temporary file has been renamed and there is nothing to remove.
        with suppress(OSError):
            temporary.unlink()


def _write_and_sync(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on the disk.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_output_file(path: Path, content: bytes, option_name: str, replaces_existing: bool) -> None:
    """Write the file that a person named on the command line.

    A regular file is written as a whole. A pipe or a device is written to as it is.

    Args:
        path: The file.
        content: Its content.
        option_name: The option that named the file, such as "--out". Only used in the error message.
        replaces_existing: Replace an existing file.

    Raises:
        UserError: The file exists, and `replaces_existing` is not set.
        WriteError: The file cannot be written.
    """
    # The kind is None for a regular file, and if there is nothing.
    is_pipe_or_device = find_irregular_kind(path) not in (None, "folder")
    if is_pipe_or_device:
        _write_to_stream(path, content)
        return

    if path.exists() and not replaces_existing:
        raise UserError(
            f"{option_name} {path}: there is such a file, and it stays; name another, or replace it with --force"
        )
    write_file_atomically(path.resolve(), content)


def _write_to_stream(path: Path, content: bytes) -> None:
    """Write to a pipe or a device.

    Raises:
        WriteError: It cannot be written to.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise WriteError(path, error) from error


def build_temporary_path(path: Path, suffix: str = "") -> Path:
    """Return an unused path in the folder of `path`, for an unfinished file.

    Its name is `.tmp-` and 32 random digits (see TEMPORARY_NAME_PATTERN).

    Args:
        path: The path that the finished file will have.
        suffix: How the name ends, such as ".parquet".
    """
    return path.with_name(f".tmp-{uuid4().hex}{suffix}")


def replace_file(finished_file: Path, path: Path) -> None:
    """Rename a finished file to `path`, replacing the file that is there.

    The file and its folder are synced, so that a power loss loses neither.

    Raises:
        OSError: The file cannot be synced or renamed.
    """
    sync_to_disk(finished_file)
    finished_file.replace(path)
    sync_to_disk(path.parent)


def replace_folder(folder: Path, finished_folder: Path) -> None:
    """Put a finished folder in the place of another one on the same disk.

    Everything is written to the disk first. For a moment `folder` may be missing, but it is never incomplete.

    Args:
        folder: The folder to replace, which may be missing.
        finished_folder: The finished folder. It is renamed.

    Raises:
        OSError: The folder cannot be replaced.
    """
    for path in finished_folder.rglob("*"):
        sync_to_disk(path)
    sync_to_disk(finished_folder)

    # A folder with this name may be left from a process that was killed here.
    old_folder = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old_folder, ignore_errors=True)

    if folder.exists():
        folder.rename(old_folder)
    finished_folder.rename(folder)
    sync_to_disk(folder.parent)
    shutil.rmtree(old_folder, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: The file or folder cannot be opened or synced.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PLAIN_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_. -]*")
"""Names that `encode_file_name` returns unchanged: letters, digits, `_`, `-`, and after the first one `.` and space."""
SAFE_CHARACTERS = " ,+=@"
"""Characters that a file name may have in addition to letters, digits and `_.-~`."""


def encode_file_name(name: str) -> str:
    """Turn any name into a readable file name.

    Characters that could hide the file or leave its folder are written as %XX. Letters of any script stay
    as they are. `decode_file_name` does the reverse.

    Example:
        "a/b" gives "a%2Fb".
    """
    if PLAIN_NAME_PATTERN.fullmatch(name):
        return name

    encoded_name = "".join(_encode_character(character) for character in name)
    # A dot at the beginning would hide the file.
    if encoded_name.startswith("."):
        return f"%2E{encoded_name[1:]}"
    return encoded_name


def _encode_character(character: str) -> str:
    """Return a character as it stands in a file name: as it is, or as %XX for each of its bytes."""
    is_visible_and_not_ascii = character > "~" and character.isprintable()
    if is_visible_and_not_ascii:
        return character
    return quote(character, safe=SAFE_CHARACTERS)


def decode_file_name(encoded_name: str) -> str:
    """Return the name that `encode_file_name` turned into this file name."""
    return unquote(encoded_name)


FILE_KIND_BY_MODE = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}
"""What a path may name other than a regular file, in words, by the type bits of its mode."""


def find_irregular_kind(path: Path) -> str | None:
    """Return what a path names if it is not a regular file, such as "folder" or "named pipe".

    Ask this before opening a file, because opening a pipe, and some devices, waits forever.

    Returns:
        The kind in words, or None for a regular file and for a path that names nothing.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # missing, a broken link, or in a folder without rights
        return None
    return FILE_KIND_BY_MODE.get(stat.S_IFMT(mode))


def require_regular_file(path: Path) -> None:
    """Check that a path names a regular file or nothing.

    Raises:
        OSError: It names a folder, a pipe, a device or a socket. The message says which.
    """
    kind = find_irregular_kind(path)
    if kind is not None:
        raise OSError(f"it is a {kind}, not a regular file")


def encode_json(owner: str, value: object, sort_keys: bool = False, indent: int | None = 1) -> bytes:
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


SEAL_FIELD = "seal"
"""The first field of a sealed record: the `compute_content_hash` of the record without this line."""


def seal_record(owner: str, value: Mapping[str, object]) -> bytes:
    """Encode a record as JSON, with a seal: a hash of its content, by which damage is noticed later.

    The seal becomes the first field. `unseal_record` decodes the record and checks the seal.

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
    record = encode_json(owner, value)
    record_without_brace = record[1:]  # the line of the seal begins with a brace of its own
    return _encode_seal_line(compute_content_hash(record)) + record_without_brace


def unseal_record(content: bytes) -> dict[str, Any]:
    """Decode a record that `seal_record` has encoded, without the seal.

    Raises:
        ValueError: The content is something else, such as a truncated record or one with a flipped bit.
    """
    try:
        record = json.loads(content)
        seal = record.pop(SEAL_FIELD)
    except (RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is no record: {error!r}") from error

    if not _is_intact(content, seal):
        raise ValueError("is damaged: its content is not what was written")
    return dict(record)


def _is_intact(content: bytes, seal: object) -> bool:
    """Return whether a sealed record is as it was written.

    Args:
        content: The whole sealed record.
        seal: The seal that was read from it. It must be the hash of the record without its seal.
    """
    beginning = _encode_seal_line(seal)
    if not content.startswith(beginning):
        return False
    # The seal stands first, on a line of its own after the brace. The brace and what follows the seal are the record
    # without it.
    record = b"{" + content[len(beginning) :]
    return compute_content_hash(record) == seal


def _encode_seal_line(seal: object) -> bytes:
    """Return how a sealed record begins: the opening brace, and the line of its seal."""
    return f'{{\n "{SEAL_FIELD}": "{seal}",'.encode()


FILES_FIELD = "files"
"""The field of a sealed record that lists the files in its folder, by name, with their hashes: the `file_hash` of each,
or a list of its size in bytes and its `compute_content_hash`."""


def hash_sibling_files(record_path: Path) -> dict[str, str]:
    """Return the `file_hash` of every other file in the folder of a record, by file name.

    It is what the record lists in its field FILES_FIELD.

    Args:
        record_path: The file of the record, which may be missing.

    Raises:
        OSError: A file cannot be read.
    """
    hash_by_name = {}
    for file in sorted(record_path.parent.iterdir()):
        if file != record_path:
            hash_by_name[file.name] = file_hash(file)
    return hash_by_name


def iter_listed_files(record_path: Path, force_read: bool = False) -> Iterator[tuple[Path, bool]]:
    """Check one by one the files that a sealed record lists (in its field FILES_FIELD), which lie in the same folder.

    Args:
        record_path: The file of the record.
        force_read: Read every file, even if its size and times have not changed since its hash was computed.

    Yields:
        Each file, and whether it holds what was written. If the record itself is damaged, only the record.
    """
    try:
        require_regular_file(record_path)
        # By file name, either a hash, or [size in bytes, hash] (see `_is_as_listed`).
        entry_by_name = unseal_record(record_path.read_bytes())[FILES_FIELD]
    except (OSError, ValueError, KeyError):
        yield record_path, False
        return

    for name, entry in entry_by_name.items():
        file = record_path.parent / name
        yield file, _is_as_listed(file, entry, force_read=force_read)


def list_damaged_files(record_path: Path, force_read: bool = False) -> list[Path]:
    """Return the files that a sealed record lists and that are missing or damaged (see `iter_listed_files`).

    If the record itself is damaged, it is the only one.
    """
    return [file for file, is_whole in iter_listed_files(record_path, force_read) if not is_whole]


def _is_as_listed(file: Path, entry: str | list[Any], *, force_read: bool) -> bool:
    """Return whether a file has the hash that a record lists for it. A file that cannot be read has not.

    Args:
        file: The file.
        entry: What the record says of the file: its `file_hash` as text, or a list of two items, its size in bytes and
            its `compute_content_hash`.
        force_read: Read the file. Otherwise a remembered hash is trusted if size and times are still the same.
    """
    try:
        require_regular_file(file)
        if isinstance(entry, str):
            return file_hash(file, force_read) == entry

        _size, listed_content_hash = entry  # a file of another size has another hash
        if force_read:
            content_hash = compute_file_content_hash(file)
        else:
            content_hash = read_remembered_hashes(file).content_hash
        return bool(content_hash == listed_content_hash)
    except OSError:
        return False


def find_silently_changed_file(files: Iterable[Path]) -> Path | None:
    """Read files, to find the first one whose content no longer has its remembered hash.

    Such a file was damaged on the disk: its content changed, but not its size and times. Call this right before
    the files are loaded, because they are then in the system's cache.

    Returns:
        That file, or None if all files are whole.

    Raises:
        OSError: A file cannot be read.
    """
    for file in files:
        if compute_file_content_hash(file) != read_remembered_hashes(file).content_hash:
            return file
    return None


READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)
"""The `errno` of opening a file for writing where this process may only read."""


class _LockFiles:
    """The lock files that this process has open.

    A forked child inherits open files, and with them the locks, which it would hold as long as it lives. So it closes
    its copies first. No file is opened during a fork: the child would not know of it.
    """

    def __init__(self) -> None:
        self._open_files = set[IO[bytes]]()
        self._fork_guard = threading.Lock()
        os.register_at_fork(
            before=self._fork_guard.acquire,
            after_in_parent=self._fork_guard.release,
            after_in_child=self._close_in_child,
        )

    @contextmanager
    def open(self, path: Path, mode: str) -> Iterator[IO[bytes]]:
        """Open a file that is about to be locked, and close it after the `with` block.

        The file is remembered while it is open. A forked child closes its copies of all remembered files, because with
        them it would keep the locks.

        Raises:
            OSError: The file cannot be opened.
        """
        # No fork can happen while the guard is held, so every file that a child inherits is remembered.
        with self._fork_guard:
            file: IO[bytes] = path.open(mode, buffering=0)
            self._open_files.add(file)
        try:
            yield file
        finally:
            self._open_files.discard(file)
            file.close()

    def _close_in_child(self) -> None:
        """Close all files in a forked child, which then holds no lock."""
        for file in self._open_files:
            file.close()
        self._open_files.clear()
        self._fork_guard.release()  # the child inherits it as it was acquired before the fork


_lock_files = _LockFiles()


@contextmanager
def hold_file_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a file during the `with` block, which only one process at a time can enter.

    The kernel releases the lock when the process ends. If the lock file is missing in a folder where this
    process may not write, nothing is locked and the block is entered as if it were.

    Args:
        path: The lock file. It is created if it is missing.
        wait: Wait until another process releases the lock.

    Yields:
        True if the lock is held, or if nothing could be locked for lack of rights. False only if another process
        holds the lock and `wait` is not set.

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
        if error.errno not in READ_ONLY_ERRORS:
            raise

    # A lock needs no right to write.
    if path.is_file():
        return stack.enter_context(_lock_files.open(path, "rb"))
    return None
