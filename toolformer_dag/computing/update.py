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
    BACKENDS_FIELD,
    REJECTIONS_FIELD,
    VIOLATIONS_FIELD,
    ByChunk,
    ByParts,
    ByShard,
    Chunk,
    ClaimedKeys,
    PartRows,
    Planned,
    StaleInput,
    TableOutput,
    Work,
)
from toolformer_dag.computing.stored_rows import release_earliest_keys
from toolformer_dag.computing.worker import WorkAhead, Worker
from toolformer_dag.computing.workers import Workers, build_in_process_executor
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.session import enter_session

FETCH_BATCH_PARTS = 64
"""Parts whose inputs are brought to this machine together."""
MAX_JOINT_INPUT_BYTES = 2**24
"""Bytes of inputs up to which parts are made together (ByParts)."""
ProgressCallback = Callable[[int, int], None]
"""Called as `report_progress(done, total)`, in units of work. Rows that were stored before count for neither."""


@dataclass(frozen=True, slots=True)
class TableReport:
    """What a table holds after an update, and what the update did.

    A table consists of parts, one per shard of the corpus or a single one.

    Attributes:
        name: The name of the table, such as "calculator/loss_deltas".
        row_count_by_part: The number of rows of each part.
        data_version: The version of the whole table. Empty if it has no parts.
        seconds: How long the update took.
        updated_parts: The parts that the update computed.
        reasons: Why these parts were computed, and parts removed.
        rejections_by_reason: How many documents, texts or calls the whole table leaves out, for each reason.
        violations_by_check: How many rows of the whole table break each check.
        work: What the update cost, such as tokens of the model.
    """

    name: str
    row_count_by_part: Mapping[str, int]
    data_version: str
    seconds: float
    updated_parts: tuple[str, ...]
    reasons: Reasons
    rejections_by_reason: Mapping[str, int]
    violations_by_check: Mapping[str, int]
    work: Work = field(default_factory=Work)

    @property
    def is_unchanged(self) -> bool:
        """Whether the update found nothing to do."""
        return not self.reasons

    @property
    def computed_row_count(self) -> int:
        """The number of rows of all kinds that this update computed."""
        return self.work.computed_rows_by_kind.total()

    @property
    def reused_row_count(self) -> int:
        """The number of rows of all kinds that earlier runs had computed."""
        return self.work.reused_rows_by_kind.total()


def withdraw_shard(outputs: Sequence[TableOutput], shard_name: str) -> None:
    """Remove the parts of a shard from all tables, so that the next run makes them again.

    Its stored rows are kept, so they do not have to be computed again.
    """
    for output in outputs:
        if output.stage.is_sharded and output.table.has_part(shard_name):
            output.table.withdraw_part(shard_name)


def update_table(
    worker: Worker, workers: Workers, output: TableOutput, report_progress: ProgressCallback
) -> TableReport:
    """Compute and publish the parts of a table that are missing or out of date, and remove parts whose shard is gone.

    If the process is killed, every worker loses at most the chunk that it computes.

    Args:
        worker: What this process has loaded. It plans the work, reads stored rows and runs tools.
        workers: They compute the chunks.
        output: The table.
        report_progress: Called with the work done and the work expected in all.

    Raises:
        StaleInput: Two inputs of the table do not fit each other.
        WriteError: A file of the lake cannot be written.
        WorkerError: Too many workers failed over one chunk.
        Exception: Anything that the stage raises. Parts that were published before stay in the table.
    """
    start_time = time.monotonic()
    worker.close_row_stores()  # an update that failed may have left them open

    with enter_session():  # until the end of the block, what is read of the lake is remembered
        for inner_output in output.inner_outputs:  # tables that only this one reads
            _update_single_table(worker, workers, inner_output, report_progress)

        update_result = _update_single_table(worker, workers, output, report_progress)
        return _build_report(output, update_result, seconds=time.monotonic() - start_time)


class _UpdateResult(NamedTuple):
    """Why a table was out of date, and what it cost to bring it up to date."""

    reasons: Reasons
    work: Work


def _update_single_table(
    worker: Worker, workers: Workers, output: TableOutput, report_progress: ProgressCallback
) -> _UpdateResult:
    """Compute and publish the parts of one table that are out of date, but not of the tables that it reads.

    Returns:
        Why the table was out of date, and what the work cost.

    Raises:
        StaleInput: Two inputs of the table do not fit each other. Nothing is computed then.
    """
    reasons = find_table_differences(output)
    with enter_session():
        for part in reasons.reasons_by_part:
            _check_that_inputs_fit(output, part)

    if output.stage.pool == "tools":
        # Rate limits and pauses of a tool hold within one process, so all of its calls are made by this one.
        workers = Workers(worker, {output.name: output}, build_in_process_executor)
    work = _compute_parts(worker, workers, output, reasons, report_progress)

    damage_messages = worker.close_row_stores()  # one sentence for each file of stored rows that was found damaged
    return _UpdateResult(reasons, work + Work(damage_messages=damage_messages))


def _compute_parts(
    worker: Worker, workers: Workers, output: TableOutput, reasons: Reasons, report_progress: ProgressCallback
) -> Work:
    """Compute and publish the parts of a table that are out of date, and remove those that it should no longer have.

    If an error occurs, the parts that were published before it are still written to the lake.

    Returns:
        What the work cost.
    """
    lake = output.plan.lake
    parts = _PartsUnderWay(worker, output, list(reasons.reasons_by_part))

    ended_tasks = workers.map_chunks(parts.iter_tasks())  # a generator, which starts nothing yet

    # In a batch, published parts are collected and written together, at the latest at the end of the block.
    with lake.batch_publications(), closing(ended_tasks):
        _remove_parts(output, reasons.removed_parts)

        for ended_task in ended_tasks:
            # None comes about once a second while no task ends, so that the lines after this block run.
            if ended_task is not None:
                parts.end_task(ended_task.task_number, ended_task.work)  # publishes the parts that are now complete

            # Write the collected parts if they have waited for some seconds, or are many.
            lake.flush_manifests(only_due=True)
            report_progress(parts.forecast.done_units, parts.forecast.total_units)
    return parts.work


def _remove_parts(output: TableOutput, parts: Sequence[str]) -> None:
    """Remove parts from a table, and from the tables that are published together with it."""
    tables = [output.table, *output.sibling_tables]
    for part in parts:
        for table in tables:
            table.withdraw_part(part)


class _Forecast:
    """A forecast of how much work a table takes. It is known for the planned parts, and extrapolated to the others.

    Attributes:
        total_units: The estimated number of texts, calls or shards in all parts.
        done_units: How many of them are done.
    """

    def __init__(self, part_count: int) -> None:
        """Begin with no planned parts.

        Args:
            part_count: How many parts have to be planned in all.
        """
        # Units are texts, calls or shards.
        self.total_units = 0  # of all parts, estimated
        self.done_units = 0

        self._part_count = part_count
        self._planned_parts = 0
        self._planned_units = 0

        # Tokens that the model will have processed: for the planned parts, for all parts, and for the chunks done.
        self._planned_tokens = 0.0
        self._total_tokens = 0.0
        self._done_tokens = 0.0

    def add_planned_part(self, chunks: Sequence[Chunk]) -> None:
        """Count the chunks of a part that was planned, and estimate the work of all parts from those planned so far.

        For example, if two of ten parts are planned and have 30 units of work, all parts are estimated to have 150.
        """
        self._planned_parts += 1
        self._planned_units += sum(chunk.unit_count for chunk in chunks)
        self._planned_tokens += sum(chunk.estimated_tokens for chunk in chunks)

        self.total_units = round(self._planned_units * self._part_count / self._planned_parts)
        self._total_tokens = self._planned_tokens * self._part_count / self._planned_parts

    def add_done_chunk(self, chunk: Chunk) -> None:
        """Count a chunk that was computed."""
        self.done_units += chunk.unit_count
        self._done_tokens += chunk.estimated_tokens

    def build_work_ahead(self) -> WorkAhead:
        """Return the forecast in a form that other threads can read, to show how much is left."""
        return WorkAhead(total_units=self.total_units, done_tokens=self._done_tokens, total_tokens=self._total_tokens)


class _PartChunk(NamedTuple):
    """A chunk, and the part that it belongs to."""

    part: str
    chunk: Chunk


class _PartsUnderWay:
    """The parts of a table that are being made. Each passes through these states, in order:

    1. waiting: It is in `_parts`, after the last part that `iter_tasks` has planned.
    2. open: `_chunks_left_by_part` counts its chunks that are not computed yet, and `_claimed_keys` has its keys.
    3. published: It and all parts before it are completely computed.

    `iter_tasks` plans part by part as workers ask for work, and `end_task` is called for each task that has ended. Both
    publish the parts that are complete then.

    Attributes:
        work: What the planning and the ended tasks have cost so far.
        forecast: How much work all parts take.
    """

    def __init__(self, worker: Worker, output: TableOutput, parts: Sequence[str]) -> None:
        """Begin with all parts waiting to be planned.

        Args:
            worker: What this process has loaded.
            output: The table.
            parts: The names of the parts that are out of date, in the order of the table.
        """
        self.work = Work()
        self.forecast = _Forecast(len(parts))
        self._worker = worker
        self._output = output
        self._parts = parts

        # The group of up to FETCH_BATCH_PARTS parts that is planned now. Their inputs are on this machine.
        self._current_parts: Sequence[str] = ()

        # For each task, by its number: its chunk, and the part that the chunk belongs to.
        self._part_chunks: list[_PartChunk] = []

        # For each planned part that is not published yet, in order: how many of its chunks are not computed yet.
        self._chunks_left_by_part: dict[str, int] = {}

        # Rows of parts that were made together with an earlier part (ByParts) and are not published yet.
        self._rows_made_together: dict[str, PartRows] = {}

        # The keys of rows that planned parts will compute. Later parts do not compute these rows again.
        self._claimed_keys = ClaimedKeys()

    def iter_tasks(self) -> Iterator[Task]:
        """Plan the parts one after the other, each when its first task is asked for.

        For every task that has ended, `end_task` must be called with its number, counted from 0 over all parts.

        Yields:
            A task for each chunk of each part.
        """
        update_id = uuid4().hex  # by which workers recognize the tasks of this update
        for part_index, part in enumerate(self._parts):
            if part_index % FETCH_BATCH_PARTS == 0:
                next_parts = self._parts[part_index : part_index + FETCH_BATCH_PARTS]
                self._fetch_inputs(next_parts)

            chunks = self._plan_part(part)
            self._publish_complete_parts()  # a part without chunks is complete already

            for chunk in chunks:
                self._part_chunks.append(_PartChunk(part, chunk))  # its index is the number of the task
                yield self._build_task(chunk, update_id)

    def _build_task(self, chunk: Chunk, update_id: str) -> Task:
        """Wrap a chunk as a task that a worker can compute."""
        return Task(
            table_name=self._output.name,
            settings_fingerprint=self._output.code_version,
            payload=chunk.payload,
            update_id=update_id,
        )

    def end_task(self, task_number: int, work: Work) -> None:
        """Take note that a task has ended, and publish the parts that are now complete.

        Args:
            task_number: The number of the task.
            work: What it cost.
        """
        part, chunk = self._part_chunks[task_number]
        self._output.plan.lake.apply_news(work.news)  # what a worker in another process has written to the lake
        self._chunks_left_by_part[part] -= 1
        self.work += work

        self.forecast.add_done_chunk(chunk)
        self._show_forecast()
        self._publish_complete_parts()

    def _fetch_inputs(self, parts: Sequence[str]) -> None:
        """Bring the inputs of the parts that are planned next to this machine, if they are not there yet."""
        self._current_parts = parts
        if self._output.stage.is_sharded:
            for table_name in self._output.depends_on:
                self._output.plan.lake.get_table(table_name).download_parts(parts)

    def _plan_part(self, part: str) -> Sequence[Chunk]:
        """Plan a part and count its work.

        Returns:
            The chunks to compute.
        """
        planned = self._plan_chunks(part)
        self._chunks_left_by_part[part] = len(planned.chunks)

        self.work += planned.work
        self.forecast.add_planned_part(planned.chunks)
        self._show_forecast()
        return planned.chunks

    def _show_forecast(self) -> None:
        """Pass the forecast to the thread that shows the progress of the step. It reads `worker.work_ahead`."""
        self._worker.work_ahead = self.forecast.build_work_ahead()

    def _plan_chunks(self, part: str) -> Planned:
        """Split what is missing of a part (mostly one shard) into chunks for the workers.

        A stage whose rows are made ByChunk plans them itself. With ByShard a worker computes and publishes the whole
        part, so it is one chunk. With any other row maker this process makes the part, so there are none.
        """
        row_maker = self._output.stage.row_maker
        if isinstance(row_maker, ByChunk):
            return row_maker.plan_part(self._worker, self._output, part, self._claimed_keys)
        if isinstance(row_maker, ByShard):
            return Planned([Chunk(unit_count=1, payload=part)], Work())
        return Planned([], Work())

    def _publish_complete_parts(self) -> None:
        """Publish the planned parts in order, up to the first one that is not completely computed.

        A part that is complete but comes after that one waits in `_chunks_left_by_part`.
        """
        is_published_by_worker = isinstance(self._output.stage.row_maker, ByShard)
        while self._chunks_left_by_part:
            first_part, chunks_left = next(iter(self._chunks_left_by_part.items()))
            if chunks_left > 0:
                return

            del self._chunks_left_by_part[first_part]
            if not is_published_by_worker:
                self._publish_part(first_part)

    def _publish_part(self, part: str) -> None:
        """Publish a part whose chunks are computed.

        `_claimed_keys` holds, part by part, the keys of the rows that later parts need not compute again. Those of this
        part are then released, since later parts find its rows among the stored ones. They are the earliest keys,
        because parts are published in the order in which they were planned.
        """
        rows = self._make_rows(part)
        if self.work.backend_identities:  # empty if all rows had been stored before
            backends = sorted(self.work.backend_identities)
            rows = replace(rows, record_fields={**rows.record_fields, BACKENDS_FIELD: backends})

        self._output.publish(part, rows)
        release_earliest_keys(self._claimed_keys)

    def _make_rows(self, part: str) -> PartRows:
        """Make the rows of a part in this process, mostly by reading rows that workers have computed and stored."""
        row_maker = self._output.stage.row_maker
        assert not isinstance(row_maker, ByShard)  # a worker publishes these rows
        if isinstance(row_maker, ByParts):
            return self._make_rows_with_next_parts(row_maker, part)
        return row_maker.make_rows(self._worker, self._output, part)

    def _make_rows_with_next_parts(self, row_maker: ByParts, part: str) -> PartRows:
        """Make the rows of a small part, perhaps together with the next parts, whose rows are kept for their turn."""
        if part not in self._rows_made_together:
            parts_together = self._choose_parts_together(part)
            rows_by_part = row_maker.make_rows(self._worker, self._output, parts_together)
            self._rows_made_together = dict(rows_by_part)
        return self._rows_made_together.pop(part)

    def _choose_parts_together(self, part: str) -> list[str]:
        """Choose small parts that are made together with a part, because making each alone is slow.

        Returns:
            The part and those right after it, as long as their inputs take at most MAX_JOINT_INPUT_BYTES in all.
        """
        chosen_parts = [part]
        total_bytes = self._sum_input_bytes(part)

        part_index = self._current_parts.index(part)
        for next_part in self._current_parts[part_index + 1 :]:
            total_bytes += self._sum_input_bytes(next_part)
            if total_bytes > MAX_JOINT_INPUT_BYTES:
                break
            chosen_parts.append(next_part)
        return chosen_parts

    def _sum_input_bytes(self, part: str) -> int:
        """Return the total size of the files from which a part is made."""
        lake = self._output.plan.lake
        total_bytes = 0
        for table_name in self._output.depends_on:
            # A pointer describes what is published of a part, such as its files.
            pointer = lake.get_table(table_name).read_pointer(part)
            total_bytes += sum(file.bytes for file in pointer.files)
        return total_bytes


def _check_that_inputs_fit(output: TableOutput, part: str) -> None:
    """Check that the inputs of a part fit each other, where they are tables of the same tool.

    For example, scored calls do not fit the texts if they were computed from an earlier version of the texts.

    Raises:
        StaleInput: An input was made from another version of a second input than the present one.
    """
    has_lane = output.lane_or_none is not None  # a lane is a tool with its settings; its tables are "<lane>/<name>"
    if not (output.stage.is_sharded and has_lane):
        return

    lane_prefix = f"{output.group}/"  # such as "calculator/"
    lane_inputs = [name for name in output.depends_on if name.startswith(lane_prefix)]
    for input_name in lane_inputs:
        _require_current_inputs(output, part, input_name, lane_inputs)


def _require_current_inputs(output: TableOutput, part: str, input_name: str, lane_inputs: Sequence[str]) -> None:
    """Check that an input of a part was made from the present versions of the other inputs.

    If the inputs are texts and scored calls, for example, the calls must have been scored in these very texts.

    Args:
        output: The table of the part.
        part: The name of the part, which is also its name in the inputs.
        input_name: The input to check.
        lane_inputs: All inputs that are tables of the same tool.

    Raises:
        StaleInput: It was made from another version of one of them.
    """
    for source_name, used_version in _read_input_versions(output, input_name, part).items():
        if source_name not in lane_inputs:
            continue

        present_version = _read_present_version(output, source_name, part)
        if used_version != present_version:
            raise StaleInput(output.name, part, f"{input_name} was made from other rows of {source_name}", input_name)


def _read_present_version(output: TableOutput, table_name: str, part: str) -> str:
    """Return the version of the rows that are published of a part of another table."""
    return output.plan.lake.get_table(table_name).read_pointer(part).data_version


def _read_input_versions(output: TableOutput, table_name: str, part: str) -> dict[str, Any]:
    """Read from which versions of its inputs a published part of a table was made.

    Args:
        output: Any table of the same tool.
        table_name: The name of the table.
        part: The name of the part.

    Returns:
        The versions by the name of the input, such as "calculator/loss_deltas".
    """
    table = output.plan.lake.get_table(table_name)
    versions_by_short_name = table.read_pointer(part).record["inputs"]
    return {f"{output.group}/{short_name}": version for short_name, version in versions_by_short_name.items()}


def _build_report(output: TableOutput, update_result: _UpdateResult, seconds: float) -> TableReport:
    """Describe what a table holds after an update, and what the update did.

    Args:
        output: The table.
        update_result: Why parts were computed, and what that cost.
        seconds: How long the update took.
    """
    with enter_session():  # so that both are read from the same state of the table
        pointers_by_part = output.read_pointers()
        data_version = output.compute_version()

    pointers = pointers_by_part.values()  # a pointer describes what is published of a part
    return TableReport(
        name=output.name,
        row_count_by_part={part: pointer.row_count for part, pointer in pointers_by_part.items()},
        data_version=data_version or "",
        seconds=seconds,
        updated_parts=tuple(update_result.reasons.reasons_by_part),
        reasons=update_result.reasons,
        rejections_by_reason=_count_rejections_by_reason(pointers),
        violations_by_check=_count_violations_by_check(pointers),
        work=update_result.work,
    )


def _count_violations_by_check(pointers: Iterable[Pointer]) -> dict[str, int]:
    """Count the rows that break a check, for each check and over all parts of a table."""
    violations: Counter[str] = Counter()
    for pointer in pointers:
        violations.update(pointer.record[VIOLATIONS_FIELD])  # adds the counts of one part
    return dict(violations)


def _count_rejections_by_reason(pointers: Iterable[Pointer]) -> dict[str, int]:
    """Count what the parts of a table have left out, for each reason. The reasons are sorted."""
    rejections: Counter[str] = Counter()
    for pointer in pointers:
        for rejection in pointer.record[REJECTIONS_FIELD]:
            rejections[rejection["reason"]] += rejection["count"]
    return dict(sorted(rejections.items()))
