"""The assets of finetuned checkpoints, which a person starts: M finetuned on C*, and on the texts without calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.assets.declaration import AssetDeclaration, receive_and_find_reasons
from toolformer_dag.assets.metadata import UNCHANGED
from toolformer_dag.assets.plots import draw_loss_curve
from toolformer_dag.assets.running import note_cost, progress
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.computing.spending import StepCost
from toolformer_dag.evaluation.measurements import read_checkpoint_tables
from toolformer_dag.exports.model_card import add_evaluation, write_model_card
from toolformer_dag.files import locked
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.resources import Compute
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.checkpoint_outputs import explain_too_few_to_train, find_checkpoint_reasons, publish_curve
from toolformer_dag.training.checkpoints import Checkpoint, checkpoints
from toolformer_dag.training.training_report import (
    TrainingData,
    TrainingError,
    TrainingReport,
    build_checkpoint_output,
    is_card_lost,
    read_report,
)


def list_checkpoint_assets(plan: Plan) -> list[str]:
    """Return the names of the assets of a plan's checkpoints."""
    return [plan.named(f"training/{name}") for name in checkpoints(plan.settings)]


def checkpoint(plan: Plan, name: str) -> AssetDeclaration:
    """Declare the asset of a finetuned checkpoint.

    Args:
        name: One of the names in `checkpoints`.
    """
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
        return build_checkpoint_output(self.plan.settings, self.name)

    def reasons(self) -> Reasons:
        """Return why the checkpoint is missing or out of date. Another machine may have trained it."""
        return receive_and_find_reasons(self.files, partial(find_checkpoint_reasons, self.plan, self.name))

    def version(self) -> str | None:
        """Return the version of the finished checkpoint; None if there is none."""
        report = read_report(self.folder)
        return report.fingerprint if report else None

    def make(self, context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        """Finetune the checkpoint unless it is up to date; return what its page shows.

        Raises TrainingError if there are too few texts or if training fails.
        """
        compute.workers.close()  # finetuning loads a model of its own
        with locked(self.folder.with_name("model.lock")):  # a run that trains the same waits, and finds it done
            self.files.receive()  # another machine may have trained it
            return self._finetune(context, lake)

    def _finetune(self, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        """Train unless the checkpoint is up to date, publish its loss curve, and send its files to the object store."""
        data, recipe = self.declared.read_data_and_recipe(self.plan)
        heldout_count = len(data.heldout)
        _warn_of_few_texts(context, heldout_count)
        report = self._train_if_stale(context, data, recipe)

        curve = publish_curve(self.plan, self.name, report)
        self.files.send()
        if not report.reused:
            note_cost(context, lake, _compute_training_cost(report, recipe.batch_size))

        shown = _build_checkpoint_metadata(self.folder, report, curve, heldout_count)
        return dg.MaterializeResult(data_version=dg.DataVersion(report.fingerprint), metadata=shown)

    def _train_if_stale(
        self, context: dg.AssetExecutionContext, data: TrainingData, recipe: TrainingSettings
    ) -> TrainingReport:
        """Train unless the stored checkpoint is up to date, and write its model card.

        Returns:
            The report of the training.
        """
        from toolformer_dag.training.launch import train

        self._refuse_too_few_texts()

        report = train(
            base=self.declared.base(self.plan),
            data=data,
            settings=recipe,
            out=self.folder,
            progress=progress(context, "steps"),
            measured=_build_training_observer(context),
        )

        if not report.reused or is_card_lost(self.folder):
            self._write_card(report, heldout_count=len(data.heldout))
        return report

    def _write_card(self, report: TrainingReport, heldout_count: int) -> None:
        """Write the model card, with the measurements of the checkpoint that are stored."""
        write_model_card(self.plan, self.name, report, heldout_count)
        add_evaluation(self.folder, *read_checkpoint_tables(self.plan, self.name))

    def _refuse_too_few_texts(self) -> None:
        """Raise TrainingError if the checkpoint has to be trained and there are too few texts."""
        if not find_checkpoint_reasons(self.plan, self.name):
            return
        refusal = explain_too_few_to_train(self.plan)
        if refusal:
            raise TrainingError(refusal)


def _warn_of_few_texts(context: dg.AssetExecutionContext, heldout_count: int) -> None:
    """Log a warning if few held-out texts choose the checkpoint."""
    warning = too_few(heldout_count, "choose the checkpoint")
    if warning:
        context.log.warning(warning)


def _compute_training_cost(report: TrainingReport, batch_size: int) -> StepCost:
    """Return what training took; a token counts once for each epoch in which it was read."""
    epochs = report.steps * batch_size / max(1, report.examples)
    return StepCost(report.seconds, round(report.tokens * epochs))


def _build_training_observer(context: dg.AssetExecutionContext) -> Callable[[int, Mapping[str, float]], None]:
    """Return a function that shows the measures of a training step on the asset's page while training goes on."""

    def observe(step: int, values: Mapping[str, float]) -> None:
        context.log_event(dg.AssetObservation(context.asset_key, metadata={"step": step, **values}))

    return observe


def _build_checkpoint_metadata(
    folder: Path, report: TrainingReport, curve: pl.DataFrame, heldout_count: int
) -> dict[str, Any]:
    """Build the metadata of a checkpoint's asset, which its page in Dagster shows by label.

    Args:
        heldout_count: The number of held-out texts whose loss chose the published step.
    """
    return {
        "checkpoint": dg.MetadataValue.path(str(folder)),
        **_build_training_metadata(report),
        **_build_heldout_metadata(heldout_count),
        "texts longer than a sequence": report.split_texts,
        "already finished before": report.reused,  # for people
        UNCHANGED: report.reused,  # for the run's count of steps that found nothing to do
        "curves": dg.MetadataValue.md(draw_loss_curve(curve)),
    }


def _build_training_metadata(report: TrainingReport) -> dict[str, Any]:
    """Return what a training took, and the figure of the published step."""
    return {
        "examples": report.examples,
        "seconds": round(report.seconds, 1),
        "tokens": report.tokens,
        "steps": report.steps,
        "best step": report.best_step,
        "processes": report.processes,
        f"held-out {report.best.measure}": report.best.value,
    }


def _build_heldout_metadata(heldout_count: int) -> dict[str, Any]:
    """Return the number of held-out texts that chose the published step; with a warning if they are few."""
    shown: dict[str, Any] = {"texts that choose the checkpoint": heldout_count}
    warning = too_few(heldout_count, "choose the checkpoint")
    if warning:
        shown["warning"] = warning
    return shown
