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
from typing import Any

import orjson

from toolformer_dag.files import file_name, write_output
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import Dropped
from toolformer_dag.traces.conversations import RecordedMessage, drop, to_openai
from toolformer_dag.traces.judgement import Judgement, Recorded

METADATA = "tool_call_gains"
"""The field that a record gets; in ATIF it stands under `extra`."""
SUFFIX = re.compile(r"\.(?:jsonl|json|ndjson|parquet)(?:\.gz|\.zst)?$")
DOES_NOT_HELP = "does not help"
FAILED = "failed call"
AS_LIKELY_WITHOUT = "as_likely_without"
"""The reason of a call whose answer was known without it: the answer rests on what was said before."""
VERDICTS = "SELECT conversation, turn, call, tool, gain, delta, overlap, verdict, reason FROM trace_calls ORDER BY ALL"
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

    Where a name is taken a number follows it.

    Raises UserError where a file is there already, without `force`; WriteError.
    """
    cleaned = Cleaned({})
    verdicts = defaultdict[str, list[Verdict]](list)
    for row in query(judgement.database, VERDICTS).iter_rows(named=True):
        verdicts[row.pop("conversation")].append(row)
    by_source: dict[str, list[Any]] = {one.source: [] for one in judgement.conversations}
    for one in judgement.conversations:
        record = _cleaned(one, verdicts[one.name], dropped, cleaned)
        if record is not None:
            by_source[one.source].append(record)
    files = dict[str, list[Any]]()
    for source, rows in by_source.items():
        files[_free(file_name(SUFFIX.sub("", source)), files)] = rows
    if pairs := list(_pairs(judgement)):
        files[_free("pairs", files)] = pairs
    for name, rows in files.items():
        write_output(folder / name, b"".join(map(_line, rows)), "--out", force)
        cleaned.lines[name] = len(rows)
    return cleaned


def _free(stem: str, taken: Collection[str]) -> str:
    """Return the name of a file that none has: two sources may have one name."""
    names = chain([f"{stem}.jsonl"], (f"{stem}-{number}.jsonl" for number in count(2)))
    return next(name for name in names if name not in taken)


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(row) + b"\n"
    except TypeError:  # a number of more than 64 bits
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _cleaned(
    conversation: Recorded, verdicts: Sequence[Verdict], dropped: Dropped, cleaned: Cleaned
) -> Mapping[str, Any] | None:
    """Return the record with the verdicts of its calls, without what is dropped; None for a dropped conversation.

    Adds what is left out to the counts of `cleaned`.
    """
    does_not_help = [row for row in verdicts if row["verdict"] == DOES_NOT_HELP]
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


def _pairs(judgement: Judgement) -> Iterator[dict[str, Any]]:
    """Yield the same turn with a call that helps and with one that does not, as TRL's preference pairs."""
    found = {one.name: one.messages for one in judgement.conversations}
    for chosen, rejected, turn, gain, other in query(judgement.database, PAIRS).iter_rows():
        prompt, better, worse = (_openai(found[name][part]) for name, part in _parts(chosen, rejected, turn))
        yield {"prompt": prompt, "chosen": better, "rejected": worse, "gain_chosen": gain, "gain_rejected": other}


def _parts(chosen: str, rejected: str, turn: int) -> Iterable[tuple[str, slice]]:
    return (chosen, slice(turn)), (chosen, slice(turn, turn + 1)), (rejected, slice(turn, turn + 1))


def _openai(messages: Sequence[RecordedMessage]) -> list[dict[str, Any]]:
    return [message for _, message in to_openai(messages)]
