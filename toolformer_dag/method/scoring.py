"""The score of a call: an SQL expression over its columns, which each lane (a tool with its settings) may choose.

A call is kept if its score is at least tau_f. The paper's score is delta: by how much the call lowers the loss. Scores
are computed when calls are read, by `calls_query`, and never stored, so that another score needs no model.
"""

import re
from collections.abc import Mapping, Sequence

import duckdb

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import open_in_memory, quote_sql, read_sql_file

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
CALL_COSTS = read_sql_file(__package__, "call_costs.sql")
"""A query over decisions, lanes, texts and tool_costs for what each scored call cost."""
COSTS = f"CREATE VIEW call_costs AS {CALL_COSTS};{read_sql_file(__package__, 'call_costs_comments.sql')}"
SCORED_SQL = read_sql_file(__package__, "scored.sql")
IDENTITY = SCORED_SQL + CALL_COSTS
"""The SQL that counts in fingerprints of whatever uses a score other than the paper's."""
CALL_KEY = "tool, shard, digest, segment, position, sample"


class ScoreError(UserError):
    """An expression that is no score."""


def refuse(score: str) -> None:
    """Check that a score is an SQL expression over the columns NUMBERS of a single call.

    "delta - 0.1 * cost" is valid. A sum over several calls is not, nor is an unknown column.

    Raises:
        ScoreError: The expression is not valid.
    """
    # DuckDB tries the score on a call whose columns are all null.
    null_columns = ", ".join(f"NULL::DOUBLE AS {name}" for name in NUMBERS)
    # The score stands in WHERE, because there DuckDB refuses sums and other aggregates over several rows.
    query = f"SELECT delta FROM (SELECT {null_columns}) WHERE {_build_value_sql(score)} > 0"

    try:
        with open_in_memory() as connection:
            connection.execute(query)
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise ScoreError(f"{score!r} is no score ({reason}); write SQL over {', '.join(NUMBERS)}") from error


def _build_value_sql(score: str) -> str:
    """Return the SQL expression of a score that gives null if it fails, as for a division by zero.

    The line breaks let a comment at its end (`delta -- as in the paper`) end before the bracket.
    """
    return f"TRY((\n{score}\n)::DOUBLE)"


def list_lanes_reading_cost(scores: Mapping[str, str]) -> list[str]:
    """Return the lanes whose score reads the cost of a call. `scores`: key of the lane -> expression."""
    return [lane for lane, score in scores.items() if re.search(r"\bcost\b", score, re.IGNORECASE)]


def choose_table_or_view(scores: Mapping[str, str]) -> str:
    """Return "TABLE" or "VIEW": how to create scored calls that are read several times.

    It is a table if a score reads costs: a view would join the costs at each reading.
    """
    return "TABLE" if list_lanes_reading_cost(scores) else "VIEW"


def calls_query(
    files: Sequence[str], scores: Mapping[str, str] = {}, cost_tables: str = "", swaps: bool = False
) -> str:
    """Build an SQL query that reads scored calls from Parquet files and computes their scores.

    Args:
        files: Files of the table loss_deltas, or of its control swapped_results.
        scores: The SQL expressions of the lanes (tools with their settings) whose score is not the paper's.
        cost_tables: The parts of a WITH clause that define texts, lanes and tool_costs. Needed if a score reads `cost`.
        swaps: Whether the files hold calls with swapped results. They cost what the call with its true result costs.

    Returns:
        A query for the columns of the calls, with the score as `delta`, and a number of each row as `row`.

    Example:
        `calls_query(["a.parquet"], {"calculator": "delta - echo"})` gives, in short:

            SELECT * REPLACE (CASE tool WHEN 'calculator' THEN TRY((delta - echo)::DOUBLE) END AS delta) FROM ...
    """
    paths = ", ".join(map(quote_sql, files))
    scan = f"read_parquet([{paths}], hive_partitioning = false, file_row_number = true)"
    row = "file_index::BIGINT << 32 | file_row_number"  # the number of the file, then that of the row in it
    numbered_calls = f"SELECT * EXCLUDE (file_row_number), {row} AS row FROM {scan}"

    if not scores:
        return numbered_calls

    costs = _build_costs_query(scores, cost_tables, swaps)  # what a call costs, for scores that read it
    return with_scores(numbered_calls, costs, scores)


def _build_costs_query(scores: Mapping[str, str], cost_tables: str, swaps: bool) -> str:
    """Build an SQL query for what calls cost, for the lanes whose score reads `cost`.

    It reads the calls from the table expression `called` of the query in which it is used (scored.sql).

    Args:
        scores: For each lane (a tool with its settings) the SQL expression of its score.
        cost_tables: The parts of a WITH clause that define the other tables from which costs are computed.
        swaps: Whether `called` has several rows per call, one for each swapped result.

    Returns:
        A query with a row per call: its key (CALL_KEY) and its `cost`. Without any such lane it has no rows.

    Example:
        With the score "delta - 0.1 * cost" of the calculator:

            WITH decisions AS (FROM called WHERE tool IN ('calculator')), ...
            FROM (SELECT tool, ..., cost FROM decisions)
    """
    lanes_with_costs = list_lanes_reading_cost(scores)
    if not lanes_with_costs:
        return f"SELECT {CALL_KEY}, 0.0::DOUBLE AS cost FROM called WHERE false"

    condition = f"tool IN ({', '.join(map(quote_sql, lanes_with_costs))})"
    if swaps:
        condition += " AND swap = 0"  # the swaps of a call share its key

    # CALL_COSTS reads the calls under the name `decisions`.
    return f"WITH decisions AS (FROM called WHERE {condition}), {cost_tables} FROM ({CALL_COSTS})"


def with_scores(called: str, costs: str, scores: Mapping[str, str]) -> str:
    """Build a query that replaces the `delta` of calls by the score of their lane.

    It fills in the placeholders CALLED, COSTS, SCORE and TOOLS of the template scored.sql, which is in short
    `WITH called AS (CALLED), costs AS (COSTS) SELECT * REPLACE (SCORE AS delta)`.

    Args:
        called: A query for the calls.
        costs: A query for what the calls cost.
        scores: For each lane (a tool with its settings) an SQL expression over the columns of a call.
    """
    cases = " ".join(f"WHEN {quote_sql(lane)} THEN {_build_value_sql(score)}" for lane, score in scores.items())
    sql_of_placeholder = {
        "CALLED": called,
        "COSTS": costs,
        "TOOLS": ", ".join(map(quote_sql, scores)),
        "SCORE": f"CASE tool {cases} END",
    }

    _, _, template = SCORED_SQL.partition("\n\n")  # without its comment, which names the placeholders too
    placeholders = "|".join(sql_of_placeholder)
    return re.sub(placeholders, lambda match: sql_of_placeholder[match[0]], template)
