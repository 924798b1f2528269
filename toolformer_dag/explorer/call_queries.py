"""What the page asks of the warehouse about calls: counts by threshold, calls near it, one text."""

from collections.abc import Mapping, Sequence
from typing import Any

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
LISTS = ", ".join(f"list({name} ORDER BY tau_f) AS {name}" for name in STATISTICS)
CURVE = f"SELECT tool, min(round(tau_f * 100))::INTEGER AS first, {LISTS} FROM curve_statistics GROUP BY tool"
BARS = """
SELECT tool, list(round(delta * 100)::INTEGER ORDER BY delta) AS bins, list(scored ORDER BY delta) AS scored,
       list(swapped ORDER BY delta) AS swapped
FROM curves GROUP BY tool
"""
APPLIED = """
SELECT tool, calls, examples, kept_swapped, by_chance, by_chance_low, by_chance_high, fdr, fdr_high
FROM swapped_statistics JOIN filter_statistics USING (tool, tau_f, calls) JOIN lanes USING (tool, tau_f)
"""
BEST = """
SELECT DISTINCT ON (tool) tool, shard, digest, segment, position, sample, delta FROM decisions WHERE kept
ORDER BY tool, delta DESC, rowid
"""
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
SIDES = (("delta >= $tau", "delta, rowid"), ("NOT delta >= $tau", "delta DESC, rowid"), ("delta IS NULL", "rowid"))
KEY = ("tool", "shard", "digest", "segment", "position", "sample")
EXCERPTS = f"""
SELECT decisions.rowid AS row,
       substr(text, greatest(1, char_offset - {AROUND - 1}), least({AROUND}, char_offset)) AS before,
       substr(text, char_offset + 1, {AROUND}) AS after
FROM decisions JOIN documents ON documents.rowid = decisions.document
WHERE decisions.rowid IN (SELECT unnest($rows::BIGINT[]))
"""


def overview(reader: WarehouseReader) -> dict[str, Any]:
    """Return what every view needs at once: tools with their curves and best kept call, and reasons to filter by."""
    queries = {"curve": CURVE, "bars": BARS, "applied": APPLIED, "best": BEST}
    known = {name: {row.pop("tool"): row for row in reader.rows(sql)} for name, sql in queries.items()}
    tools = [{**row, **{name: of.get(row["tool"]) for name, of in known.items()}} for row in reader.rows(TOOLS)]
    reasons = reader.rows("SELECT DISTINCT reason FROM rejections WHERE stage = 'filtered_calls' ORDER BY reason")
    shown = {"version": reader.version(), "about": reader.about, "near": NEAR}
    return {**shown, "tools": tools, "reasons": [row["reason"] for row in reasons]}


def best_calls(shown: Mapping[str, Any]) -> list[Row]:
    """Return the best kept call of each tool that an `overview` has one of."""
    return [{**tool["best"], "tool": tool["tool"]} for tool in shown["tools"] if tool["best"]]


def calls(reader: WarehouseReader, asked: Mapping[str, str]) -> dict[str, Any]:
    """Return calls by distance from a threshold: NEAR at or above, NEAR below, then those without a delta.

    `asked`: tool and tau, and of domain, verdict (kept, lost), reason and text what the calls are filtered by.
    """
    where, given = _filter(asked)
    by_side = [
        reader.rows(
            f"SELECT {COLUMNS}, {VERDICT} AS verdict FROM decisions "
            f"WHERE {where} AND {side} ORDER BY {order} LIMIT {NEAR}",
            given,
        )
        for side, order in SIDES
    ]
    scored = sorted([*by_side[0], *by_side[1]], key=lambda row: abs(row["delta"] - given["tau"]))
    return {"version": reader.version(), "rows": [*scored, *by_side[2]]}


def excerpts(reader: WarehouseReader, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the text before and after the calls of these rows of `decisions`."""
    return {"version": reader.version(), "rows": reader.rows(EXCERPTS, {"rows": list(numbers)})}


def whole_call(reader: WarehouseReader, key: Mapping[str, Any]) -> Row | None:
    """Return one call with its whole input and result, and the text that it was scored in; None without it."""
    sql = f"""
    SELECT decisions.*, lanes.name, substr(documents.text, texts."offset" + 1, characters::BIGINT) AS text, context
    FROM decisions JOIN lanes USING (tool) JOIN texts USING (tool, shard, digest, segment)
    JOIN documents USING (shard, digest) WHERE {_is(KEY)}
    """
    rows = reader.rows(sql, dict(key))
    return rows[0] if rows else None


def text_with_calls(reader: WarehouseReader, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a text of a tool with the calls of every tool in it, and the samples that gave no call.

    `key`: tool, shard, digest, segment. None where there is no such text.
    """
    where = _is(KEY[:4])
    texts = reader.rows(
        'SELECT url, documents.domain, title, date, wanted, context, texts."offset", characters, '
        'substr(text, texts."offset" + 1, characters::BIGINT) AS text '
        f"FROM texts JOIN documents USING (shard, digest) WHERE {where}",
        dict(key),
    )
    if not texts:
        return None
    text = texts[0]
    ends = {"low": text["offset"], "high": text["offset"] + text["characters"]}
    given = {"shard": key["shard"], "digest": key["digest"], **ends}
    inside = "shard = $shard AND digest = $digest AND char_offset >= $low AND char_offset < $high"
    scored = reader.rows(f"SELECT {COLUMNS} FROM decisions WHERE {inside} ORDER BY char_offset, tool, sample", given)
    samples = reader.rows(
        f"SELECT tool, position, sample, char_offset, p_api, body[:{SHORT}] AS body, input[:{SHORT}] AS input, reason "
        f"FROM candidates WHERE {where} ORDER BY position, sample",
        dict(key),
    )
    results = reader.rows(
        f"SELECT input[:{SHORT}] AS input, result[:{SHORT}] AS result, reason, seconds FROM tool_results "
        f"WHERE tool = $tool AND context = (SELECT context FROM texts WHERE {where}) "
        f"AND input IN (SELECT input FROM candidates WHERE {where})",
        dict(key),
    )
    augmented = reader.rows(
        "SELECT text_with_calls, split FROM augmented_corpus "
        'WHERE digest = $digest AND "offset" < $high AND "offset" + length(text) > $low ORDER BY "offset" LIMIT 1',
        {name: given[name] for name in ("digest", "low", "high")},
    )
    return {**text, "calls": scored, "samples": samples, "results": results, "augmented": augmented}


def _filter(asked: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The conditions of `asked` in SQL, and their parameters. Raises ValueError for a tau that is no number."""
    where, given = ["tool = $tool"], {"tool": asked.get("tool", ""), "tau": float(asked.get("tau", "nan"))}
    if given["tau"] != given["tau"]:
        raise ValueError("tau must be a number")
    if asked.get("domain"):
        where.append("domain = $domain")
        given["domain"] = asked["domain"]
    if asked.get("text"):
        where.append("(contains(lower(input), $text) OR contains(lower(result), $text))")
        given["text"] = asked["text"].lower()
    if verdict := asked.get("verdict"):
        where.append(f"({VERDICT} = 'kept') = {verdict == 'kept'}")
    if reason := asked.get("reason"):
        # at another threshold other calls have these reasons; all others are those of the applied one
        where.append(f"{VERDICT} = $reason" if reason in REASONS_OF_THRESHOLD else "reason = $reason")
        given["reason"] = reason
    return " AND ".join(where), given


def _is(names: Sequence[str]) -> str:
    return " AND ".join(f"{name} = ${name}" for name in names)
