"""A finetuning run on disk: identity, unfinished runs, the report beside the weights. Imports no torch."""

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
    damaged_beside,
    hashes_beside,
    replace_folder,
    sealed,
    unsealed,
    write_whole,
)
from toolformer_dag.identity import content_hash, fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.weights import CHECKPOINT, DamagedCheckpoint, checkpoint_folder, model_identity, model_name
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.texts.calls import NAMED


class TrainingError(UserError):
    """A finetuning run that cannot start or continue. The message names the problem and the remedy."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The rows that a run trains on, and those held out, on which its best checkpoint is chosen.

    A row is plain JSON data, of which the objective alone knows the shape: for language modelling it is a text.
    """

    train: Sequence[Any]
    heldout: Sequence[Any]


def run_identity(base: ModelSettings, data: TrainingData, settings: TrainingSettings) -> Mapping[str, object]:
    """Return what determines the weights: base model, settings, fingerprints of the rows. Raises ModelError.

    The markers of calls and BOS are written into the checkpoint's tokenizer.
    """
    named = settings.keep_base and any(NAMED.search(row) for row in data.train if isinstance(row, str))
    return {
        **determining(base, "markers", "bos"),
        "base": dict(model_identity(model_name(base), base.revision)),
        "settings": settings.determining(),
        "texts": fingerprint(list(data.train)),
        "heldout": fingerprint(list(data.heldout)),
        **({"calls_end": "by quotes"} if named else {}),  # once they ended at the first bracket
    }


SHARES = "shares"
"""Folder within a checkpoint of what its processes hold shares of."""
NOT_WEIGHTS = (
    SHARES,
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
)
"""What a checkpoint of the Trainer holds for resuming alone."""


def last_complete_checkpoint(folder: Path, sharded: bool = False) -> Path | None:
    """Return the newest complete checkpoint of a run whose weights are divided, or are not; None without any.

    The Trainer writes its state last. A run killed while saving leaves a checkpoint that is not whole, which is
    skipped; so is one with the other kind of optimizer state, with a warning.
    """
    named = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    newest_first = sorted(named, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    kind = Path(SHARES, ".metadata") if sharded else Path("optimizer.pt")
    for checkpoint in filter(_complete, newest_first):
        if (checkpoint / kind).is_file():
            return checkpoint
        logging.getLogger(__name__).warning(
            "%s was written by one process or by several, the other way round: not gone on from", checkpoint
        )
    return None


def _complete(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return False


RECORD, CARD = CHECKPOINT, "README.md"
CARD_TAGS, CARD_SEAL = b"\n- toolformer\n- tool-use\n", re.compile(rb"\n<!-- [0-9a-f]{32} -->\n\Z")
"""What tells a card that was written here, even with a flipped bit, from a README of a person's own."""


@dataclass(frozen=True, slots=True)
class Point:
    """The value of `measure` after `step` steps; step 0 is the base model.

    `loss` is the mean of the training steps since the point before; the objective's metric is that of held-out rows.
    """

    step: int
    measure: str
    value: float


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The result of a finetuning run.

    - `best_step`: the step of the published checkpoint.
    - `texts`: all training texts, or other rows; `split_texts`: those longer than a sequence; `empty_texts`: those left
      out.
    - `examples`: the number of sequences; `tokens`: their total tokens.
    - `seconds`: the duration since the last start.
    - `processes`: how many trained together. `divided`: whether each held only a share of the weights.
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
    """Return the curve of a measure in the Trainer's log history; repeated steps count once."""
    values = {entry["step"]: entry[prefix + measure] for entry in log if prefix + measure in entry}
    return tuple(Point(step, measure, value) for step, value in sorted(values.items()))


CURVES = ("losses", "heldout")
"""Fields of the report whose points stand in its record as {"step": 4, "perplexity": 2.5}."""


def write_record(folder: Path, report: TrainingReport, identity: Mapping[str, object]) -> None:
    """Write training.json: the report and the identity of the run (settings, base, texts, versions)."""
    curves = {name: [{"step": one.step, one.measure: one.value} for one in getattr(report, name)] for name in CURVES}
    record = {"report": {**asdict(report), **curves}, **identity, FILES: hashes_beside(folder / RECORD)}
    (folder / RECORD).write_bytes(sealed(str(folder), record))


def read_report(folder: Path) -> TrainingReport | None:
    """Return the report of a finished run; None without a finished run."""
    record = _whole_record(folder)
    if record is None:
        return None
    try:
        report = record["report"]
        return TrainingReport(**{**report, **{name: tuple(map(_point, report[name])) for name in CURVES}})
    except (TypeError, KeyError, ValueError):  # the record of another release
        return None


def _point(written: Mapping[str, Any]) -> Point:
    [(measure, value)] = [(key, value) for key, value in written.items() if key != "step"]
    return Point(written["step"], measure, value)


def _whole_record(folder: Path) -> dict[str, Any] | None:
    """Read the record; None where the folder is incomplete or damaged."""
    try:
        record = unsealed((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return record if "report" in record and not damaged_beside(folder / RECORD) else None


def write_card(folder: Path, text: str) -> None:
    """Replace the card beside a checkpoint, whose last line holds the hash of the others. Raises WriteError.

    training.json does not name the card, so that figures which are measured later can be added.
    """
    write_whole(folder / CARD, _sealed_card(text))


def read_card(folder: Path) -> str | None:
    """Return the card without its last line; None where it is missing, or is not what was written."""
    try:
        content = (folder / CARD).read_bytes()
        text = content.decode().rstrip("\n").rpartition("\n")[0] + "\n"
    except (OSError, UnicodeDecodeError):
        return None
    return text if _sealed_card(text) == content else None


def card_is_lost(folder: Path) -> bool:
    """Return whether the card is missing, or was written here and changed since; a person's own README is neither."""
    try:
        content = (folder / CARD).read_bytes()
    except OSError:
        return True
    written_here = CARD_TAGS in content or CARD_SEAL.search(content) is not None
    return written_here and read_card(folder) is None


def _sealed_card(text: str) -> bytes:
    return f"{text}<!-- {content_hash(text.encode())} -->\n".encode()


def publish(folder: Path, out: Path) -> None:
    """Replace `out` by `folder`, and remove all unfinished runs beside it.

    The files get the mode of the record: safetensors writes for its owner alone.
    """
    mode = (folder / RECORD).stat().st_mode & 0o777
    for file in folder.iterdir():
        file.chmod(mode)
    replace_folder(out, folder)
    for unfinished in out.parent.glob(f"{out.name}.partial-*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def checkpoint_files(settings: Settings, name: str = "finetuned_checkpoint") -> LocalOutput:
    """Return the files of a published checkpoint, as the lake shares them among machines."""
    owner = f"training{settings.rounds.suffix}/{name}"
    return LocalOutput(Lake.of(settings.paths).storage, owner, checkpoint_folder(settings, name))


def finetuned_or_base(settings: Settings) -> str:
    """Return the checkpoint that was finetuned from the settings' model if it exists, else the model.

    Raises ModelError where the model is a path without a model, DamagedCheckpoint.
    """
    checkpoint_files(settings).receive()
    base, finetuned = model_name(settings.model), checkpoint_folder(settings)
    if finetuned.is_dir() and (damaged := damaged_beside(finetuned / RECORD)):
        raise DamagedCheckpoint(damaged[0])
    record = _whole_record(finetuned) or {}
    return str(finetuned) if record.get("base") == model_identity(base, settings.model.revision) else base
