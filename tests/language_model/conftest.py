"""Tiny random models with tokenizers made on the spot, and a slow, obvious reference for what the engine computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    RecurrentGemmaConfig,
)

from tests.tokenizers import byte_level, metaspace
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel, wrap_language_model
from toolformer_dag.model.requests import WINDOW_WEIGHTS, generate_uniforms
from toolformer_dag.settings.model_settings import SamplingSettings

PROMPT = "Add calls.\nInput: 1 + 2 is 3.\nOutput: 1 + 2 is [Add(1 + 2)] 3.\n"
TEXTS = (
    "I had 35 pens and bought 26 more, so now I have 61 pens.",
    "Prices rose by 5 € – 中文 😀 since 2001.",
    "one two three four",
    "a",
    " leading space, and a\nnew line",
)
CORPUS = [PROMPT, *TEXTS[:1], "so [Add(1)] and [Add(2)] are (3)] or [4]", " [ [ [ )] )] )] pens have more bought"] * 3


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
WIDE = {"initializer_range": 0.3}
NESTED = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 400,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Most texts of the tests are longer than the windows of Mistral and Gemma 2. Gemma 3's lengths are in a nested config.
# GPT-J, like the real one, has rows for more tokens than its tokenizer.
ARCHITECTURES: dict[str, Callable[[int], Any]] = {
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_positions=512, **GPT, **WIDE),
    "gpt2_bytes": lambda v: GPT2Config(vocab_size=v, n_positions=512, **GPT, **WIDE),
    "gptj": lambda v: GPTJConfig(vocab_size=v + 60, n_positions=512, rotary_dim=4, **GPT, **WIDE),
    "llama": lambda v: LlamaConfig(vocab_size=v, max_position_embeddings=512, num_key_value_heads=2, **SIZES, **WIDE),
    "mistral": lambda v: MistralConfig(vocab_size=v, sliding_window=24, num_key_value_heads=2, **SIZES, **WIDE),
    "gemma2": lambda v: Gemma2Config(
        vocab_size=v, head_dim=8, num_key_value_heads=2, sliding_window=32, max_position_embeddings=512, **SIZES, **WIDE
    ),
    "gemma3": lambda v: Gemma3Config(
        text_config={**NESTED, **SIZES, **WIDE, "vocab_size": v + 3},
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        image_token_id=v,
        boi_token_index=v + 1,
        eoi_token_index=v + 2,
    ),
    "deepseek": lambda v: DeepseekV2Config(
        vocab_size=v, num_key_value_heads=4, first_k_dense_replace=2, **LATENT, **SIZES, **WIDE
    ),
    "bloom": lambda v: BloomConfig(vocab_size=v, **GPT, **WIDE),
    "recurrent_gemma": lambda v: RecurrentGemmaConfig(
        vocab_size=v,
        block_types=["recurrent", "attention"],
        num_key_value_heads=1,
        attention_window_size=64,
        lru_width=32,
        **SIZES,
    ),
}
SHARING = ("gpt2", "gpt2_bytes", "gptj", "llama", "mistral", "deepseek", "gemma2", "gemma3")
"""These run with shared keys (deepseek: values narrower than keys); bloom in its own cache, recurrent_gemma without."""
SHORT = ("gpt2_bytes", "llama")
"""A start of two tokens without BOS, and one of a single token with BOS; the others are long."""


def tiny(name: str) -> LanguageModel:
    torch.manual_seed(1)
    size = 257 if name == "gpt2_bytes" else 320
    tokenizer = byte_level(CORPUS, size) if name.startswith("gpt") else metaspace(CORPUS, 300, "bos")
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name](len(tokenizer)))
    return wrap_language_model(name, model.float(), tokenizer)


@dataclass
class Reference:
    """The definitions written down: one plain forward pass of the whole sequence for every number."""

    model: Any
    tokenizer: Any

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @property
    def bos(self) -> list[int]:
        return [i for i in self.tokenizer("").input_ids if i == self.tokenizer.bos_token_id]

    @torch.no_grad()
    def log_probabilities(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """[T, V]: row t is the distribution of token t + 1."""
        return self.model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1).double().numpy()

    def prefix(self, prompt: str, text: str, i: int) -> list[int]:
        x = self.tokens(text)
        return self.bos + self.tokens(prompt + "Input: ") + x + self.tokens("\nOutput: ") + x[:i]

    def probability(self, prompt: str, text: str, i: int) -> float:
        before = self.prefix(prompt, text, i)
        start = self.tokens(" [")
        rows = self.log_probabilities(before + start)
        return float(np.exp(sum(rows[len(before) - 1 + t, token] for t, token in enumerate(start))))

    def sample(self, prompt: str, text: str, i: int, stream: Sequence[float], temperature: float = 1.0) -> str | None:
        sampled: list[int] = []
        for uniform in stream:
            logits = self.log_probabilities(self.prefix(prompt, text, i) + self.tokens(" [") + sampled)[-1]
            weights = np.exp(logits / temperature)
            sampled.append(int(np.searchsorted(np.cumsum(weights / weights.sum()), uniform, side="right")))
            body = self.tokenizer.decode(self.tokens(" [") + sampled).partition("[")[2]
            if "]" in body:
                return str(body.partition("]")[0])
            if sampled[-1] == self.tokenizer.eos_token_id:
                return None
        return None

    def loss(self, text: str, i: int, z: str) -> float:
        """L_i(z) with z tokenized apart; without BOS the first token has no term in any of the three losses."""
        before = self.bos + (self.tokens(z) if z else [])
        x = self.tokens(text)
        rows = self.log_probabilities(before + x)
        loss = 0.0
        for weight, j in zip(WINDOW_WEIGHTS, range(i, len(x)), strict=False):
            if self.bos or j > 0:
                loss -= weight * rows[len(before) + j - 1, x[j]]
        return float(loss)


@dataclass
class Case:
    """A tiny model, its reference, and engines over it."""

    name: str
    language_model: LanguageModel
    reference: Reference

    def engine(self, token_budget: int | None = None) -> Engine:
        return Engine(self.language_model, token_budget=token_budget)


@pytest.fixture(scope="session")
def cases() -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            language_model = tiny(name)
            made[name] = Case(name, language_model, Reference(language_model.model, language_model.tokenizer))
        return made[name]

    return case


@pytest.fixture(params=[pytest.param(one, marks=() if one in SHORT else pytest.mark.long) for one in SHARING])
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


@pytest.fixture(params=["gpt2", "bloom", "recurrent_gemma"])
def any_case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


@pytest.fixture
def gpt2(cases: Callable[[str], Case]) -> Case:
    return cases("gpt2")


@pytest.fixture(scope="session")
def texts() -> tuple[str, ...]:
    return TEXTS


@pytest.fixture(scope="session")
def prompt() -> str:
    return PROMPT


@pytest.fixture(scope="session")
def stream() -> Callable[..., Any]:
    def of(sampling: SamplingSettings, digest: str, i: int, j: int) -> Any:
        return generate_uniforms(sampling.seed, digest, i, j, sampling.max_call_tokens)

    return of
