"""Write model folders for `AutoModelForCausalLM`, tokenizer included; start a run from one."""

import json
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GPTJConfig, GPTJForCausalLM, PreTrainedTokenizerFast

from embedded_model.network import GPTJ, ModelShape
from toolformer_dag.files import UserError

END_OF_TEXT = "<|endoftext|>"
PIECES = r" (?:19\d\d|20[0-3]\d)(?![.,]?\p{N})| ?\p{L}+| ?\p{N}| ?->| ?[^\s\p{L}\p{N}]|\s"
# Trained merges of a frequent text would come anyway; these must exist whatever the text is.
MARKS = tuple(f"{space}{mark}" for space in ("", " ") for mark in (*"0123456789", "[", "]", "(", ")", "->"))
WANTED = (*MARKS, *(f" {year}" for year in range(1900, 2040)))


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level tokenizer of `size` tokens, fewer where the texts are too short; it can encode any byte.

    With special tokens it adds END_OF_TEXT before a text, as in training.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(chain(texts, repeat("".join(WANTED) * 10, 1_000)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))


def export_model(model: GPTJ, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder of transformers' class, which computes the same function, its weights rounded to float16.

    The stacked q, k, v are split. No dropout; token 0 begins and ends a text.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        names = names_in_transformers(name)
        tensors |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    shape = model.shape
    config = GPTJConfig(
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
    gptj = GPTJForCausalLM(config)
    gptj.load_state_dict(tensors, strict=False)
    gptj.tie_weights()
    torch.nn.init.zeros_(gptj.lm_head.bias)
    gptj.half().save_pretrained(str(folder))
    save_tokenizer(tokenizer, folder, shape.positions)


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


WEIGHTS = "model.safetensors"


def shape_of(folder: Path) -> ModelShape:
    """Read the shape of a model folder; raises UserError where it has none, or another architecture."""
    missing = [name for name in ("config.json", "tokenizer.json", WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} has no {', '.join(missing)}; name a folder that `embedded_model train` wrote")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("model_type") != "gptj" or not config.get("tie_word_embeddings"):
        raise UserError(
            f"{folder} holds another kind of model ({config.get('model_type')}); "
            "name a folder that `embedded_model train` wrote"
        )
    return ModelShape(
        width=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        feed_forward=config["n_inner"],
        rotary=config["rotary_dim"],
        vocabulary=config["vocab_size"],
        positions=config["n_positions"],
    )


def load_weights(folder: Path, model: GPTJ) -> None:
    """Load the weights of a folder, widened to float32, into a model of the same shape."""
    stored = load_file(folder / WEIGHTS)
    ours = model.state_dict()
    for name in ours:
        ours[name] = torch.cat([stored[one].float() for one in names_in_transformers(name)])
    model.load_state_dict(ours)
