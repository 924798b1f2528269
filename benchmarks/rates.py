"""Compare the engine with the machine's peak: operations per second, and bytes per second while decoding."""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.measure import copy_rate, measured, product_rate
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.model.transformers_backend import TransformersBackend

GOALS = {"positions": 0.35, "losses": 0.45}
"""Shares of the rate of a plain matrix product."""
BANDWIDTH_GOAL = 0.5
"""Share of the rate of a plain copy at which decoding reads weights, keys and values."""


def print_rates(engine: Engine, task: Any, chosen: Sequence[str]) -> None:
    """Print the rates of positions, samples and losses beside their goals.

    Only matrix products count as operations, not attention.
    """
    model = engine.language_model.model
    rows, width = transformers_backend(engine).budget.tokens, int(model.config.hidden_size)
    peak = product_rate(engine.language_model.device, model.dtype, rows, width)
    print(f"a plain matrix product [{rows}, {width}] x [{width}, {4 * width}]: {peak / 1e9:.0f} GFLOP/s")
    requests = [ProposalRequest(text, f"text {number}") for number, text in enumerate(chosen)]
    _proposals(engine, task, requests, peak)
    _losses(engine, _calls(chosen), peak)


def _proposals(engine: Engine, task: Any, requests: list[ProposalRequest], peak: float) -> None:
    """Measure positions alone, and samples as the difference to positions."""

    def cost_of(m: int) -> tuple[float, dict[str, int]]:
        before = engine.counts.as_dict()
        with measured(engine.language_model.device) as cost:
            engine.propose(task.tool.prompt, requests, tau_s=0.0, k=task.k, m=m, sampling=task.sampling)
        return cost.seconds, {kind: count - before[kind] for kind, count in engine.counts.as_dict().items()}

    cost_of(0)
    positions, counts = cost_of(0)
    read = sum(engine.language_model.count([request.text for request in requests]))
    _show("positions", counts["positions"], positions, engine, peak, read)
    both, counts = cost_of(task.m)
    _show("samples", counts["samples"], both - positions, engine, peak, counts["samples"])
    _bandwidth(engine, _read(engine, task, counts["decoding_steps"], read), both - positions)


def _calls(chosen: Sequence[str]) -> list[LossRequest]:
    """Return 25 distinct calls for every text, five at each of five positions."""
    pairs = [(i, j) for i in range(5) for j in range(5)]
    return [LossRequest(text, 20 * i, "Calculator", f"{i} + {j}", str(i + j)) for text in chosen for i, j in pairs]


def _losses(engine: Engine, calls: list[LossRequest], peak: float) -> None:
    before = engine.counts.as_dict()
    with measured(engine.language_model.device) as cost:
        engine.losses(calls)
    after = engine.counts.as_dict()
    tokens = sum(after[kind] - before[kind] for kind in ("loss_empty", "loss_call", "loss_result"))
    _show("losses", tokens, cost.seconds, engine, peak, rows=5 * 2 * len(calls))


def _show(name: str, tokens: int, seconds: float, engine: Engine, peak: float, rows: int) -> None:
    head = engine.language_model.model.get_output_embeddings().weight
    body = transformers_backend(engine).backbone.body
    matrices = sum(p.numel() for p in body.parameters() if p.dim() == 2) - _embeddings(body)
    rate = 2 * (tokens * matrices + rows * head.numel()) / seconds
    print(
        f"{name:10} {tokens / seconds:9.0f} tokens/s {rate / 1e9:9.1f} GFLOP/s, {rate / peak:4.0%} of the plain product"
        + (f" (goal {GOALS[name]:.0%})" if name in GOALS else "")
    )


def transformers_backend(engine: Engine) -> TransformersBackend:
    """Return the engine's backend. Raises TypeError for another kind."""
    if not isinstance(engine.backend, TransformersBackend):
        raise TypeError(f"{type(engine.backend).__name__} cannot be measured: it has no passes under a token budget")
    return engine.backend


def _embeddings(body: torch.nn.Module) -> int:
    tables = [m for m in body.modules() if isinstance(m, torch.nn.Embedding)]
    return sum(table.weight.numel() for table in tables)


def _read(engine: Engine, task: Any, steps: int, tokens: int) -> int:
    """Estimate the bytes read by decoding steps.

    The weights and the head's keys and values are read once per step. The keys and values of a text (twice its tokens)
    are read once per token of its samples, which hardly ever end early with random weights.
    """
    weights: int = sum(p.numel() * p.element_size() for p in engine.language_model.model.parameters())
    config = engine.language_model.model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = config.hidden_size // config.num_attention_heads * heads
    key_bytes: int = 2 * config.num_hidden_layers * width * engine.language_model.model.dtype.itemsize
    head = len(engine.encoding.head(task.tool.prompt))
    own_steps: int = task.sampling.max_call_tokens
    return steps * (weights + head * key_bytes) + 2 * tokens * own_steps * key_bytes


def _bandwidth(engine: Engine, read: int, seconds: float) -> None:
    rate, peak = read / seconds, copy_rate(engine.language_model.device)
    shares = f"{rate / peak:.0%} of a plain copy (goal {BANDWIDTH_GOAL:.0%})"
    print(f"{'':10} weights, keys and values read at {rate / 1e9:.1f} GB/s, {shares}")
