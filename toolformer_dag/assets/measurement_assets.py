"""The assets of measurements, which a person starts: answers to benchmarks, and the perplexity of held-out texts."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.assets.checkpoint_assets import list_checkpoint_assets
from toolformer_dag.assets.declaration import AssetDeclaration
from toolformer_dag.assets.metadata import ROWS, UNCHANGED, format_frame_table, numbers, read_last_metadata
from toolformer_dag.assets.plots import bars
from toolformer_dag.assets.running import note_cost, progress
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.computing.spending import StepCost
from toolformer_dag.evaluation.measurements import (
    ACCURACY,
    HELDOUT_C,
    MEASURES,
    OVERLAP,
    PERPLEXITY,
    SETTINGS,
    TABLES,
    Measurement,
    find_measurement_reasons,
    read_checkpoint_tables,
    read_stored_measurement,
)
from toolformer_dag.evaluation.question_overlap import count_overlap
from toolformer_dag.exports.model_card import add_evaluation
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.heldout_texts import NAME as HELDOUT_TEXTS
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.resources import Compute
from toolformer_dag.training.checkpoints import checkpoints
from toolformer_dag.training.training_report import build_checkpoint_output

DESCRIPTIONS = {
    ACCURACY: "Questions answered right: base, base + C, Toolformer disabled and with tools, further models.",
    PERPLEXITY: "Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled.",
}
"""What the measurements measure."""


def list_manual_assets(plan: Plan) -> list[str]:
    """Return the names of the assets that the first job does not make: checkpoints and their measurements."""
    return [*list_checkpoint_assets(plan), *map(plan.named, TABLES)]


def measurement(plan: Plan, name: str) -> AssetDeclaration:
    """Declare the asset of a measurement.

    Args:
        name: One of MEASURES.
    """
    stored = _StoredMeasurement(plan, name)
    return AssetDeclaration(
        name=plan.named(name),
        settings=SETTINGS[name](plan),
        depends_on=_list_measurement_inputs(plan, name),
        description=DESCRIPTIONS[name],
        kinds={"pytorch"},
        pool="gpu",
        reasons=stored.reasons,
        version=stored.version,
        make=stored.make,
    )


def _list_measurement_inputs(plan: Plan, name: str) -> tuple[str, ...]:
    """Return the names of the assets that a measurement reads: checkpoints, for perplexity texts too."""
    trained = list_checkpoint_assets(plan)
    if name == PERPLEXITY:
        return (*trained, plan.named(CORPUS), plan.named(HELDOUT_TEXTS))
    return tuple(trained)


@dataclass(frozen=True, slots=True)
class _StoredMeasurement:
    """A measurement of a plan's checkpoints, stored as a table of the lake.

    - `plan`: the project
    - `name`: the table, one of MEASURES
    """

    plan: Plan
    name: str

    def reasons(self) -> Reasons:
        """Return why the measurement is missing or out of date."""
        return Reasons({WHOLE: find_measurement_reasons(self.plan, self.name)})

    def version(self) -> str | None:
        """Return the version of the stored measurement; None if there is none."""
        return self.plan.lake.table(self.name).part_version(WHOLE)

    def make(self, context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        """Measure unless the stored measurement is up to date; return what its page shows."""
        compute.workers.close()  # evaluation loads models of its own
        if not find_measurement_reasons(self.plan, self.name):
            return self._build_unchanged_result(context, lake)
        measured = self._measure(context, lake)
        _add_to_model_cards(self.plan)
        return _build_result(measured.version, self._build_metadata(context, lake, measured))

    def _build_unchanged_result(self, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        """Return the result of a step that had nothing to measure: what the page showed last."""
        shown = read_last_metadata(context)
        if not shown:  # another Dagster home has measured
            shown = self._build_metadata(context, lake, read_stored_measurement(lake, self.name))
        version = lake.table(self.name).pointer(WHOLE).data_version
        return _build_result(version, {**shown, UNCHANGED: True})

    def _measure(self, context: dg.AssetExecutionContext, lake: Lake) -> Measurement:
        """Measure the plan's checkpoints, publish the rows as the lake's table `name`, and note the cost."""
        _receive_checkpoints(self.plan)
        measure_and_publish = MEASURES[self.name]
        unit = "questions" if self.name == ACCURACY else "models"

        began = time.monotonic()
        measured = measure_and_publish(self.plan, progress(context, unit))
        seconds = time.monotonic() - began

        note_cost(context, lake, StepCost(seconds, measured.tokens, measured.calls))
        return measured

    def _build_metadata(
        self, context: dg.AssetExecutionContext, lake: Lake, result: Measurement
    ) -> dict[str, dg.MetadataValue]:
        """Return what the page shows: the rows, and the figures of accuracy or perplexity."""
        shown = self._build_row_metadata(result)
        if self.name == ACCURACY:
            return shown | _build_accuracy_metadata(lake, result)
        return shown | _build_perplexity_metadata(context, result)

    def _build_row_metadata(self, result: Measurement) -> dict[str, dg.MetadataValue]:
        """Return the rows as a Markdown table, and their number."""
        title = self.name.rpartition("/")[2]
        rows_table = format_frame_table(result.shown, result.shown.height)
        return {
            ROWS: dg.MetadataValue.int(result.rows.height),
            title: dg.MetadataValue.md(rows_table),
            UNCHANGED: dg.MetadataValue.bool(False),
        }


def _build_result(version: str, shown: Mapping[str, Any]) -> dg.MaterializeResult:
    """Return the result of the step. shown: what the asset's page shows."""
    return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=shown)


def _receive_checkpoints(plan: Plan) -> None:
    """Download checkpoints that another machine has trained."""
    for name in checkpoints(plan.settings):
        build_checkpoint_output(plan.settings, name).receive()


def _add_to_model_cards(plan: Plan) -> None:
    """Write each checkpoint's measurements into its model card, here and in the object store."""
    for name in checkpoints(plan.settings):
        files = build_checkpoint_output(plan.settings, name)
        files.receive()  # a checkpoint that another machine has trained meanwhile stays
        add_evaluation(checkpoint_folder(plan.settings, name), *read_checkpoint_tables(plan, name))
        files.send()


def _build_accuracy_metadata(lake: Lake, result: Measurement) -> dict[str, dg.MetadataValue]:
    """Build what the page shows: accuracies in per cent, questions in the corpus, records left out, and a plot."""
    percent = result.rows.with_columns(pl.col("accuracy", "low", "high") * 100)
    shown = _build_accuracy_numbers(percent)
    shown["in_corpus"] = _build_overlap_table(lake)
    if result.left_out:
        shown["left_out"] = _count_left_out_records(result)

    plot = bars(percent, named=("benchmark", "condition"), figure="accuracy")
    shown["plot"] = dg.MetadataValue.md(plot)
    return shown


def _build_accuracy_numbers(percent: pl.DataFrame) -> dict[str, dg.MetadataValue]:
    """Return an accuracy with one decimal per benchmark and condition."""
    rounded = percent.with_columns(pl.col("accuracy").round(1))
    return numbers(rounded, "accuracy", of="benchmark", unit=", %")


def _count_left_out_records(result: Measurement) -> dg.MetadataValue:
    """Return how many records of each benchmark were left out, by reason, as JSON."""
    counts_by_benchmark = {benchmark: dict(counts) for benchmark, counts in result.left_out.items()}
    return dg.MetadataValue.json(counts_by_benchmark)


def _build_overlap_table(lake: Lake) -> dg.MetadataValue:
    """Return a Markdown table of the questions that occur in the corpus, a row per benchmark."""
    counts = count_overlap(lake.table(OVERLAP).read(WHOLE))
    return dg.MetadataValue.md(format_frame_table(counts, rows=30))


def _build_perplexity_metadata(context: dg.AssetExecutionContext, result: Measurement) -> dict[str, dg.MetadataValue]:
    """Return perplexities; if there are few held-out texts, also a warning, which is logged too."""
    shown = numbers(result.rows, "perplexity", of="source")
    heldout_rows = result.rows.filter(pl.col("source") == HELDOUT_C)
    warning = too_few(max(heldout_rows["texts"].to_list()), "measure perplexity")
    if warning:
        context.log.warning(warning)
        shown["warning"] = dg.MetadataValue.text(warning)
    return shown
