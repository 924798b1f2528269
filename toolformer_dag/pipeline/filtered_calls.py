"""filtered_calls: the calls that stay at tau_f (paper, section 2, "Filtering API Calls"). All of it is SQL."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import rows as answer
from toolformer_dag.lake.queries import run_sql, scratch, sql_text
from toolformer_dag.lake.warehouse_filling import JUDGED, RULE
from toolformer_dag.lake.warehouse_filling import scored as scored_rows
from toolformer_dag.pipeline import filter_rule
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import SCORED, Column, PartRows, Stage, TableOutput
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.tool_settings import ChanceThreshold

REPEATED = """
CREATE TEMP VIEW scored_documents AS
SELECT tool, shard, digest FROM scored
UNION ALL
SELECT DISTINCT tool, '' AS shard, digest FROM scored WHERE digest IN (FROM repeated);
"""
"""A document that an earlier shard has; which one makes no difference."""
SQL = f"CREATE TEMP {RULE}{REPEATED}{JUDGED}{sql_text(__package__, 'filtered_calls.sql')}"


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the scored calls: the threshold, the limit and the SQL text."""
    return {**filter_rule.settings(plan, lane), "sql": fingerprint(SQL)}


def lane_reads(lane: Lane) -> tuple[str, ...]:
    """Return the control's table where it chooses the threshold."""
    return ("swapped_results",) if isinstance(lane.tau_f, ChanceThreshold) else ()


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Decide over the scored calls of a shard; see rule.sql, judged.sql and filter_rule.sql for the rules.

    Every scored call is kept or counted: below_tau_f, no_threshold (none was certified by chance, and there is no
    fallback), not_best_at_position, duplicate_document, beyond_examples, or the reason it had in loss_deltas. Another
    tau_f that keeps the same calls gives the same data version.
    """
    lane, schema = output.lane, output.stage.schema
    rule = filter_rule.rule_of(output, part)
    scored, subset = (output.plan.lake.table(f"{lane.key}/{name}") for name in ("loss_deltas", "heuristic_subset"))
    texts, calls = subset.files(part), scored.files(part)  # damage is named, rows or not
    if not scored.pointer(part).rows:
        return PartRows([schema.to_frame()])
    given = {"texts": texts, "tau_f": rule.tau_f, "last_text": rule.last_text}
    with scratch() as connection:
        scored_rows(connection, calls)
        connection.execute("CREATE TEMP TABLE repeated AS SELECT unnest($1::VARCHAR[])", [rule.repeated])
        run_sql(connection, SQL, given)
        kept = answer(connection, "FROM decided WHERE why IS NULL ORDER BY digest, segment, position")
        rejected = answer(connection, "SELECT shard, why, count(*) FROM decided WHERE why IS NOT NULL GROUP BY ALL")
    kept = kept.with_columns(tau_f=pl.lit(rule.tau_f, pl.Float64))
    counts = Counter({(shard, reason): count for shard, reason, count in rejected.iter_rows()})
    return PartRows([kept.select(schema.names()).cast(schema)], counts)


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
    inputs=filter_rule.inputs,
    inner=(filter_rule.TEXTS, filter_rule.STAGE),
    kinds=frozenset({"duckdb", "sql"}),
    volatile=("tau_f",),
    checks={"kept_at_tau_f": below_tau_f},
    rows=rows,
)
