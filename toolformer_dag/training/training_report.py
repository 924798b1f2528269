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
    FILES,
    UserError,
    hash_files_beside,
    list_damaged_beside,
    replace_folder,
    seal_record,
    unseal_record,
    write_whole,
)
from toolformer_dag.identity import content_hash, fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.requests import WINDOW_WEIGHTS
from toolformer_dag.model.weights import (
    CHECKPOINT,
    DamagedCheckpoint,
    checkpoint_folder,
    model_name,
    read_model_identity,
)
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.texts.input_ends import NAMED_IN_TEXT


class TrainingError(UserError):
    """A finetuning run that cannot start or continue. The message names the problem and the remedy."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The rows that a run trains on, and those held out, on which its best checkpoint is chosen.

    A row is plain JSON data, in a form that the objective reads: for language modelling it is a text.
    """

    train: Sequence[Any]
    heldout: Sequence[Any]


PAPER_WINDOW = 5
"""Tokens of the paper's loss window; a checkpoint that was trained with it has no window in its identity."""


def build_run_identity(base: ModelSettings, data: TrainingData, settings: TrainingSettings) -> Mapping[str, object]:
    """Collect what determines the weights of a checkpoint: the base model, the settings and the hashes of the rows.

    A run is not repeated if a finished checkpoint has the same identity.

    Raises:
        ModelError: The base model cannot be found.
    """
    identity: dict[str, object] = {
        # The markers of calls, and whether texts begin with BOS. Both are written into the checkpoint's tokenizer.
        **determining(base, "markers", "bos"),
        "base": dict(read_model_identity(model_name(base), base.revision)),
        "settings": settings.determining(),
        "texts": fingerprint(list(data.train)),
        "heldout": fingerprint(list(data.heldout)),
    }
    if settings.keep_base:  # text outside calls is learned from the base model, so it matters where calls end
        identity |= _build_kept_base_identity(data)
    return identity


def _build_kept_base_identity(data: TrainingData) -> dict[str, object]:
    """Return what determines the weights with `keep_base` besides; empty where earlier releases trained the same."""
    identity: dict[str, object] = {}
    if _has_named_arguments(data.train):
        identity["calls_end"] = "by quotes"  # in earlier releases, such calls ended at the first bracket
    if len(WINDOW_WEIGHTS) != PAPER_WINDOW:
        identity["learned_after"] = len(WINDOW_WEIGHTS)  # so many tokens after a call are learned
    return identity


def _has_named_arguments(rows: Sequence[Any]) -> bool:
    """Return whether some training texts hold calls with named arguments, in which a bracket in quotes ends no call."""
    texts = [row for row in rows if isinstance(row, str)]
    return any(NAMED_IN_TEXT.search(text) for text in texts)


SHARES = "shares"
"""Folder of a checkpoint with moments and random states, each process's share, where weights are divided."""
NOT_WEIGHTS = (
    SHARES,
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
)
"""Patterns of the files of a Trainer's checkpoint that only a resumed run needs."""


def find_last_complete_checkpoint(folder: Path, sharded: bool = False) -> Path | None:
    """Find the newest checkpoint in a folder from which a run can resume.

    Incomplete checkpoints are skipped. A checkpoint with the other kind of optimizer state is skipped with a warning.

    Args:
        folder: The folder of the checkpoints.
        sharded: Whether the run divides its weights among processes.

    Returns:
        The folder of the checkpoint, or None if there is none.
    """
    optimizer_state = Path(SHARES, ".metadata") if sharded else Path("optimizer.pt")
    for checkpoint in _list_newest_first(folder):
        if not _is_complete(checkpoint):
            continue

        if (checkpoint / optimizer_state).is_file():
            return checkpoint
        logging.getLogger(__name__).warning(
            "%s was written by one process or by several, the other way round: not gone on from", checkpoint
        )
    return None


def _list_newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, such as `checkpoint-200`, by descending step."""
    step_of: dict[Path, int] = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.rpartition("-")[2]
        if step.isdecimal():
            step_of[path] = int(step)
    return sorted(step_of, key=step_of.__getitem__, reverse=True)


def _is_complete(checkpoint: Path) -> bool:
    """Return whether the Trainer's state, the file that it writes last, is there and whole."""
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return False


RECORD = CHECKPOINT
"""File of a published checkpoint: the record of its run, training.json."""
CARD = "README.md"
"""File of a published checkpoint: its model card."""
CARD_TAGS = b"\n- toolformer\n- tool-use\n"
"""Stands in every card that is written here, and so tells a damaged card from a README that somebody wrote."""
CARD_SEAL = re.compile(rb"\n<!-- [0-9a-f]{32} -->\n\Z")
"""The last line of every card that is written here: the hash of the other lines. It tells the same."""


@dataclass(frozen=True, slots=True)
class Point:
    """The value of `measure` after `step` optimizer steps; step 0 is the base model.

    `measure` is `loss`, the mean over the training steps since the point before, or the objective's metric on the
    held-out rows.
    """

    step: int
    measure: str
    value: float


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The result of a finetuning run.

    - `fingerprint`: the hash of the run's identity.
    - `steps`: optimizer steps. `best_step`: the step of the published checkpoint.
    - `texts`: all training texts, or other rows. `split_texts`: texts longer than a sequence. `empty_texts`: texts
      with at most one token, which are left out.
    - `examples`: the number of sequences. `tokens`: their total tokens.
    - `seconds`: the duration since the last start. `device`: such as `cpu` or `cuda:0`.
    - `processes`: how many trained together. `divided`: whether each held only a share of the weights.
    - `losses`, `heldout`: the curves of the training loss and of the held-out metric, by ascending step.
    - `reused`: whether the run was finished before, so that nothing was trained.
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
    def best(self) -> Point:
        """Return the held-out metric of the published checkpoint."""
        return next(point for point in self.heldout if point.step == self.best_step)


def curve(log: Sequence[Mapping[str, Any]], measure: str, prefix: str = "") -> tuple[Point, ...]:
    """Extract the curve of a measure from the Trainer's log, by ascending step.

    If a step was repeated because the run was killed, only its last entry counts.

    Args:
        log: The log history of the Trainer.
        measure: The name of the measure, such as "loss".
        prefix: What the log writes before this name, such as "eval_".
    """
    key = prefix + measure
    values: dict[int, float] = {}  # by step
    for entry in log:
        if key in entry:
            values[entry["step"]] = entry[key]  # replaces an earlier entry of the step

    return tuple(Point(step, measure, value) for step, value in sorted(values.items()))


CURVES = ("losses", "heldout")
"""Fields of the report that are curves. In the record a point is written as {"step": 4, "perplexity": 2.5}."""


def write_record(folder: Path, report: TrainingReport, identity: Mapping[str, object]) -> None:
    """Write training.json: the report, the run's identity (settings, base, texts, versions), and hashes of files.

    The files of `folder` that are hashed have to be there already.
    """
    record = {"report": _to_written_report(report), **identity, FILES: hash_files_beside(folder / RECORD)}
    (folder / RECORD).write_bytes(seal_record(str(folder), record))


def _to_written_report(report: TrainingReport) -> dict[str, Any]:
    """Return a report as the record holds it, with points such as {"step": 4, "perplexity": 2.5}."""
    written = asdict(report)
    for name in CURVES:
        points: tuple[Point, ...] = getattr(report, name)
        written[name] = [{"step": point.step, point.measure: point.value} for point in points]
    return written


def read_report(folder: Path) -> TrainingReport | None:
    """Read the report of a finished run in a folder.

    Returns:
        The report. None if there is no report, if a file is missing or damaged, or if another release wrote the report
        with other fields.
    """
    record = _read_undamaged_record(folder)
    if record is None:
        return None
    try:
        report = dict(record["report"])
        for name in CURVES:
            report[name] = tuple(_parse_point(written) for written in report[name])
        return TrainingReport(**report)
    except (TypeError, KeyError, ValueError):
        return None


def _parse_point(written: Mapping[str, Any]) -> Point:
    """Read a point of a curve from its form in the record."""
    [measure] = [key for key in written if key != "step"]
    return Point(written["step"], measure, written[measure])


def _read_undamaged_record(folder: Path) -> dict[str, Any] | None:
    """Read the record of a finished run; None where it or a file beside it is missing or damaged."""
    try:
        record = unseal_record((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    if "report" not in record or list_damaged_beside(folder / RECORD):
        return None
    return record


def write_card(folder: Path, text: str) -> None:
    """Write or replace the card beside a checkpoint, with a last line that holds the hash of `text`. Raises WriteError.

    training.json does not name the card, so that figures which are measured later can be added.
    """
    write_whole(folder / CARD, _seal_card(text))


def read_card(folder: Path) -> str | None:
    """Return the card without its last line; None where it is missing, or is not as it was written."""
    try:
        content = (folder / CARD).read_bytes()
        text = content.decode().rstrip("\n").rpartition("\n")[0] + "\n"
    except (OSError, UnicodeDecodeError):
        return None
    return text if _seal_card(text) == content else None


def is_card_lost(folder: Path) -> bool:
    """Return whether the card is missing, or was written here and changed since.

    A README that somebody put in its place does not count as lost. A card that was written here is recognized by our
    tags, or by a seal (a hash of its content).
    """
    try:
        content = (folder / CARD).read_bytes()
    except OSError:
        return True

    written_here = CARD_TAGS in content or CARD_SEAL.search(content) is not None
    was_changed = read_card(folder) is None  # the seal does not match the content
    return written_here and was_changed


def _seal_card(text: str) -> bytes:
    """Return the content of a card's file: the text, and its hash as a comment in the last line."""
    return f"{text}<!-- {content_hash(text.encode())} -->\n".encode()


def publish(folder: Path, out: Path) -> None:
    """Replace the folder `out` by another folder, and remove all unfinished runs beside it.

    Every file gets the permissions of the record, because safetensors makes files that only their owner may read.
    """
    mode = (folder / RECORD).stat().st_mode & 0o777
    for file in folder.iterdir():
        file.chmod(mode)

    replace_folder(out, folder)
    for unfinished in out.parent.glob(f"{out.name}.partial-*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def build_checkpoint_output(settings: Settings, name: str = "finetuned_checkpoint") -> LocalOutput:
    """Return the files of a published checkpoint as an output of the lake, through which machines share it."""
    owner = f"training{settings.rounds.suffix}/{name}"
    return LocalOutput(Lake.of(settings.paths).storage, owner, checkpoint_folder(settings, name))


def find_finetuned_or_base(settings: Settings) -> str:
    """Choose the finetuned checkpoint, or the base model if there is no checkpoint, or if it comes from another model.

    A checkpoint that another machine has sent to the object store is first downloaded.

    Returns:
        The folder of the checkpoint, or the name of the base model.

    Raises:
        ModelError: The model of the settings is a path without a model.
        DamagedCheckpoint: A file of the checkpoint is damaged.
    """
    build_checkpoint_output(settings).receive()
    base = model_name(settings.model)
    finetuned = checkpoint_folder(settings)
    _check_undamaged(finetuned)

    record = _read_undamaged_record(finetuned) or {}  # the record of its training, or {} without a checkpoint
    is_of_this_base = record.get("base") == read_model_identity(base, settings.model.revision)
    return str(finetuned) if is_of_this_base else base


def _check_undamaged(folder: Path) -> None:
    """Raise DamagedCheckpoint where a file of a checkpoint is damaged; a missing folder is accepted."""
    if folder.is_dir():
        damaged = list_damaged_beside(folder / RECORD)
        if damaged:
            raise DamagedCheckpoint(damaged[0])
