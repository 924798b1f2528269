"""Write judged conversations again in the form they came in, and pairs of a helpful and a needless call for DPO.

A call that is left out takes the answer with it that rested on nothing else (`_without_support`): an answer without the
call that it was read from teaches a model to invent.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import polars as pl

from toolformer_dag.files import UserError, WriteError, beside, file_name, replace_whole
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import Dropped, recorded_conversations
from toolformer_dag.traces.conversations import RecordedMessage, drop, to_openai
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


def write_cleaned(judgement: Judgement, folder: Path, dropped: Dropped, force: bool = False) -> Cleaned:
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


def _write_lines(file: Path, rows: Iterable[Mapping[str, Any]], force: bool) -> int:
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
    of_source = verdicts.filter(pl.col("source") == reading.source.name).drop("source")
    verdicts_of: dict[str, list[Verdict]] = defaultdict(list)
    for row in of_source.iter_rows(named=True):
        verdicts_of[row.pop("conversation")].append(row)
    for conversation in reading.conversations(keeps_records=True):
        recorded = _Recorded(reading.records[conversation.number], conversation.messages)
        record = _cleaned(recorded, verdicts_of[reading.name_of(conversation)], dropped, cleaned)
        if record is not None:
            yield record


def _free(stem: str, taken: Collection[str]) -> str:
    """Return the name of a file that none has: two sources may have one name."""
    names = chain([f"{stem}.jsonl"], (f"{stem}-{number}.jsonl" for number in count(2)))
    return next(name for name in names if name not in taken)


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(row) + b"\n"
    except TypeError:  # a number of more than 64 bits
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


class _Recorded(NamedTuple):
    """A record, and the messages that were read from it."""

    record: Mapping[str, Any]
    messages: Sequence[RecordedMessage]


def _cleaned(
    conversation: _Recorded, verdicts: Sequence[Verdict], dropped: Dropped, cleaned: Cleaned
) -> Mapping[str, Any] | None:
    """Return the record with the verdicts of its calls, without what is dropped; None for a dropped conversation.

    Adds what is left out to the counts of `cleaned`.
    """
    does_not_help = [row for row in verdicts if row["verdict"] == DOES_NOT_HELP or row["reason"] == SUCCESS_CLAIMED]
    if dropped == "conversations" and does_not_help:
        cleaned.conversations += 1
        return None
    gone: Sequence[Verdict] = ()
    if dropped == "calls":
        gone = does_not_help
    elif dropped == "failed":
        gone = [row for row in verdicts if row["verdict"] == FAILED]
    record = dict(conversation.record)
    if gone:
        calls = [conversation.messages[row["turn"]].calls[row["call"]] for row in gone]
        answers = _without_support(conversation.messages, gone)
        raw_messages = [message.raw_number for message in answers if message.raw_number is not None]
        record = drop(conversation.record, calls, raw_messages)
        cleaned.calls += len(calls)
        cleaned.answers += sum(1 for message in answers if message.content.strip())
    place = {**record.get("extra", {})} if "steps" in record else record
    place[METADATA] = list(verdicts)
    return {**record, "extra": place} if "steps" in record else record


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
    """Return the same turn with a call that helps and with one that does not, as TRL's preference pairs."""
    rows = query(judgement.database, PAIRS).rows()
    names = {name for row in rows for name in row[:2]}
    messages = _messages(judgement, names)
    pairs = []
    for chosen, rejected, turn, gain, other in rows:
        prompt, better, worse = (_openai(messages[name][part]) for name, part in _parts(chosen, rejected, turn))
        pair = {"prompt": prompt, "chosen": better, "rejected": worse, "gain_chosen": gain, "gain_rejected": other}
        pairs.append(pair)
    return pairs


def _messages(judgement: Judgement, names: Collection[str]) -> dict[str, tuple[RecordedMessage, ...]]:
    """Return the messages of the conversations of these names."""
    if not names:
        return {}
    table = judgement.plan.lake.table(recorded_conversations.NAME).scan(judgement.plan.conversations)
    wanted = table.filter(pl.col("conversation").is_in(list(names))).select("conversation", "messages").collect()
    return {name: messages_of(stored) for name, stored in wanted.iter_rows()}


def _parts(chosen: str, rejected: str, turn: int) -> Iterable[tuple[str, slice]]:
    return (chosen, slice(turn)), (chosen, slice(turn, turn + 1)), (rejected, slice(turn, turn + 1))


def _openai(messages: Sequence[RecordedMessage]) -> list[dict[str, Any]]:
    return [message for _, message in to_openai(messages)]
