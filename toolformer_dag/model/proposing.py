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
"""p_i of a text: the probability of " [", with which a call begins, at each of its places, [place_count]."""


class ProposalBatch:
    """A batch of texts in which calls are sampled: some wait, some have open samples, and some are done.

    Every text waits at first. It starts when others are done, so that decoding steps stay full: it gets a slot, which
    is a row of the cache for its keys, runs once for p_i, and chooses points at which it is sampled. It keeps the slot
    until its last sample ends.

    Words used here:

    - p_i: the probability of " [", with which a call begins, at place i.
    - A place is a position of a text where a call may begin; a point is a place at which samples are drawn.
    - A branch is a continuation of a text by further tokens, with its own cached keys; samples are drawn on branches.

    Attributes:

    - `items`: the texts after the prompt's head, ordered by length. A text is named by its index here.
    - `start_tokens`: the tokens of " [".
    - `limits`: how many texts and branches may be cached at once. All samples of any single text fit.
    - `most_samples`: the most samples that a text may have.
    - `texts`: the cache of texts, with `limits.texts` slots.
    - `waiting`: the indices of the texts that wait, in order.
    - `slot_of_item`: by index, the slots of the texts with open samples; all other slots are free.
    - `samples`: the open samples, and what was drawn so far.
    - `counts`: how many tokens ran, by kind.
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
        """Allocate the caches; nothing runs before `run`.

        - head: the prompt's beginning before each text, with its keys cached.
        - counts: the tokens that run are added to it.
        - calls: how samples begin, are drawn and end.
        - items: the texts, ordered by length. limits: how many texts and branches the caches have room for.
        """
        self.backbone = backbone
        self.counts = counts
        self.start_tokens = calls.start
        self.items = items
        self.limits = limits
        self.most_samples = max(1, *(item.most_samples for item in items))
        longest_text = max(len(item.ids) for item in items)
        self.texts: Texts = head.texts(slots=limits.texts, width=longest_text)  # allocates the cache of texts
        branches: Branches = self.texts.branches(capacity=limits.branches, room=calls.room)  # and that of branches
        self.samples = OpenSamples(backbone, branches, counts, calls, items=len(items))
        self.waiting = deque(range(len(items)))
        self.slot_of_item: dict[int, int] = {}

    def run(self) -> list[list[list[int]]]:
        """Sample calls in all texts; return for each text the tokens of each of its samples.

        Every round starts waiting texts that fit into free slots, draws a token of every open sample, or both. It ends,
        because without open samples all slots are free, so that one text always fits.
        """
        while self.waiting or len(self.samples):
            self._admit()
            if len(self.samples):
                self.samples.step()
                self._free_slots_of_finished()
        return self.samples.drawn

    def _free_slots_of_finished(self) -> None:
        """Free the slots of the texts whose samples have all ended."""
        open_items = self.samples.open_items()
        self.slot_of_item = {item: slot for item, slot in self.slot_of_item.items() if item in open_items}

    def _admit(self) -> None:
        """Start as many of the waiting texts as there is room for: move them from `waiting` into free slots.

        A text needs a free slot in the cache of texts and room for the most samples that a text may have. While samples
        are open, texts wait until so many fit that a pass of the model is worth it.
        """
        free_slots = sorted(set(range(self.limits.texts)) - set(self.slot_of_item.values()))
        free_branches = self.limits.branches - len(self.samples)
        fitting_count = min(len(free_slots), free_branches // self.most_samples, len(self.waiting))
        if not fitting_count:
            return
        if len(self.samples) and fitting_count < self._worthwhile_count():
            return
        admitted = [self.waiting.popleft() for _ in range(fitting_count)]
        self._start(free_slots[:fitting_count], admitted)

    def _start(self, slots: Sequence[int], admitted: Sequence[int]) -> None:
        """Run texts for p_i, by which each text chooses the points at which it is sampled; begin these samples.

        - slots: where the keys of each text are cached.
        - admitted: the indices of the texts.
        """
        p_of_texts = self._probabilities(slots, [self.items[item] for item in admitted])
        started = []
        for item, slot, p in zip(admitted, slots, p_of_texts, strict=True):
            points = [point for point in self.items[item].choose(p) if len(point.streams)]  # with samples to draw
            if points:  # else nothing is sampled in this text, and its slot stays free
                self.slot_of_item[item] = slot
                started.append(StartedText(item, slot, points))
        self.samples.begin(started)

    def _worthwhile_count(self) -> int:
        """Return how many waiting texts are worth a pass of the model, which takes long: half of a full pass.

        A full pass is limited by its tokens, by the slots for texts, and by the room for their samples. Where fewer
        texts wait, all that wait are worth it. At least 1.
        """
        longest_text = self.items[self.waiting[-1]]  # texts wait in order of their length
        texts_of_full_pass = self.backbone.budget.tokens // self.texts.tokens_run(longest_text.ids)
        texts_in_caches = min(self.limits.texts, self.limits.branches // self.most_samples)
        most_at_once = min(texts_of_full_pass, texts_in_caches)
        return min(len(self.waiting), max(1, most_at_once // 2))

    def _probabilities(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Run texts, cache their keys in `slots`, and return for each text p of " [" at its places, [place_count].

        A place is a position in a text where a call may begin. " [" may be several tokens: one pass over a text gives p
        of the first token at all places. `_multiply_by_later_tokens` then brings in the others.
        """
        p_of_texts: list[Probabilities] = []
        lengths = [self.texts.tokens_run(item.ids) for item in items]
        for batch in batches(range(len(items)), lengths, self.backbone.budget.tokens):
            p_of_texts += self._pass([slots[index] for index in batch], [items[index] for index in batch])
        if len(self.start_tokens) > 1:
            for slot, item, p in zip(slots, items, p_of_texts, strict=True):
                self._multiply_by_later_tokens(p, slot=slot, item=item)
        return p_of_texts

    def _multiply_by_later_tokens(self, p: Probabilities, *, slot: int, item: TokenText) -> None:
        """Multiply p of the first token of " [" at a text's places by p of its other tokens; changes `p` in place.

        Each place needs a branch (a continuation of the text), and `limits.probes` of them fit into the cache, so the
        places are taken in parts. p: [place_count]. slot: where the keys of the text are cached.
        """
        places_per_part = self.limits.probes
        for first in range(0, item.place_count, places_per_part):
            part = slice(first, first + places_per_part)
            p[part] = self._times_later_tokens(p[part], slot=slot, tokens_before=item.first_place + first)

    def _pass(self, slots: Sequence[int], items: Sequence[TokenText]) -> list[Probabilities]:
        """Run texts in one pass, and cache their keys in `slots`; return p of the first token of " [" at their places.

        An array of [place_count] per text. A text whose features are not finite runs again alone: in half precision the
        padding of a pass may overflow, and a model's own attention does not hide it from the text.
        """
        # The token before a place predicts what stands there: features begin with the first such token of any text.
        first_token = min(item.first_place for item in items) - 1
        features = self.texts.features(slots, [item.ids for item in items], first_token)  # [B, T - first_token, F]
        self.counts.passes += 1
        for item in items:
            kind = "positions" if item.place_count else "samples"
            self.counts.add(kind, self.texts.tokens_run(item.ids))
        p_of_texts = self._first_token_probabilities(features, first_token, items)
        if len(items) > 1:
            for index in _texts_with_overflow(features, first_token, items):
                [p_of_texts[index]] = self._pass([slots[index]], [items[index]])  # alone
        return p_of_texts

    def _first_token_probabilities(
        self, features: Tensor, first_token: int, items: Sequence[TokenText]
    ) -> list[Probabilities]:
        """Return p of the first token of " [" at the places of each text: a list with an array [place_count] per text.

        features: the last hidden states of the texts' tokens from number `first_token` on, [B, T - first_token, F].

        A place is a position where a call may begin. The token before a place predicts what stands there: place 5 is
        predicted by token 4, which is in column 4 - `first_token`.
        """
        if not any(item.place_count for item in items):
            return [np.zeros(0, np.float32) for _ in items]
        features_of_places = []
        for row, item in enumerate(items):
            column = item.first_place - 1 - first_token  # of the token before the first place, which predicts it
            features_of_places.append(features[row, column : column + item.place_count])
        p = self._token_probability(torch.cat(features_of_places), self.start_tokens[0])  # [places of all texts]
        ends_of_items = np.cumsum([item.place_count for item in items])
        return np.split(p, ends_of_items[:-1])

    def _times_later_tokens(self, p: Probabilities, *, slot: int, tokens_before: int) -> Probabilities:
        """Return p of all tokens of " [" at N consecutive places of a text, from p of its first token there, [N].

        Place j is after the first `tokens_before` + j tokens of the text whose keys are cached in `slot`. A branch per
        place continues these tokens by those of " [", and p is multiplied by the probability of each next one. Where
        " [" is tokens 5 and 6: every branch runs 5, and p is multiplied by the probability of 6 after it.
        """
        place_count = len(p)
        branches = self.texts.branches(capacity=place_count, room=len(self.start_tokens))
        branches.admit(slots=[slot] * place_count, kept=[tokens_before + place for place in range(place_count)])
        for token, next_token in pairwise(self.start_tokens):
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


def _texts_with_overflow(features: Tensor, first_token: int, items: Sequence[TokenText]) -> list[int]:
    """Return the indices of the texts with NaN or infinite features at or after the token before their first place.

    features: of the texts' tokens from number `first_token` on, [B, T - first_token, F]. Padding does not count.
    """
    is_finite = features.isfinite().all(-1).cpu().numpy()  # [B, T - first_token]
    overflowed = []
    for row, item in enumerate(items):
        first_column = item.first_place - 1 - first_token
        end_column = len(item.ids) - first_token  # the rest is padding
        if not is_finite[row, first_column:end_column].all():
            overflowed.append(row)
    return overflowed
