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
from toolformer_dag.lake.session import LakeSession, session
from toolformer_dag.processes import end_with_parent
from toolformer_dag.settings.sections import Settings

Tables = Mapping[str, TableOutput]
"""The tables of a plan by name."""
TablesOf = Callable[[Plan], Sequence[TableOutput]]
"""What makes the tables of a plan: another process makes its own. It is pickled, so it is a function of a module."""


class WorkerError(UserError):
    """A chunk that could not be computed: too many workers failed over it, or one sees other settings than the run."""


@dataclass(frozen=True, slots=True)
class Task:
    """A chunk of a table's work, as it travels to a worker.

    - `table`: the name of the table
    - `settings`: the fingerprint of the table's settings, with which the computing process has to agree
    - `payload`: what `ByChunk.compute` gets; of a stage made ByShard the name of the shard
    - `step`: tells updates apart: workers remember what they read of the lake as long as one goes on
    """

    table: str
    settings: str
    payload: Any
    step: str = ""


def perform_task(worker: Worker, tables: Tables, task: Task) -> Work:
    """Compute a chunk of a table and store its rows, or compute a whole shard and publish it.

    Args:
        worker: What this process has loaded.
        tables: The tables by name, as this process knows them.
        task: Names the table, and says what to compute.

    Returns:
        What the work cost, such as tokens of the model and computed rows. Nothing is counted for a shard.

    Raises:
        WorkerError: The settings have changed since the run began.
        Exception: Anything that the computation raises.
    """
    output = _require_task_table(tables, task)
    make = output.stage.make

    if isinstance(make, ByChunk):
        return make.compute(worker, output, task.payload)

    assert isinstance(make, ByShard)
    shard_name = task.payload
    rows = make.rows(worker, output, shard_name)
    output.publish(shard_name, rows)
    return Work()


def _require_task_table(tables: Tables, task: Task) -> TableOutput:
    """Return the table of a task.

    Raises:
        WorkerError: The table is unknown here, or has other settings than in the process that created the task.
    """
    output = _find_table(tables, task.table)
    if output is None or output.code_version != task.settings:
        raise WorkerError(f"{task.table}: settings, prompts or tools changed while the run went on; run again")
    return output


def _find_table(tables: Tables, name: str) -> TableOutput | None:
    """Find a table by its name, also among the inner tables, which are computed for another one alone."""
    if name in tables:
        return tables[name]

    for output in tables.values():
        for inner_output in output.inner:
            if inner_output.name == name:
                return inner_output
    return None


class ChunkAnswer(NamedTuple):
    """What a worker answers to a task.

    - `outcome`: what the chunk cost, or the error that it raised
    - `spent`: what the worker spent in another process since its last answer; nothing where it is this process
    """

    outcome: Work | UserError
    spent: Spent


class Whereabouts(NamedTuple):
    """Where a worker runs: the id of its machine, which is empty for this one, and its name for people."""

    machine: str
    name: str


class ChunkWorker(Protocol):
    """Computes a chunk at a time, once it has started. As text: its name for people.

    `started`: done when it has started, or died before; then its result is Whereabouts, or it raises how it died.
    """

    @property
    def started(self) -> Future[Whereabouts]: ...

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """Give a task; only one that has answered gets the next.

        A worker that has died raises one of `Executor.deaths` here, or in the future.
        """

    def kill(self) -> None:
        """End the worker at once; what it had committed is kept."""


@dataclass(frozen=True, slots=True)
class Executor:
    """Where chunks are computed.

    - `count`: returns how many workers there may be, a number that may change
    - `start`: begins a worker
    - `deaths`: the exceptions by which a worker tells that it died
    - `lost`: gets a dead worker and its exception; returns whether it died with its machine
    """

    count: Callable[[], int]
    start: Callable[[], ChunkWorker]
    deaths: tuple[type[Exception], ...] = ()
    lost: Callable[[ChunkWorker, Exception], bool] = lambda worker, died: False


STARTED: Future[Whereabouts] = Future()
"""`ChunkWorker.started` of workers of this machine, which take work from the beginning."""
STARTED.set_result(Whereabouts(machine="", name="this machine"))


@dataclass(frozen=True, slots=True)
class ThisProcess:
    """This process as a worker: a chunk is computed in `submit`, which raises exceptions as they are."""

    worker: Worker
    tables: Tables
    started = STARTED

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """See ChunkWorker."""
        work = perform_task(self.worker, self.tables, task)
        done: Future[ChunkAnswer] = Future()
        done.set_result(ChunkAnswer(outcome=work, spent=Spent()))
        return done

    def kill(self) -> None:
        """See ChunkWorker."""


class ChunkServer:
    """What a worker of another process does with the tasks that it gets, one after the other.

    The first task loads the plan and the tables; the model is loaded by what needs it. Between tasks it holds

    - the worker: the plan, the model, open row stores
    - the session of the step that goes on: what was read of the lake; a task of another step begins a new one
    - what it had spent at its last answer
    """

    def __init__(self, settings: Settings, tables_of: TablesOf) -> None:
        self._settings = settings
        self._tables_of = tables_of
        self._worker: Worker | None = None
        self._tables: Tables = {}
        self._step = ""
        self._session = LakeSession(news=[])
        self._spent_before = Spent()

    def answer(self, task: Task) -> ChunkAnswer:
        """Carry out a task.

        Returns:
            What the task cost, or its error, and what this process has spent since its last answer.
        """
        outcome = self._perform_safely(task)
        return ChunkAnswer(outcome, spent=self._take_spent())

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

    def _take_spent(self) -> Spent:
        """Return what this process has spent since the last call, such as tokens of the model."""
        spent_in_all = self._worker.spent() if self._worker else Spent()
        spent_since = spent_in_all - self._spent_before
        self._spent_before = spent_in_all
        return spent_since

    def _perform_in_session(self, task: Task) -> Work:
        """Carry out a task, while remembering what earlier tasks of the same update have read of the lake.

        Returns:
            What the task cost, with a list of what it has written to the lake (`news`).
        """
        worker = self._load_worker()

        is_new_update = task.step != self._step
        if is_new_update:
            self._step = task.step
            self._session = LakeSession(news=[])  # forgets what was read for the update before

        with session(self._session):
            work = perform_task(worker, self._tables, task)
        return replace(work, news=self._session.take_news())

    def _load_worker(self) -> Worker:
        """Return the worker of this process; the first call loads the plan and its tables."""
        if self._worker is None:
            plan = Plan.of(self._settings)
            self._tables = {output.name: output for output in self._tables_of(plan)}
            self._worker = Worker(plan)
        return self._worker


class OneProcess:
    """A process of this machine with a model of its own, which can be killed. It inherits no threads."""

    started = STARTED

    def __init__(self, settings: Settings, tables_of: TablesOf) -> None:
        self._context = _Context()
        self._executor = ProcessPoolExecutor(
            max_workers=1, mp_context=self._context, initializer=_begin_worker_process, initargs=(settings, tables_of)
        )

    def __str__(self) -> str:
        return f"worker {self._context.process}"  # with its process id and, when it has ended, its exit code

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """See ChunkWorker; the first task starts the process. Raises BrokenProcessPool where the process has died."""
        with _hold_interrupts():
            return self._executor.submit(_answer_task, task)

    def kill(self) -> None:
        """See ChunkWorker; waits until the process has ended."""
        process = self._context.process
        if process is not None:
            process.kill()
            process.join()
        self._executor.shutdown()


class _Context(SpawnContext):
    """Spawn context that remembers its process; the process inherits no threads and no CUDA context."""

    process: SpawnProcess | None = None

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        """Return a new process, and remember it."""
        self.process = SpawnProcess(*args, **options)
        return self.process


_server: ChunkServer | None = None
"""In a worker process, what answers its tasks."""


def _begin_worker_process(settings: Settings, tables_of: TablesOf) -> None:
    """Prepare a new worker process for its tasks."""
    global _server
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent process, which decides what to do
    end_with_parent()
    _server = ChunkServer(settings, tables_of)


def _answer_task(task: Task) -> ChunkAnswer:
    """Carry out a task in a worker process."""
    assert _server is not None
    return _server.answer(task)


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Delay Ctrl-C (SIGINT) until the end of the `with` block.

    A process that is started in the block inherits this, so that it is not interrupted either while it starts.
    """
    resource_tracker.ensure_running()  # first, because its start would unblock the signal again
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
