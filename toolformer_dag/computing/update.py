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
    """Remove the parts of a shard from all tables, so that the next run makes them again.

    Its stored rows are kept, so they do not have to be computed again.
    """
    for output in outputs:
        if output.stage.sharded and output.table.has(shard):
            output.table.remove(shard)


def update(worker: Worker, workers: Workers, output: TableOutput, progress: Progress) -> TableReport:
    """Compute and publish the parts of a table that are missing or out of date, and remove parts whose shard is gone.

    If the process is killed, every worker loses at most the chunk that it computes.

    Args:
        worker: What this process has loaded. It plans the work, reads stored rows and runs tools.
        workers: They compute the chunks.
        output: The table.
        progress: Called with the work done and the work expected in all.

    Raises:
        StaleInput: Two inputs of the table do not fit each other.
        WriteError: A file of the lake cannot be written.
        WorkerError: Too many workers failed over one chunk.
        Exception: Anything that the stage raises. Parts that were published before stay in the table.
    """
    began = time.monotonic()
    worker.close_rows()  # an update that failed may have left them open

    with session():  # until the end of the block, what is read of the lake is remembered
        for inner_output in output.inner:  # tables that only this one reads
            _update_table(worker, workers, inner_output, progress)

        result = _update_table(worker, workers, output, progress)
        return _build_report(output, result, seconds=time.monotonic() - began)


class _UpdateResult(NamedTuple):
    """Why a table was out of date, and what it cost to bring it up to date."""

    reasons: Reasons
    work: Work


def _update_table(worker: Worker, workers: Workers, output: TableOutput, progress: Progress) -> _UpdateResult:
    """Compute and publish the parts of one table that are out of date, but not of the tables that it reads.

    Returns:
        Why the table was out of date, and what the work cost.

    Raises:
        StaleInput: Two inputs of the table do not fit each other. Nothing is computed then.
    """
    reasons = find_table_differences(output)
    with session():
        for part in reasons.parts:
            _check_that_inputs_fit(output, part)

    if output.stage.pool == "tools":
        # Rate limits and pauses of a tool hold within one process, so all of its calls are made by this one.
        workers = Workers(worker, {output.name: output}, in_process)
    work = _compute_parts(worker, workers, output, reasons, progress)

    damage_messages = worker.close_rows()  # one sentence for each file of stored rows that was found damaged
    return _UpdateResult(reasons, work + Work(damaged=damage_messages))


def _compute_parts(worker: Worker, workers: Workers, output: TableOutput, reasons: Reasons, progress: Progress) -> Work:
    """Compute and publish the parts of a table that are out of date, and remove those that it should no longer have.

    If an error occurs, the parts that were published before it are still written to the lake.

    Returns:
        What the work cost.
    """
    lake = output.plan.lake
    parts = _PartsUnderWay(worker, output, list(reasons.parts))

    # In a batch, published parts are collected and written together, at the latest at the end of the block.
    with lake.batch(), closing(workers.map_chunks(parts.tasks())) as ended_tasks:
        _remove_parts(output, reasons.removed)

        for ended_task in ended_tasks:
            if ended_task is not None:  # None comes about once a second, so that the next lines run
                parts.end(ended_task.number, ended_task.work)  # publishes the parts that are now complete

            lake.flush(due=True)  # writes the collected parts that have waited for some seconds, or are many
            progress(parts.forecast.done, parts.forecast.total)
    return parts.work


def _remove_parts(output: TableOutput, parts: Sequence[str]) -> None:
    """Remove parts from a table, and from the tables that are published together with it (`Stage.beside`)."""
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
        """Count the chunks of a part that was planned, and estimate the work of all parts from those planned so far.

        For example, if two of ten parts are planned and have 30 units of work, all parts are estimated to have 150.
        """
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
    2. open: in `_chunks_left_by_part`, with how many of its chunks are not done; its keys are in `_claimed_keys`
    3. published, once it and all parts before it have no open chunk

    `tasks` plans part by part as workers ask for work, and `end` is called for each task that ended; both publish.
    `work` and `forecast` are complete when all tasks have ended.
    """

    def __init__(self, worker: Worker, output: TableOutput, parts: Sequence[str]) -> None:
        """Begin with all parts waiting to be planned.

        Args:
            worker: What this process has loaded.
            output: The table.
            parts: The names of the parts that are out of date, in the order of the table.
        """
        self.work = Work()  # what the planning and the ended tasks have cost so far
        self.forecast = _Forecast(len(parts))
        self._worker = worker
        self._output = output
        self._parts = parts

        # The group of up to AT_ONCE parts that is planned now. Their inputs are on this machine.
        self._current_parts: Sequence[str] = ()

        # For each task, by its number: its chunk, and the part that the chunk belongs to.
        self._part_chunks: list[_PartChunk] = []

        # For each planned part that is not published yet, in order: how many of its chunks are not computed yet.
        self._chunks_left_by_part: dict[str, int] = {}

        # Rows of parts that were made together with an earlier part (ByParts) and are not published yet.
        self._rows_made_together: dict[str, PartRows] = {}

        # The keys of rows that planned parts will compute. Later parts do not compute these rows again.
        self._claimed_keys = Claimed()

    def tasks(self) -> Iterator[Task]:
        """Plan the parts one after the other, each when its first task is asked for.

        For every task that has ended, `end` must be called with its number, counted from 0 over all parts.

        Yields:
            A task for each chunk of each part.
        """
        update_id = uuid4().hex  # by which workers recognize the tasks of this update
        for number, part in enumerate(self._parts):
            if number % AT_ONCE == 0:
                self._fetch_inputs(self._parts[number : number + AT_ONCE])

            chunks = self._plan_part(part)
            self._publish_complete()  # a part without chunks is complete already

            for chunk in chunks:
                self._part_chunks.append(_PartChunk(part, chunk))  # its index is the number of the task
                yield self._build_task(chunk, update_id)

    def _build_task(self, chunk: Chunk, update_id: str) -> Task:
        """Wrap a chunk as a task that a worker can compute."""
        return Task(table=self._output.name, settings=self._output.code_version, payload=chunk.payload, step=update_id)

    def end(self, number: int, work: Work) -> None:
        """Take note that a task has ended, and publish the parts that are now complete.

        Args:
            number: The number of the task.
            work: What it cost.
        """
        part, chunk = self._part_chunks[number]
        self._output.plan.lake.take(work.news)  # what a worker in another process has written to the lake
        self._chunks_left_by_part[part] -= 1
        self.work += work

        self.forecast.add_done(chunk)
        self._show_forecast()
        self._publish_complete()

    def _fetch_inputs(self, parts: Sequence[str]) -> None:
        """Bring the inputs of the parts that are planned next to this machine, if they are not there yet."""
        self._current_parts = parts
        if self._output.stage.sharded:
            for table_name in self._output.depends_on:
                self._output.plan.lake.table(table_name).bring(parts)

    def _plan_part(self, part: str) -> Sequence[Chunk]:
        """Plan a part and count its work.

        Returns:
            The chunks to compute.
        """
        planned = self._plan_chunks(part)
        self._chunks_left_by_part[part] = len(planned.chunks)

        self.work += planned.work
        self.forecast.add_part(planned.chunks)
        self._show_forecast()
        return planned.chunks

    def _show_forecast(self) -> None:
        """Let the step show how much is left: its thread of progress reads `worker.ahead`."""
        self._worker.ahead = self.forecast.ahead()

    def _plan_chunks(self, part: str) -> Planned:
        """Plan the chunks of a part, depending on how the stage makes its rows.

        There is one chunk if a worker computes and publishes a whole shard, and none if this process makes the part.
        """
        make = self._output.stage.make
        if isinstance(make, ByChunk):
            return make.chunks(self._worker, self._output, part, self._claimed_keys)
        if isinstance(make, ByShard):
            return Planned([Chunk(units=1, payload=part)], Work())
        return Planned([], Work())

    def _publish_complete(self) -> None:
        """Publish the planned parts in order, up to the first one that is not completely computed."""
        while self._chunks_left_by_part:
            first_part, chunks_left = next(iter(self._chunks_left_by_part.items()))
            if chunks_left > 0:
                return

            del self._chunks_left_by_part[first_part]
            is_published_by_worker = isinstance(self._output.stage.make, ByShard)
            if not is_published_by_worker:
                self._publish(first_part)

    def _publish(self, part: str) -> None:
        """Publish a part whose chunks are computed.

        Its keys are then released from `_claimed_keys`, since later parts find its rows among the stored ones.
        """
        rows = self._make_rows(part)
        if self.work.backends:  # empty if all rows had been stored before
            rows = replace(rows, facts={**rows.facts, BACKENDS: sorted(self.work.backends)})
        self._output.publish(part, rows)
        release(self._claimed_keys)

    def _make_rows(self, part: str) -> PartRows:
        """Make the rows of a part in this process, mostly by reading rows that workers have computed and stored."""
        make = self._output.stage.make
        assert not isinstance(make, ByShard)  # a worker publishes these rows
        if isinstance(make, ByParts):
            return self._make_rows_with_next_parts(make, part)
        return make.rows(self._worker, self._output, part)

    def _make_rows_with_next_parts(self, make: ByParts, part: str) -> PartRows:
        """Return the rows of a small part. The next parts may be made with it; their rows are kept for their turn."""
        if part not in self._rows_made_together:
            parts_together = self._choose_parts_together(part)
            rows_by_part = make.rows(self._worker, self._output, parts_together)
            self._rows_made_together = dict(rows_by_part)
        return self._rows_made_together.pop(part)

    def _choose_parts_together(self, part: str) -> list[str]:
        """Choose small parts that are made together with a part, because making each alone is slow.

        Returns:
            The part and those right after it, as long as their inputs take at most AT_ONCE_BYTES in all.
        """
        chosen_parts = [part]
        total_bytes = self._sum_input_bytes(part)

        index = self._current_parts.index(part)
        for next_part in self._current_parts[index + 1 :]:
            total_bytes += self._sum_input_bytes(next_part)
            if total_bytes > AT_ONCE_BYTES:
                break
            chosen_parts.append(next_part)
        return chosen_parts

    def _sum_input_bytes(self, part: str) -> int:
        """Return the total size of the files from which a part is made."""
        lake = self._output.plan.lake
        total_bytes = 0
        for table_name in self._output.depends_on:
            pointer = lake.table(table_name).pointer(part)  # says which files a part consists of
            total_bytes += sum(file.bytes for file in pointer.files)
        return total_bytes


def _check_that_inputs_fit(output: TableOutput, part: str) -> None:
    """Check that the inputs of a part fit each other, where they are tables of the same tool.

    For example, scored calls do not fit the texts if they were computed from an earlier version of the texts.

    Raises:
        StaleInput: An input was made from another version of a second input than the present one.
    """
    has_lane = output.lane_or_none is not None  # a lane is a tool with its settings; its tables are "<lane>/<name>"
    if not (output.stage.sharded and has_lane):
        return

    lane_prefix = f"{output.group}/"  # such as "calculator/"
    lane_inputs = [name for name in output.depends_on if name.startswith(lane_prefix)]
    for name in lane_inputs:
        _require_made_from_present(output, part, name, lane_inputs)


def _require_made_from_present(output: TableOutput, part: str, name: str, lane_inputs: Sequence[str]) -> None:
    """Check that an input of a part was made from the present versions of the other inputs.

    Args:
        output: The table of the part.
        part: The name of the part, which is also its name in the inputs.
        name: The input to check.
        lane_inputs: All inputs that are tables of the same tool.

    Raises:
        StaleInput: It was made from another version.
    """
    for source, version in _read_input_versions(output, name, part).items():
        if source in lane_inputs and version != _read_present_version(output, source, part):
            raise StaleInput(output.name, part, f"{name} was made from other rows of {source}", name)


def _read_present_version(output: TableOutput, table: str, part: str) -> str:
    """Return the version of a published part of another table."""
    return output.plan.lake.table(table).pointer(part).data_version


def _read_input_versions(output: TableOutput, name: str, part: str) -> dict[str, Any]:
    """Read from which versions of its inputs a published part of a table was made.

    Args:
        output: Any table of the same tool.
        name: The name of the table.
        part: The name of the part.

    Returns:
        The versions by the name of the input, such as "calculator/loss_deltas".
    """
    versions_by_short_name = output.plan.lake.table(name).pointer(part).record["inputs"]
    return {f"{output.group}/{short_name}": version for short_name, version in versions_by_short_name.items()}


def _build_report(output: TableOutput, updated: _UpdateResult, seconds: float) -> TableReport:
    """Describe what a table holds after an update, and what the update did.

    Args:
        output: The table.
        updated: Why parts were computed, and what that cost.
        seconds: How long the update took.
    """
    with session():  # so that both are read from the same state of the table
        pointers_by_part = output.pointers()
        data_version = output.version()

    pointers = pointers_by_part.values()  # a pointer describes what is published of a part
    return TableReport(
        name=output.name,
        rows={part: pointer.rows for part, pointer in pointers_by_part.items()},
        data_version=data_version or "",
        seconds=seconds,
        updated=tuple(updated.reasons.parts),
        differences=updated.reasons,
        rejections=_count_rejections_by_reason(pointers),
        violations=_count_violations_by_check(pointers),
        work=updated.work,
    )


def _count_violations_by_check(pointers: Iterable[Pointer]) -> dict[str, int]:
    """Count the rows that break a check, for each check and over all parts of a table."""
    violations: Counter[str] = Counter()
    for pointer in pointers:
        violations.update(pointer.record[VIOLATIONS])  # adds the counts of one part
    return dict(violations)


def _count_rejections_by_reason(pointers: Iterable[Pointer]) -> dict[str, int]:
    """Count what the parts of a table have left out, for each reason. The reasons are sorted."""
    rejections: Counter[str] = Counter()
    for pointer in pointers:
        for rejection in pointer.record[REJECTIONS]:
            rejections[rejection["reason"]] += rejection["count"]
    return dict(sorted(rejections.items()))
