"""Which model is meant: the embedded one, a folder, an id of the hub, or what finetuning made."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolformer_dag.settings.sections import Model
from toolformer_dag.settings.settings import Settings

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.model.loading import LanguageModel


def model_name(model: Model) -> str:
    """The folder or id of the settings' model; `embedded` is the one that comes with the package."""
    from toolformer_dag.synthetic import MODEL

    return str(MODEL) if model.name == "embedded" else model.name


def checkpoint_folder(settings: Settings, name: str = "finetuned_checkpoint") -> Path:
    """Where finetuning puts a checkpoint."""
    return settings.paths.lake / "training" / name / "model"


def finetuned_or_base(settings: Settings) -> str:
    """The checkpoint that was finetuned from the settings' model where there is one, else that model.

    Raises ModelError where the model is a path without a model.
    """
    from toolformer_dag.model.weights import model_identity
    from toolformer_dag.training.training_report import read_base

    base, finetuned = model_name(settings.model), checkpoint_folder(settings)
    made_of = read_base(finetuned)
    return str(finetuned) if made_of == model_identity(base, settings.model.revision) else base


def load_model(model: Model, name: str | None = None, dtype: str | None = None) -> "LanguageModel":
    """The settings' model, or another one under the settings' device and dtype. Raises ModelError."""
    from toolformer_dag.model.loading import load_language_model

    named = model if name is None else model.model_copy(update={"name": name, "revision": None})
    return load_language_model(
        model_name(named),
        revision=named.revision,
        dtype=dtype or named.dtype,
        device=named.device,
        trust_remote_code=named.trust_remote_code,
    )


def load_identified(model: Model, name: str | None = None) -> "LanguageModel":
    """`load_model` with the identity of the files it read, in whose place another run may put others at any time.

    Raises ModelError.
    """
    from toolformer_dag.model.weights import model_identity

    named = model_name(model) if name is None else name
    while True:
        identity = model_identity(named, model.revision)
        loaded = load_model(model, name)
        if model_identity(named, model.revision) == identity:
            return replace(loaded, identity=identity)


def load_engine(model: Model, name: str | None = None, dtype: str | None = None) -> "Engine":
    """An engine over `load_model`."""
    from toolformer_dag.model.engine import Engine

    return Engine(load_model(model, name, dtype), token_budget=model.token_budget)
