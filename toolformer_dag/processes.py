"""Processes that end with their parent, however that ended."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import parent_process
from typing import NoReturn


def end_with_parent(parent: int | None = None) -> None:
    """End this process at once when its parent is gone; nothing happens without a parent.

    `parent`: the id of the process to end with, where multiprocessing did not start this one; looked for every second.
    """
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int | None) -> None:
    if parent is not None:
        while exists(parent):
            time.sleep(1.0)
    elif started := parent_process():
        started.join()
    else:
        return
    os._exit(1)


@cache
def forked_end_too() -> None:
    """Let what this process forks from now on end within a second of its parent, and what that forks in turn.

    What it executes is let alone. A kill -9 lets no process tidy up: a tool that uses multiprocessing would leave some.
    """
    parent = [0]

    def begin() -> None:
        threading.Thread(target=_end_as_orphan, args=tuple(parent), daemon=True).start()

    os.register_at_fork(before=lambda: parent.__setitem__(0, os.getpid()), after_in_child=begin)


def _end_as_orphan(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@contextmanager
def unfinished(said: str) -> Iterator[None]:
    """Let `os._exit` inside the block end this process with another status than 0, after `said` on its standard error.

    A tool that ends the process in the middle of a run would make it look like a run that went well. `os.exec` raises
    RuntimeError, as do C's functions by ctypes. Not covered: a compiled library that calls these itself.
    """
    process, leave, terminal = os.getpid(), os._exit, -1
    _refuse_other_ends()
    _unfinished.add(process)
    with suppress(OSError):  # a closed standard error
        terminal = os.dup(2)  # Dagster keeps what steps write to 2

    def left(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        with suppress(OSError):
            os.write(terminal, said.encode())
        leave(status or 1)

    os._exit = left
    try:
        yield
    finally:
        os._exit = leave
        _unfinished.discard(process)
        with suppress(OSError):
            os.close(terminal)


_unfinished = set[int]()
C_ENDS = {"_exit", "_Exit", "exit", "quick_exit", "execl", "execle", "execlp", "execv", "execve", "execvp"}
"""Functions of the C library that end a process, or put another program in its place."""


@cache
def _refuse_other_ends() -> None:
    """Let Python refuse what ends an unfinished process in another way than by `os._exit`; its children may do it."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.exec" or (event == "ctypes.dlsym" and arguments[1] in C_ENDS):
            name = arguments[0] if event == "os.exec" else arguments[1]
            if os.getpid() in _unfinished:
                raise RuntimeError(f"{name!r} would end this run in its middle; start a process of its own for it")

    sys.addaudithook(refuse)


def exists(process: int) -> bool:
    """Return whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
