"""Queries of the page to the warehouse about calls: counts by threshold, the calls near it, a text with its calls.

A tool is named here by the key of its settings. tau is the threshold tau_f, and delta what it is compared with (paper,
section 2 "Filtering API Calls").
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader

NEAR = 100
"""Calls that are shown on each side of the threshold."""
SHORT = 300
"""Characters of an input or a result that a table shows; the rest is asked for."""
AROUND = 60
"""Characters of the text on each side of a call in the table."""
TOOLS = """
SELECT lanes.tool, lanes.name, lanes.tau_f, by_chance, verdict, exact_above, places, sampled, swaps, swapped,
       (SELECT count(*) FROM filtered_calls WHERE filtered_calls.tool = lanes.tool) AS kept
FROM lanes LEFT JOIN filter_rules USING (tool) LEFT JOIN loss_floors USING (tool) LEFT JOIN control_sizes USING (tool)
ORDER BY lanes.rowid
"""
"""Selects a row per tool: its threshold and how that was found, and its kept calls."""
STATISTICS = (
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
LISTS = ", ".join(f"list({name} ORDER BY tau_f) AS {name}" for name in STATISTICS)
CURVE = f"SELECT tool, min(round(tau_f * 100))::INTEGER AS first, {LISTS} FROM curve_statistics GROUP BY tool"
"""Selects STATISTICS by tool, as lists over tau; `first` is the first tau in hundredths."""
BARS = """
SELECT tool, list(round(delta * 100)::INTEGER ORDER BY delta) AS bins, list(scored ORDER BY delta) AS scored,
       list(swapped ORDER BY delta) AS swapped
FROM curves GROUP BY tool
"""
"""Selects the histograms of delta by tool, of scored and of swapped results; `bins` are in hundredths."""
APPLIED = """
SELECT tool, calls, examples, kept_swapped, by_chance, by_chance_low, by_chance_high, fdr, fdr_high
FROM swapped_statistics JOIN filter_statistics USING (tool, tau_f, calls) JOIN lanes USING (tool, tau_f)
"""
"""Selects the statistics at the applied threshold, by tool."""
BEST = """
SELECT DISTINCT ON (tool) tool, shard, digest, segment, position, sample, delta FROM decisions WHERE kept
ORDER BY tool, delta DESC, rowid
"""
"""Selects the kept call with the largest delta, by tool."""
REASONS_OF_THRESHOLD = ("no_threshold", "below_tau_f", "not_best_at_position")
"""The reasons of `why_not` that follow from a threshold and the deltas."""
VERDICT = "CASE WHEN NOT eligible THEN reason ELSE coalesce(why_not(NULL, best, delta, $tau), 'kept') END"
"""What becomes of a call at the threshold $tau, whatever the limit of texts per tool (examples_per_tool)."""
COLUMNS = f"""
rowid AS row, tool, shard, digest, segment, position, sample, domain, date, char_offset, text_offset,
input[:{SHORT}] AS input, length(input) AS input_length, result[:{SHORT}] AS result, length(result) AS result_length,
chain, need, source, echo, p_api, loss_empty, loss_call, loss_before, loss_result, loss_minus, loss_plus, delta,
delta_is_bound, eligible, best, kept, reason
"""
"""What the page shows of a call in a list."""


class Side(NamedTuple):
    """Calls on a side of the threshold: a condition and an order of SQL, by distance from it."""

    condition: str
    order: str


AT_OR_ABOVE = Side("delta >= $tau", "delta, rowid")
"""Calls that the threshold $tau lets stay."""
BELOW = Side("NOT delta >= $tau", "delta DESC, rowid")
"""Calls that it rejects."""
WITHOUT_DELTA = Side("delta IS NULL", "rowid")
"""Calls without losses."""
KEY = ("tool", "shard", "digest", "segment", "position", "sample")
"""The columns that identify a call."""
TEXT_KEY = KEY[:4]
"""The columns that identify a text of a tool."""
EXCERPTS = f"""
SELECT decisions.rowid AS row,
       substr(text, greatest(1, char_offset - {AROUND - 1}), least({AROUND}, char_offset)) AS before,
       substr(text, char_offset + 1, {AROUND}) AS after
FROM decisions JOIN documents ON documents.rowid = decisions.document
WHERE decisions.rowid IN (SELECT unnest($rows::BIGINT[]))
"""
"""Selects the text around calls, by their rows in `decisions`."""


def overview(reader: WarehouseReader) -> dict[str, Any]:
    """Collect what every view of the page needs, in the form that the page's script reads.

    Returns:
        - `version`, `about`: The version and the description of the warehouse.
        - `near`: How many calls a list shows on each side of a threshold.
        - `tools`: A row per tool, see `_query_tools`.
        - `reasons`: The reasons for which calls were rejected, to filter by.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    reasons = reader.rows("SELECT DISTINCT reason FROM rejections WHERE stage = 'filtered_calls' ORDER BY reason")
    return {
        "version": reader.version(),
        "about": reader.about,
        "near": NEAR,
        "tools": _query_tools(reader),
        "reasons": [row["reason"] for row in reasons],
    }


def _query_tools(reader: WarehouseReader) -> list[Row]:
    """Return a row per tool, with its rows of the queries under `curve`, `bars`, `applied` and `best`, or None."""
    queries = {"curve": CURVE, "bars": BARS, "applied": APPLIED, "best": BEST}
    tools = reader.rows(TOOLS)
    for name, sql in queries.items():
        row_of_tool = _map_tools_to_rows(reader.rows(sql))
        for tool in tools:
            tool[name] = row_of_tool.get(tool["tool"])
    return tools


def _map_tools_to_rows(rows: Iterable[Row]) -> dict[str, Row]:
    """Return rows by their column `tool`, which is removed from them."""
    by_tool = {}
    for row in rows:
        tool = row.pop("tool")
        by_tool[tool] = row
    return by_tool


def best_calls(shown: Mapping[str, Any]) -> list[Row]:
    """Return the best kept call of each tool that has one. `shown`: an `overview`."""
    return [{**tool["best"], "tool": tool["tool"]} for tool in shown["tools"] if tool["best"]]


def calls(reader: WarehouseReader, query: Mapping[str, str]) -> dict[str, Any]:
    """Find the calls of a tool that are nearest to a threshold tau.

    A call can only stay if its delta (by how much it lowers the loss) is at least tau.

    Args:
        query: Such as {"tool": "calculator", "tau": "0.5", "verdict": "kept"}. It may also have `domain`, `reason`
            and `text`.

    Returns:
        At most NEAR calls at or above tau and NEAR below it, the nearest first. Then at most NEAR without a delta.

    Raises:
        ValueError: tau is not a number.
        WarehouseError: The warehouse cannot be read.
    """
    call_filter = _build_filter(query)
    above = _query_calls_on_side(reader, call_filter, AT_OR_ABOVE)
    below = _query_calls_on_side(reader, call_filter, BELOW)
    unscored = _query_calls_on_side(reader, call_filter, WITHOUT_DELTA)

    tau = call_filter.parameters["tau"]
    nearest_first = sorted([*above, *below], key=lambda row: abs(row["delta"] - tau))
    return {"version": reader.version(), "rows": [*nearest_first, *unscored]}


def _query_calls_on_side(reader: WarehouseReader, call_filter: "_Filter", side: Side) -> list[Row]:
    """Return the NEAR calls on a side of the threshold that are nearest to it, with COLUMNS and `verdict`."""
    return reader.rows(
        f"SELECT {COLUMNS}, {VERDICT} AS verdict FROM decisions "
        f"WHERE {call_filter.condition} AND {side.condition} ORDER BY {side.order} LIMIT {NEAR}",
        call_filter.parameters,
    )


def excerpts(reader: WarehouseReader, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the text before and after calls. `numbers`: their rows in `decisions`. Raises WarehouseError."""
    return {"version": reader.version(), "rows": reader.rows(EXCERPTS, {"rows": list(numbers)})}


def query_call(reader: WarehouseReader, key: Mapping[str, Any]) -> Row | None:
    """Query a call with its whole input and result.

    Args:
        key: The columns KEY of the call.

    Returns:
        The columns of `decisions`, the tool's `name`, the `text` in which the call was scored, which is cut out of its
        document, and its `context`, such as a date. None if the call does not exist.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    sql = f"""
    SELECT decisions.*, lanes.name, substr(documents.text, texts."offset" + 1, characters::BIGINT) AS text, context
    FROM decisions JOIN lanes USING (tool) JOIN texts USING (tool, shard, digest, segment)
    JOIN documents USING (shard, digest) WHERE {_build_equality_condition(KEY)}
    """
    rows = reader.rows(sql, dict(key))
    return rows[0] if rows else None


def text_with_calls(reader: WarehouseReader, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Query a text of a tool with the calls of every tool in it.

    Args:
        key: The columns TEXT_KEY of the text.

    Returns:
        The columns of the text, and the lists `calls`, `samples`, `results` and `augmented` (the text in C*, the
        corpus with calls). None if the text does not exist.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    texts = reader.rows(TEXT, dict(key))
    if not texts:
        return None

    text = texts[0]
    first_character = text["offset"]
    end = first_character + text["characters"]
    part_of_document = {"digest": key["digest"], "low": first_character, "high": end}

    return {
        **text,
        "calls": _query_calls_within(reader, {**part_of_document, "shard": key["shard"]}),
        "samples": _query_samples(reader, key),
        "results": _query_results(reader, key),
        "augmented": _query_augmented_text(reader, part_of_document),
    }


def _query_calls_within(reader: WarehouseReader, part_of_document: Mapping[str, Any]) -> list[Row]:
    """Return the calls of all tools in a part of a document, given by shard, digest, low and high (excluded)."""
    return reader.rows(
        f"SELECT {COLUMNS} FROM decisions "
        "WHERE shard = $shard AND digest = $digest AND char_offset >= $low AND char_offset < $high "
        "ORDER BY char_offset, tool, sample",
        part_of_document,
    )


def _query_augmented_text(reader: WarehouseReader, part_of_document: Mapping[str, Any]) -> list[Row]:
    """Return the text of C* that covers a part of a document, if any, given by digest, low and high (excluded)."""
    return reader.rows(
        "SELECT text_with_calls, split FROM augmented_corpus "
        'WHERE digest = $digest AND "offset" < $high AND "offset" + length(text) > $low ORDER BY "offset" LIMIT 1',
        part_of_document,
    )


def _query_samples(reader: WarehouseReader, key: Mapping[str, Any]) -> list[Row]:
    """Return the samples of a text (columns TEXT_KEY); a sample without a call has a reason."""
    return reader.rows(
        f"SELECT tool, position, sample, char_offset, p_api, body[:{SHORT}] AS body, input[:{SHORT}] AS input, reason "
        f"FROM candidates WHERE {_build_equality_condition(TEXT_KEY)} ORDER BY position, sample",
        dict(key),
    )


def _query_results(reader: WarehouseReader, key: Mapping[str, Any]) -> list[Row]:
    """Return the results of the calls that were sampled in a text (columns TEXT_KEY)."""
    of_text = _build_equality_condition(TEXT_KEY)
    return reader.rows(
        f"SELECT input[:{SHORT}] AS input, result[:{SHORT}] AS result, reason, seconds FROM tool_results "
        f"WHERE tool = $tool AND context = (SELECT context FROM texts WHERE {of_text}) "
        f"AND input IN (SELECT input FROM candidates WHERE {of_text})",
        dict(key),
    )


class _Filter(NamedTuple):
    """An SQL condition on the table `decisions`, with the values of its parameters."""

    condition: str
    parameters: dict[str, Any]


def _build_filter(query: Mapping[str, str]) -> _Filter:
    """Turn the query of a request into an SQL condition with parameters. Raises ValueError if tau is not a number."""
    condition = " AND ".join(_iter_conditions(query))
    return _Filter(condition, _collect_parameters(query))


def _iter_conditions(query: Mapping[str, str]) -> Iterator[str]:
    """Yield the SQL conditions of a query: its tool, and each filter that it has."""
    yield "tool = $tool"
    if query.get("domain"):
        yield "domain = $domain"
    if query.get("text"):
        yield "(contains(lower(input), $text) OR contains(lower(result), $text))"
    if query.get("verdict"):
        yield _build_verdict_condition(query["verdict"])
    if query.get("reason"):
        yield _build_reason_condition(query["reason"])


def _collect_parameters(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the parameters in `_iter_conditions`. Raises ValueError if tau is not a number."""
    parameters: dict[str, Any] = {"tool": query.get("tool", ""), "tau": _parse_tau(query)}
    for name in ("domain", "reason"):
        if query.get(name):
            parameters[name] = query[name]
    if query.get("text"):
        parameters["text"] = query["text"].lower()
    return parameters


def _parse_tau(query: Mapping[str, str]) -> float:
    """Return the threshold of a query. Raises ValueError if it is not a number."""
    try:
        tau = float(query.get("tau", ""))
    except ValueError:
        tau = math.nan
    if math.isnan(tau):
        raise ValueError("tau must be a number, such as 0.5")
    return tau


def _build_verdict_condition(verdict: str) -> str:
    """Return the SQL condition that a call stays at $tau for the verdict `kept`, else that it does not."""
    return f"{VERDICT} = 'kept'" if verdict == "kept" else f"{VERDICT} <> 'kept'"


def _build_reason_condition(reason: str) -> str:
    """Return the SQL condition that a call is rejected for $reason, at the threshold $tau if it depends on that."""
    return f"{VERDICT} = $reason" if reason in REASONS_OF_THRESHOLD else "reason = $reason"


def _build_equality_condition(names: Sequence[str]) -> str:
    """Return the SQL condition that each column equals the parameter of its name."""
    return " AND ".join(f"{name} = ${name}" for name in names)


TEXT = f"""
SELECT url, documents.domain, title, date, wanted, context, texts."offset", characters,
       substr(text, texts."offset" + 1, characters::BIGINT) AS text
FROM texts JOIN documents USING (shard, digest) WHERE {_build_equality_condition(TEXT_KEY)}
"""
"""Selects a text of a tool by TEXT_KEY."""
