"""Bringing a table up to date: the parts that differ from their record are planned, computed in chunks and published.

Parts (one per shard of the corpus) are taken in order. Each is planned into chunks, which workers compute; as soon as
the chunks of a part and of all parts before it are done, the part is published.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import uuid4

from toolformer_dag.computing.chunks import Task
from toolformer_dag.computing.reasons import Reasons, find_table_differences
from toolformer_dag.computing.stage import (
    BACKENDS,
    REJECTIONS,
    VIOLATIONS,
    ByChunk,
    ByParts,
    ByShard,
    Chunk,
    Claimed,
    PartRows,
    Planned,
    StaleInput,
    TableOutput,
    Work,
)
from toolformer_dag.computing.stored_rows import release
from toolformer_dag.computing.worker import Ahead, Worker
from toolformer_dag.computing.workers import Workers, in_process
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.session import session

AT_ONCE = 64
"""Parts whose inputs are brought to this machine together."""
AT_ONCE_BYTES = 2**24
"""Bytes of inputs up to which parts are made together (ByParts)."""
Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` after every committed chunk; rows that were stored before count for neither."""


@dataclass(frozen=True, slots=True)
class TableReport:
    """What a table holds after an update, and what the update did.

    Of the whole table:

    - `rows`: the number of rows of each part
    - `data_version`: its version; empty for a table without parts
    - `rejections`: reason -> how many were left out
    - `violations`: check -> how many rows break it

    Of this update:

    - `seconds`: its wall time
    - `updated`: the parts that were computed
    - `differences`: why they were
    - `work`: what it cost
    """

    name: str
    rows: Mapping[str, int]
    data_version: str
    seconds: float
    updated: tuple[str, ...]
    differences: Reasons
    rejections: Mapping[str, int]
    violations: Mapping[str, int]
    work: Work = field(default_factory=Work)

    @property
    def unchanged(self) -> bool:
        """Whether the update found nothing to do."""
        return not self.differences

    @property
    def computed(self) -> int:
        """Rows of all kinds that were computed in this update."""
        return self.work.computed.total()

    @property
    def reused(self) -> int:
        """Rows of all kinds that had been computed before."""
        return self.work.reused.total()


def withdraw(outputs: Sequence[TableOutput], shard: str) -> None:
    """Take a shard's parts out of every table, so that the next run makes them anew. Stored rows stay."""
    for output in outputs:
        if output.stage.sharded and output.table.has(shard):
            output.table.remove(shard)


def update(worker: Worker, workers: Workers, output: TableOutput, progress: Progress) -> TableReport:
    """Compute and publish the parts of a table that are out of date; withdraw parts without a shard file.

    worker: what this process has loaded; it plans, reads stored rows and runs tools.
    workers: where chunks are computed.

    A killed update loses at most one chunk per worker. Raises StaleInput, WriteError, WorkerError, and what the stage
    raises; parts that were published before stay.
    """
    began = time.monotonic()
    worker.close_rows()  # a step that failed left them open
    with session():  # what is read of the lake is remembered until the end of the block
        for inner in output.inner:  # tables that only this one reads
            _bring_up_to_date(worker, workers, inner, progress)
        updated = _bring_up_to_date(worker, workers, output, progress)
        return _build_report(output, updated, seconds=time.monotonic() - began)


class _Updated(NamedTuple):
    """Why a table was out of date, and what it cost to bring it up to date."""

    reasons: Reasons
    work: Work


def _bring_up_to_date(worker: Worker, workers: Workers, output: TableOutput, progress: Progress) -> _Updated:
    """Plan the parts of one table, let workers compute their chunks, publish part after part; return what that cost."""
    reasons = find_table_differences(output)  # by part that is out of date
    with session():
        for part in reasons.parts:
            _check_inputs(output, part)
    if output.stage.pool == "tools":
        # Limits and pauses of a tool hold within one process, so its chunks are computed in this one.
        workers = Workers(worker, {output.name: output}, in_process)
    work = _compute_parts(worker, workers, output, reasons, progress)
    damaged_files = worker.close_rows()  # a sentence for each file of stored rows that was found damaged
    return _Updated(reasons, work + Work(damaged=damaged_files))


def _compute_parts(worker: Worker, workers: Workers, output: TableOutput, reasons: Reasons, progress: Progress) -> Work:
    """Compute and publish the parts that are out of date, remove those that are to go; return what that cost.

    Parts that workers compute are cut into chunks, a task each. After an error, what was published is still written.
    """
    lake = output.plan.lake
    parts = _PartsUnderWay(worker, output, list(reasons.parts))
    # In a batch, published parts wait to be written together: some seconds at most (flush), or until the block ends.
    with lake.batch(), closing(workers.map_chunks(parts.tasks())) as ended_tasks:
        _remove_parts(output, reasons.removed)
        for ended in ended_tasks:
            if ended is not None:  # None comes about once a second, so that batches are written in time
                parts.end(ended.number, ended.work)  # publishes the parts that are complete now
            lake.flush(due=True)
            forecast = parts.forecast
            progress(forecast.done, forecast.total)
    return parts.work


def _remove_parts(output: TableOutput, parts: Sequence[str]) -> None:
    """Withdraw parts of a table, and those of the tables that are published beside it (`Stage.beside`)."""
    tables = [output.table, *output.beside]
    for part in parts:
        for table in tables:
            table.remove(part)


class _Forecast:
    """How much work a table takes: known for the parts that are planned, extrapolated to the others.

    Every part of the update is planned once, in order, and every chunk is done once.
    """

    def __init__(self, parts: int) -> None:
        self.total = 0  # units (texts, calls, shards) of all parts
        self.done = 0  # units that are done
        self._parts = parts
        self._planned_parts = 0
        self._planned_units = 0
        self._planned_tokens = 0.0
        self._tokens = 0.0  # that the model will run for all parts
        self._tokens_done = 0.0

    def add_part(self, chunks: Sequence[Chunk]) -> None:
        """Count the chunks of a planned part, and extrapolate: two of ten parts with 30 units give 150 units."""
        self._planned_parts += 1
        self._planned_units += sum(chunk.units for chunk in chunks)
        self._planned_tokens += sum(chunk.tokens for chunk in chunks)
        self.total = round(self._planned_units * self._parts / self._planned_parts)
        self._tokens = self._planned_tokens * self._parts / self._planned_parts

    def add_done(self, chunk: Chunk) -> None:
        """Count a chunk that ended."""
        self.done += chunk.units
        self._tokens_done += chunk.tokens

    def ahead(self) -> Ahead:
        """Return the same for other threads, which show what is left."""
        return Ahead(units=self.total, tokens_done=self._tokens_done, tokens=self._tokens)


class _PartChunk(NamedTuple):
    """A chunk, and the part that it belongs to."""

    part: str
    chunk: Chunk


class _PartsUnderWay:
    """The parts of a table that are being made. Each passes through these states, in order:

    1. waiting: in `_parts`, after the last part that `tasks` has planned
    2. open: in `_open_chunks`, with how many of its chunks are not done; its keys are in `_claimed`
    3. published, once it and all parts before it have no open chunk

    `tasks` plans part by part as workers ask for work, and `end` is called for each task that ended; both publish.
    `work` and `forecast` are complete when all tasks have ended.
    """

    def __init__(self, worker: Worker, output: TableOutput, parts: Sequence[str]) -> None:
        """Begin with all parts waiting: not planned yet. Then a part is open (planned, not published), then published.

        parts: the names of those that are out of date, in the table's order.
        """
        self.work = Work()  # what the tasks that ended have cost
        self.forecast = _Forecast(len(parts))
        self._worker = worker
        self._output = output
        self._parts = parts
        self._near_parts: Sequence[str] = ()
        """The AT_ONCE parts that are planned now: their inputs are on this machine."""
        self._part_chunks: list[_PartChunk] = []
        """The chunk of each task, and its part: task 0 first."""
        self._open_chunks: dict[str, int] = {}
        """Of each part that is planned and not published, how many chunks are not computed yet; in the parts' order."""
        self._rows_made_together: dict[str, PartRows] = {}
        """Rows of parts that were made with an earlier one (ByParts) and are not published yet."""
        self._claimed = Claimed()
        """Keys of rows that parts which are not published yet will compute: later parts do not compute them again."""

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks of all parts, one per chunk. A part is planned when its first task is asked for.

        Call `end` for each task that ended, by its number: the first one is 0.
        """
        step = uuid4().hex  # tells workers which tasks are of this update
        for number, part in enumerate(self._parts):
            if number % AT_ONCE == 0:
                self._fetch_inputs(self._parts[number : number + AT_ONCE])
            chunks = self._plan_part(part)
            self._publish_complete()  # a part without chunks is complete now
            for chunk in chunks:
                self._part_chunks.append(_PartChunk(part, chunk))  # at the index that is the task's number
                yield self._build_task(chunk, step)

    def _build_task(self, chunk: Chunk, step: str) -> Task:
        """Return the task of computing a chunk. step: the id of this update."""
        return Task(table=self._output.name, settings=self._output.code_version, payload=chunk.payload, step=step)

    def end(self, number: int, work: Work) -> None:
        """Note that task `number` has ended, add what it cost, and publish the parts that are complete now."""
        part, chunk = self._part_chunks[number]
        self._output.plan.lake.take(work.news)
        self._open_chunks[part] -= 1
        self.work += work
        self.forecast.add_done(chunk)
        self._show_forecast()
        self._publish_complete()

    def _fetch_inputs(self, parts: Sequence[str]) -> None:
        """Fetch the inputs of the parts that are planned next, where they are not on this machine."""
        self._near_parts = parts
        if self._output.stage.sharded:
            for name in self._output.depends_on:
                self._output.plan.lake.table(name).bring(parts)

    def _plan_part(self, part: str) -> Sequence[Chunk]:
        """Plan a part, count its work, and return the chunks that are to be computed."""
        planned = self._plan_chunks(part)
        self.work += planned.work
        self.forecast.add_part(planned.chunks)
        self._show_forecast()
        self._open_chunks[part] = len(planned.chunks)
        return planned.chunks

    def _show_forecast(self) -> None:
        """Let the step show how much is left: its thread of progress reads `worker.ahead`."""
        self._worker.ahead = self.forecast.ahead()

    def _plan_chunks(self, part: str) -> Planned:
        """Return the chunks of a part: one for a shard that a worker publishes, none for a part that is made here."""
        make = self._output.stage.make
        if isinstance(make, ByChunk):
            return make.chunks(self._worker, self._output, part, self._claimed)
        if isinstance(make, ByShard):
            return Planned([Chunk(units=1, payload=part)], Work())
        return Planned([], Work())

    def _publish_complete(self) -> None:
        """Publish planned parts in their order, up to the first with a chunk that is not computed yet."""
        while self._open_chunks:  # by part that is planned and not published: how many chunks are not computed
            part = next(iter(self._open_chunks))  # the first of them
            if self._open_chunks[part] > 0:
                return
            del self._open_chunks[part]
            published_by_worker = isinstance(self._output.stage.make, ByShard)
            if not published_by_worker:
                self._publish(part)

    def _publish(self, part: str) -> None:
        """Publish the rows of a part; keys that were claimed for it may be claimed again."""
        rows = self._make_rows(part)
        if self.work.backends:  # none where all rows were stored before
            rows = replace(rows, facts={**rows.facts, BACKENDS: sorted(self.work.backends)})
        self._output.publish(part, rows)
        release(self._claimed)

    def _make_rows(self, part: str) -> PartRows:
        """Return the rows of a part: read from row stores, or made by this process."""
        make = self._output.stage.make
        assert not isinstance(make, ByShard)
        if isinstance(make, ByParts):
            return self._make_rows_of_small_part(make, part)
        return make.rows(self._worker, self._output, part)

    def _make_rows_of_small_part(self, make: ByParts, part: str) -> PartRows:
        """Return the rows of a part; those of the next parts are made with them and kept for their turn."""
        if part not in self._rows_made_together:
            rows_of_parts = make.rows(self._worker, self._output, self._choose_parts_together(part))
            self._rows_made_together = dict(rows_of_parts)
        return self._rows_made_together.pop(part)

    def _choose_parts_together(self, part: str) -> list[str]:
        """Choose the parts that are made with `part`: those after it, up to AT_ONCE_BYTES of inputs in all."""
        first = self._near_parts.index(part)
        together = [part]
        total_bytes = self._sum_input_bytes(part)
        for next_part in self._near_parts[first + 1 :]:
            total_bytes += self._sum_input_bytes(next_part)
            if total_bytes > AT_ONCE_BYTES:
                break
            together.append(next_part)
        return together

    def _sum_input_bytes(self, part: str) -> int:
        """Return the size of the files that a part is computed from."""
        lake = self._output.plan.lake
        total_bytes = 0
        for name in self._output.depends_on:
            total_bytes += sum(file.bytes for file in lake.table(name).pointer(part).files)
        return total_bytes


def _check_inputs(output: TableOutput, part: str) -> None:
    """Raise StaleInput where two inputs of a table of a lane (a tool with its settings) do not fit each other.

    For example, the table reads texts and scored calls, and these were scored on an earlier version of the texts.
    """
    has_lane = output.lane_or_none is not None
    if not (output.stage.sharded and has_lane):
        return
    tables_of_lane = f"{output.group}/"  # how their names begin: "calculator/"
    lane_inputs = [name for name in output.depends_on if name.startswith(tables_of_lane)]
    for name in lane_inputs:
        _require_present_sources(output, part, name, lane_inputs)


def _require_present_sources(output: TableOutput, part: str, name: str, lane_inputs: Sequence[str]) -> None:
    """Raise StaleInput where the input `name` was made from other versions of the lane's inputs than the present."""
    for source, version in _read_input_versions(output, name, part).items():
        if source in lane_inputs and version != _read_present_version(output, source, part):
            raise StaleInput(output.name, part, f"{name} was made from other rows of {source}", name)


def _read_present_version(output: TableOutput, table: str, part: str) -> str:
    """Return the version of a published part of another table."""
    return output.plan.lake.table(table).pointer(part).data_version


def _read_input_versions(output: TableOutput, name: str, part: str) -> dict[str, Any]:
    """Return the versions of its inputs that a part of the table `name` was computed from, by table of the lane."""
    inputs = output.plan.lake.table(name).pointer(part).record["inputs"]
    return {f"{output.group}/{source}": version for source, version in inputs.items()}


def _build_report(output: TableOutput, updated: _Updated, seconds: float) -> TableReport:
    """Return what a table holds after an update, and what the update cost.

    updated: why which parts were computed, and what that cost. seconds: wall time of the update.
    """
    with session():  # both of one state of the table
        pointers = output.pointers()
        version = output.version()
    return TableReport(
        name=output.name,
        rows={part: pointer.rows for part, pointer in pointers.items()},
        data_version=version or "",
        seconds=seconds,
        updated=tuple(updated.reasons.parts),
        differences=updated.reasons,
        rejections=_count_rejections_by_reason(pointers.values()),
        violations=_count_violations_by_check(pointers.values()),
        work=updated.work,
    )


def _count_violations_by_check(pointers: Iterable[Pointer]) -> dict[str, int]:
    """Return how many rows of a table's parts break each check."""
    violations: Counter[str] = Counter()
    for pointer in pointers:
        violations.update(pointer.record[VIOLATIONS])
    return dict(violations)


def _count_rejections_by_reason(pointers: Iterable[Pointer]) -> dict[str, int]:
    """Return how many rows the parts of a table have left out, by reason, sorted."""
    rejections: Counter[str] = Counter()
    for pointer in pointers:
        for rejection in pointer.record[REJECTIONS]:
            rejections[rejection["reason"]] += rejection["count"]
    return dict(sorted(rejections.items()))
