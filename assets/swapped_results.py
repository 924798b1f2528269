"""<tool>/swapped_results: a control beside the filter. The same calls with results of other documents."""

import dagster as dg
import polars as pl

from assets.checks import losses_finite, specs, unique_keys
from assets.metadata import frame_table, result
from assets.plan import OWNERS, Plan
from assets.progress import progress
from resources.instance import SHARDS
from resources.language_model import LanguageModelResource
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.stages import swapped_results as stage
from toolformer_dag.storage.lake import Lake

THRESHOLDS = (0.5, 1.0, 2.0)
"""Those of Table 2; the lane's own tau_f stands beside them."""


def swapped_results(plan: Plan, lane: Lane) -> dg.AssetsDefinition:
    """Nothing but the warehouse comes after it."""
    key = dg.AssetKey([lane.key, "swapped_results"])
    limit = plan.settings.evaluation.swapped_texts

    @dg.asset(
        key=key,
        group_name=lane.key,
        deps=[dg.AssetKey([lane.key, above]) for above in ("heuristic_subset", "loss_deltas")],
        partitions_def=SHARDS,
        code_version=fingerprint(stage.settings(lane=lane, model=plan.model, swapped_texts=limit)),
        kinds={"pytorch", "parquet"},
        owners=OWNERS,
        pool="gpu",
        check_specs=specs(key, "unique_keys", "losses_finite"),
        description=f"Control: calls of {limit} texts per shard with other documents' results: what is kept by chance.",
    )
    def swapped(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], language_model: LanguageModelResource
    ) -> dg.MaterializeResult:
        report = stage.swapped_results(
            lake,
            lane,
            context.partition_key,
            swapped_texts=limit,
            engine=language_model.engine,
            model=plan.model,
            chunk_texts=plan.settings.execution.chunk_texts,
            progress=progress(context),
        )
        true, rows = (
            lake.table(f"{lane.key}/{name}").scan([context.partition_key]) for name in ("loss_deltas", stage.STAGE)
        )
        checks = [unique_keys(rows, stage.STAGE), losses_finite(rows)]
        return result(report, rows, checks, kept=dg.MetadataValue.md(kept_table(lane, true, rows)))

    return swapped


def kept_table(lane: Lane, true: pl.LazyFrame, swapped: pl.LazyFrame) -> str:
    """Per cent of the swapped calls that are kept, with their own results and with others; one call per position."""
    thresholds = sorted({*THRESHOLDS, lane.tau_f})
    counts = stage.by_chance(true, swapped, thresholds)
    percent = pl.col("kept", "kept_swapped") / pl.col("sampled") * 100
    return frame_table(counts.with_columns(percent.name.prefix("% ")), len(thresholds))
