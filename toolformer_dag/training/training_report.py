"""A finetuning run on disk: its identity, its checkpoints, and the record and card beside the weights.

Imports no torch. The record is training.json: the report of the run, its identity, and hashes of the other files.
"""

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolformer_dag.files import (
    FILES_FIELD,
    UserError,
    hash_sibling_files,
    list_damaged_files,
    replace_folder,
    seal_record,
    unseal_record,
    write_file_atomically,
)
from toolformer_dag.identity import compute_content_hash, fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.requests import WINDOW_WEIGHTS
from toolformer_dag.model.weights import (
    CHECKPOINT_FILE_NAME,
    DamagedCheckpoint,
    get_checkpoint_folder,
    read_model_identity,
    resolve_model_name,
)
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.texts.input_ends import NAMED_CALL_IN_TEXT_PATTERN


class TrainingError(UserError):
    """A finetuning run that cannot start or continue. The message names the problem and the remedy."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The rows that a run trains on, and those held out, on which its best checkpoint is chosen.

    A row is plain JSON data, in a form that the objective reads. For language modeling it is a text.
    """

    train: Sequence[Any]
    heldout: Sequence[Any]


PAPER_WINDOW_TOKENS = 5
"""Tokens of the paper's loss window; a checkpoint that was trained with it has no window in its identity."""


def build_run_identity(
    base_model: ModelSettings, data: TrainingData, settings: TrainingSettings
) -> Mapping[str, object]:
    """Return what determines the weights of a checkpoint: the base model, the settings and the hashes of the rows.

    A run is not repeated if a finished checkpoint has the same identity.

    Raises:
        ModelError: The base model cannot be found.
    """
    identity: dict[str, object] = {
        # The markers of calls, and whether texts begin with BOS. Both are written into the checkpoint's tokenizer.
        **select_determining_settings(base_model, "markers", "bos"),
        "base": dict(read_model_identity(resolve_model_name(base_model), base_model.revision)),
        "settings": settings.select_weight_settings(),
        "texts": fingerprint(list(data.train)),
        "heldout": fingerprint(list(data.heldout)),
    }
    if settings.keep_base:  # text outside calls is learned from the base model, so it matters where calls end
        identity |= _build_kept_base_model_identity(data)
    return identity


def _build_kept_base_model_identity(data: TrainingData) -> dict[str, object]:
    """Return what else determines the weights if `training.keep_base` is set.

    With this setting, the model learns calls and the tokens just after them as usual, and elsewhere also the base
    model's predictions. So it matters where calls end, and how many tokens after them are learned.

    Returns:
        An entry for what differs from earlier releases. {} if they would train the same weights, so that their
        checkpoints stay up to date.
    """
    identity: dict[str, object] = {}
    if _has_named_arguments(data.train):
        identity["calls_end"] = "by quotes"  # in earlier releases, such calls ended at the first bracket
    if len(WINDOW_WEIGHTS) != PAPER_WINDOW_TOKENS:
        identity["learned_after"] = len(WINDOW_WEIGHTS)  # so many tokens after a call are learned
    return identity


def _has_named_arguments(rows: Sequence[Any]) -> bool:
    """Return whether a training text has a call with named arguments, in which a bracket in quotes ends no call."""
    texts = [row for row in rows if isinstance(row, str)]  # rows of other objectives need not be texts
    return any(NAMED_CALL_IN_TEXT_PATTERN.search(text) for text in texts)


SHARES_FOLDER_NAME = "shares"
"""Folder of a checkpoint with moments and random states, each process's share, where weights are divided."""
RESUME_FILE_PATTERNS = (
    SHARES_FOLDER_NAME,
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
)
"""Patterns of the files of a Trainer's checkpoint that only a resumed run needs."""


def find_last_complete_checkpoint(checkpoints_folder: Path, divides_weights: bool = False) -> Path | None:
    """Find the newest checkpoint in a folder from which a run can resume.

    Incomplete checkpoints are skipped. A checkpoint with the other kind of optimizer state is skipped with a warning.

    Args:
        checkpoints_folder: The folder of the checkpoints.
        divides_weights: Whether the run divides its weights among processes.

    Returns:
        The folder of the checkpoint, or None if there is none.
    """
    optimizer_state_file = Path(SHARES_FOLDER_NAME, ".metadata") if divides_weights else Path("optimizer.pt")
    for checkpoint in _list_checkpoints_newest_first(checkpoints_folder):
        if not _is_complete_checkpoint(checkpoint):
            continue
        if (checkpoint / optimizer_state_file).is_file():
            return checkpoint

        # Processes that divide the weights wrote it, but this run does not divide them, or the reverse.
        logging.getLogger(__name__).warning(
            "%s was written by one process or by several, the other way round: not gone on from", checkpoint
        )
    return None


def _list_checkpoints_newest_first(checkpoints_folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, such as `checkpoint-200`, by descending step."""
    step_by_checkpoint: dict[Path, int] = {}
    for path in checkpoints_folder.glob("checkpoint-*"):
        _, _, step_text = path.name.rpartition("-")
        if step_text.isdecimal():
            step_by_checkpoint[path] = int(step_text)
    return sorted(step_by_checkpoint, key=step_by_checkpoint.__getitem__, reverse=True)


def _is_complete_checkpoint(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the Trainer's state, which is written last, and whether it can be read."""
    state_file = checkpoint / "trainer_state.json"
    try:
        trainer_state = json.loads(state_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return bool(trainer_state)


RECORD_FILE_NAME = CHECKPOINT_FILE_NAME
"""File of a published checkpoint: the record of its run, training.json."""
CARD_FILE_NAME = "README.md"
"""File of a published checkpoint: its model card."""
CARD_TAGS = b"\n- toolformer\n- tool-use\n"
"""Stands in every card that is written here, and so tells a damaged card from a README that somebody wrote."""
CARD_SEAL_PATTERN = re.compile(rb"\n<!-- [0-9a-f]{32} -->\n\Z")
"""The last line of every card that is written here: the hash of the other lines. It tells the same."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve.

    Attributes:
        step: The number of optimizer steps. 0 is the base model.
        measure: "loss", which is the mean over the training steps since the point before, or the name of the
            objective's metric on the held-out rows.
        value: The value of the measure after these steps.
    """

    step: int
    measure: str
    value: float


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The result of a finetuning run.

    Attributes:
        fingerprint: The hash of the run's identity.
        steps: The number of optimizer steps.
        best_step: The step of the published checkpoint.
        texts: The number of all training texts, or of other rows.
        examples: The number of training sequences.
        split_texts: The number of texts longer than a sequence.
        empty_texts: The number of texts with at most one token, which are left out.
        tokens: The number of tokens of all sequences.
        seconds: The duration since the last start.
        device: The device, such as "cpu" or "cuda:0".
        processes: The number of processes that trained together.
        divided: Whether each process held only a share of the weights.
        losses: The curve of the training loss, by ascending step.
        heldout: The curve of the held-out metric, by ascending step.
        reused: Whether the run was finished before, so that nothing was trained.
    """

    fingerprint: str
    steps: int
    best_step: int
    texts: int
    examples: int
    split_texts: int
    empty_texts: int
    tokens: int
    seconds: float
    device: str
    processes: int
    divided: bool
    losses: tuple[Point, ...]
    heldout: tuple[Point, ...]
    reused: bool = False

    @property
    def best_point(self) -> Point:
        """The held-out metric of the published checkpoint."""
        return next(point for point in self.heldout if point.step == self.best_step)


def extract_curve(log_history: Sequence[Mapping[str, Any]], measure: str, key_prefix: str = "") -> tuple[Point, ...]:
    """Return the curve of a measure from the Trainer's log, by ascending step.

    If a step was repeated because the run was killed, only its last entry counts.

    Args:
        log_history: The log history of the Trainer.
        measure: The name of the measure, such as "loss".
        key_prefix: What the log writes before this name, such as "eval_".
    """
    log_key = key_prefix + measure
    value_by_step: dict[int, float] = {}
    for log_entry in log_history:
        if log_key in log_entry:
            value_by_step[log_entry["step"]] = log_entry[log_key]  # replaces an earlier entry of the step

    return tuple(Point(step, measure, value) for step, value in sorted(value_by_step.items()))


CURVE_FIELDS = ("losses", "heldout")
"""Fields of the report that are curves. In the record a point is written as {"step": 4, "perplexity": 2.5}."""


def write_training_record(folder: Path, report: TrainingReport, run_identity: Mapping[str, object]) -> None:
    """Write the record of a run, training.json: the report, the run's identity, and hashes of the files beside it.

    The files that are hashed have to be in `folder` already.

    Args:
        folder: The folder of the checkpoint.
        report: The report of the run.
        run_identity: What determines the weights, and the versions of the libraries.
    """
    record_path = folder / RECORD_FILE_NAME
    record = {
        "report": _build_report_record(report),
        **run_identity,
        FILES_FIELD: hash_sibling_files(record_path),
    }
    record_path.write_bytes(seal_record(str(folder), record))


def _build_report_record(report: TrainingReport) -> dict[str, Any]:
    """Return a report as the record holds it, with points such as {"step": 4, "perplexity": 2.5}."""
    report_record = asdict(report)
    for curve_field in CURVE_FIELDS:
        points: tuple[Point, ...] = getattr(report, curve_field)
        report_record[curve_field] = [{"step": point.step, point.measure: point.value} for point in points]
    return report_record


def read_training_report(folder: Path) -> TrainingReport | None:
    """Read the report of a finished run in a folder.

    Returns:
        The report. None if there is no report, if a file is missing or damaged, or if another release wrote the report
        with other fields.
    """
    record = _read_undamaged_record(folder)
    if record is None:
        return None

    try:
        report_fields = dict(record["report"])
        for curve_field in CURVE_FIELDS:
            point_records = report_fields[curve_field]
            report_fields[curve_field] = tuple(_parse_curve_point(point_record) for point_record in point_records)
        return TrainingReport(**report_fields)
    except (TypeError, KeyError, ValueError):  # another release wrote other fields
        return None


def _parse_curve_point(point_record: Mapping[str, Any]) -> Point:
    """Return the point of a curve that the record holds as {"step": 4, "perplexity": 2.5}.

    Raises:
        ValueError: There is not exactly one key but "step".
        KeyError: There is no "step".
    """
    [measure] = [key for key in point_record if key != "step"]
    return Point(point_record["step"], measure, point_record[measure])


def _read_undamaged_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a finished run, or None if it or a file beside it is missing or damaged."""
    record_path = folder / RECORD_FILE_NAME
    try:
        record = unseal_record(record_path.read_bytes())
    except (OSError, ValueError):
        return None

    if "report" not in record:
        return None
    if list_damaged_files(record_path):
        return None
    return record


def write_card(folder: Path, text: str) -> None:
    """Write or replace the model card beside a checkpoint, with a last line that holds the hash of `text`.

    training.json does not name the card, so that figures which are measured later can be added.

    Raises:
        WriteError: The card cannot be written.
    """
    write_file_atomically(folder / CARD_FILE_NAME, _seal_card(text))


def read_card(folder: Path) -> str | None:
    """Return the text of a checkpoint's model card, or None if the card is missing or was changed by somebody.

    The last line of the file is no part of the text. It holds the hash of the text, which shows a change.
    """
    try:
        content = (folder / CARD_FILE_NAME).read_bytes()
        content_text = content.decode()
    except (OSError, UnicodeDecodeError):
        return None

    text_before_last_line, _, _ = content_text.rstrip("\n").rpartition("\n")
    card_text = text_before_last_line + "\n"
    is_unchanged = _seal_card(card_text) == content
    return card_text if is_unchanged else None


def is_card_missing_or_changed(folder: Path) -> bool:
    """Return whether the model card is missing, or was written here and changed since.

    A README that somebody put in its place does not count. A card that was written here is recognized by our tags, or
    by its seal, the hash of its content in the last line.
    """
    try:
        content = (folder / CARD_FILE_NAME).read_bytes()
    except OSError:
        return True

    has_seal = CARD_SEAL_PATTERN.search(content) is not None
    was_written_here = CARD_TAGS in content or has_seal
    was_changed = read_card(folder) is None  # the seal does not match the content
    return was_written_here and was_changed


def _seal_card(text: str) -> bytes:
    """Return the content of a card's file, which is the text with its hash as a comment in the last line."""
    text_hash = compute_content_hash(text.encode())
    return f"{text}<!-- {text_hash} -->\n".encode()


def publish_checkpoint(finished_folder: Path, output_folder: Path) -> None:
    """Put a finished checkpoint in place of `output_folder`, and remove all unfinished runs beside it.

    Every file gets the permissions of the record, because safetensors makes files that only their owner may read.
    """
    permissions = (finished_folder / RECORD_FILE_NAME).stat().st_mode & 0o777
    for file in finished_folder.iterdir():
        file.chmod(permissions)

    replace_folder(output_folder, finished_folder)
    for unfinished_folder in output_folder.parent.glob(f"{output_folder.name}.partial-*"):
        shutil.rmtree(unfinished_folder, ignore_errors=True)


def build_checkpoint_output(settings: Settings, checkpoint_name: str = "finetuned_checkpoint") -> LocalOutput:
    """Return the files of a published checkpoint as an output of the lake, through which machines share it."""
    storage = Lake.from_settings(settings.paths).storage
    owner = f"training{settings.rounds.name_suffix}/{checkpoint_name}"
    return LocalOutput(storage, owner, get_checkpoint_folder(settings, checkpoint_name))


def find_finetuned_or_base_model(settings: Settings) -> str:
    """Choose the finetuned checkpoint, or the base model if there is no checkpoint, or if it comes from another model.

    A checkpoint that another machine has sent to the object store is first downloaded.

    Returns:
        The folder of the checkpoint, or the name of the base model.

    Raises:
        ModelError: The model of the settings is a path without a model.
        DamagedCheckpoint: A file of the checkpoint is damaged.
    """
    build_checkpoint_output(settings).receive_files()  # downloads them if need be
    base_model_name = resolve_model_name(settings.model)
    checkpoint_folder = get_checkpoint_folder(settings)
    _require_undamaged(checkpoint_folder)

    record = _read_undamaged_record(checkpoint_folder) or {}  # the record of its training, or {} without a checkpoint
    is_of_this_base = record.get("base") == read_model_identity(base_model_name, settings.model.revision)
    return str(checkpoint_folder) if is_of_this_base else base_model_name


def _require_undamaged(folder: Path) -> None:
    """Check that no file of a checkpoint is damaged. A missing folder is accepted.

    Raises:
        DamagedCheckpoint: A file is damaged.
    """
    if not folder.is_dir():
        return

    damaged_files = list_damaged_files(folder / RECORD_FILE_NAME)
    if damaged_files:
        raise DamagedCheckpoint(damaged_files[0])
