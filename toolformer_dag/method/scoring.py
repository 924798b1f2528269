"""The score of a call: an SQL expression over its columns, which each lane (a tool with its settings) may choose.

A call is kept where its score is at least tau_f; the paper's score is delta, by how much the call lowers the loss. A
score is computed where calls are read, and stored nowhere, so that a change of it costs no token. Whoever reads calls
reads them through `calls_query`, which puts the score in place of `delta`.
"""

import re
from collections.abc import Mapping, Sequence

import duckdb

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import in_memory, quoted, sql_text

PAPER_SCORE = "loss_minus - loss_plus"
"""What loss_deltas and swapped_results hold as delta."""
OVER_ECHO = "least(delta, delta - echo)"
"""The gain of a call; or what it gains more than its echo, the call with a result that the text gave away, if less.

SQL's least ignores a null, so that a call without an echo keeps its delta.
"""
NUMBERS = (
    "p_api",
    "loss_empty",
    "loss_call",
    "loss_result",
    "loss_before",
    "need",
    "loss_minus",
    "loss_plus",
    "delta",
    "echo",
    "cost",
)
"""What a score may read; `cost`: what the call cost, a chain all its calls, 0 where the tool says nothing."""
CALL_COSTS = sql_text(__package__, "call_costs.sql")
"""What each scored call cost: a query over decisions, lanes, texts and tool_costs."""
COSTS = f"CREATE VIEW call_costs AS {CALL_COSTS};{sql_text(__package__, 'call_costs_comments.sql')}"
SCORED_SQL = sql_text(__package__, "scored.sql")
IDENTITY = SCORED_SQL + CALL_COSTS
"""The text that belongs in the fingerprint of what is made with a score other than the paper's."""
CALL_KEY = "tool, shard, digest, segment, position, sample"


class ScoreError(UserError):
    """An expression that is no score."""


def refuse(score: str) -> None:
    """Raise ScoreError unless `score` is an SQL expression over the columns NUMBERS of a single call.

    "delta - 0.1 * cost" is one; a sum over calls, or an unknown column, is none. DuckDB tries it on a call whose
    columns are all null.
    """
    null_columns = ", ".join(f"NULL::DOUBLE AS {name}" for name in NUMBERS)
    # The score stands in WHERE, because there DuckDB refuses sums and other aggregates over several rows.
    query = f"SELECT delta FROM (SELECT {null_columns}) WHERE {_value(score)} > 0"
    try:
        with in_memory() as connection:
            connection.execute(query)
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise ScoreError(f"{score!r} is no score ({reason}); write SQL over {', '.join(NUMBERS)}") from error


def _value(score: str) -> str:
    """Return the SQL expression of a score, made to give null where it fails, as for a division by zero.

    The line breaks let a comment at its end (`delta -- as in the paper`) end before the bracket.
    """
    return f"TRY((\n{score}\n)::DOUBLE)"


def reads_cost(scores: Mapping[str, str]) -> list[str]:
    """Return the lanes whose score reads what a call cost. `scores`: key of the lane -> expression."""
    return [lane for lane, score in scores.items() if re.search(r"\bcost\b", score, re.IGNORECASE)]


def kept_as(scores: Mapping[str, str]) -> str:
    """Return "TABLE" or "VIEW": what scored calls are created as where they are read several times.

    With scores that read costs, a table: a view would join the costs at each reading.
    """
    return "TABLE" if reads_cost(scores) else "VIEW"


def calls_query(
    files: Sequence[str], scores: Mapping[str, str] = {}, cost_tables: str = "", swaps: bool = False
) -> str:
    """Return an SQL query for scored calls in Parquet files: their columns, and `row`, which numbers them.

    files: of the table loss_deltas, or of its control swapped_results (`swaps`).
    scores: key of the lane -> SQL expression, of lanes with another score than the paper's; their `delta` is the score.
    cost_tables: where a score reads `cost`, common table expressions (parts of a WITH clause) that say what calls cost:
        texts, lanes and tool_costs.
    swaps: whether the files hold calls with swapped results; each costs what its call costs with its true result.

    `calls_query(["a.parquet"], {"calculator": "delta - echo"})` reads the calls of a.parquet and gives, in short:

        SELECT * REPLACE (CASE tool WHEN 'calculator' THEN TRY((delta - echo)::DOUBLE) END AS delta) FROM ...
    """
    paths = ", ".join(map(quoted, files))
    read = f"read_parquet([{paths}], hive_partitioning = false, file_row_number = true)"
    row = "file_index::BIGINT << 32 | file_row_number"
    numbered = f"SELECT * EXCLUDE (file_row_number), {row} AS row FROM {read}"
    if not scores:
        return numbered
    return with_scores(numbered, _costs_query(scores, cost_tables, swaps), scores)


def _costs_query(scores: Mapping[str, str], cost_tables: str, swaps: bool) -> str:
    """Return an SQL query for (CALL_KEY, cost): a row for each call in `called` whose score reads what the call costs.

    It gives no row where no score reads `cost`. `called` is a table expression of scored.sql: the calls to score.

    scores: key of the lane -> SQL expression.
    cost_tables: common table expressions with what calls cost (see `calls_query`).
    swaps: whether `called` has several rows per call, one per swapped result.
    """
    lanes = reads_cost(scores)
    if not lanes:
        return f"SELECT {CALL_KEY}, 0.0::DOUBLE AS cost FROM called WHERE false"
    condition = f"tool IN ({', '.join(map(quoted, lanes))})"
    if swaps:
        condition += " AND swap = 0"  # the swaps of a call share its key
    return f"WITH decisions AS (FROM called WHERE {condition}), {cost_tables} FROM ({CALL_COSTS})"


def with_scores(called: str, costs: str, scores: Mapping[str, str]) -> str:
    """Return the query `called`, which selects scored calls, with each lane's score in place of `delta`.

    costs: a query for (CALL_KEY, cost). scores: key of the lane -> SQL expression over the columns of a call.

    The query is scored.sql, with its words CALLED, COSTS, TOOLS and SCORE replaced by these.
    """
    cases = " ".join(f"WHEN {quoted(lane)} THEN {_value(score)}" for lane, score in scores.items())
    text_of = {
        "CALLED": called,
        "COSTS": costs,
        "TOOLS": ", ".join(map(quoted, scores)),
        "SCORE": f"CASE tool {cases} END",
    }
    _, _, statement = SCORED_SQL.partition("\n\n")  # without the comment, which names these words too
    placeholder = "|".join(text_of)
    return re.sub(placeholder, lambda match: text_of[match[0]], statement)
