"""A pool of local worker processes with warm models, one per GPU; chunks go out, what they cost comes back."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from toolformer_dag.pipeline.chunks import Task
from toolformer_dag.pipeline.stage import Work
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.worker_pool import ChunkServer, Failure, WorkerDied, WorkerPool
from toolformer_dag.settings.sections import Settings


@dataclass(frozen=True, eq=False)
class LocalProcess:
    """A worker process and this end of the line to it."""

    process: BaseProcess
    line: Connection


class LocalProcesses(WorkerPool[LocalProcess]):
    """Processes of this machine, each with a model of its own."""

    def __init__(self, worker: Worker, count: int) -> None:
        super().__init__(count)
        self._here = worker
        self._context = get_context("spawn")  # nothing of this process is in them: no thread, no CUDA context

    def close(self) -> None:
        """End every process, and let go of the model of this one."""
        super().close()
        self._here.release()

    def _start(self) -> LocalProcess:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(self._here.plan.settings, self._here.ledger, theirs), daemon=True
        )
        with _interrupts_held():
            process.start()
        theirs.close()  # so that the end of the process is the end of the line
        return LocalProcess(process, ours)

    def _is_alive(self, worker: LocalProcess) -> bool:
        return worker.process.is_alive()

    def _send(self, worker: LocalProcess, task: Task) -> None:
        with suppress(BrokenPipeError):
            worker.line.send(task)

    def _answered(self, busy: list[LocalProcess]) -> list[LocalProcess]:
        found = wait([worker.line for worker in busy], timeout=1.0)
        return [worker for worker in busy if worker.line in found]

    def _answer(self, worker: LocalProcess) -> Work | Failure:
        try:
            answer: Work | Failure = worker.line.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            code = worker.process.exitcode
            raise WorkerDied(f"exit code {code} (-9: killed, as where memory runs out)") from None
        return answer

    def _kill(self, worker: LocalProcess) -> None:
        worker.process.kill()
        worker.process.join()
        worker.line.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the block ends; a process that starts in it never gets one, however early it comes."""
    resource_tracker.ensure_running()  # its own start, which the first process brings about, would let Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(settings: Settings, ledger: Path | None, line: Connection) -> None:
    """Compute chunks as they come in, until the line is closed or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent()
    server = ChunkServer(settings, ledger)
    with suppress(EOFError, BrokenPipeError):
        while True:
            line.send(server.answer(line.recv()))


def end_with_parent() -> None:
    """End this process at once when its parent is gone, however that ended; nothing happens without a parent."""
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
