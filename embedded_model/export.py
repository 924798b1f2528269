"""Write model folders for `AutoModelForCausalLM`, read them as the start of a run, and average them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GPTJConfig, GPTJForCausalLM

from embedded_model.documents import save_tokenizer
from embedded_model.network import GPTJ, ModelShape
from embedded_model.optimizer import WeightAverage
from toolformer_dag.files import UserError


def export_model(model: GPTJ, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder; the weights are rounded to float16."""
    gptj = to_transformers(model)
    gptj.half().save_pretrained(str(folder))
    save_tokenizer(tokenizer, folder, model.shape.positions)


def to_transformers(model: GPTJ) -> GPTJForCausalLM:
    """Convert to transformers' class, in float32; both compute the same function."""
    gptj = GPTJForCausalLM(configuration(model.shape))
    gptj.load_state_dict(gptj_tensors(model), strict=False)
    gptj.tie_weights()
    torch.nn.init.zeros_(gptj.lm_head.bias)
    return gptj.eval()


def configuration(shape: ModelShape) -> GPTJConfig:
    """Convert the shape to transformers' configuration; no dropout, token 0 begins and ends a text."""
    return GPTJConfig(
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.feed_forward,
        rotary_dim=shape.rotary,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )


def gptj_tensors(model: GPTJ) -> dict[str, Tensor]:
    """Return the weights under transformers' names; the stacked q, k, v are split."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        names = names_in_transformers(name)
        tensors |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    return tensors


_OUTSIDE_BLOCKS = {
    "embedding.weight": "transformer.wte.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
_IN_BLOCKS = {"norm": "ln_1", "attention_out": "attn.out_proj", "mlp_in": "mlp.fc_in", "mlp_out": "mlp.fc_out"}


def names_in_transformers(name: str) -> tuple[str, ...]:
    """Return transformers' names of a tensor, several where its rows are split, in row order."""
    if name in _OUTSIDE_BLOCKS:
        return (_OUTSIDE_BLOCKS[name],)
    _, number, part, kind = name.split(".")
    block = f"transformer.h.{number}"
    if part == "query_key_value":
        return tuple(f"{block}.attn.{letter}_proj.weight" for letter in "qkv")
    return (f"{block}.{_IN_BLOCKS[part]}.{kind}",)


FILES = ("config.json", "tokenizer.json", "model.safetensors")


class StartError(UserError):
    """Report a folder without a model of `embedded train`, or one that does not fit the others."""


def shape_of(folder: Path) -> ModelShape:
    """Read the shape of a model folder; raises StartError where it has none, or another architecture."""
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
    """Return the SHA-256 of the weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def load_weights(folder: Path, model: GPTJ) -> None:
    """Load the weights of a folder, widened to float32, into a model of the same shape."""
    stored = load_file(folder / "model.safetensors")
    ours = model.state_dict()
    for name in ours:
        ours[name] = torch.cat([stored[one].float() for one in names_in_transformers(name)])
    model.load_state_dict(ours)


def mean_model(models: Sequence[Path], out: Path) -> Path:
    """Export the mean of model folders to `out`; return `out`. One of the models should have started from another.

    Raises StartError for a folder without a model, and where shapes or tokenizers differ.
    """
    first, *others = models
    for other in others:
        if shape_of(other) != shape_of(first):
            raise StartError(f"{other} has another shape than {first}; name models of one size")
        if (other / "tokenizer.json").read_bytes() != (first / "tokenizer.json").read_bytes():
            raise StartError(
                f"{other} has another tokenizer than {first}; name models of which one started from the other"
            )
    model = GPTJ(shape_of(first))
    average = WeightAverage(model, power=0)
    for number, folder in enumerate(models, 1):
        load_weights(folder, model)
        average.add(model, number)
    model.load_state_dict(average.tensors)
    export_model(model, Tokenizer.from_file(str(first / "tokenizer.json")), out)
    return out
