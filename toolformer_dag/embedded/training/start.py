"""A model folder as the start of a further run: its shape, its tokenizer and its weights."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from toolformer_dag.embedded.training.export import names_in_transformers
from toolformer_dag.embedded.training.gptj import GPTJ
from toolformer_dag.embedded.training.shape import ModelShape
from toolformer_dag.errors import UserError

FILES = ("config.json", "tokenizer.json", "model.safetensors")


class StartError(UserError):
    """The folder holds no model that `embedded train` made."""


def shape_of(folder: Path) -> ModelShape:
    """Raises StartError for a folder without a model, or with one of another architecture."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise StartError(f"{folder} has no {', '.join(missing)}; name a folder that `embedded train` wrote")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("model_type") != "gptj" or not config.get("tie_word_embeddings"):
        kind = config.get("model_type")
        raise StartError(f"{folder} holds another kind of model ({kind}); name a folder that `embedded train` wrote")
    return ModelShape(
        width=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        feed_forward=config["n_inner"],
        rotary=config["rotary_dim"],
        vocabulary=config["vocab_size"],
        positions=config["n_positions"],
    )


def fingerprint(folder: Path) -> str:
    """SHA-256 of the weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def load_weights(folder: Path, model: GPTJ) -> None:
    """Take over the weights of a folder of the model's shape, widened to float32."""
    stored = load_file(folder / "model.safetensors")
    ours = model.state_dict()
    for name in ours:
        ours[name] = torch.cat([stored[one].float() for one in names_in_transformers(name)])
    model.load_state_dict(ours)
