"""A chunk of a table's work as a task, and the workers that compute one task at a time.

A worker is this process (ThisProcess), a process of this machine (OneProcess), or one of a cluster (ray_actors.py).
ChunkServer is what a worker of another process does with its tasks.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, NamedTuple, Protocol

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.stage import ByChunk, ByShard, TableOutput, Work
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.lake.session import LakeSession, enter_session
from toolformer_dag.processes import end_with_parent
from toolformer_dag.settings.sections import Settings

TablesByName = Mapping[str, TableOutput]
"""The tables of a plan, by name."""
TablesBuilder = Callable[[Plan], Sequence[TableOutput]]
"""Builds the tables of a plan. Other processes call it too, so it has to be a function that can be pickled."""


class WorkerError(UserError):
    """A chunk could not be computed: too many workers failed over it, or a worker has other settings than the run."""


@dataclass(frozen=True, slots=True)
class Task:
    """A chunk of a table's work, as it is sent to a worker.

    Attributes:
        table_name: The name of the table.
        settings_fingerprint: The fingerprint of the table's settings. The worker has to have the same settings.
        payload: What to compute, as the stage describes it. If a worker makes whole shards (ByShard), the name of the
            shard.
        update_id: Identifies the update of the table. Workers remember what they read of the lake until the next
            update.
    """

    table_name: str
    settings_fingerprint: str
    payload: Any
    update_id: str = ""


def perform_task(worker: Worker, tables_by_name: TablesByName, task: Task) -> Work:
    """Compute a chunk of a table and store its rows, or compute a whole shard and publish it.

    Args:
        worker: What this process has loaded.
        tables_by_name: The tables by name, as this process knows them.
        task: Names the table, and says what to compute.

    Returns:
        What the work cost, such as tokens of the model and computed rows. Nothing is counted for a shard.

    Raises:
        WorkerError: The settings have changed since the run began.
        Exception: Anything that the computation raises.
    """
    output = _require_task_table(tables_by_name, task)
    row_maker = output.stage.row_maker

    if isinstance(row_maker, ByChunk):
        return row_maker.compute_chunk(worker, output, task.payload)

    assert isinstance(row_maker, ByShard)
    shard_name = task.payload
    rows = row_maker.make_rows(worker, output, shard_name)
    output.publish(shard_name, rows)
    return Work()


def _require_task_table(tables_by_name: TablesByName, task: Task) -> TableOutput:
    """Return the table of a task.

    Raises:
        WorkerError: The table is unknown here, or has other settings than in the process that created the task.
    """
    output = _find_table(tables_by_name, task.table_name)
    if output is None or output.code_version != task.settings_fingerprint:
        raise WorkerError(f"{task.table_name}: settings, prompts or tools changed while the run went on; run again")
    return output


def _find_table(tables_by_name: TablesByName, table_name: str) -> TableOutput | None:
    """Find a table by its name, also among the inner tables, which are computed for another one alone.

    Returns:
        None if there is no such table.
    """
    if table_name in tables_by_name:
        return tables_by_name[table_name]

    for output in tables_by_name.values():
        for inner_output in output.inner_outputs:
            if inner_output.name == table_name:
                return inner_output
    return None


class ChunkAnswer(NamedTuple):
    """What a worker answers to a task.

    Attributes:
        outcome: What the chunk cost, or the error that it raised.
        newly_spent: The tokens and tool calls that a worker in another process has spent since its last answer. Nothing
            if the worker is this process, which counts them itself.
    """

    outcome: Work | UserError
    newly_spent: Spent


class Whereabouts(NamedTuple):
    """Where a worker runs.

    Attributes:
        machine_id: The id of its machine. Empty for this machine.
        display_name: The name of the worker or its machine for people.
    """

    machine_id: str
    display_name: str


class ChunkWorker(Protocol):
    """Computes one chunk at a time, once it has started. As a string, it is its name for people."""

    @property
    def start_future(self) -> Future[Whereabouts]:
        """Is done when the worker has started, or has died before. Its exception says how the worker died."""

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """Send a task to the worker, which must have answered the task before.

        If the worker has died, one of `Executor.death_exceptions` is raised, here or by the returned future.
        """

    def kill(self) -> None:
        """End the worker at once. What it has committed is kept."""


@dataclass(frozen=True, slots=True)
class Executor:
    """The place where chunks are computed: this process, other processes, or a cluster.

    Attributes:
        count_workers: Returns how many workers there may be at most. The number may change.
        start_worker: Starts a worker.
        death_exceptions: The exceptions that say that a worker has died.
        is_machine_lost: Returns whether a worker died because its machine was lost, given the worker and its exception.
    """

    count_workers: Callable[[], int]
    start_worker: Callable[[], ChunkWorker]
    death_exceptions: tuple[type[Exception], ...] = ()
    is_machine_lost: Callable[[ChunkWorker, Exception], bool] = lambda worker, death: False


ALREADY_STARTED: Future[Whereabouts] = Future()
"""The `start_future` of workers of this machine, which can take a task at once."""
ALREADY_STARTED.set_result(Whereabouts(machine_id="", display_name="this machine"))


@dataclass(frozen=True, slots=True)
class ThisProcess:
    """This process as a worker. A chunk is computed during `submit`, which raises any exception of the computation.

    Attributes:
        worker: What this process has loaded.
        tables_by_name: The tables whose chunks are computed, by name.
        start_future: Done from the beginning.
    """

    worker: Worker
    tables_by_name: TablesByName
    start_future = ALREADY_STARTED

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """Compute a task now, and return its answer as a future that is done.

        Raises:
            Exception: Anything that the computation raises.
        """
        work = perform_task(self.worker, self.tables_by_name, task)
        answer = ChunkAnswer(outcome=work, newly_spent=Spent())  # this process has already counted what it spent

        future_answer: Future[ChunkAnswer] = Future()
        future_answer.set_result(answer)
        return future_answer

    def kill(self) -> None:
        """Do nothing, because no task is running outside of `submit`."""


class ChunkServer:
    """Carries out the tasks of a worker in another process, one after the other.

    The first task loads the plan and the tables. The model is loaded when a task needs it. All of that is kept for the
    next tasks.
    """

    def __init__(self, settings: Settings, build_tables: TablesBuilder) -> None:
        """Begin with nothing loaded.

        Args:
            settings: The settings of the run.
            build_tables: Builds the tables of a plan.
        """
        self._settings = settings
        self._build_tables = build_tables

        # The plan, the model and open row stores. None until the first task.
        self._worker: Worker | None = None
        self._tables_by_name: TablesByName = {}

        # What was read of the lake for the present update. A task of another update begins a new session. In
        # `unsent_news`, it collects what a task has written to the lake, to be sent with the answer.
        self._update_id = ""
        self._lake_session = LakeSession(unsent_news=[])

        # All tokens and tool calls up to the last answer. An answer tells only what was spent since then.
        self._spent_at_last_answer = Spent()

    def answer(self, task: Task) -> ChunkAnswer:
        """Carry out a task.

        Returns:
            What the task cost, or its error, and what this process has spent since its last answer.
        """
        outcome = self._perform_safely(task)
        return ChunkAnswer(outcome, newly_spent=self._take_newly_spent())

    def _perform_safely(self, task: Task) -> Work | UserError:
        """Carry out a task without raising an error.

        Returns:
            What the task cost, or the error, in a form that every process can unpickle.
        """
        try:
            return self._perform_in_session(task)
        except UserError as error:
            return UserError(str(error))
        except Exception as error:  # noqa: BLE001 - raised in the process that waits for it
            return WorkerError(f"a worker failed: {type(error).__name__}: {error}")

    def _take_newly_spent(self) -> Spent:
        """Return the tokens and tool calls that this process has spent since the last call of this method."""
        total_spent = self._worker.compute_total_spent() if self._worker else Spent()
        newly_spent = total_spent - self._spent_at_last_answer
        self._spent_at_last_answer = total_spent
        return newly_spent

    def _perform_in_session(self, task: Task) -> Work:
        """Carry out a task. What earlier tasks of the same update have read of the lake is not read again.

        Returns:
            What the task cost. Its `news` lists what it has written to the lake (the folder of tables).
        """
        worker = self._load_worker()

        is_new_update = task.update_id != self._update_id
        if is_new_update:
            self._update_id = task.update_id
            self._lake_session = LakeSession(unsent_news=[])  # forgets what was read for the update before

        with enter_session(self._lake_session):
            work = perform_task(worker, self._tables_by_name, task)
        return replace(work, news=self._lake_session.take_news())

    def _load_worker(self) -> Worker:
        """Return what this process has loaded. The first call loads the plan and builds its tables."""
        if self._worker is None:
            plan = Plan.from_settings(self._settings)
            self._tables_by_name = {output.name: output for output in self._build_tables(plan)}
            self._worker = Worker(plan)
        return self._worker


class OneProcess:
    """A worker that is another process of this machine, with a model of its own. It can be killed.

    Attributes:
        start_future: Done from the beginning.
    """

    start_future = ALREADY_STARTED

    def __init__(self, settings: Settings, build_tables: TablesBuilder) -> None:
        """Prepare the process, which the first task starts.

        Args:
            settings: The settings of the run.
            build_tables: Builds the tables of a plan. The process calls it for itself.
        """
        self._spawn_context = _Context()
        self._executor = ProcessPoolExecutor(
            max_workers=1,
            mp_context=self._spawn_context,
            initializer=_begin_worker_process,
            initargs=(settings, build_tables),
        )

    def __str__(self) -> str:
        return f"worker {self._spawn_context.process}"  # with its process id and, when it has ended, its exit code

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """Send a task to the process, which must have answered the task before. The first task starts the process.

        Raises:
            BrokenProcessPool: The process has died. The returned future may raise it as well.
        """
        with _delay_interrupts():
            return self._executor.submit(_answer_task, task)

    def kill(self) -> None:
        """Kill the process, if it was started, and wait until it has ended."""
        process = self._spawn_context.process
        if process is not None:
            process.kill()
            process.join()
        self._executor.shutdown()


class _Context(SpawnContext):
    """A way to start processes that remembers the last one, so that it can be killed.

    A spawned process inherits no threads and no CUDA context.

    Attributes:
        process: The process that was created last. None if there is none yet.
    """

    process: SpawnProcess | None = None

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        """Create a process, and remember it."""
        self.process = SpawnProcess(*args, **options)
        return self.process


_chunk_server: ChunkServer | None = None
"""Carries out the tasks of this process, if it is a worker process."""


def _begin_worker_process(settings: Settings, build_tables: TablesBuilder) -> None:
    """Prepare a new worker process for its tasks. This is called in the process.

    Args:
        settings: The settings of the run.
        build_tables: Builds the tables of a plan.
    """
    global _chunk_server
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent process, which decides what to do
    end_with_parent()
    _chunk_server = ChunkServer(settings, build_tables)


def _answer_task(task: Task) -> ChunkAnswer:
    """Carry out a task. This is called in a worker process."""
    assert _chunk_server is not None
    return _chunk_server.answer(task)


@contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C (SIGINT) until the end of the `with` block.

    A process that is started in the block inherits this, so that it is not interrupted either while it starts.
    """
    # Start this process of `multiprocessing` first, because its start would unblock the signal again.
    resource_tracker.ensure_running()

    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
