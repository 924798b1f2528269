"""A trained model as a folder that `AutoModelForCausalLM` loads: float16 safetensors, configuration, tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GPTJConfig, GPTJForCausalLM

from toolformer_dag.embedded.training.gptj import GPTJ
from toolformer_dag.embedded.training.shape import ModelShape
from toolformer_dag.embedded.training.tokenizer import save_tokenizer


def export_model(model: GPTJ, tokenizer: Tokenizer, folder: Path) -> None:
    """Logits of the export, read back in float32, differ from the model's by the rounding of weights to float16."""
    gptj = to_transformers(model)
    gptj.half().save_pretrained(str(folder))
    save_tokenizer(tokenizer, folder, model.shape.positions)


def to_transformers(model: GPTJ) -> GPTJForCausalLM:
    """The same function as transformers' class, in float32."""
    gptj = GPTJForCausalLM(configuration(model.shape))
    gptj.load_state_dict(gptj_tensors(model), strict=False)
    gptj.tie_weights()
    torch.nn.init.zeros_(gptj.lm_head.bias)
    return gptj.eval()


def configuration(shape: ModelShape) -> GPTJConfig:
    """The shape in the terms of transformers; no dropout, token 0 begins and ends a text."""
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
    """The weights under the names of transformers; the stacked q, k, v come apart."""
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
    """Under which names one of our tensors is stored, in the order in which its rows are cut."""
    if name in _OUTSIDE_BLOCKS:
        return (_OUTSIDE_BLOCKS[name],)
    _, number, part, kind = name.split(".")
    block = f"transformer.h.{number}"
    if part == "query_key_value":
        return tuple(f"{block}.attn.{letter}_proj.weight" for letter in "qkv")
    return (f"{block}.{_IN_BLOCKS[part]}.{kind}",)
