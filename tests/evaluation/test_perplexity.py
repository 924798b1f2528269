"""Perplexity against a token-by-token reference."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolformer_dag.evaluation.language_modeling import MAX_WINDOW_TOKENS, compute_perplexity
from toolformer_dag.model.backbone import MAX_LOGIT_ROWS
from toolformer_dag.model.loading import LanguageModel

TEXTS = ["Ada had 17 apples.", "The river [1] of Oslo is [QA] long.", "Today " * 30, "", "x"]


def reference(model: LanguageModel, texts: list[str], disabled: bool) -> tuple[float, int, int]:
    start = model.tokenizer(" [", add_special_tokens=False).input_ids
    nats = 0.0
    tokens = 0
    left_out = 0
    for text in texts:
        ids = model.tokenizer(text).input_ids
        length = model.context_length
        for at in range(1, len(ids)):
            begin = (at - 1) // (length - 1) * (length - 1)  # windows share one token
            with torch.no_grad():
                scores = model.model(torch.tensor([ids[begin:at]])).logits[0, -1].double()
            if disabled and (len(start) == 1 or ids[begin:at][-len(start) + 1 :] == start[:-1]):
                scores[start[-1]] = -math.inf
            loss = -float(scores.log_softmax(-1)[ids[at]])
            if math.isinf(loss):
                left_out += 1
            else:
                nats = nats + loss
                tokens = tokens + 1
    return nats, tokens, left_out


@pytest.mark.parametrize("disabled", [True, False])
@pytest.mark.parametrize("one_token_start", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_agrees_with_the_reference(
    tiny_model: Callable[..., LanguageModel], disabled: bool, one_token_start: bool, bos: bool
) -> None:
    model = tiny_model("gpt2", one_token_start=one_token_start, bos=bos, positions=24)
    found = compute_perplexity(model, TEXTS, disable_calls=disabled)
    nats, tokens, left_out = reference(model, TEXTS, disabled)
    assert found.token_count == tokens
    assert found.total_nats == pytest.approx(nats, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert left_out == (2 if disabled else 0)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / sum(map(len, TEXTS)), rel=1e-5)


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest float32 tensor that is made within the block."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.elements = max(self.elements, made.numel())
        return made


def test_neither_a_pass_nor_its_float32_logits_grow_with_the_context(tiny_model: Callable[..., LanguageModel]) -> None:
    model = tiny_model("gpt2", positions=2 * MAX_WINDOW_TOKENS)
    model.model.to(torch.bfloat16)
    passes: list[int] = []
    model.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: passes.append(given[0].numel()))
    compute_perplexity(model, ["a text"])  # tries the model: what it computes then is not counted
    with LargestFloat32() as largest:
        found = compute_perplexity(model, ["17 apples " * 1000, *["so there were 42 apples " * 30] * 20])
    assert found.token_count > 2 * MAX_WINDOW_TOKENS and max(passes) == MAX_WINDOW_TOKENS - 1
    assert 0 < largest.elements <= MAX_LOGIT_ROWS * model.model.config.vocab_size


def test_nothing_to_predict_is_an_error(tiny_model: Callable[..., LanguageModel]) -> None:
    with pytest.raises(ValueError, match="nothing to predict"):
        compute_perplexity(tiny_model("gpt2"), [""])


def test_the_interval_is_that_of_a_ratio_over_texts(tiny_model: Callable[..., LanguageModel]) -> None:
    model = tiny_model("gpt2", bos=True)
    texts = ["Ada had 17 apples.", "Today " * 9, "The river of Oslo is long."]
    found = compute_perplexity(model, texts)
    parts = [compute_perplexity(model, [text]) for text in texts]
    mean = sum(part.total_nats for part in parts) / sum(part.token_count for part in parts)
    squares = sum((part.total_nats - mean * part.token_count) ** 2 for part in parts)
    error = math.sqrt(3 / 2 * squares) / found.token_count
    low, high = found.confidence_interval
    assert (low, high) == (
        pytest.approx(math.exp(mean - 1.96 * error), rel=1e-3),
        pytest.approx(math.exp(mean + 1.96 * error), rel=1e-3),
    )
    assert parts[0].confidence_interval == (None, None)
