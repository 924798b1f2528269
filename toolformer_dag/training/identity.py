"""What a finetuned model is made of, and where its unfinished run lies. Imports no torch."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from toolformer_dag.checkpoints import model_name
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.language_model.identity import model_identity
from toolformer_dag.settings.sections import Model
from toolformer_dag.training.errors import TrainingError
from toolformer_dag.training.settings import TrainingSettings

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
