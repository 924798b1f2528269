"""Compute the probability of " [" at every place of a text and sample after it (paper, section 2)."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import SamplePoint, TokenCounts, TokenText
from toolformer_dag.model.memory import CacheLimits, batches
from toolformer_dag.model.open_samples import CallSampling, OpenSamples, StartedText
from toolformer_dag.model.sharing import Branches, Prompt, Texts

Probabilities = NDArray[np.float32]
"""p_i of a text: the probability of " [", with which a call begins, at each of its places, [place_count]."""


class ProposalBatch:
    """A batch of texts in which calls are sampled: some wait, some have open samples, and some are done.

    Every text waits at first. It starts when others are done, so that decoding steps stay full: it gets a slot, which
    is a row of the cache for its keys, runs once for p_i, and chooses points at which it is sampled. It keeps the slot
    until its last sample ends. Words used here:

    - p_i: the probability of " [", with which a call begins, at place i.
    - place: a position of a text where a call may begin. point: a place at which samples are drawn.
    - branch: a continuation of a text by further tokens, with its own cached keys; samples are drawn on branches.

    Attributes:

    - `backbone`: the model.
    - `counts`: how many tokens ran, by kind.
    - `start_tokens`: the tokens of " [".
    - `texts`: the texts after the prompt, ordered by length. A text is named by its index here.
    - `limits`: how many texts and branches may be cached at once. All samples of any single text fit.
    - `most_samples`: the most samples that a text may have.
    - `cached_texts`: the cache of texts, with `limits.texts` slots.
    - `waiting`: the indices of the texts that wait, in order.
    - `slot_of_text`: by index, the slots of the texts with open samples; all other slots are free.
    - `samples`: the open samples, and what was drawn so far.
    """

    def __init__(
        self,
        *,
        backbone: Backbone,
        prompt: Prompt,
        counts: TokenCounts,
        calls: CallSampling,
        texts: Sequence[TokenText],
        limits: CacheLimits,
    ) -> None:
        """Allocate the caches. The model does not run before `run`.

        Args:
            backbone: The model.
            prompt: The tokens that stand before every text, with their keys cached.
            counts: The numbers of tokens that ran, to which those of this batch are added.
            calls: How samples begin, are drawn and end.
            texts: The texts, ordered by length.
            limits: How many texts and branches (continuations of texts) the caches hold.
        """
        self.backbone = backbone
        self.counts = counts
        self.start_tokens = calls.start
        self.texts = texts
        self.limits = limits
        self.most_samples = max(1, *(text.most_samples for text in texts))  # of a single text
        self.cached_texts: Texts = prompt.texts(slots=limits.texts, width=max(len(text.ids) for text in texts))
        # A branch is a continuation of a text by the tokens of a sample, with its own cached keys.
        branches: Branches = self.cached_texts.branches(capacity=limits.branches, max_tokens=calls.max_tokens)
        self.samples = OpenSamples(backbone, branches, counts, calls, text_count=len(texts))
        self.waiting = deque(range(len(texts)))  # the indices of the texts that have not started
        self.slot_of_text: dict[int, int] = {}  # for each text with open samples, the row of the cache with its keys

    def run(self) -> list[list[list[int]]]:
        """Sample calls in all texts.

        Every round starts waiting texts, if enough of them fit into the caches, and draws a token of every open sample.

        Returns:
            For each text, and for each of its samples, the drawn tokens.
        """
        # This ends: without open samples all slots of the cache are free, so that at least one text starts.
        while self.waiting or len(self.samples):
            self._start_waiting()
            if len(self.samples):
                self.samples.step()  # appends the drawn tokens to `samples.drawn`, and closes samples that end
                self._free_slots_of_finished()
        return self.samples.drawn

    def _free_slots_of_finished(self) -> None:
        """Free the slots of the texts whose samples have all ended."""
        open_texts = self.samples.open_texts()
        self.slot_of_text = {text: slot for text, slot in self.slot_of_text.items() if text in open_texts}

    def _start_waiting(self) -> None:
        """Start as many waiting texts as fit into the caches.

        If they are too few to be worth a pass of the model, none start yet. But if there are no open samples to go on
        with, any number is enough.
        """
        free_slots = self._list_free_slots()
        fitting_count = min(len(free_slots), self._count_texts_with_branches(), len(self.waiting))
        if not fitting_count:
            return

        samples_can_go_on = len(self.samples) > 0
        if samples_can_go_on and fitting_count < self._count_worthwhile_texts():
            return

        started = [self.waiting.popleft() for _ in range(fitting_count)]
        self._start_texts(free_slots[:fitting_count], started)

    def _list_free_slots(self) -> list[int]:
        """Return the slots of the cache that no text with open samples has, in order."""
        return sorted(set(range(self.limits.texts)) - set(self.slot_of_text.values()))

    def _count_texts_with_branches(self) -> int:
        """Return for how many more texts, with the most samples of a text each, the cache of branches has space."""
        free_branches = self.limits.branches - len(self.samples)
        return free_branches // self.most_samples

    def _start_texts(self, slots: Sequence[int], indices: Sequence[int]) -> None:
        """Run some texts through the model, and open samples at the points that each text chooses.

        A text chooses by the probabilities of " [", with which a call begins, at its places.

        Args:
            slots: For each text, the row of the cache in which its keys are kept.
            indices: The texts, as indices into `texts`.
        """
        p_of_texts = self._compute_probabilities(slots, [self.texts[index] for index in indices])

        started = []
        for index, slot, p in zip(indices, slots, p_of_texts, strict=True):
            points = _choose_points(self.texts[index], p)
            if not points:
                continue  # nothing is sampled in this text, so its slot stays free
            self.slot_of_text[index] = slot
            started.append(StartedText(index, slot, points))
        self.samples.begin(started)

    def _count_worthwhile_texts(self) -> int:
        """Return how many waiting texts are worth a pass: half of a full one, but at least 1, or all if fewer wait."""
        return min(len(self.waiting), max(1, self._count_texts_of_full_pass() // 2))

    def _count_texts_of_full_pass(self) -> int:
        """Return how many texts could start in one pass at most, limited by its tokens, the slots and the branches."""
        longest_text = self.texts[self.waiting[-1]]  # texts wait in order of their length
        texts_in_budget = self.backbone.budget.tokens // self.cached_texts.tokens_run(longest_text.ids)
        texts_with_branches = self.limits.branches // self.most_samples
        return min(texts_in_budget, self.limits.texts, texts_with_branches)

    def _compute_probabilities(self, slots: Sequence[int], texts: Sequence[TokenText]) -> list[Probabilities]:
        """Run some texts through the model, and compute the probability of " [" at each of their places.

        Args:
            slots: For each text, the row of the cache in which its keys are kept.
            texts: The texts.

        Returns:
            For each text, the probabilities, [place_count].
        """
        p_of_texts = self._run_passes(slots, texts)
        if len(self.start_tokens) > 1:  # " [" is several tokens, and these are p of the first one
            for slot, text, p in zip(slots, texts, p_of_texts, strict=True):
                self._multiply_by_later_tokens(p, slot=slot, text=text)
        return p_of_texts

    def _run_passes(self, slots: Sequence[int], texts: Sequence[TokenText]) -> list[Probabilities]:
        """Run some texts in several passes of the model, each of at most as many tokens as the budget allows.

        Returns:
            For each text, the probability of the first token of " [" at each of its places, [place_count].
        """
        p_of_texts: list[Probabilities] = []
        lengths = [self.cached_texts.tokens_run(text.ids) for text in texts]
        for batch in batches(range(len(texts)), lengths, self.backbone.budget.tokens):
            p_of_texts += self._run_pass([slots[index] for index in batch], [texts[index] for index in batch])
        return p_of_texts

    def _multiply_by_later_tokens(self, p: Probabilities, *, slot: int, text: TokenText) -> None:
        """Turn the probabilities of the first token of " [" at the places of a text into those of all its tokens.

        Args:
            p: The probabilities, [place_count]. They are changed in place.
            slot: The row of the cache that holds the keys of the text.
            text: The text.
        """
        places_at_once = self.limits.probes  # each place needs a branch, and the cache holds only so many
        for first_place in range(0, text.place_count, places_at_once):
            part = slice(first_place, first_place + places_at_once)
            tokens_before = text.first_place + first_place
            p[part] = self._compute_joint_probabilities(p[part], slot=slot, tokens_before=tokens_before)

    def _run_pass(self, slots: Sequence[int], texts: Sequence[TokenText]) -> list[Probabilities]:
        """Run some texts through the model in one pass, and compute how probably a call begins at each of their places.

        If the model's features of a text are not finite, the text runs again alone. In half precision the padding of a
        pass may overflow, and a model's own attention does not hide it from the text.

        Args:
            slots: For each text, the row of the cache in which its keys are kept.
            texts: The texts.

        Returns:
            For each text, the probability of the first token of " [", with which a call begins, at each of its places,
            [place_count].
        """
        features = self._compute_features(slots, texts)
        p_of_texts = self._compute_first_probabilities(features, texts)
        if len(texts) > 1:
            for index in features.list_overflowed_rows(texts):
                [p_of_text] = self._run_pass([slots[index]], [texts[index]])  # alone
                p_of_texts[index] = p_of_text
        return p_of_texts

    def _compute_features(self, slots: Sequence[int], texts: Sequence[TokenText]) -> "PassFeatures":
        """Run some texts in one pass of the model, cache their keys in `slots`, and count their tokens.

        Returns:
            The features from the first token on that is needed for any of the texts.
        """
        first_token = min(_find_predicting_token(text) for text in texts)
        features = self.cached_texts.features(slots, [text.ids for text in texts], first_token)

        self.counts.passes += 1
        for text in texts:
            kind = "positions" if text.place_count else "samples"
            self.counts.add(kind, self.cached_texts.tokens_run(text.ids))
        return PassFeatures(features, first_token)

    def _compute_first_probabilities(self, features: "PassFeatures", texts: Sequence[TokenText]) -> list[Probabilities]:
        """Compute the probability of the first token of " [" at each place of each text, from the features of a pass.

        Returns:
            For each text, the probabilities, [place_count].
        """
        if not any(text.place_count for text in texts):
            return [np.zeros(0, np.float32) for _ in texts]
        p = self._compute_token_probability(features.of_places(texts), self.start_tokens[0])  # [places of all texts]
        ends_of_texts = np.cumsum([text.place_count for text in texts])
        return np.split(p, ends_of_texts[:-1])

    def _compute_joint_probabilities(
        self, p_of_first: Probabilities, *, slot: int, tokens_before: int
    ) -> Probabilities:
        """Compute the probability of all tokens of " [" at N consecutive places of a text.

        Args:
            p_of_first: The probability of the first token of " [" at these places, [N].
            slot: The row of the cache that holds the keys of the text.
            tokens_before: How many tokens of the text stand before the first of these places.

        Returns:
            The product of the probabilities of the tokens, each after the earlier ones, [N].
        """
        place_count = len(p_of_first)

        # Each place gets a branch: a continuation of the text up to there, with its own cached keys, by the tokens
        # of " [".
        branches = self.cached_texts.branches(capacity=place_count, max_tokens=len(self.start_tokens))
        branches.admit([slot] * place_count, range(tokens_before, tokens_before + place_count))

        p = p_of_first
        for token, next_token in pairwise(self.start_tokens):
            # Appends `token` to all branches, and computes the probability of `next_token` after it.
            p = p * self._compute_probability_after(branches, token, next_token=next_token)
        return p

    def _compute_probability_after(self, branches: Branches, token: int, *, next_token: int) -> Probabilities:
        """Append a token to all N branches, and run it; return the probability of `next_token` after it, [N]."""
        features = branches.step(torch.full((branches.count,), token, device=self.backbone.device))  # [N, F]
        self.counts.add("positions", branches.tokens_run)
        self.counts.passes += 1
        return self._compute_token_probability(features, next_token)

    def _compute_token_probability(self, features: Tensor, token: int) -> Probabilities:
        """Return the probability of a token as the next one after each of N tokens with these features, [N, F]."""
        tokens = torch.full((len(features),), token, device=features.device)
        p: Probabilities = self.backbone.log_probabilities(features, tokens).exp().cpu().numpy()
        return p


class PassFeatures(NamedTuple):
    """The last hidden states of B texts that ran in one pass.

    - `tensor` [B, columns, F]: a column per token from number `first_token` on.
    - `first_token`: the index of the first of these tokens in its text.
    """

    tensor: Tensor
    first_token: int

    def of_places(self, texts: Sequence[TokenText]) -> Tensor:
        """Return the features that predict what stands at the places of all texts, [places of all texts, F]."""
        parts = []
        for row, text in enumerate(texts):
            column = self.column_before_places(text)
            parts.append(self.tensor[row, column : column + text.place_count])
        return torch.cat(parts)

    def list_overflowed_rows(self, texts: Sequence[TokenText]) -> list[int]:
        """List the texts with a feature that is NaN or infinite, as their rows of `tensor`.

        Only the tokens that count are checked: from the one before the text's first place, where a call may begin, to
        its last token. The padding after it is ignored.
        """
        is_finite = self.tensor.isfinite().all(-1).cpu().numpy()  # [B, columns]

        rows = []
        for row, text in enumerate(texts):
            first_column = self.column_before_places(text)
            end_column = len(text.ids) - self.first_token  # because column 0 belongs to token `first_token`
            if not is_finite[row, first_column:end_column].all():
                rows.append(row)
        return rows

    def column_before_places(self, text: TokenText) -> int:
        """Return the column of the token before the text's first place, which predicts what stands there."""
        return _find_predicting_token(text) - self.first_token


def _choose_points(text: TokenText, p: Probabilities) -> list[SamplePoint]:
    """Return the points that a text chooses by p of " [" at its places, without those with no sample to draw."""
    return [point for point in text.choose(p) if len(point.uniforms)]


def _find_predicting_token(text: TokenText) -> int:
    """Return the index of the token before the first place of a text: it predicts what stands there."""
    return text.first_place - 1
