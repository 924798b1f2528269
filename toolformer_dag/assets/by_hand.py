"""The assets of the second job, which a person starts: two finetuned checkpoints, and their measurements.

One checkpoint is the model finetuned on C*, the texts with tool calls, the other on C, the same texts without calls.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.assets.declaration import AssetDeclaration, shared_reasons
from toolformer_dag.assets.metadata import ROWS, UNCHANGED, frame_table, last_metadata, numbers
from toolformer_dag.assets.plots import bars, loss_curve
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
    measured_on,
    measurement_reasons,
    stored_measurement,
)
from toolformer_dag.evaluation.question_overlap import overlap_counts
from toolformer_dag.exports.model_card import add_evaluation, write_model_card
from toolformer_dag.files import locked
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.heldout_texts import NAME as HELDOUT_TEXTS
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.resources import Compute
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.checkpoint_outputs import checkpoint_reasons, publish_curve, too_few_to_train
from toolformer_dag.training.checkpoints import Checkpoint, checkpoints
from toolformer_dag.training.training_report import (
    TrainingData,
    TrainingError,
    TrainingReport,
    card_is_lost,
    checkpoint_files,
    read_report,
)

DESCRIPTIONS = {
    ACCURACY: "Questions answered right: base, base + C, Toolformer disabled and with tools, further models.",
    PERPLEXITY: "Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled.",
}
"""What the measurements measure."""


def trained_assets(plan: Plan) -> list[str]:
    """Return the names of the assets of a plan's checkpoints."""
    return [plan.named(f"training/{name}") for name in checkpoints(plan.settings)]


def assets_by_hand(plan: Plan) -> list[str]:
    """Return the names of the assets that the first job does not make: checkpoints and their measurements."""
    return [*trained_assets(plan), *map(plan.named, TABLES)]


def checkpoint(plan: Plan, name: str) -> AssetDeclaration:
    """Return the asset of a finetuned checkpoint; `name` is one of `checkpoints`."""
    declared = checkpoints(plan.settings)[name]
    trained = _TrainedCheckpoint(plan, name, declared)
    return AssetDeclaration(
        name=plan.named(f"training/{name}"),
        settings=declared.settings(plan),
        depends_on=declared.reads(plan),
        description=declared.description,
        kinds={"pytorch", "huggingface"},
        pool="gpu",
        reasons=trained.reasons,
        version=trained.version,
        make=trained.make,
    )


@dataclass(frozen=True, slots=True)
class _TrainedCheckpoint:
    """A checkpoint of a plan, in a folder on this machine and perhaps in an object store.

    - `plan`: the project
    - `name`: of the checkpoint
    - `declared`: what it is trained on, and how
    """

    plan: Plan
    name: str
    declared: Checkpoint

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return checkpoint_folder(self.plan.settings, self.name)

    @property
    def files(self) -> LocalOutput:
        """The checkpoint's files, which are exchanged with the object store."""
        return checkpoint_files(self.plan.settings, self.name)

    def reasons(self) -> Reasons:
        """Return why the checkpoint is missing or out of date. Another machine may have trained it."""
        return shared_reasons(self.files, partial(checkpoint_reasons, self.plan, self.name))

    def version(self) -> str | None:
        """Return the version of the finished checkpoint; None if there is none."""
        report = read_report(self.folder)
        return report.fingerprint if report else None

    def make(self, context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        """Finetune the checkpoint unless it is up to date; return what its page shows.

        A checkpoint that another machine has trained is reused too. Raises TrainingError if there are too few texts or
        if training fails.
        """
        compute.workers.close()  # finetuning loads a model of its own
        with locked(self.folder.with_name("model.lock")):  # a run that trains the same waits, and finds it done
            data, recipe = self.declared.trained_on(self.plan)
            _warn_of_few_texts(context, data)
            self.files.receive()
            report = self._train(data, recipe, context)
            curve = publish_curve(self.plan, self.name, report)
            self.files.send()
        if not report.reused:
            note_cost(context, lake, _training_cost(report, recipe.batch_size))
        return _checkpoint_result(str(self.folder), report, curve, heldout_texts=len(data.heldout))

    def _train(self, data: TrainingData, recipe: TrainingSettings, context: dg.AssetExecutionContext) -> TrainingReport:
        """Train unless the stored checkpoint is up to date, and write the model card; return the training's report."""
        from toolformer_dag.training.launch import train

        self._refuse_too_few_texts()
        base_model = self.declared.base(self.plan)
        report = train(base_model, data, recipe, self.folder, progress(context, "steps"), _observing(context))
        if not report.reused or card_is_lost(self.folder):
            write_model_card(self.plan, self.name, report, len(data.heldout))
            add_evaluation(self.folder, *measured_on(self.plan, self.name))
        return report

    def _refuse_too_few_texts(self) -> None:
        """Raise TrainingError if the checkpoint has to be trained and there are too few texts."""
        if not checkpoint_reasons(self.plan, self.name):
            return
        refusal = too_few_to_train(self.plan)
        if refusal:
            raise TrainingError(refusal)


def _training_cost(report: TrainingReport, batch_size: int) -> StepCost:
    """Return what training took; a token counts once for each epoch in which it was read."""
    epochs = report.steps * batch_size / max(1, report.examples)
    return StepCost(report.seconds, round(report.tokens * epochs))


def _warn_of_few_texts(context: dg.AssetExecutionContext, data: TrainingData) -> None:
    """Log a warning if few held-out texts choose the checkpoint."""
    warning = too_few(len(data.heldout), "choose the checkpoint")
    if warning:
        context.log.warning(warning)


def _observing(context: dg.AssetExecutionContext) -> Callable[[int, Mapping[str, float]], None]:
    """Return a function that shows the measures of a training step on the asset's page while training goes on."""

    def observe(step: int, values: Mapping[str, float]) -> None:
        context.log_event(dg.AssetObservation(context.asset_key, metadata={"step": step, **values}))

    return observe


def _checkpoint_result(
    folder: str, report: TrainingReport, curve: pl.DataFrame, heldout_texts: int
) -> dg.MaterializeResult:
    """Return what the page of a checkpoint shows.

    heldout_texts: the number of texts whose loss chose the best of the checkpoints that training wrote.
    """
    shown: dict[str, Any] = {
        "checkpoint": dg.MetadataValue.path(folder),
        "examples": report.examples,
        "seconds": round(report.seconds, 1),
        "tokens": report.tokens,
        "steps": report.steps,
        "best step": report.best_step,
        "processes": report.processes,
        f"held-out {report.best.measure}": report.best.value,
        "texts that choose the checkpoint": heldout_texts,
    }
    warning = too_few(heldout_texts, "choose the checkpoint")
    if warning:
        shown["warning"] = warning
    shown["texts longer than a sequence"] = report.split_texts
    shown["already finished before"] = report.reused
    shown[UNCHANGED] = report.reused
    shown["curves"] = dg.MetadataValue.md(loss_curve(curve))
    return dg.MaterializeResult(data_version=dg.DataVersion(report.fingerprint), metadata=shown)


def measurement(plan: Plan, name: str) -> AssetDeclaration:
    """Return the asset of a measurement; `name` is one of MEASURES."""
    reads = trained_assets(plan)
    if name == PERPLEXITY:
        reads += [plan.named(CORPUS), plan.named(HELDOUT_TEXTS)]
    stored = _StoredMeasurement(plan, name)
    return AssetDeclaration(
        name=plan.named(name),
        settings=SETTINGS[name](plan),
        depends_on=tuple(reads),
        description=DESCRIPTIONS[name],
        kinds={"pytorch"},
        pool="gpu",
        reasons=stored.reasons,
        version=stored.version,
        make=stored.make,
    )


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
        return Reasons({WHOLE: measurement_reasons(self.plan, self.name)})

    def version(self) -> str | None:
        """Return the version of the stored measurement; None if there is none."""
        return self.plan.lake.table(self.name).part_version(WHOLE)

    def make(self, context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        """Measure unless the stored measurement is up to date; return what its page shows."""
        compute.workers.close()  # evaluation loads models of its own
        version = self.version()
        if version is not None and not measurement_reasons(self.plan, self.name):
            shown = {**self._shown_before(context, lake), UNCHANGED: True}
            return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=shown)
        result = self._measure(context, lake)
        _add_to_model_cards(self.plan)
        shown = self._shown(context, lake, result)
        return dg.MaterializeResult(data_version=dg.DataVersion(result.version), metadata=shown)

    def _measure(self, context: dg.AssetExecutionContext, lake: Lake) -> Measurement:
        """Measure, publish the table and note the cost."""
        for checkpoint_name in checkpoints(self.plan.settings):  # another machine may have trained them
            checkpoint_files(self.plan.settings, checkpoint_name).receive()
        unit = "questions" if self.name == ACCURACY else "models"
        began = time.monotonic()
        result = MEASURES[self.name](self.plan, progress(context, unit))
        seconds = time.monotonic() - began
        note_cost(context, lake, StepCost(seconds, result.tokens, result.calls))
        return result

    def _shown_before(self, context: dg.AssetExecutionContext, lake: Lake) -> Mapping[str, Any]:
        """Return what the page shows already, or builds it if another Dagster home has measured."""
        return last_metadata(context) or self._shown(context, lake, stored_measurement(lake, self.name))

    def _shown(self, context: dg.AssetExecutionContext, lake: Lake, result: Measurement) -> dict[str, dg.MetadataValue]:
        """Return what the page shows: the rows, and the figures of accuracy or perplexity."""
        title = self.name.rpartition("/")[2]
        shown: dict[str, dg.MetadataValue] = {
            ROWS: dg.MetadataValue.int(result.rows.height),
            title: dg.MetadataValue.md(frame_table(result.shown, result.shown.height)),
            UNCHANGED: dg.MetadataValue.bool(False),
        }
        shown |= _accuracy_metadata(lake, result) if self.name == ACCURACY else _perplexity_metadata(context, result)
        return shown


def _add_to_model_cards(plan: Plan) -> None:
    """Write each checkpoint's measurements into its model card, here and in the object store."""
    for name in checkpoints(plan.settings):
        files = checkpoint_files(plan.settings, name)
        files.receive()  # a checkpoint that another machine has trained meanwhile stays
        add_evaluation(checkpoint_folder(plan.settings, name), *measured_on(plan, name))
        files.send()


def _accuracy_metadata(lake: Lake, result: Measurement) -> dict[str, dg.MetadataValue]:
    """Return accuracies in per cent, the questions that occur in the corpus, the records left out, and a plot."""
    percent = result.rows.with_columns(pl.col("accuracy", "low", "high") * 100)
    rounded = percent.with_columns(pl.col("accuracy").round(1))
    shown = numbers(rounded, "accuracy", "benchmark", ", %")
    shown["in_corpus"] = _overlap_table(lake)
    if result.left_out:
        left_out = {benchmark: dict(counts) for benchmark, counts in result.left_out.items()}
        shown["left_out"] = dg.MetadataValue.json(left_out)
    shown["plot"] = dg.MetadataValue.md(bars(percent, ("benchmark", "condition"), "accuracy"))
    return shown


def _overlap_table(lake: Lake) -> dg.MetadataValue:
    """Return a Markdown table of the questions that occur in the corpus, a row per benchmark."""
    counts = overlap_counts(lake.table(OVERLAP).read(WHOLE))
    return dg.MetadataValue.md(frame_table(counts, 30))


def _perplexity_metadata(context: dg.AssetExecutionContext, result: Measurement) -> dict[str, dg.MetadataValue]:
    """Return perplexities; if there are few held-out texts, also a warning, which is logged too."""
    shown = numbers(result.rows, "perplexity", "source")
    heldout_rows = result.rows.filter(pl.col("source") == HELDOUT_C)
    warning = too_few(max(heldout_rows["texts"].to_list()), "measure perplexity")
    if warning:
        context.log.warning(warning)
        shown["warning"] = dg.MetadataValue.text(warning)
    return shown
