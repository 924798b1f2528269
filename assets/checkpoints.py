"""training/finetuned_checkpoint and training/baseline_checkpoint: M finetuned on C*, and on C."""

from collections.abc import Mapping

import dagster as dg
import polars as pl

from assets.metadata import UNCHANGED
from assets.outputs import Output
from assets.running import note_cost, progress
from assets.small_plots import loss_curve
from assets.tables import asset_of
from resources import Compute
from toolformer_dag.evaluation.measurements import measured_on
from toolformer_dag.exports.model_card import add_evaluation, write_model_card
from toolformer_dag.files import locked
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.spending import StepCost
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS, publish_curve, training_texts
from toolformer_dag.training.training_report import (
    TrainingReport,
    card_is_lost,
    checkpoint_files,
    checkpoint_folder,
)


def checkpoint_asset(plan: Plan, name: str, output: Output) -> dg.AssetsDefinition:
    """Return one of CHECKPOINTS; both are trained alike and on the same texts."""

    @asset_of(output, kinds={"pytorch", "huggingface"}, pool="gpu", description=CHECKPOINTS[name][1])
    def trained(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], compute: dg.ResourceParam[Compute]
    ) -> dg.MaterializeResult:
        from toolformer_dag.training.launch import train

        def measured(step: int, values: Mapping[str, float]) -> None:
            context.log_event(dg.AssetObservation(context.asset_key, metadata={"step": step, **values}))

        compute.release()
        texts, choosing = training_texts(plan, name)
        if warning := too_few(len(choosing), "choose the checkpoint"):
            context.log.warning(warning)
        settings, out = plan.settings, checkpoint_folder(plan.settings, name)
        files = checkpoint_files(settings, name)
        with locked(out.with_name("model.lock")):  # another run that trains the same waits, and finds the work done
            files.receive()  # that of another machine too
            report = train(
                settings.model, texts, choosing, settings.training, out, progress(context, "steps"), measured
            )
            if not report.reused or card_is_lost(out):
                write_model_card(plan, name, report, len(choosing))
                add_evaluation(out, *measured_on(plan, name))
            curve = publish_curve(plan, name, report)
            files.send()
        if not report.reused:
            note_cost(context, lake, StepCost(report.seconds, round(report.tokens * _epochs(plan, report))))
        return _result(str(out), report, curve, len(choosing))

    return trained


def _epochs(plan: Plan, report: TrainingReport) -> float:
    return report.steps * plan.settings.training.batch_size / max(1, report.examples)


def _result(folder: str, report: TrainingReport, curve: pl.DataFrame, choosing: int) -> dg.MaterializeResult:
    return dg.MaterializeResult(
        data_version=dg.DataVersion(report.fingerprint),
        metadata={
            "checkpoint": dg.MetadataValue.path(folder),
            "examples": report.examples,
            "seconds": round(report.seconds, 1),
            "tokens": report.tokens,
            "steps": report.steps,
            "best step": report.best_step,
            "processes": report.processes,
            "held-out perplexity": report.perplexity,
            "texts that choose the checkpoint": choosing,
            **({"warning": warning} if (warning := too_few(choosing, "choose the checkpoint")) else {}),
            "texts longer than a sequence": report.split_texts,
            "already finished before": report.reused,
            UNCHANGED: report.reused,
            "curves": dg.MetadataValue.md(loss_curve(curve)),
        },
    )
