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
from toolformer_dag.model.memory import CacheLimits, iter_batches
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
    - Place: a position of a text where a call may begin.
    - Point: a place at which samples are drawn.
    - Branch: a continuation of a text by further tokens, with its own cached keys. Samples are drawn on branches.

    Attributes:
        backbone: The model.
        token_counts: How many tokens ran, by kind.
        call_start_ids: The tokens of " [".
        texts: The texts after the prompt, ordered by length. A text is named by its index here.
        cache_limits: How many texts and branches may be cached at once. All samples of any single text fit.
        max_samples_per_text: The most samples that a text may have.
        cached_texts: The cache of texts, with `cache_limits.max_texts` slots.
        waiting_indices: The indices of the texts that wait, in order.
        slot_by_text_index: By index, the slots of the texts with open samples. All other slots are free.
        open_samples: The open samples, and what was drawn so far.
    """

    def __init__(
        self,
        *,
        backbone: Backbone,
        cached_prompt: Prompt,
        token_counts: TokenCounts,
        call_sampling: CallSampling,
        texts: Sequence[TokenText],
        cache_limits: CacheLimits,
    ) -> None:
        """Allocate the caches. The model does not run before `sample_calls`.

        Args:
            backbone: The model.
            cached_prompt: The tokens that stand before every text, with their keys cached.
            token_counts: The numbers of tokens that ran, to which those of this batch are added.
            call_sampling: How samples begin, are drawn and end.
            texts: The texts, ordered by length.
            cache_limits: How many texts and branches (continuations of texts) the caches hold.
        """
        self.backbone = backbone
        self.token_counts = token_counts
        self.call_start_ids = call_sampling.call_start_ids
        self.texts = texts
        self.cache_limits = cache_limits
        self.max_samples_per_text = max(1, *(text.max_samples for text in texts))  # of a single text
        self.cached_texts: Texts = cached_prompt.create_text_cache(
            slot_count=cache_limits.max_texts, max_text_tokens=max(len(text.token_ids) for text in texts)
        )
        # A branch is a continuation of a text by the tokens of a sample, with its own cached keys.
        branches: Branches = self.cached_texts.create_branch_cache(
            max_branches=cache_limits.max_branches, max_tokens=call_sampling.max_branch_tokens
        )
        self.open_samples = OpenSamples(backbone, branches, token_counts, call_sampling, text_count=len(texts))
        self.waiting_indices = deque(range(len(texts)))  # the indices of the texts that have not started
        # For each text with open samples, the row of the cache with its keys.
        self.slot_by_text_index: dict[int, int] = {}

    def sample_calls(self) -> list[list[list[int]]]:
        """Sample calls in all texts.

        Every round starts waiting texts, if enough of them fit into the caches, and draws a token of every open sample.

        Returns:
            For each text, and for each of its samples, the drawn tokens.
        """
        # This ends: without open samples all slots of the cache are free, so that at least one text starts.
        while self.waiting_indices or len(self.open_samples):
            self._start_waiting_texts()
            if len(self.open_samples):
                # This appends the drawn tokens to `drawn_ids_by_text`, and closes samples that end.
                self.open_samples.advance_samples()
                self._free_slots_of_finished_texts()
        return self.open_samples.drawn_ids_by_text

    def _free_slots_of_finished_texts(self) -> None:
        """Free the slots of the texts whose samples have all ended."""
        open_text_indices = self.open_samples.find_open_text_indices()
        self.slot_by_text_index = {
            text_index: slot for text_index, slot in self.slot_by_text_index.items() if text_index in open_text_indices
        }

    def _start_waiting_texts(self) -> None:
        """Start as many waiting texts as fit into the caches, which removes them from `waiting_indices`.

        To start them takes a pass of the model. If they are too few to be worth it, none start yet, unless there are no
        open samples to go on with.
        """
        free_slots = self._list_free_slots()
        fitting_count = min(len(free_slots), self._count_texts_with_room_for_branches(), len(self.waiting_indices))
        if fitting_count == 0:
            return

        has_open_samples = len(self.open_samples) > 0
        if has_open_samples and fitting_count < self._count_worthwhile_texts():
            return

        text_indices = [self.waiting_indices.popleft() for _ in range(fitting_count)]
        self._start_texts(free_slots[:fitting_count], text_indices)

    def _list_free_slots(self) -> list[int]:
        """List the slots (rows of the cache) that no text with open samples has, in order."""
        all_slots = set(range(self.cache_limits.max_texts))
        used_slots = set(self.slot_by_text_index.values())
        return sorted(all_slots - used_slots)

    def _count_texts_with_room_for_branches(self) -> int:
        """Count the further texts for which the cache of branches has space, if each has the most samples of a text."""
        free_branches = self.cache_limits.max_branches - len(self.open_samples)
        return free_branches // self.max_samples_per_text

    def _start_texts(self, slots: Sequence[int], text_indices: Sequence[int]) -> None:
        """Run some texts through the model, choose where calls are to be sampled in them, and begin to sample.

        A text chooses these points by how probable " [", with which a call begins, is at each of its places. This
        fills `slot_by_text_index`, and the new samples are added to `open_samples`.

        Args:
            slots: For each text, the row of the cache in which its keys are kept.
            text_indices: The texts, as indices into `texts`.
        """
        texts = [self.texts[index] for index in text_indices]
        probabilities_by_text = self._compute_probabilities(slots, texts)

        started_texts = []
        for text_index, slot, probabilities in zip(text_indices, slots, probabilities_by_text, strict=True):
            points = _choose_points(self.texts[text_index], probabilities)
            if not points:  # nothing is sampled in this text, so its slot stays free
                continue
            self.slot_by_text_index[text_index] = slot
            started_texts.append(StartedText(text_index, slot, points))
        self.open_samples.start_texts(started_texts)

    def _count_worthwhile_texts(self) -> int:
        """Count the waiting texts that are worth a pass: half of a full one, but at least 1, or all if fewer wait."""
        half_of_full_pass = max(1, self._count_texts_of_full_pass() // 2)
        return min(len(self.waiting_indices), half_of_full_pass)

    def _count_texts_of_full_pass(self) -> int:
        """Count the texts that could start in one pass at most, limited by its tokens, the slots and the branches."""
        longest_text = self.texts[self.waiting_indices[-1]]  # texts wait in order of their length
        tokens_to_run = self.cached_texts.count_tokens_to_run(longest_text.token_ids)
        texts_in_budget = self.backbone.token_budget.max_tokens // tokens_to_run
        texts_with_branches = self.cache_limits.max_branches // self.max_samples_per_text
        return min(texts_in_budget, self.cache_limits.max_texts, texts_with_branches)

    def _compute_probabilities(self, slots: Sequence[int], texts: Sequence[TokenText]) -> list[Probabilities]:
        """Run some texts through the model, and compute the probability of " [" at each of their places.

        Args:
            slots: For each text, the row of the cache in which its keys are kept.
            texts: The texts.

        Returns:
            For each text, the probabilities, [place_count].
        """
        # These are the probabilities of the first token of " [".
        probabilities_by_text = self._run_passes(slots, texts)
        if len(self.call_start_ids) == 1:
            return probabilities_by_text

        for slot, text, probabilities in zip(slots, texts, probabilities_by_text, strict=True):
            self._multiply_by_later_tokens(probabilities, slot=slot, text=text)  # in place
        return probabilities_by_text

    def _run_passes(self, slots: Sequence[int], texts: Sequence[TokenText]) -> list[Probabilities]:
        """Run some texts in several passes of the model, each of at most as many tokens as the budget allows.

        Returns:
            For each text, the probability of the first token of " [" at each of its places, [place_count].
        """
        token_counts = [self.cached_texts.count_tokens_to_run(text.token_ids) for text in texts]

        probabilities_by_text: list[Probabilities] = []
        for batch in iter_batches(range(len(texts)), token_counts, self.backbone.token_budget.max_tokens):
            batch_slots = [slots[index] for index in batch]
            batch_texts = [texts[index] for index in batch]
            probabilities_by_text += self._run_pass(batch_slots, batch_texts)
        return probabilities_by_text

    def _multiply_by_later_tokens(self, probabilities: Probabilities, *, slot: int, text: TokenText) -> None:
        """Turn the probabilities of the first token of " [" at the places of a text into those of all its tokens.

        Args:
            probabilities: The probabilities, [place_count]. They are changed in place.
            slot: The row of the cache that holds the keys of the text.
            text: The text.
        """
        places_at_once = self.cache_limits.max_probes  # each place needs a branch, and the cache holds only so many
        for first_place in range(0, text.place_count, places_at_once):
            part = slice(first_place, first_place + places_at_once)
            probabilities[part] = self._compute_joint_probabilities(
                probabilities[part], slot=slot, token_count_before=text.first_place + first_place
            )

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
        pass_features = self._compute_features(slots, texts)
        probabilities_by_text = self._compute_first_probabilities(pass_features, texts)
        if len(texts) == 1:
            return probabilities_by_text

        for index in pass_features.list_overflowed_rows(texts):
            [probabilities_alone] = self._run_pass([slots[index]], [texts[index]])
            probabilities_by_text[index] = probabilities_alone
        return probabilities_by_text

    def _compute_features(self, slots: Sequence[int], texts: Sequence[TokenText]) -> "PassFeatures":
        """Run some texts in one pass of the model, cache their keys in `slots`, and count their tokens.

        Returns:
            The features from the first token on that is needed for any of the texts.
        """
        first_token_index = min(_find_predicting_token_index(text) for text in texts)
        token_sequences = [text.token_ids for text in texts]
        hidden_states = self.cached_texts.run_texts(slots, token_sequences, first_token_index)

        self.token_counts.passes += 1
        for text in texts:
            # Tokens are counted by what they are run for. At its places, a text may get calls, and their probabilities
            # are computed. A text without places has known ones, and runs only so that samples can be drawn after it.
            count_field = "positions" if text.place_count else "samples"
            self.token_counts.add_tokens(count_field, self.cached_texts.count_tokens_to_run(text.token_ids))
        return PassFeatures(hidden_states, first_token_index)

    def _compute_first_probabilities(
        self, pass_features: "PassFeatures", texts: Sequence[TokenText]
    ) -> list[Probabilities]:
        """Compute the probability of the first token of " [" at each place of each text, from the features of a pass.

        Returns:
            For each text, the probabilities, [place_count].
        """
        if not any(text.place_count for text in texts):
            return [np.zeros(0, np.float32) for _ in texts]

        place_features = pass_features.select_place_features(texts)  # [places of all texts, F]
        probabilities = self._compute_token_probabilities(place_features, self.call_start_ids[0])

        # All places are in one array, text after text. Cut it at the end of each text but the last.
        text_ends = np.cumsum([text.place_count for text in texts])
        return np.split(probabilities, text_ends[:-1])

    def _compute_joint_probabilities(
        self, first_token_probabilities: Probabilities, *, slot: int, token_count_before: int
    ) -> Probabilities:
        """Compute the probability that " [", of several tokens, stands at each of N neighboring places of a text.

        Args:
            first_token_probabilities: The probability of the first token of " [" at these places, [N].
            slot: The row of the cache that holds the keys of the text.
            token_count_before: How many tokens of the text stand before the first of these places.

        Returns:
            The product of the probabilities of the tokens, each after the earlier ones, [N].
        """
        place_count = len(first_token_probabilities)

        # Each place gets a branch: a continuation of the text up to there, with its own cached keys, by the tokens
        # of " [".
        branches = self.cached_texts.create_branch_cache(max_branches=place_count, max_tokens=len(self.call_start_ids))
        branches.start_branches([slot] * place_count, range(token_count_before, token_count_before + place_count))

        joint_probabilities = first_token_probabilities
        for token_id, next_token_id in pairwise(self.call_start_ids):
            # This appends a token to all branches, and computes the probability of the next one after it.
            later_probabilities = self._compute_probabilities_after_token(
                branches, token_id, next_token_id=next_token_id
            )
            joint_probabilities = joint_probabilities * later_probabilities
        return joint_probabilities

    def _compute_probabilities_after_token(
        self, branches: Branches, token_id: int, *, next_token_id: int
    ) -> Probabilities:
        """Append a token to all N branches, run it, and compute the probability of `next_token_id` after it.

        Returns:
            The probability for each branch, [N].
        """
        token_ids = torch.full((branches.branch_count,), token_id, device=self.backbone.device)  # [N]
        features = branches.run_next_tokens(token_ids)  # [N, F]
        self.token_counts.add_tokens("positions", branches.last_step_token_count)
        self.token_counts.passes += 1
        return self._compute_token_probabilities(features, next_token_id)

    def _compute_token_probabilities(self, features: Tensor, token_id: int) -> Probabilities:
        """Compute the probability that a token follows each of N tokens.

        Args:
            features: The last hidden states of the N tokens, [N, F].
            token_id: The token that may follow.

        Returns:
            The probabilities, [N].
        """
        target_ids = torch.full((len(features),), token_id, device=features.device)
        log_probabilities = self.backbone.compute_log_probabilities(features, target_ids)
        probabilities: Probabilities = log_probabilities.exp().cpu().numpy()
        return probabilities


class PassFeatures(NamedTuple):
    """The last hidden states of B texts that ran in one pass.

    Attributes:
        hidden_states: A column per token from number `first_token_index` on, [B, columns, F].
        first_token_index: The index of the first of these tokens in its text.
    """

    hidden_states: Tensor
    first_token_index: int

    def select_place_features(self, texts: Sequence[TokenText]) -> Tensor:
        """Return the features that predict what stands at the places of all texts, [places of all texts, F]."""
        features_by_text = []
        for row, text in enumerate(texts):
            first_column = self.find_column_before_places(text)
            end_column = first_column + text.place_count
            features_by_text.append(self.hidden_states[row, first_column:end_column])
        return torch.cat(features_by_text)

    def list_overflowed_rows(self, texts: Sequence[TokenText]) -> list[int]:
        """List the texts with a feature that is NaN or infinite, as their rows of `hidden_states`.

        Only the tokens that count are checked: from the one before the text's first place, where a call may begin, to
        its last token. The padding after it is ignored.
        """
        is_finite = self.hidden_states.isfinite().all(-1).cpu().numpy()  # [B, columns]

        rows = []
        for row, text in enumerate(texts):
            first_column = self.find_column_before_places(text)
            end_column = len(text.token_ids) - self.first_token_index  # column 0 belongs to token `first_token_index`
            if not is_finite[row, first_column:end_column].all():
                rows.append(row)
        return rows

    def find_column_before_places(self, text: TokenText) -> int:
        """Return the column of the token before the text's first place, which predicts what stands there."""
        return _find_predicting_token_index(text) - self.first_token_index


def _choose_points(text: TokenText, probabilities: Probabilities) -> list[SamplePoint]:
    """Return the points that a text chooses by p of " [" at its places, without those with no sample to draw."""
    return [point for point in text.choose_points(probabilities) if len(point.uniforms)]


def _find_predicting_token_index(text: TokenText) -> int:
    """Return the index of the token before the first place of a text: it predicts what stands there."""
    return text.first_place - 1
