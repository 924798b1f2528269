"""The score of a call: an SQL expression over its columns, which each lane (a tool with its settings) may choose.

A call is kept if its score is at least tau_f. The paper's score is delta: by how much the call lowers the loss. Scores
are computed when calls are read, by `build_scored_calls_query`, and never stored, so that another score needs no model.
"""

import re
from collections.abc import Mapping, Sequence

import duckdb

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import open_memory_database, quote_sql, read_sql_file

PAPER_SCORE = "loss_minus - loss_plus"
"""The score that loss_deltas and swapped_results hold as delta."""
SCORE_OVER_ECHO = "least(delta, delta - echo)"
"""The delta of a call, less that of its echo if it is positive: the call with a result that the text gave away.

SQL's least ignores a null, so that a call without an echo keeps its delta.
"""
SCORE_COLUMNS = (
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
CALL_COSTS_QUERY = read_sql_file(__package__, "call_costs.sql")
"""A query over decisions, lanes, texts and tool_costs for what each scored call cost."""
CALL_COSTS_VIEW_SQL = (
    f"CREATE VIEW call_costs AS {CALL_COSTS_QUERY};{read_sql_file(__package__, 'call_costs_comments.sql')}"
)
SCORED_CALLS_TEMPLATE = read_sql_file(__package__, "scored.sql")
SCORING_SQL = SCORED_CALLS_TEMPLATE + CALL_COSTS_QUERY
"""The SQL that counts in fingerprints of whatever uses a score other than the paper's."""
CALL_KEY_SQL = "tool, shard, digest, segment, position, sample"


class ScoreError(UserError):
    """An expression that is no score."""


def check_score_sql(score_sql: str) -> None:
    """Check that a score is an SQL expression over the columns SCORE_COLUMNS of a single call.

    "delta - 0.1 * cost" is valid. A sum over several calls is not, nor is an unknown column.

    Raises:
        ScoreError: The expression is not valid.
    """
    # DuckDB tries the score on a call whose columns are all null.
    null_columns = ", ".join(f"NULL::DOUBLE AS {name}" for name in SCORE_COLUMNS)
    # The score stands in WHERE, because there DuckDB refuses sums and other aggregates over several rows.
    query = f"SELECT delta FROM (SELECT {null_columns}) WHERE {_build_nullable_score_sql(score_sql)} > 0"

    try:
        with open_memory_database() as connection:
            connection.execute(query)
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise ScoreError(f"{score_sql!r} is no score ({reason}); write SQL over {', '.join(SCORE_COLUMNS)}") from error


def _build_nullable_score_sql(score_sql: str) -> str:
    """Return the SQL expression of a score that gives null if it fails, as for a division by zero.

    The line breaks let a comment at its end (`delta -- as in the paper`) end before the bracket.
    """
    return f"TRY((\n{score_sql}\n)::DOUBLE)"


def list_lanes_reading_cost(score_sql_by_lane: Mapping[str, str]) -> list[str]:
    """Return the keys of the lanes (tools with their settings) whose score reads the cost of a call.

    Args:
        score_sql_by_lane: For each lane the SQL expression of its score.
    """
    return [
        lane_key
        for lane_key, score_sql in score_sql_by_lane.items()
        if re.search(r"\bcost\b", score_sql, re.IGNORECASE)
    ]


def choose_table_or_view(score_sql_by_lane: Mapping[str, str]) -> str:
    """Return "TABLE" or "VIEW": how to create scored calls that are read several times.

    It is a table if a score reads costs: a view would join the costs at each reading.
    """
    return "TABLE" if list_lanes_reading_cost(score_sql_by_lane) else "VIEW"


def build_scored_calls_query(
    call_files: Sequence[str],
    score_sql_by_lane: Mapping[str, str] = {},
    cost_tables_sql: str = "",
    are_swaps: bool = False,
) -> str:
    """Build an SQL query that reads scored calls from Parquet files and computes their scores.

    Args:
        call_files: Files of the table loss_deltas, or of its control swapped_results.
        score_sql_by_lane: The SQL expressions of the lanes (tools with their settings) whose score is not the paper's.
            Calls of other lanes keep the `delta` of the files, which is the paper's score.
        cost_tables_sql: The parts of a WITH clause that define texts, lanes and tool_costs. Needed if a score reads
            `cost`.
        are_swaps: Whether the files hold calls with swapped results. They cost what the call with its true result
            costs.

    Returns:
        A query for the columns of the calls, with the score as `delta`, and a number of each row as `row`.

    Example:
        `build_scored_calls_query(["a.parquet"], {"calculator": "delta - echo"})` gives, in short:

            SELECT * REPLACE (CASE tool WHEN 'calculator' THEN TRY((delta - echo)::DOUBLE) ELSE delta END AS delta)
            FROM ...
    """
    quoted_paths = ", ".join(map(quote_sql, call_files))
    scan_sql = f"read_parquet([{quoted_paths}], hive_partitioning = false, file_row_number = true)"
    # The upper 32 bits are the number of the file, the lower ones the number of the row in it.
    row_number_sql = "file_index::BIGINT << 32 | file_row_number"
    calls_query = f"SELECT * EXCLUDE (file_row_number), {row_number_sql} AS row FROM {scan_sql}"

    if not score_sql_by_lane:
        return calls_query

    costs_query = _build_costs_query(score_sql_by_lane, cost_tables_sql, are_swaps)
    return build_query_with_scores(calls_query, costs_query, score_sql_by_lane)


def _build_costs_query(score_sql_by_lane: Mapping[str, str], cost_tables_sql: str, are_swaps: bool) -> str:
    """Build an SQL query for what calls cost, for the lanes whose score reads `cost`.

    It reads the calls from the table expression `called` of the query in which it is used (scored.sql).

    Args:
        score_sql_by_lane: For each lane (a tool with its settings) the SQL expression of its score.
        cost_tables_sql: The parts of a WITH clause that define the other tables from which costs are computed.
        are_swaps: Whether `called` has several rows per call, one for each swapped result.

    Returns:
        A query with a row per call: its key (CALL_KEY_SQL) and its `cost`. Without any such lane it has no rows.

    Example:
        With the score "delta - 0.1 * cost" of the calculator:

            WITH decisions AS (FROM called WHERE tool IN ('calculator')), ...
            FROM (SELECT tool, ..., cost FROM decisions)
    """
    lanes_with_costs = list_lanes_reading_cost(score_sql_by_lane)
    if not lanes_with_costs:
        return f"SELECT {CALL_KEY_SQL}, 0.0::DOUBLE AS cost FROM called WHERE false"

    condition = f"tool IN ({', '.join(map(quote_sql, lanes_with_costs))})"
    if are_swaps:
        condition += " AND swap = 0"  # the swaps of a call share its key

    # CALL_COSTS_QUERY reads the calls under the name `decisions`.
    return f"WITH decisions AS (FROM called WHERE {condition}), {cost_tables_sql} FROM ({CALL_COSTS_QUERY})"


def build_query_with_scores(source_query: str, costs_query: str, score_sql_by_lane: Mapping[str, str]) -> str:
    """Build an SQL query that replaces the `delta` of calls by the score of their lane.

    It fills in the placeholders CALLED, COSTS, SCORE and TOOLS of the template scored.sql, which is in short
    `WITH called AS (CALLED), costs AS (COSTS) SELECT * REPLACE (SCORE AS delta)`.

    Args:
        source_query: A query for the calls.
        costs_query: A query for what the calls cost.
        score_sql_by_lane: For each lane (a tool with its settings) an SQL expression over the columns of a call.
    """
    cases = " ".join(
        f"WHEN {quote_sql(lane_key)} THEN {_build_nullable_score_sql(score_sql)}"
        for lane_key, score_sql in score_sql_by_lane.items()
    )
    sql_by_placeholder = {
        "CALLED": source_query,
        "COSTS": costs_query,
        "TOOLS": ", ".join(map(quote_sql, score_sql_by_lane)),
        "SCORE": f"CASE tool {cases} END",
    }

    # The template without its comment, which names the placeholders too.
    _, _, template = SCORED_CALLS_TEMPLATE.partition("\n\n")
    # All in one pass, so that a placeholder in inserted SQL stays as it is.
    any_placeholder = "|".join(sql_by_placeholder)
    return re.sub(any_placeholder, lambda match: sql_by_placeholder[match[0]], template)
