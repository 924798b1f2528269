"""training/finetuned_checkpoint and training/baseline_checkpoint: M finetuned on C*, and on C."""

from collections.abc import Mapping

import dagster as dg
import polars as pl

from assets.metadata import UNCHANGED, image
from assets.outputs import Output
from assets.plots import loss_curve
from assets.running import progress
from assets.tables import asset_of
from resources import Compute
from toolformer_dag.files import locked
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS, training_texts
from toolformer_dag.training.training_report import TrainingReport, checkpoint_folder


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
        settings, out = plan.settings, checkpoint_folder(plan.settings, name)
        with locked(out.with_name("model.lock")):  # another run that trains the same waits, and finds the work done
            report = train(settings.model, texts, choosing, settings.training, out, progress(context), measured)
        return _result(str(out), report)

    return trained


def _result(folder: str, report: TrainingReport) -> dg.MaterializeResult:
    curve = [{"step": point.step, "measure": "training loss", "value": point.loss} for point in report.losses]
    curve += [{"step": p.step, "measure": "held-out perplexity", "value": p.perplexity} for p in report.heldout]
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
            "texts longer than a sequence": report.split_texts,
            "already finished before": report.reused,
            UNCHANGED: report.reused,
            "curves": image(loss_curve(pl.DataFrame(curve))),
        },
    )
