"""Work in chunks: which texts go through the model together, a task, and the workers that perform many."""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import polars as pl

from toolformer_dag.files import UserError
from toolformer_dag.pipeline.spending import Spent
from toolformer_dag.pipeline.stage import Claimed, TableOutput, Work
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.sections import Settings

log = logging.getLogger(__name__)


class WorkerError(UserError):
    """A chunk that could not be computed: its worker died twice, or sees other settings than the run."""


Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` after every committed chunk; rows that were stored before count for neither."""


@dataclass(frozen=True, slots=True)
class Task:
    """A chunk of a table's work. `settings`: fingerprint that the computing process has to agree with.

    `step`: what tells the step from others: workers hold what they read of the lake as long as one goes on.
    """

    table: str
    settings: str
    payload: Any
    step: str = ""


Tables = Mapping[str, TableOutput]
"""The tables of a plan by name."""


def perform(worker: Worker, tables: Tables, task: Task) -> Work:
    """Compute a chunk and commit its rows. Raises WorkerError where this process has read other settings."""
    output = tables.get(task.table)
    if output is None or output.code_version != task.settings:
        raise WorkerError(f"{task.table}: settings, prompts or tools changed while the run went on; run again")
    if output.stage.compute is not None:
        return output.stage.compute(worker, output, task.payload)
    if output.stage.shard_rows is None:
        raise LookupError(f"{task.table} has no chunks")
    output.publish(task.payload, output.stage.shard_rows(worker, output, task.payload))
    return Work()


Ended = Generator[tuple[int, Work] | None, None, None]
"""Numbers of tasks that ended and what each cost, in any order; None about once a second."""
TRIES = 2
"""How many workers may die over one chunk."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker, in a form that any process can read."""

    message: str
    by_user: bool

    def error(self) -> Exception:
        """Return the exception to raise in the process that waits."""
        return UserError(self.message) if self.by_user else WorkerError(f"a worker failed: {self.message}")


Answer = tuple[Work | Failure, Spent]
"""What a chunk cost or why it failed, and what the worker spent since its last answer."""


@dataclass(frozen=True, slots=True)
class _Given:
    number: int
    task: Task
    tries: int = 1
    since: float = 0.0


class ChunkMapper(Protocol):
    """What computes chunks."""

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """See Workers."""
        ...


class NoPlace(Exception):
    """A worker for which there is no room any more."""


class Workers(ABC):
    """At most `count` workers, each with a chunk at a time: started when there is work for them, kept until `close`.

    `deaths`: the exceptions by which a worker's future tells that the worker died; `spent`: by other processes.
    """

    deaths: tuple[type[Exception], ...] = ()

    def __init__(self, worker: Worker, count: int) -> None:
        self._here, self._count = worker, count
        self._idle: list[Any] = []
        self._busy: dict[Future[Answer], tuple[Any, _Given]] = {}
        self.spent = Spent()

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """Yield as tasks end. Closing the generator ends the tasks that are under way.

        Tasks are taken from the iterable as workers become free. A worker that dies loses its chunk, which is given to
        another one once. Raises WorkerError, and UserError as the task raised it.
        """
        waiting, again = iter(enumerate(tasks)), deque[_Given]()
        try:
            while True:
                while len(self._busy) < self._count:
                    given = again.popleft() if again else next((_Given(*one) for one in waiting), None)
                    if given is None:
                        break
                    self._give(given, again)
                if not self._busy:
                    return
                ended, _ = wait(self._busy, 1.0, FIRST_COMPLETED)
                for future in ended:
                    yield from self._received(future, again)
                self._end_late(again)
                if not ended:
                    yield None
        finally:
            self._kill_busy()

    def close(self) -> None:
        """End the workers, and let go of the model of this process: what was committed is kept."""
        self._kill_busy()
        while self._idle:
            self._kill(self._idle.pop())
        self._here.release()

    @abstractmethod
    def _start(self) -> Any:
        """Start a worker. Raises NoPlace."""

    @abstractmethod
    def _send(self, worker: Any, task: Task) -> "Future[Answer]":
        """Give a task."""

    def _kill(self, worker: Any) -> str:
        """End a worker at once; say how it ended."""
        return ""

    def _kill_busy(self) -> None:
        while self._busy:
            self._kill(self._busy.popitem()[1][0])

    def _give(self, given: _Given, again: deque[_Given]) -> None:
        try:
            worker = self._idle.pop() if self._idle else self._start()
        except NoPlace as error:
            self._count -= 1
            if not self._count:
                raise WorkerError(f"{given.task.table}: {error}") from error
            again.append(given)
            return
        try:
            self._busy[self._send(worker, given.task)] = worker, replace(given, since=time.monotonic())
        except self.deaths:  # it died while it had nothing to do
            self._kill(worker)
            again.append(given)

    def _lost(self, given: _Given, again: deque[_Given], how: str) -> None:
        """Give a chunk again. Raises WorkerError where it was given twice."""
        if given.tries == TRIES:
            raise WorkerError(
                f"{given.task.table}: {TRIES} workers died over one chunk, the last with {how}; what was committed is "
                "kept; run again, with fewer execution.workers or a smaller model.token_budget where memory is short"
            ) from None
        again.append(replace(given, tries=given.tries + 1))

    def _end_late(self, again: deque[_Given]) -> None:
        """End workers that are busy with a chunk for longer than `execution.chunk_hours`."""
        limit = timedelta(hours=self._here.plan.settings.execution.chunk_hours)
        shown = timedelta(seconds=round(limit.total_seconds()))
        for future, (worker, given) in list(self._busy.items()):
            if time.monotonic() - given.since > limit.total_seconds() and not future.done():
                del self._busy[future]
                self._kill(worker)
                log.warning("%s: a worker has not answered for %s; another gets its chunk", given.task.table, shown)
                self._lost(given, again, f"no answer in {shown} (execution.chunk_hours)")

    def _received(self, future: "Future[Answer]", again: deque[_Given]) -> Iterator[tuple[int, Work]]:
        worker, given = self._busy.pop(future)
        try:
            answer, spent = future.result()
        except self.deaths as died:
            self._lost(given, again, self._kill(worker) or " ".join(str(died).split()))
            return
        self._idle.append(worker)
        self.spent += spent
        if isinstance(answer, Failure):
            raise answer.error()
        yield given.number, answer


class InProcess(Workers):
    """Computes chunks here, one after the other; what is spent is known at once."""

    def __init__(self, worker: Worker, tables: Tables) -> None:
        super().__init__(worker, 1)
        self._tables = tables

    def _start(self) -> None:
        return None

    def _send(self, worker: Any, task: Task) -> "Future[Answer]":
        done: Future[Answer] = Future()
        done.set_result((perform(self._here, self._tables, task), Spent()))
        return done


CPU_TEXTS, GPU_TEXTS = 64, 512
"""Texts of a chunk: 80 GB hold the keys of some 140 texts of GPT-J at a time, and others wait to take their places."""


def chunk_size(settings: Settings) -> int:
    """Return `execution.chunk_texts`, else what suits the device."""
    if settings.execution.chunk_texts is not None:
        return settings.execution.chunk_texts
    import torch

    return GPU_TEXTS if settings.model.device != "cpu" and torch.cuda.is_available() else CPU_TEXTS


def text_chunks(texts: pl.DataFrame, untouched: pl.DataFrame, partial: pl.DataFrame, size: int) -> list[pl.DataFrame]:
    """Cut the texts that lack something into chunks of at most `size`.

    `texts` (text_digest, ...) has every text of the shard once, in a fixed order; of the other two (text_digest),
    `untouched` have nothing stored and `partial` have something.
    """
    lacking = pl.concat([untouched.select("text_digest", whole=True), partial.select("text_digest", whole=False)])
    chunk = pl.int_range(pl.len()) // size
    numbered = texts.with_columns(chunk=chunk).join(lacking, on="text_digest", how="left", maintain_order="left")
    whole = numbered.filter(pl.col("whole").fill_null(False).all().over("chunk"))
    pooled = numbered.filter(pl.col("whole").is_not_null() & ~pl.col("chunk").is_in(whole["chunk"].unique().implode()))
    ordered = pl.concat([whole, pooled]).drop("chunk", "whole")
    return [ordered[at : at + size] for at in range(0, ordered.height, size)]


def claim(claimed: Claimed, store: str, keys: pl.DataFrame) -> pl.DataFrame:
    """Return those of `keys` that no earlier shard of this run computes already, and claim them; once per shard."""
    known = claimed.setdefault(store, [])
    free = keys.join(pl.concat(known), on=keys.columns, how="anti", maintain_order="left") if known else keys
    known.append(free)
    return free


def release(claimed: Claimed) -> None:
    """Forget what the earliest shard claimed: its rows are stored, and whoever asks for them finds them there."""
    for keys in claimed.values():
        del keys[:1]
