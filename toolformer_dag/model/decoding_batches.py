"""Decode rows in batches: with a cache where it reproduces the model's own logits, else without."""

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from toolformer_dag.model.loading import (
    CHECK_TOKENS,
    TOLERANCES,
    LanguageModel,
    agrees,
    exact_products,
    logits_or_none,
    own_logits,
)


class DecodingBatch(ABC):
    """Sequences of different lengths.

    `scores` [rows, V], float32: the logits of each row's next token.
    """

    scores: torch.Tensor

    @abstractmethod
    def __init__(self, language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> None:
        """Run the sequences."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> None:
        """Append a token to each row."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""

    @abstractmethod
    def branch(self, row: int) -> "DecodingBatch":
        """Copy a row to a batch of its own."""

    def ranks(self, token: int) -> list[int]:
        """Return, by row, how many tokens are more likely than `token`."""
        ranks: list[int] = (self.scores > self.scores[:, token, None]).sum(-1).tolist()
        return ranks

    @torch.inference_mode()
    def forbid(self, places: Sequence[tuple[int, int]]) -> None:
        """Forbid pairs of a row and its next token."""
        if places:
            rows, tokens = zip(*places, strict=True)
            self.scores[list(rows), list(tokens)] = -torch.inf

    @torch.inference_mode()
    def permit(self, row: int, tokens: Sequence[int]) -> None:
        """Forbid all but these next tokens in a row."""
        permitted = self.scores[row, list(tokens)]
        self.scores[row] = -torch.inf
        self.scores[row, list(tokens)] = permitted

    def best(self) -> list[int]:
        """Return the most likely next token of each row."""
        best: list[int] = self.scores.argmax(-1).tolist()
        return best

    @torch.inference_mode()
    def rank_of_sequence(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many tokens but the first of `tokens` are more likely than all of `tokens` in this order."""
        others = self.scores[row].log_softmax(-1)
        others[tokens[0]] = -torch.inf
        return int((others > self.log_probability(row, tokens)).sum())

    @torch.inference_mode()
    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Return the joint log probability of `tokens` as the continuation of a row; nothing is appended."""
        total = float(self.scores[row].log_softmax(-1)[tokens[0]])
        if len(tokens) > 1:
            branch = self.branch(row)
            for before, token in pairwise(tokens):
                branch.step([before])
                total += float(branch.scores[0].log_softmax(-1)[token])
        return total


class CachedBatch(DecodingBatch):
    """Rows with a key-value cache, padded on the left; padding is masked and takes no position."""

    def __init__(self, language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> None:
        self._model = language_model.model
        self._device = language_model.device
        self._positioned = "position_ids" in inspect.signature(self._model.forward).parameters
        longest = max(map(len, sequences))
        self._mask = self._rows([[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences])
        self._cache: Any = DynamicCache(config=self._model.config)
        self.scores = self._forward(self._rows([[0] * (longest - len(ids)) + list(ids) for ids in sequences]))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> None:
        """Append a token to each row."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.scores = self._forward(self._rows([[token] for token in tokens]))

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows and their part of the cache."""
        index = torch.tensor(rows, device=self._device)
        self._cache.reorder_cache(index)  # supported by every kind of layer, linear attention too
        self._mask = self._mask[index]
        self.scores = self.scores[index]

    def branch(self, row: int) -> "CachedBatch":
        """Copy a row, with its cache, to a batch of its own."""
        branch = copy.copy(self)
        branch._cache = copy.deepcopy(self._cache)
        branch.keep([row])
        return branch

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"position_ids": positions} if self._positioned else {}
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **options,
        )
        scores: torch.Tensor = output.logits[:, -1].float()
        return scores

    def _rows(self, values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)


class RecomputedBatch(DecodingBatch):
    """Rows recomputed in full: for models without keys (Mamba, RWKV) or with a cache that changes the logits."""

    def __init__(self, language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> None:
        self._model = language_model.model
        self._sequences = [list(ids) for ids in sequences]
        self.scores = self._forward()

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> None:
        """Append a token to each row."""
        self._sequences = [[*ids, token] for ids, token in zip(self._sequences, tokens, strict=True)]
        self.scores = self._forward()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._sequences = [self._sequences[row] for row in rows]
        self.scores = self.scores[list(rows)]

    def branch(self, row: int) -> "RecomputedBatch":
        """Copy a row to a batch of its own."""
        branch = copy.copy(self)
        branch.keep([row])
        return branch

    def _forward(self) -> torch.Tensor:
        return torch.stack([own_logits(self._model, ids)[-1] for ids in self._sequences])


_log = logging.getLogger(__name__)
BATCH_ROWS = 64
CHECK_SEQUENCES = (CHECK_TOKENS[:7], CHECK_TOKENS[2:5])
"""Sequences of different length, so that the shorter is padded in a batch."""


@dataclass(frozen=True, slots=True)
class BatchMethod:
    """The batch class for a model, and the most rows in a batch."""

    kind: type[DecodingBatch]
    rows: int


_METHODS: WeakKeyDictionary[Any, BatchMethod] = WeakKeyDictionary()


def choose_batch_method(language_model: LanguageModel) -> BatchMethod:
    """Choose the fastest batch method that reproduces the model's own logits; each model is checked once.

    Tried in order: cached rows of different length together, cached rows alone, recomputed rows.
    """
    if language_model.model not in _METHODS:
        _METHODS[language_model.model] = _choose_batch_method(language_model)
    return _METHODS[language_model.model]


@exact_products()
@torch.inference_mode()
def _choose_batch_method(language_model: LanguageModel) -> BatchMethod:
    chunked = getattr(language_model.model.config.get_text_config(), "attention_chunk_size", None)
    if not chunked and _reproduces_logits(language_model, CHECK_SEQUENCES):  # padding would move the ends of chunks
        return BatchMethod(CachedBatch, BATCH_ROWS)
    if all(_reproduces_logits(language_model, [sequence]) for sequence in CHECK_SEQUENCES):
        return BatchMethod(CachedBatch, 1)
    name = language_model.name
    _log.warning("the cache of %r changes its logits; every token is recomputed in full, which is slow", name)
    return BatchMethod(RecomputedBatch, BATCH_ROWS)


def _reproduces_logits(language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> bool:
    expected = _decoded_logits(RecomputedBatch, language_model, sequences)
    found = logits_or_none(partial(_decoded_logits, CachedBatch, language_model, sequences))
    return agrees(expected, found, TOLERANCES[language_model.model.dtype])


def _decoded_logits(
    kind: type[DecodingBatch], language_model: LanguageModel, sequences: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return logits [steps, V] of the last row, first in the batch and then alone."""
    batch = kind(language_model, sequences)
    scores = [batch.scores]
    batch.branch(0).step(CHECK_TOKENS[:1])  # some models keep this state outside the cache
    batch.step([CHECK_TOKENS[7]] * len(sequences))
    scores.append(batch.scores)
    batch.keep([len(sequences) - 1])
    batch.step([CHECK_TOKENS[8]])
    return torch.cat([*scores, batch.scores])
