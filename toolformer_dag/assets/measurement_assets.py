"""The assets of measurements, which a person starts: answers to benchmarks, and the perplexity of held-out texts."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.assets.checkpoint_assets import list_checkpoint_asset_names
from toolformer_dag.assets.declaration import AssetDeclaration
from toolformer_dag.assets.metadata import (
    ROW_COUNT_LABEL,
    UNCHANGED_LABEL,
    build_number_metadata,
    format_frame_table,
    read_last_metadata,
)
from toolformer_dag.assets.plots import draw_bar_chart
from toolformer_dag.assets.running import build_progress_reporter, record_cost
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.computing.spending import StepCost
from toolformer_dag.evaluation.measurements import (
    ACCURACY_TABLE,
    HELDOUT_SOURCE,
    MEASURE_FUNCTIONS,
    OVERLAP_TABLE,
    PERPLEXITY_TABLE,
    SETTINGS_BUILDERS,
    TABLES_BY_MEASUREMENT,
    Measurement,
    list_outdated_reasons,
    read_checkpoint_tables,
    read_stored_measurement,
)
from toolformer_dag.evaluation.question_overlap import count_overlap
from toolformer_dag.exports.model_card import add_evaluation_figures
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Lake
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.pipeline.augmented_corpus import TABLE_NAME as CORPUS
from toolformer_dag.pipeline.heldout_texts import TABLE_NAME as HELDOUT_TEXTS
from toolformer_dag.pipeline.heldout_texts import build_few_texts_warning
from toolformer_dag.resources import Compute
from toolformer_dag.training.checkpoints import build_checkpoints_by_name
from toolformer_dag.training.training_report import build_checkpoint_output

DESCRIPTION_BY_MEASUREMENT = {
    ACCURACY_TABLE: "Questions answered right: base, base + C, Toolformer disabled and with tools, further models.",
    PERPLEXITY_TABLE: "Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled.",
}
"""What the measurements measure."""


def list_manual_asset_names(plan: Plan) -> list[str]:
    """Return the names of the assets that only a person starts: checkpoints and their measurements."""
    measurement_names = [plan.add_round_suffix(name) for name in TABLES_BY_MEASUREMENT]
    return list_checkpoint_asset_names(plan) + measurement_names


def declare_measurement(plan: Plan, measurement_name: str) -> AssetDeclaration:
    """Declare the asset of a measurement of the plan's checkpoints.

    Args:
        plan: The project's plan.
        measurement_name: ACCURACY_TABLE or PERPLEXITY_TABLE.
    """
    stored = _StoredMeasurement(plan, measurement_name)
    return AssetDeclaration(
        name=plan.add_round_suffix(measurement_name),
        settings=SETTINGS_BUILDERS[measurement_name](plan),
        depends_on=_list_measurement_input_names(plan, measurement_name),
        description=DESCRIPTION_BY_MEASUREMENT[measurement_name],
        kinds={"pytorch"},
        pool="gpu",
        find_reasons=stored.find_reasons,
        get_version=stored.read_version,
        make_asset=stored.make_asset,
    )


def _list_measurement_input_names(plan: Plan, measurement_name: str) -> tuple[str, ...]:
    """Return the names of the assets that a measurement reads: the checkpoints, and for perplexity also texts."""
    checkpoint_names = tuple(list_checkpoint_asset_names(plan))
    if measurement_name == PERPLEXITY_TABLE:
        return (*checkpoint_names, plan.add_round_suffix(CORPUS), plan.add_round_suffix(HELDOUT_TEXTS))
    return checkpoint_names


@dataclass(frozen=True, slots=True)
class _StoredMeasurement:
    """A measurement of a plan's checkpoints, which is stored as a table of the lake.

    Attributes:
        plan: The project's plan.
        name: The name of the table, ACCURACY_TABLE or PERPLEXITY_TABLE.
    """

    plan: Plan
    name: str

    def find_reasons(self) -> Reasons:
        """Return why the measurement is missing or out of date; the reasons are empty if it is neither."""
        return Reasons({WHOLE_TABLE_PART: list_outdated_reasons(self.plan, self.name)})

    def read_version(self) -> str | None:
        """Return the version of the stored measurement, or None if there is none."""
        return self.plan.lake.get_table(self.name).find_part_version(WHOLE_TABLE_PART)

    def make_asset(self, context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        """Measure unless the stored measurement is up to date.

        Returns:
            The version of the measurement, and what the asset's page shows.
        """
        # The evaluation loads models of its own, so the workers give back their memory.
        compute.workers.close()
        if not list_outdated_reasons(self.plan, self.name):
            return self._build_unchanged_result(context, lake)

        measurement = self._measure(context, lake)
        _add_measurements_to_model_cards(self.plan)
        metadata = self._build_metadata(context, lake, measurement)
        return _build_result(measurement.content_version, metadata)

    def _build_unchanged_result(self, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        """Return the result of a step that had nothing to measure. The page shows the same as last time."""
        metadata = read_last_metadata(context)
        if not metadata:  # the measurement was made under another Dagster home
            stored_measurement = read_stored_measurement(lake, self.name)
            metadata = self._build_metadata(context, lake, stored_measurement)

        version = lake.get_table(self.name).read_pointer(WHOLE_TABLE_PART).data_version
        return _build_result(version, {**metadata, UNCHANGED_LABEL: True})

    def _measure(self, context: dg.AssetExecutionContext, lake: Lake) -> Measurement:
        """Measure the plan's checkpoints, store the rows as a table of the lake, and record what that cost."""
        _download_checkpoints(self.plan)
        measure_and_publish = MEASURE_FUNCTIONS[self.name]
        progress_unit = "questions" if self.name == ACCURACY_TABLE else "models"

        start = time.monotonic()
        measurement = measure_and_publish(self.plan, build_progress_reporter(context, progress_unit))
        seconds = time.monotonic() - start

        record_cost(context, lake, StepCost(seconds, measurement.token_count, measurement.call_count))
        return measurement

    def _build_metadata(
        self, context: dg.AssetExecutionContext, lake: Lake, measurement: Measurement
    ) -> dict[str, dg.MetadataValue]:
        """Build what the page shows of a measurement: its rows, and the numbers of accuracy or perplexity."""
        shown = self._build_row_metadata(measurement)
        if self.name == ACCURACY_TABLE:
            return shown | _build_accuracy_metadata(lake, measurement)
        return shown | _build_perplexity_metadata(context, measurement)

    def _build_row_metadata(self, measurement: Measurement) -> dict[str, dg.MetadataValue]:
        """Build what the page shows of the rows: their number, and a Markdown table."""
        title = self.name.rpartition("/")[2]
        rows_table = format_frame_table(measurement.display_table, measurement.display_table.height)
        return {
            ROW_COUNT_LABEL: dg.MetadataValue.int(measurement.rows.height),
            title: dg.MetadataValue.md(rows_table),
            UNCHANGED_LABEL: dg.MetadataValue.bool(False),
        }


def _build_result(version: str, metadata: Mapping[str, Any]) -> dg.MaterializeResult:
    """Return the result of the step: the version of the measurement, and what the asset's page shows."""
    return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=metadata)


def _download_checkpoints(plan: Plan) -> None:
    """Download the checkpoints that another machine has trained and put into the object store."""
    for name in build_checkpoints_by_name(plan.settings):
        build_checkpoint_output(plan.settings, name).receive_files()


def _add_measurements_to_model_cards(plan: Plan) -> None:
    """Write the measurements of each checkpoint into its model card, here and in the object store."""
    for checkpoint_name in build_checkpoints_by_name(plan.settings):
        checkpoint_output = build_checkpoint_output(plan.settings, checkpoint_name)
        # If another machine has trained the checkpoint meanwhile, its files are the ones that stay.
        checkpoint_output.receive_files()

        folder = get_checkpoint_folder(plan.settings, checkpoint_name)
        add_evaluation_figures(folder, *read_checkpoint_tables(plan, checkpoint_name))
        checkpoint_output.send()


def _build_accuracy_metadata(lake: Lake, measurement: Measurement) -> dict[str, dg.MetadataValue]:
    """Build what the page shows of answers to benchmarks.

    These are accuracies in per cent, the questions that also occur in the corpus, the records that were left out,
    and a bar chart.
    """
    percent_rows = measurement.rows.with_columns(pl.col("accuracy", "low", "high") * 100)

    metadata = _build_accuracy_numbers(percent_rows)
    metadata["in_corpus"] = _build_overlap_table(lake)
    if measurement.left_out_counts:
        metadata["left_out"] = _count_left_out_records(measurement)

    bar_chart = draw_bar_chart(percent_rows, label_columns=("benchmark", "condition"), length_column="accuracy")
    metadata["plot"] = dg.MetadataValue.md(bar_chart)
    return metadata


def _build_accuracy_numbers(percent_rows: pl.DataFrame) -> dict[str, dg.MetadataValue]:
    """Build a number for each benchmark and condition: the accuracy in per cent, with one decimal."""
    rounded = percent_rows.with_columns(pl.col("accuracy").round(1))
    return build_number_metadata(rounded, "accuracy", subject_column="benchmark", unit_suffix=", %")


def _count_left_out_records(measurement: Measurement) -> dg.MetadataValue:
    """Return as JSON how many records of each benchmark were left out, by the reason."""
    counts_by_benchmark = {benchmark: dict(counts) for benchmark, counts in measurement.left_out_counts.items()}
    return dg.MetadataValue.json(counts_by_benchmark)


def _build_overlap_table(lake: Lake) -> dg.MetadataValue:
    """Build a Markdown table that says, per benchmark, how many questions also occur in the corpus."""
    overlap_rows = lake.get_table(OVERLAP_TABLE).read_part(WHOLE_TABLE_PART)
    counts_table = format_frame_table(count_overlap(overlap_rows), max_rows=30)
    return dg.MetadataValue.md(counts_table)


def _build_perplexity_metadata(
    context: dg.AssetExecutionContext, measurement: Measurement
) -> dict[str, dg.MetadataValue]:
    """Build what the page shows of perplexities: a number for each source of texts and each condition.

    If there are few held-out texts, a warning is shown too, and written to the run's log.
    """
    metadata = build_number_metadata(measurement.rows, "perplexity", subject_column="source")

    # A row per model, at least one. All have the same number of texts.
    heldout_rows = measurement.rows.filter(pl.col("source") == HELDOUT_SOURCE)
    heldout_count = max(heldout_rows["texts"].to_list())
    warning = build_few_texts_warning(heldout_count, "measure perplexity")
    if warning:
        context.log.warning(warning)
        metadata["warning"] = dg.MetadataValue.text(warning)
    return metadata
