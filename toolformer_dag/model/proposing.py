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
from toolformer_dag.model.memory import CacheLimits, batches
from toolformer_dag.model.open_samples import CallSampling, OpenSamples, StartedText
from toolformer_dag.model.sharing import Branches, Head, Texts

Probabilities = NDArray[np.float32]


class ProposalBatch:
    """A batch of texts on their way: those that wait, those with open samples, and those that are done.

    Every text waits at first. It is admitted where others are done, so that decoding steps stay full: it gets a slot,
    which holds its keys, runs once for p_i, and chooses points to sample at. It keeps the slot until its last sample
    ends.

    - `items`: the texts after the head, ordered by length. An item is named by its index.
    - `limits`: how many texts and branches may be open at once. All samples of any single text fit.
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
        limits: CacheLimits,
    ) -> None:
        """Allocate the caches; nothing runs before `run`. counts: the tokens that run are added to it."""
        self.backbone = backbone
        self.counts = counts
        self.start = calls.start
        self.items = items
        self.limits = limits
        self.most_samples = max(1, *(item.most_samples for item in items))  # of a text
        self.texts: Texts = head.texts(limits.texts, max(len(item.ids) for item in items))
        branches: Branches = self.texts.branches(limits.branches, calls.room)
        self.samples = OpenSamples(backbone, branches, counts, calls, items=len(items))
        self.waiting = deque(range(len(items)))
        self.slot_of_item: dict[int, int] = {}

    def run(self) -> list[list[list[int]]]:
        """Compute p_i and sample; return for each item the tokens of each of its samples.

        Every round admits texts, or draws a token of every open sample, or both: without open samples all slots are
        free, so that one text always fits.
        """
        while self.waiting or len(self.samples):
            self._admit()
            if len(self.samples):
                self.samples.step()
                self._free_slots_of_finished()
        return self.samples.drawn

    def _free_slots_of_finished(self) -> None:
        """Take the slots from the items whose samples have all ended."""
        open_items = self.samples.open_items()
        self.slot_of_item = {item: slot for item, slot in self.slot_of_item.items() if item in open_items}

    def _admit(self) -> None:
        """Run as many of the waiting texts as there is room for, and begin their samples.

        A text needs a free slot in the cache of texts and room for the most samples that it may have. While samples are
        open, texts wait until so many fit that a pass is worth it.
        """
        free_slots = sorted(set(range(self.limits.texts)) - set(self.slot_of_item.values()))
        free_branches = self.limits.branches - len(self.samples)
        fitting = min(len(free_slots), free_branches // self.most_samples, len(self.waiting))
        if not fitting or (len(self.samples) and fitting < self._worthwhile_count()):
            return

        # Run them for p_i, by which each text chooses the points at which it is sampled.
        slots = free_slots[:fitting]
        admitted = [self.waiting.popleft() for _ in range(fitting)]  # indices of texts
        p_of_items = self._probabilities(slots, [self.items[item] for item in admitted])
        started = []
        for item, slot, p in zip(admitted, slots, p_of_items, strict=True):
            points = [point for point in self.items[item].choose(p) if len(point.streams)]
            if points:  # else nothing is sampled in this text, and its slot stays free
                self.slot_of_item[item] = slot
                started.append(StartedText(item, slot, points))
        self.samples.begin(started)

    def _worthwhile_count(self) -> int:
        """Return how many waiting texts are worth a pass of the model: half of those that could run at once.

        So many fit into a pass, and into the caches of texts and of samples. Where fewer wait, these are worth it.
        """
        longest_text = self.items[self.waiting[-1]]  # texts wait in order of their length
        texts_of_full_pass = self.backbone.budget.tokens // self.texts.tokens_run(longest_text.ids)
        texts_in_caches = min(self.limits.texts, self.limits.branches // self.most_samples)
        most_at_once = min(texts_of_full_pass, texts_in_caches)
        return min(len(self.waiting), max(1, most_at_once // 2))

    def _probabilities(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Run texts, cache their keys in `slots`, and return p_i of each: p of " [" at its places, [place_count].

        A place is a position in a text where a call may stand. " [" may be several tokens: the pass over a text gives p
        of the first one at all of its places. For the others, each place is continued by the tokens of " [".
        """
        p_of_items: list[Probabilities] = []
        lengths = [self.texts.tokens_run(item.ids) for item in items]
        for batch in batches(range(len(items)), lengths, self.backbone.budget.tokens):
            p_of_items += self._pass([slots[index] for index in batch], [items[index] for index in batch])
        if len(self.start) > 1:
            places_at_once = self.limits.probes  # as many continuations fit into the cache
            for slot, item, p in zip(slots, items, p_of_items, strict=True):
                for first in range(0, item.place_count, places_at_once):
                    places = slice(first, first + places_at_once)
                    p[places] = self._times_later_tokens(p[places], slot=slot, kept=item.first_place + first)
        return p_of_items

    def _pass(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Run texts in one pass, and cache their keys in `slots`; return p of the first token of " [" at their places.

        A text whose features are not finite runs again alone: in half precision the padding of a pass may overflow, and
        a model's own attention does not hide it from the text.
        """
        # The token before a place predicts what stands there: features begin with the first such token of any text.
        first_token = min(item.first_place for item in items) - 1
        features = self.texts.features(slots, [item.ids for item in items], first_token)  # [B, T - first_token, F]
        self.counts.passes += 1
        for item in items:
            kind = "positions" if item.place_count else "samples"
            self.counts.add(kind, self.texts.tokens_run(item.ids))
        p_of_items = self._first_token_probabilities(features, first_token, items)
        if len(items) > 1:
            is_finite = features.isfinite().all(-1).cpu().numpy()  # [B, T - first_token]
            for row, item in enumerate(items):
                # The columns of the text's own tokens, without padding, from that before its first place on.
                first_column = item.first_place - 1 - first_token
                end_column = len(item.ids) - first_token
                if not is_finite[row, first_column:end_column].all():
                    [p_of_items[row]] = self._pass([slots[row]], [item])
        return p_of_items

    def _first_token_probabilities(
        self, features: Tensor, first_token: int, items: Sequence[TokenText]
    ) -> list[Probabilities]:
        """Return p of the first token of " [" at the places of each text, [place_count].

        features: of the texts' tokens from number `first_token` on, [B, T - first_token, F].
        """
        if not any(item.place_count for item in items):
            return [np.zeros(0, np.float32) for _ in items]
        features_of_places = []
        for row, item in enumerate(items):
            column = item.first_place - 1 - first_token  # of the token before the first place, which predicts it
            features_of_places.append(features[row, column : column + item.place_count])
        p = self._token_probability(torch.cat(features_of_places), self.start[0])  # [places of all texts]
        ends_of_items = np.cumsum([item.place_count for item in items])
        return np.split(p, ends_of_items[:-1])

    def _times_later_tokens(self, p: Probabilities, *, slot: int, kept: int) -> Probabilities:
        """Return p of all tokens of " [" at N consecutive places of a text, from p of its first token there, [N].

        Place j stands after the first `kept` + j tokens of the text in `slot`. A branch per place continues them by the
        tokens of " [", and p is multiplied by the probability of each next one.
        """
        place_count = len(p)
        branches = self.texts.branches(place_count, len(self.start))
        branches.admit(slots=[slot] * place_count, kept=[kept + place for place in range(place_count)])
        for token, next_token in pairwise(self.start):
            features = branches.step(torch.full((place_count,), token, device=self.backbone.device))
            self.counts.add("positions", branches.tokens_run)
            self.counts.passes += 1
            p = p * self._token_probability(features, next_token)
        return p

    def _token_probability(self, features: Tensor, token: int) -> Probabilities:
        """Return the probability of a token as the next one after each of N tokens with these features, [N, F]."""
        tokens = torch.full((len(features),), token, device=features.device)
        p: Probabilities = self.backbone.log_probabilities(features, tokens).exp().cpu().numpy()
        return p
