"""Compute the probability of " [" at every place of a text and sample behind it (paper, section 2)."""

from collections import Counter, deque
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
from toolformer_dag.model.drawing import draw
from toolformer_dag.model.heads import CachedBranches, CachedHead, CachedTexts
from toolformer_dag.model.memory import Places, TokenBudget, batches
from toolformer_dag.model.own_cache import OwnBranches, OwnHead, OwnTexts
from toolformer_dag.model.recomputing import RecomputedBranches, RecomputedHead, RecomputedTexts
from toolformer_dag.settings.sections import SamplingSettings

Head = CachedHead | OwnHead | RecomputedHead
Texts = CachedTexts | OwnTexts | RecomputedTexts
Branches = CachedBranches | OwnBranches | RecomputedBranches
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


@dataclass(slots=True, eq=False)
class Unfinished:
    """Samples that have not ended, as arrays of equal length.

    `item` and `sample`: which sample of which text. `row`: its branch, shared by samples that have drawn the same
    tokens. `streams` [samples, max_call_tokens]: its uniform numbers.
    """

    item: Numbers
    sample: Numbers
    row: Numbers
    streams: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.item)

    def where(self, chosen: NDArray[np.bool_]) -> "Unfinished":
        """Return the chosen samples."""
        return Unfinished(self.item[chosen], self.sample[chosen], self.row[chosen], self.streams[chosen])

    def joined(self, other: "Unfinished") -> "Unfinished":
        """Return these samples and those of `other`."""
        return Unfinished(
            np.concatenate([self.item, other.item]),
            np.concatenate([self.sample, other.sample]),
            np.concatenate([self.row, other.row]),
            np.concatenate([self.streams, other.streams]),
        )


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

    def propose(self, items: Sequence[TokenText], places: Places) -> list[list[list[int]]]:
        """Compute p_i and sample for items, ordered by length, in as many places as memory holds at once."""
        return Proposing(self, items, places).run()

    def probabilities(
        self, texts: Texts, slots: Sequence[int], items: Sequence[TokenText], probes: int
    ) -> list[Probabilities]:
        """Return p_i of every item; run all texts, those for which none is asked only for their keys.

        At most `probes` branches are open at once.
        """
        result: list[Probabilities] = []
        lengths = [texts.tokens_run(item.ids) for item in items]
        for batch in batches(range(len(items)), lengths, self.budget.tokens):
            chosen = [items[number] for number in batch]
            first = min(item.before for item in chosen) - 1
            features = texts.features([slots[number] for number in batch], [item.ids for item in chosen], first)
            self.counts.passes += 1
            for number in batch:
                self.counts.add("positions" if items[number].asked else "samples", lengths[number])
            result += self._first_tokens(features, first, chosen)
        if len(self.start) > 1:
            for slot, item, found in zip(slots, items, result, strict=True):
                for first in range(0, item.asked, probes):
                    self._further_tokens(texts, slot, item, found[first : first + probes], first)
        return result

    def draw(self, features: Tensor, row: Numbers, numbers: NDArray[np.float64]) -> Numbers:
        """Draw a token behind the features of each row number in `row` by the uniform numbers `numbers`."""
        device = features.device
        logits = self.backbone.logits(features)
        uniforms = on_device(numbers, device, torch.float64)
        tokens = draw(logits, on_device(row, device), uniforms, self.sampling.temperature, self.sampling.top_p)
        result: Numbers = tokens.cpu().numpy()
        return result

    def _first_tokens(self, features: Tensor, first: int, items: Sequence[TokenText]) -> list[Probabilities]:
        """Return the probability of the first token of " [" at every place; `features` begin at token `first`."""
        if not any(item.asked for item in items):
            return [np.zeros(0, np.float32) for _ in items]
        starts = [(row, item.before - 1 - first, item.asked) for row, item in enumerate(items)]
        rows = torch.cat([features[row, begin : begin + n] for row, begin, n in starts])
        token = torch.full((len(rows),), self.start[0], device=features.device)
        probabilities = self.backbone.log_probabilities(rows, token).exp().cpu().numpy()
        return np.split(probabilities, np.cumsum([n for *_, n in starts])[:-1])

    def _further_tokens(self, texts: Texts, slot: int, item: TokenText, found: Probabilities, first: int) -> None:
        """Multiply p_i in `found`, from place `first` on, by the probabilities of the other tokens of " ["."""
        n = len(found)
        branches = texts.branches(n, len(self.start))
        branches.admit([slot] * n, [item.before + first + i for i in range(n)])
        for token, following in pairwise(self.start):
            features = branches.step(torch.full((n,), token, device=self.backbone.device))
            self.counts.add("positions", branches.tokens_run)
            self.counts.passes += 1
            targets = torch.full((n,), following, device=self.backbone.device)
            found *= self.backbone.log_probabilities(features, targets).exp().cpu().numpy()


class Proposing:
    """Texts on their way through a proposer: those that wait, those with a slot, and their unfinished samples.

    Texts are admitted where others have ended, so that decoding steps stay full. Each branch has its own age.
    """

    def __init__(self, proposer: Proposer, items: Sequence[TokenText], places: Places) -> None:
        self.proposer = proposer
        self.items = items
        self.places = places
        room = len(proposer.start) + proposer.sampling.max_call_tokens
        self.texts: Texts = proposer.head.texts(places.texts, max(len(item.ids) for item in items))
        self.branches: Branches = self.texts.branches(places.branches, room)
        self.drawn: list[list[list[int]]] = [[] for _ in items]
        self.waiting = deque(range(len(items)))
        self.free = list(range(places.texts))
        self.slots: dict[int, int] = {}
        none = np.zeros(0, np.int64)
        self.samples = Unfinished(none, none, none, np.zeros((0, proposer.sampling.max_call_tokens)))
        self.tokens = none
        """The token that each row runs next."""
        self.ages = none
        """How many own tokens each row has run."""

    def run(self) -> list[list[list[int]]]:
        """Return the tokens of each sample, by item."""
        while self.waiting or len(self.samples):
            self._admit()
            if len(self.samples):
                self._step()
        return self.drawn

    def _admit(self) -> None:
        """Run texts that wait, if enough of them find a place for a pass that is worth it."""
        most = max(1, max(item.most_samples for item in self.items))
        fitting = min(len(self.free), (self.places.branches - len(self.samples)) // most, len(self.waiting))
        if not fitting or (len(self.samples) and fitting < self._worthwhile(most)):
            return
        admitted = [self.waiting.popleft() for _ in range(fitting)]
        slots = [self.free.pop() for _ in admitted]
        self.slots.update(zip(admitted, slots, strict=True))
        items = [self.items[number] for number in admitted]
        found = self.proposer.probabilities(self.texts, slots, items, self.places.probes)
        self._begin(admitted, [item.choose(p) for item, p in zip(items, found, strict=True)])

    def _worthwhile(self, most: int) -> int:
        """Return half of the texts that a pass or the places hold, whichever are fewer."""
        longest = self.texts.tokens_run(self.items[self.waiting[-1]].ids)
        whole = min(self.proposer.budget.tokens // longest, self.places.texts, self.places.branches // most)
        return min(len(self.waiting), max(1, whole // 2))

    def _begin(self, numbers: Sequence[int], points: Sequence[Sequence[SamplePoint]]) -> None:
        """Start a branch at each point of these items, with all of its samples; free the slots of items without any."""
        located = [(number, point) for number, found in zip(numbers, points, strict=True) for point in found]
        self.branches.admit([self.slots[number] for number, _ in located], [point.kept for _, point in located])
        for number, found in zip(numbers, points, strict=True):
            if not found:
                self.free.append(self.slots.pop(number))
                continue
            counts = [len(point.streams) for point in found]
            total = sum(counts)
            rows = len(self.tokens) + np.repeat(np.arange(len(found)), counts)
            streams = np.concatenate([point.streams for point in found])
            self.samples = self.samples.joined(Unfinished(np.full(total, number), np.arange(total), rows, streams))
            self.drawn[number] = [[] for _ in range(total)]
            self.tokens = np.r_[self.tokens, np.full(len(found), self.proposer.start[0])]
            self.ages = np.r_[self.ages, np.zeros(len(found), np.int64)]

    def _step(self) -> None:
        """Run a token of every row and draw the next one of every sample; samples that end leave their rows."""
        features = self.branches.step(on_device(self.tokens, self.proposer.backbone.device))
        self.ages += 1
        self.proposer.counts.add("samples", self.branches.tokens_run)
        self.proposer.counts.decoding_steps += 1
        tokens, ended = self._next_tokens(features)
        under_way = Counter(self.samples.item.tolist())
        self.samples = self.samples.where(~ended)
        for number in under_way.keys() - set(self.samples.item.tolist()):
            self.free.append(self.slots.pop(number))
        self._arrange(tokens[~ended])

    def _next_tokens(self, features: Tensor) -> tuple[Numbers, NDArray[np.bool_]]:
        """Return the next token of every sample, drawn or of " [", and whether it ends with it."""
        start, samples = np.array(self.proposer.start), self.samples
        drawn_before = self.ages[samples.row] - len(start)
        ready = np.flatnonzero(drawn_before >= 0)
        tokens = start[np.minimum(self.ages[samples.row], len(start) - 1)]
        ended = np.zeros(len(samples), np.bool_)
        if len(ready):
            numbers = samples.streams[ready, drawn_before[ready]]
            tokens[ready] = self.proposer.draw(features, samples.row[ready], numbers)
            last = drawn_before[ready] == samples.streams.shape[1] - 1
            ended[ready] = self.proposer.ends(tokens[ready]) | last
        for at in ready.tolist():
            self.drawn[samples.item[at]][samples.sample[at]].append(int(tokens[at]))
        return tokens, ended

    def _arrange(self, tokens: Numbers) -> None:
        """Give every row with another next token a branch of its own."""
        pairs, row = np.unique(np.stack([self.samples.row, tokens]), axis=1, return_inverse=True)
        order = in_place(pairs[0])
        pairs, self.samples.row = pairs[:, order], np.argsort(order)[row]
        if not np.array_equal(pairs[0], np.arange(len(self.tokens))):
            self.branches.select(pairs[0].tolist())
        self.ages, self.tokens = self.ages[pairs[0]], pairs[1]
