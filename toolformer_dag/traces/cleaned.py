"""Write judged conversations again in the form they came in, and pairs of a helpful and a needless call for DPO.

Calls that do not help may be left out. An answer that rested on such calls alone is left out with them
(`_unsupported_messages`): an answer without the call that it was read from teaches a model to invent.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import orjson
import polars as pl

from toolformer_dag.conversations.dropping import can_drop, drop
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, to_openai
from toolformer_dag.conversations.reading import ReadConversation
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.files import UserError, WriteError, beside, file_name, replace_whole
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import Dropped, recorded_conversations
from toolformer_dag.traces.judgement import Judgement
from toolformer_dag.traces.recorded_conversations import FileReading
from toolformer_dag.traces.stored_messages import messages_of

METADATA = "tool_call_gains"
"""The field that a record gets; in ATIF it stands under `extra`."""
SUFFIX = re.compile(r"\.(?:jsonl|json|ndjson|parquet)(?:\.gz|\.zst)?$")
DOES_NOT_HELP = "does not help"
FAILED = "failed call"
SUCCESS_CLAIMED = "success_claimed"
"""The reason of a failed call after which the answer claims success; it is left out like a call that does not help."""
AS_LIKELY_WITHOUT = "as_likely_without"
"""The reason of a call without which the answer was as likely: the answer rests on what was said before the call."""
VERDICTS = (
    "SELECT conversation, source, turn, call, tool, gain, delta, overlap, verdict, reason FROM trace_calls ORDER BY ALL"
)
PAIRS = f"""
SELECT DISTINCT ON (a.beginning, a.tool, a.arguments::VARCHAR, b.tool, b.arguments::VARCHAR)
       a.conversation, b.conversation, a.turn, a.gain, b.gain
FROM trace_calls AS a JOIN trace_calls AS b USING (beginning)
WHERE a.verdict = 'helps' AND b.verdict = '{DOES_NOT_HELP}' AND NOT EXISTS (
    FROM trace_calls AS c WHERE (c.conversation, c.turn, c.verdict) = (a.conversation, a.turn, '{DOES_NOT_HELP}'))
ORDER BY ALL
"""


Verdict = Mapping[str, Any]
"""A row of VERDICTS: a call by `turn` and `call`, with its verdict, reason and gain."""


@dataclass
class Cleaned:
    """What was written and what was left out, counted while the files are written.

    Attributes:
        lines: the number of lines of each file, by its name.
        conversations: the conversations that were left out as a whole.
        calls: the calls that were left out of the other conversations.
        answers: the assistant's messages with text that were left out of them.
    """

    lines: dict[str, int]
    conversations: int = 0
    calls: int = 0
    answers: int = 0


def write_cleaned(judgement: Judgement, folder: FilePath, dropped: Dropped, force: bool = False) -> Cleaned:
    """Write the judged conversations into `folder`, a file of JSON lines per file that was judged; return the counts.

    Where two calls after the same messages differ, one helpful and one needless, pairs.jsonl gets a preference pair.
    `dropped` says what to leave out. The judged files are read once more, a conversation at a time. If two would get
    the same name, a number is added, as in a-2.jsonl.

    Raises UserError if a file exists already and `force` is not set, or if a judged file has changed meanwhile; raises
    WriteError if a file cannot be written.
    """
    cleaned = Cleaned({})
    verdicts = query(judgement.database, VERDICTS)
    judged_sources = _judged_sources(judgement)
    for shard_name, shard in judgement.plan.conversations.items():
        _require_unchanged(judgement, shard_name)
        for source in shard.files():
            if source.name not in judged_sources:  # it is among the rejections
                continue
            records = _cleaned_records(FileReading(source), verdicts, dropped, cleaned)
            name = _unused_name(file_name(SUFFIX.sub("", source.name)), cleaned.lines)
            cleaned.lines[name] = _write_lines(folder / name, records, force)
    pairs = _pairs(judgement)
    if pairs:
        name = _unused_name("pairs", cleaned.lines)
        cleaned.lines[name] = _write_lines(folder / name, pairs, force)
    return cleaned


def _judged_sources(judgement: Judgement) -> set[str]:
    """Return the names of the files from which conversations were judged. Damaged files are not among them."""
    table = judgement.plan.lake.table(recorded_conversations.NAME).scan(judgement.plan.conversations)
    return set(table.select(pl.col("source").unique()).collect()["source"])


def _require_unchanged(judgement: Judgement, shard: str) -> None:
    """Raise UserError if the files of a shard have changed since they were judged."""
    table = judgement.plan.lake.table(recorded_conversations.NAME)
    conversations = judgement.plan.conversations[shard]
    if table.record(shard)["inputs"] != conversations.stamp():
        raise UserError(f"{conversations.place} has changed since it was judged; run again, stored losses are reused")


def _write_lines(file: FilePath, rows: Iterable[Mapping[str, Any]], force: bool) -> int:
    """Write rows as JSON lines and return their number. The file is replaced as a whole at the end.

    Raises UserError if the file exists and `force` is not set, and WriteError if it cannot be written.
    """
    if file.exists() and not force:
        raise UserError(f"--out {file}: there is such a file, and it stays; name another, or replace it with --force")
    fresh = beside(file)
    lines = 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as stream:
            for row in rows:
                stream.write(_line(row))
                lines += 1
        replace_whole(fresh, file)
    except OSError as error:
        raise WriteError(file, error) from error
    finally:
        fresh.unlink(missing_ok=True)
    return lines


def _cleaned_records(
    reading: FileReading, verdicts: pl.DataFrame, dropped: Dropped, cleaned: Cleaned
) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a file with the verdicts on their calls, and without what is dropped.

    Adds what is left out to the counts of `cleaned`. dropped: what the user wants left out.
    """
    verdicts_of_conversation = _verdicts_by_conversation(verdicts, reading.source.name)
    # Conversations that were read from the same record follow each other, and have the number of the record.
    for _, group_of_record in groupby(reading.conversations(keeps_records=True), lambda read: read.number):
        group: _RecordGroup | None = None
        for conversation in group_of_record:
            if group is None:  # `reading` holds the records of the conversation that it gave last
                group = _RecordGroup.of(conversation, reading.records)
            conversation_verdicts = verdicts_of_conversation.get(reading.name_of(conversation), [])
            group.add(conversation, conversation_verdicts, dropped, cleaned)
        if group is not None:
            yield from group.cleaned_records()


def _verdicts_by_conversation(verdicts: pl.DataFrame, source: str) -> dict[str, list[Verdict]]:
    """Return the verdicts on the calls of a file, by the name of the conversation, such as traces.jsonl:12."""
    by_conversation: dict[str, list[Verdict]] = {}
    of_source = verdicts.filter(pl.col("source") == source).drop("source")
    for row in of_source.iter_rows(named=True):
        conversation = row.pop("conversation")
        by_conversation.setdefault(conversation, []).append(row)
    return by_conversation


def _unused_name(stem: str, taken: Collection[str]) -> str:
    """Return a file name that is not among `taken`: a.jsonl, or if that is taken a-2.jsonl, then a-3.jsonl."""
    name = f"{stem}.jsonl"
    number = 2
    while name in taken:
        name = f"{stem}-{number}.jsonl"
        number += 1
    return name


def _line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON, with its line break."""
    try:
        return orjson.dumps(row) + b"\n"
    except TypeError:  # a number of more than 64 bits
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


class _LeftOut(NamedTuple):
    """What is left out of a conversation.

    Attributes:
        calls: calls, with their results.
        messages: messages of the assistant.
        is_whole: whether the whole conversation is left out.
    """

    calls: Sequence[RecordedCall]
    messages: Sequence[RecordedMessage]
    is_whole: bool = False


NOTHING_LEFT_OUT = _LeftOut(calls=(), messages=())


@dataclass
class _RecordGroup:
    """The records that one or several conversations were read from, and what is left out of them.

    Mostly a record holds one conversation. It may hold several, and in some forms all records of a file together are
    one conversation. State: `add` is called for each of the conversations, then `cleaned_records` once.

    Attributes:
        form: the name of the records' form.
        records: the records as they were read.
        is_file: whether the conversations were read from all of the records together.
        calls_left_out: the calls that are left out; `add` fills it and the next three.
        places_left_out: the paths in the records of the messages that are left out.
        verdicts: on the calls of the conversations that stay.
        conversations_left: how many conversations stay.
    """

    form: str
    records: Sequence[Any]
    is_file: bool
    calls_left_out: list[RecordedCall] = field(default_factory=list)
    places_left_out: list[Path] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    conversations_left: int = 0

    @staticmethod
    def of(first: ReadConversation, records: Mapping[int, Any]) -> "_RecordGroup":
        """Return a group with the records of `first`, its first conversation; nothing is left out yet.

        records: by their numbers, at least from that of `first` on.
        """
        numbers = sorted(number for number in records if number >= first.number)
        numbers_of_group = numbers[: first.record_count]
        return _RecordGroup(
            form=first.form,
            records=[records[number] for number in numbers_of_group],
            is_file=first.record_count > 1,
        )

    def add(
        self, conversation: ReadConversation, verdicts: Sequence[Verdict], dropped: Dropped, cleaned: Cleaned
    ) -> None:
        """Add what is left out of a conversation to this group, and to the counts of `cleaned`.

        verdicts: on the calls of the conversation. dropped: what the user wants left out. Raises UserError if calls are
        to be left out and the conversation's form allows to leave out whole conversations only.
        """
        self.form = conversation.form
        left_out = _left_out(conversation, verdicts, dropped)
        self.calls_left_out += left_out.calls
        for message in left_out.messages:
            if message.place is not None:
                self.places_left_out.append(message.place)
        if left_out.is_whole:
            cleaned.conversations += 1
            return
        self.conversations_left += 1
        self.verdicts += verdicts
        cleaned.calls += len(left_out.calls)
        cleaned.answers += sum(1 for message in left_out.messages if message.content.strip())

    def cleaned_records(self) -> Iterator[Any]:
        """Yield the records without what is left out; the first one gets the verdicts. Yield none if nothing stays.

        Raises UserError if one of several conversations in a record is to be left out, and the form does not allow it.
        """
        if self.conversations_left == 0:
            return
        if self.calls_left_out and not can_drop(self.form):
            raise UserError(
                f"--drop conversations: a record in the form {self.form} holds several conversations, and one of them "
                "cannot be left out; write a record or a file for each"
            )
        # `drop` returns what it was given, without the calls and messages: a list of records, or a record.
        if self.is_file:
            first, *others = drop(self.records, self.calls_left_out, self.places_left_out)
        else:
            first = drop(self.records[0], self.calls_left_out, self.places_left_out)
            others = []
        yield _with_verdicts(first, self.verdicts)
        yield from others


def _left_out(conversation: ReadConversation, verdicts: Sequence[Verdict], dropped: Dropped) -> _LeftOut:
    """Return what is left out of a conversation, by the value of `dropped`:

    - "conversations": the whole conversation, if any of its calls is unhelpful
    - "calls": its unhelpful calls
    - "failed": its failed calls

    With calls go the answers that rested on them (`_unsupported_messages`). An unhelpful call does not help, or has
    failed though the answer claims success. verdicts: on the calls of the conversation. Raises UserError if calls are
    to be left out and the conversation's form allows to leave out whole conversations only.
    """
    messages = conversation.messages
    unhelpful = [row for row in verdicts if row["verdict"] == DOES_NOT_HELP or row["reason"] == SUCCESS_CLAIMED]
    if dropped == "conversations" and unhelpful:
        every_call = [call for message in messages for call in message.calls]
        return _LeftOut(every_call, messages, is_whole=True)
    rows_left_out: list[Verdict] = []
    if dropped == "calls":
        rows_left_out = unhelpful
    elif dropped == "failed":
        rows_left_out = [row for row in verdicts if row["verdict"] == FAILED]
    if not rows_left_out:
        return NOTHING_LEFT_OUT
    if not can_drop(conversation.form):
        raise UserError(
            f"--drop {dropped}: conversations in the form {conversation.form} can be left out as a whole alone; "
            "write --drop conversations"
        )
    calls = [messages[row["turn"]].calls[row["call"]] for row in rows_left_out]
    return _LeftOut(calls, _unsupported_messages(messages, rows_left_out))


def _with_verdicts(record: Any, verdicts: Sequence[Verdict]) -> Any:
    """Return a record with its verdicts in the field METADATA, in ATIF under `extra`; a list is returned as it is."""
    if not isinstance(record, Mapping):
        return record
    if "steps" in record:
        return {**record, "extra": {**(record.get("extra") or {}), METADATA: list(verdicts)}}
    return {**record, METADATA: list(verdicts)}


def _unsupported_messages(messages: Sequence[RecordedMessage], left_out: Sequence[Verdict]) -> list[RecordedMessage]:
    """Return the assistant's messages that rest on nothing any more when the calls of `left_out` are left out.

    An exchange goes from a message of the user to the next one. Its answer has lost its support if all of its calls are
    left out. Then the assistant's messages from the first of these calls on are returned. If the answer was as likely
    without each of them, it rests on what was said before, and none are returned.
    """
    unsupported: list[RecordedMessage] = []
    for first, end in _exchanges(messages):
        left_out_here = [row for row in left_out if first <= row["turn"] < end]
        if not left_out_here:
            continue
        call_count = sum(len(message.calls) for message in messages[first:end])
        a_call_stays = len(left_out_here) < call_count
        rests_on_words = all(row["reason"] == AS_LIKELY_WITHOUT for row in left_out_here)
        if a_call_stays or rests_on_words:
            continue
        first_left_out = min(row["turn"] for row in left_out_here)  # `turn` is the number of a message
        unsupported += [message for message in messages[first_left_out:end] if message.role == "assistant"]
    return unsupported


def _exchanges(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, int]]:
    """Yield the numbers (first, end) of the messages of each exchange; a message of the user begins a new one.

    As (0, 2) and (2, 4) for messages of user, assistant, user, assistant.
    """
    first = 0
    for number, message in enumerate(messages):
        if message.role == "user" and number > first:
            yield first, number
            first = number
    yield first, len(messages)


def _pairs(judgement: Judgement) -> list[dict[str, Any]]:
    """Return TRL's preference pairs: after the same messages, a call that helps (chosen) and one that does not.

    A pair has the fields prompt, chosen and rejected, each a list of OpenAI messages, and the gains of both calls.
    """
    pairs_of_calls = [_CallPair(*row) for row in query(judgement.database, PAIRS).iter_rows()]
    names: set[str] = set()
    for pair in pairs_of_calls:
        names |= {pair.chosen, pair.rejected}
    messages = _messages(judgement, names)
    records = []
    for pair in pairs_of_calls:
        chosen = messages[pair.chosen]
        rejected = messages[pair.rejected]
        record = {
            "prompt": _openai(chosen[: pair.turn]),
            "chosen": _openai(chosen[pair.turn : pair.turn + 1]),
            "rejected": _openai(rejected[pair.turn : pair.turn + 1]),
            "gain_chosen": pair.chosen_gain,
            "gain_rejected": pair.rejected_gain,
        }
        records.append(record)
    return records


class _CallPair(NamedTuple):
    """A row of PAIRS: two conversations that are alike up to message number `turn`, where their calls differ.

    `chosen` is the name of the conversation whose call helps, `rejected` of the one whose call does not.
    """

    chosen: str
    rejected: str
    turn: int
    chosen_gain: float
    rejected_gain: float


def _messages(judgement: Judgement, names: Collection[str]) -> dict[str, tuple[RecordedMessage, ...]]:
    """Return the messages of the named conversations, by name."""
    if not names:
        return {}
    table = judgement.plan.lake.table(recorded_conversations.NAME).scan(judgement.plan.conversations)
    is_wanted = pl.col("conversation").is_in(list(names))
    wanted = table.filter(is_wanted).select("conversation", "messages").collect()
    return {name: messages_of(stored) for name, stored in wanted.iter_rows()}


def _openai(messages: Sequence[RecordedMessage]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API writes them; results are messages of the role tool."""
    return [message for _, message in to_openai(messages)]
