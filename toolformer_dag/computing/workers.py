"""The workers of a run: how many and where, as `[execution]` says; the loop that gives them chunks."""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

from toolformer_dag.computing.chunks import (
    ChunkAnswer,
    ChunkWorker,
    Executor,
    OneProcess,
    Tables,
    TablesOf,
    Task,
    ThisProcess,
    WorkerError,
)
from toolformer_dag.computing.ray_actors import build_ray_executor
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.stage import Work
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.model.weights import cores, is_small
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings

log = logging.getLogger(__name__)

STARTS = 10
"""How many workers in a row may die before they start, for each that there may be."""


class EndedTask(NamedTuple):
    """A task that ended: its number, counted from 0 in the order of the tasks, and what it cost."""

    number: int
    work: Work


Ended = Generator[EndedTask | None, None, None]
"""Tasks as they end, in any order; None about once a second where none has ended."""
ExecutorOf = Callable[[Worker, Tables], Executor]
"""Returns where chunks are computed, from the worker and the tables of this process."""


def in_process(worker: Worker, tables: Tables) -> Executor:
    """Return the executor that computes here, one chunk after the other."""
    return Executor(count=lambda: 1, start=lambda: ThisProcess(worker, tables))


def local_processes(count: int, tables_of: TablesOf, worker: Worker, tables: Tables) -> Executor:
    """Return `count` processes of this machine, each with a model of its own: where one dies, the others go on."""
    return Executor(
        count=lambda: count,
        start=lambda: OneProcess(worker.plan.settings, tables_of),
        deaths=(BrokenProcessPool,),
    )


def build_machine_executor(tables_of: TablesOf, worker: Worker, tables: Tables) -> Executor:
    """Return as many processes of this machine as `worker_count` says; none but this one where that is one."""
    count = worker_count(worker.plan.settings)
    if count == 1:
        return in_process(worker, tables)
    return local_processes(count, tables_of, worker, tables)


EXECUTORS: Mapping[str, Callable[[TablesOf, Worker, Tables], Executor]] = {
    "local": build_machine_executor,
    "ray": lambda tables_of, worker, tables: build_ray_executor(worker.plan.settings, tables_of),
}
"""Where chunks are computed, by `execution.engine`."""


def executor_of(tables_of: TablesOf, worker: Worker, tables: Tables) -> Executor:
    """Return the executor that the settings name. Raises ClusterError where the cluster cannot be reached."""
    return EXECUTORS[worker.plan.settings.execution.engine](tables_of, worker, tables)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A way in which a worker fails to answer.

    - `most`: how often over one chunk, until the update ends
    - `sentence`: what happened, after that number
    - `remedy`: what to do
    """

    most: int
    sentence: str
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
    """A task that is given to a worker, or is to be.

    - `number`: of the task
    - `failures`: of the workers that had it before
    - `since`: when it was given (`time.monotonic`)
    - `was_given_again`: whether it waits for another worker as well, or has one, because this one takes too long
    """

    number: int
    task: Task
    failures: tuple[_Failure, ...] = ()
    since: float = 0.0
    was_given_again: bool = False

    def __str__(self) -> str:
        return f"{self.task.table}, chunk {self.number + 1}"

    def exceeds(self, limit: timedelta) -> bool:
        """Return whether a worker has had it for longer than the limit, and no other worker was given it yet."""
        seconds = time.monotonic() - self.since
        return seconds > limit.total_seconds() and not self.was_given_again


class _Busy(NamedTuple):
    """A worker that computes, and what it computes."""

    worker: ChunkWorker
    assignment: _Assignment


class _Outcome(NamedTuple):
    """The number of a task, and what it cost or the error that ends the update."""

    number: int
    outcome: Work | UserError


class TokensSpent(UserError):
    """The limit of tokens of a run is reached, and chunks are left. What was committed is kept."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"{tokens:,} tokens went through the model, and execution.most_tokens is {most:,}: the run stops here; "
            "what was computed is kept, so raise the limit and run again to go on"
        )


class Workers:
    """The workers of a run, each with a chunk at a time: started when there is work for them, kept until `close`.

    A worker is in one of these states:

    - starting (`_starting`): it was begun, and has no chunk yet; workers of this machine skip this state
    - idle (`_idle`): it waits for a chunk
    - busy (`_busy`): it computes one; by the future of its answer
    - dead: killed, and forgotten here

    A task is not taken from the caller's iterable yet, or waits (`_waiting`, the next one first), or is with a busy
    worker, or has ended. A task whose worker died waits again, before the others.

    The first chunk decides where and how many workers there may be: a run that has nothing to compute starts none. One
    thread uses an object; `spent` alone may be read by others.
    """

    def __init__(self, worker: Worker, tables: Tables, executor_of: ExecutorOf) -> None:
        """Begin without workers. A worker is starting, then idle, then by turns busy (computes a chunk) and idle.

        - `worker`: what this process has loaded
        - `tables`: the tables whose chunks are computed, by name
        - `executor_of`: decides where chunks are computed, once the first chunk is there
        """
        self._own_worker = worker
        self._tables = tables
        self._executor_of = executor_of
        self._decided_executor: Executor | None = None  # what starts workers; None until the first chunk is there
        self._most_workers = 0  # of a cluster counted anew once a round: machines come and go
        self._starting: list[ChunkWorker] = []
        self._failed_starts = 0  # workers in a row that died before they started
        self._idle: list[ChunkWorker] = []
        self._busy: dict[Future[ChunkAnswer], _Busy] = {}  # by the future of the worker's answer
        self._waiting = deque[_Assignment]()  # of new chunks, and of late and dead workers; the next one first
        self._spent_elsewhere = Spent()  # by workers of other processes

    @property
    def spent(self) -> Spent:
        """Return what this process and the workers of other processes spent; other threads may read it."""
        return self._own_worker.spent() + self._spent_elsewhere

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """Yield tasks as they end, and None about once a second. Closing the generator ends the running tasks.

        The task of a worker that dies, or takes longer than `execution.chunk_hours`, is given to another worker.

        Raises WorkerError where workers failed too often over one task, UserError as a task raised it, and TokensSpent
        where `execution.most_tokens` are spent and a task is left.
        """
        not_taken = (_Assignment(number, task) for number, task in enumerate(tasks))  # used up step by step
        try:
            yield from self._work_off(not_taken)
            self._require_none_left(not_taken)
        finally:
            self._waiting.clear()  # tasks that were taken from the iterator and still wait
            self._kill_busy()  # workers that still compute a task

    def _work_off(self, not_taken: Iterator[_Assignment]) -> Ended:
        """Yield tasks as they end, and None about once a second, until none is left or all tokens are spent."""
        outcomes = deque[_Outcome]()  # that were not yielded yet
        while self._employ_workers(not_taken) or outcomes:
            seconds = 0.0 if outcomes else 1.0
            outcomes.extend(self._wait_for_outcomes(not_taken, seconds))
            yield _take_first_ended(outcomes)

    def _require_none_left(self, not_taken: Iterator[_Assignment]) -> None:
        """Raise TokensSpent where a task is left because `execution.most_tokens` are spent."""
        if not self._may_spend() and self._has_waiting(not_taken):
            raise TokensSpent(self.spent.tokens, self._own_worker.plan.settings.execution.most_tokens or 0)

    def close(self) -> None:
        """End the workers, and let go of the model of this process: what was committed is kept."""
        self._kill_busy()
        for worker in (*self._starting, *self._idle):
            worker.kill()
        self._starting = []
        self._idle = []
        self._decided_executor = None  # the next chunk decides anew
        self._own_worker.release()

    @property
    def _executor(self) -> Executor:
        """Return where chunks are computed, which the first chunk decides."""
        if self._decided_executor is None:
            self._decided_executor = self._executor_of(self._own_worker, self._tables)
            self._most_workers = self._decided_executor.count()
        return self._decided_executor

    def _kill_busy(self) -> None:
        """End the workers that compute; their chunks are forgotten."""
        while self._busy:
            _, busy = self._busy.popitem()
            busy.worker.kill()

    def _employ_workers(self, not_taken: Iterator[_Assignment]) -> bool:
        """Give waiting chunks to idle workers, and start new workers; return whether a chunk is still to be awaited.

        not_taken: the chunks that were not taken from the caller yet; one is taken where none waits.
        """
        if self._decided_executor is not None:
            self._most_workers = self._decided_executor.count()
        if not self._may_spend():  # execution.most_tokens are spent: only chunks that are computed now are awaited
            return bool(self._busy)
        while self._has_room() and self._has_waiting(not_taken):
            self._employ_worker()
        return bool(self._busy) or self._has_waiting(not_taken)

    def _employ_worker(self) -> None:
        """Give the next waiting chunk to an idle worker; without one, start a worker, which may take a while."""
        worker = self._idle.pop() if self._idle else self._executor.start()
        if worker.started.done():
            self._give_to_worker(worker, self._waiting.popleft())
        else:
            self._starting.append(worker)

    def _may_spend(self) -> bool:
        """Return whether fewer tokens than `execution.most_tokens` went through the model."""
        most = self._own_worker.plan.settings.execution.most_tokens
        return most is None or self.spent.tokens < most

    def _has_room(self) -> bool:
        """Return whether a worker is idle or may be started. Before the first chunk nobody knows: True."""
        if self._idle or self._decided_executor is None:
            return True
        return len(self._busy) + len(self._starting) < self._most_workers

    def _has_waiting(self, not_taken: Iterator[_Assignment]) -> bool:
        """Return whether a chunk waits to be given, taking one from the caller where none does."""
        return bool(self._waiting) or self._take_from_caller(not_taken)

    def _take_from_caller(self, not_taken: Iterator[_Assignment]) -> bool:
        """Take a chunk from the caller, to be given after those that wait; return whether there was one."""
        assignment = next(not_taken, None)
        if assignment is None:
            return False
        self._waiting.append(assignment)
        return True

    def _plan_ahead(self, not_taken: Iterator[_Assignment]) -> None:
        """Take up to a chunk per worker from the caller, to plan it early, until a worker has answered."""
        while self._may_spend() and len(self._waiting) < self._most_workers:
            is_an_answer_there = any(future.done() for future in self._busy)
            if is_an_answer_there or not self._take_from_caller(not_taken):
                return

    def _give_to_worker(self, worker: ChunkWorker, assignment: _Assignment) -> None:
        """Send a chunk to an idle worker, which is then busy.

        Where the worker died while it was idle, the chunk waits again, before the others.
        """
        try:
            future = worker.submit(assignment.task)
        except self._executor.deaths:
            worker.kill()
            self._waiting.appendleft(assignment)
            return
        self._busy[future] = _Busy(worker, replace(assignment, since=time.monotonic()))

    def _wait_for_outcomes(self, not_taken: Iterator[_Assignment], seconds: float) -> list[_Outcome]:
        """Wait until a worker answers or has started; return the outcomes of the chunks that were answered.

        Meanwhile chunks are taken from `not_taken`, and late chunks given to others. seconds: the longest wait.
        """
        self._plan_ahead(not_taken)  # takes chunks that then wait, while no worker has answered
        starts = (worker.started for worker in self._starting)
        awaited: list[Future[Any]] = [*self._busy, *starts]  # `_busy` has the future of each worker's answer as key
        wait(awaited, seconds, FIRST_COMPLETED)
        self._take_in_started()  # from `_starting` to `_idle`
        outcomes = self._receive_answers()  # from `_busy` to `_idle`, and back with the next chunk that waits
        self._pass_on_late()  # chunks of late workers wait again, for another one
        return outcomes

    def _receive_answers(self) -> list[_Outcome]:
        """Receive the answers of all workers that are done; return what their tasks cost, or the errors."""
        outcomes = []
        answered = [future for future in self._busy if future.done()]
        for future in answered:
            if (
                future not in self._busy
            ):  # its task was with two workers, and `_receive_answer` took the other one's answer
                continue
            outcome = self._receive_answer(future)
            if outcome is not None:  # None: the worker died, and another one has or gets its task
                outcomes.append(outcome)
        return outcomes

    def _take_in_started(self) -> None:
        """Move workers that have started from `_starting` to `_idle`, and forget those that died before.

        Raises WorkerError where too many in a row died.
        """
        started = [worker for worker in self._starting if worker.started.done()]
        for worker in started:
            self._starting.remove(worker)
            death = worker.started.exception()
            if death is None:
                self._failed_starts = 0
                self._idle.append(worker)
            else:  # scheduled on a lost machine; Ray notices late
                self._count_failed_start(death)

    def _count_failed_start(self, death: BaseException) -> None:
        """Count a worker that died before it started. Raises WorkerError after STARTS in a row for each worker."""
        if self._failed_starts >= STARTS * self._most_workers:
            raise WorkerError(f"no worker can be started: {death}") from death
        self._failed_starts += 1

    def _receive_answer(self, future: "Future[ChunkAnswer]") -> _Outcome | None:
        """Take the answer of a busy worker; return what its task cost, or the error that the task raised.

        Unless the task failed, the worker gets the next chunk that waits. If the worker died, another one has or
        gets its task, and None is returned; a WorkerError if too many died over it.
        """
        worker, assignment = self._busy.pop(future)
        try:
            answer = future.result()
        except self._executor.deaths as death:
            return self._receive_death(worker, assignment, death)
        self._idle.append(worker)
        self._spent_elsewhere += answer.spent  # tokens and tool calls; none by a worker that is this process
        self._forget_other_assignments(assignment.number)  # a late task was given to another worker as well
        task_failed = isinstance(answer.outcome, UserError)
        if not task_failed:
            self._give_next()
        return _Outcome(assignment.number, answer.outcome)

    def _give_next(self) -> None:
        """Give the next waiting chunk, if there is one and tokens are left, to the worker that became idle last."""
        if self._waiting and self._may_spend():
            self._give_to_worker(self._idle.pop(), self._waiting.popleft())

    def _receive_death(self, worker: ChunkWorker, assignment: _Assignment, death: Exception) -> _Outcome | None:
        """Let another worker have the chunk of a dead worker; return a WorkerError only where too many died over it."""
        try:
            self._replace_dead(worker, assignment, death)
        except WorkerError as error:
            return _Outcome(assignment.number, error)
        return None

    def _forget_other_assignments(self, number: int) -> None:
        """Drop a task that has ended wherever else it was given, or waits to be given, because its worker was late."""
        for future, busy in list(self._busy.items()):
            if busy.assignment.number == number:
                del self._busy[future]
                busy.worker.kill()
        self._waiting = deque(assignment for assignment in self._waiting if assignment.number != number)

    def _replace_dead(self, worker: ChunkWorker, assignment: _Assignment, death: Exception) -> None:
        """Forget a dead worker and let its chunk wait for another one, before all others.

        death: the exception that told. Raises WorkerError where too many died over this chunk.
        """
        is_machine_lost = self._executor.lost(worker, death)
        worker.kill()
        if is_machine_lost:  # idle workers of that machine are dead, too
            self._forget_idle_on(worker.started.result().machine)
        if assignment.was_given_again:  # another worker has, or gets, the chunk: this one was late
            return
        if is_machine_lost:
            self._give_again(assignment, LOST, f"{worker} was lost with its machine")
        else:
            self._give_again(assignment, DIED, f"{worker} died: {' '.join(str(death).split())}")

    def _forget_idle_on(self, lost_machine: str) -> None:
        """Forget the idle workers on a lost machine, each of which would cost a chunk."""
        self._idle = [idle for idle in self._idle if idle.started.result().machine != lost_machine]

    def _give_again(self, assignment: _Assignment, failure: _Failure, what_happened: str) -> None:
        """Put a chunk at the head of those that wait, after a worker failed over it, with a warning in the log.

        failure: the way in which it failed (died, late, lost with its machine), each of which may happen `most` times
            over a chunk. what_happened: for people. Raises WorkerError where that is reached.
        """
        failures = (*assignment.failures, failure)  # also of workers that had the chunk before
        if failures.count(failure) == failure.most:
            raise WorkerError(
                f"{assignment}: {failure.most} {failure.sentence}, the last: {what_happened}; what was committed is "
                f"kept; {failure.remedy}"
            ) from None
        log.warning("%s: %s; another worker gets the chunk", assignment, what_happened)
        self._waiting.appendleft(replace(assignment, failures=failures))

    def _pass_on_late(self) -> None:
        """Let chunks that take longer than `execution.chunk_hours` wait for other workers too; the late workers go on.

        Where all workers are late and no other one may be started, they are ended.
        """
        limit = timedelta(hours=self._own_worker.plan.settings.execution.chunk_hours)
        for future, busy in list(self._busy.items()):  # future of the answer -> worker and its chunk
            if busy.assignment.exceeds(limit) and not future.done():
                self._pass_on_chunk(future, limit)  # the chunk waits again; its worker stays in `_busy`, marked as late
        if self._are_all_late() and not self._has_room():
            self._kill_busy()  # make room for workers that get the chunks

    def _pass_on_chunk(self, future: "Future[ChunkAnswer]", limit: timedelta) -> None:
        """Let the chunk of a late worker wait for another one too, and mark it as late. future: of its answer."""
        worker, assignment = self._busy[future]
        self._give_again(assignment, LATE, f"{worker} has not answered for {limit} (execution.chunk_hours)")
        self._busy[future] = _Busy(worker, replace(assignment, was_given_again=True))

    def _are_all_late(self) -> bool:
        """Return whether every worker that computes takes too long."""
        return all(busy.assignment.was_given_again for busy in self._busy.values())


def _take_first_ended(outcomes: deque[_Outcome]) -> EndedTask | None:
    """Take the first of the outcomes, if there is one. Raises the error that it is."""
    if not outcomes:
        return None
    number, outcome = outcomes.popleft()
    if isinstance(outcome, UserError):
        raise outcome
    return EndedTask(number, outcome)


def worker_count(settings: Settings) -> int:
    """Return how many workers (processes that each load the model) this machine gets.

    - `execution.workers`, where it is set
    - one for a model at a URL
    - with GPUs: one per GPU, or per group of `model.gpus`
    - without: one per core for a small model in torch, which computes on one thread, else one
    """
    if settings.execution.workers is not None:
        return settings.execution.workers
    model = settings.model
    if model.url:
        return 1
    gpus = _count_gpus(model)
    if gpus:
        return max(1, gpus // model.gpus)
    computes_on_one_thread = model.device in ("auto", "cpu") and model.in_torch and is_small(model)
    return cores() if computes_on_one_thread else 1


def _count_gpus(model: ModelSettings) -> int:
    """Return how many GPUs of this machine the model may run on."""
    if model.device not in ("auto", "cuda"):
        return 0
    import torch

    return torch.cuda.device_count()  # unlike is_available, it leaves a process free to choose its GPUs
