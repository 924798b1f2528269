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
    TablesBuilder,
    TablesByName,
    Task,
    ThisProcess,
    WorkerError,
)
from toolformer_dag.computing.ray_actors import build_ray_executor
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.stage import Work
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.model.weights import count_cores, is_small_model
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings

log = logging.getLogger(__name__)

MAX_FAILED_STARTS_PER_WORKER = 10
"""How many workers in a row may die before they start, for each worker that there may be."""


class EndedTask(NamedTuple):
    """A task that a worker has computed.

    Attributes:
        task_number: The number of the task, counted from 0 in the order of the tasks.
        work: What it cost.
    """

    task_number: int
    work: Work


EndedTasks = Generator[EndedTask | None, None, None]
"""Yields tasks as they end, in any order, and None about once a second while none has ended."""
ExecutorBuilder = Callable[[Worker, TablesByName], Executor]
"""Decides where chunks are computed, given what this process has loaded and the tables by name."""


def build_in_process_executor(worker: Worker, tables_by_name: TablesByName) -> Executor:
    """Build the executor that computes one chunk after the other in this process.

    Args:
        worker: What this process has loaded, such as the model.
        tables_by_name: The tables whose chunks are computed.
    """
    return Executor(count_workers=lambda: 1, start_worker=lambda: ThisProcess(worker, tables_by_name))


def build_local_processes_executor(
    process_count: int, build_tables: TablesBuilder, worker: Worker, tables_by_name: TablesByName
) -> Executor:
    """Build an executor that computes in processes of this machine. Each process loads the model for itself.

    If a process dies, the others go on.

    Args:
        process_count: The largest number of processes.
        build_tables: Builds the tables of a plan. Each process calls it for itself.
        worker: What this process has loaded. Only its settings are used.
        tables_by_name: Not used, because each process builds its own tables.
    """
    return Executor(
        count_workers=lambda: process_count,
        start_worker=lambda: OneProcess(worker.plan.settings, build_tables),
        death_exceptions=(BrokenProcessPool,),
    )


def build_machine_executor(build_tables: TablesBuilder, worker: Worker, tables_by_name: TablesByName) -> Executor:
    """Build an executor that computes on this machine, in as many processes as the settings and the device suggest.

    If one process is enough, it is this one, and no other is started.

    Args:
        build_tables: Builds the tables of a plan. Each new process calls it for itself.
        worker: What this process has loaded.
        tables_by_name: The tables of this process, by name.
    """
    process_count = choose_worker_count(worker.plan.settings)
    if process_count == 1:
        return build_in_process_executor(worker, tables_by_name)
    return build_local_processes_executor(process_count, build_tables, worker, tables_by_name)


EXECUTOR_BUILDERS: Mapping[str, Callable[[TablesBuilder, Worker, TablesByName], Executor]] = {
    "local": build_machine_executor,
    "ray": lambda build_tables, worker, tables_by_name: build_ray_executor(worker.plan.settings, build_tables),
}
"""Builds the executor for each value of the setting `execution.engine`."""


def build_configured_executor(build_tables: TablesBuilder, worker: Worker, tables_by_name: TablesByName) -> Executor:
    """Build the executor that the setting `execution.engine` names: processes of this machine, or a Ray cluster.

    Args:
        build_tables: Builds the tables of a plan. Each new process calls it for itself.
        worker: What this process has loaded.
        tables_by_name: The tables of this process, by name.

    Raises:
        ClusterError: The cluster cannot be reached.
    """
    build_executor = EXECUTOR_BUILDERS[worker.plan.settings.execution.engine]
    return build_executor(build_tables, worker, tables_by_name)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A way in which a worker fails to answer.

    Attributes:
        max_count: How many workers may fail like this over one chunk. The last of them ends the update.
        description: What happened, worded so that it can follow `max_count` in an error message.
        remedy: What the user can do about it, for the error message.
    """

    max_count: int
    description: str
    remedy: str


WORKER_DIED = _Failure(
    2,
    "workers died over one chunk",
    "run again, with fewer execution.workers or a smaller model.token_budget where memory is short",
)
WORKER_LATE = _Failure(
    2,
    "workers have not answered for one chunk within execution.chunk_hours",
    "look at what they wait for, or set more execution.chunk_hours, and run again",
)
MACHINE_LOST = _Failure(5, "machines were lost over one chunk", "run again when the cluster is well")


@dataclass(frozen=True, slots=True)
class _Assignment:
    """A task that a worker computes, or that waits for a worker.

    Attributes:
        task_number: The number of the task, counted from 0.
        task: What to compute.
        failures: How the workers failed that had the task before.
        start_time: When the worker was given the task, as `time.monotonic`.
        was_given_again: Whether the worker takes so long that the task was offered to another one as well.
    """

    task_number: int
    task: Task
    failures: tuple[_Failure, ...] = ()
    start_time: float = 0.0
    was_given_again: bool = False

    def __str__(self) -> str:
        return f"{self.task.table_name}, chunk {self.task_number + 1}"

    def has_exceeded(self, time_limit: timedelta) -> bool:
        """Return whether a worker has had the task for longer than the limit, and no other was offered it yet."""
        elapsed_seconds = time.monotonic() - self.start_time
        return elapsed_seconds > time_limit.total_seconds() and not self.was_given_again


class _BusyWorker(NamedTuple):
    """A worker that is computing a task, and the task."""

    worker: ChunkWorker
    assignment: _Assignment


class _Outcome(NamedTuple):
    """How a task ended.

    Attributes:
        task_number: The number of the task.
        outcome: What the task cost, or the error with which the update ends.
    """

    task_number: int
    outcome: Work | UserError


class TokensSpent(UserError):
    """The model has processed as many tokens as a run may, and chunks are left. What was committed is kept."""

    def __init__(self, token_count: int, max_tokens: int) -> None:
        super().__init__(
            f"{token_count:,} tokens went through the model, and execution.most_tokens is {max_tokens:,}: the run "
            "stops here; what was computed is kept, so raise the limit and run again to go on"
        )


class Workers:
    """The workers of a run. They start when there are chunks, compute one at a time each, and stay until `close`.

    A worker is in one of these states:

    - starting (`_starting_workers`): It cannot take a chunk yet. Workers of this machine skip this state.
    - idle (`_idle_workers`): It waits for a chunk.
    - busy (`_busy_by_future`): It computes a chunk. The key is the future of its answer.
    - dead: It was killed, and is no longer known here.

    A task passes through these states:

    1. The caller's iterable still has it.
    2. It waits for a worker (`_waiting_assignments`, the next one first). If its worker dies, it returns to this state,
       before the others.
    3. A busy worker computes it.
    4. It has ended.

    Where chunks are computed, and how many workers there may be, is decided at the first chunk. So a run that has
    nothing to compute starts no workers. Only one thread may use an object, but other threads may read `total_spent`.
    """

    def __init__(self, worker: Worker, tables_by_name: TablesByName, build_executor: ExecutorBuilder) -> None:
        """Begin without workers. They are started when there are tasks for them.

        Args:
            worker: What this process has loaded.
            tables_by_name: The tables whose chunks are computed, by name.
            build_executor: Decides where chunks are computed. It is called when the first worker is needed.
        """
        self._local_worker = worker
        self._tables_by_name = tables_by_name
        self._build_executor = build_executor

        # Starts workers. None until the first one is needed.
        self._decided_executor: Executor | None = None

        # Asked for again whenever tasks are given out, because the machines of a cluster come and go.
        self._max_workers = 0

        # The workers, by state.
        self._starting_workers: list[ChunkWorker] = []
        self._idle_workers: list[ChunkWorker] = []
        self._busy_by_future: dict[Future[ChunkAnswer], _BusyWorker] = {}

        # How many workers in a row died before they had started.
        self._failed_start_count = 0

        # The tasks to give out, the next one first.
        self._waiting_assignments = deque[_Assignment]()

        # What workers in other processes have spent.
        self._spent_elsewhere = Spent()

    @property
    def total_spent(self) -> Spent:
        """The tokens and tool calls that this process and its workers in other processes have spent.

        Other threads may read it.
        """
        return self._local_worker.compute_total_spent() + self._spent_elsewhere

    def map_chunks(self, tasks: Iterable[Task]) -> EndedTasks:
        """Let the workers compute all tasks. Closing the generator ends those that are running.

        If a worker dies, or needs longer than `execution.chunk_hours`, its task is given to another worker.

        Yields:
            Each task when it has ended, and None about once a second while none has ended.

        Raises:
            WorkerError: Too many workers failed over the same task.
            UserError: A task raised it.
            TokensSpent: The run has spent `execution.most_tokens`, and a task is left.
        """
        # A generator, so that each task is taken from the caller only when it is needed.
        upcoming_assignments = (_Assignment(number, task) for number, task in enumerate(tasks))
        try:
            yield from self._run_tasks(upcoming_assignments)
            self._require_no_task_left(upcoming_assignments)
        finally:
            self._waiting_assignments.clear()  # tasks that no worker has yet
            self._kill_busy_workers()  # workers that still compute a task

    def _run_tasks(self, upcoming_assignments: Iterator[_Assignment]) -> EndedTasks:
        """Let workers compute the tasks until none is left, or until the tokens of the run are spent.

        Yields:
            Each task when it has ended, and None about once a second while none has ended.
        """
        pending_outcomes = deque[_Outcome]()  # of tasks that have ended and were not yielded yet

        # `_give_out_tasks` returns whether an answer is still to come.
        while self._give_out_tasks(upcoming_assignments) or pending_outcomes:
            max_seconds = 0.0 if pending_outcomes else 1.0
            pending_outcomes.extend(self._wait_for_outcomes(upcoming_assignments, max_seconds))
            yield _take_first_ended_task(pending_outcomes)

    def _require_no_task_left(self, upcoming_assignments: Iterator[_Assignment]) -> None:
        """Check that no task is left because the run has spent its tokens.

        Raises:
            TokensSpent: The run may spend no more tokens, and a task is left.
        """
        if not self._has_tokens_left() and self._has_waiting_task(upcoming_assignments):
            max_tokens = self._local_worker.plan.settings.execution.most_tokens or 0
            raise TokensSpent(self.total_spent.tokens, max_tokens)

    def close(self) -> None:
        """End all workers, and release the model that this process has loaded. Committed results are kept."""
        self._kill_busy_workers()
        for worker in (*self._starting_workers, *self._idle_workers):
            worker.kill()
        self._starting_workers = []
        self._idle_workers = []

        self._decided_executor = None  # the next task decides anew where chunks are computed
        self._local_worker.release_engine()

    @property
    def _executor(self) -> Executor:
        """Where chunks are computed. This is decided at the first use."""
        if self._decided_executor is None:
            self._decided_executor = self._build_executor(self._local_worker, self._tables_by_name)
            self._max_workers = self._decided_executor.count_workers()
        return self._decided_executor

    def _kill_busy_workers(self) -> None:
        """End the workers that compute a task. Their tasks are dropped."""
        while self._busy_by_future:
            _, busy_worker = self._busy_by_future.popitem()
            busy_worker.worker.kill()

    def _give_out_tasks(self, upcoming_assignments: Iterator[_Assignment]) -> bool:
        """Give tasks to idle workers, and start new workers while more are allowed.

        No task is given out once the run has spent its tokens.

        Args:
            upcoming_assignments: The tasks that are not in `_waiting_assignments` yet. They are moved there one by one,
                when needed.

        Returns:
            True if an answer is still to come, from a busy worker or for a task that waits.
        """
        if self._decided_executor is not None:
            # The number may change, because the machines of a cluster come and go.
            self._max_workers = self._decided_executor.count_workers()

        if not self._has_tokens_left():
            return bool(self._busy_by_future)

        while self._can_give_out_task() and self._has_waiting_task(upcoming_assignments):
            self._give_out_next_task()
        return bool(self._busy_by_future) or self._has_waiting_task(upcoming_assignments)

    def _give_out_next_task(self) -> None:
        """Give the next waiting task to an idle worker. If none is idle, start a worker.

        A new worker that needs time to start gets no task yet.
        """
        worker = self._idle_workers.pop() if self._idle_workers else self._executor.start_worker()
        if worker.start_future.done():
            self._give_to_worker(worker, self._waiting_assignments.popleft())
        else:
            self._starting_workers.append(worker)

    def _has_tokens_left(self) -> bool:
        """Return whether the model may process more tokens, which `execution.most_tokens` limits for a run."""
        max_tokens = self._local_worker.plan.settings.execution.most_tokens
        return max_tokens is None or self.total_spent.tokens < max_tokens

    def _can_give_out_task(self) -> bool:
        """Return whether a task could be given out now: a worker is idle, or another one may be started.

        The number of workers is not known before the first task. Then the answer is True.
        """
        if self._idle_workers or self._decided_executor is None:
            return True

        worker_count = len(self._busy_by_future) + len(self._starting_workers)
        return worker_count < self._max_workers

    def _has_waiting_task(self, upcoming_assignments: Iterator[_Assignment]) -> bool:
        """Return whether a task waits to be given out. If none does, take the next one from the caller first."""
        return bool(self._waiting_assignments) or self._take_upcoming_task(upcoming_assignments)

    def _take_upcoming_task(self, upcoming_assignments: Iterator[_Assignment]) -> bool:
        """Move the next task of the caller to the end of `_waiting_assignments`. Return False if none is left."""
        assignment = next(upcoming_assignments, None)
        if assignment is None:
            return False
        self._waiting_assignments.append(assignment)
        return True

    def _prefetch_tasks(self, upcoming_assignments: Iterator[_Assignment]) -> None:
        """Move tasks to `_waiting_assignments` before a worker needs them, at most one per worker.

        Taking a task may take a while, because the caller plans it at that moment. So this ends as soon as a worker has
        answered. It also ends when no task is left, and takes none once the run has spent its tokens
        (`execution.most_tokens`).
        """
        while self._has_tokens_left() and len(self._waiting_assignments) < self._max_workers:
            has_answer = any(future.done() for future in self._busy_by_future)
            if has_answer or not self._take_upcoming_task(upcoming_assignments):
                return

    def _give_to_worker(self, worker: ChunkWorker, assignment: _Assignment) -> None:
        """Send a task to an idle worker, which is then busy.

        If the worker has died in the meantime, it is dropped, and the task becomes the next one to be given out.
        """
        try:
            future_answer = worker.submit(assignment.task)
        except self._executor.death_exceptions:
            worker.kill()
            self._waiting_assignments.appendleft(assignment)
            return

        started_assignment = replace(assignment, start_time=time.monotonic())
        self._busy_by_future[future_answer] = _BusyWorker(worker, started_assignment)

    def _wait_for_outcomes(self, upcoming_assignments: Iterator[_Assignment], max_seconds: float) -> list[_Outcome]:
        """Wait until a worker has answered or started, then update the state of all workers.

        Args:
            upcoming_assignments: The tasks that are not in `_waiting_assignments` yet. Some are moved there before the
                wait.
            max_seconds: The longest time to wait.

        Returns:
            What the answered tasks cost, or the errors that ended them.
        """
        self._prefetch_tasks(upcoming_assignments)

        future_answers = self._busy_by_future.keys()
        future_starts = [worker.start_future for worker in self._starting_workers]
        awaited_futures: list[Future[Any]] = [*future_answers, *future_starts]
        wait(awaited_futures, max_seconds, FIRST_COMPLETED)

        # Workers that have started become idle.
        self._collect_started_workers()

        # Workers that have answered become idle, or get the next task.
        outcomes = self._collect_answers()

        # Tasks that take too long are offered to other workers.
        self._requeue_late_tasks()
        return outcomes

    def _collect_answers(self) -> list[_Outcome]:
        """Receive the answers of all workers that have answered.

        Returns:
            How each of their tasks ended. A worker that died adds nothing, unless too many workers died over its task.
        """
        outcomes = []
        done_futures = [future for future in self._busy_by_future if future.done()]
        for future in done_futures:
            # Two workers may have had the same task. The first answer has then removed the other worker.
            if future not in self._busy_by_future:
                continue

            outcome = self._collect_answer(future)
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def _collect_started_workers(self) -> None:
        """Make the workers idle that have started, and drop the ones that died before they had started.

        Raises:
            WorkerError: Too many workers in a row died before they had started.
        """
        started_or_dead_workers = [worker for worker in self._starting_workers if worker.start_future.done()]
        for worker in started_or_dead_workers:
            self._starting_workers.remove(worker)

            death = worker.start_future.exception()
            if death is not None:  # for example on a machine that was lost, which Ray notices late
                self._count_failed_start(death)
                continue

            self._failed_start_count = 0
            self._idle_workers.append(worker)

    def _count_failed_start(self, death: BaseException) -> None:
        """Count a worker that died before it had started.

        Raises:
            WorkerError: Too many workers in a row have died like this.
        """
        max_failed_starts = MAX_FAILED_STARTS_PER_WORKER * self._max_workers
        if self._failed_start_count >= max_failed_starts:
            raise WorkerError(f"no worker can be started: {death}") from death
        self._failed_start_count += 1

    def _collect_answer(self, future: "Future[ChunkAnswer]") -> _Outcome | None:
        """Take the answer of a worker, which becomes idle and gets the next waiting task.

        If the task raised an error, the worker gets no new task here: `map_chunks` raises the error in its turn.

        Args:
            future: The key of the worker in `_busy_by_future`. It holds the answer, or the exception by which it died.

        Returns:
            How the task ended. None if the worker died and another one will compute the task. An error if too many
            workers died over this task.
        """
        worker, assignment = self._busy_by_future.pop(future)
        try:
            answer = future.result()
        except self._executor.death_exceptions as death:
            return self._handle_death(worker, assignment, death)

        self._idle_workers.append(worker)

        # Tokens and tool calls. Nothing if the worker is this process, which counts them itself.
        self._spent_elsewhere += answer.newly_spent

        # A slow task may have been given to a second worker.
        self._cancel_task_copies(assignment.task_number)

        has_failed = isinstance(answer.outcome, UserError)
        if not has_failed:
            self._give_next_task()
        return _Outcome(assignment.task_number, answer.outcome)

    def _give_next_task(self) -> None:
        """Give the next waiting task to the worker that became idle last, if the run may spend more tokens."""
        if self._waiting_assignments and self._has_tokens_left():
            worker = self._idle_workers.pop()
            assignment = self._waiting_assignments.popleft()
            self._give_to_worker(worker, assignment)

    def _handle_death(self, worker: ChunkWorker, assignment: _Assignment, death: Exception) -> _Outcome | None:
        """Let another worker compute the task of a dead one.

        Returns:
            None, or an error if too many workers died over this task.
        """
        try:
            self._replace_dead_worker(worker, assignment, death)
        except WorkerError as error:
            return _Outcome(assignment.task_number, error)
        return None

    def _cancel_task_copies(self, task_number: int) -> None:
        """Cancel the copies of a task that has ended. A task has copies if a worker took too long for it.

        A worker that computes a copy is killed.
        """
        for future, busy_worker in list(self._busy_by_future.items()):
            if busy_worker.assignment.task_number == task_number:
                del self._busy_by_future[future]
                busy_worker.worker.kill()

        self._waiting_assignments = deque(
            assignment for assignment in self._waiting_assignments if assignment.task_number != task_number
        )

    def _replace_dead_worker(self, worker: ChunkWorker, assignment: _Assignment, death: Exception) -> None:
        """Remove a dead worker, and make its task the next one to be given out.

        If its machine was lost, the idle workers of that machine are removed as well.

        Args:
            worker: The worker.
            assignment: The task that it had.
            death: The exception by which its death was noticed.

        Raises:
            WorkerError: Too many workers died over this task.
        """
        is_machine_lost = self._executor.is_machine_lost(worker, death)
        worker.kill()
        if is_machine_lost:
            lost_machine = worker.start_future.result().machine_id
            self._forget_idle_workers_on(lost_machine)

        # The worker was late, so another one already has the task, or will get it.
        if assignment.was_given_again:
            return

        if is_machine_lost:
            self._requeue_after_failure(assignment, MACHINE_LOST, f"{worker} was lost with its machine")
        else:
            self._requeue_after_failure(assignment, WORKER_DIED, f"{worker} died: {' '.join(str(death).split())}")

    def _forget_idle_workers_on(self, lost_machine: str) -> None:
        """Drop the idle workers on a lost machine. They are dead, and a task given to one of them would fail."""
        self._idle_workers = [
            worker for worker in self._idle_workers if worker.start_future.result().machine_id != lost_machine
        ]

    def _requeue_after_failure(self, assignment: _Assignment, failure: _Failure, what_happened: str) -> None:
        """Make a task the next one to be given out, after a worker failed over it. Log a warning.

        Args:
            assignment: The task, with the failures of earlier workers.
            failure: How the worker failed: WORKER_DIED, WORKER_LATE or MACHINE_LOST.
            what_happened: The same for people, such as "worker 7 died: ...".

        Raises:
            WorkerError: This kind of failure has happened `failure.max_count` times over this task.
        """
        failures = (*assignment.failures, failure)
        if failures.count(failure) == failure.max_count:
            raise WorkerError(
                f"{assignment}: {failure.max_count} {failure.description}, the last: {what_happened}; what was "
                f"committed is kept; {failure.remedy}"
            ) from None

        log.warning("%s: %s; another worker gets the chunk", assignment, what_happened)
        self._waiting_assignments.appendleft(replace(assignment, failures=failures))

    def _requeue_late_tasks(self) -> None:
        """Offer tasks that take longer than `execution.chunk_hours` to other workers as well.

        The late workers go on computing, and the first answer counts. But if all workers are late and no other worker
        can be used, the late ones are killed to make room.

        Raises:
            WorkerError: Too many workers were late with the same task.
        """
        time_limit = timedelta(hours=self._local_worker.plan.settings.execution.chunk_hours)
        for future, busy_worker in list(self._busy_by_future.items()):
            if busy_worker.assignment.has_exceeded(time_limit) and not future.done():
                self._requeue_late_task(future, time_limit)

        if self._are_all_late() and not self._can_give_out_task():
            self._kill_busy_workers()

    def _requeue_late_task(self, future: "Future[ChunkAnswer]", time_limit: timedelta) -> None:
        """Offer the task of a late worker to another worker as well, and mark it as offered.

        The late worker goes on, because its answer may still come first. So it stays in `_busy_by_future`.

        Args:
            future: The key of the late worker in `_busy_by_future`.
            time_limit: The time that it has exceeded.

        Raises:
            WorkerError: Too many workers were late with this task.
        """
        worker, assignment = self._busy_by_future[future]
        what_happened = f"{worker} has not answered for {time_limit} (execution.chunk_hours)"
        self._requeue_after_failure(assignment, WORKER_LATE, what_happened)

        # With this mark, the task is not offered again because of this worker.
        assignment_given_again = replace(assignment, was_given_again=True)
        self._busy_by_future[future] = _BusyWorker(worker, assignment_given_again)

    def _are_all_late(self) -> bool:
        """Return whether every busy worker takes too long for its task."""
        return all(busy_worker.assignment.was_given_again for busy_worker in self._busy_by_future.values())


def _take_first_ended_task(outcomes: deque[_Outcome]) -> EndedTask | None:
    """Remove the first outcome and return it, or None if there is none.

    Raises:
        UserError: The outcome is this error.
    """
    if not outcomes:
        return None

    task_number, work_or_error = outcomes.popleft()
    if isinstance(work_or_error, UserError):
        raise work_or_error
    return EndedTask(task_number, work_or_error)


def choose_worker_count(settings: Settings) -> int:
    """Choose how many workers this machine gets. A worker is a process that loads the model for itself.

    Returns:
        `execution.workers`, if it is set. Otherwise:

        - 1 for a model that a server runs (`model.url`)
        - on GPUs, one worker per group of GPUs that run one model together (mostly a single GPU), but at least one
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
        return max(1, gpu_count // model.gpus_per_model)

    computes_on_one_thread = model.device in ("auto", "cpu") and model.runs_in_torch and is_small_model(model)
    return count_cores() if computes_on_one_thread else 1


def _count_gpus(model: ModelSettings) -> int:
    """Count the GPUs of this machine that the model may use."""
    if model.device not in ("auto", "cuda"):
        return 0
    import torch

    # Unlike torch.cuda.is_available, this leaves it open which GPUs a process uses.
    return torch.cuda.device_count()
