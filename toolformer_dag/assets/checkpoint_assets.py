"""The assets of finetuned checkpoints, which a person starts: M finetuned on C*, and on the texts without calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.assets.declaration import AssetDeclaration, receive_and_find_reasons
from toolformer_dag.assets.metadata import UNCHANGED_LABEL
from toolformer_dag.assets.plots import draw_loss_curve
from toolformer_dag.assets.running import build_progress_reporter, record_cost
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.computing.spending import StepCost
from toolformer_dag.evaluation.measurements import read_checkpoint_tables
from toolformer_dag.exports.model_card import add_evaluation_figures, write_model_card
from toolformer_dag.files import hold_file_lock
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.pipeline.heldout_texts import build_few_texts_warning
from toolformer_dag.resources import Compute
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.checkpoint_outputs import (
    explain_too_few_training_texts,
    find_checkpoint_stale_reasons,
    publish_curve,
)
from toolformer_dag.training.checkpoints import Checkpoint, build_checkpoints_by_name
from toolformer_dag.training.training_report import (
    TrainingData,
    TrainingError,
    TrainingReport,
    build_checkpoint_output,
    is_card_missing_or_changed,
    read_training_report,
)


def list_checkpoint_asset_names(plan: Plan) -> list[str]:
    """Return the names of the assets of a plan's checkpoints."""
    return [plan.add_round_suffix(f"training/{name}") for name in build_checkpoints_by_name(plan.settings)]


def declare_checkpoint(plan: Plan, checkpoint_name: str) -> AssetDeclaration:
    """Declare the asset of a finetuned checkpoint.

    Args:
        checkpoint_name: One of the names in `build_checkpoints_by_name`, such as "finetuned_checkpoint".
    """
    declared = build_checkpoints_by_name(plan.settings)[checkpoint_name]
    trained = _TrainedCheckpoint(plan, checkpoint_name, declared)

    return AssetDeclaration(
        name=plan.add_round_suffix(f"training/{checkpoint_name}"),
        settings=declared.collect_settings(plan),
        depends_on=declared.list_input_assets(plan),
        description=declared.description,
        kinds={"pytorch", "huggingface"},
        pool="gpu",
        find_reasons=trained.find_reasons,
        get_version=trained.read_version,
        make_asset=trained.make_asset,
    )


@dataclass(frozen=True, slots=True)
class _TrainedCheckpoint:
    """A checkpoint of a plan, in a folder on this machine and perhaps in an object store.

    Attributes:
        plan: The project's plan.
        name: The name of the checkpoint.
        declared_checkpoint: What it is trained on, and how.
    """

    plan: Plan
    name: str
    declared_checkpoint: Checkpoint

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return get_checkpoint_folder(self.plan.settings, self.name)

    @property
    def local_output(self) -> LocalOutput:
        """The checkpoint's files, which machines share through the object store."""
        return build_checkpoint_output(self.plan.settings, self.name)

    def find_reasons(self) -> Reasons:
        """Find out why the checkpoint is missing or out of date, after downloading a newer one if there is one."""
        find_local_reasons = partial(find_checkpoint_stale_reasons, self.plan, self.name)
        return receive_and_find_reasons(self.local_output, find_local_reasons)

    def read_version(self) -> str | None:
        """Return the version of the finished checkpoint, or None if there is none."""
        report = read_training_report(self.folder)
        return report.fingerprint if report else None

    def make_asset(self, context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        """Finetune the checkpoint unless it is up to date, and return what its page shows.

        Raises:
            TrainingError: There are too few texts to train on, or the training fails.
        """
        # Finetuning loads a model of its own, so the workers give back their memory.
        compute.workers.close()

        # Another run that trains the same checkpoint waits for this lock, and then finds the checkpoint done.
        with hold_file_lock(self.folder.with_name("model.lock")):
            self.local_output.receive_files()  # another machine may have trained it
            return self._finetune_and_publish(context, lake)

    def _finetune_and_publish(self, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        """Train unless the checkpoint is up to date, publish its loss curve, and send its files to the object store.

        Returns:
            The version of the checkpoint, and what its page shows.

        Raises:
            TrainingError: There are too few texts to train on, or the training fails.
        """
        training_data, training_settings = self.declared_checkpoint.read_data_and_settings(self.plan)
        heldout_count = len(training_data.heldout)
        _warn_of_few_texts(context, heldout_count)

        report = self._train_if_stale(context, training_data, training_settings)

        loss_curve = publish_curve(self.plan, self.name, report)
        self.local_output.send()
        if not report.reused:
            record_cost(context, lake, _compute_training_cost(report, training_settings.batch_size))

        metadata = _build_checkpoint_metadata(self.folder, report, loss_curve, heldout_count)
        return dg.MaterializeResult(data_version=dg.DataVersion(report.fingerprint), metadata=metadata)

    def _train_if_stale(
        self, context: dg.AssetExecutionContext, training_data: TrainingData, training_settings: TrainingSettings
    ) -> TrainingReport:
        """Train unless the stored checkpoint is up to date, and write its model card if it is new or changed.

        Returns:
            The report of the training, which may be an earlier one (`report.reused`).

        Raises:
            TrainingError: There are too few texts to train on, or the training fails.
        """
        from toolformer_dag.training.launch import train

        self._refuse_too_few_texts()

        report = train(
            base_model=self.declared_checkpoint.get_base_model(self.plan),
            data=training_data,
            settings=training_settings,
            output_folder=self.folder,
            step_callback=build_progress_reporter(context, "steps"),
            measurement_callback=_build_training_observer(context),
        )

        if not report.reused or is_card_missing_or_changed(self.folder):
            self._write_model_card(report, heldout_count=len(training_data.heldout))
        return report

    def _write_model_card(self, report: TrainingReport, heldout_count: int) -> None:
        """Write the model card, with the stored measurements of the checkpoint."""
        write_model_card(self.plan, self.name, report, heldout_count)
        add_evaluation_figures(self.folder, *read_checkpoint_tables(self.plan, self.name))

    def _refuse_too_few_texts(self) -> None:
        """Refuse to train on too few texts; do nothing if the checkpoint is up to date.

        Raises:
            TrainingError: The checkpoint has to be trained, and there are too few texts.
        """
        if not find_checkpoint_stale_reasons(self.plan, self.name):
            return
        refusal = explain_too_few_training_texts(self.plan)
        if refusal:
            raise TrainingError(refusal)


def _warn_of_few_texts(context: dg.AssetExecutionContext, heldout_count: int) -> None:
    """Log a warning if there are few held-out texts, because their loss chooses the training step that is published."""
    warning = build_few_texts_warning(heldout_count, "choose the checkpoint")
    if warning:
        context.log.warning(warning)


def _compute_training_cost(report: TrainingReport, batch_size: int) -> StepCost:
    """Return the seconds and tokens of a training. A token counts once for each epoch in which it was read."""
    epoch_count = report.steps * batch_size / max(1, report.examples)
    token_count = round(report.tokens * epoch_count)
    return StepCost(report.seconds, token_count)


def _build_training_observer(context: dg.AssetExecutionContext) -> Callable[[int, Mapping[str, float]], None]:
    """Return a function that shows the measures of each training step on the asset's page while training goes on."""

    def observe(step: int, values: Mapping[str, float]) -> None:
        context.log_event(dg.AssetObservation(context.asset_key, metadata={"step": step, **values}))

    return observe


def _build_checkpoint_metadata(
    folder: Path, report: TrainingReport, loss_curve: pl.DataFrame, heldout_count: int
) -> dict[str, Any]:
    """Build what the page of a checkpoint shows, by label: its folder, its training and its loss curves.

    Args:
        folder: The folder of the checkpoint.
        loss_curve: A table with the columns step, measure and value.
        heldout_count: The number of held-out texts whose loss chose the published step.
    """
    return {
        "checkpoint": dg.MetadataValue.path(str(folder)),
        **_build_training_metadata(report),
        **_build_heldout_metadata(heldout_count),
        "texts longer than a sequence": report.split_texts,
        "already finished before": report.reused,  # for people
        UNCHANGED_LABEL: report.reused,  # for the run's count of steps that found nothing to do
        "curves": dg.MetadataValue.md(draw_loss_curve(loss_curve)),
    }


def _build_training_metadata(report: TrainingReport) -> dict[str, Any]:
    """Build what the page shows of a training: its size, what it took, and the measure of the published step."""
    return {
        "examples": report.examples,
        "seconds": round(report.seconds, 1),
        "tokens": report.tokens,
        "steps": report.steps,
        "best step": report.best_step,
        "processes": report.processes,
        f"held-out {report.best_point.measure}": report.best_point.value,
    }


def _build_heldout_metadata(heldout_count: int) -> dict[str, Any]:
    """Build what the page shows of the held-out texts that chose the published step: their number, or a warning too."""
    shown: dict[str, Any] = {"texts that choose the checkpoint": heldout_count}
    warning = build_few_texts_warning(heldout_count, "choose the checkpoint")
    if warning:
        shown["warning"] = warning
    return shown
