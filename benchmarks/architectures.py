"""Compare the engine with the naive backend for many architectures at tiny size: `python -m benchmarks.architectures`.

Prints, by architecture: how work is shared, the tokens that proposing took beside those of Llama and of the naive
backend, the seconds of a processor core beside the naive backend, the largest error of a probability or loss, and
whether all samples are the same. Exits with an error where a goal is missed.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.measure import Cost, Naive, measured
from tests.tiny_models import ARCHITECTURES, PROMPT, TEXTS, UNCACHED, tiny_model, tokenizer_of
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.requests import CallLosses, LossRequest, Proposal, ProposalRequest
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.settings.model_settings import SamplingSettings

K = 3
M = 4
SAMPLING = SamplingSettings(max_call_tokens=24, seed=3)
PROPOSING = ("prompt", "positions", "samples")
MOST_TOKENS = 1.2
"""The goal for tokens, beside Llama's."""
MOST_ERROR = 1e-5
"""The goal for the largest error of a probability or loss."""


@dataclass(frozen=True)
class Annotated:
    """What an engine computes, with the tokens of proposing and the seconds of everything."""

    proposals: list[Proposal]
    losses: list[CallLosses]
    tokens: int
    cost: Cost


def annotate(engine: Engine, texts: Sequence[str]) -> Annotated:
    """Propose for the texts and score calls in them."""
    with measured(torch.device("cpu")) as cost:
        requests = [ProposalRequest(text, f"text {number}") for number, text in enumerate(texts)]
        proposals = engine.propose(PROMPT, requests, tau_s=0.0, k=K, m=M, sampling=SAMPLING)
        calls = [("35 + 26", "61"), ("1", "2 and more")]
        losses = engine.losses(
            [LossRequest(t, i, "Calculator", *c) for t in texts for i in (0, 1, 5, 9) for c in calls]
        )
    counts = engine.token_counts.as_dict()
    return Annotated(proposals, losses, sum(counts[kind] for kind in PROPOSING), cost)


def samples(annotated: Annotated) -> list[object]:
    """Return all samples in order."""
    return [sample for proposal in annotated.proposals for sample in proposal.samples]


def largest_error(one: Annotated, other: Annotated) -> float:
    """Return the largest difference of a probability or a loss."""
    probabilities = [
        np.abs(a.probabilities - b.probabilities).max() for a, b in zip(one.proposals, other.proposals, strict=True)
    ]
    losses = [
        abs(getattr(a, name) - getattr(b, name))
        for a, b in zip(one.losses, other.losses, strict=True)
        for name in ("loss_empty", "loss_call", "loss_result")
    ]
    return float(max(*probabilities, *losses))


def compared(language_model: LanguageModel, texts: Sequence[str] = TEXTS) -> tuple[str, Annotated, Annotated]:
    """Return how work is shared, and what the engine and the naive backend compute."""
    backend = TransformersBackend(language_model)
    ours = annotate(Engine(language_model, backend=backend), texts)
    naive = annotate(Naive(language_model, caches=language_model.name not in UNCACHED), texts)
    return backend.sharing.method, ours, naive


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all by default")
    chosen = parser.parse_args().names or list(ARCHITECTURES)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    tokenizer = tokenizer_of("bos")
    _, llama, _ = compared(tiny_model("Llama", tokenizer))
    print("| architecture | way | tokens | of Llama's | of naive | CPU-seconds of naive | largest error | samples |")
    print("|---|---|---|---|---|---|---|---|")
    missed = []
    for name in chosen:
        way, ours, naive = compared(tiny_model(name, tokenizer))
        error = largest_error(ours, naive)
        same = samples(ours) == samples(naive)
        ratios = ours.tokens / llama.tokens, ours.tokens / naive.tokens, ours.cost.seconds / naive.cost.seconds
        figures = f"{ours.tokens} | {ratios[0]:.2f} | {ratios[1]:.2f} | {ratios[2]:.2f} | {error:.0e}"
        print(f"| {name} | {way} | {figures} | {'the same' if same else 'DIFFERENT'} |", flush=True)
        most = 1.0 if name in UNCACHED else MOST_TOKENS
        if not same or error > MOST_ERROR or (ratios[1] if name in UNCACHED else ratios[0]) > most:
            missed.append(name)
    if missed:
        raise SystemExit(f"goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
