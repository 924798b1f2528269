"""Write judged conversations again in the form they came in, and pairs of a helpful and a needless call for DPO.

Calls that do not help may be left out. An answer that rested on such calls alone is left out with them
(`_select_unsupported_messages`): an answer without the call that it was read from teaches a model to invent.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import orjson
import polars as pl

from toolformer_dag.computing.conversation_shards import Source
from toolformer_dag.conversations.dropping import can_drop, drop
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, to_openai
from toolformer_dag.conversations.reading import ReadConversation
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.files import UserError, WriteError, build_temporary_path, file_name, replace_whole
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import Dropped, recorded_conversations
from toolformer_dag.traces.judgement import Judgement
from toolformer_dag.traces.recorded_conversations import FileReading
from toolformer_dag.traces.stored_messages import messages_of

METADATA = "tool_call_gains"
"""The field of a record with its verdicts; in ATIF, a format of agent trajectories, it is under `extra`."""
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

    def count(self, left_out: "_LeftOut") -> None:
        """Add what is left out of a conversation to the counts."""
        if left_out.is_whole:
            self.conversations += 1
        else:
            self.calls += len(left_out.calls)
            self.answers += sum(1 for message in left_out.messages if message.content.strip())


def write_cleaned(judgement: Judgement, folder: FilePath, dropped: Dropped, force: bool = False) -> Cleaned:
    """Write the judged conversations again, with their verdicts and without the calls that are to be left out.

    Each file that was judged gives a file of JSON lines. The judged files are read once more, a conversation at a time.
    Where two calls after the same messages differ, one helpful and one needless, pairs.jsonl gets a preference pair.

    Args:
        judgement: The verdicts.
        folder: Where the files are written. If two would get the same name, a number is added, as in a-2.jsonl.
        dropped: What to leave out.
        force: Whether files that exist already are replaced.

    Returns:
        The counts of what was written and left out.

    Raises:
        UserError: A file exists already and `force` is not set, a judged file has changed since it was judged, or
            records of this form do not allow what is to be left out.
        WriteError: A file cannot be written.
    """
    output = _OutputFolder(folder, force)
    cleaned = Cleaned(output.lines)  # `output` counts the lines of each file there as it writes them
    verdicts = query(judgement.database, VERDICTS)

    for source in _iter_judged_sources(judgement):
        verdicts_of_file = _group_verdicts_by_conversation(verdicts, source.name)
        cleaning = _FileCleaning(FileReading(source), verdicts_of_file, dropped, cleaned)
        # The records are read one by one while they are written; what is left out of each is then counted in `cleaned`.
        output.write(_to_file_stem(source), cleaning.records())

    pairs = _build_preference_pairs(judgement)
    if pairs:
        output.write("pairs", pairs)
    return cleaned


def _to_file_stem(source: Source) -> str:
    """Return the name of the file to write for a source, without its ending."""
    return file_name(SUFFIX.sub("", source.name))


@dataclass(frozen=True)
class _OutputFolder:
    """The folder into which files of JSON lines are written.

    Attributes:
        folder: its path.
        force: whether files that exist already are replaced.
        lines: the number of lines of each file that is written so far, by its name.
    """

    folder: FilePath
    force: bool
    lines: dict[str, int] = field(default_factory=dict)

    def write(self, stem: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows into the file `stem`.jsonl; a number is added to a name that is taken, as in a-2.jsonl."""
        name = _choose_unused_name(stem, self.lines)
        self.lines[name] = _write_lines(self.folder / name, rows, self.force)


def _iter_judged_sources(judgement: Judgement) -> Iterator[Source]:
    """Yield the files from which conversations were judged, without damaged ones.

    Raises UserError if a file has changed since it was judged.
    """
    names = _read_judged_file_names(judgement)
    for shard_name, shard in judgement.plan.conversations.items():
        _require_unchanged(judgement, shard_name)
        yield from (source for source in shard.files() if source.name in names)


def _read_judged_file_names(judgement: Judgement) -> set[str]:
    """Return the names of the files from which a conversation was read."""
    table = judgement.plan.lake.table(recorded_conversations.NAME).scan(judgement.plan.conversations)
    return set(table.select(pl.col("source").unique()).collect()["source"])


def _require_unchanged(judgement: Judgement, shard: str) -> None:
    """Raise UserError if the files of a shard have changed since they were judged."""
    table = judgement.plan.lake.table(recorded_conversations.NAME)
    conversations = judgement.plan.conversations[shard]
    if table.record(shard)["inputs"] != conversations.stamp():
        raise UserError(f"{conversations.place} has changed since it was judged; run again, stored losses are reused")


def _write_lines(file: FilePath, rows: Iterable[Mapping[str, Any]], force: bool) -> int:
    """Write rows into a file of JSON lines, and return how many were written.

    The rows go into a temporary file, which takes the place of the old one at the end.

    Args:
        file: The path of the file.
        rows: The rows, one for each line.
        force: Whether a file that exists already is replaced.

    Raises:
        UserError: The file exists already and `force` is not set.
        WriteError: The file cannot be written.
    """
    if file.exists() and not force:
        raise UserError(f"--out {file}: there is such a file, and it stays; name another, or replace it with --force")

    temporary_file = build_temporary_path(file)
    try:
        line_count = _write_new_file(temporary_file, rows)
        replace_whole(temporary_file, file)
    except OSError as error:
        raise WriteError(file, error) from error
    finally:
        temporary_file.unlink(missing_ok=True)
    return line_count


def _write_new_file(file: FilePath, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines into a new file, in a folder that is made if needed; return the number of lines."""
    lines = 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        for row in rows:
            stream.write(_encode_json_line(row))
            lines += 1
    return lines


@dataclass(frozen=True)
class _FileCleaning:
    """One pass over a judged file, which yields its records without what is dropped.

    Attributes:
        reading: the file.
        verdicts: the verdicts on its calls, by the name of the conversation.
        dropped: what the user wants left out.
        cleaned: the counts to which is added what is left out.
    """

    reading: FileReading
    verdicts: Mapping[str, Sequence[Verdict]]
    dropped: Dropped
    cleaned: Cleaned

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the records of the file with the verdicts on their calls, and without what is dropped."""
        # Conversations that were read from the same record follow each other, and have the number of the record.
        for _, conversations in groupby(self.reading.conversations(keeps_records=True), lambda read: read.number):
            yield from self._build_record_group(conversations).iter_cleaned_records()

    def _build_record_group(self, conversations: Iterator[ReadConversation]) -> "_RecordGroup":
        """Collect the records of some conversations and what is left out of them, and count what is left out.

        Args:
            conversations: The conversations that were read from the same records, at least one.
        """
        first = next(conversations)
        # The group takes its records before the next conversation is read, because `reading.records` then forgets those
        # of earlier conversations.
        group = _RecordGroup.of(first, self.reading.records)

        for conversation in chain([first], conversations):
            verdicts = self.verdicts.get(self.reading.name_of(conversation), [])
            left_out = _choose_left_out(conversation, verdicts, self.dropped)
            group.add(conversation, verdicts, left_out)
            self.cleaned.count(left_out)
        return group


def _group_verdicts_by_conversation(verdicts: pl.DataFrame, source_name: str) -> dict[str, list[Verdict]]:
    """Select the verdicts on the calls of one file, and group them by conversation.

    Args:
        verdicts: The verdicts on the calls of all files.
        source_name: The name of the file.

    Returns:
        The verdicts by the name of their conversation, such as traces.jsonl:12.
    """
    verdicts_by_conversation: dict[str, list[Verdict]] = {}
    verdicts_of_file = verdicts.filter(pl.col("source") == source_name).drop("source")
    for row in verdicts_of_file.iter_rows(named=True):
        conversation = row.pop("conversation")
        verdicts_by_conversation.setdefault(conversation, []).append(row)
    return verdicts_by_conversation


def _choose_unused_name(stem: str, taken: Collection[str]) -> str:
    """Return a file name that is not among `taken`: a.jsonl, or if that is taken a-2.jsonl, then a-3.jsonl."""
    name = f"{stem}.jsonl"
    number = 2
    while name in taken:
        name = f"{stem}-{number}.jsonl"
        number += 1
    return name


def _encode_json_line(row: Mapping[str, Any]) -> bytes:
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
    one conversation. State: `add` is called for each of the conversations, then `iter_cleaned_records` once.

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
        """Create a group with the records of a conversation. Nothing is left out of them yet.

        Args:
            first: The first conversation that was read from these records.
            records: The records of the file by number. Those before the conversation may be missing.
        """
        numbers_from_first = sorted(number for number in records if number >= first.number)
        numbers_of_group = numbers_from_first[: first.record_count]
        return _RecordGroup(
            form=first.form,
            records=[records[number] for number in numbers_of_group],
            is_file=first.record_count > 1,  # a conversation of several records takes up its whole file
        )

    def add(self, conversation: ReadConversation, verdicts: Sequence[Verdict], left_out: _LeftOut) -> None:
        """Add a conversation of these records, with the verdicts on its calls and with what is left out of it."""
        self.form = conversation.form
        self.calls_left_out += left_out.calls
        self.places_left_out += [message.place for message in left_out.messages if message.place is not None]
        if not left_out.is_whole:
            self.conversations_left += 1
            self.verdicts += verdicts

    def iter_cleaned_records(self) -> Iterator[Any]:
        """Remove from the records what is left out, and add the verdicts to the first one.

        Yields:
            The records that remain. There are none if all conversations are left out.

        Raises:
            UserError: One of several conversations in a record is to be left out, but the form does not allow it.
        """
        if self.conversations_left == 0:
            return
        first, *others = self._build_remaining_records()
        yield _with_verdicts(first, self.verdicts)
        yield from others

    def _build_remaining_records(self) -> list[Any]:
        """Remove the calls and messages that are left out from the records, and return these, at least one.

        Raises:
            UserError: Records of this form can only be left out as a whole.
        """
        if self.calls_left_out and not can_drop(self.form):
            raise UserError(
                f"--drop conversations: a record in the form {self.form} holds several conversations, and one of them "
                "cannot be left out; write a record or a file for each"
            )

        if self.is_file:  # all records together are one conversation
            return list(drop(self.records, self.calls_left_out, self.places_left_out))
        [record] = self.records
        return [drop(record, self.calls_left_out, self.places_left_out)]


def _choose_left_out(conversation: ReadConversation, verdicts: Sequence[Verdict], dropped: Dropped) -> _LeftOut:
    """Decide what is left out of a conversation.

    Answers that rested only on calls that are left out are left out too.

    Args:
        conversation: The conversation.
        verdicts: The verdicts on its calls.
        dropped: What the user wants left out: "conversations" with any unhelpful call, unhelpful "calls", or "failed"
            calls.

    Raises:
        UserError: Calls are to be left out, but the form of the conversation allows leaving it out only as a whole.
    """
    messages = conversation.messages
    if dropped == "conversations":
        has_unhelpful_call = any(_is_unhelpful(verdict) for verdict in verdicts)
        return _leave_out_conversation(messages) if has_unhelpful_call else NOTHING_LEFT_OUT

    verdicts_left_out = [verdict for verdict in verdicts if _is_dropped(verdict, dropped)]
    if not verdicts_left_out:
        return NOTHING_LEFT_OUT
    _require_droppable_calls(conversation.form, dropped)
    return _leave_out_calls(messages, verdicts_left_out)


def _leave_out_calls(messages: Sequence[RecordedMessage], verdicts: Sequence[Verdict]) -> _LeftOut:
    """Return that the calls with these verdicts are left out, with the answers that rested on them alone."""
    calls = [messages[verdict["turn"]].calls[verdict["call"]] for verdict in verdicts]
    return _LeftOut(calls, _select_unsupported_messages(messages, verdicts))


def _require_droppable_calls(form: str, dropped: Dropped) -> None:
    """Raise UserError if only whole conversations can be left out of records in a form, no single calls."""
    if not can_drop(form):
        raise UserError(
            f"--drop {dropped}: conversations in the form {form} can be left out as a whole alone; "
            "write --drop conversations"
        )


def _leave_out_conversation(messages: Sequence[RecordedMessage]) -> _LeftOut:
    """Return that a conversation is left out as a whole, with all of its calls and messages."""
    every_call = [call for message in messages for call in message.calls]
    return _LeftOut(every_call, messages, is_whole=True)


def _is_dropped(verdict: Verdict, dropped: Dropped) -> bool:
    """Return whether a single call is left out, by its verdict and the value of `dropped`."""
    if dropped == "calls":
        return _is_unhelpful(verdict)
    return dropped == "failed" and verdict["verdict"] == FAILED


def _is_unhelpful(verdict: Verdict) -> bool:
    """Return whether a call does not help, or has failed though the answer claims success."""
    return bool(verdict["verdict"] == DOES_NOT_HELP or verdict["reason"] == SUCCESS_CLAIMED)


def _with_verdicts(record: Any, verdicts: Sequence[Verdict]) -> Any:
    """Return a record with its verdicts in the field METADATA, in ATIF under `extra`; a list is returned as it is."""
    if not isinstance(record, Mapping):
        return record
    if "steps" in record:
        return {**record, "extra": {**(record.get("extra") or {}), METADATA: list(verdicts)}}
    return {**record, METADATA: list(verdicts)}


def _select_unsupported_messages(
    messages: Sequence[RecordedMessage], left_out: Sequence[Verdict]
) -> list[RecordedMessage]:
    """Select the answers of the assistant that have to be left out together with some calls.

    A model must not learn to answer "17 degrees" without the call that gave it. If all calls between a message of the
    user and the next one are left out, so are the assistant's messages from the first of these calls to that next
    message. They stay if the answer was as likely without each of the calls, because then it rests on earlier words.

    Args:
        messages: The messages of the conversation.
        left_out: The verdicts on the calls that are left out.
    """
    unsupported: list[RecordedMessage] = []
    for message_range in _iter_ranges_by_user_message(messages):
        # `turn` is the number of the message with the call.
        left_out_here = [verdict for verdict in left_out if verdict["turn"] in message_range]
        if left_out_here and _loses_support(messages, message_range, left_out_here):
            first_turn = min(verdict["turn"] for verdict in left_out_here)
            unsupported += _select_assistant_messages(messages[first_turn : message_range.stop])
    return unsupported


def _select_assistant_messages(messages: Sequence[RecordedMessage]) -> list[RecordedMessage]:
    """Return the messages that the assistant wrote."""
    return [message for message in messages if message.role == "assistant"]


def _loses_support(messages: Sequence[RecordedMessage], message_range: range, left_out: Sequence[Verdict]) -> bool:
    """Return whether an answer rests on nothing any more when some calls before it are left out.

    Args:
        messages: The messages of the conversation.
        message_range: The numbers of the messages from one of the user to the next one.
        left_out: The verdicts on the calls in this range that are left out, at least one.
    """
    call_count = sum(len(messages[number].calls) for number in message_range)
    if len(left_out) < call_count:  # some calls stay
        return False
    rests_on_earlier_words = all(verdict["reason"] == AS_LIKELY_WITHOUT for verdict in left_out)
    return not rests_on_earlier_words


def _iter_ranges_by_user_message(messages: Sequence[RecordedMessage]) -> Iterator[range]:
    """Split a conversation before each message of the user.

    Yields:
        The numbers of the messages of each part: range(0, 2) and range(2, 4) for messages of user, assistant, user,
        assistant. Messages before the first one of the user are a part of their own.
    """
    start = 0
    for number, message in enumerate(messages):
        begins_new_part = message.role == "user" and number > start
        if begins_new_part:
            yield range(start, number)
            start = number
    yield range(start, len(messages))


def _build_preference_pairs(judgement: Judgement) -> list[dict[str, Any]]:
    """Build training examples that prefer a helpful call to a needless one after the same messages.

    Returns:
        The examples in the form of TRL: `prompt`, `chosen` and `rejected` are lists of OpenAI messages. The gains of
        both calls are added.
    """
    pairs = [_CallPair(*row) for row in query(judgement.database, PAIRS).iter_rows()]

    conversation_names: set[str] = set()
    for pair in pairs:
        conversation_names |= {pair.chosen, pair.rejected}
    messages_by_name = _read_messages_by_name(judgement, conversation_names)

    records = []
    for pair in pairs:
        records.append(pair.record(messages_by_name[pair.chosen], messages_by_name[pair.rejected]))
    return records


class _CallPair(NamedTuple):
    """A row of PAIRS: two conversations that are alike up to message number `turn`, where their calls differ.

    Attributes:
        chosen: the name of the conversation whose call helps.
        rejected: the name of the conversation whose call does not help.
        turn: the number of the message with the call, in both.
        chosen_gain: the gain of the helpful call.
        rejected_gain: the gain of the other call.
    """

    chosen: str
    rejected: str
    turn: int
    chosen_gain: float
    rejected_gain: float

    def record(
        self, chosen_messages: Sequence[RecordedMessage], rejected_messages: Sequence[RecordedMessage]
    ) -> dict[str, Any]:
        """Build the preference pair as it is written.

        Args:
            chosen_messages: All messages of the conversation whose call helps.
            rejected_messages: All messages of the other conversation.
        """
        end = self.turn + 1  # the pair ends with the message of the call
        return {
            "prompt": _to_openai_messages(chosen_messages[: self.turn]),
            "chosen": _to_openai_messages(chosen_messages[self.turn : end]),
            "rejected": _to_openai_messages(rejected_messages[self.turn : end]),
            "gain_chosen": self.chosen_gain,
            "gain_rejected": self.rejected_gain,
        }


def _read_messages_by_name(judgement: Judgement, names: Collection[str]) -> dict[str, tuple[RecordedMessage, ...]]:
    """Return the messages of the named conversations, by name."""
    if not names:
        return {}
    table = judgement.plan.lake.table(recorded_conversations.NAME).scan(judgement.plan.conversations)
    is_wanted = pl.col("conversation").is_in(list(names))
    wanted = table.filter(is_wanted).select("conversation", "messages").collect()
    return {name: messages_of(stored) for name, stored in wanted.iter_rows()}


def _to_openai_messages(messages: Sequence[RecordedMessage]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API writes them; results are messages of the role tool."""
    return [message for _, message in to_openai(messages)]
