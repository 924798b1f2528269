"""Queries of the page to the warehouse about calls: counts by threshold, the calls near it, a text with its calls.

A tool is named here by the key of its settings. tau is the threshold tau_f, and delta what it is compared with (paper,
section 2 "Filtering API Calls").
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader

MAX_CALLS_PER_SIDE = 100
"""Calls that are shown on each side of the threshold."""
MAX_CELL_CHARACTERS = 300
"""Characters of an input or a result that a table shows. The page requests the whole text when it is needed."""
CUT_SQL = f"[:{MAX_CELL_CHARACTERS}]"
"""Cuts a text to the characters that a table shows, written after the name of a column."""
EXCERPT_CHARACTERS = 60
"""Characters of the text on each side of a call in the table."""
TOOLS_SQL = """
SELECT lanes.tool, lanes.name, lanes.tau_f, by_chance, verdict, exact_above, places, sampled, swaps, swapped,
       (SELECT count(*) FROM filtered_calls WHERE filtered_calls.tool = lanes.tool) AS kept
FROM lanes LEFT JOIN filter_rules USING (tool) LEFT JOIN loss_floors USING (tool) LEFT JOIN control_sizes USING (tool)
ORDER BY lanes.rowid
"""
"""Selects a row per tool: its threshold and how that was found, and its kept calls."""
CURVE_COLUMNS = (
    "scored",
    "calls",
    "examples",
    "kept_swapped",
    "by_chance",
    "by_chance_low",
    "by_chance_high",
    "fdr",
    "fdr_high",
)
"""Columns of curve_statistics that the page draws over tau."""
CURVE_LISTS_SQL = ", ".join(f"list({name} ORDER BY tau_f) AS {name}" for name in CURVE_COLUMNS)
CURVES_SQL = (
    f"SELECT tool, min(round(tau_f * 100))::INTEGER AS first, {CURVE_LISTS_SQL} FROM curve_statistics GROUP BY tool"
)
"""Selects CURVE_COLUMNS by tool, as lists over tau; `first` is the first tau in hundredths."""
HISTOGRAMS_SQL = """
SELECT tool, list(round(delta * 100)::INTEGER ORDER BY delta) AS bins, list(scored ORDER BY delta) AS scored,
       list(swapped ORDER BY delta) AS swapped
FROM curves GROUP BY tool
"""
"""Selects the histograms of delta by tool, of scored and of swapped results; `bins` are in hundredths."""
APPLIED_STATISTICS_SQL = """
SELECT tool, calls, examples, kept_swapped, by_chance, by_chance_low, by_chance_high, fdr, fdr_high
FROM swapped_statistics JOIN filter_statistics USING (tool, tau_f, calls) JOIN lanes USING (tool, tau_f)
"""
"""Selects the statistics at the applied threshold, by tool."""
BEST_CALLS_SQL = """
SELECT DISTINCT ON (tool) tool, shard, digest, segment, position, sample, delta FROM decisions WHERE kept
ORDER BY tool, delta DESC, rowid
"""
"""Selects the kept call with the largest delta, by tool."""
THRESHOLD_REASONS = ("no_threshold", "below_tau_f", "not_best_at_position")
"""The reasons of `why_not` that follow from a threshold and the deltas."""
VERDICT_SQL = "CASE WHEN NOT eligible THEN reason ELSE coalesce(why_not(NULL, best, delta, $tau), 'kept') END"
"""What becomes of a call at the threshold $tau, whatever the limit of texts per tool (examples_per_tool)."""
CALL_COLUMNS_SQL = f"""
rowid AS row, tool, shard, digest, segment, position, sample, domain, date, char_offset, text_offset,
input{CUT_SQL} AS input, length(input) AS input_length, result{CUT_SQL} AS result, length(result) AS result_length,
chain, need, source, echo, p_api, loss_empty, loss_call, loss_before, loss_result, loss_minus, loss_plus, delta,
delta_is_bound, eligible, best, kept, reason
"""
"""What the page shows of a call in a list."""


class Side(NamedTuple):
    """The calls on one side of a threshold.

    Attributes:
        condition_sql: The SQL condition that a call is on this side.
        order_sql: The SQL order in which the calls nearest to the threshold come first.
    """

    condition_sql: str
    order_sql: str


AT_OR_ABOVE = Side("delta >= $tau", "delta, rowid")
"""Calls that the threshold $tau lets stay."""
BELOW = Side("NOT delta >= $tau", "delta DESC, rowid")
"""Calls that it rejects."""
WITHOUT_DELTA = Side("delta IS NULL", "rowid")
"""Calls without losses."""
CALL_KEY_COLUMNS = ("tool", "shard", "digest", "segment", "position", "sample")
"""The columns that identify a call."""
TEXT_KEY_COLUMNS = CALL_KEY_COLUMNS[:4]
"""The columns that identify a text of a tool."""
EXCERPT_START_SQL = f"greatest(1, char_offset - {EXCERPT_CHARACTERS - 1})"
"""The character, counted from 1, at which the excerpt before a call begins."""
EXCERPTS_SQL = f"""
SELECT decisions.rowid AS row,
       substr(text, {EXCERPT_START_SQL}, least({EXCERPT_CHARACTERS}, char_offset)) AS before,
       substr(text, char_offset + 1, {EXCERPT_CHARACTERS}) AS after
FROM decisions JOIN documents ON documents.rowid = decisions.document
WHERE decisions.rowid IN (SELECT unnest($rows::BIGINT[]))
"""
"""Selects the text around calls, by their rows in `decisions`."""


def query_overview(reader: WarehouseReader) -> dict[str, Any]:
    """Collect what every view of the page needs, in the form that the page's script reads.

    Returns:
        - `version`, `about`: The version and the description of the warehouse.
        - `near`: How many calls a list shows on each side of a threshold.
        - `tools`: A row per tool, see `_query_tool_rows`.
        - `reasons`: The reasons for which calls were rejected, to filter by.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    reason_rows = reader.query_rows(
        "SELECT DISTINCT reason FROM rejections WHERE stage = 'filtered_calls' ORDER BY reason"
    )
    return {
        "version": reader.get_version(),
        "about": reader.heading,
        "near": MAX_CALLS_PER_SIDE,
        "tools": _query_tool_rows(reader),
        "reasons": [row["reason"] for row in reason_rows],
    }


def _query_tool_rows(reader: WarehouseReader) -> list[Row]:
    """Query a row per tool: its threshold, how that was found, and its number of kept calls.

    Returns:
        The columns of TOOLS_SQL, and four more rows of the tool, each of which may be None: `curve` (statistics over
        the threshold), `bars` (histograms of delta), `applied` (statistics at the applied threshold) and `best` (the
        best kept call).
    """
    sql_by_name = {
        "curve": CURVES_SQL,
        "bars": HISTOGRAMS_SQL,
        "applied": APPLIED_STATISTICS_SQL,
        "best": BEST_CALLS_SQL,
    }
    tool_rows = reader.query_rows(TOOLS_SQL)
    for name, sql in sql_by_name.items():
        row_by_tool = _map_tools_to_rows(reader.query_rows(sql))
        for tool_row in tool_rows:
            tool_row[name] = row_by_tool.get(tool_row["tool"])
    return tool_rows


def _map_tools_to_rows(tool_rows: Iterable[Row]) -> dict[str, Row]:
    """Return rows by the value of their column `tool`. This column is removed from the rows.

    Example:
        [{"tool": "qa", "delta": 1.0}] becomes {"qa": {"delta": 1.0}}.
    """
    row_by_tool = {}
    for row in tool_rows:
        tool = row.pop("tool")
        row_by_tool[tool] = row
    return row_by_tool


def list_best_calls(page_overview: Mapping[str, Any]) -> list[Row]:
    """Return the best kept call of each tool that has one, with the key columns of the call.

    Args:
        page_overview: The result of `query_overview`.
    """
    best_calls = []
    for tool_row in page_overview["tools"]:
        if tool_row["best"]:
            best_calls.append({**tool_row["best"], "tool": tool_row["tool"]})
    return best_calls


def query_calls_near_threshold(reader: WarehouseReader, request_fields: Mapping[str, str]) -> dict[str, Any]:
    """Find the calls of a tool that are nearest to a threshold tau.

    A call can only stay if its delta (by how much it lowers the loss) is at least tau.

    Args:
        reader: Reads the warehouse.
        request_fields: Such as {"tool": "calculator", "tau": "0.5", "verdict": "kept"}. It may also have `domain`,
            `reason` and `text` to filter by.

    Returns:
        The `version` of the warehouse, and `rows`: at most MAX_CALLS_PER_SIDE calls at or above tau and as many
        below it, the nearest first, then at most as many calls without a delta.

    Raises:
        ValueError: tau is not a number.
        WarehouseError: The warehouse cannot be read.
    """
    call_filter = _build_call_filter(request_fields)
    calls_above = _query_calls_on_side(reader, call_filter, AT_OR_ABOVE)
    calls_below = _query_calls_on_side(reader, call_filter, BELOW)
    unscored_calls = _query_calls_on_side(reader, call_filter, WITHOUT_DELTA)

    tau = call_filter.parameters["tau"]
    scored_calls = sorted([*calls_above, *calls_below], key=lambda row: abs(row["delta"] - tau))
    return {"version": reader.get_version(), "rows": [*scored_calls, *unscored_calls]}


def _query_calls_on_side(reader: WarehouseReader, call_filter: "_CallFilter", side: Side) -> list[Row]:
    """Query the MAX_CALLS_PER_SIDE calls on one side of the threshold that are nearest to it.

    Returns:
        The columns of CALL_COLUMNS_SQL, and `verdict`: what becomes of the call at this threshold.
    """
    sql = (
        f"SELECT {CALL_COLUMNS_SQL}, {VERDICT_SQL} AS verdict FROM decisions "
        f"WHERE {call_filter.condition_sql} AND {side.condition_sql} "
        f"ORDER BY {side.order_sql} LIMIT {MAX_CALLS_PER_SIDE}"
    )
    return reader.query_rows(sql, call_filter.parameters)


def query_excerpts(reader: WarehouseReader, row_numbers: Sequence[int]) -> dict[str, Any]:
    """Query the text before and after some calls.

    Args:
        reader: Reads the warehouse.
        row_numbers: The numbers of the calls in the table `decisions`.

    Returns:
        The `version` of the warehouse, and `rows` with `row` (the number), `before` and `after`.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    version = reader.get_version()
    excerpt_rows = reader.query_rows(EXCERPTS_SQL, {"rows": list(row_numbers)})
    return {"version": version, "rows": excerpt_rows}


def query_call(reader: WarehouseReader, call_key: Mapping[str, Any]) -> Row | None:
    """Query a call with its whole input and result.

    Args:
        reader: Reads the warehouse.
        call_key: The columns CALL_KEY_COLUMNS of the call.

    Returns:
        The columns of the table `decisions`, the `name` of the tool, the `text` in which the call was scored, which is
        cut out of its document, and its `context`, such as a date. None if the call does not exist.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    # The columns `characters` (the length of the text) and `context` are those of the table `texts`.
    sql = f"""
    SELECT decisions.*, lanes.name, substr(documents.text, texts."offset" + 1, characters::BIGINT) AS text, context
    FROM decisions JOIN lanes USING (tool) JOIN texts USING (tool, shard, digest, segment)
    JOIN documents USING (shard, digest) WHERE {_build_equality_condition(CALL_KEY_COLUMNS)}
    """
    rows = reader.query_rows(sql, dict(call_key))
    return rows[0] if rows else None


def query_text_with_calls(reader: WarehouseReader, text_key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Query a text of a tool with the calls of every tool in it.

    Args:
        reader: Reads the warehouse.
        text_key: The columns TEXT_KEY_COLUMNS of the text.

    Returns:
        The columns of the text, and the lists `calls`, `samples`, `results` and `augmented` (the text in C*, the
        corpus with calls). None if the text does not exist.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    text_rows = reader.query_rows(TEXT_SQL, dict(text_key))
    if not text_rows:
        return None

    # A text is a part of a document, from the character `low` up to but not including `high`.
    text_row = text_rows[0]
    start = text_row["offset"]
    end = start + text_row["characters"]
    part_of_document = {"digest": text_key["digest"], "low": start, "high": end}

    return {
        **text_row,
        "calls": _query_calls_within(reader, {**part_of_document, "shard": text_key["shard"]}),
        "samples": _query_samples(reader, text_key),
        "results": _query_results(reader, text_key),
        "augmented": _query_augmented_text(reader, part_of_document),
    }


def _query_calls_within(reader: WarehouseReader, part_of_document: Mapping[str, Any]) -> list[Row]:
    """Query the calls of all tools in a part of a document.

    Args:
        reader: Reads the warehouse.
        part_of_document: `shard` and `digest` of the document, its first character `low`, and `high`, the character
            after its last one.
    """
    return reader.query_rows(
        f"SELECT {CALL_COLUMNS_SQL} FROM decisions "
        "WHERE shard = $shard AND digest = $digest AND char_offset >= $low AND char_offset < $high "
        "ORDER BY char_offset, tool, sample",
        part_of_document,
    )


def _query_augmented_text(reader: WarehouseReader, part_of_document: Mapping[str, Any]) -> list[Row]:
    """Query the first text of C*, the corpus with calls, that overlaps with a part of a document.

    Args:
        reader: Reads the warehouse.
        part_of_document: `digest` of the document, its first character `low`, and `high`, the character after its last
            one.

    Returns:
        One row with `text_with_calls` and `split`, or an empty list.
    """
    return reader.query_rows(
        "SELECT text_with_calls, split FROM augmented_corpus "
        'WHERE digest = $digest AND "offset" < $high AND "offset" + length(text) > $low ORDER BY "offset" LIMIT 1',
        part_of_document,
    )


def _query_samples(reader: WarehouseReader, text_key: Mapping[str, Any]) -> list[Row]:
    """Query the samples of a text: what the model wrote where a call may begin. Samples without a call have a reason.

    Bodies and inputs are cut to their first MAX_CELL_CHARACTERS characters: CUT_SQL is an SQL slice such as `[:300]`.

    Args:
        reader: Reads the warehouse.
        text_key: The columns TEXT_KEY_COLUMNS of the text.
    """
    sql = (
        f"SELECT tool, position, sample, char_offset, p_api, body{CUT_SQL} AS body, "
        f"input{CUT_SQL} AS input, reason "
        f"FROM candidates WHERE {_build_equality_condition(TEXT_KEY_COLUMNS)} ORDER BY position, sample"
    )
    return reader.query_rows(sql, dict(text_key))


def _query_results(reader: WarehouseReader, text_key: Mapping[str, Any]) -> list[Row]:
    """Query the results of the calls that were sampled in a text.

    Args:
        reader: Reads the warehouse.
        text_key: The columns TEXT_KEY_COLUMNS of the text.
    """
    text_condition = _build_equality_condition(TEXT_KEY_COLUMNS)
    sql = (
        f"SELECT input{CUT_SQL} AS input, result{CUT_SQL} AS result, reason, seconds FROM tool_results "
        f"WHERE tool = $tool AND context = (SELECT context FROM texts WHERE {text_condition}) "
        f"AND input IN (SELECT input FROM candidates WHERE {text_condition})"
    )
    return reader.query_rows(sql, dict(text_key))


class _CallFilter(NamedTuple):
    """A filter of calls.

    Attributes:
        condition_sql: An SQL condition on the table `decisions`, with parameters such as $tau.
        parameters: The values of the parameters, by name.
    """

    condition_sql: str
    parameters: dict[str, Any]


def _build_call_filter(request_fields: Mapping[str, str]) -> _CallFilter:
    """Turn the fields of a request into an SQL condition with parameters.

    Args:
        request_fields: `tool` and `tau`, and as filters `domain`, `text`, `verdict` and `reason`. A filter may be
            missing or empty.

    Raises:
        ValueError: tau is not a number.
    """
    condition_sql = " AND ".join(_iter_conditions(request_fields))
    return _CallFilter(condition_sql, _collect_parameters(request_fields))


def _iter_conditions(request_fields: Mapping[str, str]) -> Iterator[str]:
    """Yield the SQL conditions of a request: one for its tool, and one for each filter that is not empty."""
    yield "tool = $tool"
    if request_fields.get("domain"):
        yield "domain = $domain"
    if request_fields.get("text"):
        yield "(contains(lower(input), $text) OR contains(lower(result), $text))"
    if request_fields.get("verdict"):
        yield _build_verdict_condition(request_fields["verdict"])
    if request_fields.get("reason"):
        yield _build_reason_condition(request_fields["reason"])


def _collect_parameters(request_fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the parameters in the conditions of `_iter_conditions`, by name.

    `tool` and `tau` are always there, but `domain`, `reason` and `text` only if the request filters by them. The text
    is in lower case, like the columns that the conditions compare it with.

    Raises:
        ValueError: tau is not a number.
    """
    parameters: dict[str, Any] = {"tool": request_fields.get("tool", ""), "tau": _parse_tau(request_fields)}
    for name in ("domain", "reason"):
        if request_fields.get(name):
            parameters[name] = request_fields[name]
    if request_fields.get("text"):
        parameters["text"] = request_fields["text"].lower()
    return parameters


def _parse_tau(request_fields: Mapping[str, str]) -> float:
    """Return the threshold tau of a request.

    Raises:
        ValueError: It is missing, or not a number.
    """
    try:
        tau = float(request_fields.get("tau", ""))
    except ValueError:
        tau = math.nan
    if math.isnan(tau):
        raise ValueError("tau must be a number, such as 0.5")
    return tau


def _build_verdict_condition(verdict: str) -> str:
    """Return the SQL condition that a call is kept at the threshold $tau or, for any other verdict, that it is not."""
    if verdict == "kept":
        return f"{VERDICT_SQL} = 'kept'"
    return f"{VERDICT_SQL} <> 'kept'"


def _build_reason_condition(reason: str) -> str:
    """Return the SQL condition that a call is rejected for the reason $reason.

    Some reasons depend on the threshold. For these, the call has to be rejected at $tau.
    """
    if reason in THRESHOLD_REASONS:
        return f"{VERDICT_SQL} = $reason"
    return "reason = $reason"


def _build_equality_condition(column_names: Sequence[str]) -> str:
    """Return the SQL condition that each column equals the parameter of its name: "tool = $tool AND shard = $shard"."""
    return " AND ".join(f"{name} = ${name}" for name in column_names)


TEXT_SQL = f"""
SELECT url, documents.domain, title, date, wanted, context, texts."offset", characters,
       substr(text, texts."offset" + 1, characters::BIGINT) AS text
FROM texts JOIN documents USING (shard, digest) WHERE {_build_equality_condition(TEXT_KEY_COLUMNS)}
"""
"""Selects a text of a tool by TEXT_KEY_COLUMNS."""
