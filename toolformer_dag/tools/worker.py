"""A thread whose work has a time limit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedOut(Exception):
    """The work did not end in time; its thread was left behind."""


class Worker(Generic[T]):
    """Runs functions one after the other in one daemon thread, so that what a backend keeps per thread stays warm.

    Work that exceeds its limit is left behind in its thread and a fresh thread takes over: Python cannot end a thread.
    Not covered: what the work left behind still holds (memory, locks, the interpreter's lock in native code). It ends
    with the process, which it does not keep alive.
    """

    def __init__(self) -> None:
        self._jobs = self._start()

    def outcome(self, function: Callable[[], T], seconds: float) -> Future[T]:
        """A finished future with what `function` returned or raised; TimedOut after `seconds`."""
        future: Future[T] = Future()
        self._jobs.put((function, future))
        try:
            future.exception(timeout=seconds)
        except TimeoutError:
            self.close()
            self._jobs = self._start()
            raise TimedOut from None
        return future

    def close(self) -> None:
        """Let the thread end once it is idle."""
        self._jobs.put(None)

    @staticmethod
    def _start() -> "SimpleQueue[tuple[Callable[[], T], Future[T]] | None]":
        jobs: SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), daemon=True).start()
        return jobs


def _serve(jobs: "SimpleQueue[tuple[Callable[[], T], Future[T]] | None]") -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - foreign code: whatever it raises is the caller's to judge
            future.set_exception(error)
