"""Measure the engine on the available device with random weights: `python -m benchmarks.gpu`.

The model has the shape of GPT-J-6B on a GPU, else a small shape of the same architecture, in bfloat16. Prints:

- documents and tokens per second of whole annotations;
- operations per second of positions, samples and losses, beside a plain matrix product of the same dtype;
- the share of a run in which the device works (on a CPU: in which operators of torch run);
- a decoding step of one row beside reading the weights once: a CUDA graph saves at most the difference per step;
- on a GPU, how often the host waits for the device.

Goals stand beside the figures: shares of the plain product, and a device that works 90 % of the time. On an NVIDIA H200
(torch 2.11, transformers 5.19, commit 8470518, 100 texts) positions reached 64 %, samples 38 % and losses 49 %, and the
device worked 76 % of the time.

Seconds are wall-clock on a GPU, else processor time.
"""

import argparse
import warnings
from collections.abc import Sequence

import torch

from benchmarks.annotate import AnnotationTask, Outcome, annotate
from benchmarks.measure import busy_share, copy_rate, measured, product_rate, random_model, texts
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.model.shared_keys import CachedPrompt
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.settings.model_settings import SamplingSettings
from toolformer_dag.tools.registry import load_tool

SHAPES = {"cuda": "gptj-6b", "cpu": "gptj-small"}
TEXTS = {"cuda": 400, "cpu": 8}
GOALS = {"positions": 0.35, "samples": 0.5, "losses": 0.45}
"""Shares of the rate of a plain matrix product; 2,500 branches a step are bound by products, not by memory."""
BUSY_GOAL = 0.9
STEPS = 32


def show(outcome: Outcome, count: int) -> None:
    """Print documents and tokens per second, and memory."""
    seconds = outcome.cost.seconds
    tokens = sum(each for kind, each in outcome.counts.items() if kind not in ("passes", "decoding_steps"))
    print(
        f"{count} texts in {seconds:.1f} s: {count / seconds:.2f} texts/s, {tokens / seconds:.0f} tokens/s, "
        f"{tokens / count:.0f} tokens per text, {outcome.counts['passes']} passes, "
        f"{outcome.counts['decoding_steps']} decoding steps, at most {outcome.cost.memory:.0f} MB"
    )


def show_waits(language_model: LanguageModel, task: AnnotationTask, chosen: Sequence[str]) -> None:
    """Count what torch reports as synchronizing; the engine needs this twice per pass at most, once per step."""
    engine = Engine(language_model)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            outcome = annotate(engine, task, chosen, language_model.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(each.message) for each in found)
    needed = outcome.counts["passes"] + outcome.counts["decoding_steps"]
    print(f"the host waited {waits} times in {needed} passes and decoding steps")


@torch.inference_mode()
def show_step(language_model: LanguageModel) -> None:
    """Print the time of a decoding step of one row, which on a GPU is that of its launches."""
    backbone = transformers_backend(Engine(language_model)).backbone
    device = language_model.device
    behind = CachedPrompt(backbone, range(1, 400)).create_text_cache(slot_count=1, max_text_tokens=8)
    behind.run_texts([0], [range(1, 9)], first_token_index=0)
    branches = behind.create_branch_cache(max_branches=1, max_tokens=STEPS + 1)
    branches.start_branches([0], [8])
    token = torch.ones(1, dtype=torch.long, device=device)
    branches.run_next_tokens(token)
    with measured(device) as cost:
        for _ in range(STEPS):
            branches.run_next_tokens(token)
    read = sum(weight.nbytes for weight in backbone.body.parameters()) / copy_rate(device)
    each = cost.seconds / STEPS
    print(f"a decoding step of one row takes {1e3 * each:.1f} ms, reading the weights once {1e3 * read:.1f} ms")


def show_busy(language_model: LanguageModel, task: AnnotationTask, chosen: Sequence[str]) -> None:
    """Print the share of an annotation in which the device runs a kernel, or a CPU an operator of torch."""
    busy, seconds = busy_share(
        language_model.device, lambda: annotate(Engine(language_model), task, chosen, language_model.device)
    )
    print(f"the device worked {busy:.0%} of {seconds:.1f} s (goal {BUSY_GOAL:.0%})")


def print_rates(engine: Engine, task: AnnotationTask, chosen: Sequence[str]) -> None:
    """Print the rates of positions, samples and losses beside their goals.

    Only matrix products count as operations, not attention.
    """
    model = engine.language_model.model
    rows = transformers_backend(engine).token_budget.max_tokens
    width = int(model.config.hidden_size)
    peak = product_rate(engine.language_model.device, model.dtype, rows, width)
    print(f"a plain matrix product [{rows}, {width}] x [{width}, {4 * width}]: {peak / 1e9:.0f} GFLOP/s")
    requests = [ProposalRequest(text, f"text {number}") for number, text in enumerate(chosen)]
    _proposals(engine, task, requests, peak)
    _losses(engine, _calls(chosen), peak)


def _proposals(engine: Engine, task: AnnotationTask, requests: list[ProposalRequest], peak: float) -> None:
    """Measure positions alone, and samples as the difference to positions."""

    def cost_of(m: int) -> tuple[float, dict[str, int]]:
        before = engine.token_counts.as_dict()
        with measured(engine.language_model.device) as cost:
            engine.propose(task.tool.prompt, requests, tau_s=0.0, k=task.k, m=m, sampling=task.sampling)
        return cost.seconds, {kind: count - before[kind] for kind, count in engine.token_counts.as_dict().items()}

    cost_of(0)
    positions, counts = cost_of(0)
    read = sum(engine.language_model.encoding.count_tokens([request.text for request in requests]))
    _show("positions", counts["positions"], positions, engine, peak, read)
    both, counts = cost_of(task.m)
    _show("samples", counts["samples"], both - positions, engine, peak, counts["samples"])


def _calls(chosen: Sequence[str]) -> list[LossRequest]:
    """Return 25 distinct calls for every text, five at each of five positions."""
    pairs = [(i, j) for i in range(5) for j in range(5)]
    return [LossRequest(text, 20 * i, "Calculator", f"{i} + {j}", str(i + j)) for text in chosen for i, j in pairs]


def _losses(engine: Engine, calls: list[LossRequest], peak: float) -> None:
    before = engine.token_counts.as_dict()
    with measured(engine.language_model.device) as cost:
        engine.losses(calls)
    after = engine.token_counts.as_dict()
    tokens = sum(after[kind] - before[kind] for kind in ("loss_empty", "loss_call", "loss_result"))
    _show("losses", tokens, cost.seconds, engine, peak, rows=5 * 2 * len(calls))


def _show(name: str, tokens: int, seconds: float, engine: Engine, peak: float, rows: int) -> None:
    head = engine.language_model.model.get_output_embeddings().weight
    body = transformers_backend(engine).backbone.body
    matrices = sum(p.numel() for p in body.parameters() if p.dim() == 2) - _embeddings(body)
    rate = 2 * (tokens * matrices + rows * head.numel()) / seconds
    print(
        f"{name:10} {tokens / seconds:9.0f} tokens/s {rate / 1e9:9.1f} GFLOP/s, {rate / peak:4.0%} of the plain product"
        + f" (goal {GOALS[name]:.0%})"
    )


def transformers_backend(engine: Engine) -> TransformersBackend:
    """Return the engine's backend. Raises TypeError for another kind."""
    if not isinstance(engine.backend, TransformersBackend):
        raise TypeError(f"{type(engine.backend).__name__} cannot be measured: it has no passes under a token budget")
    return engine.backend


def _embeddings(body: torch.nn.Module) -> int:
    tables = [m for m in body.modules() if isinstance(m, torch.nn.Embedding)]
    return sum(table.weight.numel() for table in tables)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rates of whole annotations and of their parts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=TEXTS[device.type], help="number of texts")
    parser.add_argument("--shape", default=SHAPES[device.type], help="a name of benchmarks.measure.SHAPES")
    options = parser.parse_args(arguments)
    tool = load_tool("calculator", {})
    language_model = random_model(options.shape, tool.prompt, device.type, torch.bfloat16)
    task = AnnotationTask(tool, 5, 5, 0.1, SamplingSettings(max_call_tokens=24), 2)
    chosen = texts(options.texts)
    engine = Engine(language_model)
    print(f"{options.shape} bfloat16 on {device}, {transformers_backend(engine).token_budget.max_tokens} tokens a pass")
    annotate(Engine(language_model), task, chosen[:2], device)
    show(annotate(engine, task, chosen, device), len(chosen))
    print_rates(engine, task, chosen)
    show_step(language_model)
    if device.type == "cuda":
        show_waits(language_model, task, chosen[:20])
    show_busy(language_model, task, chosen[:100])


if __name__ == "__main__":
    main()
