"""A finetuning run: its identity, and the folder of an unfinished run. Imports no torch."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.model.weights import model_identity, model_name
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings

_log = logging.getLogger(__name__)


class TrainingError(UserError):
    """A finetuning run that cannot start or continue. The message names the problem and the remedy."""


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


def partial_folder(out: Path, name: str) -> Path:
    """Return the folder of the unfinished run with the fingerprint `name`, beside its output."""
    return out.with_name(f"{out.name}.partial-{name}")


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
