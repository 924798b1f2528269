"""Why a checkpoint is missing or out of date, whether C* has texts enough to train one, and its training curve."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import Column
from toolformer_dag.files import StorageError, unseal_record
from toolformer_dag.lake.record import build_record, list_record_changes
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.augmented_corpus import scan_corpus_rows
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.training.checkpoints import build_checkpoints_by_name
from toolformer_dag.training.training_report import (
    CARD_FILE_NAME,
    RECORD_FILE_NAME,
    Point,
    TrainingReport,
    build_run_identity,
    is_card_missing_or_changed,
    read_training_report,
)


def explain_too_few_training_texts(plan: Plan) -> str | None:
    """Explain why C* (the corpus with kept calls) has fewer texts to train on than `training.min_texts`.

    Returns:
        A message that says what to change. None if there are enough texts.

    Raises:
        MissingPart: There is no C*.
        DamagedPart: C* is damaged.
    """
    counts = count_training_texts(plan)
    min_texts = plan.settings.training.min_texts
    if counts.text_count >= min_texts:
        return None

    kept_per_thousand = 1000 * counts.text_count / max(1, counts.document_count)
    return (
        f"{counts.text_count} texts in C*: too few to train on (minimum {min_texts}: training.min_texts); lower tau_f, "
        f"raise k, or add shards: these keep about {kept_per_thousand:,.0f} per 1,000 documents"
    )


class TextCounts(NamedTuple):
    """How many texts of C* there are to train on, and from how many documents of all shards they were made."""

    text_count: int
    document_count: int


def count_training_texts(plan: Plan) -> TextCounts:
    """Count the texts to train on in C* (the corpus with kept calls), and the documents of all shards (corpus files).

    Raises:
        MissingPart: There is no C*.
        DamagedPart: C* is damaged.
    """
    training_rows = scan_corpus_rows(plan.lake, ["split"]).filter(pl.col("split") == TRAIN)
    shard_pointers = plan.lake.get_table(raw_shards.TABLE_NAME).read_pointers_by_part().values()
    return TextCounts(
        text_count=training_rows.select(pl.len()).collect().item(),
        document_count=sum(pointer.row_count for pointer in shard_pointers),
    )


def find_checkpoint_stale_reasons(plan: Plan, checkpoint_name: str) -> list[str]:
    """Find the reasons why a checkpoint is missing or out of date.

    Returns:
        A sentence per reason. The list is empty if the checkpoint is up to date. It is also empty if a table or another
        checkpoint that it is trained from is missing, since the reasons for that are reported elsewhere.

    Raises:
        ModelError: The model of the settings cannot be found.
    """
    folder = get_checkpoint_folder(plan.settings, checkpoint_name)
    lost_files_reason = _explain_lost_files(folder)
    if lost_files_reason is not None:
        return [lost_files_reason]

    checkpoint = build_checkpoints_by_name(plan.settings)[checkpoint_name]
    try:
        data, training_settings = checkpoint.read_data_and_settings(plan)
    except StorageError:  # the table of its texts is missing or damaged
        return []

    curve_pointer = plan.lake.get_table(CURVE_TABLE_NAME).find_checked_pointer(checkpoint_name)
    if curve_pointer is None:
        return [f"{CURVE_TABLE_NAME} lacks it"]

    base_model = checkpoint.get_base_model(plan)
    if _is_untrained_checkpoint(plan, base_model):  # the other checkpoint is missing
        return []

    run_identity = build_run_identity(base_model, data, training_settings)
    return _list_run_changes(folder, run_identity)


def _is_untrained_checkpoint(plan: Plan, base_model: ModelSettings) -> bool:
    """Return whether a base model is another checkpoint of the plan that does not exist yet."""
    checkpoint_folders = [
        get_checkpoint_folder(plan.settings, checkpoint_name)
        for checkpoint_name in build_checkpoints_by_name(plan.settings)
    ]
    base_path = Path(base_model.name)
    return base_path in checkpoint_folders and not base_path.exists()


def _list_run_changes(folder: Path, run_identity: Mapping[str, object]) -> list[str]:
    """List the differences between the run of the checkpoint in `folder` and a run now, as sentences.

    Args:
        folder: The folder of the checkpoint.
        run_identity: What would determine the weights of a run now: the base model, the settings, and hashes of the
            texts.
    """
    current_run = json.loads(json.dumps(run_identity))  # in the form in which it would be read from a file
    current_record = _build_comparable_record(current_run)

    stored_run = unseal_record((folder / RECORD_FILE_NAME).read_bytes())
    stored_record = _build_comparable_record(stored_run)

    return [str(change) for change in list_record_changes(stored_record, current_record)]


def _explain_lost_files(folder: Path) -> str | None:
    """Explain which files of a checkpoint are missing or damaged. Return None if it is whole."""
    if not folder.exists():
        return "never made"
    if read_training_report(folder) is None:
        return f"{folder} is gone or not whole"
    if is_card_missing_or_changed(folder):
        return f"{folder / CARD_FILE_NAME} is gone or not what was written; the weights are whole"
    return None


CURVE_TABLE_NAME = "training/training_curve"
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


def publish_curve(plan: Plan, checkpoint_name: str, report: TrainingReport) -> pl.DataFrame:
    """Publish the training curve of a checkpoint in the table CURVE_TABLE_NAME.

    Returns:
        The published rows, with CURVE_COLUMNS.

    Raises:
        WriteError: The rows cannot be written.
    """
    curve_rows = _build_curve_table(checkpoint_name, report)
    inputs = {checkpoint_name: report.fingerprint}
    plan.lake.get_table(CURVE_TABLE_NAME).publish(
        checkpoint_name, [curve_rows], lambda: build_record({}, inputs, stage="training_curve", tool=None)
    )
    return curve_rows


def _build_curve_table(checkpoint_name: str, report: TrainingReport) -> pl.DataFrame:
    """Return the training losses of a checkpoint, then its held-out metric, as rows with CURVE_COLUMNS."""
    training_rows = _build_curve_rows(checkpoint_name, report, "training", report.losses)
    heldout_rows = _build_curve_rows(checkpoint_name, report, "held-out", report.heldout)

    schema = {name: column.dtype for name, column in CURVE_COLUMNS.items()}
    return pl.DataFrame([*training_rows, *heldout_rows], schema=schema)


def _build_curve_rows(
    checkpoint_name: str, report: TrainingReport, curve_kind: str, points: Sequence[Point]
) -> list[dict[str, Any]]:
    """Build the rows of one curve of a checkpoint for the table CURVE_TABLE_NAME.

    Args:
        checkpoint_name: The name of the checkpoint.
        report: The report of its training, which knows the published step.
        curve_kind: "training" or "held-out".
        points: The points of the curve.
    """
    curve_rows = []
    for point in points:
        curve_row = {
            "checkpoint": checkpoint_name,
            "step": point.step,
            "measure": f"{curve_kind} {point.measure}",
            "value": point.value,
            "published": point.step == report.best_step,
        }
        curve_rows.append(curve_row)
    return curve_rows


def _build_comparable_record(run_identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the identity of a finetuning run (what determines its weights) to a record that can be compared.

    In records of the lake, which `list_record_changes` compares, settings and inputs are apart. The hashes of the texts
    become inputs, and everything else becomes settings.
    """
    settings = dict(run_identity["settings"])
    for key in ("base", "markers", "bos", "calls_end", "learned_after"):
        if key in run_identity:
            settings[key] = run_identity[key]

    inputs = {"texts": run_identity["texts"], "heldout": run_identity["heldout"]}
    return {"settings": settings, "inputs": inputs}
