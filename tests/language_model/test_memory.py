"""Batches under a budget of tokens, and what happens when memory runs out."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import wrap_language_model
from toolformer_dag.model.memory import TokenBudget, is_out_of_memory
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.model_settings import SamplingSettings


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200), st.integers(1, 3))
def test_batches_hold_everything_once_and_stay_under_the_budget(lengths: list[int], tokens: int, share: int) -> None:
    seen: list[list[int]] = []

    def work(batch: list[int]) -> list[int]:
        seen.append(batch)
        return batch

    assert TokenBudget(tokens).run(lengths, work, lower="k", share=share) == list(range(len(lengths)))
    assert sorted(index for batch in seen for index in batch) == list(range(len(lengths)))
    assert [lengths[i] for batch in seen for i in batch] == sorted(lengths)
    for batch in seen:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens * share


def test_a_real_allocation_that_fails_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_other_errors_are_not_swallowed() -> None:
    def work(batch: list[int]) -> list[int]:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        TokenBudget(100).run([1, 2], work, lower="k")


class Narrow(torch.nn.Module):
    """A layer of the model that has no memory for more than `limit` tokens at a time."""

    def __init__(self, layer: torch.nn.Module, limit: int) -> None:
        super().__init__()
        self.layer, self.limit = layer, limit

    def forward(self, hidden: torch.Tensor) -> Any:
        if hidden.shape[:-1].numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(hidden)


def test_the_engine_gives_the_same_rows_on_a_device_with_little_memory(
    gpt2: Any, prompt: str, texts: tuple[str, ...]
) -> None:
    model = copy.deepcopy(gpt2.language_model.model)
    block = model.transformer.h[0]
    block.mlp = Narrow(block.mlp, 128)
    narrow = Engine(wrap_language_model("narrow", model, gpt2.language_model.tokenizer), token_budget=4096)
    roomy = gpt2.engine(4096)
    proposing = [ProposalRequest(text, "d") for text in texts]
    judging = [LossRequest(texts[0], i, "Add", "1", str(i)) for i in range(16)]

    def rows(engine: Engine) -> tuple[Any, Any]:
        proposals = engine.propose(prompt, proposing, tau_s=0, k=2, m=2, sampling=SamplingSettings(max_call_tokens=4))
        return [p.samples for p in proposals], [each.delta for each in engine.losses(judging)]

    expected, found = rows(roomy), rows(narrow)
    assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-5)
    assert narrow.backend.budget.tokens <= 128 < roomy.backend.budget.tokens
    assert narrow.counts.passes > roomy.counts.passes


@pytest.mark.parametrize("name", ["gemma2", "bloom", "recurrent_gemma"])
def test_passes_keep_to_the_budget_and_logits_are_made_where_they_are_read(
    cases: Any, prompt: str, texts: tuple[str, ...], name: str
) -> None:
    engine = cases(name).engine(600)
    model = engine.language_model.model
    passes: list[torch.Size] = []
    read: list[torch.Size] = []
    hooks = [
        model.get_input_embeddings().register_forward_pre_hook(lambda _, given: passes.append(given[0].shape)),
        model.get_output_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0].shape[:-1])),
    ]
    try:
        requests = [ProposalRequest(text, "d") for text in texts]
        engine.propose(prompt, requests, tau_s=0, k=5, m=4, sampling=SamplingSettings(max_call_tokens=4))
    finally:
        for hook in hooks:
            hook.remove()
    assert all(rows == 1 or rows * columns <= 600 for rows, columns in passes)
    assert max(rows for rows, _ in passes) > 1
    assert sum(map(torch.Size.numel, read)) < sum(map(torch.Size.numel, passes))


def test_a_text_that_does_not_fit_into_memory_names_the_settings_that_count(
    gpt2: Any, prompt: str, texts: tuple[str, ...]
) -> None:
    model = copy.deepcopy(gpt2.language_model.model)
    engine = Engine(wrap_language_model("narrow", model, gpt2.language_model.tokenizer))
    asked = {"tau_s": 0, "k": 2, "m": 2, "sampling": SamplingSettings(max_call_tokens=4)}
    engine.propose(prompt, [ProposalRequest(texts[3], "d")], **asked)
    block = model.transformer.h[0]
    block.mlp = Narrow(block.mlp, 16)
    with pytest.raises(ModelError, match="lower segment_tokens, k, m or max_call_tokens, or use a smaller model"):
        engine.propose(prompt, [ProposalRequest(texts[0], "d")], **asked)


def test_no_more_branches_are_open_than_memory_holds(cases: Any, prompt: str) -> None:
    engine, text = cases("gpt2_bytes").engine(64), "a b c d e f g h " * 6
    rows: list[int] = []
    model = engine.language_model.model
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[0]))
    asked = {"tau_s": 0, "k": 1, "m": 1, "sampling": SamplingSettings(max_call_tokens=6)}
    try:
        propose = engine.propose(prompt, [ProposalRequest(text, "d")], **asked)
    finally:
        hook.remove()
    assert len(propose[0].probabilities) > 64 >= max(rows)
