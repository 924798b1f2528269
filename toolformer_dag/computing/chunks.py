"""A chunk of a table's work, and the workers that compute one at a time: this process, or a process of its own."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Protocol

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.stage import ByChunk, ByShard, TableOutput, Work
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.lake.session import Session, session
from toolformer_dag.processes import end_with_parent
from toolformer_dag.settings.sections import Settings

Tables = Mapping[str, TableOutput]
"""The tables of a plan by name."""
TablesOf = Callable[[Plan], Sequence[TableOutput]]
"""What makes the tables of a plan: another process makes its own."""


class WorkerError(UserError):
    """A chunk that could not be computed: too many workers failed over it, or one sees other settings than the run."""


@dataclass(frozen=True, slots=True)
class Task:
    """A chunk of a table's work. `settings`: fingerprint that the computing process has to agree with.

    `step`: what tells the step from others: workers hold what they read of the lake as long as one goes on.
    """

    table: str
    settings: str
    payload: Any
    step: str = ""


def perform(worker: Worker, tables: Tables, task: Task) -> Work:
    """Compute a chunk and commit its rows. Raises WorkerError where this process has read other settings."""
    output = tables.get(task.table) or _inner(tables, task.table)
    if output is None or output.code_version != task.settings:
        raise WorkerError(f"{task.table}: settings, prompts or tools changed while the run went on; run again")
    make = output.stage.make
    if isinstance(make, ByChunk):
        return make.compute(worker, output, task.payload)
    assert isinstance(make, ByShard)
    output.publish(task.payload, make.rows(worker, output, task.payload))
    return Work()


def _inner(tables: Tables, name: str) -> TableOutput | None:
    """The table of that name that is brought up to date for another one alone."""
    return next((one for output in tables.values() for one in output.inner if one.name == name), None)


Answer = tuple[Work | UserError, Spent]
"""What a chunk cost or why it failed, and what the worker spent in another process since its last answer."""


class ChunkWorker(Protocol):
    """Computes a chunk at a time, once it has started. As text: its name for people.

    `started`: the machine that it has found, and its name there; or how it died before.
    """

    @property
    def started(self) -> Future[Any]: ...

    def submit(self, task: Task) -> "Future[Answer]":
        """Give a task; a worker that has died says so here, or in the future."""

    def kill(self) -> None:
        """End the worker at once."""


@dataclass(frozen=True, slots=True)
class Executor:
    """Where chunks are computed: at most `count()` workers, a number that may change; `start` begins one.

    `deaths`: the exceptions by which a worker tells that it died. `lost`: whether it died with its machine.
    """

    count: Callable[[], int]
    start: Callable[[], ChunkWorker]
    deaths: tuple[type[Exception], ...] = ()
    lost: Callable[[ChunkWorker, Exception], bool] = lambda worker, died: False


STARTED: Future[Any] = Future()
"""That of workers of this machine, which take work from the beginning."""
STARTED.set_result(("", "this machine"))


@dataclass(frozen=True, slots=True)
class ThisProcess:
    """This process: a chunk is computed when it is given, and an exception is raised as it is."""

    worker: Worker
    tables: Tables
    started = STARTED

    def submit(self, task: Task) -> "Future[Answer]":
        """See ChunkWorker."""
        done: Future[Answer] = Future()
        done.set_result((perform(self.worker, self.tables, task), Spent()))
        return done

    def kill(self) -> None:
        """See ChunkWorker."""


class ChunkServer:
    """What a worker of another process does with the tasks that it gets; its means are made with the first."""

    def __init__(self, settings: Settings, tables_of: TablesOf) -> None:
        self._settings, self._tables_of, self._reported = settings, tables_of, Spent()
        self._worker: Worker | None = None
        self._tables: Tables = {}
        self._step, self._session = "", Session(news=[])

    def answer(self, task: Task) -> Answer:
        """Compute a chunk and commit its rows; exceptions become answers that any process can read."""
        answer: Work | UserError
        try:
            if self._worker is None:
                plan = Plan.of(self._settings)
                self._tables = {output.name: output for output in self._tables_of(plan)}
                self._worker = Worker(plan)
            if task.step != self._step:
                self._step, self._session = task.step, Session(news=[])
            with session(self._session) as held:
                answer = replace(perform(self._worker, self._tables, task), news=held.take_news())
        except UserError as error:
            answer = UserError(str(error))
        except Exception as error:  # noqa: BLE001 - raised in the process that waits for it
            answer = WorkerError(f"a worker failed: {type(error).__name__}: {error}")
        before, self._reported = self._reported, self._worker.spent() if self._worker else Spent()
        return answer, self._reported - before


class OneProcess:
    """A process of this machine with a model of its own, which can be killed."""

    started = STARTED

    def __init__(self, settings: Settings, tables_of: TablesOf) -> None:
        self._context = _Context()
        self._executor = ProcessPoolExecutor(1, self._context, _begin, (settings, tables_of))

    def __str__(self) -> str:
        return f"worker {self._context.process}"  # with its process id and, when it has ended, its exit code

    def submit(self, task: Task) -> "Future[Answer]":
        """See ChunkWorker. Raises BrokenProcessPool where the process has died."""
        with _interrupts_held():
            return self._executor.submit(_answer, task)

    def kill(self) -> None:
        """See ChunkWorker."""
        if (process := self._context.process) is not None:
            process.kill()
            process.join()
        self._executor.shutdown()


class _Context(SpawnContext):
    """Spawn context that remembers its process; inherits no threads and no CUDA context."""

    process: SpawnProcess | None = None

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        self.process = SpawnProcess(*args, **options)
        return self.process


_server: ChunkServer | None = None


def _begin(settings: Settings, tables_of: TablesOf) -> None:
    global _server
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent()
    _server = ChunkServer(settings, tables_of)


def _answer(task: Task) -> Answer:
    assert _server is not None
    return _server.answer(task)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the block ends; a process that starts in it never gets one, however early it comes."""
    resource_tracker.ensure_running()  # its own start, which the first process brings about, would let Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
