"""The score of a call: an SQL expression over its columns, which each lane (a tool with its settings) may choose.

A call is kept if its score is at least tau_f. The paper's score is delta: by how much the call lowers the loss. Scores
are computed when calls are read, by `calls_query`, and never stored, so that another score needs no model.
"""

import re
from collections.abc import Mapping, Sequence

import duckdb

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import in_memory, quoted, sql_text

PAPER_SCORE = "loss_minus - loss_plus"
"""The score that loss_deltas and swapped_results hold as delta."""
OVER_ECHO = "least(delta, delta - echo)"
"""The delta of a call, less that of its echo if it is positive: the call with a result that the text gave away.

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
"""Columns that a score may read. `cost`: of the call or of all calls of a chain, 0 if the tool says nothing."""
CALL_COSTS = sql_text(__package__, "call_costs.sql")
"""A query over decisions, lanes, texts and tool_costs for what each scored call cost."""
COSTS = f"CREATE VIEW call_costs AS {CALL_COSTS};{sql_text(__package__, 'call_costs_comments.sql')}"
SCORED_SQL = sql_text(__package__, "scored.sql")
IDENTITY = SCORED_SQL + CALL_COSTS
"""The SQL that counts in fingerprints of whatever uses a score other than the paper's."""
CALL_KEY = "tool, shard, digest, segment, position, sample"


class ScoreError(UserError):
    """An expression that is no score."""


def refuse(score: str) -> None:
    """Raise ScoreError unless `score` is an SQL expression over the columns NUMBERS of a single call.

    "delta - 0.1 * cost" is one; a sum over calls, or an unknown column, is none.
    """
    # DuckDB tries the score on a call whose columns are all null.
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
    """Return the SQL expression of a score that gives null if it fails, as for a division by zero.

    The line breaks let a comment at its end (`delta -- as in the paper`) end before the bracket.
    """
    return f"TRY((\n{score}\n)::DOUBLE)"


def reads_cost(scores: Mapping[str, str]) -> list[str]:
    """Return the lanes whose score reads the cost of a call. `scores`: key of the lane -> expression."""
    return [lane for lane, score in scores.items() if re.search(r"\bcost\b", score, re.IGNORECASE)]


def kept_as(scores: Mapping[str, str]) -> str:
    """Return "TABLE" or "VIEW": how to create scored calls that are read several times.

    It is a table if a score reads costs: a view would join the costs at each reading.
    """
    return "TABLE" if reads_cost(scores) else "VIEW"


def calls_query(
    files: Sequence[str], scores: Mapping[str, str] = {}, cost_tables: str = "", swaps: bool = False
) -> str:
    """Return an SQL query for scored calls in Parquet files: their columns, the score as `delta`, and a number `row`.

    files: files of the table loss_deltas, or of its control swapped_results (`swaps`).
    scores: key of the lane -> SQL expression, for lanes with another score than the paper's.
    cost_tables: if a score reads `cost`, common table expressions (parts of a WITH clause) for texts, lanes and
        tool_costs.
    swaps: whether the files hold calls with swapped results; each has the cost of its call with the true result.

    `calls_query(["a.parquet"], {"calculator": "delta - echo"})` gives, in short:

        SELECT * REPLACE (CASE tool WHEN 'calculator' THEN TRY((delta - echo)::DOUBLE) END AS delta) FROM ...
    """
    paths = ", ".join(map(quoted, files))
    scan = f"read_parquet([{paths}], hive_partitioning = false, file_row_number = true)"
    row = "file_index::BIGINT << 32 | file_row_number"
    numbered = f"SELECT * EXCLUDE (file_row_number), {row} AS row FROM {scan}"
    if not scores:
        return numbered
    return with_scores(numbered, _costs_query(scores, cost_tables, swaps), scores)


def _costs_query(scores: Mapping[str, str], cost_tables: str, swaps: bool) -> str:
    """Return an SQL query for (CALL_KEY, cost), a row for each call in `called` whose score reads `cost`.

    `called` is a table expression of scored.sql: the calls to score.

    scores: key of the lane -> SQL expression.
    cost_tables: common table expressions with the costs (see `calls_query`).
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
    """
    cases = " ".join(f"WHEN {quoted(lane)} THEN {_value(score)}" for lane, score in scores.items())
    text_of_word = {  # words of scored.sql -> what replaces them
        "CALLED": called,
        "COSTS": costs,
        "TOOLS": ", ".join(map(quoted, scores)),
        "SCORE": f"CASE tool {cases} END",
    }
    _, _, statement = SCORED_SQL.partition("\n\n")  # without the comment, which names these words too
    words = "|".join(text_of_word)
    return re.sub(words, lambda match: text_of_word[match[0]], statement)
