"""Queries of the page to the file of `judge`: recorded calls by gain, and a conversation around one of them.

The gain of a call is how much its result lowers the loss of what follows; a swapped result is that of another call.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader
from toolformer_dag.lake.warehouse import WarehouseError

TRACE_KEY = ("conversation", "turn", "call")
"""The columns that identify a recorded call."""
MOST_EXPORTED = 100
"""Calls of an exported page, each with its conversation."""
MOST_CALLS = 200
"""Calls that the list shows, and those nearest the chosen one that a conversation shows."""
MOST_MESSAGES = 100
"""Messages around the chosen call that are shown of a long conversation."""
LONG = 2000
"""Characters of a message, of arguments and of a result that are shown."""
RECORD_ID = "SELECT column_name FROM duckdb_columns() WHERE (table_name, column_name) = ('trace_calls', 'record_id')"
"""Selects the column of the records' own ids; no row in files that were judged before these were stored."""
CALL = f"""
conversation, {{record_id}}, turn, call, tool, gain, delta, overlap, swapped_gains, verdict, reason, tokens,
arguments[:{LONG}] AS arguments, length(arguments) AS arguments_length,
result[:{LONG}] AS result, length(result) AS result_length
"""
"""What the page shows of a call within its conversation; `{record_id}` is for `_choose_record_id_column`."""
LISTED = f"""
SELECT conversation, {{record_id}}, turn, call, tool, gain, verdict, reason, count(*) OVER () AS fitting
FROM trace_calls
WHERE $tool IN ('', tool) AND $verdict IN ('', verdict)
ORDER BY gain NULLS LAST, conversation, turn, call LIMIT {MOST_CALLS}
"""
"""Selects the calls of a list; `fitting` is how many there are without the limit, `{record_id}` as in CALL."""
TOOLS_NAMED = "SELECT DISTINCT tool FROM trace_calls ORDER BY tool"
"""Selects the tools of recorded calls."""
VERDICTS_NAMED = "SELECT DISTINCT verdict FROM trace_calls ORDER BY verdict"
"""Selects the verdicts on recorded calls."""
COUNTS = "SELECT tool, verdict, count(*) AS calls FROM trace_calls GROUP BY ALL ORDER BY ALL"
"""Counts the calls by tool and verdict."""
JUDGE = "SELECT model FROM trace_settings"
"""Selects the model that judged."""
CHANCE = """
SELECT share, threshold FROM trace_settings, trace_calls
WHERE conversation = $conversation AND turn = $turn AND call = $call
"""
"""Selects the share of swapped results that may pass, and the gain above which the call helps."""
FIRST = f"""
SELECT count(*) AS messages, greatest(0, least($turn - {MOST_MESSAGES // 2}, count(*) - {MOST_MESSAGES})) AS first
FROM trace_messages WHERE conversation = $conversation
"""
"""Counts the messages of a conversation, and selects the first that is shown around the message $turn."""
SAID = f"""
SELECT number, role, text[:{LONG}] AS text, length(text) AS length FROM trace_messages
WHERE conversation = $conversation AND number >= $first ORDER BY number LIMIT {MOST_MESSAGES}
"""
"""Selects the messages from $first on."""
CALLED = f"""
SELECT {CALL} FROM trace_calls
WHERE conversation = $conversation AND turn BETWEEN $first AND $first + {MOST_MESSAGES - 1}
ORDER BY abs(turn - $turn), abs(call - $call), turn, call LIMIT {MOST_CALLS}
"""
"""Selects the calls of these messages that are nearest a call."""
SWAPPED = f"""
SELECT gain, overlap, result[:{LONG}] AS result, length(result) AS result_length FROM trace_chance
WHERE conversation = $conversation AND turn = $turn AND call = $call ORDER BY gain DESC, swap
"""
"""Selects the swapped results of a call."""


def query_judge_name(reader: WarehouseReader) -> str:
    """Return the name of the model that judged, without folders of this machine: pages are passed on.

    Raises WarehouseError, also where the file does not name the model.
    """
    rows = reader.rows(JUDGE)
    if not rows:
        raise WarehouseError(f"{reader.database} does not say which model judged; run `toolformer-dag judge` again")
    return shorten_model_name(rows[0]["model"])


def shorten_model_name(model: str) -> str:
    """Return a model's name, or of an absolute path its last part only."""
    return Path(model).name if Path(model).is_absolute() else model


def _choose_record_id_column(reader: WarehouseReader) -> str:
    """Return SQL for the column of the records' own ids; it is null in files that were judged before it existed."""
    return "record_id" if reader.rows(RECORD_ID) else "NULL AS record_id"


def recorded_calls(reader: WarehouseReader, query: Mapping[str, str]) -> dict[str, Any]:
    """List recorded calls, the lowest gain first, and calls without a gain last.

    Args:
        query: `tool` and `verdict` to filter by. Each may be missing or empty.

    Returns:
        At most MOST_CALLS `rows`, the number of all calls that fit (`fitting`), and the `tools` and `verdicts` to
        filter by.

    Raises:
        WarehouseError: The file cannot be read.
    """
    filters = {"tool": query.get("tool", ""), "verdict": query.get("verdict", "")}
    sql = LISTED.format(record_id=_choose_record_id_column(reader))
    rows = reader.rows(sql, filters)
    fitting = rows[0]["fitting"] if rows else 0  # every row has the number of calls without the limit

    return {
        "rows": rows,
        "fitting": fitting,
        "tools": [row["tool"] for row in reader.rows(TOOLS_NAMED)],
        "verdicts": [row["verdict"] for row in reader.rows(VERDICTS_NAMED)],
    }


def conversation(reader: WarehouseReader, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Query the messages and calls around a recorded call.

    Args:
        key: The columns TRACE_KEY of the call.

    Returns:
        None if the call does not exist, otherwise
        - `messages`, `first`: How many messages the conversation has, and the number of the first one in `said`.
        - `said`, `calls`: Messages and calls around the call.
        - `swapped`: Results that were tried in place of its own.
        - `share`, `threshold`: The share of swapped results that may pass, and the gain above which a call helps.

    Raises:
        WarehouseError: The file cannot be read.
    """
    [extent] = reader.rows(FIRST, {"conversation": key["conversation"], "turn": key["turn"]})
    shown_part = {"conversation": key["conversation"], "first": extent["first"]}

    calls = _query_calls_around(reader, {**key, **shown_part})
    call_exists = any(_has_key(call, key) for call in calls)
    if not call_exists:
        return None

    [chance] = reader.rows(CHANCE, dict(key))
    return {
        **extent,  # `messages` and `first`
        **chance,  # `share` and `threshold`
        "said": reader.rows(SAID, shown_part),
        "calls": calls,
        "swapped": reader.rows(SWAPPED, dict(key)),
    }


def _query_calls_around(reader: WarehouseReader, key_and_first: Mapping[str, Any]) -> list[Row]:
    """Return the calls nearest a call, in order, from the message `first` on. key_and_first: its TRACE_KEY, `first`."""
    sql = CALLED.format(record_id=_choose_record_id_column(reader))
    calls = reader.rows(sql, key_and_first)
    return sorted(calls, key=lambda call: (call["turn"], call["call"]))


def _has_key(call: Row, key: Mapping[str, Any]) -> bool:
    """Return whether a call has the values of a key."""
    return all(call[name] == value for name, value in key.items())


def query_exported_conversations(reader: WarehouseReader) -> dict[str, Any]:
    """Collect what an exported page shows of recorded conversations.

    Returns:
        `recorded` has the MOST_EXPORTED calls with the lowest gains, and `counts` by tool and verdict.
        `conversations` has for each of these calls its key and, under `shown`, its `conversation`.

    Raises:
        WarehouseError: The file cannot be read.
    """
    recorded = recorded_calls(reader, {})
    rows = recorded["rows"][:MOST_EXPORTED]

    conversations = []
    for row in rows:
        key = {name: row[name] for name in TRACE_KEY}
        conversations.append({**key, "shown": conversation(reader, key)})

    return {
        "recorded": {**recorded, "rows": rows, "counts": reader.rows(COUNTS)},
        "conversations": conversations,
    }
