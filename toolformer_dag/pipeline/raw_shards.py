"""raw_shards: the documents of the shards of the corpus, and the lines that hold none."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.shards import Shard, write_small_web
from toolformer_dag.computing.stage import (
    DIGEST,
    RETRY,
    SHARD,
    ByShard,
    Column,
    InputsOf,
    InWarehouse,
    PartRows,
    Rejected,
    Stage,
    StageAsset,
    TableOutput,
    UnusableRows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import record
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.columns import LATEST_DATE, Rejection
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

_log = logging.getLogger(__name__)
READER = 11
"""Raised when the same file would give other rows; a golden test notices where it was not."""
LINES_KEPT = 1000
"""Rejected lines that are described, per shard; all are counted."""
CONTENT = "content"
"""The field of a part's record that holds the hash of its file."""
NAME = "ccnet/raw_shards"
BATCH = 500
"""Documents that lie in one place: what is computed of them is looked up together."""
REJECTED_LINES = "ccnet/rejected_lines"
LINES = pl.Schema({"shard": pl.String(), "line": pl.Int64(), "reason": pl.String(), "detail": pl.String()})
"""`line`: line or row from 1; 0 for the file as a whole. `detail`: what was found there."""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the files' content."""
    corpus = plan.settings.corpus
    return {
        "reader": READER,
        "latest_date": LATEST_DATE.isoformat(),
        **determining(corpus, "format"),
        "fields": corpus.fields.model_dump(exclude_none=True),
    }


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells size and time of change of a shard's file, and the revision of a data set of the hub."""
    shards = output.plan.shards
    return lambda part: shards[part].stamp() if part in shards else {}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Read a shard in one pass. Memory: at most 600 MB, whatever the size of the shard.

    A malformed line is counted and described, and the rest of its shard goes through. Of a shard that is damaged no
    document is used, as its checksums tell at its end; it is one rejection and stops no other shard. So is a file that
    cannot be read at all (`unreadable`), which the next run tries again. Warned of: a shard without a document, with
    the first detail of each reason, and optional fields that hold no text.
    """
    if not (worker.plan.settings.corpus.named or worker.has_small_web):
        write_small_web(worker.plan.settings)
        worker.has_small_web = True
    reading = _Reading(worker.plan.shards[shard], format_choice(worker.plan))
    return PartRows(reading.frames(output), reading.rejected, facts=reading.facts)


def format_choice(plan: Plan) -> FormatChoice:
    """Return how the settings say that shards are read."""
    corpus = plan.settings.corpus
    return FormatChoice(corpus.format, tuple(corpus.fields.model_dump(exclude_none=True).items()))


def documents(plan: Plan, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard in order, with their `place`: the same for BATCH documents in a row.

    Raises MissingPart, DamagedPart.
    """
    begin = 0
    for rows in plan.lake.table(NAME).batches(shard):
        number = (pl.int_range(pl.len()) + begin) // BATCH
        yield rows.with_columns(place=pl.format("{}/{}", pl.lit(shard), number))
        begin += rows.height


class UnreadCorpus(UserError):
    """A corpus without a document. The message names a shard, and what was found in it."""


def nothing_read(plan: Plan) -> str | None:
    """Say of a corpus that was read and holds no document at all why, by its first shard; None for any other.

    Raises DamagedPart.
    """
    parts = plan.lake.table(NAME).pointers()
    if not parts or any(part.rows for part in parts.values()):
        return None
    shard, *others = sorted(parts)
    lines = plan.lake.table(REJECTED_LINES)
    rejections = lines.read(shard).rows(named=True) if lines.has(shard) else []
    reasons = {one["reason"]: one["detail"] for one in reversed(rejections)}
    summary = "; ".join(f"{reason}: {detail}" for reason, detail in reasons.items()) or "it is empty"
    more = f" (and {len(others)} more shards)" if others else ""
    return (
        f"no document could be read from {plan.shards[shard].place if shard in plan.shards else shard}{more}: {summary}"
    )


def unread_corpus(output: TableOutput) -> UnreadCorpus | None:
    """Return the error of a corpus that was read and holds no document: no stage after it would find anything."""
    reason = nothing_read(output.plan)
    return UnreadCorpus(reason) if reason else None


class RottenShard(UserError):
    """A shard whose documents were used, and that cannot be read to its end any more."""

    def __init__(self, shard: Shard, before: Pointer, reason: str) -> None:
        super().__init__(
            f"{shard.place} was whole when its {before.rows:,} documents were read, and is not any more: {reason}; "
            "restore the file and run again, or go on without its documents: move it away, or `toolformer-dag run "
            f"--again {shard.name}`"
        )


class _Reading:
    """One pass over a shard; `rejected` and `facts` are complete when `frames` is used up."""

    def __init__(self, shard: Shard, choice: FormatChoice) -> None:
        self.rejected: Rejected = Counter()
        self.facts: dict[str, Any] = {}
        self._shard, self._choice = shard, choice
        self._lines: list[tuple[str, int, str, str]] = []
        self._ignored: Counter[str] = Counter()

    def frames(self, output: TableOutput) -> Iterator[pl.DataFrame]:
        """Yield the documents. Raises UnusableRows where none may be used."""
        columns, usable = output.stage.schema.names(), True
        before = output.table.whole_pointer(self._shard.name)
        try:
            self.facts |= self._shard.facts()
            self._refuse_rot(before)
            for frame in self._documents():
                yield frame.select(columns)
        except (ShardFault, ShardError) as error:
            if before and before.rows:
                raise RottenShard(self._shard, before, str(error)) from error
            usable = False
            self._give_up(error)
        table = output.plan.lake.table(REJECTED_LINES)
        described = pl.DataFrame(self._lines, schema=LINES, orient="row")
        name = self._shard.name
        table.publish(name, [described], lambda: record(output.settings, output.inputs_of()(name)))
        if not usable:
            raise UnusableRows

    def _documents(self) -> Iterator[pl.DataFrame]:
        read = 0
        for batch in self._shard.batches(self._choice):
            self.facts["format"] = batch.layout.format
            for rejection in batch.rejections:
                self._reject(rejection)
            self._ignored.update(batch.ignored)
            read += batch.frame.height
            yield batch.frame.with_columns(shard=pl.lit(self._shard.name))
        if not read:
            self._warn()
        if self._ignored:
            summary = "; ".join(f"{what} ({count:,} times)" for what, count in self._ignored.items())
            _log.warning("%s: what counts as empty: %s", self._shard.place, summary)

    def _refuse_rot(self, before: Pointer | None) -> None:
        """Raise RottenShard where the content differs under the same size and time."""
        known = before and before.record["inputs"] == self._shard.stamp() and before.record.get(CONTENT)
        if before and known and known != self.facts.get(CONTENT):
            raise RottenShard(self._shard, before, "its content changed, its size and time did not")

    def _give_up(self, error: ShardFault | ShardError) -> None:
        """Count a shard of which nothing may be used, and nothing else of it."""
        self.rejected.clear()
        self._lines.clear()
        if isinstance(error, ShardError):
            self.facts[RETRY] = f"{self._shard.name} could not be read: {error}"
        reason = error.reason if isinstance(error, ShardFault) else "unreadable"
        self._reject(Rejection(0, reason, str(error)))
        self._warn()

    def _warn(self) -> None:
        """Say that there is no document, with the first detail of each reason."""
        details = {reason: f" ({detail})" for _, _, reason, detail in reversed(self._lines) if detail}
        counts = [f"{reason} {count}{details.get(reason, '')}" for (_, reason), count in self.rejected.items()]
        _log.warning("%s holds no document: %s", self._shard.place, ", ".join(counts))

    def _reject(self, item: Rejection) -> None:
        self.rejected[self._shard.name, item.reason] += 1
        if len(self._lines) < LINES_KEPT:
            self._lines.append((self._shard.name, item.line, item.reason, item.detail))


STAGE = Stage(
    name="raw_shards",
    description="Documents of the corpus, with the date their URL tells; a refused line is counted by reason.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "url": Column(pl.String(), "where the document was found, if the corpus says so"),
        "domain": Column(pl.String(), "domain of the URL"),
        "title": Column(pl.String(), "title of the page, if the corpus has one"),
        "date": Column(
            pl.Date(), "day in the URL, or the record's own where `corpus.fields` names it; null without one"
        ),
        "language": Column(pl.String(), "language by the corpus; null where it has none"),
        "text": Column(pl.String(), "the document"),
    },
    key=("shard", "digest"),
    settings=settings,
    reads=("ccnet/shard_list",),
    group="ccnet",
    inputs=inputs,
    beside=(REJECTED_LINES,),
    make=ByShard(rows),
    in_warehouse=InWarehouse("documents"),
    asset=StageAsset(refuses=unread_corpus),
)
