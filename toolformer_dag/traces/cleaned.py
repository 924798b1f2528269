"""Write judged conversations again in the form they came in, and pairs of a helpful and a needless call for DPO.

A call that is left out takes the answer with it that rested on nothing else (`_without_support`): an answer without the
call that it was read from teaches a model to invent.
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
"""The reason of a failed call whose answer says what no tool did: it goes as that of a call that does not help."""
AS_LIKELY_WITHOUT = "as_likely_without"
"""The reason of a call whose answer was known without it: the answer rests on what was said before."""
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
    """What was written: `lines` by file; and what was left out: `conversations`, `calls`, and messages of `answers`."""

    lines: dict[str, int]
    conversations: int = 0
    calls: int = 0
    answers: int = 0


def write_cleaned(judgement: Judgement, folder: FilePath, dropped: Dropped, force: bool = False) -> Cleaned:
    """Write a file of JSON lines per source, and pairs.jsonl where there are any; return what was written and left out.

    The files of the conversations are read once more, and written one conversation at a time. Where a name is taken a
    number follows it.

    Raises UserError where a file is there already, without `force`, and where a file of conversations has changed since
    it was judged; WriteError.
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
            name = _free(file_name(SUFFIX.sub("", source.name)), cleaned.lines)
            cleaned.lines[name] = _write_lines(folder / name, records, force)
    pairs = _pairs(judgement)
    if pairs:
        name = _free("pairs", cleaned.lines)
        cleaned.lines[name] = _write_lines(folder / name, pairs, force)
    return cleaned


def _judged_sources(judgement: Judgement) -> set[str]:
    """Return the names of the files with conversations; damaged files have none."""
    table = judgement.plan.lake.table(recorded_conversations.NAME).scan(judgement.plan.conversations)
    return set(table.select(pl.col("source").unique()).collect()["source"])


def _require_unchanged(judgement: Judgement, shard: str) -> None:
    """Raise UserError where the files of a shard are not those that were judged."""
    table = judgement.plan.lake.table(recorded_conversations.NAME)
    conversations = judgement.plan.conversations[shard]
    if table.record(shard)["inputs"] != conversations.stamp():
        raise UserError(f"{conversations.place} has changed since it was judged; run again, stored losses are reused")


def _write_lines(file: FilePath, rows: Iterable[Mapping[str, Any]], force: bool) -> int:
    """Write rows as JSON lines, one after the other; return how many there were. Raises UserError, WriteError."""
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
    """Yield the records of a file with the verdicts of their calls, without what is dropped; count what is left out."""
    verdicts_of_conversation = _verdicts_by_conversation(verdicts, reading.source.name)
    # Conversations of one record follow each other, and have the number of the record.
    for _, conversations in groupby(reading.conversations(keeps_records=True), lambda read: read.number):
        group: _RecordGroup | None = None
        for conversation in conversations:
            if group is None:
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


def _free(stem: str, taken: Collection[str]) -> str:
    """Return the name of a file that none has: two sources may have one name.

    As an example: a.jsonl, or where that is taken a-2.jsonl, then a-3.jsonl.
    """
    name = f"{stem}.jsonl"
    number = 2
    while name in taken:
        name = f"{stem}-{number}.jsonl"
        number += 1
    return name


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(row) + b"\n"
    except TypeError:  # a number of more than 64 bits
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


class _LeftOut(NamedTuple):
    """What is left out of one conversation.

    - `calls`: with their results
    - `messages`: of the assistant
    - `is_whole`: whether nothing of the conversation stays
    """

    calls: Sequence[RecordedCall]
    messages: Sequence[RecordedMessage]
    is_whole: bool = False


NOTHING_LEFT_OUT = _LeftOut(calls=(), messages=())


@dataclass
class _RecordGroup:
    """The records that one or several conversations were read from, and what is left out of them.

    Mostly one record holds one conversation. A record may hold several, and in some forms all records of a file
    together are one conversation.

    - `form`: the name of the records' form
    - `records`: as they were read
    - `is_file`: whether the conversations were read from all of the records together

    State: `add` is called for each of the conversations, and fills the following; then `cleaned_records` is called.

    - `calls_left_out`, `places_left_out`: calls, and the places of messages in the records
    - `verdicts`: of the calls of the conversations that stay
    - `conversations_left`: how many stay
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
        """Return the group of a conversation's records, of which nothing is left out yet.

        first: the first conversation of the group. records: by number.
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
        """Note what is left out of a conversation, and count it in `cleaned`. Raises UserError, see `_left_out`.

        verdicts: on the calls of the conversation.
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
        """Yield the records without what is left out, the first with the verdicts; none where no conversation stays.

        Raises UserError where one of several conversations is to be left out of a record that cannot be divided.
        """
        if self.conversations_left == 0:
            return
        if self.calls_left_out and not can_drop(self.form):
            raise UserError(
                f"--drop conversations: a record in the form {self.form} holds several conversations, and one of them "
                "cannot be left out; write a record or a file for each"
            )
        if self.is_file:
            first, *others = drop(self.records, self.calls_left_out, self.places_left_out)
        else:
            first = drop(self.records[0], self.calls_left_out, self.places_left_out)
            others = []
        yield _with_verdicts(first, self.verdicts)
        yield from others


def _left_out(conversation: ReadConversation, verdicts: Sequence[Verdict], dropped: Dropped) -> _LeftOut:
    """Return what is left out of a conversation. verdicts: on its calls. dropped: what the user wants left out.

    Raises UserError where calls are to be left out of a form that has no place for each.
    """
    messages = conversation.messages
    unhelpful = [row for row in verdicts if row["verdict"] == DOES_NOT_HELP or row["reason"] == SUCCESS_CLAIMED]
    if dropped == "conversations" and unhelpful:
        every_call = [call for message in messages for call in message.calls]
        return _LeftOut(every_call, messages, is_whole=True)
    chosen: list[Verdict] = []
    if dropped == "calls":
        chosen = unhelpful
    elif dropped == "failed":
        chosen = [row for row in verdicts if row["verdict"] == FAILED]
    if not chosen:
        return NOTHING_LEFT_OUT
    if not can_drop(conversation.form):
        raise UserError(
            f"--drop {dropped}: conversations in the form {conversation.form} can be left out as a whole alone; "
            "write --drop conversations"
        )
    calls = [messages[row["turn"]].calls[row["call"]] for row in chosen]
    return _LeftOut(calls, _without_support(messages, chosen))


def _with_verdicts(record: Any, verdicts: Sequence[Verdict]) -> Any:
    """Return a record with the verdicts of its calls; a record that is a list has no field for them."""
    if not isinstance(record, Mapping):
        return record
    if "steps" in record:
        return {**record, "extra": {**(record.get("extra") or {}), METADATA: list(verdicts)}}
    return {**record, METADATA: list(verdicts)}


def _without_support(messages: Sequence[RecordedMessage], gone: Sequence[Verdict]) -> list[RecordedMessage]:
    """Return what the assistant wrote that rests on no call any more, once the calls of `gone` are left out.

    An exchange reaches from what a user says to what a user says next. Where none of its calls stays, the assistant's
    messages from the first call that goes are returned; not where the answer was as likely without each of the calls,
    since it then rests on what was said before.
    """
    unsupported = list[RecordedMessage]()
    for first, end in _exchanges(messages):
        gone_here = [row for row in gone if first <= row["turn"] < end]
        if not gone_here:
            continue
        calls = sum(len(message.calls) for message in messages[first:end])
        rests_on_words = all(row["reason"] == AS_LIKELY_WITHOUT for row in gone_here)
        if rests_on_words or len(gone_here) < calls:
            continue
        first_gone = min(row["turn"] for row in gone_here)
        unsupported += [message for message in messages[first_gone:end] if message.role == "assistant"]
    return unsupported


def _exchanges(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, int]]:
    """Yield the first message of each exchange and the one after its last; each but the first begins with a user's."""
    first = 0
    for number, message in enumerate(messages):
        if message.role == "user" and number > first:
            yield first, number
            first = number
    yield first, len(messages)


def _pairs(judgement: Judgement) -> list[dict[str, Any]]:
    """Return the same turn with a call that helps and with one that does not, as TRL's preference pairs.

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
    """A row of PAIRS: two conversations, by name, that are alike up to message `turn`; there their calls differ."""

    chosen: str
    rejected: str
    turn: int
    chosen_gain: float
    rejected_gain: float


def _messages(judgement: Judgement, names: Collection[str]) -> dict[str, tuple[RecordedMessage, ...]]:
    """Return the messages of the conversations of these names."""
    if not names:
        return {}
    table = judgement.plan.lake.table(recorded_conversations.NAME).scan(judgement.plan.conversations)
    is_wanted = pl.col("conversation").is_in(list(names))
    wanted = table.filter(is_wanted).select("conversation", "messages").collect()
    return {name: messages_of(stored) for name, stored in wanted.iter_rows()}


def _openai(messages: Sequence[RecordedMessage]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API writes them; results are messages of the role tool."""
    return [message for _, message in to_openai(messages)]
