"""Read the scored calls of a lane (a tool with its settings) with their score as delta, and what calls cost."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable, get_call_tables
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import InputsFinder
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import open_memory_database, query_frame, quote_sql, run_sql
from toolformer_dag.lake.table import Table
from toolformer_dag.method.decision_sql import COST_FRONTIER_VIEW_SQL, JUDGED_VIEW_SQL
from toolformer_dag.method.scoring import (
    CALL_COSTS_VIEW_SQL,
    SCORING_SQL,
    build_scored_calls_query,
    choose_table_or_view,
    list_lanes_reading_cost,
)

COST_INPUT = "costs"
"""The input that holds a hash of the files of results: costs are no part of their version."""
COST_TABLES_SQL = """
texts AS (SELECT tool, shard, digest, segment, context FROM read_parquet([{texts}], hive_partitioning = false)),
tool_costs AS (
    SELECT tool, input, context, max(cost) AS cost, max(seconds) AS seconds
    FROM read_parquet([{results}], hive_partitioning = false) GROUP BY ALL
),
lanes AS (SELECT unnest([{keys}]) AS tool, unnest([{names}]) AS name)
"""
"""What call_costs.sql reads beside the calls: parts of a WITH clause, over files and lists of names."""
FRONTIER_SQL = f"{JUDGED_VIEW_SQL}CREATE TABLE decisions AS FROM judged;{CALL_COSTS_VIEW_SQL}{COST_FRONTIER_VIEW_SQL}"


def collect_score_settings(lane: Lane) -> Mapping[str, Any]:
    """Return the settings by which a lane's score changes the kept calls: the score and a hash of the SQL around it.

    A lane with the paper's score has {}.
    """
    if not lane.score_by_lane_key:
        return {}
    return {"score": lane.score_expression, "score_sql": fingerprint(SCORING_SQL)}


def list_cost_tables(lane: Lane) -> tuple[LaneTable, ...]:
    """Return the names of the tables that say what calls cost, chained calls included.

    If the lane's score does not read costs, there are none.
    """
    if not list_lanes_reading_cost(lane.score_by_lane_key):
        return ()
    return _list_result_table_names(lane)


def build_cost_inputs(plan: Plan, lane: Lane) -> InputsFinder:
    """Return a function from a shard to `{COST_INPUT: hash}`. The hash changes if the costs of its calls may have.

    The mapping is empty if the lane's score does not read costs.
    """
    result_tables = [plan.get_lane_table(lane, table_name) for table_name in list_cost_tables(lane)]
    return partial(_compute_cost_inputs, result_tables)


def _compute_cost_inputs(result_tables: Sequence[Table], shard: str) -> Mapping[str, Any]:
    """Return a hash of the files of a shard in tables of tool results, whose versions leave costs out."""
    if not result_tables:
        return {}
    file_hashes = [_list_file_hashes(table, shard) for table in result_tables]
    return {COST_INPUT: fingerprint(file_hashes)}


def _list_file_hashes(table: Table, shard: str) -> list[str] | None:
    """Return the hashes of the files of a shard. None if the shard is not published."""
    pointer = table.find_checked_pointer(shard)
    if pointer is None:
        return None
    return [file.hash for file in pointer.files]


def create_scored_calls(
    connection: duckdb.DuckDBPyConnection, plan: Plan, lane: Lane, parts: Sequence[str], call_files: Sequence[str]
) -> None:
    """Create the table or view `scored` in a database: the calls of some shards, with their score as `delta`.

    It is a table if the score reads costs, which a view would compute again at each reading.

    Args:
        parts: The names of the shards.
        call_files: The Parquet files of the lane's scored calls in these shards.
    """
    table_or_view = choose_table_or_view(lane.score_by_lane_key)
    calls_query = build_lane_calls_query(plan, lane, parts, call_files)
    connection.execute(f"CREATE TEMP {table_or_view} scored AS {calls_query}")


def build_lane_calls_query(
    plan: Plan, lane: Lane, parts: Sequence[str], call_files: Sequence[str], are_swaps: bool = False
) -> str:
    """Build the SQL query for the calls of some shards of a lane (a tool with its settings), with a score as `delta`.

    The score is an SQL expression of the settings. Usually it says how much a call's result lowers the loss.

    Args:
        parts: The names of the shards.
        call_files: The Parquet files of the lane's scored calls.
        are_swaps: Whether the files are those of the lane's control, in which calls have results of other documents.
    """
    # The costs of calls are in other tables. They are joined only if the score contains the word `cost`.
    cost_tables_sql = ""
    if list_lanes_reading_cost(lane.score_by_lane_key):
        cost_tables_sql = _build_cost_sql(plan, lane, parts)

    return build_scored_calls_query(call_files, lane.score_by_lane_key, cost_tables_sql, are_swaps)


def query_deltas(plan: Plan, lane: Lane) -> pl.DataFrame:
    """Read the scores of all calls of a lane (a tool with its settings), in the column `delta`.

    Raises:
        MissingPart: A table of the lane lacks a shard.
        DamagedPart: A shard of a table cannot be read.
    """
    call_files = _list_call_files(plan, lane)
    if not call_files:
        return pl.DataFrame(schema={"delta": pl.Float64})

    calls_query = build_lane_calls_query(plan, lane, _list_scored_parts(plan, lane), call_files)
    with open_memory_database() as connection:
        return query_frame(connection, f"SELECT delta FROM ({calls_query})")


def query_cost_frontier(plan: Plan, lane: Lane, tau_f: float | None) -> pl.DataFrame | None:
    """Compute for possible thresholds how much the calls of a tool that reach them help, and what these calls cost.

    Args:
        lane: The tool with its settings.
        tau_f: The threshold that is applied now, if there is one. Its row is marked in the column `today`.

    Returns:
        A row per threshold, or None if no call has a cost. The columns are tool, tau_f (the threshold), today, calls
        (their number), nats (how much their results lower the loss), cost and seconds.

    Raises:
        MissingPart: A table of the lane lacks a shard.
        DamagedPart: A shard of a table cannot be read.
    """
    if not _has_costs(plan, lane):
        return None

    parts = _list_scored_parts(plan, lane)
    call_files = _list_call_files(plan, lane)
    with TemporaryDirectory() as spilled, open_memory_database() as connection:
        connection.execute(f"SET temp_directory = {quote_sql(spilled)}")

        # The view cost_frontier, created last, reads what the first two create.
        _create_cost_tables(connection, plan, lane, parts, tau_f)  # the tables texts, tool_costs and lanes
        create_scored_calls(connection, plan, lane, parts, call_files)  # `scored`: the calls with their deltas
        run_sql(connection, FRONTIER_SQL)

        return query_frame(connection, "FROM cost_frontier")


def _create_cost_tables(
    connection: duckdb.DuckDBPyConnection, plan: Plan, lane: Lane, parts: Sequence[str], tau_f: float | None
) -> None:
    """Create the tables that FRONTIER_SQL reads for the costs of calls.

    - texts: the texts in which the calls stand
    - tool_costs: what calls of tools cost
    - lanes: the tools that may be called, with the threshold that is applied to this lane's calls

    Args:
        parts: The names of the shards whose files are read.
        tau_f: The threshold of this lane in the table lanes. It is null for the other lanes.
    """
    # Parts of a WITH clause, which define queries with the same names as the tables: texts, tool_costs and lanes.
    cost_queries_sql = _build_cost_sql(plan, lane, parts)
    connection.execute(f"CREATE TABLE texts AS WITH {cost_queries_sql} FROM texts")
    connection.execute(f"CREATE TABLE tool_costs AS WITH {cost_queries_sql} FROM tool_costs")

    tau_f_sql = f"CASE WHEN tool = {quote_sql(lane.key)} THEN $tau_f::DOUBLE END AS tau_f"
    connection.execute(
        f"CREATE TABLE lanes AS WITH {cost_queries_sql} SELECT *, {tau_f_sql} FROM lanes", {"tau_f": tau_f}
    )


def _has_costs(plan: Plan, lane: Lane) -> bool:
    """Return whether any result of the lane's calls says that it cost something."""
    for table_name in _list_result_table_names(lane):
        result_table = plan.get_lane_table(lane, table_name)
        if not result_table.list_part_names():
            continue

        highest_cost = result_table.scan_parts().select(pl.col("cost").max()).collect().item()
        if highest_cost:
            return True
    return False


def _list_scored_parts(plan: Plan, lane: Lane) -> list[str]:
    """Return the parts of the lane's scored calls: single calls and chains have the same."""
    return list(plan.get_lane_table(lane, lane.scored_table_names[0]).list_part_names())


def _list_call_files(plan: Plan, lane: Lane) -> list[str]:
    """Return all files of the lane's scored calls, chains among them."""
    files: list[str] = []
    for name in lane.scored_table_names:
        files += plan.get_lane_table(lane, name).list_all_files()
    return files


def _list_result_table_names(lane: Lane) -> tuple[LaneTable, ...]:
    """Return the names of the tables of results, for single and for chained calls."""
    levels_of_chains = range(2, lane.max_chain_calls + 1)
    return ("tool_results", *(get_call_tables(level).results_table for level in levels_of_chains))


def _build_cost_sql(plan: Plan, lane: Lane, parts: Sequence[str]) -> str:
    """Build the part of an SQL query that reads what calls cost.

    Args:
        parts: The names of the shards whose files are read.

    Returns:
        Parts of a WITH clause (see COST_TABLES_SQL), which define three tables. `texts` has the context of each text:
        what results depend on besides the input of a call, such as a date. `tool_costs` has the costs of calls by tool,
        input and context, and `lanes` the tools that may be called.
    """
    text_files = plan.get_lane_table(lane, "heuristic_subset").list_all_files(parts)
    result_files = _list_result_files(plan, lane, parts)

    # The tools as they are written in texts, and as they are written in tables.
    tool_names = list(lane.chainable_lanes_by_name)
    tool_keys = [called_lane.key for called_lane in lane.chainable_lanes_by_name.values()]
    return COST_TABLES_SQL.format(
        texts=_to_sql_list(text_files),
        results=_to_sql_list(result_files),
        keys=_to_sql_list(tool_keys),
        names=_to_sql_list(tool_names),
    )


def _list_result_files(plan: Plan, lane: Lane, parts: Sequence[str]) -> list[str]:
    """Return the files of the results of single and chained calls of some shards."""
    files: list[str] = []
    for name in _list_result_table_names(lane):
        files += plan.get_lane_table(lane, name).list_all_files(parts)
    return files


def _to_sql_list(values: Iterable[str]) -> str:
    """Return values as the items of an SQL list."""
    return ", ".join(map(quote_sql, values))
