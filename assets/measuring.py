"""evaluation/accuracy and evaluation/perplexity: what finetuning on calls gains and costs (sections 4.2 and 4.3)."""

import dagster as dg
import polars as pl

from assets.metadata import UNCHANGED, frame_table, image, last_metadata
from assets.outputs import Output
from assets.plots import accuracy_bars
from assets.running import progress
from assets.tables import asset_of
from resources import Compute
from toolformer_dag.evaluation.accuracy_tables import accuracy_by_condition
from toolformer_dag.evaluation.measurements import measure_accuracy, measure_perplexity
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.plan import Plan


def accuracy_asset(plan: Plan, output: Output) -> dg.AssetsDefinition:
    """Return the asset of the questions answered right under four conditions."""

    told = "Held-out questions per tool: base, base + C, Toolformer disabled, Toolformer; 95 % intervals."

    @asset_of(output, kinds={"pytorch"}, pool="gpu", description=told)
    def accuracy(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], compute: dg.ResourceParam[Compute]
    ) -> dg.MaterializeResult:
        compute.release()
        if skipped := _unchanged(context, output):
            return skipped
        version, table, benchmarks = measure_accuracy(plan, progress(context))
        percent = table.with_columns(pl.col("accuracy", "low", "high") * 100)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version),
            metadata={
                "dagster/row_count": table.height,
                "accuracy": dg.MetadataValue.md(frame_table(accuracy_by_condition(table), 20)),
                "left_out": {one.name: dict(one.left_out) for one in benchmarks if one.left_out},
                "plot": image(accuracy_bars(percent)),
                UNCHANGED: False,
            },
        )

    return accuracy


def perplexity_asset(plan: Plan, output: Output) -> dg.AssetsDefinition:
    """Return the asset of held-out perplexity, calls disabled throughout."""

    told = "Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled."

    @asset_of(output, kinds={"pytorch"}, pool="gpu", description=told)
    def perplexity(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], compute: dg.ResourceParam[Compute]
    ) -> dg.MaterializeResult:
        compute.release()
        if skipped := _unchanged(context, output):
            return skipped
        version, table = measure_perplexity(plan)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version),
            metadata={
                "dagster/row_count": table.height,
                "perplexity": dg.MetadataValue.md(frame_table(table)),
                UNCHANGED: False,
            },
        )

    return perplexity


def _unchanged(context: dg.AssetExecutionContext, output: Output) -> dg.MaterializeResult | None:
    """Return what the last run told, where nothing that the measurement depends on changed since; else None."""
    shown, version = last_metadata(context), output.version()
    if not shown or version is None or output.reasons():
        return None
    return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata={**shown, UNCHANGED: True})
