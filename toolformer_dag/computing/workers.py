"""The workers of a run: how many and where, as `[execution]` says; the loop that gives them chunks."""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import islice

from toolformer_dag.computing.chunks import (
    Answer,
    ChunkWorker,
    Executor,
    OneProcess,
    Tables,
    TablesOf,
    Task,
    ThisProcess,
    WorkerError,
)
from toolformer_dag.computing.ray_actors import ray_executor
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.stage import Work
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.model.weights import cores, is_small
from toolformer_dag.settings.sections import Settings

log = logging.getLogger(__name__)

Ended = Generator[tuple[int, Work] | None, None, None]
"""Numbers of tasks that ended and what each cost, in any order; None about once a second."""
STARTS = 10
"""How many workers in a row may die before they start, for each that there may be."""


ExecutorOf = Callable[[Worker, Tables], Executor]


def in_process(worker: Worker, tables: Tables) -> Executor:
    """Return the executor that computes here, one chunk after the other."""
    return Executor(lambda: 1, lambda: ThisProcess(worker, tables))


def local_processes(count: int, tables_of: TablesOf, worker: Worker, tables: Tables) -> Executor:
    """Return processes of this machine, each with a model of its own: where one dies, the others go on."""
    return Executor(lambda: count, lambda: OneProcess(worker.plan.settings, tables_of), (BrokenProcessPool,))


def this_machine(tables_of: TablesOf, worker: Worker, tables: Tables) -> Executor:
    """Return as many processes of this machine as the settings name; none but this one where that is one."""
    count = worker_count(worker.plan.settings)
    return in_process(worker, tables) if count == 1 else local_processes(count, tables_of, worker, tables)


EXECUTORS: Mapping[str, Callable[[TablesOf, Worker, Tables], Executor]] = {
    "local": this_machine,
    "ray": lambda tables_of, worker, tables: ray_executor(worker.plan.settings, tables_of),
}
"""Where chunks are computed, by `execution.engine`."""


def executor_of(tables_of: TablesOf, worker: Worker, tables: Tables) -> Executor:
    """Return the executor that the settings name. Raises ClusterError where the cluster cannot be reached."""
    return EXECUTORS[worker.plan.settings.execution.engine](tables_of, worker, tables)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A way in which a worker fails to answer; `most`: how often over one chunk."""

    most: int
    said: str
    remedy: str


DIED = _Failure(
    2,
    "workers died over one chunk",
    "run again, with fewer execution.workers or a smaller model.token_budget where memory is short",
)
LATE = _Failure(
    2,
    "workers have not answered for one chunk within execution.chunk_hours",
    "look at what they wait for, or set more execution.chunk_hours, and run again",
)
LOST = _Failure(5, "machines were lost over one chunk", "run again when the cluster is well")


@dataclass(frozen=True, slots=True)
class _Assignment:
    """`late`: it was given to another worker as well."""

    number: int
    task: Task
    failures: tuple[_Failure, ...] = ()
    since: float = 0.0
    late: bool = False

    def __str__(self) -> str:
        return f"{self.task.table}, chunk {self.number + 1}"


_Answered = tuple[int, Work | UserError]
"""The number of a task, and what a worker answered."""


def _first(answers: deque[_Answered]) -> tuple[int, Work] | None:
    """Take the first of the answers, if there is one. Raises the error that it is."""
    if not answers:
        return None
    number, answer = answers.popleft()
    if isinstance(answer, UserError):
        raise answer
    return number, answer


class Workers:
    """Workers with a chunk at a time each: started when there is work for them, kept until `close`.

    The first chunk decides how many there may be: a run that has nothing to compute starts none.
    """

    def __init__(self, worker: Worker, tables: Tables, executor_of: ExecutorOf) -> None:
        self._here, self._tables, self._executor_of = worker, tables, executor_of
        self._starting: list[ChunkWorker] = []
        self._failed_starts = 0
        self._idle: list[ChunkWorker] = []
        self._busy: dict[Future[Answer], tuple[ChunkWorker, _Assignment]] = {}
        self._next = deque[_Assignment]()
        self._elsewhere = Spent()

    @property
    def spent(self) -> Spent:
        """Return what was spent here and by other processes."""
        return self._here.spent() + self._elsewhere

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """Yield as tasks end. Closing the generator ends the tasks that are under way.

        Tasks are taken from the iterable as workers become free, and one more for each worker while all compute. The
        chunk of a worker that dies, or is lost with its machine, is given to another one; so is that of a worker that
        has not answered for `execution.chunk_hours`, and whichever ends first counts. Raises WorkerError where that
        happened too often, and UserError as the task raised it.
        """
        waiting = (_Assignment(*one) for one in enumerate(tasks))
        answers = deque[_Answered]()
        try:
            while self._employ(waiting) or answers:
                # between answers, those who are done get a chunk
                answers.extend(self._ended(waiting, 0.0 if answers else 1.0))
                yield _first(answers)
        finally:
            self._next.clear()
            self._kill_busy()

    def close(self) -> None:
        """End the workers, and let go of the model of this process: what was committed is kept."""
        self._kill_busy()
        for worker in (*self._starting, *self._idle):
            worker.kill()
        self._starting, self._idle = [], []
        vars(self).pop("_executor", None)  # the next chunk decides anew
        self._here.release()

    @cached_property
    def _executor(self) -> Executor:
        return self._executor_of(self._here, self._tables)

    @cached_property
    def _most(self) -> int:
        """How many workers there may be: asked once in a round, because a cluster is asked for its machines."""
        return self._executor.count()

    def _kill_busy(self) -> None:
        while self._busy:
            self._busy.popitem()[1][0].kill()

    def _employ(self, waiting: Iterator[_Assignment]) -> bool:
        """Begin a round: give chunks while there are some and workers for them; return whether any is not done."""
        vars(self).pop("_most", None)
        while self._has_room() and (self._next or self._taken(waiting)):
            worker = self._idle.pop() if self._idle else self._executor.start()
            if worker.started.done():
                self._give(worker, self._next.popleft())
            else:
                self._starting.append(worker)
        return bool(self._busy or self._next or self._taken(waiting))

    def _has_room(self) -> bool:
        if self._idle or "_executor" not in vars(self):
            return True
        return len(self._busy) + len(self._starting) < self._most

    def _taken(self, waiting: Iterator[_Assignment]) -> bool:
        """Take a chunk, to be given next; return whether there was one."""
        taken = list(islice(waiting, 1))
        self._next += taken
        return bool(taken)

    def _welcome(self) -> None:
        """Take in the workers that have started. Raises WorkerError where one after the other dies before it has."""
        for worker in [one for one in self._starting if one.started.done()]:
            self._starting.remove(worker)
            if (died := worker.started.exception()) is None:
                self._failed_starts = 0
                self._idle.append(worker)
            elif self._failed_starts >= STARTS * self._most:
                raise WorkerError(f"no worker can be started: {died}") from died
            else:  # it was to run on a machine that was lost, which Ray notices after a while
                self._failed_starts += 1

    def _plan_ahead(self, waiting: Iterator[_Assignment]) -> None:
        """Take tasks while no worker is free: what is planned now need not be waited for."""
        while len(self._next) < self._most and not any(future.done() for future in self._busy):
            if not self._taken(waiting):
                break

    def _give(self, worker: ChunkWorker, given: _Assignment) -> None:
        try:
            self._busy[worker.submit(given.task)] = worker, replace(given, since=time.monotonic())
        except self._executor.deaths:  # it died while it had nothing to do
            worker.kill()
            self._next.appendleft(given)

    def _ended(self, waiting: Iterator[_Assignment], seconds: float) -> list[_Answered]:
        """Wait at most so long for workers that are done; return what they answered."""
        self._plan_ahead(waiting)
        wait([*self._busy, *(worker.started for worker in self._starting)], seconds, FIRST_COMPLETED)
        self._welcome()
        answered = [one for future in list(self._busy) if future.done() for one in self._received(future)]
        self._pass_on_late()
        return answered

    def _received(self, future: "Future[Answer]") -> Iterator[_Answered]:
        """Take the answer and give the worker its next chunk, if one is planned."""
        if future not in self._busy:  # another has given the same answer
            return
        worker, given = self._busy.pop(future)
        try:
            answer, spent = future.result()
        except self._executor.deaths as died:
            try:
                self._died(worker, given, died)
            except WorkerError as failed:  # raised after the answers of the same round
                yield given.number, failed
            return
        self._idle.append(worker)
        self._elsewhere += spent
        for rival, (slower, same) in list(self._busy.items()):
            if same.number == given.number:
                del self._busy[rival]
                slower.kill()
        self._next = deque(one for one in self._next if one.number != given.number)
        if self._next and not isinstance(answer, UserError):
            self._give(self._idle.pop(), self._next.popleft())
        yield given.number, answer

    def _died(self, worker: ChunkWorker, given: _Assignment, died: Exception) -> None:
        lost = self._executor.lost(worker, died)
        worker.kill()
        if lost:  # those that idle there are lost too, and would each cost a chunk
            self._idle = [one for one in self._idle if one.started.result()[0] != worker.started.result()[0]]
        if not given.late:
            how = "was lost with its machine" if lost else f"died: {' '.join(str(died).split())}"
            self._again(given, LOST if lost else DIED, f"{worker} {how}")

    def _again(self, given: _Assignment, failure: _Failure, how: str) -> None:
        """Give a chunk to another worker, before all others. Raises WorkerError where that was done too often."""
        failures = (*given.failures, failure)
        if failures.count(failure) == failure.most:
            raise WorkerError(
                f"{given}: {failure.most} {failure.said}, the last: {how}; what was committed is kept; {failure.remedy}"
            ) from None
        log.warning("%s: %s; another worker gets the chunk", given, how)
        self._next.appendleft(replace(given, failures=failures))

    def _pass_on_late(self) -> None:
        """Give the chunks that take longer than `execution.chunk_hours` to other workers too.

        The late ones go on, unless nothing else does: then they are ended for new ones.
        """
        limit = timedelta(hours=self._here.plan.settings.execution.chunk_hours)
        for future, (worker, given) in list(self._busy.items()):
            if not (given.late or future.done()) and time.monotonic() - given.since > limit.total_seconds():
                self._again(given, LATE, f"{worker} has not answered for {limit} (execution.chunk_hours)")
                self._busy[future] = worker, replace(given, late=True)
        if not self._has_room() and all(given.late for _, given in self._busy.values()):
            self._kill_busy()


def worker_count(settings: Settings) -> int:
    """Return `execution.workers`, else one per GPU, or one per core for a model that computes on one thread, else 1.

    An engine has one per group of GPUs that its options name; without a GPU, or at a URL, it has one.
    """
    model = settings.model
    if settings.execution.workers is not None or model.url:
        return settings.execution.workers or 1
    import torch

    # device_count, unlike is_available, leaves a process free to choose its GPUs
    if model.device in ("auto", "cuda") and (gpus := torch.cuda.device_count()):
        return max(1, gpus // model.gpus)
    return cores() if model.device in ("auto", "cpu") and model.in_torch and is_small(model) else 1
