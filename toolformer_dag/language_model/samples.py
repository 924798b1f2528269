"""Sampling what stands between " [" and "]" at many places of many texts together (paper, section 2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from toolformer_dag.language_model.backbone import on_device
from toolformer_dag.language_model.draw import draw
from toolformer_dag.language_model.heads import Texts
from toolformer_dag.language_model.runtime import Runtime
from toolformer_dag.language_model.sampling import Sampling

Samples = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Behind `kept` tokens of text number `text`, one sample for each row of `streams` [samples, max_call_tokens]."""

    text: int
    kept: int
    streams: NDArray[np.float64]


def sample(runtime: Runtime, texts: Texts, places: Sequence[Place], sampling: Sampling) -> list[list[int]]:
    """The tokens sampled after " [", place by place; each ends with the first that holds "]" or ends a document.

    Samples of one place that have drawn the same tokens so far are one sequence for the model: they part where they
    first differ.
    """
    streams = np.concatenate([place.streams for place in places])
    row = np.repeat(np.arange(len(places)), [len(place.streams) for place in places])
    going = np.arange(len(streams))
    branches = texts.branches(
        [place.text for place in places],
        [place.kept for place in places],
        room=len(runtime.encoding.start) + sampling.max_call_tokens,
        capacity=len(streams),
    )
    tokens = [np.full(len(places), token) for token in runtime.encoding.start]
    drawn: list[list[int]] = [[] for _ in streams]
    for column in streams.T:
        for step in tokens:
            features = branches.step(on_device(step, runtime.backbone.device))
            runtime.counts.add("samples", len(step))
            runtime.counts.decoding_steps += 1
        new = _draw(runtime, features, row, column[going], sampling)
        for sample_number, token in zip(going.tolist(), new.tolist(), strict=True):
            drawn[sample_number].append(token)
        open_ends = ~runtime.encoding.ended(new)
        going, row, new = going[open_ends], row[open_ends], new[open_ends]
        if not len(going):
            break
        pairs, row = np.unique(np.stack([row, new]), axis=1, return_inverse=True)
        if not np.array_equal(pairs[0], np.arange(len(tokens[-1]))):
            branches.select(pairs[0].tolist())
        tokens = [pairs[1]]
    return drawn


def _draw(
    runtime: Runtime, features: torch.Tensor, row: Samples, numbers: NDArray[np.float64], sampling: Sampling
) -> Samples:
    device = features.device
    logits = runtime.backbone.logits(features)
    uniforms = on_device(numbers, device, torch.float64)
    tokens = draw(logits, on_device(row, device), uniforms, sampling.temperature, sampling.top_p)
    result: Samples = tokens.cpu().numpy()
    return result
