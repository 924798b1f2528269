"""What the page asks of the file of `judge`: calls by gain, and one conversation with the swapped results of a call."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolformer_dag.explorer.warehouse_reader import WarehouseReader

TRACE_KEY = ("conversation", "turn", "call")
MOST_EXPORTED = 100
"""Calls of an exported page, each with its conversation."""
MOST_CALLS = 200
"""Calls that the list shows, and those nearest the chosen one that a conversation shows."""
MOST_MESSAGES = 100
"""Messages around the chosen call that are shown of a long conversation."""
LONG = 2000
"""Characters of a message, of arguments and of a result that are shown."""
RECORD_ID = "SELECT column_name FROM duckdb_columns() WHERE (table_name, column_name) = ('trace_calls', 'record_id')"
CALL = f"""
conversation, {{record_id}}, turn, call, tool, gain, delta, overlap, swapped_gains, verdict, reason, tokens,
arguments[:{LONG}] AS arguments, length(arguments) AS arguments_length,
result[:{LONG}] AS result, length(result) AS result_length
"""
LISTED = f"""
SELECT conversation, {{record_id}}, turn, call, tool, gain, verdict, reason, count(*) OVER () AS fitting
FROM trace_calls
WHERE $tool IN ('', tool) AND $verdict IN ('', verdict)
ORDER BY gain NULLS LAST, conversation, turn, call LIMIT {MOST_CALLS}
"""
NAMED = "SELECT DISTINCT {0} FROM trace_calls ORDER BY {0}"
COUNTS = "SELECT tool, verdict, count(*) AS calls FROM trace_calls GROUP BY ALL ORDER BY ALL"
JUDGE = "SELECT model FROM trace_settings"
CHANCE = "SELECT share, trace_threshold(share) AS threshold FROM trace_settings"
FIRST = f"""
SELECT count(*) AS messages, greatest(0, least($turn - {MOST_MESSAGES // 2}, count(*) - {MOST_MESSAGES})) AS first
FROM trace_messages WHERE conversation = $conversation
"""
SAID = f"""
SELECT number, role, text[:{LONG}] AS text, length(text) AS length FROM trace_messages
WHERE conversation = $conversation AND number >= $first ORDER BY number LIMIT {MOST_MESSAGES}
"""
CALLED = f"""
SELECT {CALL} FROM trace_calls
WHERE conversation = $conversation AND turn BETWEEN $first AND $first + {MOST_MESSAGES - 1}
ORDER BY abs(turn - $turn), abs(call - $call), turn, call LIMIT {MOST_CALLS}
"""
SWAPPED = f"""
SELECT gain, overlap, result[:{LONG}] AS result, length(result) AS result_length FROM trace_chance
WHERE conversation = $conversation AND turn = $turn AND call = $call ORDER BY gain DESC, swap
"""


def judge_name(reader: WarehouseReader) -> str:
    """Return the model that judged; of a path on this machine the last part, since pages are passed on."""
    [row] = reader.rows(JUDGE)
    return name_to_show(row["model"])


def name_to_show(model: str) -> str:
    """Return a model's name without the folders of this machine."""
    return Path(model).name if Path(model).is_absolute() else model


def _record_id(reader: WarehouseReader) -> str:
    """Return SQL for the record's own id; it is null in files that were judged before it was stored."""
    return "record_id" if reader.rows(RECORD_ID) else "NULL AS record_id"


def recorded_calls(reader: WarehouseReader, asked: Mapping[str, str]) -> dict[str, Any]:
    """Return calls, lowest gain first and those without one last; and what they can be filtered by.

    `asked`: tool and verdict, each empty for all. `fitting`: how many calls there are of which MOST_CALLS are listed.
    """
    listed = LISTED.format(record_id=_record_id(reader))
    rows = reader.rows(listed, {name: asked.get(name, "") for name in ("tool", "verdict")})
    tools, verdicts = ([row[name] for row in reader.rows(NAMED.format(name))] for name in ("tool", "verdict"))
    return {"rows": rows, "fitting": rows[0]["fitting"] if rows else 0, "tools": tools, "verdicts": verdicts}


def conversation(reader: WarehouseReader, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the messages and calls around a call, its swapped results, and the threshold of all calls.

    `key`: conversation, turn, call. None where there is no such call.
    """
    place = {name: key[name] for name in ("conversation", "turn")}
    [size] = reader.rows(FIRST, place)
    around = {"conversation": key["conversation"], "first": size["first"]}
    calls = reader.rows(CALLED.format(record_id=_record_id(reader)), {**key, **around})
    if not any(all(call[name] == value for name, value in key.items()) for call in calls):
        return None
    [chance] = reader.rows(CHANCE)
    return {
        **size,
        **chance,
        "said": reader.rows(SAID, around),
        "calls": sorted(calls, key=lambda call: (call["turn"], call["call"])),
        "swapped": reader.rows(SWAPPED, dict(key)),
    }


def exported_conversations(reader: WarehouseReader) -> dict[str, Any]:
    """Return the MOST_EXPORTED calls with the lowest gains as `recorded`, and as `conversations` what each opens.

    `counts`: how many calls of all have a tool and a verdict.
    """
    listed = recorded_calls(reader, {})
    rows = listed["rows"][:MOST_EXPORTED]
    keys = [{name: row[name] for name in TRACE_KEY} for row in rows]
    return {
        "recorded": {**listed, "rows": rows, "counts": reader.rows(COUNTS)},
        "conversations": [{**key, "shown": conversation(reader, key)} for key in keys],
    }
