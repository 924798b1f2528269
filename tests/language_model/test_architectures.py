"""Every architecture against the naive backend: proposals, losses, decoding, finetuning, and what it costs."""

from pathlib import Path

import pytest

from benchmarks.architectures import MOST_ERROR, MOST_TOKENS, compared, largest_error, samples
from benchmarks.measure import NaiveBackend
from tests.decoded import generate
from tests.tiny_models import ARCHITECTURES, TOKENIZERS, UNCACHED, save, tiny_model, tokenizer_of
from tests.tiny_models import TEXTS as SOME
from toolformer_dag.model import sharing
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.training_report import TrainingData

WAYS = {
    "Llama 4": sharing.SHARED_KEYS,
    "GPT-Neo": sharing.SHARED_KEYS,
    "Gemma 2": sharing.SHARED_KEYS,
    "gpt-oss": sharing.SHARED_KEYS,
    "Cohere2": sharing.SHARED_KEYS,
    "Granite": sharing.SHARED_KEYS,
    "Bloom": sharing.OWN_CACHE,
    "Qwen3-Next": sharing.OWN_CACHE,
    "Mamba": sharing.OWN_CACHE,
}
"""Chunks, windows, soft caps, sinks, scaled heads; ALiBi, a state with and without chunks. The rest is long."""
SHORT = ("Llama 4", "Gemma 2", "gpt-oss", "Bloom", "Mamba")
PAIRED = (
    *("GPT-2", "GPT-J", "Llama", "Llama 4", "Mistral", "Gemma 2", "Granite", "gpt-oss", "Falcon, ALiBi", "Bloom"),
    *("LFM2", "Mamba"),
)
TEXTS = [f"Ada had {a} apples [Calculator({a} + {b}) -> {a + b}] and {b} more." for a in range(4) for b in range(4)]
PROMPTS = ["Ada had 3 apples and", "Prices rose by 5 €", "one two"]
SETTINGS = TrainingSettings(batch_size=8, device_batch_size=8, learning_rate=1e-2, max_steps=4, eval_steps=2)


def check(language_model: LanguageModel, count: int = 4) -> tuple[str, int, int]:
    """Compare all numbers with the naive backend's; return the way and the tokens of both."""
    way, ours, naive = compared(language_model, SOME[:count])
    assert samples(ours) == samples(naive) and len(samples(ours)) == 12 * count
    assert largest_error(ours, naive) < MOST_ERROR
    return way, ours.tokens, naive.tokens


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in WAYS])
def test_what_attention_adds_is_computed_exactly_and_nothing_twice(name: str) -> None:
    way, tokens, naive = check(tiny_model(name, tokenizer_of("bos")), 2)
    assert way == WAYS[name] and tokens < naive / 3


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WAYS])
def test_every_architecture_gives_the_naive_numbers_with_the_tokens_of_llama(name: str) -> None:
    _, llama, _ = check(tiny_model("Llama", tokenizer_of("bos")))
    way, tokens, naive = check(tiny_model(name, tokenizer_of("bos")))
    assert tokens <= naive
    assert (way == sharing.RECOMPUTED) == (name in UNCACHED)
    assert name in UNCACHED or tokens <= MOST_TOKENS * llama


@pytest.mark.long
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", PAIRED)
def test_the_whole_line_runs_with_every_kind_of_tokenizer(name: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model(name, tokenizer_of(kind))
    check(model)
    save(model, tmp_path / "base")
    base = ModelSettings(name=str(tmp_path / "base"), device="cpu")
    assert finetune(base, TrainingData(TEXTS, TEXTS[:2]), SETTINGS, tmp_path / "out").steps == 4
    tools = {"Calculator": load_tool("calculator", {})}
    for trained in (model, load_model(ModelSettings(name=str(tmp_path / "out"), device="cpu"))):
        options = {"top_k": 20, "max_new_tokens": 12, "max_call_tokens": 8}
        written = generate(trained, PROMPTS, tools, **options)
        assert written == generate(trained, PROMPTS, tools, **options, backend=NaiveBackend(trained))
