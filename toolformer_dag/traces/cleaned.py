"""Write judged conversations again in the form they came in, and pairs of a helpful and a needless call for DPO.

Calls that do not help may be left out. An answer that rested on such calls alone is left out with them
(`_select_unsupported_messages`): an answer without the call that it was read from teaches a model to invent.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import orjson
import polars as pl

from toolformer_dag.computing.conversation_shards import Source
from toolformer_dag.conversations.dropping import can_drop_calls, drop_calls
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, iter_indexed_openai_messages
from toolformer_dag.conversations.reading import ReadConversation
from toolformer_dag.conversations.record_paths import RecordPath
from toolformer_dag.files import UserError, WriteError, build_temporary_path, encode_file_name, replace_file
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import DropChoice, recorded_conversations
from toolformer_dag.traces.judgement import Judgement
from toolformer_dag.traces.recorded_conversations import FileReading
from toolformer_dag.traces.stored_messages import parse_messages

VERDICTS_FIELD = "tool_call_gains"
"""The field of a record with its verdicts; in ATIF, a format of agent trajectories, it is under `extra`."""
FILE_SUFFIX_PATTERN = re.compile(r"\.(?:jsonl|json|ndjson|parquet)(?:\.gz|\.zst)?$")
DOES_NOT_HELP = "does not help"
FAILED = "failed call"
SUCCESS_CLAIMED = "success_claimed"
"""The reason of a failed call after which the answer claims success; it is left out like a call that does not help."""
AS_LIKELY_WITHOUT_CALL = "as_likely_without"
"""The reason of a call without which the answer was as likely: the answer rests on what was said before the call."""
VERDICTS_SQL = (
    "SELECT conversation, source, turn, call, tool, gain, delta, overlap, verdict, reason FROM trace_calls ORDER BY ALL"
)
PAIRS_SQL = f"""
SELECT DISTINCT ON (a.beginning, a.tool, a.arguments::VARCHAR, b.tool, b.arguments::VARCHAR)
       a.conversation, b.conversation, a.turn, a.gain, b.gain
FROM trace_calls AS a JOIN trace_calls AS b USING (beginning)
WHERE a.verdict = 'helps' AND b.verdict = '{DOES_NOT_HELP}' AND NOT EXISTS (
    FROM trace_calls AS c WHERE (c.conversation, c.turn, c.verdict) = (a.conversation, a.turn, '{DOES_NOT_HELP}'))
ORDER BY ALL
"""


Verdict = Mapping[str, Any]
"""A row that VERDICTS_SQL selects: a call by `turn` and `call`, with its verdict, reason and gain."""


@dataclass
class CleaningCounts:
    """What was written and what was left out, counted while the files are written.

    Attributes:
        line_count_by_file: the number of lines of each file, by its name.
        left_out_conversation_count: the conversations that were left out as a whole.
        left_out_call_count: the calls that were left out of the other conversations.
        left_out_answer_count: the assistant's messages with text that were left out of them.
    """

    line_count_by_file: dict[str, int]
    left_out_conversation_count: int = 0
    left_out_call_count: int = 0
    left_out_answer_count: int = 0

    def add_left_out(self, left_out: "_LeftOut") -> None:
        """Add what is left out of a conversation to the counts."""
        if left_out.is_whole_conversation:
            self.left_out_conversation_count += 1
        else:
            self.left_out_call_count += len(left_out.calls)
            self.left_out_answer_count += sum(1 for message in left_out.messages if message.content.strip())


def write_cleaned_conversations(
    judgement: Judgement, output_folder: FilePath, drop_choice: DropChoice, force: bool = False
) -> CleaningCounts:
    """Write the judged conversations again, with their verdicts and without the calls that are to be left out.

    Each judged file is read once more, a conversation at a time, and gives a file of JSON lines.
    Where two calls after the same messages differ, one helpful and one needless, pairs.jsonl gets a preference pair.

    Args:
        judgement: The verdicts.
        output_folder: Where the files are written. If two would get the same name, a number is added, as in a-2.jsonl.
        drop_choice: What to leave out.
        force: Whether files that exist already are replaced.

    Returns:
        The counts of what was written and left out.

    Raises:
        UserError: A file exists already and `force` is not set, a judged file has changed since it was judged, or
            records of this form do not allow what is to be left out.
        WriteError: A file cannot be written.
    """
    output = _OutputFolder(output_folder, force)
    # `output` counts the lines of each file in this mapping while it writes them.
    counts = CleaningCounts(output.line_count_by_file)
    all_verdicts = query(judgement.database, VERDICTS_SQL)

    for source in _iter_judged_sources(judgement):
        verdicts_by_conversation = _group_verdicts_by_conversation(all_verdicts, source.name)
        file_cleaning = _FileCleaning(FileReading(source), verdicts_by_conversation, drop_choice, counts)
        # The records are read one by one while they are written; what is left out of each is then added to `counts`.
        output.write_json_lines(_to_file_stem(source), file_cleaning.iter_cleaned_records())

    pairs = _build_preference_pairs(judgement)
    if pairs:
        output.write_json_lines("pairs", pairs)
    return counts


def _to_file_stem(source: Source) -> str:
    """Return the name of the file to write for a source, without its ending: "traces" for traces.jsonl.gz."""
    return encode_file_name(FILE_SUFFIX_PATTERN.sub("", source.name))


@dataclass(frozen=True)
class _OutputFolder:
    """The folder into which files of JSON lines are written.

    Attributes:
        folder: its path.
        force: whether files that exist already are replaced.
        line_count_by_file: the number of lines of each file that is written so far, by its name.
    """

    folder: FilePath
    force: bool
    line_count_by_file: dict[str, int] = field(default_factory=dict)

    def write_json_lines(self, file_stem: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows into the file `file_stem`.jsonl; a number is added to a name that is taken, as in a-2.jsonl."""
        name = _choose_unused_file_name(file_stem, self.line_count_by_file)
        self.line_count_by_file[name] = _write_json_lines(self.folder / name, rows, self.force)


def _iter_judged_sources(judgement: Judgement) -> Iterator[Source]:
    """Yield the files from which conversations were judged, without damaged ones.

    The files come shard by shard; a shard is one large file or a group of small ones.

    Raises:
        UserError: A file has changed since it was judged.
    """
    judged_file_names = _read_judged_file_names(judgement)
    for shard_name, shard in judgement.plan.conversation_shards_by_name.items():
        _require_unchanged_shard(judgement, shard_name)
        for source in shard.iter_sources():
            if source.name in judged_file_names:
                yield source


def _read_judged_file_names(judgement: Judgement) -> set[str]:
    """Return the names of the files from which a conversation was read."""
    plan = judgement.plan
    table = plan.lake.get_table(recorded_conversations.TABLE_NAME)
    conversations = table.scan_parts(plan.conversation_shards_by_name)
    return set(conversations.select(pl.col("source").unique()).collect()["source"])


def _require_unchanged_shard(judgement: Judgement, shard_name: str) -> None:
    """Raise UserError if the files of a shard have changed since they were judged."""
    table = judgement.plan.lake.get_table(recorded_conversations.TABLE_NAME)
    shard = judgement.plan.conversation_shards_by_name[shard_name]

    # A stamp is the size and time of each file; the table has kept it from when the files were judged.
    judged_stamp = table.read_record(shard_name)["inputs"]
    if shard.read_stamp() != judged_stamp:
        raise UserError(f"{shard.location} has changed since it was judged; run again, stored losses are reused")


def _write_json_lines(file: FilePath, rows: Iterable[Mapping[str, Any]], force: bool) -> int:
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
        line_count = _write_new_json_lines(temporary_file, rows)
        replace_file(temporary_file, file)
    except OSError as error:
        raise WriteError(file, error) from error
    finally:
        temporary_file.unlink(missing_ok=True)
    return line_count


def _write_new_json_lines(file: FilePath, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines into a new file, and return the number of lines. A missing folder is made."""
    line_count = 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        for row in rows:
            stream.write(_encode_json_line(row))
            line_count += 1
    return line_count


@dataclass(frozen=True)
class _FileCleaning:
    """One pass over a judged file, which yields its records without what is dropped.

    Attributes:
        file_reading: the file.
        verdicts_by_conversation: the verdicts on its calls, by the name of the conversation.
        drop_choice: what the user wants left out.
        counts: the counts of all files, to which what is left out of this file is added.
    """

    file_reading: FileReading
    verdicts_by_conversation: Mapping[str, Sequence[Verdict]]
    drop_choice: DropChoice
    counts: CleaningCounts

    def iter_cleaned_records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the records of the file with the verdicts on their calls, and without what is dropped."""
        # Conversations that were read from the same record follow each other, and have the number of the record.
        all_conversations = self.file_reading.iter_conversations(keeps_records=True)
        for _, conversations in groupby(all_conversations, attrgetter("first_record_number")):
            # The group gets no name, which would keep its record, perhaps a whole file, while the next one is read.
            yield from self._build_record_group(conversations).iter_cleaned_records()

    def _build_record_group(self, conversations: Iterator[ReadConversation]) -> "_RecordGroup":
        """Collect the records of some conversations, and decide what is left out of each of them.

        This may be single calls with the answers that rested on them, or the whole conversation. It is added to
        `self.counts`.

        Args:
            conversations: The conversations that were read from the same records, at least one.
        """
        first_conversation = next(conversations)
        # The group takes its records before the next conversation is read, because `file_reading` then forgets the
        # records of earlier conversations.
        group = _RecordGroup.from_first_conversation(first_conversation, self.file_reading.record_by_number)

        for conversation in chain([first_conversation], conversations):
            name = self.file_reading.format_conversation_name(conversation)
            verdicts = self.verdicts_by_conversation.get(name, [])
            left_out = _choose_left_out(conversation, verdicts, self.drop_choice)
            group.add_conversation(conversation, verdicts, left_out)
            self.counts.add_left_out(left_out)
        return group


def _group_verdicts_by_conversation(all_verdicts: pl.DataFrame, source_name: str) -> dict[str, list[Verdict]]:
    """Select the verdicts on the calls of one file, and group them by conversation.

    Args:
        all_verdicts: The verdicts on the calls of all files.
        source_name: The name of the file.

    Returns:
        The verdicts by the name of their conversation, such as traces.jsonl:12. They no longer have these two columns.
    """
    verdicts_by_conversation: dict[str, list[Verdict]] = {}
    verdicts_of_file = all_verdicts.filter(pl.col("source") == source_name).drop("source")
    for row in verdicts_of_file.iter_rows(named=True):
        conversation = row.pop("conversation")
        verdicts_by_conversation.setdefault(conversation, []).append(row)
    return verdicts_by_conversation


def _choose_unused_file_name(file_stem: str, taken_names: Collection[str]) -> str:
    """Return a file name that is not among `taken_names`: a.jsonl, or if that is taken a-2.jsonl, then a-3.jsonl."""
    name = f"{file_stem}.jsonl"
    number = 2
    while name in taken_names:
        name = f"{file_stem}-{number}.jsonl"
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
        calls: the calls that are left out, with their results.
        messages: the messages that are left out: of the assistant, or all if the whole conversation is left out.
        is_whole_conversation: whether the whole conversation is left out.
    """

    calls: Sequence[RecordedCall]
    messages: Sequence[RecordedMessage]
    is_whole_conversation: bool = False


NOTHING_LEFT_OUT = _LeftOut(calls=(), messages=())


@dataclass
class _RecordGroup:
    """The records that one or several conversations were read from, and what is left out of them.

    Mostly a record holds one conversation. It may hold several, and in some forms all records of a file together are
    one conversation. First `add_conversation` is called for each of the conversations, then `iter_cleaned_records`
    once.

    Attributes:
        form_name: the name of the records' form.
        records: the records as they were read.
        is_whole_file: whether the conversations were read from all of the records together.
        calls_left_out: the calls that are left out; `add_conversation` fills it and the next three.
        message_paths_left_out: the paths in the records of the messages that are left out.
        verdicts: the verdicts on the calls of the conversations that stay.
        remaining_conversation_count: how many conversations stay.
    """

    form_name: str
    records: Sequence[Any]
    is_whole_file: bool
    calls_left_out: list[RecordedCall] = field(default_factory=list)
    message_paths_left_out: list[RecordPath] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    remaining_conversation_count: int = 0

    @staticmethod
    def from_first_conversation(
        first_conversation: ReadConversation, record_by_number: Mapping[int, Any]
    ) -> "_RecordGroup":
        """Create a group with the records of a conversation. Nothing is left out of them yet.

        Args:
            first_conversation: The first conversation that was read from these records.
            record_by_number: The records of the file by number. Those before the conversation may be missing.
        """
        # The conversation's records are its first one and those that follow, `record_count` in all.
        first_number = first_conversation.first_record_number
        record_count = first_conversation.record_count
        numbers_from_first = sorted(number for number in record_by_number if number >= first_number)
        numbers_of_group = numbers_from_first[:record_count]
        return _RecordGroup(
            form_name=first_conversation.form_name,
            records=[record_by_number[number] for number in numbers_of_group],
            is_whole_file=record_count > 1,  # a conversation of several records takes up its whole file
        )

    def add_conversation(self, conversation: ReadConversation, verdicts: Sequence[Verdict], left_out: _LeftOut) -> None:
        """Add a conversation of these records, with the verdicts on its calls and with what is left out of it."""
        self.form_name = conversation.form_name
        self.calls_left_out += left_out.calls
        self.message_paths_left_out += [message.place for message in left_out.messages if message.place is not None]

        if not left_out.is_whole_conversation:
            self.remaining_conversation_count += 1
            self.verdicts += verdicts

    def iter_cleaned_records(self) -> Iterator[Any]:
        """Remove from the records what is left out, and add the verdicts to the first one.

        Yields:
            The records that remain. There are none if all conversations are left out.

        Raises:
            UserError: One of several conversations in a record is to be left out, but the form does not allow it.
        """
        if self.remaining_conversation_count == 0:
            return
        first_record, *later_records = self._build_remaining_records()
        yield _add_verdicts(first_record, self.verdicts)
        yield from later_records

    def _build_remaining_records(self) -> list[Any]:
        """Return the records without the calls and messages that are left out.

        This is a single record, unless the records together are one conversation (`is_whole_file`). At least one
        remains, because this is not called if all conversations are left out.

        Raises:
            UserError: Records of this form can only be left out as a whole.
        """
        if self.calls_left_out and not can_drop_calls(self.form_name):
            raise UserError(
                f"--drop conversations: a record in the form {self.form_name} holds several conversations, "
                "and one of them cannot be left out; write a record or a file for each"
            )

        if self.is_whole_file:  # all records together are one conversation
            return list(drop_calls(self.records, self.calls_left_out, self.message_paths_left_out))
        [record] = self.records
        return [drop_calls(record, self.calls_left_out, self.message_paths_left_out)]


def _choose_left_out(conversation: ReadConversation, verdicts: Sequence[Verdict], drop_choice: DropChoice) -> _LeftOut:
    """Decide what is left out of a conversation.

    Answers that rested only on calls that are left out are left out too.

    Args:
        conversation: The conversation.
        verdicts: The verdicts on its calls.
        drop_choice: What the user wants left out: "conversations" with any unhelpful call, unhelpful "calls", "failed"
            calls, or "nothing".

    Raises:
        UserError: Calls are to be left out, but the form of the conversation allows leaving it out only as a whole.
    """
    messages = conversation.messages
    if drop_choice == "conversations":
        has_unhelpful_call = any(_is_unhelpful(verdict) for verdict in verdicts)
        return _build_left_out_conversation(messages) if has_unhelpful_call else NOTHING_LEFT_OUT

    verdicts_left_out = [verdict for verdict in verdicts if _is_dropped(verdict, drop_choice)]
    if not verdicts_left_out:
        return NOTHING_LEFT_OUT
    _require_droppable_calls(conversation.form_name, drop_choice)
    return _build_left_out_calls(messages, verdicts_left_out)


def _build_left_out_calls(messages: Sequence[RecordedMessage], verdicts: Sequence[Verdict]) -> _LeftOut:
    """Leave out the calls with these verdicts, and the answers that rested on them alone."""
    calls = [messages[verdict["turn"]].calls[verdict["call"]] for verdict in verdicts]
    return _LeftOut(calls, _select_unsupported_messages(messages, verdicts))


def _require_droppable_calls(form_name: str, drop_choice: DropChoice) -> None:
    """Raise UserError if only whole conversations can be left out of records in a form, no single calls."""
    if not can_drop_calls(form_name):
        raise UserError(
            f"--drop {drop_choice}: conversations in the form {form_name} can be left out as a whole alone; "
            "write --drop conversations"
        )


def _build_left_out_conversation(messages: Sequence[RecordedMessage]) -> _LeftOut:
    """Leave out a conversation as a whole, with all of its calls and messages."""
    all_calls = [call for message in messages for call in message.calls]
    return _LeftOut(all_calls, messages, is_whole_conversation=True)


def _is_dropped(verdict: Verdict, drop_choice: DropChoice) -> bool:
    """Return whether a single call is left out, by its verdict and the value of `drop_choice`."""
    if drop_choice == "calls":
        return _is_unhelpful(verdict)
    return drop_choice == "failed" and verdict["verdict"] == FAILED


def _is_unhelpful(verdict: Verdict) -> bool:
    """Return whether a call does not help, or has failed though the answer claims success."""
    return bool(verdict["verdict"] == DOES_NOT_HELP or verdict["reason"] == SUCCESS_CLAIMED)


def _add_verdicts(record: Any, verdicts: Sequence[Verdict]) -> Any:
    """Return a record with its verdicts in the field VERDICTS_FIELD.

    In ATIF, a format of agent trajectories with a field `steps`, that field is under `extra`. A record that is a list
    is returned as it is.
    """
    if not isinstance(record, Mapping):
        return record
    if "steps" in record:
        extra_fields = record.get("extra") or {}
        return {**record, "extra": {**extra_fields, VERDICTS_FIELD: list(verdicts)}}
    return {**record, VERDICTS_FIELD: list(verdicts)}


def _select_unsupported_messages(
    messages: Sequence[RecordedMessage], left_out_verdicts: Sequence[Verdict]
) -> list[RecordedMessage]:
    """Select the answers of the assistant that have to be left out together with some calls.

    A model must not learn to answer "17 degrees" without the call that gave it. If all calls between a message of the
    user and the next one are left out, so are the assistant's messages from the first of these calls to that next
    message. They stay if the answer was as likely without each of the calls, because then it rests on earlier words.

    Args:
        messages: The messages of the conversation.
        left_out_verdicts: The verdicts on the calls that are left out.
    """
    unsupported: list[RecordedMessage] = []
    for message_range in _iter_ranges_by_user_message(messages):
        # `turn` is the number of the message with the call.
        left_out_here = [verdict for verdict in left_out_verdicts if verdict["turn"] in message_range]
        if left_out_here and _loses_support(messages, message_range, left_out_here):
            first_turn = min(verdict["turn"] for verdict in left_out_here)
            unsupported += _select_assistant_messages(messages[first_turn : message_range.stop])
    return unsupported


def _select_assistant_messages(messages: Sequence[RecordedMessage]) -> list[RecordedMessage]:
    """Return the messages that the assistant wrote."""
    return [message for message in messages if message.role == "assistant"]


def _loses_support(
    messages: Sequence[RecordedMessage], message_range: range, left_out_verdicts: Sequence[Verdict]
) -> bool:
    """Return whether an answer has to go too, because all calls that it could rest on are left out.

    Args:
        messages: The messages of the conversation.
        message_range: The numbers of the messages from one of the user up to the next one, which is not included.
        left_out_verdicts: The verdicts on the calls in this range that are left out, at least one.

    Returns:
        False if another call of the range stays. False too if the answer was as likely without any of the calls left
        out: it then rests on what was said before. Otherwise True.
    """
    call_count = sum(len(messages[number].calls) for number in message_range)
    if len(left_out_verdicts) < call_count:  # some calls stay
        return False

    rests_on_earlier_words = all(verdict["reason"] == AS_LIKELY_WITHOUT_CALL for verdict in left_out_verdicts)
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
        The examples in the form of TRL: `prompt`, `chosen` and `rejected` are lists of OpenAI messages. Two further
        fields, `gain_chosen` and `gain_rejected`, hold the gains of the two calls.
    """
    pairs = [_CallPair(*row) for row in query(judgement.database, PAIRS_SQL).iter_rows()]

    conversation_names: set[str] = set()
    for pair in pairs:
        conversation_names |= {pair.chosen_conversation, pair.rejected_conversation}
    messages_by_name = _read_messages_by_name(judgement, conversation_names)

    records = []
    for pair in pairs:
        chosen_messages = messages_by_name[pair.chosen_conversation]
        rejected_messages = messages_by_name[pair.rejected_conversation]
        records.append(pair.build_record(chosen_messages, rejected_messages))
    return records


class _CallPair(NamedTuple):
    """A helpful and a needless call after the same messages, as a row that PAIRS_SQL selects.

    Attributes:
        chosen_conversation: the name of the conversation whose call helps.
        rejected_conversation: the name of the conversation whose call does not help.
        call_message_index: the number of the message with the call, in both; all messages before it are alike.
        chosen_gain: the gain of the helpful call.
        rejected_gain: the gain of the other call.
    """

    chosen_conversation: str
    rejected_conversation: str
    call_message_index: int
    chosen_gain: float
    rejected_gain: float

    def build_record(
        self, chosen_messages: Sequence[RecordedMessage], rejected_messages: Sequence[RecordedMessage]
    ) -> dict[str, Any]:
        """Build the preference pair as a record of pairs.jsonl: the shared messages, and the two that differ.

        Args:
            chosen_messages: All messages of the conversation whose call helps.
            rejected_messages: All messages of the other conversation.
        """
        end = self.call_message_index + 1  # the pair ends with the message of the call
        return {
            "prompt": _to_openai_messages(chosen_messages[: self.call_message_index]),
            "chosen": _to_openai_messages(chosen_messages[self.call_message_index : end]),
            "rejected": _to_openai_messages(rejected_messages[self.call_message_index : end]),
            "gain_chosen": self.chosen_gain,
            "gain_rejected": self.rejected_gain,
        }


def _read_messages_by_name(
    judgement: Judgement, conversation_names: Collection[str]
) -> dict[str, tuple[RecordedMessage, ...]]:
    """Return the messages of the named conversations, by name."""
    if not conversation_names:
        return {}
    plan = judgement.plan
    table = plan.lake.get_table(recorded_conversations.TABLE_NAME)
    conversations = table.scan_parts(plan.conversation_shards_by_name)

    is_wanted = pl.col("conversation").is_in(list(conversation_names))
    wanted = conversations.filter(is_wanted).select("conversation", "messages").collect()
    return {name: parse_messages(messages_json) for name, messages_json in wanted.iter_rows()}


def _to_openai_messages(messages: Sequence[RecordedMessage]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API writes them; results are messages of the role tool."""
    return [message for _, message in iter_indexed_openai_messages(messages)]
