"""Compute the probability of " [" at every place of a text and sample behind it (paper, section 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, SamplePoint, TokenCounts, TokenText
from toolformer_dag.model.heads import CachedHead, CachedTexts
from toolformer_dag.model.memory import TokenBudget, batches
from toolformer_dag.model.own_cache import OwnHead, OwnTexts
from toolformer_dag.model.recomputing import RecomputedHead, RecomputedTexts
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


def in_place(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an order of `rows`, ascending old row numbers, in which as many as possible keep their number.

    The gaps that finished rows leave are filled with rows from the end and with duplicates.
    """
    first = np.r_[True, rows[1:] != rows[:-1]] & (rows < len(rows))
    order = np.full(len(rows), -1)
    order[rows[first]] = np.flatnonzero(first)
    order[order < 0] = np.flatnonzero(~first)
    return order


Head = CachedHead | OwnHead | RecomputedHead
Texts = CachedTexts | OwnTexts | RecomputedTexts
Samples = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Proposer:
    """Proposes for texts behind a head: `start` are the tokens of " [", `ends` tells the tokens that end a sample."""

    backbone: Backbone
    head: Head
    counts: TokenCounts
    budget: TokenBudget
    start: Sequence[int]
    ends: Ends
    sampling: SamplingSettings

    def propose(self, items: Sequence[TokenText]) -> list[list[list[int]]]:
        """Compute p_i and sample for items, ordered by length, that fit into memory together."""
        texts = self.head.texts([item.ids for item in items])
        points = [list(item.choose(p)) for item, p in zip(items, self._probabilities(texts, items), strict=True)]
        located = [(number, point) for number, found in enumerate(points) for point in found]
        drawn = iter(self._sample(texts, located) if located else [])
        return [[next(drawn) for point in found for _ in point.streams] for found in points]

    def _probabilities(self, texts: Texts, items: Sequence[TokenText]) -> list[NDArray[np.float32]]:
        """Return p_i of every item; run all texts, those for which none is asked only for their keys."""
        result: list[NDArray[np.float32]] = []
        for batch in batches(range(len(items)), texts.lengths, self.budget.tokens):
            first = min(items[number].before for number in batch) - 1
            features = texts.features(batch, first)
            self.counts.passes += 1
            for number in batch:
                self.counts.add("positions" if items[number].asked else "samples", texts.lengths[number])
            result += self._first_tokens(features, first, [items[number] for number in batch])
        if len(self.start) > 1:
            self._further_tokens(texts, items, result)
        return result

    def _first_tokens(self, features: Tensor, first: int, items: Sequence[TokenText]) -> list[NDArray[np.float32]]:
        """Return the probability of the first token of " [" at every place; `features` begin at token `first`."""
        if not any(item.asked for item in items):
            return [np.zeros(0, np.float32) for _ in items]
        starts = [(row, item.before - 1 - first, item.asked) for row, item in enumerate(items)]
        rows = torch.cat([features[row, begin : begin + n] for row, begin, n in starts])
        token = torch.full((len(rows),), self.start[0], device=features.device)
        probabilities = self.backbone.log_probabilities(rows, token).exp().cpu().numpy()
        return np.split(probabilities, np.cumsum([n for *_, n in starts])[:-1])

    def _further_tokens(self, texts: Texts, items: Sequence[TokenText], result: Sequence[NDArray[np.float32]]) -> None:
        """Multiply p_i by the probabilities of the other tokens of " [", on a branch at every place."""
        for number, item in enumerate(items):
            n = item.asked
            if not n:
                continue
            kept = [item.before + i for i in range(n)]
            branches = texts.branches([number] * n, kept, room=len(self.start), capacity=n)
            for token, following in pairwise(self.start):
                features = branches.step(torch.full((n,), token, device=self.backbone.device))
                self.counts.add("positions", branches.tokens_run)
                self.counts.passes += 1
                targets = torch.full((n,), following, device=self.backbone.device)
                result[number][:] *= self.backbone.log_probabilities(features, targets).exp().cpu().numpy()

    def _sample(self, texts: Texts, points: Sequence[tuple[int, SamplePoint]]) -> list[list[int]]:
        """Sample tokens after " [" at each point (text number, point).

        Samples of a point share a sequence in the model until their tokens differ.
        """
        streams = np.concatenate([point.streams for _, point in points])
        row = np.repeat(np.arange(len(points)), [len(point.streams) for _, point in points])
        active = np.arange(len(streams))
        branches = texts.branches(
            [text for text, _ in points],
            [point.kept for _, point in points],
            room=len(self.start) + self.sampling.max_call_tokens,
            capacity=len(streams),
        )
        tokens = [np.full(len(points), token) for token in self.start]
        drawn: list[list[int]] = [[] for _ in streams]
        for column in streams.T:
            for step in tokens:
                features = branches.step(on_device(step, self.backbone.device))
                self.counts.add("samples", branches.tokens_run)
                self.counts.decoding_steps += 1
            new = self._draw(features, row, column[active])
            for sample_number, token in zip(active.tolist(), new.tolist(), strict=True):
                drawn[sample_number].append(token)
            unfinished = ~self.ends(new)
            active, row, new = active[unfinished], row[unfinished], new[unfinished]
            if not len(active):
                break
            pairs, row = np.unique(np.stack([row, new]), axis=1, return_inverse=True)
            order = in_place(pairs[0])
            pairs, row = pairs[:, order], np.argsort(order)[row]
            if not np.array_equal(pairs[0], np.arange(len(tokens[-1]))):
                branches.select(pairs[0].tolist())
            tokens = [pairs[1]]
        return drawn

    def _draw(self, features: Tensor, row: Samples, numbers: NDArray[np.float64]) -> Samples:
        device = features.device
        logits = self.backbone.logits(features)
        uniforms = on_device(numbers, device, torch.float64)
        tokens = draw(logits, on_device(row, device), uniforms, self.sampling.temperature, self.sampling.top_p)
        result: Samples = tokens.cpu().numpy()
        return result
