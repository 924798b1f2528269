"""Queries of the page to the file of `judge`: recorded calls by gain, and a conversation around one of them.

The gain of a call is how much its result lowers the loss of what follows; a swapped result is that of another call.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader
from toolformer_dag.lake.warehouse import WarehouseError

TRACE_KEY_COLUMNS = ("conversation", "turn", "call")
"""The columns that identify a recorded call."""
MAX_EXPORTED_CALLS = 100
"""Calls of an exported page, each with its conversation."""
MAX_CALLS = 200
"""Calls that the list shows, and those nearest the chosen one that a conversation shows."""
MAX_MESSAGES = 100
"""Messages around the chosen call that are shown of a long conversation."""
MAX_TEXT_CHARACTERS = 2000
"""Characters of a message, of arguments and of a result that are shown."""
RECORD_ID_COLUMN_SQL = (
    "SELECT column_name FROM duckdb_columns() WHERE (table_name, column_name) = ('trace_calls', 'record_id')"
)
"""Selects the column of the records' own ids; no row in files that were judged before these were stored."""
CALL_COLUMNS_SQL = f"""
conversation, {{record_id}}, turn, call, tool, gain, delta, overlap, swapped_gains, verdict, reason, tokens,
arguments[:{MAX_TEXT_CHARACTERS}] AS arguments, length(arguments) AS arguments_length,
result[:{MAX_TEXT_CHARACTERS}] AS result, length(result) AS result_length
"""
"""What the page shows of a call within its conversation; `{record_id}` is for `_choose_record_id_column`."""
LISTED_CALLS_SQL = f"""
SELECT conversation, {{record_id}}, turn, call, tool, gain, verdict, reason, count(*) OVER () AS fitting
FROM trace_calls
WHERE $tool IN ('', tool) AND $verdict IN ('', verdict)
ORDER BY gain NULLS LAST, conversation, turn, call LIMIT {MAX_CALLS}
"""
"""Selects the calls of a list; `fitting` is how many there are without the limit.

`{record_id}` is for `_choose_record_id_column`.
"""
TOOL_NAMES_SQL = "SELECT DISTINCT tool FROM trace_calls ORDER BY tool"
"""Selects the tools of recorded calls."""
VERDICTS_SQL = "SELECT DISTINCT verdict FROM trace_calls ORDER BY verdict"
"""Selects the verdicts on recorded calls."""
CALL_COUNTS_SQL = "SELECT tool, verdict, count(*) AS calls FROM trace_calls GROUP BY ALL ORDER BY ALL"
"""Counts the calls by tool and verdict."""
JUDGE_MODEL_SQL = "SELECT model FROM trace_settings"
"""Selects the model that judged."""
CHANCE_SQL = """
SELECT share, threshold FROM trace_settings, trace_calls
WHERE conversation = $conversation AND turn = $turn AND call = $call
"""
"""Selects the share of swapped results that may pass, and the gain above which the call helps."""
MESSAGE_RANGE_SQL = f"""
SELECT count(*) AS messages, greatest(0, least($turn - {MAX_MESSAGES // 2}, count(*) - {MAX_MESSAGES})) AS first
FROM trace_messages WHERE conversation = $conversation
"""
"""Counts the messages of a conversation, and selects the first that is shown around the message $turn."""
SHOWN_MESSAGES_SQL = f"""
SELECT number, role, text[:{MAX_TEXT_CHARACTERS}] AS text, length(text) AS length FROM trace_messages
WHERE conversation = $conversation AND number >= $first ORDER BY number LIMIT {MAX_MESSAGES}
"""
"""Selects the messages from $first on."""
SHOWN_CALLS_SQL = f"""
SELECT {CALL_COLUMNS_SQL} FROM trace_calls
WHERE conversation = $conversation AND turn BETWEEN $first AND $first + {MAX_MESSAGES - 1}
ORDER BY abs(turn - $turn), abs(call - $call), turn, call LIMIT {MAX_CALLS}
"""
"""Selects the calls of these messages that are nearest a call."""
SWAPPED_RESULTS_SQL = f"""
SELECT gain, overlap, result[:{MAX_TEXT_CHARACTERS}] AS result, length(result) AS result_length FROM trace_chance
WHERE conversation = $conversation AND turn = $turn AND call = $call ORDER BY gain DESC, swap
"""
"""Selects the swapped results of a call."""


def query_judge_name(reader: WarehouseReader) -> str:
    """Return the name of the model that judged the conversations.

    Folders of this machine are left out of it, because an exported page is given to other people.

    Raises:
        WarehouseError: The file cannot be read, or does not name the model.
    """
    model_rows = reader.query_rows(JUDGE_MODEL_SQL)
    if not model_rows:
        raise WarehouseError(
            f"{reader.database_path} does not say which model judged; run `toolformer-dag judge` again"
        )
    return shorten_model_name(model_rows[0]["model"])


def shorten_model_name(model_name: str) -> str:
    """Return the last part of a model's name if it is an absolute path. Other names are returned unchanged."""
    path = Path(model_name)
    return path.name if path.is_absolute() else model_name


def _choose_record_id_column(reader: WarehouseReader) -> str:
    """Return the SQL that selects the records' own ids, or nulls if the file was judged before they were stored."""
    has_column = bool(reader.query_rows(RECORD_ID_COLUMN_SQL))
    return "record_id" if has_column else "NULL AS record_id"


def query_recorded_calls(reader: WarehouseReader, request_fields: Mapping[str, str]) -> dict[str, Any]:
    """List recorded calls, the lowest gain first, and calls without a gain last.

    The gain of a call says how much lower the loss of what follows is with its own result than with swapped ones.

    Args:
        reader: Reads the file of judged conversations.
        request_fields: `tool` and `verdict` to filter by. Each may be missing or empty.

    Returns:
        `rows` has at most MAX_CALLS calls, and `fitting` is the number of all calls that pass the filter. `tools` and
        `verdicts` are the values to filter by.

    Raises:
        WarehouseError: The file cannot be read.
    """
    filter_values = {"tool": request_fields.get("tool", ""), "verdict": request_fields.get("verdict", "")}
    sql = LISTED_CALLS_SQL.format(record_id=_choose_record_id_column(reader))
    call_rows = reader.query_rows(sql, filter_values)

    # Every row has the number of calls that there would be without the limit.
    fitting_count = call_rows[0]["fitting"] if call_rows else 0

    return {
        "rows": call_rows,
        "fitting": fitting_count,
        "tools": [row["tool"] for row in reader.query_rows(TOOL_NAMES_SQL)],
        "verdicts": [row["verdict"] for row in reader.query_rows(VERDICTS_SQL)],
    }


def query_conversation(reader: WarehouseReader, call_key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Query the messages and calls around a recorded call.

    Args:
        reader: Reads the file of judged conversations.
        call_key: The columns TRACE_KEY_COLUMNS of the call.

    Returns:
        None if the call does not exist, otherwise
        - `messages`, `first`: How many messages the conversation has, and the number of the first one in `said`.
        - `said`, `calls`: Messages and calls around the call.
        - `swapped`: Results of other calls that were tried in place of its own result.
        - `share`, `threshold`: The share of swapped results that may pass, and the gain above which a call helps.

    Raises:
        WarehouseError: The file cannot be read.
    """
    conversation = call_key["conversation"]
    turn = call_key["turn"]
    # Always one row, because the query counts messages.
    [message_range] = reader.query_rows(MESSAGE_RANGE_SQL, {"conversation": conversation, "turn": turn})
    shown_part = {"conversation": conversation, "first": message_range["first"]}

    call_rows = _query_calls_around(reader, {**call_key, **shown_part})
    call_exists = any(_has_key(call_row, call_key) for call_row in call_rows)
    if not call_exists:
        return None

    # One row, because the call exists.
    [share_and_threshold] = reader.query_rows(CHANCE_SQL, dict(call_key))
    return {
        **message_range,  # `messages` and `first`
        **share_and_threshold,
        "said": reader.query_rows(SHOWN_MESSAGES_SQL, shown_part),
        "calls": call_rows,
        "swapped": reader.query_rows(SWAPPED_RESULTS_SQL, dict(call_key)),
    }


def _query_calls_around(reader: WarehouseReader, query_parameters: Mapping[str, Any]) -> list[Row]:
    """Query the calls that a page shows beside a chosen call: those nearest to it in the shown messages.

    Args:
        reader: Reads the file of judged conversations.
        query_parameters: The key of the chosen call (TRACE_KEY_COLUMNS), and `first`, the number of the first shown
            message.

    Returns:
        At most MAX_CALLS calls, the chosen one included, in the order of the conversation.
    """
    # Files of earlier releases have no column record_id. It is null for them.
    sql = SHOWN_CALLS_SQL.format(record_id=_choose_record_id_column(reader))
    call_rows = reader.query_rows(sql, query_parameters)
    return sorted(call_rows, key=lambda row: (row["turn"], row["call"]))


def _has_key(call_row: Row, call_key: Mapping[str, Any]) -> bool:
    """Return whether the columns of a call have the values of a key."""
    return all(call_row[name] == value for name, value in call_key.items())


def query_exported_conversations(reader: WarehouseReader) -> dict[str, Any]:
    """Collect what an exported page shows of recorded conversations.

    Returns:
        `recorded` has the MAX_EXPORTED_CALLS calls with the lowest gains, and their `counts` by tool and verdict.
        `conversations` has for each of these calls its key and, under `shown`, the result of `query_conversation`.

    Raises:
        WarehouseError: The file cannot be read.
    """
    recorded_calls = query_recorded_calls(reader, {})
    exported_rows = recorded_calls["rows"][:MAX_EXPORTED_CALLS]

    conversations = []
    for call_row in exported_rows:
        call_key = {name: call_row[name] for name in TRACE_KEY_COLUMNS}
        conversations.append({**call_key, "shown": query_conversation(reader, call_key)})

    count_rows = reader.query_rows(CALL_COUNTS_SQL)
    return {
        "recorded": {**recorded_calls, "rows": exported_rows, "counts": count_rows},
        "conversations": conversations,
    }
