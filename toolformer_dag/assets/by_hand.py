"""The assets of the second job, a person's decision: M finetuned on C* and on C, and what that gains and costs.

C* are the texts with their calls in them, C the same texts without calls.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
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
"""The assets of the checkpoints."""
BY_HAND = (*TRAINED, *TABLES)
"""The assets that the first job does not make."""
DESCRIPTIONS = {
    ACCURACY: "Questions answered right: base, base + C, Toolformer disabled and with tools, further models.",
    PERPLEXITY: "Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled.",
}
"""What the measurements measure."""


def checkpoint(plan: Plan, name: str) -> AssetDeclaration:
    """Return the asset of a finetuned checkpoint, `name` being one of CHECKPOINTS.

    Dagster calls its functions: `reasons` says why it is missing or out of date, `version` which one is stored, `make`
    trains it.
    """
    return AssetDeclaration(
        name=plan.named(f"training/{name}"),
        settings=CHECKPOINTS[name].settings(plan),
        depends_on=CHECKPOINTS[name].reads(plan),
        description=CHECKPOINTS[name].description,
        kinds={"pytorch", "huggingface"},
        pool="gpu",
        reasons=partial(_untrained_reasons, plan, name),
        version=partial(_trained_version, plan, name),
        make=partial(_trained, plan, name),
    )


def _untrained_reasons(plan: Plan, name: str) -> Reasons:
    """Return why a checkpoint is missing or out of date. Another machine may have trained it."""
    return shared_reasons(checkpoint_files(plan.settings, name), partial(checkpoint_reasons, plan, name))


def _trained_version(plan: Plan, name: str) -> str | None:
    """Return the version of a finished checkpoint; None where there is none."""
    report = read_report(checkpoint_folder(plan.settings, name))
    return report.fingerprint if report else None


def _trained(
    plan: Plan, name: str, context: dg.AssetExecutionContext, lake: Lake, compute: Compute
) -> dg.MaterializeResult:
    """Finetune a checkpoint where it is missing or out of date, and return what its page shows.

    A checkpoint that is there and up to date is reused (`report.reused`), also one that another machine has trained.
    Raises TrainingError where there are too few texts, and what training raises.
    """
    compute.workers.close()  # finetuning and evaluation load models of their own
    folder = checkpoint_folder(plan.settings, name)
    data, _ = CHECKPOINTS[name].trained_on(plan)
    warning = too_few(len(data.heldout), "choose the checkpoint")
    if warning:
        context.log.warning(warning)
    with locked(folder.with_name("model.lock")):  # another run that trains the same waits, and finds the work done
        report, curve = _train_and_publish(plan, name, context)
    if not report.reused:
        epochs = report.steps * plan.settings.training.batch_size / max(1, report.examples)
        note_cost(context, lake, StepCost(report.seconds, round(report.tokens * epochs)))
    return _checkpoint_result(str(folder), report, curve, heldout_texts=len(data.heldout))


def _train_and_publish(plan: Plan, name: str, context: dg.AssetExecutionContext) -> tuple[TrainingReport, pl.DataFrame]:
    """Train a checkpoint unless it is up to date; write its card, and send both to where the lake is.

    Returns the report of the training, of this one or an earlier one, and its curve of losses.
    """
    from toolformer_dag.training.launch import train

    folder = checkpoint_folder(plan.settings, name)
    files = checkpoint_files(plan.settings, name)
    data, recipe = CHECKPOINTS[name].trained_on(plan)
    files.receive()  # what another machine has trained
    _refuse_too_few_texts(plan, name)
    report = train(plan.settings.model, data, recipe, folder, progress(context, "steps"), _observing(context))
    if not report.reused or card_is_lost(folder):
        write_model_card(plan, name, report, len(data.heldout))
        add_evaluation(folder, *measured_on(plan, name))
    curve = publish_curve(plan, name, report)
    files.send()
    return report, curve


def _refuse_too_few_texts(plan: Plan, name: str) -> None:
    """Raise TrainingError where a checkpoint has to be trained and there are too few texts."""
    if not checkpoint_reasons(plan, name):
        return
    refusal = too_few_to_train(plan)
    if refusal:
        raise TrainingError(refusal)


def _observing(context: dg.AssetExecutionContext) -> Callable[[int, Mapping[str, float]], None]:
    """Return what training calls with what it measured at a step: the page draws it while training goes on."""

    def observe(step: int, values: Mapping[str, float]) -> None:
        context.log_event(dg.AssetObservation(context.asset_key, metadata={"step": step, **values}))

    return observe


def _checkpoint_result(
    folder: str, report: TrainingReport, curve: pl.DataFrame, heldout_texts: int
) -> dg.MaterializeResult:
    """Return what the page of a checkpoint shows.

    heldout_texts: how many texts chose it, by their loss, among the checkpoints along the way.
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
    shown |= {
        "texts longer than a sequence": report.split_texts,
        "already finished before": report.reused,
        UNCHANGED: report.reused,
        "curves": dg.MetadataValue.md(loss_curve(curve)),
    }
    return dg.MaterializeResult(data_version=dg.DataVersion(report.fingerprint), metadata=shown)


def measurement(plan: Plan, name: str) -> AssetDeclaration:
    """Return the asset of one of MEASURES."""
    reads = (*TRAINED, CORPUS, HELDOUT_TEXTS) if name == PERPLEXITY else TRAINED
    return AssetDeclaration(
        name=plan.named(name),
        settings=SETTINGS[name](plan),
        depends_on=tuple(map(plan.named, reads)),
        description=DESCRIPTIONS[name],
        kinds={"pytorch"},
        pool="gpu",
        reasons=partial(_unmeasured_reasons, plan, name),
        version=partial(_measured_version, plan, name),
        make=partial(_measured, plan, name),
    )


def _unmeasured_reasons(plan: Plan, name: str) -> Reasons:
    """Return why a measurement is missing or out of date."""
    return Reasons({WHOLE: measurement_reasons(plan, name)})


def _measured_version(plan: Plan, name: str) -> str | None:
    """Return the version of a stored measurement; None where there is none."""
    return plan.lake.table(name).part_version(WHOLE)


def _measured(
    plan: Plan, name: str, context: dg.AssetExecutionContext, lake: Lake, compute: Compute
) -> dg.MaterializeResult:
    """Return what the page of a measurement shows; measure where the stored one is missing or out of date."""
    compute.workers.close()  # finetuning and evaluation load models of their own
    stored_version = _measured_version(plan, name)
    if stored_version is not None and not measurement_reasons(plan, name):
        # Where another home has measured it, this one has not shown it yet.
        shown = last_metadata(context) or _shown(context, lake, name, stored_measurement(lake, name))
        return dg.MaterializeResult(data_version=dg.DataVersion(stored_version), metadata={**shown, UNCHANGED: True})
    for checkpoint_name in CHECKPOINTS:  # those that another machine has trained
        checkpoint_files(plan.settings, checkpoint_name).receive()
    began = time.monotonic()
    result = MEASURES[name](plan, progress(context, "questions" if name == ACCURACY else "models"))
    note_cost(context, lake, StepCost(time.monotonic() - began, result.tokens, result.calls))
    _add_to_model_cards(plan)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(result.version), metadata=_shown(context, lake, name, result)
    )


def _add_to_model_cards(plan: Plan) -> None:
    """Write what was measured of each checkpoint into its model card, here and in the object store."""
    for checkpoint_name in CHECKPOINTS:
        files = checkpoint_files(plan.settings, checkpoint_name)
        files.receive()  # a checkpoint that another machine has trained meanwhile stays
        add_evaluation(checkpoint_folder(plan.settings, checkpoint_name), *measured_on(plan, checkpoint_name))
        files.send()


def _shown(
    context: dg.AssetExecutionContext, lake: Lake, name: str, result: Measurement
) -> Mapping[str, dg.MetadataValue]:
    """Return what the page of a measurement shows: its rows, and what is particular to accuracy or perplexity."""
    more = _of_accuracy(lake, result) if name == ACCURACY else _of_perplexity(context, result)
    return {
        ROWS: dg.MetadataValue.int(result.rows.height),
        name.rpartition("/")[2]: dg.MetadataValue.md(frame_table(result.shown, result.shown.height)),
        UNCHANGED: dg.MetadataValue.bool(False),
        **more,
    }


def _of_accuracy(lake: Lake, result: Measurement) -> Mapping[str, dg.MetadataValue]:
    """Return accuracies in per cent, questions that stand in the corpus, those left out by reason, and a plot."""
    percent = result.rows.with_columns(pl.col("accuracy", "low", "high") * 100)
    rounded = percent.with_columns(pl.col("accuracy").round(1))
    shown = numbers(rounded, "accuracy", "benchmark", ", %")  # an entry for each benchmark
    overlap = overlap_counts(lake.table(OVERLAP).read(WHOLE))
    shown["in_corpus"] = dg.MetadataValue.md(frame_table(overlap, 30))
    left_out = {benchmark: dict(reasons) for benchmark, reasons in result.left_out.items()}
    if left_out:
        shown["left_out"] = dg.MetadataValue.json(left_out)
    shown["plot"] = dg.MetadataValue.md(bars(percent, ("benchmark", "condition"), "accuracy"))
    return shown


def _of_perplexity(context: dg.AssetExecutionContext, result: Measurement) -> Mapping[str, dg.MetadataValue]:
    """Return perplexities, and a warning, which the log has too, where there are few held-out texts."""
    shown = numbers(result.rows, "perplexity", "source")
    texts = result.rows.filter(pl.col("source") == HELDOUT_C)["texts"].to_list()
    warning = too_few(max(texts), "measure perplexity")
    if warning:
        context.log.warning(warning)
        shown["warning"] = dg.MetadataValue.text(warning)
    return shown
