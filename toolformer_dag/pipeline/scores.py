"""Read the scored calls of a lane (a tool with its settings) with their score as delta, and what calls cost."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable, call_tables
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import InputsOf
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import open_in_memory, quote_sql, rows, run_sql
from toolformer_dag.lake.table import Table
from toolformer_dag.method.decision_sql import COST_FRONTIER, JUDGED
from toolformer_dag.method.scoring import COSTS, IDENTITY, calls_query, choose_table_or_view, list_lanes_reading_cost

COST_VERSION = "costs"
"""The input that holds a hash of the files of results: costs are no part of their version."""
COST_TABLES = """
texts AS (SELECT tool, shard, digest, segment, context FROM read_parquet([{texts}], hive_partitioning = false)),
tool_costs AS (
    SELECT tool, input, context, max(cost) AS cost, max(seconds) AS seconds
    FROM read_parquet([{results}], hive_partitioning = false) GROUP BY ALL
),
lanes AS (SELECT unnest([{keys}]) AS tool, unnest([{names}]) AS name)
"""
"""What call_costs.sql reads beside the calls: parts of a WITH clause, over files and lists of names."""
FRONTIER_SQL = f"{JUDGED}CREATE TABLE decisions AS FROM judged;{COSTS}{COST_FRONTIER}"


def settings(lane: Lane) -> Mapping[str, Any]:
    """Return the score of a lane and a hash of its SQL, on which kept calls depend; empty for the paper's score."""
    return {"score": lane.score, "score_sql": fingerprint(IDENTITY)} if lane.scores else {}


def reads(lane: Lane) -> tuple[LaneTable, ...]:
    """Return the tables that hold what calls cost, chained calls included; none if the score does not read costs."""
    return _list_result_tables(lane) if list_lanes_reading_cost(lane.scores) else ()


def inputs(plan: Plan, lane: Lane) -> InputsOf:
    """Return a function from a shard to `{COST_VERSION: hash}`, which changes where the costs of its calls may have.

    The mapping is empty if the lane's score does not read costs.
    """
    return partial(_build_cost_inputs, [plan.lane_table(lane, name) for name in reads(lane)])


def _build_cost_inputs(tables: Sequence[Table], shard: str) -> Mapping[str, Any]:
    """Return a hash of the files of a shard in tables of tool results, whose versions leave costs out."""
    if not tables:
        return {}
    file_hashes = [_list_file_hashes(table, shard) for table in tables]
    return {COST_VERSION: fingerprint(file_hashes)}


def _list_file_hashes(table: Table, shard: str) -> list[str] | None:
    """Return the hashes of the files of a shard; None if it is not published."""
    pointer = table.find_whole_pointer(shard)
    if pointer is None:
        return None
    return [file.hash for file in pointer.files]


def create_scored(
    connection: duckdb.DuckDBPyConnection, plan: Plan, lane: Lane, parts: Sequence[str], files: Sequence[str]
) -> None:
    """Create the table or view `scored` in a database: the calls of some shards, with their score as `delta`.

    Args:
        parts: The names of the shards.
        files: The Parquet files of the lane's scored calls in these shards.
    """
    connection.execute(f"CREATE TEMP {choose_table_or_view(lane.scores)} scored AS {calls(plan, lane, parts, files)}")


def calls(plan: Plan, lane: Lane, parts: Sequence[str], files: Sequence[str], swaps: bool = False) -> str:
    """Build the SQL query for the calls of some shards, with their score as `delta`.

    Args:
        parts: The names of the shards.
        files: The Parquet files of the lane's scored calls.
        swaps: Whether the files are those of the lane's control, in which calls have results of other documents.
    """
    cost_tables = _build_cost_sql(plan, lane, parts) if list_lanes_reading_cost(lane.scores) else ""
    return calls_query(files, lane.scores, cost_tables, swaps)


def query_deltas(plan: Plan, lane: Lane) -> pl.DataFrame:
    """Read the scores of all calls of a lane (a tool with its settings), in the column `delta`.

    Raises:
        MissingPart: A table of the lane lacks a shard.
        DamagedPart: A shard of a table cannot be read.
    """
    files = _list_call_files(plan, lane)
    if not files:
        return pl.DataFrame(schema={"delta": pl.Float64})
    query = calls(plan, lane, _list_parts(plan, lane), files)
    with open_in_memory() as connection:
        return rows(connection, f"SELECT delta FROM ({query})")


def cost_frontier(plan: Plan, lane: Lane, tau_f: float | None) -> pl.DataFrame | None:
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

    parts = _list_parts(plan, lane)
    call_files = _list_call_files(plan, lane)
    with TemporaryDirectory() as spilled, open_in_memory() as connection:
        connection.execute(f"SET temp_directory = {quote_sql(spilled)}")

        # The view cost_frontier, created last, reads what the first two create.
        _create_cost_tables(connection, plan, lane, parts, tau_f)  # the tables texts, tool_costs and lanes
        create_scored(connection, plan, lane, parts, call_files)  # `scored`: the calls with their deltas
        run_sql(connection, FRONTIER_SQL)

        return rows(connection, "FROM cost_frontier")


def _create_cost_tables(
    connection: duckdb.DuckDBPyConnection, plan: Plan, lane: Lane, parts: Sequence[str], tau_f: float | None
) -> None:
    """Create the tables that FRONTIER_SQL reads for the costs of calls: texts, tool_costs and lanes.

    Args:
        parts: The names of the shards whose files are read.
        tau_f: The threshold of this lane in the table lanes. It is null for the other lanes.
    """
    cost_tables = _build_cost_sql(plan, lane, parts)
    applied = f"CASE WHEN tool = {quote_sql(lane.key)} THEN $tau_f::DOUBLE END AS tau_f"
    connection.execute(f"CREATE TABLE texts AS WITH {cost_tables} FROM texts")
    connection.execute(f"CREATE TABLE tool_costs AS WITH {cost_tables} FROM tool_costs")
    connection.execute(f"CREATE TABLE lanes AS WITH {cost_tables} SELECT *, {applied} FROM lanes", {"tau_f": tau_f})


def _has_costs(plan: Plan, lane: Lane) -> bool:
    """Return whether any result of the lane's calls says what it cost."""
    for name in _list_result_tables(lane):
        table = plan.lane_table(lane, name)
        if table.parts() and table.scan().select(pl.col("cost").max()).collect().item():
            return True
    return False


def _list_parts(plan: Plan, lane: Lane) -> list[str]:
    """Return the parts of the lane's scored calls: single calls and chains have the same."""
    return list(plan.lane_table(lane, lane.scored[0]).parts())


def _list_call_files(plan: Plan, lane: Lane) -> list[str]:
    """Return all files of the lane's scored calls, chains among them."""
    files: list[str] = []
    for name in lane.scored:
        files += plan.lane_table(lane, name).list_all_files()
    return files


def _list_result_tables(lane: Lane) -> tuple[LaneTable, ...]:
    """Return the names of the tables of results, for single and for chained calls."""
    return ("tool_results", *(call_tables(level).results for level in range(2, lane.depth + 1)))


def _build_cost_sql(plan: Plan, lane: Lane, parts: Sequence[str]) -> str:
    """Build the part of an SQL query that reads what calls cost.

    Args:
        parts: The names of the shards whose files are read.

    Returns:
        Three common table expressions (see COST_TABLES): the texts with their context, the costs of calls, and the
        tools that may be called.
    """
    text_files = plan.lane_table(lane, "heuristic_subset").list_all_files(parts)
    result_files = _list_result_files(plan, lane, parts)

    tool_names = list(lane.chainable)  # as they are written in texts
    tool_keys = [called_lane.key for called_lane in lane.chainable.values()]  # as they are written in tables
    return COST_TABLES.format(
        texts=_to_sql_list(text_files),
        results=_to_sql_list(result_files),
        keys=_to_sql_list(tool_keys),
        names=_to_sql_list(tool_names),
    )


def _list_result_files(plan: Plan, lane: Lane, parts: Sequence[str]) -> list[str]:
    """Return the files of the results of single and chained calls of some shards."""
    files: list[str] = []
    for name in _list_result_tables(lane):
        files += plan.lane_table(lane, name).list_all_files(parts)
    return files


def _to_sql_list(values: Iterable[str]) -> str:
    """Return values as the items of an SQL list."""
    return ", ".join(map(quote_sql, values))
