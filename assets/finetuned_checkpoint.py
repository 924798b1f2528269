"""training/finetuned_checkpoint and training/baseline_checkpoint: M finetuned on C*, and on C."""

import dagster as dg
import polars as pl

from assets.augmented_corpus import KEY as CORPUS
from assets.metadata import image
from assets.plan import OWNERS, Plan
from assets.plots import loss_curve
from assets.progress import progress
from toolformer_dag.checkpoints import checkpoint_folder
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.stages.split import heldout_texts
from toolformer_dag.storage.lake import Lake
from toolformer_dag.training.report import TrainingReport
from toolformer_dag.training.settings import TrainingSettings

CHECKPOINTS = {
    "finetuned_checkpoint": ("text_with_calls", "M finetuned on C*: Toolformer (paper, section 2)."),
    "baseline_checkpoint": (
        "text",
        "M finetuned on C, the same texts without calls: the baseline M + C (paper, section 4.1).",
    ),
}


CHECKPOINT_KEYS = [dg.AssetKey(["training", name]) for name in CHECKPOINTS]


def checkpoint(plan: Plan, name: str) -> dg.AssetsDefinition:
    """One of CHECKPOINTS; both are trained alike and on the same texts."""
    column, description = CHECKPOINTS[name]
    chosen_on = plan.settings.training.heldout_texts
    settings = TrainingSettings.of(plan.settings.training)

    @dg.asset(
        key=["training", name],
        group_name="training",
        deps=[CORPUS],
        code_version=fingerprint(
            {
                "settings": settings.determining(),
                "model": plan.model,
                "column": column,
                "chosen_on": chosen_on,
            }
        ),
        kinds={"pytorch", "huggingface"},
        owners=OWNERS,
        pool="gpu",
        description=description,
    )
    def trained(context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        from toolformer_dag.training.finetune import finetune

        corpus = lake.table("training/augmented_corpus").read("all")
        train, heldout = (corpus.filter(pl.col("split") == split) for split in ("train", "heldout"))
        report = finetune(
            plan.settings.model,
            train[column].to_list(),
            heldout_texts(heldout["text"].to_list(), chosen_on).choosing,
            settings,
            checkpoint_folder(plan.settings, name),
            progress(context),
        )
        return _result(report)

    return trained


def _result(report: TrainingReport) -> dg.MaterializeResult:
    curve = [{"step": point.step, "measure": "training loss", "value": point.loss} for point in report.losses]
    curve += [{"step": p.step, "measure": "held-out perplexity", "value": p.perplexity} for p in report.heldout]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(report.fingerprint),
        metadata={
            "dagster/row_count": report.examples,
            "seconds": round(report.seconds, 1),
            "tokens": report.tokens,
            "steps": report.steps,
            "best step": report.best_step,
            "held-out perplexity": report.perplexity,
            "texts longer than a sequence": report.split_texts,
            "already finished before": report.reused,
            "curves": image(loss_curve(pl.DataFrame(curve))),
        },
    )
