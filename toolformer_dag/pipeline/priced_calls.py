"""priced_calls and priced_swaps: scored calls whose delta is less by what they cost (`cost_weight`, beyond the paper).

A lane with a weight has them, and tau_f is held against their delta. All of it is SQL over stored losses and costs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import in_memory, quoted, run_sql, sql_text
from toolformer_dag.lake.queries import rows as answer
from toolformer_dag.lake.warehouse_filling import COST_FRONTIER, COSTS, JUDGED, SCORED_DOCUMENTS, scored
from toolformer_dag.pipeline import loss_deltas, swapped_results
from toolformer_dag.pipeline.chained_candidates import stage_names
from toolformer_dag.pipeline.filtered_calls import by_part
from toolformer_dag.pipeline.plan import PRICED, Lane, Plan
from toolformer_dag.pipeline.stage import REJECTIONS, Column, InputsOf, PartRows, Rejected, Stage, TableOutput, versions
from toolformer_dag.pipeline.stage import STAGE as OF_STAGE
from toolformer_dag.pipeline.worker import Worker

SCORED = "loss_deltas"
COST_VERSION = "costs"
"""The input that tells the files of results: costs are no part of their version."""
ASKED_SQL = """
CREATE TABLE texts AS
SELECT tool, shard, digest, segment, context FROM read_parquet($texts, hive_partitioning = false);
CREATE TABLE tool_costs AS
SELECT tool, input, context, max(cost) AS cost, max(seconds) AS seconds
FROM read_parquet($results, hive_partitioning = false) GROUP BY ALL;
"""
CALLS_SQL = """
CREATE TABLE decisions AS
SELECT tool, shard, digest, segment, position, sample, input, chain
FROM read_parquet($scored, hive_partitioning = false);
"""
PRICED_SQL = CALLS_SQL + ASKED_SQL + COSTS + sql_text(__package__, "priced_calls.sql")
FRONTIER_SQL = f"""
{SCORED_DOCUMENTS};
{JUDGED}
CREATE TABLE decisions AS
SELECT tool, shard, digest, segment, position, sample, input, chain, eligible, best, delta, delta_is_bound, loss_minus,
       loss_plus
FROM judged;
{ASKED_SQL}{COSTS}{COST_FRONTIER}
"""


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside scored calls and costs."""
    return {"cost_weight": lane.cost_weight, "sql": fingerprint(PRICED_SQL)}


def result_names(lane: Lane) -> tuple[str, ...]:
    """Return the stages that hold what the lane's calls cost, those behind others too."""
    return ("tool_results", *(stage_names(level)[1] for level in range(2, lane.depth + 1)))


def reads(stage: str, plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that the priced rows of `stage` are made from."""
    return (*dict.fromkeys((SCORED, stage)), "heuristic_subset", *result_names(lane))


def inputs(stage: str, output: TableOutput) -> InputsOf:
    """Return what tells the versions of a shard's calls and texts, and of the costs."""
    table, results = output.plan.lake.table, result_names(output.lane)
    named = {name: table(f"{output.lane.key}/{name}") for name in reads(stage, output.plan, output.lane)}
    known = versions({name: one for name, one in named.items() if name not in results})

    def of(shard: str) -> Mapping[str, Any]:
        pointers = [named[name].whole_pointer(shard) for name in results]
        files = [[file.hash for file in pointer.files] if pointer else None for pointer in pointers]
        return {**known(shard), COST_VERSION: fingerprint(files)}

    return of


def rows(stage: str, worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Return the rows of `stage`, each delta less by cost_weight times the cost. Raises MissingPart, DamagedPart.

    A call told another document's result costs what it costs with its own. What `stage` rejected is told again.
    """
    lane, raw = output.lane, output.plan.lake.table(f"{output.lane.key}/{stage}")
    with in_memory() as connection:
        files = _files(connection, output.plan, lane, parts)
        files["scored"] = output.plan.lake.table(f"{lane.key}/{SCORED}").all_files(parts)
        run_sql(connection, PRICED_SQL, {**files, "files": raw.all_files(parts), "weight": lane.cost_weight})
        found = by_part(output, parts, answer(connection, "FROM priced").sort(output.stage.key))
    rejected: dict[str, Rejected] = {part: Counter() for part in parts}
    for part in parts:
        rejected[part].update({(one["shard"], one["reason"]): one["count"] for one in raw.record(part)[REJECTIONS]})
    return {part: PartRows(frames, rejected[part], facts={OF_STAGE: stage}) for part, frames in found.items()}


def _files(
    connection: duckdb.DuckDBPyConnection, plan: Plan, lane: Lane, parts: Sequence[str], tau_f: float | None = None
) -> dict[str, list[str]]:
    """Make the table `lanes`; return the files of texts and results."""
    connection.execute("CREATE TABLE lanes (tool VARCHAR, name VARCHAR, tau_f DOUBLE)")
    named = [(one.key, name, tau_f if one is lane else None) for name, one in lane.behind.items()]
    connection.executemany("INSERT INTO lanes VALUES (?, ?, ?)", named)
    table = plan.lake.table
    results = [file for name in result_names(lane) for file in table(f"{lane.key}/{name}").all_files(parts)]
    return {"texts": table(f"{lane.key}/heuristic_subset").all_files(parts), "results": results}


def cost_frontier(plan: Plan, lane: Lane, tau_f: float | None) -> pl.DataFrame | None:
    """Return the lane's rows of the view cost_frontier, of which `today` is at `tau_f`; None where no call has a cost.

    Raises MissingPart, DamagedPart.
    """
    table = plan.lake.table(f"{lane.key}/{lane.judged(SCORED)}")
    results = [plan.lake.table(f"{lane.key}/{name}") for name in result_names(lane)]
    if not any(one.parts() and one.scan().select(pl.col("cost").max()).collect().item() for one in results):
        return None
    with TemporaryDirectory() as spilled, in_memory() as connection:
        connection.execute(f"SET temp_directory = {quoted(spilled)}")
        files = _files(connection, plan, lane, table.parts(), tau_f)
        scored(connection, table.all_files())
        run_sql(connection, FRONTIER_SQL, files)
        return answer(connection, "FROM cost_frontier")


def _priced(stage: Stage) -> Stage:
    less = "L- - L+, less cost_weight times the cost of the call"
    return Stage(
        name=PRICED[stage.name],
        description=f"The rows of {stage.name}, with what each call cost taken off its delta.",
        columns={**stage.columns, "delta": Column(stage.columns["delta"].dtype, less)},
        key=stage.key,
        settings=settings,
        reads=partial(reads, stage.name),
        inputs=partial(inputs, stage.name),
        kinds=frozenset({"duckdb", "sql"}),
        rows_of_parts=partial(rows, stage.name),
    )


STAGES = tuple(map(_priced, (loss_deltas.STAGE, swapped_results.STAGE)))
"""The stages that a lane with a cost weight has before its filter."""
