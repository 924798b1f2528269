"""Write judged conversations again in the form they came in, and pairs of a helpful and a needless call for DPO."""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import orjson

from toolformer_dag.files import file_name, write_output
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import Dropped
from toolformer_dag.traces.conversations import Message, drop, to_openai
from toolformer_dag.traces.judgement import Judgement, Recorded

METADATA = "tool_call_gains"
"""The field that a record gets; in ATIF it stands under `extra`."""
SUFFIX = re.compile(r"\.(?:jsonl|json|ndjson|parquet)(?:\.gz|\.zst)?$")
DOES_NOT_HELP = "does not help"
VERDICTS = "SELECT conversation, turn, call, tool, gain, delta, overlap, verdict, reason FROM trace_calls ORDER BY ALL"
PAIRS = f"""
SELECT DISTINCT ON (a.beginning, a.tool, a.arguments::VARCHAR, b.tool, b.arguments::VARCHAR)
       a.conversation, b.conversation, a.turn, a.gain, b.gain
FROM trace_calls AS a JOIN trace_calls AS b USING (beginning)
WHERE a.verdict = 'helps' AND b.verdict = '{DOES_NOT_HELP}' AND NOT EXISTS (
    FROM trace_calls AS c WHERE (c.conversation, c.turn, c.verdict) = (a.conversation, a.turn, '{DOES_NOT_HELP}'))
ORDER BY ALL
"""


def write_cleaned(judgement: Judgement, folder: Path, dropped: Dropped, force: bool = False) -> dict[str, int]:
    """Write a file of JSON lines per source, and pairs.jsonl where there are any; return file -> lines.

    Where a name is taken a number follows it.

    Raises UserError where a file is there already, without `force`; WriteError.
    """
    verdicts = defaultdict[str, list[dict[str, Any]]](list)
    for row in query(judgement.database, VERDICTS).iter_rows(named=True):
        verdicts[row.pop("conversation")].append(row)
    by_source = defaultdict[str, list[Any]](list)
    for one in judgement.conversations:
        by_source[one.source] += _cleaned(one, verdicts[one.name], dropped)
    files = dict[str, list[Any]]()
    for source, rows in by_source.items():
        files[_free(file_name(SUFFIX.sub("", source)), files)] = rows
    if pairs := list(_pairs(judgement)):
        files[_free("pairs", files)] = pairs
    for name, rows in files.items():
        write_output(folder / name, b"".join(map(_line, rows)), "--out", force)
    return {name: len(rows) for name, rows in files.items()}


def _free(stem: str, taken: Collection[str]) -> str:
    """Return the name of a file that none has: two sources may have one name."""
    names = chain([f"{stem}.jsonl"], (f"{stem}-{number}.jsonl" for number in count(2)))
    return next(name for name in names if name not in taken)


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(row) + b"\n"
    except TypeError:  # a number of more than 64 bits
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _cleaned(one: Recorded, verdicts: Sequence[Mapping[str, Any]], dropped: Dropped) -> Iterator[Mapping[str, Any]]:
    """Yield the record with the verdicts of its calls, without what is dropped; nothing for a dropped conversation."""
    idle = [row for row in verdicts if row["verdict"] == DOES_NOT_HELP]
    if dropped == "conversations" and idle:
        return
    gone = [one.messages[row["turn"]].calls[row["call"]] for row in idle] if dropped == "calls" else []
    record = drop(one.record, gone) if gone else dict(one.record)
    place = {**record.get("extra", {})} if "steps" in record else record
    place[METADATA] = list(verdicts)
    yield {**record, "extra": place} if "steps" in record else record


def _pairs(judgement: Judgement) -> Iterator[dict[str, Any]]:
    """Yield the same turn with a call that helps and with one that does not, as TRL's preference pairs."""
    found = {one.name: one.messages for one in judgement.conversations}
    for chosen, rejected, turn, gain, other in query(judgement.database, PAIRS).iter_rows():
        prompt, better, worse = (_openai(found[name][part]) for name, part in _parts(chosen, rejected, turn))
        yield {"prompt": prompt, "chosen": better, "rejected": worse, "gain_chosen": gain, "gain_rejected": other}


def _parts(chosen: str, rejected: str, turn: int) -> Iterable[tuple[str, slice]]:
    return (chosen, slice(turn)), (chosen, slice(turn, turn + 1)), (rejected, slice(turn, turn + 1))


def _openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message for _, message in to_openai(messages)]
