"""Compare the engine with a naive implementation and with vLLM: `python -m benchmarks.annotate`.

All compute positions, samples and losses of the same model, prompt and texts in the same process. The kept calls must
be equal. Costs are seconds of a processor core, or wall-clock seconds with `--device cuda`. Reading, tools and storage
are not measured; `benchmarks.gpu` has the rates of the parts.

`--vllm OPTIONS` runs vLLM too, with `[model.vllm]` as JSON, and prints of both engines: tokens that were computed more
than once, and the share of a run in which the device worked. Counts depend on texts, calls and vLLM's `block_size`
alone, so those of a small shape with blocks of 16 are those of `llama-8b` on a GPU.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measure import SHAPES, Cost, Naive, busy_share, measured, random_model, texts
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import TORCH_DTYPES, LanguageModel, load_model
from toolformer_dag.model.requests import CallLosses, LossRequest, Proposal, ProposalRequest
from toolformer_dag.model.token_service import TokenAnswer, TokenRequest
from toolformer_dag.settings.model_settings import ModelSettings, SamplingSettings
from toolformer_dag.texts.calls import MalformedCall, parse_call
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import Tool, ToolCall

KINDS = ("prompt", "positions", "samples", "loss_empty", "loss_call", "loss_result")


@dataclass(frozen=True)
class AnnotationTask:
    """The tool and thresholds of an annotation.

    Random weights write no calls: the first `synthetic_calls` samples of a position then count as distinct calls.
    """

    tool: Tool
    k: int
    m: int
    tau_f: float
    sampling: SamplingSettings
    synthetic_calls: int


@dataclass(frozen=True)
class Outcome:
    """Kept calls as (text, position, input), their number before the filter, tokens by kind, and cost."""

    kept: frozenset[tuple[int, int, str]]
    calls: int
    counts: dict[str, int]
    cost: Cost

    @property
    def tokens(self) -> int:
        """Return the tokens that went through the model."""
        return sum(self.counts[kind] for kind in KINDS)


def annotate(annotator: Any, task: AnnotationTask, chosen: Sequence[str], device: torch.device) -> Outcome:
    """Sample, execute and score calls for the texts."""
    with measured(device) as cost:
        requests = [ProposalRequest(text, f"text {number}") for number, text in enumerate(chosen)]
        proposals = annotator.propose(task.tool.prompt, requests, tau_s=0.0, k=task.k, m=task.m, sampling=task.sampling)
        numbers, calls = executed(task, chosen, proposals)
        losses = annotator.losses(calls)
    return Outcome(_kept(task, numbers, calls, losses), len(calls), annotator.counts.as_dict(), cost)


def executed(
    task: AnnotationTask, chosen: Sequence[str], proposals: Sequence[Proposal]
) -> tuple[list[int], list[LossRequest]]:
    """Return the text numbers and loss requests of the calls with a result."""
    found = [
        (number, sample.position, input_)
        for number, proposal in enumerate(proposals)
        for sample in proposal.samples
        if (input_ := _input(task, sample.position, sample.sample_number, sample.body)) is not None
    ]
    results = task.tool.run([ToolCall(input_) for *_, input_ in found])
    done = [(*each, result.result) for each, result in zip(found, results, strict=True) if result.result is not None]
    requests = [LossRequest(chosen[n], i, task.tool.name, input_, result) for n, i, input_, result in done]
    return [number for number, *_ in done], requests


def _input(task: AnnotationTask, position: int, sample: int, body: str | None) -> str | None:
    if task.synthetic_calls:
        return f"{position} + {sample}" if sample < task.synthetic_calls else None
    try:
        return parse_call(body).input if body is not None else None
    except MalformedCall:
        return None


def _kept(
    task: AnnotationTask, numbers: Sequence[int], calls: Sequence[LossRequest], losses: Sequence[CallLosses]
) -> frozenset[tuple[int, int, str]]:
    scored = zip(numbers, calls, losses, strict=True)
    return frozenset((number, call.position, call.input) for number, call, each in scored if each.delta >= task.tau_f)


def show(name: str, outcome: Outcome, count: int) -> None:
    """Print a row of the table."""
    tokens = [outcome.counts[kind] / count for kind in KINDS[1:]]
    per_second = count / outcome.cost.seconds
    print(
        f"{name:12} {count:6} {per_second:10.3f} {sum(tokens):9.0f} "
        + " ".join(f"{each:8.0f}" for each in tokens)
        + f" {outcome.counts['passes']:7} {outcome.counts['decoding_steps']:7} {outcome.cost.memory:8.0f}"
        + f" {outcome.calls / count:7.1f} {len(outcome.kept):6}",
        flush=True,
    )


def show_header(device: torch.device) -> None:
    """Print the header of the table."""
    unit = "texts/s" if device.type == "cuda" else "texts/CPUs"
    print(
        f"{'':12} {'texts':>6} {unit:>10} {'tokens':>9} "
        + " ".join(f"{kind[-8:]:>8}" for kind in KINDS[1:])
        + f" {'passes':>7} {'steps':>7} {'MB':>8} {'calls':>7} {'kept':>6}"
    )


def choose_model(options: argparse.Namespace, prompt: str) -> LanguageModel:
    """Load a model by folder or id, or create random weights of a shape."""
    if options.model:
        return load_model(ModelSettings(name=options.model, dtype=options.dtype, device=options.device))
    return random_model(options.shape, prompt, options.device, TORCH_DTYPES[options.dtype])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[20, 200, 2000], help="numbers of texts")
    parser.add_argument("--naive-texts", type=int, default=20, help="texts for the naive implementation; 0 skips it")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--m", type=int, default=5)
    parser.add_argument("--tau-f", type=float, default=0.1)
    parser.add_argument("--max-call-tokens", type=int, default=24)
    parser.add_argument("--model", help="folder or hub id of a model that writes calls")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-4x256", help="random weights of this shape")
    parser.add_argument(
        "--synthetic-calls", type=int, default=2, help="distinct synthetic calls at each position, for --shape"
    )
    parser.add_argument("--vllm", type=json.loads, help="options of vLLM as JSON: runs it beside the engine")
    parser.add_argument("--dtype", default="float32", choices=TORCH_DTYPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--token-budget", type=int)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the ratio; exit with an error where the kept calls differ."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    tool = load_tool("calculator", {})
    language_model = choose_model(options, tool.prompt)
    sampling = SamplingSettings(max_call_tokens=options.max_call_tokens)
    task = AnnotationTask(
        tool,
        options.k,
        options.m,
        options.tau_f,
        sampling,
        0 if options.model else options.synthetic_calls,
    )
    device = language_model.device
    synthetic = texts(max(options.texts))
    encoding = language_model.encoding
    lengths = encoding.count_tokens(synthetic)
    print(
        f"{language_model.name} {options.dtype} on {device}, {options.threads} thread(s), k {task.k}, m {task.m}; "
        f"prompt {len(encoding.encode_prompt(tool.prompt)) + len(encoding.output_label_ids)} tokens, "
        f"texts {sum(lengths) / len(lengths):.0f} tokens"
    )
    annotate(Engine(language_model, token_budget=options.token_budget), task, synthetic[:2], device)
    show_header(device)
    for count in options.texts:
        ours = annotate(Engine(language_model, token_budget=options.token_budget), task, synthetic[:count], device)
        show("ours", ours, count)
    if options.naive_texts:
        compare(options, language_model, task, synthetic[: options.naive_texts])
    if options.vllm is not None:
        compare_vllm(options, language_model, task, synthetic)


def compare(
    options: argparse.Namespace, language_model: LanguageModel, task: AnnotationTask, chosen: Sequence[str]
) -> None:
    """Run the naive implementation and the engine on the same texts."""
    device = language_model.device
    naive = annotate(Naive(language_model), task, chosen, device)
    show("naive", naive, len(chosen))
    ours = annotate(Engine(language_model, token_budget=options.token_budget), task, chosen, device)
    show("ours", ours, len(chosen))
    same = "the same" if naive.kept == ours.kept else f"DIFFERENT: {sorted(naive.kept ^ ours.kept)}"
    print(f"kept calls: {same}; ratio {naive.cost.seconds / ours.cost.seconds:.1f}")
    if naive.kept != ours.kept and options.dtype == "float32":
        raise SystemExit(1)


def compare_vllm(
    options: argparse.Namespace, language_model: LanguageModel, task: AnnotationTask, chosen: Sequence[str]
) -> None:
    """Run the engine and vLLM on the same texts; print cost, tokens, recomputed tokens and idle time of each."""
    device = language_model.device
    with TemporaryDirectory() as folder:
        for part in (language_model.model, language_model.tokenizer):
            part.save_pretrained(folder)
        in_vllm = load_model(ModelSettings(name=folder, dtype=options.dtype, engine="vllm", vllm=options.vllm))
    annotate(Engine(in_vllm), task, chosen[:2], device)
    outcomes: dict[str, Outcome] = {}
    for name, model in (("ours", language_model), ("vllm", in_vllm)):
        busy, _ = busy_share(device, partial(annotate, _new_engine(model, options), task, chosen[:20], device))
        engine = _new_engine(model, options)
        sequences = Sequences(engine.backend)
        outcomes[name] = annotate(engine, task, chosen, device)
        show(name, outcomes[name], len(chosen))
        print(f"{name:12} idle {1 - busy:.0%} of the time")
    ours = outcomes["ours"]
    theirs = outcomes["vllm"]
    recomputed = 1 - sequences.least() / theirs.tokens
    print(f"vLLM: {theirs.tokens / ours.tokens:.2f} times the tokens; {recomputed:.1%} of its own recomputed")
    for block in (16, 32):
        tokens = sequences.forwarded(block)
        print(
            f"by count, blocks of {block}: {tokens / len(chosen):.0f} tokens per text, {tokens / ours.tokens:.2f} times"
        )
    same = theirs.kept == ours.kept
    print(f"kept calls: {'the same' if same else 'DIFFERENT'}")
    if not same and options.dtype == "float32":
        raise SystemExit(1)


def _new_engine(language_model: LanguageModel, options: argparse.Namespace) -> Engine:
    """Return an engine that shares nothing with earlier ones."""
    if not isinstance(language_model.model, torch.nn.Module):
        language_model.model.llm.reset_prefix_cache()
    return Engine(language_model, token_budget=options.token_budget)


class Sequences:
    """Notes what vLLM runs for a backend: prompts, tokens written after them, whether the prefix cache is read."""

    def __init__(self, backend: Any) -> None:
        self.found: list[tuple[list[int], list[int], bool]] = []
        self._run = getattr(backend, "run", None)
        backend.run = self._noted

    def _noted(self, requests: Sequence[TokenRequest], kinds: Sequence[str] = ()) -> list[TokenAnswer]:
        """Run requests; the last token that is written does not run."""
        assert self._run is not None
        answers: list[TokenAnswer] = self._run(requests, kinds)
        for request, answer in zip(requests, answers, strict=True):
            self.found.append((list(request.prompt), answer.tokens[:-1], not request.reads_prompt))
        return answers

    def least(self) -> int:
        """Return how many tokens had to run: each beginning of a sequence once."""
        return len({key for prompt, written, _ in self.found for key in _keys([*prompt, *written], 1)})

    def forwarded(self, block: int) -> int:
        """Count the tokens that run with a prefix cache of so large blocks that forgets none."""
        cached: set[int] = set()
        tokens = 0
        for prompt, written, reads in self.found:
            keys = _keys([*prompt, *written], block)
            known = sum(1 for _ in takewhile(cached.__contains__, keys[: (len(prompt) - 1) // block])) if reads else 0
            tokens += len(prompt) + len(written) - known * block
            cached.update(keys)
        return tokens


def _keys(ids: Sequence[int], block: int) -> list[int]:
    """Return a key per whole block: of all tokens up to its end."""
    blocks = (tuple(ids[at : at + block]) for at in range(0, len(ids) - block + 1, block))
    return list(accumulate(blocks, lambda before, ids: hash((before, ids)), initial=0))[1:]


if __name__ == "__main__":
    main()
