"""Processes that end with their parent, however it ended, and commands that the code of a tool cannot end unnoticed."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import parent_process
from typing import NoReturn

PARENT_CHECK_SECONDS = 1.0
"""Seconds between two checks of whether a parent process is still running."""


def end_with_parent(parent_id: int | None = None) -> None:
    """End this process, without tidying up, as soon as its parent has ended.

    A thread waits for that, and the function returns at once.

    Args:
        parent_id: The id of the process to wait for. By default, the process that started this one with
            multiprocessing. If there is none, nothing is done.
    """
    threading.Thread(target=_end_after_process, args=(parent_id,), daemon=True).start()


def _end_after_process(parent_id: int | None) -> None:
    """Wait until another process has ended, and then end this one.

    Args:
        parent_id: The id of the other process. None stands for the process that started this one with
            multiprocessing. If there is none, the function returns at once.
    """
    if parent_id is None:
        starting_process = parent_process()
        if starting_process is None:
            return
        starting_process.join()
    else:
        while is_process_running(parent_id):
            time.sleep(PARENT_CHECK_SECONDS)

    os._exit(1)


@cache
def end_forked_with_parent() -> None:
    """Make every process that is forked from this one, or from its children, end soon after its parent.

    A thread in each child checks its parent every PARENT_CHECK_SECONDS. A child that executes another program is
    left alone. Further calls change nothing.
    """
    # Set in the parent before each fork, so that the child has its parent's id. A child inherits the hooks below, which
    # then work for its own children too.
    forking_process_id = os.getpid()

    def note_parent() -> None:
        nonlocal forking_process_id
        forking_process_id = os.getpid()

    def watch_parent() -> None:
        threading.Thread(target=_end_when_orphaned, args=(forking_process_id,), daemon=True).start()

    os.register_at_fork(before=note_parent, after_in_child=watch_parent)


def _end_when_orphaned(parent_id: int) -> None:
    """Wait until the parent of this process has ended, and then end this process.

    The system gives a process another parent when its own one ends.

    Args:
        parent_id: The id of the parent.
    """
    while os.getppid() == parent_id:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


@contextmanager
def refuse_early_exit(message: str) -> Iterator[None]:
    """Make the command fail, with a message, if the code of a tool ends this process inside the `with` block.

    A tool that calls `os._exit(0)` would otherwise end the command as if it had succeeded. Inside the block, `os._exit`
    writes the message to standard error and never ends with status 0. `os.exec`, and functions of C that end a process,
    raise RuntimeError. Forked children are not affected.

    Args:
        message: What to write to standard error.
    """
    original_exit = os._exit
    process_id = os.getpid()
    failing_exit = _FailingExit(process_id, message, _copy_standard_error(), original_exit)

    # The hook stays for good, but it only refuses in processes whose id is in the set.
    _refuse_other_exits()
    _guarded_process_ids.add(process_id)
    os._exit = failing_exit
    try:
        yield
    finally:
        os._exit = original_exit
        _guarded_process_ids.discard(process_id)
        with suppress(OSError):
            os.close(failing_exit.standard_error_descriptor)


@dataclass(frozen=True, slots=True)
class _FailingExit:
    """A replacement for `os._exit` during a command, which writes a message and never ends with status 0.

    Attributes:
        process_id: The id of the command's process. Its forked children end as they always do.
        message: What to write.
        standard_error_descriptor: The file descriptor to write it to, or -1 if standard error is closed.
        original_exit: The `os._exit` of Python.
    """

    process_id: int
    message: str
    standard_error_descriptor: int
    original_exit: Callable[[int], NoReturn]

    def __call__(self, status: int) -> NoReturn:
        """End the process: a forked child with its status, the command's process with the message and a failure."""
        is_forked_child = os.getpid() != self.process_id
        if is_forked_child:
            self.original_exit(status)

        with suppress(OSError):
            os.write(self.standard_error_descriptor, self.message.encode())
        self.original_exit(status or 1)


def _copy_standard_error() -> int:
    """Return a new file descriptor of standard error, or -1 if standard error is closed.

    A copy is needed because Dagster redirects what a step writes to descriptor 2.
    """
    try:
        return os.dup(2)
    except OSError:
        return -1


_guarded_process_ids = set[int]()
"""The ids of processes inside a block of `refuse_early_exit`. Forked children inherit the set, but have other ids."""
C_EXIT_FUNCTIONS = {"_exit", "_Exit", "exit", "quick_exit", "execl", "execle", "execlp", "execv", "execve", "execvp"}
"""Functions of the C library that end a process, or put another program in its place."""


@cache
def _refuse_other_exits() -> None:
    """Make other ways to end the process raise RuntimeError while a command runs in it.

    These are `os.exec*`, and looking up one of C_EXIT_FUNCTIONS with ctypes. They would end the process without
    a message. `_guarded_process_ids` holds the ids of the processes in which a command runs.
    """

    # Python announces these calls to audit hooks. A hook cannot be removed, so it is added only once.
    def refuse_exit(event: str, arguments: tuple[object, ...]) -> None:
        """Raise RuntimeError if an audit event of Python would end or replace a process in which a command runs.

        Args:
            event: The name of the event, as `sys.addaudithook` passes it. Any event but two is ignored.
            arguments: The arguments of the event.
        """
        if event == "os.exec":
            name = arguments[0]
        elif event == "ctypes.dlsym" and arguments[1] in C_EXIT_FUNCTIONS:  # (library, name of the function)
            name = arguments[1]
        else:
            return

        if os.getpid() in _guarded_process_ids:
            raise RuntimeError(f"{name!r} would end this run in its middle; start a process of its own for it")

    sys.addaudithook(refuse_exit)


def is_process_running(process_id: int) -> bool:
    """Return whether a process with this id exists. It may belong to another user."""
    try:
        os.kill(process_id, 0)  # signal 0 only checks whether the process exists
    except PermissionError:
        return True
    except OSError:
        return False
    return True
