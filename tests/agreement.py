"""Compare what two engines compute: proposals, losses, perplexity and answers."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.decoded import generate
from tests.tiny_models import PROMPT, TEXTS
from toolformer_dag.decoding.generation import DecodedCall
from toolformer_dag.evaluation.language_modeling import compute_perplexity
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.settings.model_settings import SamplingSettings
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import Tool


def assert_same_numbers(engines: Sequence[Engine], texts: Sequence[str] = TEXTS, answered: int = 8) -> None:
    """Compare proposals, losses and perplexity of the texts, and the answers to so many prompts."""
    requests = [ProposalRequest(text, str(number)) for number, text in enumerate([*texts, *texts])]
    sampling = SamplingSettings(max_call_tokens=12)
    ours, theirs = (engine.propose(PROMPT, requests, tau_s=0.0, k=4, m=3, sampling=sampling) for engine in engines)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=1e-4, atol=1e-7)
        assert one.samples == other.samples
    known = [
        ProposalRequest(one.text, one.digest, probabilities=found.probabilities, stored_samples=frozenset({(0, 0)}))
        for one, found in zip(requests, ours, strict=True)
    ]
    ours, theirs = (engine.propose(PROMPT, known, tau_s=0.0, k=4, m=5, sampling=sampling) for engine in engines)
    assert [one.samples for one in ours] == [one.samples for one in theirs]  # p is stored, samples are missing
    calls = [LossRequest(text, at, "Calculator", "1 + 2", "3") for text in texts for at in (1, 3, 5)]
    ours, theirs = (engine.losses(calls) for engine in engines)
    assert [one.delta >= 0 for one in ours] == [one.delta >= 0 for one in theirs]  # the calls that are kept
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss_empty", "loss_call", "loss_result"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-4)
    one, other = (compute_perplexity(engine.language_model, texts) for engine in engines)
    assert (one.token_count, one.total_nats) == (other.token_count, pytest.approx(other.total_nats, rel=1e-5))
    prompts = [f"Ada had {at} apples and so" for at in range(answered)]
    for k in (1, 10, 40):
        one, other = (answers(engine, prompts, k) for engine in engines)
        assert one == other


def answers(
    engine: Engine, prompts: Sequence[str], k: int, tool: Tool | None = None, max_call_tokens: int = 10
) -> list[tuple[str, tuple[DecodedCall, ...]]]:
    tool = tool or load_tool("calculator", {})
    limits = {"max_new_tokens": 20, "max_call_tokens": max_call_tokens, "max_call_positions": 2}
    return [
        (one.text, one.calls) for one in generate(engine.language_model, prompts, {tool.name: tool}, top_k=k, **limits)
    ]
