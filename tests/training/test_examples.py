"""Texts to sequences, sequences to batches: nothing is lost, nothing depends on how the work is spread."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.sequences import batch_order, examples, packed, training_steps, windows
from toolformer_dag.training.trainer import device_batch
from toolformer_dag.training.training_report import TrainingError


@given(st.lists(st.integers(), min_size=2, max_size=60), st.integers(2, 20))
def test_windows_predict_every_token_once(ids: list[int], length: int) -> None:
    found = list(windows(ids, length))
    assert all(2 <= len(window) <= length for window in found)
    assert [token for window in found for token in window[1:]] == ids[1:]
    assert found[0][0] == ids[0]
    assert all(after[0] == before[-1] for before, after in pairwise(found))


@given(st.lists(st.lists(st.integers(), min_size=2, max_size=16), max_size=40))
def test_packing_loses_nothing_and_fills_sequences(parts: list[list[int]]) -> None:
    sequences = packed(parts, 16)
    assert sorted(part for sequence in sequences for part in sequence) == sorted(parts)
    filled = [sum(map(len, sequence)) for sequence in sequences]
    assert all(length <= 16 for length in filled)
    assert sum(length <= 8 for length in filled) <= 1  # two that are half empty would have been one


@pytest.mark.parametrize("bos", [True, False])
def test_a_text_is_a_sequence_with_its_ends(tiny_model: Callable[..., LanguageModel], bos: bool) -> None:
    encoding = tiny_model("gptj", bos=bos).encoding
    text = "Ada had 17 apples."
    plain = encoding.tokenizer(text, add_special_tokens=False).input_ids
    made = examples(encoding, [text, "", text * 10], 64)
    assert made.sequences[0] == ([0] * bos + plain + [0],)
    assert (made.texts, made.split, made.empty) == (3, 1, 1)
    assert made.tokens == sum(len(part) for parts in made.sequences for part in parts)


def test_the_string_of_a_special_token_ends_no_example(tiny_model: Callable[..., LanguageModel]) -> None:
    encoding = tiny_model("gptj").encoding
    [[sequence]] = examples(encoding, ["Ada wrote <end> and went on."], 64).sequences
    assert sequence.index(0) == len(sequence) - 1
    assert encoding.tokenizer.decode(sequence[:-1]) == "Ada wrote <end> and went on."


@given(st.lists(st.integers(1, 99), min_size=1, max_size=80), st.integers(1, 16), st.integers(1, 4), st.integers(0, 9))
def test_every_sequence_is_in_every_epoch(lengths: list[int], batch_size: int, epochs: int, seed: int) -> None:
    steps = training_steps(len(lengths), TrainingSettings(batch_size=batch_size, max_steps=10_000, epochs=epochs))
    order = batch_order(lengths, batch_size, steps, seed)
    assert len(order) == steps * batch_size
    counts = Counter(order)
    assert set(counts) == set(range(len(lengths)))
    assert min(counts.values()) >= epochs
    assert order == batch_order(lengths, batch_size, steps, seed)


def test_batches_hold_like_lengths_in_shuffled_order() -> None:
    lengths = [(7 * at) % 101 for at in range(400)]
    order = batch_order(lengths, 8, 50, 0)
    batches = [[lengths[at] for at in order[start : start + 8]] for start in range(0, 400, 8)]
    assert max(max(batch) - min(batch) for batch in batches) <= 3
    means = [sum(batch) for batch in batches]
    assert means != sorted(means)
    assert order != batch_order(lengths, 8, 50, 1)


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
    assert training_steps(texts, settings.over(texts)) == steps


def test_only_checkpoints_that_passed_over_their_texts_more_often_are_other_ones() -> None:
    settings = TrainingSettings(batch_size=32, max_steps=2000)
    assert settings.over(6400).determining() == settings.determining()
    assert settings.over(6399).determining() == {**settings.determining(), "passes": 10}


def test_a_batch_is_shared_exactly() -> None:
    settings = TrainingSettings(batch_size=24, device_batch_size=7)
    assert device_batch(settings, 1) == 6
    assert device_batch(settings, 8) == 3
    with pytest.raises(TrainingError, match="5 processes"):
        device_batch(settings, 5)
