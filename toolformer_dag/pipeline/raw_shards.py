"""raw_shards: read the documents of the corpus, shard by shard, and count the lines that hold none."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

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
from toolformer_dag.texts.columns import LATEST_DATE, Batch, Rejection
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

_log = logging.getLogger(__name__)
READER = 11
"""Raised when the same file would give other rows; a golden test notices where it was not."""
MOST_DESCRIBED_LINES = 1000
"""Rejected lines that are described, per shard; all are counted."""
CONTENT = "content"
"""The field of a part's record that holds the hash of its file."""
NAME = "ccnet/raw_shards"
"""The table of the documents."""
DOCUMENTS_PER_PLACE = 500
"""How many documents in a row share a `place` (`documents`): what is computed for them is looked up together."""
REJECTED_LINES = "ccnet/rejected_lines"
"""The table of lines that hold no document; it has the same parts as the table of documents."""
REJECTED_LINE_COLUMNS = pl.Schema(
    {"shard": pl.String(), "line": pl.Int64(), "reason": pl.String(), "detail": pl.String()}
)
"""Columns of REJECTED_LINES. `line`: the line or row, from 1; 0 for the whole file. `detail`: what was found there."""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what the documents depend on, apart from the files: how a record is read."""
    corpus = plan.settings.corpus
    return {
        "reader": READER,
        "latest_date": LATEST_DATE.isoformat(),
        **determining(corpus, "format"),
        "fields": corpus.fields.model_dump(exclude_none=True),
    }


def inputs(output: TableOutput) -> InputsOf:
    """Return a function from a shard to what changes with its file: size and time, or the revision of a data set."""
    return partial(_read_stamp, output.plan)


def _read_stamp(plan: Plan, shard: str) -> Mapping[str, Any]:
    """Return the size and time of a shard, or its revision; empty for a shard that the corpus no longer has."""
    shards = plan.shards
    return shards[shard].stamp() if shard in shards else {}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Read the documents of a shard (a file of the corpus) in one pass, in at most 600 MB of memory.

    A malformed line is described in the table REJECTED_LINES. A damaged or unreadable shard has no documents.

    Raises RottenShard if a shard whose documents were used is damaged now.
    """
    _write_small_web_once(worker)
    reading = _Reading(worker.plan.shards[shard], choose_format(worker.plan))
    # The frames are lazy: `rejected` and `facts` are filled while they are read.
    return PartRows(reading.frames(output), rejected=reading.rejected, facts=reading.facts)


def _write_small_web_once(worker: Worker) -> None:
    """Write the small synthetic web, the corpus of settings that name none, unless this worker did."""
    settings = worker.plan.settings
    if not settings.corpus.named and not worker.has_small_web:
        write_small_web(settings)
        worker.has_small_web = True


def choose_format(plan: Plan) -> FormatChoice:
    """Return the format of shards and the names of their fields, as far as the settings name them."""
    corpus = plan.settings.corpus
    fields = corpus.fields.model_dump(exclude_none=True)
    return FormatChoice(corpus.format, tuple(fields.items()))


def documents(plan: Plan, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard in their order: the columns of STAGE, and `place`.

    DOCUMENTS_PER_PLACE documents in a row share a place, such as "head_0.gz/1", by which row stores are sorted.

    Raises MissingPart, DamagedPart.
    """
    documents_before = 0
    for batch in plan.lake.table(NAME).batches(shard):
        place_number = (pl.int_range(pl.len()) + documents_before) // DOCUMENTS_PER_PLACE
        yield batch.with_columns(place=pl.format("{}/{}", pl.lit(shard), place_number))
        documents_before += batch.height


class UnreadCorpus(UserError):
    """A corpus without a document. The message names a shard, and why nothing was read from it."""


def explain_empty_corpus(plan: Plan) -> str | None:
    """Return why a corpus has no document at all: the file of its first shard, and why lines of it were rejected.

    Returns None if some shard has a document, or if no shard was read yet. Raises DamagedPart.
    """
    parts = plan.lake.table(NAME).pointers()
    has_document = any(part.rows for part in parts.values())
    if has_document or not parts:
        return None
    first_shard = min(parts)
    file = _get_file_place(plan, first_shard)
    more = f" (and {len(parts) - 1} more shards)" if len(parts) > 1 else ""
    return f"no document could be read from {file}{more}: {_describe_first_rejections(plan, first_shard)}"


def _get_file_place(plan: Plan, shard: str) -> str:
    """Return where the file of a shard is; the shard's name if the corpus no longer has it."""
    return plan.shards[shard].place if shard in plan.shards else shard


def _describe_first_rejections(plan: Plan, shard: str) -> str:
    """Return why lines of a shard were rejected, with the detail of the first line for each reason.

    Such as "no_text: the record has no field 'text'"; "it is empty" without a rejected line.
    """
    table = plan.lake.table(REJECTED_LINES)
    if not table.has(shard):
        return "it is empty"
    first_lines = table.read(shard).unique("reason", keep="first", maintain_order=True)
    details = [f"{reason}: {detail}" for reason, detail in first_lines.select("reason", "detail").iter_rows()]
    return "; ".join(details) or "it is empty"


def unread_corpus(output: TableOutput) -> UnreadCorpus | None:
    """Return the error for a corpus that was read and has no document: no later stage would find anything."""
    reason = explain_empty_corpus(output.plan)
    return UnreadCorpus(reason) if reason else None


class RottenShard(UserError):
    """A shard whose documents were used, and that can no longer be read to its end."""

    def __init__(self, shard: Shard, earlier_part: Pointer, reason: str) -> None:
        super().__init__(
            f"{shard.place} was whole when its {earlier_part.rows:,} documents were read, and is not any more: "
            f"{reason}; restore the file and run again, or go on without its documents: move it away, or "
            f"`toolformer-dag run --again {shard.name}`"
        )


class RejectedLine(NamedTuple):
    """A line or row that holds no document: a row of the table REJECTED_LINES (REJECTED_LINE_COLUMNS)."""

    shard: str
    line: int
    reason: str
    detail: str


class _Reading:
    """One pass over the file of a shard: `frames` yields its documents, and fills two more results.

    - `rejected`: lines and rows that hold no document, by (shard, reason)
    - `facts`: fields of the shard's record, such as the hash of the file and its format

    Both are complete after the last frame.
    """

    def __init__(self, shard: Shard, choice: FormatChoice) -> None:
        self.rejected: Rejected = Counter()
        self.facts: dict[str, Any] = {}
        self._shard = shard
        self._choice = choice
        self._lines: list[RejectedLine] = []  # the first MOST_DESCRIBED_LINES of the rejections
        self._ignored: Counter[str] = Counter()  # fields that hold no text: message -> how often

    def frames(self, output: TableOutput) -> Iterator[pl.DataFrame]:
        """Yield the documents of the shard; then publish its rejected lines as a part of the table REJECTED_LINES.

        output: the table of documents, where an earlier run may have published this shard.

        Raises UnusableRows after the last frame if the file is damaged, or RottenShard if an earlier run used documents
        of it.
        """
        columns = output.stage.schema.names()
        earlier_part = output.table.find_whole_pointer(self._shard.name)  # what an earlier run read
        try:
            self.facts |= self._shard.facts()
            self._refuse_changed_content(earlier_part)  # raises RottenShard if only the content changed
            for frame in self._iter_documents():
                yield frame.select(columns)
        except (ShardFault, ShardError) as error:  # damaged, or unreadable
            self._refuse_loss(earlier_part, error)  # raises RottenShard if an earlier run used documents
            self._reject_shard(error)  # one rejection of the shard replaces the rejections of its lines
            self._publish_lines(output)
            raise UnusableRows from error
        self._publish_lines(output)

    def _publish_lines(self, output: TableOutput) -> None:
        """Publish the rejected lines of the shard."""
        shard = self._shard.name
        lines = pl.DataFrame(self._lines, schema=REJECTED_LINE_COLUMNS, orient="row")
        table = output.plan.lake.table(REJECTED_LINES)
        table.publish(shard, [lines], lambda: record(output.settings, output.inputs_of()(shard)))

    def _iter_documents(self) -> Iterator[pl.DataFrame]:
        """Yield the documents of the file; warn at the end if it has none, or if fields of them were ignored.

        Raises ShardFault, ShardError.
        """
        document_count = 0
        for batch in self._shard.batches(self._choice):
            self._note_batch(batch)  # adds to `rejected`, and to `_ignored`: fields that hold no text
            document_count += batch.frame.height
            yield batch.frame.with_columns(shard=pl.lit(self._shard.name))
        if document_count == 0:
            self._warn_of_no_document()
        if self._ignored:
            self._warn_of_ignored_fields()

    def _note_batch(self, batch: Batch) -> None:
        """Note the format of a batch, its rejections and its ignored fields."""
        self.facts["format"] = batch.layout.format
        for rejection in batch.rejections:
            self._add_rejection(rejection)
        self._ignored.update(batch.ignored)

    def _warn_of_ignored_fields(self) -> None:
        """Log which fields held something else than text, and how often."""
        summary = "; ".join(f"{message} ({count:,} times)" for message, count in self._ignored.items())
        _log.warning("%s: what counts as empty: %s", self._shard.place, summary)

    def _refuse_changed_content(self, earlier_part: Pointer | None) -> None:
        """Raise RottenShard if the file has other content than in the last run, but the same size and time."""
        if earlier_part is None or earlier_part.record["inputs"] != self._shard.stamp():
            return
        content_before = earlier_part.record.get(CONTENT)
        if content_before and content_before != self.facts.get(CONTENT):
            raise RottenShard(self._shard, earlier_part, "its content changed, its size and time did not")

    def _refuse_loss(self, earlier_part: Pointer | None, error: ShardFault | ShardError) -> None:
        """Raise RottenShard if an earlier run read documents of the file, which cannot be read now."""
        if earlier_part is not None and earlier_part.rows:
            raise RottenShard(self._shard, earlier_part, str(error)) from error

    def _reject_shard(self, error: ShardFault | ShardError) -> None:
        """Reject the whole shard after an error: a single rejection replaces the rejections of its lines.

        A ShardFault (damaged content) has its own reason. After a ShardError (unreadable) the next run tries again.
        """
        self.rejected.clear()
        self._lines.clear()  # the descriptions of rejected lines
        if isinstance(error, ShardFault):
            reason = error.reason
        else:
            reason = "unreadable"
            self.facts[RETRY] = f"{self._shard.name} could not be read: {error}"  # makes the next run try again
        self._add_rejection(Rejection(line=0, reason=reason, detail=str(error)))
        self._warn_of_no_document()

    def _warn_of_no_document(self) -> None:
        """Log that the shard holds no document: how many lines have each reason, and the first detail of each."""
        first_details: dict[str, str] = {}
        for line in self._lines:
            if line.detail:
                first_details.setdefault(line.reason, f" ({line.detail})")
        counts = [f"{reason} {count}{first_details.get(reason, '')}" for (_, reason), count in self.rejected.items()]
        _log.warning("%s holds no document: %s", self._shard.place, ", ".join(counts))

    def _add_rejection(self, rejection: Rejection) -> None:
        """Count a rejection; the first MOST_DESCRIBED_LINES also become rows of the table REJECTED_LINES."""
        shard = self._shard.name
        self.rejected[shard, rejection.reason] += 1
        if len(self._lines) < MOST_DESCRIBED_LINES:
            line = RejectedLine(shard=shard, line=rejection.line, reason=rejection.reason, detail=rejection.detail)
            self._lines.append(line)


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
    in_warehouse=InWarehouse("documents", keeps_places=True),
    asset=StageAsset(refuses=unread_corpus),
)
