"""evaluation/accuracy and evaluation/perplexity: what finetuning on calls gains and costs (sections 4.2 and 4.3)."""

import time
from collections.abc import Mapping

import dagster as dg
import polars as pl

from assets.metadata import ROWS, UNCHANGED, frame_table, image, last_metadata, numbers
from assets.outputs import Output
from assets.plots import accuracy_bars
from assets.running import note_cost, progress
from assets.tables import asset_of
from resources import Compute
from toolformer_dag.evaluation.measurements import (
    ACCURACY,
    HELDOUT_C,
    MEASURES,
    OVERLAP,
    PERPLEXITY,
    Measurement,
    measured_on,
)
from toolformer_dag.evaluation.question_overlap import overlap_counts
from toolformer_dag.exports.model_card import add_evaluation
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.spending import StepCost
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.training_report import checkpoint_files, checkpoint_folder

TOLD = {
    ACCURACY: "Questions answered right: base, base + C, Toolformer disabled and with tools, further models.",
    PERPLEXITY: "Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled.",
}


def measurement_asset(plan: Plan, output: Output) -> dg.AssetsDefinition:
    """Return the asset of one of MEASURES."""
    name = output.name

    @asset_of(output, kinds={"pytorch"}, pool="gpu", description=TOLD[name])
    def measured(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], compute: dg.ResourceParam[Compute]
    ) -> dg.MaterializeResult:
        compute.release()
        if skipped := _unchanged(context, output):
            return skipped
        for checkpoint in CHECKPOINTS:  # those of another machine too
            checkpoint_files(plan.settings, checkpoint).receive()
        began = time.monotonic()
        found = MEASURES[name](plan, progress(context, "rounds of questions" if name == ACCURACY else "models"))
        note_cost(context, lake, StepCost(time.monotonic() - began, found.tokens, found.calls))
        for checkpoint in CHECKPOINTS:
            files = checkpoint_files(plan.settings, checkpoint)
            files.receive()  # one that was trained elsewhere meanwhile stays
            add_evaluation(checkpoint_folder(plan.settings, checkpoint), *measured_on(plan, checkpoint))
            files.send()
        shown = _of_accuracy(lake, found) if name == ACCURACY else _of_perplexity(context, found)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(found.version), metadata={**_metadata(name, found), **shown}
        )

    return measured


def _metadata(name: str, found: Measurement) -> Mapping[str, dg.MetadataValue]:
    measure, of = name.rpartition("/")[2], "benchmark" if name == ACCURACY else "source"
    return {
        ROWS: dg.MetadataValue.int(found.rows.height),
        measure: dg.MetadataValue.md(frame_table(found.shown, found.shown.height)),
        **numbers(found.rows, measure, of),
        UNCHANGED: dg.MetadataValue.bool(False),
    }


def _of_accuracy(lake: Lake, found: Measurement) -> Mapping[str, dg.MetadataValue]:
    left_out = {benchmark: dict(reasons) for benchmark, reasons in found.left_out.items()}
    percent = found.rows.with_columns(pl.col("accuracy", "low", "high") * 100)
    return {
        "in_corpus": dg.MetadataValue.md(frame_table(overlap_counts(lake.table(OVERLAP).read(WHOLE)), 30)),
        **({"left_out": dg.MetadataValue.json(left_out)} if left_out else {}),
        "plot": image(accuracy_bars(percent)),
    }


def _of_perplexity(context: dg.AssetExecutionContext, found: Measurement) -> Mapping[str, dg.MetadataValue]:
    texts = found.rows.filter(pl.col("source") == HELDOUT_C)["texts"].to_list()
    warning = too_few(max(texts), "measure perplexity")
    if warning is None:
        return {}
    context.log.warning(warning)
    return {"warning": dg.MetadataValue.text(warning)}


def _unchanged(context: dg.AssetExecutionContext, output: Output) -> dg.MaterializeResult | None:
    """Return what the last run told, where nothing that the measurement depends on changed since; else None."""
    shown, version = last_metadata(context), output.version()
    if not shown or version is None or output.reasons():
        return None
    return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata={**shown, UNCHANGED: True})
