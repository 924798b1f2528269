"""A pool of local worker processes with warm models, one per GPU; chunks go out, what they cost comes back."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from toolformer_dag.files import UserError
from toolformer_dag.model.weights import model_name, parameters
from toolformer_dag.pipeline.chunks import Ended, InProcess, Tables, Task, WorkerError, Workers, perform
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stage import Work
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.sections import ModelSettings, Settings

QUOTA = Path("/sys/fs/cgroup/cpu.max")
TRIES = 2
"""How many workers may die over one chunk."""


def workers_of(worker: Worker, tables: Tables) -> Workers:
    """Return this process where one worker is enough, else a pool, whose processes start with the first chunks."""
    count = worker_count(worker.plan.settings)
    return InProcess(worker, tables) if count == 1 else LocalProcesses(worker, count)


class OnDemand:
    """Decides with the first chunk how many workers there are: a run that has nothing to compute starts none."""

    def __init__(self, worker: Worker, tables: Tables) -> None:
        self._worker, self._tables = worker, tables
        self._workers: Workers | None = None

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """See Workers."""
        waiting = iter(tasks)
        for first in waiting:
            if self._workers is None:
                self._workers = workers_of(self._worker, self._tables)
            yield from self._workers.map_chunks(chain((first,), waiting))

    def close(self) -> None:
        """End the workers and let go of their models."""
        if self._workers is not None:
            self._workers.close()


@dataclass(frozen=True, slots=True)
class _Given:
    number: int
    task: Task
    tries: int = 1


class LocalProcesses:
    """At most `count` processes, started when there is work for them and kept until `close`."""

    def __init__(self, worker: Worker, count: int) -> None:
        self._here, self._count = worker, count
        self._context = get_context("spawn")  # nothing of this process is in them: no thread, no CUDA context
        self._idle: list[tuple[BaseProcess, Connection]] = []
        self._busy: dict[Connection, tuple[BaseProcess, _Given]] = {}

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """See Workers."""
        waiting, again, beat = iter(enumerate(tasks)), deque[_Given](), time.monotonic()
        more = True
        try:
            while more or again or self._busy:
                while len(self._busy) < self._count and (again or more):
                    given = again.popleft() if again else next((_Given(*one) for one in waiting), None)
                    if given is None:
                        more = False
                    else:
                        self._give(given)
                for line in self._ready():
                    yield from self._received(line, again)
                if time.monotonic() - beat > 1:
                    beat = time.monotonic()
                    yield None
        finally:
            self._kill_busy()

    def _ready(self) -> list[Connection]:
        """The lines on which something came in, within a second."""
        found = wait(list(self._busy), timeout=1.0) if self._busy else []
        return [line for line in self._busy if line in found]

    def close(self) -> None:
        """Kill every process: what it committed is kept."""
        self._kill_busy()
        while self._idle:
            _kill(*self._idle.pop())
        self._here.release()

    def _kill_busy(self) -> None:
        while self._busy:
            line, (process, _) = self._busy.popitem()
            _kill(process, line)

    def _give(self, given: _Given) -> None:
        self._idle = [(process, line) for process, line in self._idle if process.is_alive()]
        process, line = self._idle.pop() if self._idle else self._start()
        self._busy[line] = process, given
        with suppress(BrokenPipeError):  # it is gone; the end of the line will be heard
            line.send(given.task)

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(self._here.plan.settings, self._here.ledger, theirs), daemon=True
        )
        with _interrupts_held():
            process.start()
        theirs.close()  # so that the end of the process is the end of the line
        return process, ours

    def _received(self, line: Connection, again: deque[_Given]) -> Iterator[tuple[int, Work]]:
        process, given = self._busy.pop(line)
        try:
            answer: Work | UserError | _Failure = line.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            if given.tries == TRIES:
                raise WorkerError(
                    f"{given.task.table}: {TRIES} workers died over one chunk, the last with exit code "
                    f"{process.exitcode} (-9: killed, as where memory runs out); what was committed is kept; run "
                    "again, with fewer execution.workers or a smaller model.token_budget where memory is short"
                ) from None
            again.append(_Given(given.number, given.task, given.tries + 1))
            return
        self._idle.append((process, line))
        if isinstance(answer, _Failure):
            raise answer.error()
        yield given.number, answer  # type: ignore[misc]


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the block ends; a process that starts in it never gets one, however early it comes."""
    resource_tracker.ensure_running()  # its own start, which the first process brings about, would let Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(process: BaseProcess, line: Connection) -> None:
    process.kill()
    process.join()
    line.close()


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception of a worker, in a form that any process can read."""

    message: str
    by_user: bool

    def error(self) -> Exception:
        return UserError(self.message) if self.by_user else WorkerError(f"a worker failed: {self.message}")


def serve(settings: Settings, ledger: Path | None, line: Connection) -> None:
    """Compute chunks as they come in, until the line is closed or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent()
    means: tuple[Worker, Tables] | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            task = line.recv()
            try:
                means = means or _means(settings, ledger)
                answer: Work | _Failure = perform(*means, task)
            except UserError as error:
                answer = _Failure(str(error), by_user=True)
            except Exception as error:  # noqa: BLE001 - told in the process that waits for it
                answer = _Failure(f"{type(error).__name__}: {error}", by_user=False)
            line.send(answer)


def _means(settings: Settings, ledger: Path | None) -> tuple[Worker, Tables]:
    plan = Plan.of(settings)
    return Worker(plan, ledger), {output.name: output for output in table_outputs(plan)}


def end_with_parent() -> None:
    """End this process at once when its parent is gone, however that ended; nothing happens without a parent."""
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def worker_count(settings: Settings) -> int:
    """Return `execution.workers`, else one per GPU, or one per core for a model that computes on one thread, else 1."""
    return settings.execution.workers or _fitting(settings.model)


def _fitting(model: ModelSettings) -> int:
    import torch

    from toolformer_dag.model.weights import SMALL

    if model.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    on_cpu = model.device in ("auto", "cpu")
    return cores() if on_cpu and 0 < parameters(Path(model_name(model))) < SMALL else 1


def cores() -> int:
    """Return the cores this process may use: hardware threads of one core count once, a container's share is kept."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return max(1, min(len({_core(cpu) for cpu in allowed}), _quota()))


def _core(cpu: int) -> str:
    """The hardware threads that share the core of one of them."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return file.read_text() if file.is_file() else str(cpu)


def _quota() -> int:
    """Whole cores that a container's limit leaves; a large number where there is none."""
    share, _, period = QUOTA.read_text().partition(" ") if QUOTA.is_file() else ("max", "", "")
    return 1_000_000 if share == "max" else int(share) // int(period)
