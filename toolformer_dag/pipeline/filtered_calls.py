"""filtered_calls: the calls that stay at tau_f (paper, section 2, "Filtering API Calls"). All of it is SQL."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import in_memory, run_sql, sql_text
from toolformer_dag.lake.queries import rows as answer
from toolformer_dag.lake.warehouse import CHANCE, CHOSEN, JUDGED
from toolformer_dag.pipeline.chance import chance_threshold
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import SCORED, Column, PartRows, Stage, TableOutput
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.tool_settings import ChanceThreshold

SQL = sql_text(__package__, "filtered_calls.sql")


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the scored calls: the threshold, the limit and the SQL text."""
    made = {"examples_per_tool": plan.settings.training.examples_per_tool, "sql": fingerprint(SQL)}
    if isinstance(lane.tau_f, ChanceThreshold):
        return {**made, "tau_f": lane.tau_f.model_dump(), "chance": fingerprint(JUDGED + CHANCE)}
    return {**made, "tau_f": lane.tau_f}


def lane_reads(lane: Lane) -> tuple[str, ...]:
    """Return the control's table where it chooses the threshold."""
    return ("swapped_results",) if isinstance(lane.tau_f, ChanceThreshold) else ()


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Decide over the scored calls of all shards of a lane; see filtered_calls.sql for the rules.

    Every scored call is kept or counted: below_tau_f, no_threshold (none was certified by chance, and there is no
    fallback), not_best_at_position, duplicate_document, beyond_examples, or the reason it had in loss_deltas. Another
    tau_f that keeps the same calls gives the same data version.
    """
    lane, schema = output.lane, output.stage.schema
    facts = _chosen(output, lane.tau_f) if isinstance(lane.tau_f, ChanceThreshold) else {}
    tau_f = facts[CHOSEN]["tau_f"] if facts else lane.tau_f
    scored, subset = (output.plan.lake.table(f"{lane.key}/{name}") for name in ("loss_deltas", "heuristic_subset"))
    files = [file for shard in scored.parts() for file in scored.files(shard)]
    texts = [file for shard in scored.parts() for file in subset.files(shard)]
    if not files:
        return PartRows([schema.to_frame()], facts=facts)
    limit = output.plan.settings.training.examples_per_tool
    with in_memory() as connection:
        run_sql(connection, SQL, {"files": files, "texts": texts, "tau_f": tau_f, "examples": limit})
        kept = answer(connection, "FROM kept").with_columns(tau_f=pl.lit(tau_f, pl.Float64))
        rejected = answer(connection, "FROM rejected")
    counts = Counter({(shard, reason): count for shard, reason, count in rejected.iter_rows()})
    return PartRows([kept.select(schema.names()).cast(schema)], counts, facts=facts)


def _chosen(output: TableOutput, rule: ChanceThreshold) -> dict[str, dict[str, Any]]:
    """The lane's row of chance_thresholds, with the fallback as tau_f where no threshold has the rate."""
    chosen = chance_threshold(output.plan, output.lane, rule.by_chance)
    tau_f = rule.fallback if chosen["tau_f"] is None else chosen["tau_f"]
    return {CHOSEN: {**chosen, "tau_f": tau_f}}


def below_tau_f(kept: pl.DataFrame, output: TableOutput) -> int:
    """Count kept calls that gained less than the threshold."""
    tau_f = output.lane.tau_f
    return kept.filter(pl.col("delta") < (pl.col("tau_f") if isinstance(tau_f, ChanceThreshold) else tau_f)).height


COPIED = (
    *("tool", "shard", "digest", "segment", "position", "sample", "char_offset", "input", "result", "p_api"),
    *("loss_minus", "loss_plus", "delta"),
)
STAGE = Stage(
    name="filtered_calls",
    description="The calls that stay: L- - L+ >= tau_f, the best one per position (paper, section 2).",
    columns={
        **{name: Column(SCORED[name].dtype, SCORED[name].description) for name in COPIED},
        "tau_f": Column(pl.Float64(), "the threshold that it passed"),
    },
    key=("tool", "digest", "segment", "position"),
    settings=settings,
    reads=("loss_deltas",),
    also_reads=("heuristic_subset",),
    lane_reads=lane_reads,
    sharded=False,
    kinds=frozenset({"duckdb", "sql"}),
    volatile=("tau_f",),
    checks={"kept_at_tau_f": below_tau_f},
    rows=rows,
)
