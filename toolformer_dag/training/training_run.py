"""A finetuning run: its settings, its identity, and its unfinished folder. Imports no torch."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from toolformer_dag.checkpoints import model_name
from toolformer_dag.errors import UserError
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.model.weights import model_identity
from toolformer_dag.settings.sections import Model, Training


class TrainingError(UserError):
    """A finetuning run that cannot start or go on. The message names the thing, the reason and the remedy."""


EXECUTION = ("device_batch_size", "deepspeed")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Defaults are the paper's (section 4.1, appendix B); optimizer: AdamW without weight decay, clipped at norm 1.

    batch_size: sequences per step over all devices and accumulation; device_batch_size: what one device takes at once
    (lowered until it divides). warmup: share of the steps over which the rate rises, after which it falls linearly to
    zero. sequence_length in tokens. The run ends after max_steps or epochs, whichever comes first; every eval_steps,
    and at the end, held-out perplexity is measured and a checkpoint kept. deepspeed: ZeRO-3 as in zero3.json.
    """

    batch_size: int = 128
    device_batch_size: int = 8
    learning_rate: float = 1e-5
    warmup: float = 0.1
    sequence_length: int = 1024
    max_steps: int = 2000
    epochs: float | None = None
    eval_steps: int = 500
    seed: int = 0
    deepspeed: bool = False

    @staticmethod
    def of(section: Training) -> "TrainingSettings":
        """Those of the section `[training]`, which also says what the corpus and the held-out texts are."""
        return TrainingSettings(**section.model_dump(exclude={"heldout_texts", "examples_per_tool"}))

    def determining(self) -> Mapping[str, object]:
        """What the trained weights depend on, for the fingerprint; how the work is spread does not enter."""
        return {name: value for name, value in asdict(self).items() if name not in EXECUTION}


LIBRARIES = ("torch", "transformers", "accelerate")
RUN = "run.json"


def run_identity(
    base: Model, texts: Sequence[str], heldout: Sequence[str], settings: TrainingSettings
) -> Mapping[str, object]:
    """Base model, settings and texts (as fingerprints): what the weights depend on. Raises ModelError."""
    return {
        "base": dict(model_identity(model_name(base), base.revision)),
        "settings": dict(settings.determining()),
        "texts": fingerprint(list(texts)),
        "heldout": fingerprint(list(heldout)),
    }


def versions() -> dict[str, str]:
    """Of the libraries that train; recorded, not part of the identity."""
    return {name: version(name) for name in LIBRARIES}


def partial_folder(out: Path, name: str) -> Path:
    """Where the unfinished run of that fingerprint keeps its checkpoints, beside its output."""
    return out.with_name(f"{out.name}.partial-{name}")


def claim(folder: Path, identity: Mapping[str, object]) -> None:
    """Writes down which run the folder belongs to, or checks it.

    Raises TrainingError, field by field, where the checkpoints in it are of another run (a folder copied or renamed).
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RUN
    if not file.is_file():
        whole = file.with_name(f"{RUN}.{os.getpid()}")  # torchrun's processes come here together
        whole.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        whole.replace(file)
    found = json.loads(file.read_text(encoding="utf-8"))
    if differing := [name for name in identity if found.get(name) != json.loads(json.dumps(identity[name]))]:
        raise TrainingError(
            f"{folder} holds checkpoints of another run, which differs in {', '.join(differing)}; "
            "they cannot be continued: remove the folder"
        )


STATE = "trainer_state.json"


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; None where there is none.

    The Trainer writes into the folder itself and its state last: a run killed while saving leaves a folder without a
    readable state, which is passed over.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((path for path in found if _complete(path)), None)


def _complete(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
