"""Batches of tokens under a budget, what happens when memory runs out, and models whose tokens are tried first."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.tiny_models import CORPUS
from tests.tokenizers import byte_level, metaspace
from toolformer_dag.model import sharing
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel, wrap_language_model
from toolformer_dag.model.memory import TokenBudget, is_out_of_memory_error
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.model.trials import ORDINARY_TEXT, TRIAL_END_TOKEN_COUNT, TRIAL_TOKEN_COUNT, list_trial_token_ids
from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.model_settings import SamplingSettings


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200), st.integers(1, 3))
def test_batches_hold_everything_once_and_stay_under_the_budget(lengths: list[int], tokens: int, share: int) -> None:
    seen: list[list[int]] = []

    def work(batch: list[int]) -> list[int]:
        seen.append(batch)
        return batch

    assert TokenBudget(tokens).run_in_batches(lengths, work, settings_to_lower="k", budgets_per_batch=share) == list(
        range(len(lengths))
    )
    assert sorted(index for batch in seen for index in batch) == list(range(len(lengths)))
    assert [lengths[i] for batch in seen for i in batch] == sorted(lengths)
    for batch in seen:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens * share


def test_a_real_allocation_that_fails_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory_error(caught.value)
    assert not is_out_of_memory_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_other_errors_are_not_swallowed() -> None:
    def work(batch: list[int]) -> list[int]:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        TokenBudget(100).run_in_batches([1, 2], work, settings_to_lower="k")


class Narrow(torch.nn.Module):
    """A layer of the model that has no memory for more than `limit` tokens at a time."""

    def __init__(self, layer: torch.nn.Module, limit: int) -> None:
        super().__init__()
        self.layer = layer
        self.limit = limit

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

    expected = rows(roomy)
    found = rows(narrow)
    assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-5)
    assert narrow.backend.token_budget.max_tokens <= 128 < roomy.backend.token_budget.max_tokens
    assert narrow.token_counts.passes > roomy.token_counts.passes


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
    engine = cases("gpt2_bytes").engine(64)
    text = "a b c d e f g h " * 6
    rows: list[int] = []
    model = engine.language_model.model
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[0]))
    asked = {"tau_s": 0, "k": 1, "m": 1, "sampling": SamplingSettings(max_call_tokens=6)}
    try:
        propose = engine.propose(prompt, [ProposalRequest(text, "d")], **asked)
    finally:
        hook.remove()
    assert len(propose[0].probabilities) > 64 >= max(rows)


CONTROL = [f"<|control_{number}|>" for number in range(16)]
READ = [*CORPUS, ORDINARY_TEXT]
UNUSED = [f"<unused{number}>" for number in range(99)]
KINDS = {
    "SmolLM2": lambda: byte_level(READ, 400, control=CONTROL),
    "Llama 2": lambda: metaspace(READ, 400, "prepended"),
    "Gemma": lambda: metaspace(READ, 500, "bos", control=UNUSED),
}
"""Kinds whose vocabularies begin with control tokens, bytes, and unused tokens."""
HUGE = {torch.float32: 1e7, torch.bfloat16: 200.0}
"""What control tokens add to the residual stream; rounding it changes as much as other tokens are."""


def chaotic(tokenizer: PreTrainedTokenizerFast, tokens: Iterable[int], dtype: torch.dtype) -> LanguageModel:
    """Make a model in which `tokens` are huge, and the first attention takes this off again: rounding remains."""
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes))
    first = model.transformer.h[0].attn
    huge = HUGE[dtype]
    with torch.no_grad():
        for table in (model.transformer.wte.weight, model.transformer.wpe.weight):
            table[:, :2] = 0
        model.transformer.wte.weight[sorted(tokens), :2] = torch.tensor([huge, -huge])  # 4 and -4 after the norm
        first.c_attn.weight[:, 64] = torch.tensor([0.5, -0.5, *[0.0] * 30])
        first.c_proj.weight[0] = torch.tensor([-huge / 4, huge / 4, *[0.0] * 30])
    return wrap_language_model("chaotic", model.to(dtype), tokenizer)


def low_tokens(kind: str, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the tokens that such a vocabulary begins with, without the BOS that texts begin with."""
    count = {"SmolLM2": 17, "Llama 2": 3 + 256, "Gemma": 3 + len(UNUSED)}[kind]
    used = {token for text in READ for token in tokenizer(text).input_ids}
    return set(range(count)) - used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_that_a_model_cannot_read_leave_it_on_the_fast_path(kind: str, dtype: torch.dtype) -> None:
    tokenizer = KINDS[kind]()
    low = low_tokens(kind, tokenizer)
    assert {3, 5, 7, 9} <= low
    assert TransformersBackend(chaotic(tokenizer, low, dtype)).sharing.method == sharing.SHARED_KEYS


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_runs_an_ordinary_text_as_texts_begin(kind: str) -> None:
    tokenizer = KINDS[kind]()
    encoding = Encoding(tokenizer)
    tokens = list_trial_token_ids(encoding)
    behind = tokens[len(encoding.bos_ids) :]
    assert (
        len(tokens) == TRIAL_TOKEN_COUNT + TRIAL_END_TOKEN_COUNT and tokens[: len(encoding.bos_ids)] == encoding.bos_ids
    )
    assert ORDINARY_TEXT.startswith(tokenizer.decode(behind).strip()) and not low_tokens(kind, tokenizer) & {*behind}
    assert tokens[TRIAL_END_TOKEN_COUNT:TRIAL_TOKEN_COUNT] != tokens[TRIAL_TOKEN_COUNT:]


def test_a_vocabulary_without_the_words_of_the_text_is_tried_with_its_own() -> None:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", *"[Q(1)] Za"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]{2,}|."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>")
    encoding = Encoding(tokenizer)
    tokens = list_trial_token_ids(encoding)
    assert len(tokens) == TRIAL_TOKEN_COUNT + TRIAL_END_TOKEN_COUNT and not {0, 1} & {*tokens}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), n_embd=8, n_layer=1, n_head=1))
    assert TransformersBackend(wrap_language_model("few", model, tokenizer)).sharing.method == sharing.SHARED_KEYS
