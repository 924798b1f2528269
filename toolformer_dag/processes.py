"""Processes that end with their parent, however that ended, and commands that a tool cannot end unnoticed."""

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

PAUSE = 1.0
"""Seconds between two looks at whether a parent is there."""


def end_with_parent(parent: int | None = None) -> None:
    """End this process, without tidying up, as soon as its parent has ended, for which a thread waits.

    parent: the id of a process; default: the one that started this by multiprocessing.
    """
    threading.Thread(target=_wait_and_end, args=(parent,), daemon=True).start()


def _wait_and_end(parent: int | None) -> None:
    """Wait until another process has ended, then end this one.

    parent: its id; None for the process that started this one by multiprocessing. Without any such, return at once.
    """
    if parent is not None:
        while exists(parent):
            time.sleep(PAUSE)
    else:
        starter = parent_process()
        if starter is None:
            return
        starter.join()
    os._exit(1)


@cache
def end_forked_with_parent() -> None:
    """Make every process that is forked from this one, or from its children, end within a second of its parent.

    A child that executes another program is left alone. Further calls change nothing.
    """
    # Set in the parent before each fork, so that the child has its parent's id. A child inherits the hooks below, which
    # then work for its own children too.
    forking_process = os.getpid()

    def note_parent() -> None:
        nonlocal forking_process
        forking_process = os.getpid()

    def watch_parent() -> None:  # runs in the child
        threading.Thread(target=_end_as_orphan, args=(forking_process,), daemon=True).start()

    os.register_at_fork(before=note_parent, after_in_child=watch_parent)


def _end_as_orphan(parent: int) -> None:
    """Wait until the system has given this process another parent, which it does when `parent` ends; then end it."""
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(1)


@contextmanager
def unfinished(message: str) -> Iterator[None]:
    """Make the command fail, with a message, where the code of a tool ends this process inside the block.

    A tool that calls `os._exit(0)` would otherwise end the command as if it had succeeded. Inside the block, `os._exit`
    writes `message` to standard error and never ends with status 0; `os.exec`, and functions of C that end a process,
    raise RuntimeError. Forked children are not affected.
    """
    exit_of_os = os._exit
    failing_exit = _FailingExit(os.getpid(), message, _copy_standard_error(), exit_of_os)
    _refuse_other_ends()  # adds a hook for good, which refuses in the processes of `_unfinished` alone
    _unfinished.add(failing_exit.process)  # the id of this process
    os._exit = failing_exit
    try:
        yield
    finally:
        os._exit = exit_of_os
        _unfinished.discard(failing_exit.process)
        with suppress(OSError):
            os.close(failing_exit.standard_error)


@dataclass(frozen=True, slots=True)
class _FailingExit:
    """What stands in place of `os._exit` while a command goes on: it says so, and never ends with status 0.

    - `process`: the id of the command's process; forked children end as ever
    - `standard_error`: the descriptor that `message` is written to
    - `exit_of_os`: the `os._exit` of Python
    """

    process: int
    message: str
    standard_error: int
    exit_of_os: Callable[[int], NoReturn]

    def __call__(self, status: int) -> NoReturn:
        """End the process."""
        if os.getpid() != self.process:  # a forked child
            self.exit_of_os(status)
        with suppress(OSError):
            os.write(self.standard_error, self.message.encode())
        self.exit_of_os(status or 1)


def _copy_standard_error() -> int:
    """Return a new descriptor of standard error, -1 where that is closed.

    A copy is needed because Dagster redirects what a step writes to descriptor 2.
    """
    try:
        return os.dup(2)
    except OSError:
        return -1


_unfinished = set[int]()
"""The ids of the processes that are inside a block of `unfinished`; forked children inherit the set, not the id."""
C_ENDS = {"_exit", "_Exit", "exit", "quick_exit", "execl", "execle", "execlp", "execv", "execve", "execvp"}
"""Functions of the C library that end a process, or put another program in its place."""


@cache
def _refuse_other_ends() -> None:
    """Make `os.exec*`, and ctypes' look-up of `exit` and the like (C_ENDS), raise RuntimeError while a command runs.

    They would end the process without a message. `_unfinished` holds the ids of the processes in which a command runs.
    Python announces these calls to audit hooks. A hook cannot be removed, so it is added once.
    """

    def refuse(event: str, arguments: tuple[object, ...]) -> None:  # an audit hook
        if event == "os.exec":
            name = arguments[0]
        elif event == "ctypes.dlsym" and arguments[1] in C_ENDS:  # (library, name of the function)
            name = arguments[1]
        else:
            return
        if os.getpid() in _unfinished:
            raise RuntimeError(f"{name!r} would end this run in its middle; start a process of its own for it")

    sys.addaudithook(refuse)


def exists(process: int) -> bool:
    """Return whether a process with this id is running, also where it is another user's."""
    try:
        os.kill(process, 0)  # sends nothing
    except PermissionError:
        return True
    except OSError:
        return False
    return True
