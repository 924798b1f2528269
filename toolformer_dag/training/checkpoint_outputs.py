"""Why a checkpoint is missing or out of date, whether C* has texts enough to train one, and its training curve."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import Column
from toolformer_dag.files import StorageError, unseal_record
from toolformer_dag.lake.record import changes, record
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.augmented_corpus import scan_corpus_rows
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.training.checkpoints import checkpoints
from toolformer_dag.training.training_report import (
    CARD,
    RECORD,
    Point,
    TrainingReport,
    build_run_identity,
    is_card_lost,
    read_report,
)


def explain_too_few_to_train(plan: Plan) -> str | None:
    """Check whether C* has enough texts to train on, which is `training.min_texts`.

    Returns:
        None if it has. Otherwise a message that says what to change.

    Raises:
        MissingPart: There is no C*.
        DamagedPart: C* is damaged.
    """
    counts = count_training_texts(plan)
    min_texts = plan.settings.training.min_texts
    if counts.texts >= min_texts:
        return None

    kept_per_thousand = 1000 * counts.texts / max(1, counts.documents)
    return (
        f"{counts.texts} texts in C*: too few to train on (minimum {min_texts}: training.min_texts); lower tau_f, "
        f"raise k, or add shards: these keep about {kept_per_thousand:,.0f} per 1,000 documents"
    )


class TextCounts(NamedTuple):
    """Texts of C* to train on, and the documents of all shards, of which they were made."""

    texts: int
    documents: int


def count_training_texts(plan: Plan) -> TextCounts:
    """Count the texts of C* to train on, and the documents. Raises MissingPart, DamagedPart."""
    train_rows = scan_corpus_rows(plan.lake, ["split"]).filter(pl.col("split") == TRAIN)
    shards = plan.lake.table(raw_shards.NAME).pointers().values()
    return TextCounts(
        texts=train_rows.select(pl.len()).collect().item(),
        documents=sum(shard.rows for shard in shards),
    )


def find_checkpoint_reasons(plan: Plan, name: str) -> list[str]:
    """Find the reasons why a checkpoint is missing or out of date.

    Returns:
        A sentence per reason. The list is empty if the checkpoint is up to date. It is also empty if a table or another
        checkpoint that it is trained from is missing: this one has its own reasons, which are reported, too.

    Raises:
        ModelError: The model of the settings cannot be found.
    """
    folder = checkpoint_folder(plan.settings, name)
    missing_or_damaged = _find_lost_files(folder)
    if missing_or_damaged is not None:
        return [missing_or_damaged]

    checkpoint = checkpoints(plan.settings)[name]
    try:
        data, recipe = checkpoint.read_data_and_recipe(plan)
    except StorageError:  # the table of its texts is missing or damaged
        return []

    if plan.lake.table(CURVE).find_whole_pointer(name) is None:
        return [f"{CURVE} lacks it"]

    base = checkpoint.base(plan)
    if _is_untrained_checkpoint(plan, base):  # the other checkpoint is missing
        return []
    return _list_changes_since(folder, build_run_identity(base, data, recipe))


def _is_untrained_checkpoint(plan: Plan, base: ModelSettings) -> bool:
    """Return whether a base model is another checkpoint of the plan that does not exist yet."""
    folders = [checkpoint_folder(plan.settings, name) for name in checkpoints(plan.settings)]
    return Path(base.name) in folders and not Path(base.name).exists()


def _list_changes_since(folder: Path, identity: Mapping[str, object]) -> list[str]:
    """Return what is different in the identity of a run now from the run of the checkpoint in `folder`."""
    run_now = json.loads(json.dumps(identity))  # as it is read from a file
    stored_run = unseal_record((folder / RECORD).read_bytes())
    return [str(change) for change in changes(_to_record(stored_run), _to_record(run_now))]


def _find_lost_files(folder: Path) -> str | None:
    """Return what is missing or damaged of a checkpoint in a folder; None where it is whole."""
    if not folder.exists():
        return "never made"
    if read_report(folder) is None:
        return f"{folder} is gone or not whole"
    if is_card_lost(folder):
        return f"{folder / CARD} is gone or not what was written; the weights are whole"
    return None


CURVE = "training/training_curve"
"""The lake's table of the curves; a part per checkpoint."""
CURVE_COLUMNS = {
    "checkpoint": Column(pl.String(), "finetuned_checkpoint (on C*) or baseline_checkpoint (on C)"),
    "step": Column(pl.Int64(), "optimizer steps so far; 0 is the base model"),
    "measure": Column(
        pl.String(), "training loss (mean of the steps since the row before, nats per token), or held-out perplexity"
    ),
    "value": Column(pl.Float64(), "the figure; of the held-out perplexity, the lowest chooses the checkpoint"),
    "published": Column(pl.Boolean(), "whether the published checkpoint is of this step"),
}


def publish_curve(plan: Plan, name: str, report: TrainingReport) -> pl.DataFrame:
    """Publish the training curve of a checkpoint in the table CURVE; return its rows, with CURVE_COLUMNS.

    Raises WriteError.
    """
    rows = _build_curve_table(name, report)
    inputs = {name: report.fingerprint}
    plan.lake.table(CURVE).publish(name, [rows], lambda: record({}, inputs, stage="training_curve", tool=None))
    return rows


def _build_curve_table(name: str, report: TrainingReport) -> pl.DataFrame:
    """Return the training losses of the checkpoint `name`, then its held-out metric, with CURVE_COLUMNS."""
    training_rows = _build_curve_rows(name, report, "training", report.losses)
    heldout_rows = _build_curve_rows(name, report, "held-out", report.heldout)
    schema = {column: declared.dtype for column, declared in CURVE_COLUMNS.items()}
    return pl.DataFrame([*training_rows, *heldout_rows], schema=schema)


def _build_curve_rows(name: str, report: TrainingReport, kind: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Build the rows of one curve of a checkpoint for the table CURVE.

    Args:
        name: The name of the checkpoint.
        report: The report of its training, which knows the published step.
        kind: "training" or "held-out".
        points: The points of the curve.
    """
    rows = []
    for point in points:
        rows.append(
            {
                "checkpoint": name,
                "step": point.step,
                "measure": f"{kind} {point.measure}",
                "value": point.value,
                "published": point.step == report.best_step,
            }
        )
    return rows


def _to_record(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the identity of a finetuning run to the form of the lake's records, so that `changes` can compare it.

    The texts become inputs, and everything else becomes settings.
    """
    settings = dict(run["settings"])
    for key in ("base", "markers", "bos", "calls_end", "learned_after"):
        if key in run:
            settings[key] = run[key]
    return {"settings": settings, "inputs": {"texts": run["texts"], "heldout": run["heldout"]}}
