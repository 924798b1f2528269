"""Measure the engine on the available device with random weights: `python -m benchmarks.gpu`.

The model has the shape of GPT-J-6B on a GPU, else a small shape of the same architecture, in bfloat16. Prints:

- documents and tokens per second of whole annotations;
- operations per second of positions, samples and losses, beside a plain matrix product of the same dtype;
- bytes read while decoding, beside a plain copy;
- the share of a run in which the device works (on a CPU: in which operators of torch run);
- a decoding step of one row beside reading the weights once: a CUDA graph saves at most the difference per step;
- on a GPU, how often the host waits for the device.

Goals stand beside the figures: 45 % of the plain product for losses, 35 % for positions, half the bytes per second of a
plain copy for samples, a device that works 90 % of the time. They have not been measured on a GPU yet.

Seconds are wall-clock on a GPU, else processor time.
"""

import argparse
import time
import warnings
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.annotate import AnnotationTask, Outcome, annotate
from benchmarks.measure import copy_rate, measured
from benchmarks.models import random_model, texts
from benchmarks.rates import print_rates, transformers_backend
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.heads import CachedHead
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.sections import SamplingSettings
from toolformer_dag.tools.registry import load_tool

SHAPES = {"cuda": "gptj-6b", "cpu": "gptj-small"}
TEXTS = {"cuda": 400, "cpu": 8}
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
    backbone, device = transformers_backend(Engine(language_model)).backbone, language_model.device
    behind = CachedHead(backbone, range(1, 400)).texts(slots=1, width=8)
    behind.features([0], [range(1, 9)], first=0)
    branches = behind.branches(capacity=1, room=STEPS + 1)
    branches.admit([0], [8])
    token = torch.ones(1, dtype=torch.long, device=device)
    branches.step(token)
    with measured(device) as cost:
        for _ in range(STEPS):
            branches.step(token)
    read = sum(weight.nbytes for weight in backbone.body.parameters()) / copy_rate(device)
    each = cost.seconds / STEPS
    print(f"a decoding step of one row takes {1e3 * each:.1f} ms, reading the weights once {1e3 * read:.1f} ms")


def show_busy(language_model: LanguageModel, task: AnnotationTask, chosen: Sequence[str]) -> None:
    """Print the share of an annotation in which the device runs a kernel, or a CPU an operator of torch."""
    device = language_model.device
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    engine = Engine(language_model)
    with profile(activities=[kind]) as profiled:
        began = time.perf_counter()
        annotate(engine, task, chosen, device)
        seconds = time.perf_counter() - began
    events = profiled.key_averages()
    busy = sum(e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total for e in events) / 1e6
    print(f"the device worked {busy / seconds:.0%} of {seconds:.1f} s (goal {BUSY_GOAL:.0%})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rates of whole annotations and of their parts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=TEXTS[device.type], help="number of texts")
    parser.add_argument("--shape", default=SHAPES[device.type], help="a name of benchmarks.models.SHAPES")
    options = parser.parse_args(arguments)
    tool = load_tool("calculator", {})
    language_model = random_model(options.shape, tool.prompt, device.type, torch.bfloat16)
    task = AnnotationTask(tool, 5, 5, 0.1, SamplingSettings(max_call_tokens=24), 2)
    chosen = texts(options.texts)
    engine = Engine(language_model)
    print(f"{options.shape} bfloat16 on {device}, {transformers_backend(engine).budget.tokens} tokens a pass")
    annotate(Engine(language_model), task, chosen[:2], device)
    show(annotate(engine, task, chosen, device), len(chosen))
    print_rates(engine, task, chosen)
    show_step(language_model)
    if device.type == "cuda":
        show_waits(language_model, task, chosen[:20])
    show_busy(language_model, task, chosen[:100])


if __name__ == "__main__":
    main()
