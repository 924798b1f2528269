"""What may be expected in bfloat16: losses within 0.1 nats of float32 on the same weights, and the same rows twice."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import wrap_language_model
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.settings.model_settings import SamplingSettings

TOLERANCE = 0.1


@pytest.fixture(params=["gpt2", pytest.param("gptj", marks=pytest.mark.long), "llama"])
def pair(request: pytest.FixtureRequest, cases: Any) -> tuple[Engine, Engine]:
    """Engines in float32 and in bfloat16 over one model whose weights bfloat16 can hold."""
    case = cases(request.param)
    half = copy.deepcopy(case.language_model.model).to(torch.bfloat16)
    models = [copy.deepcopy(half).float(), half]
    one, other = (Engine(wrap_language_model("m", model, case.language_model.tokenizer)) for model in models)
    return one, other


def test_losses_in_bfloat16_are_near_those_in_float32(pair: tuple[Engine, Engine], texts: tuple[str, ...]) -> None:
    requests = [LossRequest(texts[0], i, "Add", "1 + 2", "3") for i in range(0, 16, 3)]
    full, half = (
        np.array([(r.loss_empty, r.loss_call, r.loss_result) for r in engine.losses(requests)]) for engine in pair
    )
    assert pair[1].backend.sharing == pair[0].backend.sharing
    assert 0 < np.abs(full - half).max() < TOLERANCE


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.4), (torch.float32, 0.001)])
def test_a_soft_cap_on_the_logits_is_never_left_out(
    cases: Any, texts: tuple[str, ...], dtype: torch.dtype, scale: float
) -> None:
    """Neither where rounding is coarse nor where the logits are so small that the cap hardly changes them."""
    case = cases("gemma2")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    heads = {"head_dim": 8, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(
        Gemma2Config(vocab_size=len(case.language_model.tokenizer), **sizes, **heads)
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    engine = Engine(wrap_language_model("capped", model.to(dtype), case.language_model.tokenizer))
    found = [losses.loss_empty for losses in engine.losses([LossRequest(texts[0], i, "Add", "1", "3") for i in (0, 9)])]
    reference = type(case.reference)(model, case.language_model.tokenizer)
    assert np.allclose(found, [reference.loss(texts[0], i, "") for i in (0, 9)], rtol=0, atol=0.02)


def test_two_runs_in_bfloat16_give_the_same_rows(
    pair: tuple[Engine, Engine], prompt: str, texts: tuple[str, ...]
) -> None:
    requests = [ProposalRequest(text, "d") for text in texts]

    def rows() -> list[Any]:
        proposals = pair[1].propose(prompt, requests, tau_s=0, k=3, m=3, sampling=SamplingSettings(max_call_tokens=8))
        return [(p.probabilities.tolist(), p.samples) for p in proposals]

    assert rows() == rows()


def test_probabilities_in_bfloat16_are_near(pair: tuple[Engine, Engine], prompt: str, texts: tuple[str, ...]) -> None:
    full, half = (
        engine.propose(prompt, [ProposalRequest(texts[0], "d")], tau_s=0, k=1, m=0, sampling=SamplingSettings())[0]
        for engine in pair
    )
    assert np.abs(np.log(full.probabilities) - np.log(half.probabilities)).max() < 5 * TOLERANCE
