"""traces/conversations: the recorded conversations of a shard, and the records that could not be used."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.conversation_shards import Source
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import (
    RETRY_FIELD,
    ByShard,
    Column,
    InputsFinder,
    PartRows,
    RejectionCounts,
    Stage,
    TableOutput,
    UnusableRows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.conversations.reading import ReadConversation, read_conversations
from toolformer_dag.lake.record import build_record
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.record_files import NumberedRecord
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.traces.row_batches import RowBatch
from toolformer_dag.traces.stored_messages import compute_conversation_digest, messages_as_json, parse_messages

UNKNOWN_FORM = "unknown_form"
"""The reason for a record from which no conversation could be read."""
READER = 4
"""A version number, raised when the same file would give other rows; a golden test notices if it was not raised."""
TABLE_NAME = "traces/conversations"
"""The table of the conversations."""
REJECTED_RECORDS_TABLE_NAME = "traces/rejected_records"
"""The table that describes what could not be used; it has a part for each shard of the conversations."""
MAX_DESCRIBED_REJECTIONS = 10_000
"""The maximum number of rejections of a shard that are described; all are counted."""
MAX_CONVERSATIONS_PER_FRAME = 500
"""The maximum number of conversations of a frame."""
MAX_CHARACTERS_PER_FRAME = 1 << 23
"""About the maximum number of characters of the messages of a frame."""
SHARD_COLUMN = Column(pl.String(), "name of the shard: of its file with a hash of the path, or of a group of files")
CONVERSATION_COLUMN = Column(pl.String(), "file or split, and line or row, as in traces.jsonl:12")


class RejectedRecord(NamedTuple):
    """A record, a part of it or a whole file that could not be used, as a row of the table of rejected records.

    Attributes:
        conversation: the name of the conversation or line, as traces.jsonl:12, or of the file.
        record_id: the record's own id; None if it has none.
        source: the name of the file or split.
        reason: why it could not be used, a fixed word such as unknown_form.
        detail: the same in a sentence.
    """

    conversation: str
    record_id: str | None
    source: str
    reason: str
    detail: str


class StoredConversation(NamedTuple):
    """A conversation as it was read from its table.

    Attributes:
        digest: a hash of its messages as JSON, without thoughts.
        messages: its messages, with thoughts, calls and results.
    """

    digest: str
    messages: tuple[RecordedMessage, ...]


def read_conversations_by_number(
    plan: Plan, shard: str, conversation_numbers: Collection[int]
) -> dict[int, StoredConversation]:
    """Return the conversations of a shard that have these numbers, by number. They are counted from 0 in the shard."""
    ascending_numbers = sorted(conversation_numbers)
    rows = read_rows_by_number(plan, TABLE_NAME, shard, pl.Series(ascending_numbers, dtype=pl.Int32))

    conversation_by_number = {}
    for number, row in zip(ascending_numbers, rows.iter_rows(named=True), strict=True):
        conversation_by_number[number] = StoredConversation(row["digest"], parse_messages(row["messages"]))
    return conversation_by_number


def read_rows_by_number(plan: Plan, table_name: str, shard: str, row_numbers: pl.Series) -> pl.DataFrame:
    """Return the rows of a shard of a table that have these numbers. Other rows are not held in memory.

    Example:
        For the rows a, b, c, d and the numbers 1 and 3 it returns b and d.

    Args:
        plan: The plan with the lake, the folder of all tables.
        table_name: The name of the table.
        shard: The name of the shard.
        row_numbers: The numbers, counted from 0 in the shard, ascending.
    """
    all_rows = plan.lake.get_table(table_name).scan_parts([shard])
    if row_numbers.is_empty():
        return all_rows.head(0).collect()

    first_number = int(row_numbers[0])
    last_number = int(row_numbers[-1])
    rows_between = all_rows.slice(first_number, last_number - first_number + 1)
    return rows_between.filter(_build_row_number_filter(row_numbers - first_number)).collect()


def _build_row_number_filter(row_numbers: pl.Series) -> pl.Expr:
    """Return an expression that is true for the rows of a frame with these numbers, counted from 0."""
    return pl.int_range(pl.len()).is_in(row_numbers.implode())


REJECTIONS_SCHEMA = pl.Schema(dict.fromkeys(RejectedRecord._fields, pl.String()))


def collect_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the rows, together with the files: the version of this reader."""
    return {"reader": READER}


def build_inputs_finder(output: TableOutput) -> InputsFinder:
    """Return a function that gives, for a shard, size and time of its files, by which a changed file is noticed.

    It gives {} for a shard whose files are gone.
    """
    shard_by_name = output.shards_by_name

    def read_shard_stamp(shard_name: str) -> Mapping[str, Any]:
        if shard_name not in shard_by_name:
            return {}
        return shard_by_name[shard_name].read_stamp()

    return read_shard_stamp


def make_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the conversations of a shard, a row each; its files are read once, while the frames are taken.

    What is rejected is counted by reason:

    - a damaged file, by what is wrong with it: none of its conversations is used
    - a file that cannot be read at all, as "unreadable": the next run tries it again
    - records and parts of records, by the reasons of `record_files` and `read_conversations`

    Memory: MAX_CONVERSATIONS_PER_FRAME conversations, or all of a file if the shard is a group of small files.
    """
    reading = _ShardReading(output, shard)
    return PartRows(reading.iter_frames(), reading.rejection_counts, record_fields=reading.record_fields)


class _ShardReading:
    """One pass over the files of a shard. Its attributes grow while `iter_frames` is taken.

    Attributes:
        rejection_counts: how many rejections there are, by (shard, reason).
        record_fields: what the record of the part keeps. It has RETRY_FIELD if a file could not be read, so that the
            next run tries again.
    """

    def __init__(self, output: TableOutput, shard_name: str) -> None:
        self.rejection_counts: RejectionCounts = Counter()
        self.record_fields: dict[str, Any] = {}
        self._output = output
        self._shard_name = shard_name
        self._described_rejections: list[RejectedRecord] = []  # at most MAX_DESCRIBED_REJECTIONS

    def iter_frames(self) -> Iterator[pl.DataFrame]:
        """Yield the conversations of the shard in frames, and publish its rejections at the end.

        That a file is damaged may only show at its end. What happens then depends on the shard:

        - a group of small files: the frames of each file are held back to its end; those of a damaged file are left out
        - a single file: its frames are yielded while it is read; at the end none of them may be used

        Raises:
            UnusableRows: The single file of the shard is damaged or cannot be read.
        """
        shard = self._output.plan.conversation_shards_by_name[self._shard_name]
        frames_are_usable = True
        for file in shard.iter_sources():
            try:
                yield from self._iter_file_frames(file, waits_for_file_end=shard.is_group)
            except (ShardFault, ShardError) as error:
                self._reject_file(file, error)
                if not shard.is_group:
                    frames_are_usable = False

        self._publish_rejections()
        if not frames_are_usable:
            raise UnusableRows

    def _iter_file_frames(self, file: Source, *, waits_for_file_end: bool) -> Iterator[pl.DataFrame]:
        """Yield the conversations of a file in frames, then count its rejections.

        Args:
            file: The file.
            waits_for_file_end: Yield no frame before the whole file is read, so that of a damaged file there is none.

        Raises:
            ShardFault: The file is damaged.
            ShardError: The file cannot be read.
        """
        file_reading = FileReading(file)
        frames: Iterable[pl.DataFrame] = self._iter_conversation_frames(file_reading)
        if waits_for_file_end:
            frames = list(frames)
        yield from frames
        self._add_rejections(file_reading.count_by_reason, file_reading.described_rejections)

    def _iter_conversation_frames(self, file_reading: "FileReading") -> Iterator[pl.DataFrame]:
        """Yield the conversations of a file in frames, which end when their number or their text gets too large."""
        batch = RowBatch(MAX_CONVERSATIONS_PER_FRAME, MAX_CHARACTERS_PER_FRAME)
        for conversation in file_reading.iter_conversations():
            row = self._build_conversation_row(conversation, file_reading)
            batch.add_row(row, text=row["messages"])
            if batch.is_full:
                yield batch.take_frame(self._output.stage.schema)
        if batch.rows:
            yield batch.take_frame(self._output.stage.schema)

    def _build_conversation_row(self, conversation: ReadConversation, file_reading: "FileReading") -> dict[str, Any]:
        """Return the row of a conversation of a file."""
        messages_json = messages_as_json(conversation.messages)
        return {
            "shard": self._shard_name,
            "conversation": file_reading.format_conversation_name(conversation),
            "source": file_reading.source.name,
            "record_id": conversation.record_id,
            "form": conversation.form_name,
            "digest": compute_conversation_digest(conversation.messages, messages_json),
            "messages": messages_json,
        }

    def _reject_file(self, file: Source, error: ShardFault | ShardError) -> None:
        """Add a rejection for a whole file.

        Args:
            file: The file.
            error: ShardFault if it is damaged, ShardError if it could not be read at all.
        """
        if isinstance(error, ShardFault):
            reason = error.reason
        else:
            reason = "unreadable"
            self.record_fields[RETRY_FIELD] = f"{file.name} could not be read: {error}"

        rejection = RejectedRecord(
            conversation=file.name, record_id=None, source=file.name, reason=reason, detail=str(error)
        )
        self._add_rejections(Counter([reason]), [rejection])

    def _add_rejections(self, count_by_reason: Counter[str], described_rejections: list[RejectedRecord]) -> None:
        """Add the rejections of a file to those of the shard.

        Args:
            count_by_reason: How many there are.
            described_rejections: The first of them, as rows. Of all files at most MAX_DESCRIBED_REJECTIONS are kept.
        """
        for reason, count in count_by_reason.items():
            self.rejection_counts[self._shard_name, reason] += count

        free_count = MAX_DESCRIBED_REJECTIONS - len(self._described_rejections)
        self._described_rejections += described_rejections[:free_count]

    def _publish_rejections(self) -> None:
        """Replace the shard's part of the table of rejected records by the rejections of this pass."""
        rejections = pl.DataFrame(self._described_rejections, schema=REJECTIONS_SCHEMA, orient="row")
        table = self._output.plan.lake.get_table(REJECTED_RECORDS_TABLE_NAME)
        table.publish(self._shard_name, [rejections], self._build_rejections_record)

    def _build_rejections_record(self) -> Mapping[str, Any]:
        """Return the record that is published with the rejections: the settings, and the stamp of the shard's files."""
        find_inputs = self._output.build_inputs_finder()
        return build_record(self._output.settings, find_inputs(self._shard_name))


class FileReading:
    """One pass over a file of conversations. Its attributes grow while `iter_conversations` is taken.

    Attributes:
        source: the file.
        count_by_reason: how many rejections there are, by reason.
        described_rejections: the first MAX_DESCRIBED_REJECTIONS rejections, as rows.
        record_by_number: the records by number, from the one on that the last conversation was read from; empty unless
            `iter_conversations` keeps them.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.count_by_reason: Counter[str] = Counter()
        self.described_rejections: list[RejectedRecord] = []
        self.record_by_number: dict[int, Any] = {}

    def iter_conversations(self, keeps_records: bool = False) -> Iterator[ReadConversation]:
        """Yield the conversations of the file in their order, except records of an unknown form.

        The faults of a conversation are counted in `count_by_reason` and described in `described_rejections`. A
        conversation with other faults than an unknown form is still yielded.

        Args:
            keeps_records: Whether `record_by_number` holds the record of a conversation until the next one is taken.

        Raises:
            ShardFault: The file is damaged.
            ShardError: The file cannot be read.
        """
        for conversation in read_conversations(self._iter_records(keeps_records)):
            name = self.format_conversation_name(conversation)
            has_known_form = True
            for reason, detail in conversation.faults:
                self._add_rejection(RejectedRecord(name, conversation.record_id, self.source.name, reason, detail))
                if reason == UNKNOWN_FORM:
                    has_known_form = False

            self._forget_records_before(conversation.first_record_number)
            if has_known_form:
                yield conversation

    def _forget_records_before(self, first_kept_number: int) -> None:
        """Drop the records with smaller numbers, so that memory stays bounded."""
        earlier_numbers = [number for number in self.record_by_number if number < first_kept_number]
        for number in earlier_numbers:
            del self.record_by_number[number]

    def format_conversation_name(self, conversation: ReadConversation) -> str:
        """Return the name of a conversation, such as traces.jsonl:12; of several in one record traces.jsonl:12.1."""
        suffix = f".{conversation.index_in_record}" if conversation.index_in_record else ""
        return f"{self.source.name}:{conversation.first_record_number}{suffix}"

    def _iter_records(self, keeps_records: bool) -> Iterator[NumberedRecord]:
        """Yield the records of the file; lines that are no record are counted and described as rejections."""
        for record_or_rejection in self.source.records:
            if isinstance(record_or_rejection, Rejection):
                self._reject_line(record_or_rejection)
                continue
            if keeps_records:
                self.record_by_number[record_or_rejection.number] = record_or_rejection.value
            yield record_or_rejection

    def _reject_line(self, rejection: Rejection) -> None:
        """Count and describe a line of the file that is no record."""
        self._add_rejection(
            RejectedRecord(
                conversation=f"{self.source.name}:{rejection.line_number}",
                record_id=None,
                source=self.source.name,
                reason=rejection.reason,
                detail=rejection.detail,
            )
        )

    def _add_rejection(self, rejection: RejectedRecord) -> None:
        """Count a rejection, and keep it as a row too if fewer than MAX_DESCRIBED_REJECTIONS are kept."""
        self.count_by_reason[rejection.reason] += 1
        if len(self.described_rejections) < MAX_DESCRIBED_REJECTIONS:
            self.described_rejections.append(rejection)


STAGE = Stage(
    name="conversations",
    description="Recorded conversations with their tool calls; what could not be used is counted by reason.",
    columns={
        "shard": SHARD_COLUMN,
        "conversation": CONVERSATION_COLUMN,
        "source": Column(pl.String(), "file or split"),
        "record_id": Column(pl.String(), "the record's own id; null where it has none"),
        "form": Column(pl.String(), "form of the record"),
        "digest": Column(pl.String(), "hash of the messages, without thoughts"),
        "messages": Column(pl.String(), "messages with thoughts, calls and results, as JSON"),
    },
    key_columns=("conversation",),
    collect_settings=collect_settings,
    shards=lambda plan: plan.conversation_shards_by_name,
    shared=True,
    group="traces",
    inputs=build_inputs_finder,
    sibling_table_names=(REJECTED_RECORDS_TABLE_NAME,),
    row_maker=ByShard(make_rows),
)
