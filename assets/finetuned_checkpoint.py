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
from toolformer_dag.stages.split import HELDOUT, TRAIN, heldout_texts
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.lock import locked
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.training.training_report import TrainingReport, read_report
from toolformer_dag.training.training_run import TrainingSettings

CHECKPOINTS = {
    "finetuned_checkpoint": ("text_with_calls", "M finetuned on C*: Toolformer (paper, section 2)."),
    "baseline_checkpoint": (
        "text",
        "M finetuned on C, the same texts without calls: the baseline M + C (paper, section 4.1).",
    ),
}


CHECKPOINT_KEYS = [dg.AssetKey(["training", name]) for name in CHECKPOINTS]


def training_texts(plan: Plan, lake: Lake, name: str) -> tuple[list[str], list[str]]:
    """What a checkpoint is trained on, and the held-out texts on which the best is chosen. Raises MissingPartition."""
    corpus = lake.table("training/augmented_corpus").read(WHOLE)
    train, heldout = (corpus.filter(pl.col("split") == split) for split in (TRAIN, HELDOUT))
    column, _ = CHECKPOINTS[name]
    choosing = heldout_texts(heldout["text"].to_list(), plan.settings.training.heldout_texts).choosing
    return train[column].to_list(), choosing


def checkpoint_versions(plan: Plan) -> dict[str, str]:
    """The fingerprints of the finished runs whose checkpoints are there."""
    reports = {name: read_report(checkpoint_folder(plan.settings, name)) for name in CHECKPOINTS}
    return {name: report.fingerprint for name, report in reports.items() if report}


def checkpoint(plan: Plan, name: str) -> dg.AssetsDefinition:
    """One of CHECKPOINTS; both are trained alike and on the same texts."""
    column, description = CHECKPOINTS[name]
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
                "chosen_on": plan.settings.training.heldout_texts,
            }
        ),
        kinds={"pytorch", "huggingface"},
        owners=OWNERS,
        pool="gpu",
        description=description,
    )
    def trained(context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        from toolformer_dag.training.finetune import finetune

        texts, choosing = training_texts(plan, lake, name)
        out = checkpoint_folder(plan.settings, name)
        with locked(out.with_name("model.lock")):  # a run beside this one waits, and finds the work done
            return _result(finetune(plan.settings.model, texts, choosing, settings, out, progress(context)))

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
