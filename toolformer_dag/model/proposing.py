"""Propose calls: find positions where " [" is likely and sample calls there (paper, section 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.encoding import TextTokens
from toolformer_dag.model.memory import batches
from toolformer_dag.model.requests import (
    Proposal,
    ProposalRequest,
    SampledCall,
    rejected_proposal,
    select_positions,
    uniforms,
)
from toolformer_dag.model.runtime import Head, Runtime, Texts
from toolformer_dag.settings.sections import SamplingSettings

BLOCK = 128


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw a token for each of S samples; return [S].

    `logits` [B, V] float32; `rows` [S] is the row of each sample; `uniforms` [S] are numbers in [0, 1). The search
    runs over sums of 128-token blocks, then within a block, so no sample sums over the whole vocabulary.
    """
    weights = (logits if temperature == 1 else logits / temperature).softmax(-1)
    if top_p < 1:
        weights = nucleus(weights, top_p)
    sums = _block_sums(weights).cumsum(-1)
    goal = uniforms * sums[rows, -1]
    block = (sums[rows] <= goal[:, None]).sum(-1).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)
    return _in_block(weights, rows, block, goal - before)


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Set all weights [B, V] to zero but the smallest set of tokens whose probability reaches `top_p`."""
    ordered, order = weights.sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill(beyond, 0))


def _block_sums(weights: Tensor) -> Tensor:
    """Sum weights [B, V] by block to [B, blocks] in float64; the last block may be short."""
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].reshape(len(weights), -1, BLOCK).sum(-1, dtype=torch.float64)
    rest = weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat([sums, rest], 1) if whole < weights.shape[1] else sums


def _in_block(weights: Tensor, rows: Tensor, block: Tensor, goal: Tensor) -> Tensor:
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = tokens < weights.shape[1]
    values = weights[rows[:, None], tokens.clamp(max=weights.shape[1] - 1)].double() * inside
    reached = (values.cumsum(-1) <= goal[:, None]).sum(-1)
    last = BLOCK - 1 - (values > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + torch.minimum(reached, last)


Samples = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SamplePoint:
    """A position behind the first `kept` tokens of text number `text`.

    Each row of `streams` [samples, max_call_tokens] gives the uniform numbers of a sample.
    """

    text: int
    kept: int
    streams: NDArray[np.float64]


def sample(
    runtime: Runtime, texts: Texts, points: Sequence[SamplePoint], sampling: SamplingSettings
) -> list[list[int]]:
    """Sample tokens after " [" at each point; a sample ends with the first token that holds "]" or is EOS.

    Samples of a point share a sequence in the model until their tokens differ.
    """
    streams = np.concatenate([point.streams for point in points])
    row = np.repeat(np.arange(len(points)), [len(point.streams) for point in points])
    active = np.arange(len(streams))
    branches = texts.branches(
        [point.text for point in points],
        [point.kept for point in points],
        room=len(runtime.encoding.start) + sampling.max_call_tokens,
        capacity=len(streams),
    )
    tokens = [np.full(len(points), token) for token in runtime.encoding.start]
    drawn: list[list[int]] = [[] for _ in streams]
    for column in streams.T:
        for step in tokens:
            features = branches.step(on_device(step, runtime.backbone.device))
            runtime.counts.add("samples", len(step))
            runtime.counts.decoding_steps += 1
        new = _draw(runtime, features, row, column[active], sampling)
        for sample_number, token in zip(active.tolist(), new.tolist(), strict=True):
            drawn[sample_number].append(token)
        unfinished = ~runtime.encoding.ended(new)
        active, row, new = active[unfinished], row[unfinished], new[unfinished]
        if not len(active):
            break
        pairs, row = np.unique(np.stack([row, new]), axis=1, return_inverse=True)
        if not np.array_equal(pairs[0], np.arange(len(tokens[-1]))):
            branches.select(pairs[0].tolist())
        tokens = [pairs[1]]
    return drawn


def _draw(
    runtime: Runtime, features: torch.Tensor, row: Samples, numbers: NDArray[np.float64], sampling: SamplingSettings
) -> Samples:
    device = features.device
    logits = runtime.backbone.logits(features)
    uniforms = on_device(numbers, device, torch.float64)
    tokens = draw(logits, on_device(row, device), uniforms, sampling.temperature, sampling.top_p)
    result: Samples = tokens.cpu().numpy()
    return result


SampleKeys = list[tuple[int, int]]
"""Pairs of position and sample number."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The thresholds that decide which positions get how many samples."""

    tau_s: float
    k: int
    m: int

    def missing_samples(self, request: ProposalRequest, probabilities: NDArray[np.float32]) -> SampleKeys:
        """Return the samples that the thresholds ask for and `request` does not hold."""
        positions = select_positions(probabilities, self.tau_s, self.k)
        return [(i, j) for i in positions for j in range(self.m) if (i, j) not in request.stored]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A request and its tokens; `missing` are the samples to draw, None until p_i is known."""

    request: ProposalRequest
    text: TextTokens
    missing: SampleKeys | None

    def sequence(self, output: list[int]) -> list[int]:
        """Return the tokens of x, "Output:", and x again up to the last position that is needed."""
        last = len(self.text.ids) - 1 if self.missing is None else max(i for i, _ in self.missing)
        return self.text.ids + output + self.text.ids[:last]


def propose(
    runtime: Runtime, head: Head, items: Sequence[Item], selection: Selection, sampling: SamplingSettings
) -> list[Proposal]:
    """Compute proposals for items, ordered by the length of their sequences, that fit into memory together.

    A text with a p_i that is not finite gets the reason "not_finite".
    """
    texts = head.texts([item.sequence(runtime.encoding.output) for item in items])
    probabilities = _probabilities(runtime, texts, items)
    missing = [_missing_samples(item, p, selection) for item, p in zip(items, probabilities, strict=True)]
    samples = _samples(runtime, texts, items, missing, sampling)
    return [
        Proposal(p, item.text.offsets, tuple(calls)) if np.isfinite(p).all() else rejected_proposal("not_finite")
        for item, p, calls in zip(items, probabilities, samples, strict=True)
    ]


def _missing_samples(item: Item, probabilities: NDArray[np.float32], selection: Selection) -> SampleKeys:
    if not np.isfinite(probabilities).all():
        return []
    return selection.missing_samples(item.request, probabilities) if item.missing is None else item.missing


def _probabilities(runtime: Runtime, texts: Texts, items: Sequence[Item]) -> list[NDArray[np.float32]]:
    """Return p_i of every item; run all texts, those with known p_i only for their keys."""
    lengths = [len(item.sequence(runtime.encoding.output)) for item in items]
    result: list[NDArray[np.float32]] = []
    for batch in batches(range(len(items)), texts.lengths, runtime.budget.tokens):
        first = min(_before(runtime, items[number]) for number in batch)
        features = texts.features(batch, first)
        runtime.counts.passes += 1
        for number in batch:
            runtime.counts.add("samples" if items[number].missing is not None else "positions", lengths[number])
        found = iter(_first_tokens(runtime, features, first, [items[number] for number in batch]))
        for number in batch:
            known = items[number].request.probabilities
            result.append(known if known is not None else next(found))
    asked = [number for number, item in enumerate(items) if item.missing is None]
    if len(runtime.encoding.start) > 1 and asked:
        _further_tokens(runtime, texts, items, asked, result)
    return result


def _before(runtime: Runtime, item: Item) -> int:
    """Return the index in the item's sequence of the token that predicts a call before x_1."""
    return len(item.text.ids) + len(runtime.encoding.output) - 1


def _first_tokens(
    runtime: Runtime, features: torch.Tensor, first: int, items: Sequence[Item]
) -> list[NDArray[np.float32]]:
    """Return, for items without p_i, the probability of the first token of " [" before every x_i.

    `features` begin at token `first`. The probability is 0 where x_i begins inside a character.
    """
    asked = [(row, item) for row, item in enumerate(items) if item.request.probabilities is None]
    if not asked:
        return []
    starts = [(row, _before(runtime, item) - first, len(item.text.ids)) for row, item in asked]
    rows = torch.cat([features[row, start : start + n] for row, start, n in starts])
    token = torch.full((len(rows),), runtime.encoding.start[0], device=features.device)
    probabilities = runtime.backbone.log_probabilities(rows, token).exp().cpu().numpy()
    parts = np.split(probabilities, np.cumsum([n for *_, n in starts])[:-1])
    return [np.where(item.text.inside, np.float32(0), part) for (_, item), part in zip(asked, parts, strict=True)]


def _further_tokens(
    runtime: Runtime, texts: Texts, items: Sequence[Item], asked: Sequence[int], result: list[NDArray[np.float32]]
) -> None:
    """Multiply p_i by the probabilities of the other tokens of " [", on a branch before every x_i."""
    start, output = runtime.encoding.start, len(runtime.encoding.output)
    for number in asked:
        n = len(items[number].text.ids)
        branches = texts.branches([number] * n, [n + output + i for i in range(n)], room=len(start), capacity=n)
        for token, following in pairwise(start):
            features = branches.step(torch.full((n,), token, device=runtime.backbone.device))
            runtime.counts.add("positions", n)
            runtime.counts.passes += 1
            targets = torch.full((n,), following, device=runtime.backbone.device)
            result[number] *= runtime.backbone.log_probabilities(features, targets).exp().cpu().numpy()


def _samples(
    runtime: Runtime, texts: Texts, items: Sequence[Item], missing: Sequence[SampleKeys], sampling: SamplingSettings
) -> list[list[SampledCall]]:
    result: list[list[SampledCall]] = [[] for _ in items]
    keys = [(number, i) for number, pairs in enumerate(missing) for i in dict.fromkeys(i for i, _ in pairs)]
    if not keys:
        return result
    numbers = {key: [j for i, j in missing[key[0]] if i == key[1]] for key in keys}
    points = [_sample_point(runtime, items, number, i, numbers[number, i], sampling) for number, i in keys]
    drawn = iter(sample(runtime, texts, points, sampling))
    for number, i in keys:
        result[number] += [_call(runtime, i, j, next(drawn)) for j in numbers[number, i]]
    return result


def _sample_point(
    runtime: Runtime, items: Sequence[Item], number: int, i: int, samples: Sequence[int], sampling: SamplingSettings
) -> SamplePoint:
    item = items[number]
    kept = len(item.text.ids) + len(runtime.encoding.output) + i
    count = sampling.max_call_tokens
    streams = [uniforms(sampling.seed, item.request.digest, i, j, count) for j in samples]
    return SamplePoint(number, kept, np.stack(streams))


def _call(runtime: Runtime, position: int, sample_number: int, tokens: Sequence[int]) -> SampledCall:
    body = runtime.encoding.body(tokens)
    return SampledCall(position, sample_number, body, "no_end" if body is None else None)
