"""The assets of the second job, a person's decision: M finetuned on C* and on C, and what that gains and costs."""

import time
from collections.abc import Mapping

import dagster as dg
import polars as pl

from toolformer_dag.assets.declaration import Output, shared_reasons
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
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.heldout_texts import NAME as HELDOUT_TEXTS
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.resources import Compute
from toolformer_dag.training.checkpoint_outputs import (
    CHECKPOINTS,
    checkpoint_reasons,
    publish_curve,
    too_few_to_train,
)
from toolformer_dag.training.training_report import (
    TrainingError,
    TrainingReport,
    card_is_lost,
    checkpoint_files,
    read_report,
)

TRAINED = tuple(f"training/{name}" for name in CHECKPOINTS)
BY_HAND = (*TRAINED, *TABLES)
DESCRIPTIONS = {
    ACCURACY: "Questions answered right: base, base + C, Toolformer disabled and with tools, further models.",
    PERPLEXITY: "Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled.",
}


def checkpoint(plan: Plan, name: str) -> Output:
    """Return the asset of one of CHECKPOINTS."""
    settings, out, files = plan.settings, checkpoint_folder(plan.settings, name), checkpoint_files(plan.settings, name)

    def version() -> str | None:
        report = read_report(out)
        return report.fingerprint if report else None

    def trained(context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        from toolformer_dag.training.launch import train

        def measured(step: int, values: Mapping[str, float]) -> None:
            context.log_event(dg.AssetObservation(context.asset_key, metadata={"step": step, **values}))

        compute.workers.close()  # finetuning and evaluation load models of their own
        data, recipe = CHECKPOINTS[name].trained_on(plan)
        choosing = len(data.heldout)
        if warning := too_few(choosing, "choose the checkpoint"):
            context.log.warning(warning)
        with locked(out.with_name("model.lock")):  # another run that trains the same waits, and finds the work done
            files.receive()  # that of another machine too
            if checkpoint_reasons(plan, name) and (few := too_few_to_train(plan)):
                raise TrainingError(few)
            report = train(settings.model, data, recipe, out, progress(context, "steps"), measured)
            if not report.reused or card_is_lost(out):
                write_model_card(plan, name, report, choosing)
                add_evaluation(out, *measured_on(plan, name))
            curve = publish_curve(plan, name, report)
            files.send()
        if not report.reused:
            epochs = report.steps * settings.training.batch_size / max(1, report.examples)
            note_cost(context, lake, StepCost(report.seconds, round(report.tokens * epochs)))
        return _checkpoint_result(str(out), report, curve, choosing)

    return Output(
        name=plan.named(f"training/{name}"),
        settings=CHECKPOINTS[name].settings(plan),
        depends_on=CHECKPOINTS[name].reads(plan),
        description=CHECKPOINTS[name].description,
        kinds={"pytorch", "huggingface"},
        pool="gpu",
        reasons=lambda: shared_reasons(files, lambda: checkpoint_reasons(plan, name)),
        version=version,
        make=trained,
    )


def _checkpoint_result(folder: str, report: TrainingReport, curve: pl.DataFrame, choosing: int) -> dg.MaterializeResult:
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
            f"held-out {report.best.measure}": report.best.value,
            "texts that choose the checkpoint": choosing,
            **({"warning": warning} if (warning := too_few(choosing, "choose the checkpoint")) else {}),
            "texts longer than a sequence": report.split_texts,
            "already finished before": report.reused,
            UNCHANGED: report.reused,
            "curves": dg.MetadataValue.md(loss_curve(curve)),
        },
    )


def measurement(plan: Plan, name: str) -> Output:
    """Return the asset of one of MEASURES."""

    def measured(context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        compute.workers.close()  # finetuning and evaluation load models of their own
        stored, shown = plan.lake.table(name).part_version(WHOLE), last_metadata(context)
        if stored is not None and not measurement_reasons(plan, name):
            known = shown or _shown(context, lake, name, stored_measurement(lake, name))  # another home has measured it
            return dg.MaterializeResult(data_version=dg.DataVersion(stored), metadata={**known, UNCHANGED: True})
        for checkpoint in CHECKPOINTS:  # those of another machine too
            checkpoint_files(plan.settings, checkpoint).receive()
        began = time.monotonic()
        result = MEASURES[name](plan, progress(context, "questions" if name == ACCURACY else "models"))
        note_cost(context, lake, StepCost(time.monotonic() - began, result.tokens, result.calls))
        for checkpoint in CHECKPOINTS:
            files = checkpoint_files(plan.settings, checkpoint)
            files.receive()  # one that was trained elsewhere meanwhile stays
            add_evaluation(checkpoint_folder(plan.settings, checkpoint), *measured_on(plan, checkpoint))
            files.send()
        return dg.MaterializeResult(
            data_version=dg.DataVersion(result.version), metadata=_shown(context, lake, name, result)
        )

    read = (*TRAINED, CORPUS, HELDOUT_TEXTS) if name == PERPLEXITY else TRAINED
    return Output(
        name=plan.named(name),
        settings=SETTINGS[name](plan),
        depends_on=tuple(map(plan.named, read)),
        description=DESCRIPTIONS[name],
        kinds={"pytorch"},
        pool="gpu",
        reasons=lambda: Reasons({WHOLE: measurement_reasons(plan, name)}),
        version=lambda: plan.lake.table(name).part_version(WHOLE),
        make=measured,
    )


def _shown(
    context: dg.AssetExecutionContext, lake: Lake, name: str, result: Measurement
) -> Mapping[str, dg.MetadataValue]:
    more = _of_accuracy(lake, result) if name == ACCURACY else _of_perplexity(context, result)
    return {**_metadata(name, result), **more}


def _metadata(name: str, result: Measurement) -> Mapping[str, dg.MetadataValue]:
    return {
        ROWS: dg.MetadataValue.int(result.rows.height),
        name.rpartition("/")[2]: dg.MetadataValue.md(frame_table(result.shown, result.shown.height)),
        UNCHANGED: dg.MetadataValue.bool(False),
    }


def _of_accuracy(lake: Lake, result: Measurement) -> Mapping[str, dg.MetadataValue]:
    left_out = {benchmark: dict(reasons) for benchmark, reasons in result.left_out.items()}
    percent = result.rows.with_columns(pl.col("accuracy", "low", "high") * 100)
    return {
        **numbers(percent.with_columns(pl.col("accuracy").round(1)), "accuracy", "benchmark", ", %"),
        "in_corpus": dg.MetadataValue.md(frame_table(overlap_counts(lake.table(OVERLAP).read(WHOLE)), 30)),
        **({"left_out": dg.MetadataValue.json(left_out)} if left_out else {}),
        "plot": dg.MetadataValue.md(bars(percent, ("benchmark", "condition"), "accuracy")),
    }


def _of_perplexity(context: dg.AssetExecutionContext, result: Measurement) -> Mapping[str, dg.MetadataValue]:
    texts = result.rows.filter(pl.col("source") == HELDOUT_C)["texts"].to_list()
    warning = too_few(max(texts), "measure perplexity")
    if warning:
        context.log.warning(warning)
    few = {"warning": dg.MetadataValue.text(warning)} if warning else {}
    return {**numbers(result.rows, "perplexity", "source"), **few}
