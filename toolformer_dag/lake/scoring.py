"""The score that tau_f is held against: an SQL expression over the columns of a scored call, for each lane its own.

It is applied where calls are read and stored nowhere, so that another one costs no token. Whoever reads calls reads
them through `relation`: its `delta` is the score.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import duckdb

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import in_memory, quoted, sql_text

PAPER = "loss_minus - loss_plus"
"""What loss_deltas and swapped_results hold as delta."""
NUMBERS = (
    *("p_api", "loss_empty", "loss_call", "loss_result", "loss_before", "need", "loss_minus", "loss_plus", "delta"),
    "cost",
)
"""What a score may read; `cost`: what the call cost, a chain all its calls, 0 where the tool says nothing."""
FUNCTIONS = frozenset(
    {
        *"+-*/%^",
        "**",
        "abs",
        "least",
        "greatest",
        "ln",
        "log10",
        "exp",
        "sqrt",
        "pow",
        "round",
        "floor",
        "ceil",
        "nullif",
    }
)
CLASSES = frozenset({"CONSTANT", "OPERATOR", "CASE", "COMPARISON", "CONJUNCTION", "BETWEEN", "CAST", "TYPE"})
"""What else an expression may be made of, as DuckDB names it: no query, no window, no parameter, no star."""
ALLOWED = f"write arithmetic over {', '.join(NUMBERS)}, with {', '.join(sorted(FUNCTIONS))}"
NO_SCORE = "no_score"
"""Why a call may not stay: its score is null, infinite or no number. DuckDB holds NaN above every threshold."""
COSTS = sql_text(__package__, "costs.sql")
CALL_COSTS = COSTS.partition("CREATE VIEW call_costs AS")[2].partition(";")[0]
"""The query of the view call_costs."""
SCORED_SQL = sql_text(__package__, "scored.sql")
IDENTITY = SCORED_SQL + CALL_COSTS
"""The text that belongs in the fingerprint of what is made with a score other than the paper's."""
CALL_KEY = "tool, shard, digest, segment, position, sample"


class ScoreError(UserError):
    """An expression that is no score."""


@cache
def columns_read(score: str) -> frozenset[str]:
    """Return the columns that a score reads. Raises ScoreError for all but arithmetic over NUMBERS."""
    typed = ", ".join(f"NULL::DOUBLE AS {name}" for name in NUMBERS)
    with in_memory() as connection:
        try:
            around, expression = _parsed(connection, score)
            if around != _parsed(connection, "delta")[0]:
                raise ScoreError(f"{score!r} is more than an expression; {ALLOWED}")
            nodes = list(_nodes(expression))
            if refused := next(filter(None, map(_refused, nodes)), None):
                raise ScoreError(f"{score!r} {refused}; {ALLOWED}")
            connection.execute(f"SELECT {_value(score)} FROM (SELECT {typed})")
        except (duckdb.Error, LookupError) as error:
            raise ScoreError(f"{score!r} is no expression: {str(error).splitlines()[0]}; {ALLOWED}") from error
    return frozenset(node["column_names"][0].lower() for node in nodes if node["class"] == "COLUMN_REF")


def _parsed(connection: duckdb.DuckDBPyConnection, score: str) -> tuple[Any, Any]:
    """A statement that computes the score, as DuckDB parses it: what is around the expression, and the expression."""
    [(text,)] = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {_value(score)}"]).fetchall()
    parsed = json.loads(text, object_hook=_placeless)
    if parsed["error"]:
        raise duckdb.ParserException(parsed["error_message"])
    return parsed, parsed["statements"][0]["node"]["select_list"][0]["children"][0].pop("child")


def _placeless(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if not name.startswith("query_location")}


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """The nodes of an expression that have a class."""
    if isinstance(node, dict) and "class" in node:
        yield node
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from _nodes(child)


def _refused(node: Mapping[str, Any]) -> str | None:
    kind = node["class"]
    if kind == "FUNCTION":
        return None if node["function_name"].lower() in FUNCTIONS else f"calls {node['function_name']}"
    if kind == "COLUMN_REF":
        name = ".".join(node["column_names"])
        return None if name.lower() in NUMBERS else f"reads {name}"
    return None if kind in CLASSES else f"has a {kind.lower()}"


def _value(score: str) -> str:
    """The expression as it is computed; null where it fails. A comment ends with its line."""
    return f"TRY((\n{score}\n)::DOUBLE)"


def reads_cost(scores: Mapping[str, str]) -> list[str]:
    """Return the tools whose score reads what a call cost."""
    return [tool for tool, score in scores.items() if "cost" in columns_read(score)]


def relation(files: Sequence[str], scores: Mapping[str, str] = {}, asked: str = "", swaps: bool = False) -> str:
    """Return the query for the calls in part files of loss_deltas, or of swapped_results (`swaps`), numbered by `row`.

    `scores`: tool -> expression, of tools that have another than the paper's; their `delta` is the score. `asked`: the
    tables that call_costs reads beside the calls, as parts of a WITH clause: texts, lanes and tool_costs; needed where
    a score reads `cost`. A swap costs what its call costs with its own result.
    """
    read = f"read_parquet([{', '.join(map(quoted, files))}], hive_partitioning = false, file_row_number = true)"
    numbered = f"SELECT * EXCLUDE (file_row_number), file_index::BIGINT << 32 | file_row_number AS row FROM {read}"
    if not scores:
        return numbered
    costly = reads_cost(scores)
    costs = f"SELECT {CALL_KEY}, 0.0::DOUBLE AS cost FROM called WHERE false"
    if costly:
        of_tools = f"tool IN ({', '.join(map(quoted, costly))}){' AND swap = 0' if swaps else ''}"
        costs = f"WITH decisions AS (FROM called WHERE {of_tools}), {asked} FROM ({CALL_COSTS})"
    return with_scores(numbered, costs, scores)


def with_scores(called: str, costs: str, scores: Mapping[str, str]) -> str:
    """Return the query for the rows of the query `called` with their score as delta; `costs`: (key of a call, cost)."""
    cases = " ".join(f"WHEN {quoted(tool)} THEN {_value(score)}" for tool, score in scores.items())
    texts = {
        "CALLED": called,
        "COSTS": costs,
        "TOOLS": ", ".join(map(quoted, scores)),
        "SCORE": f"CASE tool {cases} END",
    }
    return re.sub("|".join(texts), lambda found: texts[found[0]], SCORED_SQL.partition("\n\n")[2])
