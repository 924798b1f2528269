"""Bringing a table up to date: which parts differ from their record, their missing rows in chunks, the new parts."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from uuid import uuid4

from toolformer_dag.computing.chunks import Task
from toolformer_dag.computing.stage import (
    BACKENDS,
    REJECTIONS,
    RETRY,
    VIOLATIONS,
    ByChunk,
    ByParts,
    ByShard,
    Chunk,
    Claimed,
    InputsOf,
    PartRows,
    Planned,
    StaleInput,
    TableOutput,
    Work,
)
from toolformer_dag.computing.stored_rows import release
from toolformer_dag.computing.worker import Ahead, Worker
from toolformer_dag.computing.workers import Workers, in_process
from toolformer_dag.lake.record import SHORT, FieldChange, changes, shortened
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import WHOLE, DamagedPart, MissingPart

AT_ONCE, AT_ONCE_BYTES = 64, 2**24
"""Parts whose inputs are brought to this machine together; bytes of inputs from which parts are made together."""
HASH = re.compile("[0-9a-f]{16,}")
"""A fingerprint: it tells people nothing."""
NEVER_MADE, TOUCHED = "never made", "another time of change, content not compared yet (`run` reads it)"
Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` after every committed chunk; rows that were stored before count for neither."""


class Incomplete(str):
    """A reason without a change: the last attempt lost calls, or could not read a file, and is made again."""


class Touched(str):
    """The place of a file whose time of change alone is another: its content was not compared yet."""


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why an output is missing or out of date: of each such part fields that changed, or sentences.

    `removed`: parts whose shard file is gone. What has no parts says it of WHOLE.
    """

    parts: Mapping[str, Sequence[FieldChange | str]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or any(self.parts.values()))

    @property
    def retry_only(self) -> bool:
        """Whether nothing changed, and only what was incomplete is tried again."""
        return not self.removed and all(isinstance(one, Incomplete) for one in self._all())

    @property
    def lines(self) -> tuple[str, ...]:
        """Say it for people: each change and each sentence once, then shards."""
        new = [part for part, reasons in self.parts.items() if NEVER_MADE in reasons and part != WHOLE]
        touched = self._touched()
        grouped: dict[str, Sequence[str]] = {TOUCHED: touched, "without rows": new, "removed": self.removed}
        left_out = {*touched, *([NEVER_MADE] if new else [])}
        lines = dict.fromkeys(str(one) for one in self._all() if str(one) not in left_out)
        return (*lines, *(f"{heading}: {_few(names)}" for heading, names in grouped.items() if names))

    def _touched(self) -> list[str]:
        return [one for one in self._all() if isinstance(one, Touched)]

    def settings(self) -> list[str]:
        """Say which settings changed: `tau_f 0.5 -> 0.8`, or the name alone where values are hashes or long texts."""
        return [_in_short(change) for change in self.setting_changes()]

    def setting_changes(self) -> list[FieldChange]:
        """Return the settings that changed, each once, by name; the types of columns are none."""
        changed = {one.field: one for one in self._all() if isinstance(one, FieldChange)}
        settings = [change for name, change in sorted(changed.items()) if name.startswith("settings.")]
        return [change for change in settings if "columns" not in change.field]

    def _all(self) -> Iterator[FieldChange | str]:
        return (one for reasons in self.parts.values() for one in reasons)


@dataclass(frozen=True, slots=True)
class TableReport:
    """What a table holds after an update, and what the update did.

    rows: per part; updated: parts computed in this run; rejections: reason -> count and violations: check -> rows that
    break it, of the whole table; work: of this run alone; seconds of wall time.
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
        """Rows of all kinds that were computed in this run."""
        return self.work.computed.total()

    @property
    def reused(self) -> int:
        """Rows of all kinds that had been computed before."""
        return self.work.reused.total()


def differences(output: TableOutput) -> Reasons:
    """Compare the record of every part with what it would be now. `stale`, `--why` and every asset ask this.

    Where no part differs, return what differs in an inner table: parts may follow.
    """
    return next(filter(None, map(_own_differences, (output, *output.inner))), Reasons())


def _own_differences(output: TableOutput) -> Reasons:
    with session():
        inputs_of = output.inputs_of()
        by_part = {part: difference(output, part, inputs_of) for part in output.parts}
        removed = tuple(part for part in output.table.parts() if part not in by_part)
    return Reasons({part: reasons for part, reasons in by_part.items() if reasons}, removed)


def difference(output: TableOutput, part: str, inputs_of: InputsOf | None = None) -> Sequence[FieldChange | str]:
    """Return why a part is out of date; nothing where it is not. Looks at sizes and footers, not at every byte.

    `inputs_of`: that of the table, where many parts are asked for.
    """
    try:
        made = output.table.checked(part).record
    except MissingPart:
        return [NEVER_MADE]
    except DamagedPart as error:
        return [str(error).partition(";")[0]]
    for name in output.stage.beside:
        if output.plan.lake.table(name).part_version(part) is None:
            return [f"{name} lacks it"]
    if made.get(RETRY):
        return [Incomplete(made[RETRY])]
    changed = changes(made, {"settings": output.settings, "inputs": (inputs_of or output.inputs_of())(part)})
    return _of_file(output.plan.shards[part].place, changed) if part in output.plan.shards else changed


def _of_file(place: str, changed: Sequence[FieldChange]) -> Sequence[FieldChange | str]:
    """Name the file where its stamp differs."""
    stamped = {change.field: change for change in changed if change.field in ("inputs.bytes", "inputs.mtime_ns")}
    size, rest = stamped.get("inputs.bytes"), [change for change in changed if change.field not in stamped]
    if size is not None:
        return [*rest, f"{place}: {size.old} -> {size.new} bytes"]
    return [*rest, Touched(place)] if stamped else changed


def withdraw(outputs: Sequence[TableOutput], shard: str) -> None:
    """Take a shard's parts out of every table, so that the next run makes them anew."""
    for output in outputs:
        if output.stage.sharded and output.table.has(shard):
            output.table.remove(shard)


def update(worker: Worker, workers: Workers, output: TableOutput, progress: Progress) -> TableReport:
    """Compute the parts that are out of date; withdraw parts without a shard file.

    Missing rows are computed in chunks by `workers`; tools run in this process. A killed update loses at most one chunk
    per worker, and in this process over an object store the one before it. Raises StaleInput, WriteError, and what the
    stage raises.
    """
    began = time.monotonic()
    worker.close_rows()  # a step that failed left them open
    with session():
        for inner in output.inner:
            _bring_up_to_date(worker, workers, inner, progress)
        reasons, work = _bring_up_to_date(worker, workers, output, progress)
        return _report(output, reasons, work, time.monotonic() - began)


def _bring_up_to_date(
    worker: Worker, workers: Workers, output: TableOutput, progress: Progress
) -> tuple[Reasons, Work]:
    reasons, lake, parts = _own_differences(output), output.plan.lake, _Parts(worker, output)
    with session():
        for part in reasons.parts:
            _check_inputs(output, part)
    if output.stage.pool == "tools":
        workers = Workers(worker, {output.name: output}, in_process)
    # an error here ends the chunks that are under way
    with lake.batch(), closing(workers.map_chunks(parts.tasks(list(reasons.parts)))) as computed:
        for part in reasons.removed:
            for table in (output.table, *map(lake.table, output.stage.beside)):
                table.remove(part)
        for ended in computed:
            if ended is not None:
                parts.ended(*ended)
            lake.flush(due=True)
            progress(parts.done, parts.total)
    return reasons, parts.work + Work(damaged=worker.close_rows())


class _Parts:
    """The parts of a table in order, each published as soon as its chunks and those of the parts before it are done.

    `done` of `total` units; those of parts that are not planned yet are estimated from the parts before them.
    """

    def __init__(self, worker: Worker, output: TableOutput) -> None:
        self._worker, self._output = worker, output
        self._chunks: list[tuple[str, Chunk]] = []  # of each task
        self._open: dict[str, int] = {}  # chunks that are not done, by part, in order
        self._near: Sequence[str] = ()  # parts whose inputs were brought together
        self._made: dict[str, PartRows] = {}  # rows of parts that were made together
        self._claimed = Claimed()
        self.done = self.total = 0
        self._tokens_done = self._tokens = 0.0
        self.work = Work()

    def tasks(self, parts: Sequence[str]) -> Iterator[Task]:
        """Yield the chunks of the parts, each planned when it is asked for."""
        output, step, known, tokens = self._output, uuid4().hex, 0, 0.0
        read = output.depends_on if output.stage.sharded else ()
        for number, part in enumerate(parts):
            if number % AT_ONCE == 0:
                self._near = parts[number : number + AT_ONCE]
                for name in read:
                    output.plan.lake.table(name).bring(self._near)
            planned = self._planned(part)
            known += sum(chunk.units for chunk in planned.chunks)
            tokens += sum(chunk.tokens for chunk in planned.chunks)
            self.total = round(known * len(parts) / (number + 1))
            self._tokens = tokens * len(parts) / (number + 1)
            self._tell()
            self.work += planned.work
            self._open[part] = len(planned.chunks)
            self._publish()
            for chunk in planned.chunks:
                self._chunks.append((part, chunk))
                yield Task(output.name, output.code_version, chunk.payload, step)

    def _planned(self, part: str) -> Planned:
        """The chunks of a part; a shard that a worker publishes is one."""
        make = self._output.stage.make
        if isinstance(make, ByChunk):
            return make.chunks(self._worker, self._output, part, self._claimed)
        return Planned([Chunk(1, part)] if isinstance(make, ByShard) else [], Work())

    def _tell(self) -> None:
        self._worker.ahead = Ahead(self.total, self._tokens_done, self._tokens)

    def ended(self, number: int, work: Work) -> None:
        """Count what a chunk has cost, and publish what is complete."""
        part, chunk = self._chunks[number]
        self._output.plan.lake.take(work.news)
        self._open[part] -= 1
        self.done += chunk.units
        self._tokens_done += chunk.tokens
        self._tell()
        self.work += work
        self._publish()

    def _publish(self) -> None:
        while (part := next(iter(self._open), None)) is not None and not self._open[part]:
            del self._open[part]
            made = self._rows(part)
            if made is None:  # a worker published it
                continue
            if self.work.backends:
                made = replace(made, facts={**made.facts, BACKENDS: sorted(self.work.backends)})
            self._output.publish(part, made)
            release(self._claimed)

    def _rows(self, part: str) -> PartRows | None:
        make = self._output.stage.make
        if isinstance(make, ByShard):
            return None
        if not isinstance(make, ByParts):
            return make.rows(self._worker, self._output, part)
        if part not in self._made:
            self._made = {**make.rows(self._worker, self._output, self._together(part))}
        return self._made.pop(part)

    def _together(self, part: str) -> list[str]:
        """The part and those after it whose inputs, with its own, are small enough to be read at once."""
        tables = [self._output.plan.lake.table(name) for name in self._output.depends_on]
        near = self._near[self._near.index(part) :]
        ends = accumulate(sum(file.bytes for one in tables for file in one.pointer(other).files) for other in near)
        return [other for other, end in zip(near, ends, strict=True) if end <= AT_ONCE_BYTES] or [part]


def _check_inputs(output: TableOutput, part: str) -> None:
    """Raise StaleInput where an input was made from another version of a second input than there is now."""
    if not (output.stage.sharded and output.lane_or_none):
        return
    lane = f"{output.group}/"
    own = [name for name in output.depends_on if name.startswith(lane)]
    for name in own:
        pointer = output.plan.lake.table(name).pointer(part)
        for input_name, version in pointer.record["inputs"].items():
            source = f"{lane}{input_name}"
            if source in own and output.plan.lake.table(source).pointer(part).data_version != version:
                raise StaleInput(output.name, part, f"{name} was made from other rows of {source}", name)


def _report(output: TableOutput, reasons: Reasons, work: Work, seconds: float) -> TableReport:
    with session():
        pointers, version = output.table.pointers(), output.table.version()
    rejections: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for pointer in pointers.values():
        for rejection in pointer.record[REJECTIONS]:
            rejections[rejection["reason"]] += rejection["count"]
        violations.update(pointer.record[VIOLATIONS])
    return TableReport(
        name=output.name,
        rows={part: pointer.rows for part, pointer in pointers.items()},
        data_version=version or "",
        seconds=seconds,
        updated=tuple(reasons.parts),
        differences=reasons,
        rejections=dict(sorted(rejections.items())),
        violations=dict(violations),
        work=work,
    )


def _in_short(change: FieldChange) -> str:
    name = change.field.removeprefix("settings.")
    if any(
        isinstance(value, str) and (HASH.fullmatch(value) or len(value) > SHORT) for value in (change.old, change.new)
    ):
        return f"{name} changed"
    return f"{name} {shortened(change.old)} -> {shortened(change.new)}"


def _few(names: Sequence[str], shown: int = 5) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
