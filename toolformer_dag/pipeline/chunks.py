"""Work in chunks: which texts go through the model together, a task, and the interface of what performs many."""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from toolformer_dag.files import UserError
from toolformer_dag.pipeline.stage import Claimed, TableOutput, Work
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.sections import Settings


class WorkerError(UserError):
    """A chunk that could not be computed: its worker died twice, or sees other settings than the run."""


Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` after every committed chunk; rows that were stored before count for neither."""


@dataclass(frozen=True, slots=True)
class Task:
    """A chunk of a table's work. `settings`: fingerprint that the computing process has to agree with."""

    table: str
    settings: str
    payload: Any


Tables = Mapping[str, TableOutput]
"""The tables of a plan by name."""


def perform(worker: Worker, tables: Tables, task: Task) -> Work:
    """Compute a chunk and commit its rows. Raises WorkerError where this process has read other settings."""
    output = tables.get(task.table)
    if output is None or output.code_version != task.settings:
        raise WorkerError(f"{task.table}: settings, prompts or tools changed while the run went on; run again")
    if output.stage.compute is not None:
        with worker.metered():
            return output.stage.compute(worker, output, task.payload)
    if output.stage.shard_rows is None:
        raise LookupError(f"{task.table} has no chunks")
    output.publish(task.payload, output.stage.shard_rows(worker, output, task.payload))
    return Work()


Ended = Generator[tuple[int, Work] | None, None, None]
"""Numbers of tasks that ended and what each cost, in any order; None about once a second."""


class Workers(Protocol):
    """Where chunks are computed: this process, a pool of processes, or a cluster behind the same interface."""

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """Yield as tasks end. Closing the generator ends the tasks that are under way.

        Tasks are taken from the iterable as workers become free. A worker that dies loses its chunk, which is given to
        another one once. Raises WorkerError, and UserError as the task raised it.
        """
        ...

    def close(self) -> None:
        """End the workers and let go of their models."""
        ...


class InProcess:
    """Computes chunks here, one after the other."""

    def __init__(self, worker: Worker, tables: Tables) -> None:
        self._worker, self._tables = worker, tables

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        for number, task in enumerate(tasks):
            yield number, perform(self._worker, self._tables, task)

    def close(self) -> None:
        self._worker.release()


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
