"""Bringing a table up to date: which parts differ from their record, their missing rows in chunks, the new parts."""

import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from toolformer_dag.files import UserError
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import SHORT, FieldChange, changes, shortened
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import WHOLE, DamagedPart, MissingPart, behind
from toolformer_dag.pipeline.chunks import ChunkMapper, InProcess, Progress, Task, release
from toolformer_dag.pipeline.stage import (
    BACKENDS,
    REJECTIONS,
    RETRY,
    VIOLATIONS,
    Claimed,
    InputsOf,
    Planned,
    TableOutput,
    Work,
)
from toolformer_dag.pipeline.worker import Worker

AT_ONCE = 64
"""Parts whose inputs are brought to this machine together."""
HASH = re.compile("[0-9a-f]{16,}")
"""A fingerprint: it tells people nothing."""


class StaleInput(UserError):
    """An input was published anew after another one had been made from it."""

    def __init__(self, table: str, part: str, what: str, asset: str) -> None:
        where = behind(", shard", part)
        super().__init__(f"{table}{where}: {what}; materialize {asset} first, or all with `toolformer-dag stale --run`")


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a part is out of date: never made, lost (`note`), or made from something else (`changes`).

    `retry`: nothing changed, but the last attempt was not complete (lost calls, an unreadable file).
    """

    new: bool = False
    note: str | None = None
    changes: tuple[FieldChange, ...] = ()
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Differences:
    """What is out of date in a table. `removed`: parts whose shard file is gone."""

    parts: Mapping[str, Difference]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.parts or self.removed)

    @property
    def retry_only(self) -> bool:
        """Whether nothing changed, and only what was incomplete is tried again."""
        return not self.removed and all(part.retry for part in self.parts.values())

    def lines(self) -> list[str]:
        """Say what changed, for people: settings once, then shards and inputs."""
        changed = dict.fromkeys(str(change) for part in self.parts.values() for change in part.changes)
        notes = dict.fromkeys(part.note for part in self.parts.values() if part.note)
        new = [part for part, difference in self.parts.items() if difference.new]
        lines = [*changed, *notes]
        if new:
            lines.append("never made" if new == [WHOLE] else f"without rows: {_few(new)}")
        if self.removed:
            lines.append(f"removed: {_few(self.removed)}")
        return lines

    def settings(self) -> list[str]:
        """Say which settings changed: `tau_f 0.5 -> 0.8`, or the name alone where values are hashes or long texts."""
        found = {change.field: change for part in self.parts.values() for change in part.changes}
        changed = [one for name, one in sorted(found.items()) if name.startswith("settings.")]
        return [_told(one) for one in changed if "columns" not in one.field]


@dataclass(frozen=True, slots=True)
class TableReport:
    """What a table holds after an update, and what the update did.

    rows: per part; updated: parts computed in this run; rejections: reason -> count and violations: check -> rows that
    break it, of the whole table; facts: the record of what is decided over all shards; work: of this run alone; seconds
    of wall time.
    """

    name: str
    rows: Mapping[str, int]
    data_version: str
    seconds: float
    updated: tuple[str, ...]
    differences: Differences
    rejections: Mapping[str, int]
    violations: Mapping[str, int]
    facts: Mapping[str, Any]
    work: Work = field(default_factory=Work)

    @property
    def unchanged(self) -> bool:
        """Whether the update found nothing to do."""
        return not self.differences

    @property
    def computed(self) -> int:
        """Rows of all kinds that were computed in this run."""
        return sum(computed for computed, _ in self.work.counts.values())

    @property
    def reused(self) -> int:
        """Rows of all kinds that had been computed before."""
        return sum(reused for _, reused in self.work.counts.values())


def differences(output: TableOutput) -> Differences:
    """Compare the record of every part with what it would be now. `stale`, `--why` and every asset ask this.

    Where no part differs, return what differs in an inner table: parts may follow.
    """
    found = _own_differences(output)
    inner = (differences(one) for one in output.inner)
    return found or next((one for one in inner if one), found)


def _own_differences(output: TableOutput) -> Differences:
    with output.plan.lake.storage.at_a_glance():
        inputs_of = output.inputs_of()
        found = {part: difference(output, part, inputs_of) for part in output.parts}
        removed = tuple(part for part in output.table.parts() if part not in found)
    return Differences({part: one for part, one in found.items() if one is not None}, removed)


def withdraw(outputs: Sequence[TableOutput], shard: str) -> int:
    """Take a shard's parts out of every table, so that the next run makes them anew; return how many there were."""
    tables = [output.table for output in outputs if output.stage.sharded and output.table.has(shard)]
    for table in tables:
        table.remove(shard)
    return len(tables)


def difference(output: TableOutput, part: str, inputs_of: InputsOf | None = None) -> Difference | None:
    """Return why a part is out of date; None where it is not. Looks at sizes and footers, not at every byte.

    `inputs_of`: that of the table, where many parts are asked for.
    """
    try:
        made = output.table.checked(part).record
    except MissingPart:
        return Difference(new=True)
    except DamagedPart as error:
        return Difference(note=str(error).partition(";")[0])
    if made.get(RETRY):
        return Difference(note=str(made[RETRY]), retry=True)
    changed = changes(made, {"settings": output.settings, "inputs": (inputs_of or output.inputs_of())(part)})
    return Difference(changes=tuple(changed)) if changed else None


def update(worker: Worker, workers: ChunkMapper, output: TableOutput, progress: Progress) -> TableReport:
    """Compute the parts that are out of date; withdraw parts without a shard file.

    Missing rows are computed in chunks by `workers`; tools run in this process. A killed update loses at most one chunk
    per worker. Raises StaleInput, WriteError, and what the stage raises.
    """
    began = time.monotonic()
    with session():
        for inner in output.inner:
            _bring_up_to_date(worker, workers, inner, lambda done, total: None)
        found, work = _bring_up_to_date(worker, workers, output, progress)
        return _report(output, found, work, time.monotonic() - began)


def _bring_up_to_date(
    worker: Worker, workers: ChunkMapper, output: TableOutput, progress: Progress
) -> tuple[Differences, Work]:
    found, lake = _own_differences(output), output.plan.lake
    stage, parts = output.stage, list(found.parts)
    with lake.storage.at_a_glance():
        for part in parts:
            _check_inputs(output, part)
    here = InProcess(worker, {output.name: output}) if stage.pool == "tools" else workers
    queue = _Queue(worker, output, parts)
    # an error here ends the chunks that are under way
    with lake.batch(), closing(here.map_chunks(queue.tasks())) as computed:
        for part in found.removed:
            for table in (output.table, *map(lake.table, output.stage.beside)):
                table.remove(part)
        for ended in computed:
            if ended is not None:
                queue.ended(*ended)
            lake.flush(due=True)
            progress(queue.done, queue.total)
    return found, queue.work + Work(damaged=worker.close_rows())


class _Queue:
    """Parts in order, each published as soon as its chunks and those of all parts before it are done."""

    def __init__(self, worker: Worker, output: TableOutput, parts: Sequence[str]) -> None:
        self._worker, self._output, self._parts = worker, output, parts
        self._step = uuid4().hex
        self._waiting: deque[str] = deque()
        self._open: Counter[str] = Counter()
        self._part_of: dict[int, tuple[str, int]] = {}
        self._given = 0
        self._claimed = Claimed()
        self.done = 0
        self._known = 0
        self.work = Work()

    @property
    def total(self) -> int:
        """Units to compute; those of parts that are not planned yet are estimated from the parts before them."""
        planned = len(self._open)
        return round(self._known * len(self._parts) / planned) if planned else 0

    def tasks(self) -> Iterator[Task]:
        read = self._output.depends_on if self._output.stage.sharded else ()
        for number, part in enumerate(self._parts):
            if number % AT_ONCE == 0:
                for name in read:
                    self._output.plan.lake.table(name).bring(self._parts[number : number + AT_ONCE])
            planned = self._planned(part)
            self._known += sum(units for units, _ in planned.chunks)
            self.work += Work(counts=planned.counts)
            self._waiting.append(part)
            self._open[part] = len(planned.chunks)
            self._publish()
            for units, payload in planned.chunks:
                self._part_of[self._given] = part, units
                self._given += 1
                yield Task(self._output.name, self._output.code_version, payload, self._step)

    def _planned(self, part: str) -> Planned:
        """The chunks of a part; a shard that a worker publishes is one."""
        stage = self._output.stage
        if stage.chunks is not None:
            return stage.chunks(self._worker, self._output, part, self._claimed)
        return Planned([] if stage.shard_rows is None else [(1, part)], {})

    def ended(self, number: int, work: Work) -> None:
        part, units = self._part_of.pop(number)
        self._output.plan.lake.take(work.news)
        self._open[part] -= 1
        self.done += units
        self.work += work
        self._publish()

    def _publish(self) -> None:
        rows = self._output.stage.rows
        while self._waiting and not self._open[self._waiting[0]]:
            part = self._waiting.popleft()
            if rows is None:  # a worker published it
                continue
            made = rows(self._worker, self._output, part)
            if self.work.backends:
                made = replace(made, facts={**made.facts, BACKENDS: sorted(self.work.backends)})
            self._output.publish(part, made)
            release(self._claimed)


def _check_inputs(output: TableOutput, part: str) -> None:
    """Raise StaleInput where an input was made from another version of a second input than there is now."""
    if not (output.stage.sharded and output.lane_or_none):
        return
    whole = output.stage.plan_reads(output.plan)
    for name in (name for name in output.depends_on if name not in whole):
        pointer = output.plan.lake.table(name).pointer(part)
        for input_name, version in pointer.record["inputs"].items():
            other = f"{output.group}/{input_name}"
            if other in output.depends_on and output.plan.lake.table(other).pointer(part).data_version != version:
                raise StaleInput(output.name, part, f"{name} was made from other rows of {other}", name)


def _report(output: TableOutput, found: Differences, work: Work, seconds: float) -> TableReport:
    with output.plan.lake.storage.at_a_glance():
        pointers: Mapping[str, Pointer] = output.table.pointers()
        version = output.table.version()
    rejections: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for pointer in pointers.values():
        for one in pointer.record[REJECTIONS]:
            rejections[one["reason"]] += one["count"]
        for check, count in pointer.record[VIOLATIONS].items():
            violations[check] += count
    return TableReport(
        name=output.name,
        rows={part: pointer.rows for part, pointer in pointers.items()},
        data_version=version or "",
        seconds=seconds,
        updated=tuple(found.parts),
        differences=found,
        rejections=dict(sorted(rejections.items())),
        violations=dict(violations),
        facts=_facts(output, pointers),
        work=work,
    )


def _facts(output: TableOutput, pointers: Mapping[str, Pointer]) -> Mapping[str, Any]:
    """The record of the table's only part, or of its inner table that has one."""
    if not output.stage.sharded:
        return next((pointer.record for pointer in pointers.values()), {})
    return {
        name: fact
        for inner in output.inner
        if not inner.stage.sharded
        for name, fact in inner.table.record(WHOLE).items()
    }


def _told(change: FieldChange) -> str:
    name = change.field.removeprefix("settings.")
    if any(
        isinstance(value, str) and (HASH.fullmatch(value) or len(value) > SHORT) for value in (change.old, change.new)
    ):
        return f"{name} changed"
    return f"{name} {shortened(change.old)} -> {shortened(change.new)}"


def _few(names: Sequence[str], shown: int = 5) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
