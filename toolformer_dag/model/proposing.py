"""Compute the probability of " [" at every place of a text and sample after it (paper, section 2)."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import TokenCounts, TokenText
from toolformer_dag.model.memory import Places, batches
from toolformer_dag.model.open_samples import CallSampling, OpenSamples, StartedText
from toolformer_dag.model.sharing import Branches, Head, Texts

Probabilities = NDArray[np.float32]


class Proposing:
    """A batch of texts on their way: those that wait, those with open samples, and those that are done.

    Every text waits at first. It is admitted where others are done, so that decoding steps stay full: it gets a slot,
    which holds its keys, runs once for p_i, and chooses points to sample at. It keeps the slot until its last sample
    ends.

    - `items`: the texts after the head, ordered by length.
    - `places`: how many texts and branches may be open at once. All samples of any single text fit.
    - `waiting`: the items that wait, in order.
    - `slot_of_item`: the slots of the items with open samples; all other slots are free.
    - `samples`: the open samples, and what was drawn so far.
    """

    def __init__(
        self,
        *,
        backbone: Backbone,
        head: Head,
        counts: TokenCounts,
        calls: CallSampling,
        items: Sequence[TokenText],
        places: Places,
    ) -> None:
        self.backbone = backbone
        self.counts = counts
        self.start = calls.start
        self.items = items
        self.places = places
        self.most_samples = max(1, *(item.most_samples for item in items))  # of a text
        self.texts: Texts = head.texts(places.texts, max(len(item.ids) for item in items))
        branches: Branches = self.texts.branches(places.branches, calls.room)
        self.samples = OpenSamples(backbone, branches, counts, calls, items=len(items))
        self.waiting = deque(range(len(items)))
        self.slot_of_item: dict[int, int] = {}

    def run(self) -> list[list[list[int]]]:
        """Compute p_i and sample; return for each item the tokens of its samples.

        Each round admits texts or continues every sample. It does one of them: without open samples all places are
        free, and one text always fits.
        """
        while self.waiting or len(self.samples):
            self._admit()
            if len(self.samples):
                self.samples.step()
                open_items = self.samples.open_items()
                self.slot_of_item = {item: slot for item, slot in self.slot_of_item.items() if item in open_items}
        return self.samples.drawn

    def _admit(self) -> None:
        """Run texts that wait and begin their samples, if enough of them find a place for a pass that is worth it."""
        free_slots = sorted(set(range(self.places.texts)) - set(self.slot_of_item.values()))
        free_branches = self.places.branches - len(self.samples)
        count = min(len(free_slots), free_branches // self.most_samples, len(self.waiting))
        if not count or (len(self.samples) and count < self._worthwhile()):
            return
        slots = free_slots[:count]
        admitted = [self.waiting.popleft() for _ in range(count)]
        p_of_items = self._probabilities(slots, [self.items[item] for item in admitted])
        started = []
        for item, slot, p in zip(admitted, slots, p_of_items, strict=True):
            points = [point for point in self.items[item].choose(p) if len(point.streams)]
            if points:
                self.slot_of_item[item] = slot
                started.append(StartedText(item, slot, points))
        self.samples.begin(started)

    def _worthwhile(self) -> int:
        """Return half of the texts that a pass or the places hold, whichever are fewer."""
        longest = self.texts.tokens_run(self.items[self.waiting[-1]].ids)  # items are ordered by length
        full_pass = self.backbone.budget.tokens // longest
        most_texts = min(full_pass, self.places.texts, self.places.branches // self.most_samples)
        return min(len(self.waiting), max(1, most_texts // 2))

    def _probabilities(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Run texts into these slots, and return p of " [" at the places of each, [place_count].

        Texts without places run too, for their keys.
        """
        p_of_items: list[Probabilities] = []
        lengths = [self.texts.tokens_run(item.ids) for item in items]
        for batch in batches(range(len(items)), lengths, self.backbone.budget.tokens):
            p_of_items += self._pass([slots[index] for index in batch], [items[index] for index in batch])
        if len(self.start) > 1:
            for slot, item, p in zip(slots, items, p_of_items, strict=True):
                for first in range(0, item.place_count, self.places.probes):
                    p_of_probes = p[first : first + self.places.probes]  # a view: what changes it changes `p`
                    self._multiply_by_later_tokens(p_of_probes, slot, item.first_place + first)
        return p_of_items

    def _pass(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Run texts in one pass; return p of the first token of " [" at the places of each.

        A text whose features are not finite is run again alone: in half precision the padding of a pass may overflow,
        and a model's own attention does not hide it from the text.
        """
        # Features are computed from the token before the first place of any text on.
        first = min(item.first_place for item in items) - 1
        features = self.texts.features(slots, [item.ids for item in items], first)  # [B, T - first, F]
        self.counts.passes += 1
        for item in items:
            kind = "positions" if item.place_count else "samples"
            self.counts.add(kind, self.texts.tokens_run(item.ids))
        p_of_items = self._first_token_probabilities(features, first, items)
        if len(items) > 1:
            is_finite = features.isfinite().all(-1).cpu().numpy()  # [B, T - first]
            for row, item in enumerate(items):
                if not is_finite[row, item.first_place - 1 - first : len(item.ids) - first].all():
                    [p_of_items[row]] = self._pass([slots[row]], [item])
        return p_of_items

    def _first_token_probabilities(
        self, features: Tensor, first: int, items: Sequence[TokenText]
    ) -> list[Probabilities]:
        """Return p of the first token of " [" at the places of each text, from features that begin at token `first`."""
        if not any(item.place_count for item in items):
            return [np.zeros(0, np.float32) for _ in items]
        parts = []
        for row, item in enumerate(items):
            column = item.first_place - 1 - first  # the token before the first place, which predicts what stands there
            parts.append(features[row, column : column + item.place_count])
        p = self._token_probability(torch.cat(parts), self.start[0])  # [places of all texts]
        ends_of_items = np.cumsum([item.place_count for item in items])
        return np.split(p, ends_of_items[:-1])

    def _multiply_by_later_tokens(self, p: Probabilities, slot: int, first_place: int) -> None:
        """Multiply p of the first token of " [" by the probabilities of its other tokens, in place.

        p: of consecutive places of the text in `slot`, [N]. first_place: how many tokens stand before the first of
        them. A branch per place runs the tokens of " [".
        """
        place_count = len(p)
        branches = self.texts.branches(place_count, len(self.start))
        branches.admit([slot] * place_count, [first_place + place for place in range(place_count)])
        for token, following in pairwise(self.start):
            features = branches.step(torch.full((place_count,), token, device=self.backbone.device))
            self.counts.add("positions", branches.tokens_run)
            self.counts.passes += 1
            p *= self._token_probability(features, following)

    def _token_probability(self, features: Tensor, token: int) -> Probabilities:
        """Return the probability of a token after each of the features [N, F]; [N]."""
        tokens = torch.full((len(features),), token, device=features.device)
        p: Probabilities = self.backbone.log_probabilities(features, tokens).exp().cpu().numpy()
        return p
