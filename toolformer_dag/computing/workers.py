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
"""Tasks as they end, in any order, and None about once a second while none has ended."""
ExecutorOf = Callable[[Worker, Tables], Executor]
"""Returns where chunks are computed, from the worker and the tables of this process."""


def in_process(worker: Worker, tables: Tables) -> Executor:
    """Return the executor that computes here, one chunk after the other."""
    return Executor(count=lambda: 1, start=lambda: ThisProcess(worker, tables))


def local_processes(count: int, tables_of: TablesOf, worker: Worker, tables: Tables) -> Executor:
    """Build an executor with processes of this machine. Each loads the model for itself, and if one dies, others go on.

    Args:
        count: The largest number of processes.
        tables_of: Builds the tables of a plan; each process calls it.
        worker: What this process has loaded. Only its settings are used.
        tables: Not used.
    """
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
        """Begin without workers. They are started when there are tasks for them.

        Args:
            worker: What this process has loaded.
            tables: The tables whose chunks are computed, by name.
            executor_of: Decides where chunks are computed. It is called when the first worker is needed.
        """
        self._own_worker = worker
        self._tables = tables
        self._executor_of = executor_of

        self._decided_executor: Executor | None = None  # starts workers; None until the first one is needed
        self._max_workers = 0  # asked for again in every round, as the machines of a cluster come and go

        # The workers, by state.
        self._starting: list[ChunkWorker] = []
        self._idle: list[ChunkWorker] = []
        self._busy: dict[Future[ChunkAnswer], _Busy] = {}  # keys: the future answers
        self._failed_starts = 0  # how many workers in a row died before they had started

        self._waiting = deque[_Assignment]()  # tasks to give out, the next one first
        self._spent_elsewhere = Spent()  # what workers in other processes have spent

    @property
    def spent(self) -> Spent:
        """Return what this process and the workers of other processes spent; other threads may read it."""
        return self._own_worker.spent() + self._spent_elsewhere

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """Let the workers compute all tasks. Closing the generator ends those that are running.

        If a worker dies, or needs longer than `execution.chunk_hours`, its task is given to another worker.

        Yields:
            Each task when it has ended, and None about once a second while none has ended.

        Raises:
            WorkerError: Too many workers failed over the same task.
            UserError: A task raised it.
            TokensSpent: The run has spent `execution.most_tokens`, and a task is left.
        """
        upcoming = (_Assignment(number, task) for number, task in enumerate(tasks))  # taken one by one, when needed
        try:
            yield from self._run_tasks(upcoming)
            self._require_none_left(upcoming)
        finally:
            self._waiting.clear()  # tasks that no worker has yet
            self._kill_busy()  # workers that still compute a task

    def _run_tasks(self, upcoming: Iterator[_Assignment]) -> Ended:
        """Let workers compute the tasks until none is left, or until the tokens of the run are spent.

        Yields:
            Each task when it has ended, and None about once a second while none has ended.
        """
        outcomes = deque[_Outcome]()  # not yielded yet
        while self._give_out_tasks(upcoming) or outcomes:
            longest_wait = 0.0 if outcomes else 1.0
            outcomes.extend(self._wait_for_outcomes(upcoming, longest_wait))
            yield _take_first_ended(outcomes)

    def _require_none_left(self, upcoming: Iterator[_Assignment]) -> None:
        """Check that no task is left because the run has spent its tokens.

        Raises:
            TokensSpent: A task is left.
        """
        if not self._has_tokens_left() and self._has_waiting_task(upcoming):
            most_tokens = self._own_worker.plan.settings.execution.most_tokens or 0
            raise TokensSpent(self.spent.tokens, most_tokens)

    def close(self) -> None:
        """End all workers, and release the model that this process has loaded. Committed results are kept."""
        self._kill_busy()
        for worker in (*self._starting, *self._idle):
            worker.kill()
        self._starting = []
        self._idle = []

        self._decided_executor = None  # the next task decides anew where chunks are computed
        self._own_worker.release()

    @property
    def _executor(self) -> Executor:
        """Return where chunks are computed, which the first chunk decides."""
        if self._decided_executor is None:
            self._decided_executor = self._executor_of(self._own_worker, self._tables)
            self._max_workers = self._decided_executor.count()
        return self._decided_executor

    def _kill_busy(self) -> None:
        """End the workers that compute a task. Their tasks are dropped."""
        while self._busy:
            _, busy = self._busy.popitem()
            busy.worker.kill()

    def _give_out_tasks(self, upcoming: Iterator[_Assignment]) -> bool:
        """Give tasks to idle workers, and start new workers while more are allowed.

        No task is given out once the run has spent its tokens.

        Args:
            upcoming: The tasks that are not in `_waiting` yet. They are moved there one by one, when needed.

        Returns:
            True if an answer is still to come, from a busy worker or for a task that waits.
        """
        if self._decided_executor is not None:
            self._max_workers = self._decided_executor.count()  # may change, as machines come and go

        if not self._has_tokens_left():
            return bool(self._busy)

        while self._can_give_out_task() and self._has_waiting_task(upcoming):
            self._give_out_next_task()
        return bool(self._busy) or self._has_waiting_task(upcoming)

    def _give_out_next_task(self) -> None:
        """Give the next waiting task to an idle worker. If none is idle, start a worker.

        A new worker that needs time to start gets no task yet.
        """
        worker = self._idle.pop() if self._idle else self._executor.start()
        if worker.started.done():
            self._give_to_worker(worker, self._waiting.popleft())
        else:
            self._starting.append(worker)

    def _has_tokens_left(self) -> bool:
        """Return whether the model may process more tokens, which `execution.most_tokens` limits for a run."""
        most_tokens = self._own_worker.plan.settings.execution.most_tokens
        return most_tokens is None or self.spent.tokens < most_tokens

    def _can_give_out_task(self) -> bool:
        """Return whether a task could be given out now: a worker is idle, or another one may be started.

        The number of workers is not known before the first task. Then the answer is True.
        """
        if self._idle or self._decided_executor is None:
            return True
        return len(self._busy) + len(self._starting) < self._max_workers

    def _has_waiting_task(self, upcoming: Iterator[_Assignment]) -> bool:
        """Return whether a task waits to be given out. If none does, take the next one of the caller."""
        return bool(self._waiting) or self._take_upcoming_task(upcoming)

    def _take_upcoming_task(self, upcoming: Iterator[_Assignment]) -> bool:
        """Move the next task of the caller to the end of `_waiting`. Return False if there is none left."""
        assignment = next(upcoming, None)
        if assignment is None:
            return False
        self._waiting.append(assignment)
        return True

    def _prefetch_tasks(self, upcoming: Iterator[_Assignment]) -> None:
        """Move tasks to `_waiting` before a worker asks for them, at most one per worker.

        Taking a task may take a while, because the caller plans it then. So this ends as soon as a worker has answered.
        """
        while self._has_tokens_left() and len(self._waiting) < self._max_workers:
            has_answer = any(future.done() for future in self._busy)
            if has_answer or not self._take_upcoming_task(upcoming):
                return

    def _give_to_worker(self, worker: ChunkWorker, assignment: _Assignment) -> None:
        """Send a task to an idle worker, which is then busy.

        If the worker has died in the meantime, it is dropped, and the task becomes the next one to be given out.
        """
        try:
            future_answer = worker.submit(assignment.task)
        except self._executor.deaths:
            worker.kill()
            self._waiting.appendleft(assignment)
            return

        assignment_with_time = replace(assignment, since=time.monotonic())
        self._busy[future_answer] = _Busy(worker, assignment_with_time)

    def _wait_for_outcomes(self, upcoming: Iterator[_Assignment], seconds: float) -> list[_Outcome]:
        """Wait until a worker has answered or started, then update the state of all workers.

        Args:
            upcoming: The tasks that are not in `_waiting` yet. Some are moved there before the wait.
            seconds: The longest time to wait.

        Returns:
            What the answered tasks cost, or the errors that ended them.
        """
        self._prefetch_tasks(upcoming)

        future_starts = (worker.started for worker in self._starting)
        awaited: list[Future[Any]] = [*self._busy, *future_starts]  # the keys of `_busy` are the future answers
        wait(awaited, seconds, FIRST_COMPLETED)

        self._collect_started_workers()  # started workers become idle
        outcomes = self._collect_answers()  # workers that answered become idle, or get the next task
        self._requeue_late_tasks()  # tasks that take too long are offered to other workers
        return outcomes

    def _collect_answers(self) -> list[_Outcome]:
        """Receive the answers of all workers that have answered.

        Returns:
            What each of their tasks cost, or the error that ended it. A worker that died adds nothing, unless too many
            workers died over its task.
        """
        outcomes = []
        done_futures = [future for future in self._busy if future.done()]
        for future in done_futures:
            # Two workers may have had the same task. The first answer removes the other worker from `_busy`.
            if future not in self._busy:
                continue

            outcome = self._collect_answer(future)
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def _collect_started_workers(self) -> None:
        """Move the workers that have started from `_starting` to `_idle`, and drop the ones that died before.

        Raises:
            WorkerError: Too many workers in a row died before they had started.
        """
        finished_starting = [worker for worker in self._starting if worker.started.done()]
        for worker in finished_starting:
            self._starting.remove(worker)

            death = worker.started.exception()
            if death is None:
                self._failed_starts = 0
                self._idle.append(worker)
            else:  # for example on a machine that was lost, which Ray notices late
                self._count_failed_start(death)

    def _count_failed_start(self, death: BaseException) -> None:
        """Count a worker that died before it had started.

        Raises:
            WorkerError: More than STARTS in a row have died like this, for each worker that there may be.
        """
        if self._failed_starts >= STARTS * self._max_workers:
            raise WorkerError(f"no worker can be started: {death}") from death
        self._failed_starts += 1

    def _collect_answer(self, future: "Future[ChunkAnswer]") -> _Outcome | None:
        """Take the answer of a worker, which becomes idle and gets the next waiting task.

        If the task raised an error, the worker gets no new task yet.

        Args:
            future: The key of the worker in `_busy`; its answer, or the exception by which it died, is there.

        Returns:
            What the task cost, or the error that it raised. If the worker died, None, or an error if too many workers
            died over this task.
        """
        worker, assignment = self._busy.pop(future)
        try:
            answer = future.result()
        except self._executor.deaths as death:
            return self._handle_death(worker, assignment, death)  # another worker has the task, or will get it

        self._idle.append(worker)
        self._spent_elsewhere += answer.spent  # tokens and tool calls; nothing if the worker is this process
        self._cancel_copies(assignment.number)  # a slow task may have been given to a second worker

        has_failed = isinstance(answer.outcome, UserError)
        if not has_failed:
            self._give_next_task()
        return _Outcome(assignment.number, answer.outcome)

    def _give_next_task(self) -> None:
        """Give the next waiting task to the worker that became idle last, if the run may spend more tokens."""
        if self._waiting and self._has_tokens_left():
            self._give_to_worker(self._idle.pop(), self._waiting.popleft())

    def _handle_death(self, worker: ChunkWorker, assignment: _Assignment, death: Exception) -> _Outcome | None:
        """Let another worker have the task of a dead one. Return an error if too many workers died over it."""
        try:
            self._replace_dead_worker(worker, assignment, death)
        except WorkerError as error:
            return _Outcome(assignment.number, error)
        return None

    def _cancel_copies(self, number: int) -> None:
        """Cancel the copies of a task that has ended. A task has copies if a worker took too long for it.

        A worker that computes a copy is killed.
        """
        for future, busy in list(self._busy.items()):
            if busy.assignment.number == number:
                del self._busy[future]
                busy.worker.kill()
        self._waiting = deque(assignment for assignment in self._waiting if assignment.number != number)

    def _replace_dead_worker(self, worker: ChunkWorker, assignment: _Assignment, death: Exception) -> None:
        """Remove a dead worker, and make its task the next one to be given out.

        If its machine was lost, the idle workers of that machine are removed as well.

        Args:
            worker: The worker.
            assignment: The task it had.
            death: The exception by which its death was noticed.

        Raises:
            WorkerError: Too many workers died over this task.
        """
        is_machine_lost = self._executor.lost(worker, death)
        worker.kill()
        if is_machine_lost:
            lost_machine = worker.started.result().machine
            self._forget_idle_workers_on(lost_machine)

        # The worker was late, so another one already has the task, or will get it.
        if assignment.was_given_again:
            return

        if is_machine_lost:
            self._requeue_after_failure(assignment, LOST, f"{worker} was lost with its machine")
        else:
            self._requeue_after_failure(assignment, DIED, f"{worker} died: {' '.join(str(death).split())}")

    def _forget_idle_workers_on(self, lost_machine: str) -> None:
        """Drop the idle workers on a lost machine. They are dead, and a task given to one of them would fail."""
        self._idle = [worker for worker in self._idle if worker.started.result().machine != lost_machine]

    def _requeue_after_failure(self, assignment: _Assignment, failure: _Failure, what_happened: str) -> None:
        """Make a task the next one to be given out, after a worker failed over it. Log a warning.

        Args:
            assignment: The task, with the failures of earlier workers.
            failure: How the worker failed: DIED, LATE or LOST.
            what_happened: The same for people, such as "worker 7 died: ...".

        Raises:
            WorkerError: This kind of failure has happened `failure.most` times over this task.
        """
        failures = (*assignment.failures, failure)
        if failures.count(failure) == failure.most:
            raise WorkerError(
                f"{assignment}: {failure.most} {failure.sentence}, the last: {what_happened}; what was committed is "
                f"kept; {failure.remedy}"
            ) from None

        log.warning("%s: %s; another worker gets the chunk", assignment, what_happened)
        self._waiting.appendleft(replace(assignment, failures=failures))

    def _requeue_late_tasks(self) -> None:
        """Offer tasks that take longer than `execution.chunk_hours` to other workers as well.

        The late workers go on computing, and the first answer counts. But if all workers are late and no other worker
        can be used, the late ones are killed to make room.

        Raises:
            WorkerError: Too many workers were late with the same task.
        """
        limit = timedelta(hours=self._own_worker.plan.settings.execution.chunk_hours)
        for future, busy in list(self._busy.items()):
            if busy.assignment.exceeds(limit) and not future.done():
                self._requeue_late_task(future, limit)

        if self._are_all_late() and not self._can_give_out_task():
            self._kill_busy()

    def _requeue_late_task(self, future: "Future[ChunkAnswer]", limit: timedelta) -> None:
        """Offer the task of a late worker to another worker as well.

        Args:
            future: The key of the late worker in `_busy`, where it stays.
            limit: The time it has exceeded.
        """
        worker, assignment = self._busy[future]
        self._requeue_after_failure(assignment, LATE, f"{worker} has not answered for {limit} (execution.chunk_hours)")
        self._busy[future] = _Busy(worker, replace(assignment, was_given_again=True))

    def _are_all_late(self) -> bool:
        """Return whether every busy worker takes too long for its task."""
        return all(busy.assignment.was_given_again for busy in self._busy.values())


def _take_first_ended(outcomes: deque[_Outcome]) -> EndedTask | None:
    """Remove the first outcome and return it, or None if there is none. If it is an error, raise it."""
    if not outcomes:
        return None
    number, outcome = outcomes.popleft()
    if isinstance(outcome, UserError):
        raise outcome
    return EndedTask(number, outcome)


def worker_count(settings: Settings) -> int:
    """Choose how many workers this machine gets. A worker is a process that loads the model for itself.

    Returns:
        `execution.workers`, if it is set. Otherwise:

        - 1 for a model that a server runs (`model.url`)
        - on GPUs, one worker per `model.gpus` GPUs
        - one worker per core for a small PyTorch model on the CPU, which computes on one thread
        - 1 for any other model
    """
    if settings.execution.workers is not None:
        return settings.execution.workers

    model = settings.model
    if model.url:
        return 1

    gpu_count = _count_gpus(model)
    if gpu_count > 0:
        return max(1, gpu_count // model.gpus)

    computes_on_one_thread = model.device in ("auto", "cpu") and model.in_torch and is_small(model)
    return cores() if computes_on_one_thread else 1


def _count_gpus(model: ModelSettings) -> int:
    """Count the GPUs of this machine that the model may use."""
    if model.device not in ("auto", "cuda"):
        return 0
    import torch

    # Unlike torch.cuda.is_available, this leaves it open which GPUs a process uses.
    return torch.cuda.device_count()
