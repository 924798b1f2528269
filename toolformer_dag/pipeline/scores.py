"""Scored calls of a lane as its filter and its control read them: with the score as delta; and what calls cost."""

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable, call_tables
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import InputsOf
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import in_memory, quoted, rows, run_sql
from toolformer_dag.method.decision_sql import COST_FRONTIER, JUDGED
from toolformer_dag.method.scoring import COSTS, IDENTITY, calls_query, kept_as, reads_cost

COST_VERSION = "costs"
"""The input that tells the files of results: costs are no part of their version."""
ASKED = """
texts AS (SELECT tool, shard, digest, segment, context FROM read_parquet([{texts}], hive_partitioning = false)),
tool_costs AS (
    SELECT tool, input, context, max(cost) AS cost, max(seconds) AS seconds
    FROM read_parquet([{results}], hive_partitioning = false) GROUP BY ALL
),
lanes AS (SELECT unnest([{keys}]) AS tool, unnest([{names}]) AS name)
"""
FRONTIER_SQL = f"{JUDGED}CREATE TABLE decisions AS FROM judged;{COSTS}{COST_FRONTIER}"


def settings(lane: Lane) -> Mapping[str, Any]:
    """Return what the score adds to what determines kept calls; nothing where it is the paper's."""
    return {"score": lane.score, "score_sql": fingerprint(IDENTITY)} if lane.scores else {}


def reads(lane: Lane) -> tuple[LaneTable, ...]:
    """Return the tables that hold what calls cost, those after others too; none where the score does not read it."""
    return _results(lane) if reads_cost(lane.scores) else ()


def inputs(plan: Plan, lane: Lane) -> InputsOf:
    """Return what tells the costs of a shard's calls; nothing where the score does not read them."""
    tables = [plan.lane_table(lane, name) for name in reads(lane)]

    def of(shard: str) -> Mapping[str, Any]:
        pointers = [table.whole_pointer(shard) for table in tables]
        files = [[file.hash for file in pointer.files] if pointer else None for pointer in pointers]
        return {COST_VERSION: fingerprint(files)} if files else {}

    return of


def calls(plan: Plan, lane: Lane, parts: Sequence[str], files: Sequence[str], swaps: bool = False) -> str:
    """Return the query for calls of these parts with their score; `files`: those of loss_deltas, or of the swaps."""
    return calls_query(files, lane.scores, _asked(plan, lane, parts) if reads_cost(lane.scores) else "", swaps)


def scored_deltas(plan: Plan, lane: Lane) -> pl.DataFrame:
    """Return the score of every call of the lane, as `delta`. Raises MissingPart, DamagedPart."""
    parts, files = _calls(plan, lane)
    if not files:
        return pl.DataFrame(schema={"delta": pl.Float64})
    with in_memory() as connection:
        return rows(connection, f"SELECT delta FROM ({calls(plan, lane, parts, files)})")


def cost_frontier(plan: Plan, lane: Lane, tau_f: float | None) -> pl.DataFrame | None:
    """Return the lane's rows of the view cost_frontier, of which `today` is at `tau_f`; None where no call has a cost.

    Raises MissingPart, DamagedPart.
    """
    results = [plan.lane_table(lane, name) for name in _results(lane)]
    if not any(one.parts() and one.scan().select(pl.col("cost").max()).collect().item() for one in results):
        return None
    with TemporaryDirectory() as spilled, in_memory() as connection:
        connection.execute(f"SET temp_directory = {quoted(spilled)}")
        parts, files = _calls(plan, lane)
        asked = _asked(plan, lane, parts)
        for name in ("texts", "tool_costs"):
            connection.execute(f"CREATE TABLE {name} AS WITH {asked} FROM {name}")
        own = f"CASE WHEN tool = {quoted(lane.key)} THEN $tau_f::DOUBLE END AS tau_f"
        connection.execute(f"CREATE TABLE lanes AS WITH {asked} SELECT *, {own} FROM lanes", {"tau_f": tau_f})
        scored(connection, plan, lane, parts, files)
        run_sql(connection, FRONTIER_SQL)
        return rows(connection, "FROM cost_frontier")


def scored(
    connection: duckdb.DuckDBPyConnection, plan: Plan, lane: Lane, parts: Sequence[str], files: Sequence[str]
) -> None:
    """Make `scored`, which judged.sql reads: the calls of these parts with their score."""
    connection.execute(f"CREATE TEMP {kept_as(lane.scores)} scored AS {calls(plan, lane, parts, files)}")


def _calls(plan: Plan, lane: Lane) -> tuple[list[str], list[str]]:
    """The parts with scored calls, and their files."""
    tables = [plan.lane_table(lane, name) for name in lane.scored]
    return list(tables[0].parts()), [file for table in tables for file in table.all_files()]


def _results(lane: Lane) -> tuple[LaneTable, ...]:
    return ("tool_results", *(call_tables(level).results for level in range(2, lane.depth + 1)))


def _asked(plan: Plan, lane: Lane, parts: Sequence[str]) -> str:
    def files(*names: LaneTable) -> str:
        return _list(file for name in names for file in plan.lane_table(lane, name).all_files(parts))

    keys = _list(one.key for one in lane.chainable.values())
    return ASKED.format(
        texts=files("heuristic_subset"), results=files(*_results(lane)), keys=keys, names=_list(lane.chainable)
    )


def _list(values: Any) -> str:
    return ", ".join(map(quoted, values))
