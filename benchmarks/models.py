"""Random weights of the shapes that are measured, made on the spot with a tokenizer that fits the texts."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, PreTrainedTokenizerFast

from benchmarks.corpus import texts
from toolformer_dag.model.loading import LanguageModel, wrap_language_model

VOCABULARY = 8192
SMALL: Any = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
SHAPES: dict[str, Any] = {
    "gpt2-4x256": GPT2Config(n_positions=1024, **SMALL),
    "gptj-small": GPTJConfig(rotary_dim=32, n_positions=2048, **SMALL),
    "gptj-6b": GPTJConfig(bos_token_id=0, eos_token_id=0),
}


def random_model(shape: str, prompt: str, device: str, dtype: torch.dtype) -> LanguageModel:
    """Weights of the given shape, made on the device in its dtype."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(prompt)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    return wrap_language_model(shape, model, tokenizer)


def make_tokenizer(prompt: str) -> Any:
    """Byte BPE, sized so that the calculator's prompt takes about 375 tokens, as with GPT-2's own vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*[prompt] * 5, *texts(400, seed=1)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
