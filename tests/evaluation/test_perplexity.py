"""Perplexity against a token-by-token reference."""

import math
from collections.abc import Callable

import pytest
import torch

from toolformer_dag.evaluation.perplexity import perplexity
from toolformer_dag.language_model.load import LanguageModel

TEXTS = ["Ada had 17 apples.", "The river [1] of Oslo is [QA] long.", "Today " * 30, "", "x"]


def reference(model: LanguageModel, texts: list[str], disabled: bool) -> tuple[float, int, int]:
    start = model.tokenizer(" [", add_special_tokens=False).input_ids
    nats, tokens, left_out = 0.0, 0, 0
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
                nats, tokens = nats + loss, tokens + 1
    return nats, tokens, left_out


@pytest.mark.parametrize("disabled", [True, False])
@pytest.mark.parametrize("one_token_start", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_agrees_with_the_reference(
    tiny_model: Callable[..., LanguageModel], disabled: bool, one_token_start: bool, bos: bool
) -> None:
    model = tiny_model("gpt2", one_token_start=one_token_start, bos=bos, positions=24)
    found = perplexity(model, TEXTS, disabled=disabled)
    nats, tokens, left_out = reference(model, TEXTS, disabled)
    assert (found.tokens, found.left_out) == (tokens, left_out)
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert left_out == (2 if disabled else 0)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / sum(map(len, TEXTS)), rel=1e-5)


def test_disabling_gives_the_probability_of_a_call_to_the_rest(tiny_model: Callable[..., LanguageModel]) -> None:
    model = tiny_model("gptj", bos=True)
    assert perplexity(model, TEXTS[:1]).perplexity < perplexity(model, TEXTS[:1], disabled=False).perplexity


def test_nothing_to_predict_is_an_error(tiny_model: Callable[..., LanguageModel]) -> None:
    with pytest.raises(ValueError, match="nothing to predict"):
        perplexity(tiny_model("gpt2"), [""])
