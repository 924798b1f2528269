"""traces/conversations: the recorded conversations of a shard, and the records that could not be used."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.conversation_shards import Source
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import (
    RETRY,
    ByShard,
    Column,
    InputsOf,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
    UnusableRows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.conversations.reading import ReadConversation, read_conversations
from toolformer_dag.lake.record import record
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.record_files import NumberedRecord
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.traces.row_batches import RowBatch
from toolformer_dag.traces.stored_messages import compute_conversation_digest, messages_as_json, messages_of

UNKNOWN_FORM = "unknown_form"
"""The reason for a record from which no conversation could be read."""
READER = 4
"""A version number, raised when the same file would give other rows; a golden test notices if it was not raised."""
NAME = "traces/conversations"
"""The table of the conversations."""
REJECTED_RECORDS = "traces/rejected_records"
"""The table that describes what could not be used; it has a part for each shard of the conversations."""
DESCRIBED = 10_000
"""The maximum number of rejections of a shard that are described; all are counted."""
BATCH = 500
"""The maximum number of conversations of a frame."""
BATCH_CHARACTERS = 1 << 23
"""About the maximum number of characters of the messages of a frame."""
SHARD = Column(pl.String(), "name of the shard: of its file with a hash of the path, or of a group of files")
CONVERSATION = Column(pl.String(), "file or split, and line or row, as in traces.jsonl:12")


class RejectedRecord(NamedTuple):
    """A row of REJECTED_RECORDS: a record, a part of it or a whole file that could not be used.

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


def read_conversations_by_number(plan: Plan, shard: str, numbers: Collection[int]) -> dict[int, StoredConversation]:
    """Return the conversations of a shard that have these numbers, counted from 0 in the shard, by number."""
    ascending = sorted(numbers)
    stored = read_rows_by_number(plan, NAME, shard, pl.Series(ascending, dtype=pl.Int32))
    conversations = {}
    for number, row in zip(ascending, stored.iter_rows(named=True), strict=True):
        conversations[number] = StoredConversation(row["digest"], messages_of(row["messages"]))
    return conversations


def read_rows_by_number(plan: Plan, table: str, shard: str, numbers: pl.Series) -> pl.DataFrame:
    """Return the rows of a shard of a table that have these numbers, as b and d of a, b, c, d for [1, 3].

    numbers: counted from 0 in the shard, ascending. Other rows are not held in memory.
    """
    rows = plan.lake.table(table).scan([shard])
    if numbers.is_empty():
        return rows.head(0).collect()
    first = int(numbers[0])
    last = int(numbers[-1])
    count = last - first + 1
    return rows.slice(first, count).filter(_has_row_number(numbers - first)).collect()


def _has_row_number(numbers: pl.Series) -> pl.Expr:
    """Return an expression that is true for the rows of a frame with these numbers, counted from 0."""
    return pl.int_range(pl.len()).is_in(numbers.implode())


REJECTIONS_SCHEMA = pl.Schema(dict.fromkeys(RejectedRecord._fields, pl.String()))


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the rows, together with the files: the version of this reader."""
    return {"reader": READER}


def inputs(output: TableOutput) -> InputsOf:
    """Return a function that gives, for a shard, size and time of its files, by which a changed file is noticed.

    It gives {} for a shard whose files are gone.
    """
    shards = output.shards

    def inputs_of_shard(shard: str) -> Mapping[str, Any]:
        if shard not in shards:
            return {}
        return shards[shard].stamp()

    return inputs_of_shard


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the conversations of a shard, a row each; its files are read once, while the frames are taken.

    What is rejected is counted by reason:

    - a damaged file, by what is wrong with it: none of its conversations is used
    - a file that cannot be read at all, as `unreadable`: the next run tries it again
    - records and parts of records, by the reasons of `file_records` and `read_conversations`

    Memory: BATCH conversations, or all of a file if the shard is a group of small files.
    """
    reading = _ShardReading(output, shard)
    return PartRows(reading.frames(), reading.rejected, facts=reading.facts)


class _ShardReading:
    """One pass over the files of a shard. State: what grows while `frames` is taken, and is complete at its end.

    Attributes:
        rejected: how many rejections there are, by (shard, reason).
        facts: what the record of the part keeps; RETRY if a file could not be read, so that the next run tries again.
    """

    def __init__(self, output: TableOutput, shard: str) -> None:
        self.rejected: Rejected = Counter()
        self.facts: dict[str, Any] = {}
        self._output = output
        self._shard = shard
        self._described: list[RejectedRecord] = []  # the first DESCRIBED of the rejections

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yield the conversations of the shard; at the end publish its rejections as the table REJECTED_RECORDS.

        That a file is damaged may only show at its end. What happens then depends on the shard:

        - a group of small files: the frames of each file are held back to its end; those of a damaged file are left out
        - a single file: its frames are yielded while it is read; at the end UnusableRows is raised, so that none of
          them is used
        """
        shard = self._output.plan.conversations[self._shard]
        frames_are_usable = True
        for file in shard.files():
            try:
                yield from self._iter_file_frames(file, hold=shard.is_group)
            except (ShardFault, ShardError) as error:
                self._reject_file(file, error)
                if not shard.is_group:
                    frames_are_usable = False
        self._publish_rejections()
        if not frames_are_usable:
            raise UnusableRows

    def _iter_file_frames(self, file: Source, *, hold: bool) -> Iterator[pl.DataFrame]:
        """Yield the conversations of a file, then count its rejections. hold: yield none before the file is read."""
        reading = FileReading(file)
        frames = self._iter_frames(reading)
        yield from list(frames) if hold else frames
        self._reject(reading.counts, reading.described)

    def _iter_frames(self, reading: "FileReading") -> Iterator[pl.DataFrame]:
        """Yield the conversations of a file in frames of at most BATCH, and about BATCH_CHARACTERS characters."""
        batch = RowBatch(BATCH, BATCH_CHARACTERS)
        for conversation in reading.conversations():
            row = self._build_row(conversation, reading)
            batch.add(row, text=row["messages"])
            if batch.is_full:
                yield batch.take(self._output.stage.schema)
        if batch.rows:
            yield batch.take(self._output.stage.schema)

    def _build_row(self, conversation: ReadConversation, reading: "FileReading") -> dict[str, Any]:
        """Return the row of a conversation of a file."""
        messages = messages_as_json(conversation.messages)
        return {
            "shard": self._shard,
            "conversation": reading.name_of(conversation),
            "source": reading.source.name,
            "record_id": conversation.record_id,
            "form": conversation.form,
            "digest": compute_conversation_digest(conversation.messages, messages),
            "messages": messages,
        }

    def _reject_file(self, file: Source, error: ShardFault | ShardError) -> None:
        """Add a rejection for a whole file. ShardFault: it is damaged. ShardError: it could not be read at all."""
        if isinstance(error, ShardFault):
            reason = error.reason
        else:
            reason = "unreadable"
            self.facts[RETRY] = f"{file.name} could not be read: {error}"
        rejection = RejectedRecord(
            conversation=file.name, record_id=None, source=file.name, reason=reason, detail=str(error)
        )
        self._reject(Counter([reason]), [rejection])

    def _reject(self, counts: Counter[str], described: list[RejectedRecord]) -> None:
        """Add the rejections of a file. counts: by reason. described: the first of them, as rows."""
        for reason, count in counts.items():
            self.rejected[self._shard, reason] += count
        self._described += described[: DESCRIBED - len(self._described)]

    def _publish_rejections(self) -> None:
        """Replace the shard's part of REJECTED_RECORDS by the rejections of this pass."""
        output = self._output
        rejections = pl.DataFrame(self._described, schema=REJECTIONS_SCHEMA, orient="row")
        table = output.plan.lake.table(REJECTED_RECORDS)
        table.publish(self._shard, [rejections], lambda: record(output.settings, output.inputs_of()(self._shard)))


class FileReading:
    """One pass over a file. State: what grows while `conversations` is taken, and is complete at its end.

    Attributes:
        source: the file.
        counts: how many rejections there are, by reason.
        described: the first DESCRIBED rejections, as rows.
        records: the records by number, from the one on that the last conversation was read from; empty unless
            `conversations` keeps them.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.counts: Counter[str] = Counter()
        self.described: list[RejectedRecord] = []
        self.records: dict[int, Any] = {}

    def conversations(self, keeps_records: bool = False) -> Iterator[ReadConversation]:
        """Yield the conversations of the file in their order, except records of an unknown form.

        Faults are counted in `counts` and described in `described`; a conversation with other faults is still yielded.

        keeps_records: whether `records` holds the record of a conversation until the next one is taken. Raises
        ShardFault if the file is damaged, ShardError if it cannot be read.
        """
        for conversation in read_conversations(self._iter_records(keeps_records)):
            name = self.name_of(conversation)
            has_known_form = True
            for reason, detail in conversation.faults:
                self._reject(RejectedRecord(name, conversation.record_id, self.source.name, reason, detail))
                if reason == UNKNOWN_FORM:
                    has_known_form = False
            self._forget_records_before(conversation.number)
            if has_known_form:
                yield conversation

    def _forget_records_before(self, number: int) -> None:
        """Drop the records with smaller numbers, so that memory stays bounded."""
        earlier = [record_number for record_number in self.records if record_number < number]
        for earlier_number in earlier:
            del self.records[earlier_number]

    def name_of(self, conversation: ReadConversation) -> str:
        """Return the name of a conversation, such as traces.jsonl:12; of several in one record traces.jsonl:12.1."""
        part = f".{conversation.part}" if conversation.part else ""
        return f"{self.source.name}:{conversation.number}{part}"

    def _iter_records(self, keeps_records: bool) -> Iterator[NumberedRecord]:
        """Yield the records of the file; lines that are no record are counted and described as rejections."""
        for record_or_rejection in self.source.records:
            if isinstance(record_or_rejection, Rejection):
                self._reject_line(record_or_rejection)
                continue
            if keeps_records:
                self.records[record_or_rejection.number] = record_or_rejection.value
            yield record_or_rejection

    def _reject_line(self, rejection: Rejection) -> None:
        """Count and describe a line of the file that is no record."""
        self._reject(
            RejectedRecord(
                conversation=f"{self.source.name}:{rejection.line}",
                record_id=None,
                source=self.source.name,
                reason=rejection.reason,
                detail=rejection.detail,
            )
        )

    def _reject(self, rejection: RejectedRecord) -> None:
        """Count a rejection; keep it as a row too if fewer than DESCRIBED are kept."""
        self.counts[rejection.reason] += 1
        if len(self.described) < DESCRIBED:
            self.described.append(rejection)


STAGE = Stage(
    name="conversations",
    description="Recorded conversations with their tool calls; what could not be used is counted by reason.",
    columns={
        "shard": SHARD,
        "conversation": CONVERSATION,
        "source": Column(pl.String(), "file or split"),
        "record_id": Column(pl.String(), "the record's own id; null where it has none"),
        "form": Column(pl.String(), "form of the record"),
        "digest": Column(pl.String(), "hash of the messages, without thoughts"),
        "messages": Column(pl.String(), "messages with thoughts, calls and results, as JSON"),
    },
    key=("conversation",),
    settings=settings,
    shards=lambda plan: plan.conversations,
    shared=True,
    group="traces",
    inputs=inputs,
    beside=(REJECTED_RECORDS,),
    make=ByShard(rows),
)
