"""traces/conversations: the recorded conversations of a shard, and what of its records could not be used."""

from collections import Counter
from collections.abc import Iterator, Mapping
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
from toolformer_dag.traces.stored_messages import messages_as_json, messages_of, text_digest

UNKNOWN_FORM = "unknown_form"
"""The fault of a record from which no conversation was read."""
READER = 2
"""Raised when the same file would give other rows; a golden test notices where it was not."""
NAME = "traces/conversations"
"""The table of the conversations."""
REJECTED_RECORDS = "traces/rejected_records"
"""The table, part for part beside that of the conversations, that describes what could not be used."""
DESCRIBED = 10_000
"""Rejections that are described, per shard; all are counted."""
BATCH = 500
"""The most conversations of a frame."""
BATCH_CHARACTERS = 1 << 23
"""About the most characters of the messages of a frame."""
SHARD = Column(pl.String(), "name of the shard: of its file with a hash of the path, or of a group of files")
CONVERSATION = Column(pl.String(), "file or split, and line or row, as in traces.jsonl:12")


class RejectedRecord(NamedTuple):
    """What of a record could not be used as it was recorded: a row of REJECTED_RECORDS."""

    conversation: str
    record_id: str | None
    source: str
    reason: str
    detail: str


class StoredConversation(NamedTuple):
    """The messages of a conversation, and the hash of how they are stored."""

    digest: str
    messages: tuple[RecordedMessage, ...]


def conversations_by_number(plan: Plan, shard: str, numbers: pl.Series) -> dict[int, StoredConversation]:
    """Read the conversations with these numbers from a shard; return them by number.

    numbers: of conversations in the shard, from 0, ascending.
    """
    stored = rows_by_number(plan, NAME, shard, numbers)["messages"]
    conversations = {}
    for number, messages in zip(numbers.to_list(), stored.to_list(), strict=True):
        conversations[number] = StoredConversation(text_digest(messages), messages_of(messages))
    return conversations


def rows_by_number(plan: Plan, table: str, shard: str, numbers: pl.Series) -> pl.DataFrame:
    """Return the rows with these numbers of a shard of a table; no others are held in memory.

    numbers: of rows in the shard, from 0, ascending. As an example, of the rows a, b, c, d the numbers 1 and 3 give
    b and d.
    """
    rows = plan.lake.table(table).scan([shard])
    if numbers.is_empty():
        return rows.head(0).collect()
    first = int(numbers[0])
    last = int(numbers[-1])
    from_first_to_last = rows.slice(first, last - first + 1)
    number_of_row = first + pl.int_range(pl.len())
    is_wanted = number_of_row.is_in(numbers.implode())
    return from_first_to_last.filter(is_wanted).collect()


REJECTIONS_SCHEMA = pl.Schema(dict.fromkeys(RejectedRecord._fields, pl.String()))


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the files' content."""
    return {"reader": READER}


def inputs(output: TableOutput) -> InputsOf:
    """Return a function from a shard to what tells that its files changed, such as size and time.

    A shard whose files are gone has no inputs.
    """
    shards = output.shards

    def inputs_of_shard(shard: str) -> Mapping[str, Any]:
        if shard not in shards:
            return {}
        return shards[shard].stamp()

    return inputs_of_shard


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Read a shard in one pass.

    Of a damaged file no conversation is used, which its checksums may tell only at its end; it is one rejection. Other
    files of the shard are used. A file that cannot be read at all is the rejection `unreadable`, and the next run tries
    it again. Reasons beside those: of `file_records` and of `read_conversations`.

    Memory: BATCH conversations, and of a group of small files a file.
    """
    reading = _ShardReading(output, shard)
    return PartRows(reading.frames(), reading.rejected, facts=reading.facts)


class _ShardReading:
    """One pass over a shard. `rejected` and `facts` grow with `frames` and are complete when it is used up."""

    def __init__(self, output: TableOutput, shard: str) -> None:
        self.rejected: Rejected = Counter()
        self.facts: dict[str, Any] = {}
        self._output = output
        self._shard = shard
        self._described: list[RejectedRecord] = []  # the first DESCRIBED of the rejections

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yield the conversations; at the end publish the rejections as a table beside theirs.

        Raises UnusableRows after the last frame where the only file of the shard is damaged.
        """
        shard = self._output.plan.conversations[self._shard]
        is_usable = True  # unless the shard is one file, and that is damaged
        for file in shard.files():
            reading = FileReading(file)
            try:
                if shard.is_group:  # its small files are held, so that one of them may be left out
                    yield from list(self._frames(reading))
                else:
                    yield from self._frames(reading)
                self._reject(reading.counts, reading.described)
            except (ShardFault, ShardError) as error:
                is_usable = shard.is_group
                rejection = self._whole_file(file, error)
                self._reject(Counter([rejection.reason]), [rejection])
        self._publish_rejections()
        if not is_usable:
            raise UnusableRows

    def _frames(self, reading: "FileReading") -> Iterator[pl.DataFrame]:
        """Yield the conversations of a file in frames of at most BATCH, and about BATCH_CHARACTERS characters."""
        batch: list[dict[str, Any]] = []
        characters = 0
        for conversation in reading.conversations():
            messages = messages_as_json(conversation.messages)
            row = {
                "shard": self._shard,
                "conversation": reading.name_of(conversation),
                "source": reading.source.name,
                "record_id": conversation.record_id,
                "form": conversation.form,
                "digest": text_digest(messages),
                "messages": messages,
            }
            batch.append(row)
            characters += len(messages)
            if len(batch) == BATCH or characters >= BATCH_CHARACTERS:
                yield pl.DataFrame(batch, schema=self._output.stage.schema)
                batch = []
                characters = 0
        if batch:
            yield pl.DataFrame(batch, schema=self._output.stage.schema)

    def _whole_file(self, file: Source, error: ShardFault | ShardError) -> RejectedRecord:
        """Return the rejection of a file; where it could not be read at all, the next run tries it again."""
        reason = error.reason if isinstance(error, ShardFault) else "unreadable"
        if isinstance(error, ShardError):
            self.facts[RETRY] = f"{file.name} could not be read: {error}"
        return RejectedRecord(file.name, None, file.name, reason, str(error))

    def _reject(self, counts: Counter[str], described: list[RejectedRecord]) -> None:
        """Add what was rejected of a file. described: the first of it."""
        for reason, count in counts.items():
            self.rejected[self._shard, reason] += count
        self._described += described[: DESCRIBED - len(self._described)]

    def _publish_rejections(self) -> None:
        output = self._output
        rejections = pl.DataFrame(self._described, schema=REJECTIONS_SCHEMA, orient="row")
        table = output.plan.lake.table(REJECTED_RECORDS)
        table.publish(self._shard, [rejections], lambda: record(output.settings, output.inputs_of()(self._shard)))


class FileReading:
    """One pass over a file. `counts` and `described` grow with `conversations` and are complete when it is used up.

    - `counts`: how many rejections there are of each reason
    - `described`: the first DESCRIBED of them
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.counts: Counter[str] = Counter()
        self.described: list[RejectedRecord] = []
        self.records: dict[int, Any] = {}
        """Records by number, from that of the conversation that was yielded last, where they are kept."""

    def conversations(self, keeps_records: bool = False) -> Iterator[ReadConversation]:
        """Yield the conversations of the file in their order. Raises ShardFault, ShardError.

        keeps_records: whether `records` then holds the record that each was read from.
        """
        for conversation in read_conversations(self._records(keeps_records)):
            name = self.name_of(conversation)
            for reason, detail in conversation.faults:
                self._reject(RejectedRecord(name, conversation.record_id, self.source.name, reason, detail))
            passed = [number for number in self.records if number < conversation.number]
            for number in passed:
                del self.records[number]
            reasons = {reason for reason, _ in conversation.faults}
            if UNKNOWN_FORM not in reasons:
                yield conversation

    def name_of(self, conversation: ReadConversation) -> str:
        """Return the name of a conversation, such as traces.jsonl:12; of several in one record traces.jsonl:12.1."""
        part = f".{conversation.part}" if conversation.part else ""
        return f"{self.source.name}:{conversation.number}{part}"

    def _records(self, keeps_records: bool) -> Iterator[NumberedRecord]:
        """Yield the records, and note what is none."""
        source = self.source.name
        for read in self.source.records:
            if isinstance(read, Rejection):
                place = f"{source}:{read.line}"
                self._reject(RejectedRecord(place, None, source, read.reason, read.detail))
                continue
            if keeps_records:
                self.records[read.number] = read.value
            yield read

    def _reject(self, rejection: RejectedRecord) -> None:
        """Count a rejection, and describe it unless DESCRIBED are described."""
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
        "digest": Column(pl.String(), "hash of the messages"),
        "messages": Column(pl.String(), "messages with calls and results, as JSON"),
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
