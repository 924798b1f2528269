"""Give chunks to several workers and hear how they end, whatever kind of worker it is and whichever of them die."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from toolformer_dag.files import UserError
from toolformer_dag.pipeline.chunks import Ended, Tables, Task, WorkerError, perform
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stage import Work
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.sections import Settings

TRIES = 2
"""How many workers may die over one chunk."""
W = TypeVar("W")


class WorkerDied(Exception):
    """A worker ended before it answered; the message says how it ended."""


class WorkerNeverStarted(Exception):
    """A worker that was given a task found no machine to start on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker, in a form that any process can read."""

    message: str
    by_user: bool

    def error(self) -> Exception:
        """Return the exception to raise in the process that waits."""
        return UserError(self.message) if self.by_user else WorkerError(f"a worker failed: {self.message}")


@dataclass(frozen=True, slots=True)
class _Given:
    number: int
    task: Task
    tries: int = 1


class WorkerPool(ABC, Generic[W]):
    """At most `count` workers W, started when there is work for them and kept until `close`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: list[W] = []
        self._busy: dict[W, _Given] = {}

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """See Workers."""
        waiting, again = iter(enumerate(tasks)), deque[_Given]()
        more = True
        try:
            while more or again or self._busy:
                while len(self._busy) < self._count and (again or more):
                    given = again.popleft() if again else next((_Given(*one) for one in waiting), None)
                    if given is None:
                        more = False
                    else:
                        self._give(given)
                ended = self._answered(list(self._busy)) if self._busy else []
                for worker in ended:
                    yield from self._received(worker, again)
                if not ended:
                    yield None
        finally:
            self._kill_busy()

    def close(self) -> None:
        """End every worker: what it committed is kept."""
        self._kill_busy()
        while self._idle:
            self._kill(self._idle.pop())

    @abstractmethod
    def _start(self) -> W:
        """Start a worker."""

    @abstractmethod
    def _is_alive(self, worker: W) -> bool:
        """Say whether an idle worker can still be given a task."""

    @abstractmethod
    def _send(self, worker: W, task: Task) -> None:
        """Give a task; that the worker is gone is heard later, by `_answer`."""

    @abstractmethod
    def _answered(self, busy: list[W]) -> list[W]:
        """Wait for at most a second and return those of `busy` that answered or died."""

    @abstractmethod
    def _answer(self, worker: W) -> Work | Failure:
        """Return what a worker answered. Raises WorkerDied, WorkerNeverStarted."""

    @abstractmethod
    def _kill(self, worker: W) -> None:
        """End a worker at once."""

    def _kill_busy(self) -> None:
        while self._busy:
            self._kill(self._busy.popitem()[0])

    def _give(self, given: _Given) -> None:
        self._idle = [worker for worker in self._idle if self._is_alive(worker)]
        worker = self._idle.pop() if self._idle else self._start()
        self._busy[worker] = given
        self._send(worker, given.task)

    def _received(self, worker: W, again: deque[_Given]) -> Iterator[tuple[int, Work]]:
        given = self._busy.pop(worker)
        try:
            answer = self._answer(worker)
        except WorkerDied as died:
            if given.tries == TRIES:
                raise WorkerError(
                    f"{given.task.table}: {TRIES} workers died over one chunk, the last with {died}; what was "
                    "committed is kept; run again, with fewer execution.workers or a smaller model.token_budget where "
                    "memory is short"
                ) from None
            again.append(_Given(given.number, given.task, given.tries + 1))
            return
        except WorkerNeverStarted:
            self._kill(worker)
            again.append(given)
            return
        self._idle.append(worker)
        if isinstance(answer, Failure):
            raise answer.error()
        yield given.number, answer


class ChunkServer:
    """What a worker of any kind does with the tasks that it gets; its means are made with the first."""

    def __init__(self, settings: Settings, ledger: Path | None) -> None:
        self._settings, self._ledger = settings, ledger
        self.worker: Worker | None = None
        self._tables: Tables = {}

    def answer(self, task: Task) -> Work | Failure:
        """Compute a chunk and commit its rows; every exception becomes an answer."""
        try:
            if self.worker is None:
                plan = Plan.of(self._settings)
                self._tables = {output.name: output for output in table_outputs(plan)}
                self.worker = Worker(plan, self._ledger)
            return perform(self.worker, self._tables, task)
        except UserError as error:
            return Failure(str(error), by_user=True)
        except Exception as error:  # noqa: BLE001 - told in the process that waits for it
            return Failure(f"{type(error).__name__}: {error}", by_user=False)
