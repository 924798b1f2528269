"""Compute the probability of " [" at every place of a text and sample after it (paper, section 2)."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, SamplePoint, TokenCounts, TokenText
from toolformer_dag.model.drawing import draw
from toolformer_dag.model.memory import Places, batches
from toolformer_dag.model.sharing import Branches, Head, Texts
from toolformer_dag.settings.model_settings import SamplingSettings

Numbers = NDArray[np.int64]
Probabilities = NDArray[np.float32]


def in_place(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an order of `rows`, ascending old row numbers, in which as many as possible keep their number.

    The gaps that finished rows leave are filled with rows from the end and with duplicates.
    """
    first = np.r_[True, rows[1:] != rows[:-1]] & (rows < len(rows))
    order = np.full(len(rows), -1)
    order[rows[first]] = np.flatnonzero(first)
    order[order < 0] = np.flatnonzero(~first)
    return order


@dataclass(eq=False)
class Proposing:
    """Texts on their way: those that wait, those with a slot, and their unfinished samples.

    Texts are admitted where others have ended, so that decoding steps stay full. Each branch has its own age.
    `items`: texts after the head, ordered by length; `places` hold the samples of every single one. `start`: the
    tokens of " ["; `ends` tells what ends a sample.
    """

    backbone: Backbone
    head: Head
    counts: TokenCounts
    start: Sequence[int]
    ends: Ends
    sampling: SamplingSettings
    items: Sequence[TokenText]
    places: Places

    def __post_init__(self) -> None:
        self.most = max(1, *(item.most_samples for item in self.items))
        length = self.sampling.max_call_tokens
        self.texts: Texts = self.head.texts(self.places.texts, max(len(item.ids) for item in self.items))
        self.branches: Branches = self.texts.branches(self.places.branches, len(self.start) + length)
        self.drawn: list[list[list[int]]] = [[] for _ in self.items]
        self.waiting = deque(range(len(self.items)))
        self.slots: dict[int, int] = {}
        """By number, the slots of the items that have unfinished samples; all others are free."""
        fields = [("item", np.int64), ("sample", np.int64), ("row", np.int64), ("stream", np.float64, (length,))]
        self.samples = np.zeros(0, fields)
        """Unfinished samples: of which item, its branch (shared where the same tokens were drawn), its uniforms."""
        self.tokens = np.zeros(0, np.int64)
        """The token that each row runs next."""
        self.ages = np.zeros(0, np.int64)
        """How many own tokens each row has run."""

    def run(self) -> list[list[list[int]]]:
        """Compute p_i and sample; return the tokens of each sample, by item.

        Each round admits a text or ages every sample: without unfinished samples all places are free, and one text
        always fits.
        """
        while self.waiting or len(self.samples):
            self._admit()
            if len(self.samples):
                self._step()
        return self.drawn

    def _admit(self) -> None:
        """Run texts that wait, if enough of them find a place for a pass that is worth it."""
        free = sorted(set(range(self.places.texts)) - set(self.slots.values()))
        fitting = min(len(free), (self.places.branches - len(self.samples)) // self.most, len(self.waiting))
        if not fitting or (len(self.samples) and fitting < self._worthwhile()):
            return
        admitted = [self.waiting.popleft() for _ in range(fitting)]
        by_text = self._probabilities(free[:fitting], [self.items[number] for number in admitted])
        begun = {}
        for number, slot, probabilities in zip(admitted, free, by_text, strict=False):
            if points := [point for point in self.items[number].choose(probabilities) if len(point.streams)]:
                self.slots[number], begun[number] = slot, points
        self._begin(begun)

    def _worthwhile(self) -> int:
        """Return half of the texts that a pass or the places hold, whichever are fewer."""
        longest = self.texts.tokens_run(self.items[self.waiting[-1]].ids)
        whole = min(self.backbone.budget.tokens // longest, self.places.texts, self.places.branches // self.most)
        return min(len(self.waiting), max(1, whole // 2))

    def _probabilities(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Return p_i of every item; run all texts, those for which none is asked only for their keys."""
        result: list[Probabilities] = []
        lengths = [self.texts.tokens_run(item.ids) for item in items]
        for batch in batches(range(len(items)), lengths, self.backbone.budget.tokens):
            result += self._pass([slots[number] for number in batch], [items[number] for number in batch])
        if len(self.start) > 1:
            for slot, item, probabilities in zip(slots, items, result, strict=True):
                for first in range(0, item.asked, self.places.probes):
                    self._further_tokens(slot, item, probabilities[first : first + self.places.probes], first)
        return result

    def _pass(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Run texts in one pass; return the probabilities of the first token of " [".

        A text whose features are not finite is run again alone: in half precision the padding of a pass may overflow,
        and a model's own attention does not hide it from the text.
        """
        first = min(item.before for item in items) - 1
        features = self.texts.features(slots, [item.ids for item in items], first)
        self.counts.passes += 1
        for item in items:
            self.counts.add("positions" if item.asked else "samples", self.texts.tokens_run(item.ids))
        probabilities = self._first_tokens(features, first, items)
        if len(items) > 1:
            finite = features.isfinite().all(-1).cpu().numpy()
            for row, item in enumerate(items):
                if not finite[row, item.before - 1 - first : len(item.ids) - first].all():
                    [probabilities[row]] = self._pass([slots[row]], [item])
        return probabilities

    def _first_tokens(self, features: Tensor, first: int, items: Sequence[TokenText]) -> list[Probabilities]:
        """Return the probability of the first token of " [" at every place; `features` begin at token `first`."""
        if not any(item.asked for item in items):
            return [np.zeros(0, np.float32) for _ in items]
        starts = [(row, item.before - 1 - first, item.asked) for row, item in enumerate(items)]
        rows = torch.cat([features[row, begin : begin + n] for row, begin, n in starts])
        return np.split(self._chances(rows, self.start[0]), np.cumsum([n for *_, n in starts])[:-1])

    def _further_tokens(self, slot: int, item: TokenText, probabilities: Probabilities, first: int) -> None:
        """Multiply p_i in `probabilities`, from place `first` on, by the probabilities of the other tokens of " ["."""
        n = len(probabilities)
        branches = self.texts.branches(n, len(self.start))
        branches.admit([slot] * n, [item.before + first + i for i in range(n)])
        for token, following in pairwise(self.start):
            features = branches.step(torch.full((n,), token, device=self.backbone.device))
            self.counts.add("positions", branches.tokens_run)
            self.counts.passes += 1
            probabilities *= self._chances(features, following)

    def _chances(self, features: Tensor, token: int) -> Probabilities:
        """Return the probability of a token after each of the features [N, F]."""
        tokens = torch.full((len(features),), token, device=features.device)
        chances: Probabilities = self.backbone.log_probabilities(features, tokens).exp().cpu().numpy()
        return chances

    def _begin(self, points: Mapping[int, Sequence[SamplePoint]]) -> None:
        """Start a branch at each point of these items, with all of its samples."""
        located = [(number, point) for number, of_item in points.items() for point in of_item]
        self.branches.admit([self.slots[number] for number, _ in located], [point.kept for _, point in located])
        for number, of_item in points.items():
            counts = [len(point.streams) for point in of_item]
            new = np.zeros(sum(counts), self.samples.dtype)
            new["item"] = number
            new["sample"] = np.arange(len(new))
            new["row"] = len(self.tokens) + np.repeat(np.arange(len(of_item)), counts)
            new["stream"] = np.concatenate([point.streams for point in of_item])
            self.samples = np.concatenate([self.samples, new])
            self.drawn[number] = [[] for _ in new]
            self.tokens = np.r_[self.tokens, np.full(len(of_item), self.start[0])]
            self.ages = np.r_[self.ages, np.zeros(len(of_item), np.int64)]

    def _step(self) -> None:
        """Run a token of every row and draw the next one of every sample; samples that end leave their rows."""
        features = self.branches.step(on_device(self.tokens, self.backbone.device))
        self.ages += 1
        self.counts.add("samples", self.branches.tokens_run)
        self.counts.decoding_steps += 1
        tokens, ended = self._next_tokens(features)
        self.samples = self.samples[~ended]
        under_way = set(self.samples["item"].tolist())
        self.slots = {number: slot for number, slot in self.slots.items() if number in under_way}
        self._arrange(tokens[~ended])

    def _next_tokens(self, features: Tensor) -> tuple[Numbers, NDArray[np.bool_]]:
        """Return the next token of every sample, drawn or of " [", and whether it ends with it."""
        start, ages = np.array(self.start), self.ages[self.samples["row"]]
        tokens = start[np.minimum(ages, len(start) - 1)]
        ended = np.zeros(len(tokens), np.bool_)
        drawn_before = ages - len(start)
        ready = np.flatnonzero(drawn_before >= 0)
        if len(ready):
            rows, uniforms = self.samples["row"][ready], self.samples["stream"][ready, drawn_before[ready]]
            tokens[ready] = self._draw(features, rows, uniforms)
            last = drawn_before[ready] == self.sampling.max_call_tokens - 1
            ended[ready] = last
            may_end = dict(zip(ready.tolist(), self.ends.may_end(tokens[ready]).tolist(), strict=True))
        for at in ready.tolist():
            sample = self.drawn[self.samples["item"][at]][self.samples["sample"][at]]
            sample.append(int(tokens[at]))
            ended[at] |= may_end[at] and self.ends.has_ended(sample)
        return tokens, ended

    def _draw(self, features: Tensor, rows: Numbers, uniforms: NDArray[np.float64]) -> Numbers:
        """Draw a token after the features of each row number in `rows`."""
        device, logits = features.device, self.backbone.logits(features)
        numbers = on_device(uniforms, device, torch.float64)
        drawn = draw(logits, on_device(rows, device), numbers, self.sampling.temperature, self.sampling.top_p)
        tokens: Numbers = drawn.cpu().numpy()
        return tokens

    def _arrange(self, tokens: Numbers) -> None:
        """Give every row with another next token a branch of its own."""
        pairs, row = np.unique(np.stack([self.samples["row"], tokens]), axis=1, return_inverse=True)
        order = in_place(pairs[0])
        pairs, self.samples["row"] = pairs[:, order], np.argsort(order)[row]
        if not np.array_equal(pairs[0], np.arange(len(self.tokens))):
            self.branches.select(pairs[0].tolist())
        self.ages, self.tokens = self.ages[pairs[0]], pairs[1]
