"""Workers in processes of their own: what each does with its chunks, and a pool of those of this machine."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import parent_process, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.lake.session import Session, session
from toolformer_dag.pipeline.chunks import Answer, Failure, Tables, Task, Workers, perform
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.spending import Spent
from toolformer_dag.pipeline.stage import Work
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.sections import Settings


class ChunkServer:
    """What a worker of another process does with the tasks that it gets; its means are made with the first."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._told = settings, Spent()
        self._worker: Worker | None = None
        self._tables: Tables = {}
        self._step, self._session = "", Session(news=[])

    def started(self) -> None:
        """Tell that a machine was found."""

    def answer(self, task: Task) -> Answer:
        """Compute a chunk and commit its rows; every exception becomes an answer."""
        answer: Work | Failure
        try:
            if self._worker is None:
                plan = Plan.of(self._settings)
                self._tables = {output.name: output for output in table_outputs(plan)}
                self._worker = Worker(plan)
            if task.step != self._step:
                self._step, self._session = task.step, Session(news=[])
            with session(self._session) as held:
                answer = replace(perform(self._worker, self._tables, task), news=held.take_news())
        except UserError as error:
            answer = Failure(str(error), by_user=True)
        except Exception as error:  # noqa: BLE001 - told in the process that waits for it
            answer = Failure(f"{type(error).__name__}: {error}", by_user=False)
        before, self._told = self._told, self._worker.spent() if self._worker else Spent()
        return answer, self._told - before


class LocalProcesses(Workers):
    """Processes of this machine, each with a model of its own and an executor: where one dies, the others go on."""

    deaths = (BrokenProcessPool,)

    def _start(self) -> "_OneProcess":
        return _OneProcess(self._here.plan.settings)

    def _send(self, worker: "_OneProcess", task: Task) -> "Future[Answer]":
        with _interrupts_held():
            return worker.submit(_answer, task)

    def _kill(self, worker: "_OneProcess") -> str:
        return worker.kill()


class _OneProcess(ProcessPoolExecutor):
    """An executor of one process that can be killed."""

    def __init__(self, settings: Settings) -> None:
        self._context = _Context()
        super().__init__(1, self._context, _begin, (settings,))

    def kill(self) -> str:
        if (process := self._context.process) is None:
            return ""
        process.kill()
        process.join()
        self.shutdown()
        return f"exit code {process.exitcode} (-9: killed, as where memory runs out)"


class _Context(SpawnContext):
    """Notes the process that it starts; nothing of this process is in it: no thread, no CUDA context."""

    process: SpawnProcess | None = None

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        self.process = SpawnProcess(*args, **options)
        return self.process


_server: ChunkServer | None = None


def _begin(settings: Settings) -> None:
    global _server
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent()
    _server = ChunkServer(settings)


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


def end_with_parent() -> None:
    """End this process at once when its parent is gone, however that ended; nothing happens without a parent."""
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
