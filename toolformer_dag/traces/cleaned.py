"""Write judged conversations again in the form they came in, and pairs of a helpful and a needless call for DPO."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
WHERE a.verdict = 'helps' AND b.verdict = '{DOES_NOT_HELP}'
ORDER BY ALL
"""


def write_cleaned(judgement: Judgement, folder: Path, dropped: Dropped, force: bool = False) -> dict[str, int]:
    """Write a file of JSON lines per source, and pairs.jsonl where there are any; return file -> lines.

    Raises UserError where a file is there already, without `force`; WriteError.
    """
    verdicts = defaultdict[str, list[dict[str, Any]]](list)
    for row in query(judgement.database, VERDICTS).iter_rows(named=True):
        verdicts[row.pop("conversation")].append(row)
    files = defaultdict[str, list[Any]](list)
    for one in judgement.conversations:
        files[f"{file_name(SUFFIX.sub('', one.source))}.jsonl"] += _cleaned(one, verdicts[one.name], dropped)
    pairs = list(_pairs(judgement))
    files |= {"pairs.jsonl": pairs} if pairs else {}
    for name, rows in files.items():
        write_output(folder / name, b"".join(orjson.dumps(row) + b"\n" for row in rows), "--out", force)
    return {name: len(rows) for name, rows in files.items()}


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
