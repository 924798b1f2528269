"""`python -m benchmarks.gpu`: what the engine reaches on the device at hand, with random weights.

On a GPU the shape of GPT-J-6B, elsewhere a small one of the same architecture; bfloat16 on both. Whole annotations
first (documents and tokens per second), then positions, samples and losses apart: operations per second beside a plain
matrix product of the same dtype, and bytes read while decoding beside a plain copy, all in this run. On a GPU also how
often the host waits for the device. Seconds are the clock's on a GPU, the process's elsewhere.
"""

import argparse
import warnings
from collections.abc import Sequence

import torch

from benchmarks.annotate import Outcome, Task, annotate
from benchmarks.corpus import texts
from benchmarks.models import random_model
from benchmarks.rates import print_rates
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.requests import Sampling
from toolformer_dag.tools.registry import load_tool

SHAPES = {"cuda": "gptj-6b", "cpu": "gptj-small"}
TEXTS = {"cuda": 400, "cpu": 8}


def show(outcome: Outcome, count: int) -> None:
    """Documents and tokens per second, and memory."""
    seconds = outcome.cost.seconds
    tokens = sum(each for kind, each in outcome.counts.items() if kind not in ("passes", "decoding_steps"))
    print(
        f"{count} texts in {seconds:.1f} s: {count / seconds:.2f} texts/s, {tokens / seconds:.0f} tokens/s, "
        f"{tokens / count:.0f} tokens per text, {outcome.counts['passes']} passes, "
        f"{outcome.counts['decoding_steps']} decoding steps, at most {outcome.cost.memory:.0f} MB"
    )


def show_waits(language_model: LanguageModel, task: Task, chosen: Sequence[str]) -> None:
    """Counts what torch reports as synchronising; the engine needs one for each pass and decoding step."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line for whole annotations and a few for their parts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=TEXTS[device.type], help="number of texts")
    parser.add_argument("--shape", default=SHAPES[device.type], help="a name of benchmarks.models.SHAPES")
    options = parser.parse_args(arguments)
    tool = load_tool("calculator", {})
    language_model = random_model(options.shape, tool.prompt, device.type, torch.bfloat16)
    task = Task(tool, 5, 5, 0.1, Sampling(max_call_tokens=24), 2, False)
    chosen = texts(options.texts)
    engine = Engine(language_model)
    print(f"{options.shape} bfloat16 on {device}, {engine.runtime.budget.tokens} tokens a pass")
    annotate(Engine(language_model), task, chosen[:2], device)
    show(annotate(engine, task, chosen, device), len(chosen))
    print_rates(engine, task, chosen)
    if device.type == "cuda":
        show_waits(language_model, task, chosen[:20])


if __name__ == "__main__":
    main()
