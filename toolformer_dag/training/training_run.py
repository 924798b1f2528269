"""A finetuning run: its identity, and the folder of an unfinished run. Imports no torch."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.model.weights import model_identity, model_name
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings

_log = logging.getLogger(__name__)


class TrainingError(UserError):
    """A finetuning run that cannot start or continue. The message names the problem and the remedy."""


LIBRARIES = ("torch", "transformers", "accelerate")
RUN = "run.json"


def run_identity(
    base: ModelSettings, texts: Sequence[str], heldout: Sequence[str], settings: TrainingSettings
) -> Mapping[str, object]:
    """Return what determines the weights: base model, settings, fingerprints of texts. Raises ModelError."""
    return {
        "base": dict(model_identity(model_name(base), base.revision)),
        "settings": settings.determining(),
        "texts": fingerprint(list(texts)),
        "heldout": fingerprint(list(heldout)),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the training libraries; they are recorded but not part of the identity."""
    return {name: version(name) for name in LIBRARIES}


def partial_folder(out: Path, name: str) -> Path:
    """Return the folder of the unfinished run with the fingerprint `name`, beside its output."""
    return out.with_name(f"{out.name}.partial-{name}")


def claim(folder: Path, identity: Mapping[str, object]) -> None:
    """Record the run that the folder belongs to, or check the record.

    Raises TrainingError with the differing fields where the folder holds checkpoints of another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RUN
    if not file.is_file():
        whole = file.with_name(f"{RUN}.{os.getpid()}")  # torchrun's processes write at the same time
        whole.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        whole.replace(file)
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise TrainingError(
            f"{file} is damaged ({error}); remove its folder and run again, which starts the finetuning anew"
        ) from error
    if differing := [name for name in identity if found.get(name) != json.loads(json.dumps(identity[name]))]:
        raise TrainingError(
            f"{folder} holds checkpoints of another run, which differs in {', '.join(differing)}; remove the folder, "
            "as the run cannot be continued"
        )


STATE, OPTIMIZER = "trainer_state.json", "optimizer.pt"
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
    found = sorted(named, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    kind = Path(SHARES, ".metadata") if sharded else Path(OPTIMIZER)
    for checkpoint in filter(_complete, found):
        if (checkpoint / kind).is_file():
            return checkpoint
        _log.warning("%s was written by one process or by several, the other way round: not gone on from", checkpoint)
    return None


def _complete(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return False
