"""Worker processes: batches that do not wait for each other run at the same time, each with a model of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

import dagster as dg

from resources.batches import Batch
from resources.instance import home, shared_instance
from resources.processes import alive, end_dead_runs
from resources.runs import NOT_RUN, Outcome, materialize
from toolformer_dag.orphan import end_with_parent
from toolformer_dag.progress import progress_of, watched_by
from toolformer_dag.settings.settings import Settings

PATIENCE = 30.0
"""Seconds that a worker has to end when it is told to."""


@dataclass(frozen=True)
class Worker:
    """A process and the line to it: batches go out; progress comes in, and in the end an outcome."""

    process: BaseProcess
    connection: Connection

    @staticmethod
    def start(settings: Settings) -> "Worker":
        """A fresh interpreter: nothing of this process is in it, no thread and no CUDA context."""
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(settings, theirs))
        process.start()
        theirs.close()  # so that the end of the process is the end of the line
        return Worker(process, ours)

    def lost(self, batch: Batch) -> Outcome:
        """The outcome of a batch whose process is gone."""
        self.process.join()
        reason = (
            f"its worker process ended with exit code {self.process.exitcode} (-9: killed, as where memory runs out); "
            "what it had committed is kept; run again, with fewer execution.workers where memory is short"
        )
        first, *others = batch.assets
        return Outcome(failed={first: reason} | dict.fromkeys(others, NOT_RUN))

    def stop(self) -> None:
        """Ends it whatever it is doing."""
        self.process.terminate()
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()


class Workers:
    """At most `count` workers, started when there is work for them and ended with the context."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance, announce: Callable[[Batch], None]) -> None:
        self._settings, self._instance, self._announce = settings, instance, announce
        self._idle: list[Worker] = []
        self._busy: dict[Connection, tuple[Worker, Batch]] = {}

    def run(self, batches: Sequence[Batch], count: int) -> Iterator[Outcome]:
        """Gives the outcome of each batch as it ends; a batch whose process died has failed."""
        waiting = list(batches)
        while waiting or self._busy:
            while waiting and len(self._busy) < count:
                self._give(waiting.pop(0))
            heard = wait(list(self._busy))
            for connection in [one for one in self._busy if one in heard]:
                yield from self._received(connection)

    def close(self) -> None:
        """Ends those that wait for work, and with them their models."""
        while self._idle:
            worker = self._idle.pop()
            worker.connection.close()
            worker.process.join()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker, _ in self._busy.values():
            worker.stop()
        self.close()

    def _give(self, batch: Batch) -> None:
        living = [worker for worker in self._idle if worker.process.is_alive()]
        worker = living.pop() if living else Worker.start(self._settings)
        self._idle = living
        self._busy[worker.connection] = worker, batch
        self._announce(batch)
        with suppress(BrokenPipeError):  # it is gone; the end of the line will be heard
            worker.connection.send(batch)

    def _received(self, connection: Connection) -> Iterator[Outcome]:
        worker, batch = self._busy[connection]
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            message = worker.lost(batch)
            end_dead_runs(self._instance, home(self._settings.root))
        if not isinstance(message, Outcome):
            stage, done, total = message
            progress_of(stage)(done, total)
            return
        del self._busy[connection]
        self._idle.append(worker)
        yield message


def serve(settings: Settings, connection: Connection) -> None:
    """A worker's life: it runs what comes in until the line is closed, it is interrupted, or its parent is gone."""
    from toolformer_dag.definitions import build_definitions

    end_with_parent()
    definitions, instance = build_definitions(settings), shared_instance(settings.root)

    def send(stage: str, done: int, total: int) -> None:
        connection.send((stage, done, total))

    with suppress(EOFError, KeyboardInterrupt), alive(home(settings.root)) as tags, watched_by(send):
        while True:
            connection.send(materialize(definitions, instance, connection.recv(), tags))
