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
    RETRY_FIELD,
    SHARD,
    ByShard,
    Column,
    InputsFinder,
    InWarehouse,
    PartRows,
    RejectionCounts,
    Stage,
    StageAsset,
    TableOutput,
    UnusableRows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import build_record
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.columns import LATEST_DATE, Batch, Rejection
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

_log = logging.getLogger(__name__)
READER = 11
"""Raised when the same file would give other rows; a golden test notices where it was not."""
MAX_DESCRIBED_LINES = 1000
"""Rejected lines that are described, per shard; all are counted."""
CONTENT_HASH_FIELD = "content"
"""The field of a part's record that holds the hash of its file."""
TABLE_NAME = "ccnet/raw_shards"
"""The table of the documents."""
DOCUMENTS_PER_PLACE = 500
"""How many documents in a row share a `place` (`iter_documents`): what is computed for them is looked up together."""
REJECTED_LINES_TABLE = "ccnet/rejected_lines"
"""The table of lines that hold no document; it has the same parts as the table of documents."""
REJECTED_LINE_SCHEMA = pl.Schema(
    {"shard": pl.String(), "line": pl.Int64(), "reason": pl.String(), "detail": pl.String()}
)
"""Columns of REJECTED_LINES_TABLE.

`line` is the number of the line or row, from 1; 0 stands for the whole file. `detail` says what was found there.
"""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings on which the documents depend, apart from the files: how a record is read."""
    corpus = plan.settings.corpus
    return {
        "reader": READER,
        "latest_date": LATEST_DATE.isoformat(),
        **select_determining_settings(corpus, "format"),
        "fields": corpus.fields.model_dump(exclude_none=True),
    }


def inputs(output: TableOutput) -> InputsFinder:
    """Return a function from a shard to the values that change with its file.

    They are the size and time of the file, or the revision of a data set.
    """
    return partial(_read_shard_stamp, output.plan)


def _read_shard_stamp(plan: Plan, shard: str) -> Mapping[str, Any]:
    """Return the size and time of a shard's file, or its revision. A shard that the corpus no longer has gives {}."""
    if shard not in plan.shards_by_name:
        return {}
    return plan.shards_by_name[shard].read_stamp()


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Read the documents of a shard (a file of the corpus) in one pass, in at most 600 MB of memory.

    A malformed line is described in the table REJECTED_LINES_TABLE. A damaged or unreadable shard has no documents.

    Returns:
        The documents as lazy frames. `rejection_counts` and `record_fields` are filled while the frames are read.

    Raises:
        RottenShard: While the frames are read: a shard whose documents were used is damaged now.
    """
    _write_small_web_once(worker)  # if the settings name no corpus, the shards are files of this synthetic one

    # Its `facts` are fields of the shard's record, such as the hash of the file.
    reading = _ShardReading(worker.plan.shards_by_name[shard], choose_format(worker.plan))
    return PartRows(reading.iter_frames(output), rejection_counts=reading.rejected, record_fields=reading.facts)


def _write_small_web_once(worker: Worker) -> None:
    """Write the small synthetic web if the settings name no corpus and this worker has not written it yet."""
    settings = worker.plan.settings
    if not settings.corpus.has_source and not worker.has_small_web:
        write_small_web(settings)
        worker.has_small_web = True


def choose_format(plan: Plan) -> FormatChoice:
    """Return the format of the shards and the names of their fields, as far as the settings name them."""
    corpus = plan.settings.corpus
    fields = corpus.fields.model_dump(exclude_none=True)
    return FormatChoice(corpus.format, tuple(fields.items()))


def iter_documents(plan: Plan, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard in their order, in batches.

    Yields:
        Frames with the columns of STAGE and `place`, which names a group of DOCUMENTS_PER_PLACE neighbors. The second
        group of the shard head_0.gz is "head_0.gz/1". What is computed for a group is stored and looked up together.

    Raises:
        MissingPart: The shard was not read yet.
        DamagedPart: The stored documents of the shard cannot be read.
    """
    documents_before_batch = 0
    for batch in plan.lake.get_table(TABLE_NAME).iter_frames(shard):
        document_number = pl.int_range(pl.len()) + documents_before_batch
        place_number = document_number // DOCUMENTS_PER_PLACE
        yield batch.with_columns(place=pl.format("{}/{}", pl.lit(shard), place_number))

        documents_before_batch += batch.height


class UnreadCorpus(UserError):
    """A corpus without a document. The message names a shard, and why nothing was read from it."""


def explain_empty_corpus(plan: Plan) -> str | None:
    """Return why a corpus has no document at all: the file of its first shard, and why lines of it were rejected.

    Returns:
        A message. None if some shard has a document, or if no shard was read yet.

    Raises:
        DamagedPart: A stored part cannot be read.
    """
    pointer_by_shard = plan.lake.get_table(TABLE_NAME).read_pointers_by_part()
    has_document = any(pointer.row_count for pointer in pointer_by_shard.values())
    if has_document or not pointer_by_shard:
        return None

    first_shard = min(pointer_by_shard)
    location = _get_shard_location(plan, first_shard)
    more_count = len(pointer_by_shard) - 1
    more_shards = f" (and {more_count} more shards)" if more_count > 0 else ""
    reasons = _describe_first_rejections(plan, first_shard)
    return f"no document could be read from {location}{more_shards}: {reasons}"


def _get_shard_location(plan: Plan, shard: str) -> str:
    """Return the path or address of a shard's file, or the shard's name if the corpus no longer has it."""
    if shard not in plan.shards_by_name:
        return shard
    return plan.shards_by_name[shard].location


def _describe_first_rejections(plan: Plan, shard: str) -> str:
    """Return why lines of a shard were rejected, with the detail of the first line for each reason.

    For example "no_text: the record has no field 'text'". A shard without rejected lines gives "it is empty".
    """
    table = plan.lake.get_table(REJECTED_LINES_TABLE)
    if not table.has_part(shard):
        return "it is empty"
    first_lines = table.read_part(shard).unique("reason", keep="first", maintain_order=True)
    reasons_and_details = first_lines.select("reason", "detail").iter_rows()
    descriptions = [f"{reason}: {detail}" for reason, detail in reasons_and_details]
    return "; ".join(descriptions) or "it is empty"


def find_empty_corpus_error(output: TableOutput) -> UnreadCorpus | None:
    """Return the error for a corpus that was read and has no document, or None if it has one.

    Without a document, no later stage would find anything.
    """
    reason = explain_empty_corpus(output.plan)
    return UnreadCorpus(reason) if reason else None


class RottenShard(UserError):
    """A shard whose documents were used, and that can no longer be read to its end."""

    def __init__(self, shard: Shard, earlier_part: Pointer, reason: str) -> None:
        """Write the message, which says what happened and what to do.

        Args:
            earlier_part: The documents that an earlier run read from the shard.
            reason: Why the shard can no longer be used.
        """
        super().__init__(
            f"{shard.location} was whole when its {earlier_part.row_count:,} documents were read, and is not any more: "
            f"{reason}; restore the file and run again, or go on without its documents: move it away, or "
            f"`toolformer-dag run --again {shard.name}`"
        )


class RejectedLine(NamedTuple):
    """A line or row of a shard that holds no document: a row of REJECTED_LINES_TABLE (see REJECTED_LINE_SCHEMA)."""

    shard: str
    line: int
    reason: str
    detail: str


class _ShardReading:
    """One pass over the file of a shard: `iter_frames` yields its documents, and fills the attributes meanwhile.

    Attributes:
        rejected: How many lines and rows hold no document, by (shard, reason). Complete after the last frame.
        facts: Fields of the shard's record, such as the hash of the file and its format. Complete after the last frame.
    """

    def __init__(self, shard: Shard, format_choice: FormatChoice) -> None:
        self.rejected: RejectionCounts = Counter()
        self.facts: dict[str, Any] = {}
        self._shard = shard
        self._format_choice = format_choice
        # The first MAX_DESCRIBED_LINES of the rejections.
        self._rejected_lines: list[RejectedLine] = []
        # How often a field held something other than text, by the message that says so.
        self._ignored_field_counts: Counter[str] = Counter()

    def iter_frames(self, output: TableOutput) -> Iterator[pl.DataFrame]:
        """Yield the documents of the shard, then publish its rejected lines (those that hold no document).

        These become a part of REJECTED_LINES_TABLE.

        Args:
            output: The table of documents, where an earlier run may have published this shard.

        Raises:
            UnusableRows: After the last frame: the file is damaged or unreadable.
            RottenShard: An earlier run used documents of the file, and it is damaged, unreadable or silently changed.
        """
        columns = output.stage.schema.names()
        earlier_part = output.table.find_checked_pointer(self._shard.name)

        try:
            self.facts |= self._shard.build_record_fields()
            self._refuse_changed_content(earlier_part)
            for frame in self._iter_documents():
                yield frame.select(columns)
        except (ShardFault, ShardError) as error:  # damaged, or unreadable
            self._refuse_lost_documents(earlier_part, error)
            # One rejection of the whole shard replaces the rejections of its lines.
            self._reject_shard(error)
            self._publish_rejected_lines(output)
            raise UnusableRows from error

        self._publish_rejected_lines(output)

    def _publish_rejected_lines(self, output: TableOutput) -> None:
        """Publish the rejected lines of the shard (those that hold no document) as its part of REJECTED_LINES_TABLE.

        Args:
            output: The table of documents. Its settings and inputs go into the record of the part, which says what the
                lines were read from.
        """
        shard = self._shard.name
        lines = pl.DataFrame(self._rejected_lines, schema=REJECTED_LINE_SCHEMA, orient="row")

        def build_lines_record() -> dict[str, Any]:
            find_inputs = output.build_inputs_finder()
            return build_record(output.settings, find_inputs(shard))

        rejected_lines_table = output.plan.lake.get_table(REJECTED_LINES_TABLE)
        rejected_lines_table.publish(shard, [lines], build_lines_record)

    def _iter_documents(self) -> Iterator[pl.DataFrame]:
        """Yield the documents of the file, then warn if it has none, or if fields of them were ignored.

        Raises:
            ShardFault: The content of the file is damaged.
            ShardError: The file cannot be read.
        """
        document_count = 0
        for batch in self._shard.iter_batches(self._format_choice):
            self._count_batch_rejections(batch)
            document_count += batch.frame.height
            yield batch.frame.with_columns(shard=pl.lit(self._shard.name))

        if document_count == 0:
            self._warn_of_empty_shard()
        if self._ignored_field_counts:
            self._warn_of_ignored_fields()

    def _count_batch_rejections(self, batch: Batch) -> None:
        """Note the format of a batch of documents, its rejections, and its fields that held no text."""
        self.facts["format"] = batch.layout.format_name
        for rejection in batch.rejections:
            self._add_rejection(rejection)
        self._ignored_field_counts.update(batch.ignored_value_counts)

    def _warn_of_ignored_fields(self) -> None:
        """Log which fields held something other than text, and how often."""
        summary = "; ".join(f"{message} ({count:,} times)" for message, count in self._ignored_field_counts.items())
        _log.warning("%s: what counts as empty: %s", self._shard.location, summary)

    def _refuse_changed_content(self, earlier_part: Pointer | None) -> None:
        """Check that the content of the file did not change while its size and time stayed.

        Raises:
            RottenShard: The file has other content than in the last run, but the same size and time.
        """
        if earlier_part is None:
            return
        if earlier_part.record["inputs"] != self._shard.read_stamp():
            return  # an open change of the file, after which it is simply read again

        earlier_hash = earlier_part.record.get(CONTENT_HASH_FIELD)
        current_hash = self.facts.get(CONTENT_HASH_FIELD)
        if earlier_hash and earlier_hash != current_hash:
            raise RottenShard(self._shard, earlier_part, "its content changed, its size and time did not")

    def _refuse_lost_documents(self, earlier_part: Pointer | None, error: ShardFault | ShardError) -> None:
        """Raise RottenShard if an earlier run read documents of the file, which cannot be read any more.

        Args:
            earlier_part: What an earlier run read from the file. None if it read nothing.
            error: Why the file cannot be read now.
        """
        if earlier_part is not None and earlier_part.row_count:
            raise RottenShard(self._shard, earlier_part, str(error)) from error

    def _reject_shard(self, error: ShardFault | ShardError) -> None:
        """Reject the whole shard after an error: a single rejection replaces the rejections of its lines.

        A ShardFault (damaged content) has its own reason. After a ShardError (unreadable) the next run tries again.
        """
        self.rejected.clear()
        self._rejected_lines.clear()

        if isinstance(error, ShardFault):
            reason = error.reason
        else:
            reason = "unreadable"
            # This field makes the next run try again.
            self.facts[RETRY_FIELD] = f"{self._shard.name} could not be read: {error}"

        self._add_rejection(Rejection(line_number=0, reason=reason, detail=str(error)))
        self._warn_of_empty_shard()

    def _warn_of_empty_shard(self) -> None:
        """Log that the shard holds no document: how many lines have each reason, and the first detail of each."""
        first_detail_by_reason: dict[str, str] = {}
        for line in self._rejected_lines:
            if line.detail:
                first_detail_by_reason.setdefault(line.reason, f" ({line.detail})")

        counts = []
        for (_, reason), count in self.rejected.items():
            first_detail = first_detail_by_reason.get(reason, "")
            counts.append(f"{reason} {count}{first_detail}")

        _log.warning("%s holds no document: %s", self._shard.location, ", ".join(counts))

    def _add_rejection(self, rejection: Rejection) -> None:
        """Count a rejection. The first MAX_DESCRIBED_LINES also become rows of REJECTED_LINES_TABLE."""
        shard = self._shard.name
        self.rejected[shard, rejection.reason] += 1
        if len(self._rejected_lines) < MAX_DESCRIBED_LINES:
            line = RejectedLine(
                shard=shard, line=rejection.line_number, reason=rejection.reason, detail=rejection.detail
            )
            self._rejected_lines.append(line)


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
    key_columns=("shard", "digest"),
    collect_settings=settings,
    reads=("ccnet/shard_list",),
    group="ccnet",
    inputs=inputs,
    sibling_table_names=(REJECTED_LINES_TABLE,),
    row_maker=ByShard(rows),
    warehouse_form=InWarehouse("documents", keeps_places=True),
    asset=StageAsset(find_fatal_error=find_empty_corpus_error),
)
