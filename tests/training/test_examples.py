"""Before and after finetuning: texts to sequences and batches, and the memory that it needs."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPTJConfig, LlamaConfig, PreTrainedConfig

from benchmarks.training_memory import RECIPES, config_of, train
from tests.training.test_recipes import saved
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.launch import BYTES_PER_GB, check_finetuning, estimate_memory_need
from toolformer_dag.training.sequences import (
    build_examples,
    compute_step_count,
    draw_batch_order,
    iter_windows,
    pack_parts,
)
from toolformer_dag.training.trainer import choose_device_batch_size
from toolformer_dag.training.training_report import TrainingError


@given(st.lists(st.integers(), min_size=2, max_size=60), st.integers(2, 20))
def test_windows_predict_every_token_once(ids: list[int], length: int) -> None:
    found = list(iter_windows(ids, length))
    assert all(2 <= len(window) <= length for window in found)
    assert [token for window in found for token in window[1:]] == ids[1:]
    assert found[0][0] == ids[0]
    assert all(after[0] == before[-1] for before, after in pairwise(found))


@given(st.lists(st.lists(st.integers(), min_size=2, max_size=16), max_size=40))
def test_packing_loses_nothing_and_fills_sequences(parts: list[list[int]]) -> None:
    sequences = pack_parts(parts, 16)
    assert sorted(part for sequence in sequences for part in sequence) == sorted(parts)
    filled = [sum(map(len, sequence)) for sequence in sequences]
    assert all(length <= 16 for length in filled)
    assert sum(length <= 8 for length in filled) <= 1  # two that are half empty would have been one


@pytest.mark.parametrize("bos", [True, False])
def test_a_text_is_a_sequence_with_its_ends(tiny_model: Callable[..., LanguageModel], bos: bool) -> None:
    encoding = tiny_model("gptj", bos=bos).encoding
    text = "Ada had 17 apples."
    plain = encoding.tokenizer(text, add_special_tokens=False).input_ids
    made = build_examples(encoding, [text, "", text * 10], 64)
    assert made.sequences[0] == ([0] * bos + plain + [0],)
    assert (made.text_count, made.split_text_count, made.empty_text_count) == (3, 1, 1)
    assert made.token_count == sum(len(part) for parts in made.sequences for part in parts)


def test_the_string_of_a_special_token_ends_no_example(tiny_model: Callable[..., LanguageModel]) -> None:
    encoding = tiny_model("gptj").encoding
    [[sequence]] = build_examples(encoding, ["Ada wrote <end> and went on."], 64).sequences
    assert sequence.index(0) == len(sequence) - 1
    assert encoding.tokenizer.decode(sequence[:-1]) == "Ada wrote <end> and went on."


@given(st.lists(st.integers(1, 99), min_size=1, max_size=80), st.integers(1, 16), st.integers(1, 4), st.integers(0, 9))
def test_every_sequence_is_in_every_epoch(lengths: list[int], batch_size: int, epochs: int, seed: int) -> None:
    steps = compute_step_count(len(lengths), TrainingSettings(batch_size=batch_size, max_steps=10_000, epochs=epochs))
    order = draw_batch_order(lengths, batch_size, steps, seed)
    assert len(order) == steps * batch_size
    counts = Counter(order)
    assert set(counts) == set(range(len(lengths)))
    assert min(counts.values()) >= epochs
    assert order == draw_batch_order(lengths, batch_size, steps, seed)


def test_batches_hold_like_lengths_in_shuffled_order() -> None:
    lengths = [(7 * at) % 101 for at in range(400)]
    order = draw_batch_order(lengths, 8, 50, 0)
    batches = [[lengths[at] for at in order[start : start + 8]] for start in range(0, 400, 8)]
    assert max(max(batch) - min(batch) for batch in batches) <= 3
    means = [sum(batch) for batch in batches]
    assert means != sorted(means)
    assert order != draw_batch_order(lengths, 8, 50, 1)


@pytest.mark.parametrize(
    ("texts", "given", "steps"),
    [
        (100, {"max_steps": 12}, 12),
        (100, {}, 10 * 100 // 32),  # ten passes, unless told
        (60, {"batch_size": 128}, 4),
        (1, {"batch_size": 128}, 1),
        (100, {"passes": 20}, 20 * 100 // 32),
        (100, {"epochs": 3}, 12),
        (100, {"epochs": 300}, 1200),
        (100, {"epochs": 3, "max_steps": 5}, 5),
        (1, {"epochs": 0.1}, 1),
    ],
)
def test_the_run_ends_with_passes_epochs_or_steps(texts: int, given: dict[str, Any], steps: int) -> None:
    settings = TrainingSettings(**{"batch_size": 32, "max_steps": 2000, **given})
    assert compute_step_count(texts, settings.with_default_passes(texts)) == steps


def test_only_checkpoints_that_passed_over_their_texts_more_often_are_other_ones() -> None:
    settings = TrainingSettings(batch_size=32, max_steps=2000)
    assert settings.with_default_passes(6400).select_weight_settings() == settings.select_weight_settings()
    assert settings.with_default_passes(6399).select_weight_settings() == {
        **settings.select_weight_settings(),
        "passes": 10,
    }


def test_a_batch_is_shared_exactly() -> None:
    settings = TrainingSettings(batch_size=24, device_batch_size=7)
    assert choose_device_batch_size(settings, 1) == 6
    assert choose_device_batch_size(settings, 8) == 3
    with pytest.raises(TrainingError, match="5 processes"):
        choose_device_batch_size(settings, 5)


GPTJ = GPTJConfig()
EIGHT = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)


@pytest.mark.parametrize(
    ("config", "recipe", "processes", "gigabytes"),
    [
        (GPTJ, {}, 1, 117.6),
        (GPTJ, {}, 8, 22.3),
        (GPTJ, {"precision": "mixed"}, 1, 117.6),
        (GPTJ, {"precision": "bfloat16"}, 1, 43.1),
        (GPTJ, {"precision": "bfloat16", "lora_rank": 16}, 1, 19.5),
        (EIGHT, {}, 1, 161.4),
        (EIGHT, {"precision": "bfloat16"}, 1, 62.9),
        (EIGHT, {"precision": "bfloat16", "lora_rank": 16}, 1, 31.5),
    ],
)
def test_known_models_on_a_gpu(
    config: PreTrainedConfig, recipe: dict[str, Any], processes: int, gigabytes: float
) -> None:
    """Eight sequences of 1,024 tokens a pass; two of these do not fit a card of 80 GB, the others do."""
    need = estimate_memory_need(
        config, TrainingSettings(**recipe), 1024, processes, on_gpu=True, trust_remote_code=False
    )
    assert sum(need) / BYTES_PER_GB == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gptj", "llama"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_takes_at_least_what_the_formula_says(architecture: str, recipe: str) -> None:
    """Torch's allocator holds hardly more with checkpointing in float32, and up to twice as much without."""
    config = config_of(architecture, width=192, layers=3, vocabulary=3000)
    states, activations, taken = train(config, 3, 200, RECIPES[recipe])
    assert 1 <= taken / (states + activations) < 2.2


def test_what_cannot_fit_is_refused_with_the_remedies(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    huge = TrainingSettings(device_batch_size=10_000_000, batch_size=10_000_000)
    with pytest.raises(
        TrainingError, match=r"needs .* GB on each of 1 devices .*; set .*a smaller training.device_batch_size"
    ):
        check_finetuning(base, huge)
    check_finetuning(base, TrainingSettings())


def test_what_processes_cannot_share_is_refused_before_anything_runs(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match="a batch of 128 cannot be shared by 3 processes"):
        check_finetuning(base, TrainingSettings(processes=3))
    images = saved("gemma3", tmp_path / "images").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match=r"is more than a language model.*training.processes = 1"):
        check_finetuning(images, TrainingSettings(processes=2))
