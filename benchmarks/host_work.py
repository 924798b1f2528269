"""Estimate how long a GPU would wait for the host at GPT-J's size: `python -m benchmarks.host_work`.

A thin model annotates texts on a CPU. What is not spent in its passes and in drawing is the host's work: tokenizing,
arranging rows, building queries, making results. Beside it stands what a device of `--teraflops` takes for the same
tokens of GPT-J at 45 % of its peak, by count of the matrices alone. Writing rows is not in it.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPTJConfig

from benchmarks.models import make_tokenizer, texts
from toolformer_dag.model import proposing
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import wrap_language_model
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.settings.sections import SamplingSettings
from toolformer_dag.tools.registry import load_tool

PARAMETERS = 6.05e9
SHARE = 0.45
TEXT_COPIES = 4
"""Texts of the benchmarks in one of about 640 tokens, near the 700 of the profile `gptj`."""


@contextmanager
def timed(owner: Any, names: Sequence[str], spent: list[float]) -> Iterator[None]:
    """Add the seconds in these functions of `owner` to `spent`."""
    before = {name: getattr(owner, name) for name in names}

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return function(*given, **options)
            finally:
                spent[0] += time.process_time() - began

        return call

    for name, function in before.items():
        setattr(owner, name, clocked(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


def show(name: str, work: Callable[[], object], engine: Engine, count: int, flops: float) -> None:
    """Print the host's seconds per text beside those of the device."""
    before, inside = sum(engine.counts.as_dict().values()), [0.0]
    with timed(Backbone, ("features", "logits"), inside), timed(proposing, ("draw",), inside):
        began = time.process_time()
        work()
        host = time.process_time() - began - inside[0]
    tokens = sum(engine.counts.as_dict().values()) - before
    device = 2 * PARAMETERS * tokens / flops
    print(
        f"{name:10} {tokens / count:8.0f} tokens per text, host {1e3 * host / count:6.2f} ms, device "
        f"{1e3 * device / count:7.1f} ms: it waits for at most {host / (host + device):.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for proposing and one for losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a pass")
    parser.add_argument("--teraflops", type=float, default=989.0, help="peak in bfloat16; an H100 has 989")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tool = load_tool("calculator", {})
    config = GPTJConfig(n_embd=32, n_layer=2, n_head=2, rotary_dim=8, vocab_size=2048, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    language_model = wrap_language_model("thin", model, make_tokenizer(tool.prompt))
    engine = Engine(language_model, token_budget=options.budget)
    sums = texts(TEXT_COPIES * options.texts)
    chosen = [" ".join(sums[at : at + TEXT_COPIES]) for at in range(0, len(sums), TEXT_COPIES)]
    requests = [ProposalRequest(text, f"text {number}") for number, text in enumerate(chosen)]
    calls = [
        LossRequest(text, 100 * i, tool.name, f"{i} + {j}", str(i + j))
        for text in chosen
        for i in range(5)
        for j in range(5)
    ]
    flops = 1e12 * options.teraflops * SHARE

    def propose() -> None:
        engine.propose(tool.prompt, requests, tau_s=0.0, k=5, m=5, sampling=SamplingSettings(max_call_tokens=24))

    show("proposing", propose, engine, len(chosen), flops)
    show("losses", lambda: engine.losses(calls), engine, len(chosen), flops)


if __name__ == "__main__":
    main()
