"""Rows that are written together: with a cache where that gives the model's own numbers, else without."""

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from toolformer_dag.model.loading import TOLERANCES, TRIAL, LanguageModel, agrees, own_logits, tried


class DecodingBatch(ABC):
    """Sequences of different lengths, to be used in inference mode.

    `scores` [rows, vocabulary], float32, are those of what comes next in each row.
    """

    scores: torch.Tensor

    @abstractmethod
    def __init__(self, language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> None:
        """Runs the sequences."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> None:
        """Appends one token to each row."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Drops every other row."""

    @abstractmethod
    def branch(self, row: int) -> "DecodingBatch":
        """One row alone, which may go on without this batch."""

    def ranks(self, token: int) -> list[int]:
        """By row: how many tokens are more likely than `token`."""
        ranks: list[int] = (self.scores > self.scores[:, token, None]).sum(-1).tolist()
        return ranks

    def forbid(self, places: Sequence[tuple[int, int]]) -> None:
        """Pairs of a row and a token that may not come next in it."""
        if places:
            rows, tokens = zip(*places, strict=True)
            self.scores[list(rows), list(tokens)] = -torch.inf

    def permit(self, row: int, tokens: Sequence[int]) -> None:
        """Every other token may not come next in the row."""
        permitted = self.scores[row, list(tokens)]
        self.scores[row] = -torch.inf
        self.scores[row, list(tokens)] = permitted

    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Of `tokens`, one after the other, as what comes next in one row; nothing is appended."""
        branch = self.branch(row)
        total = 0.0
        for at, token in enumerate(tokens):
            total += float(branch.scores[0].log_softmax(-1)[token])
            if at + 1 < len(tokens):
                branch.step([token])
        return total


class CachedBatch(DecodingBatch):
    """Rows are padded on the left; padding is masked and takes no position."""

    def __init__(self, language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> None:
        self._model = language_model.model
        self._device = language_model.device
        self._positioned = "position_ids" in inspect.signature(self._model.forward).parameters
        longest = max(map(len, sequences))
        self._mask = self._rows([[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences])
        self._cache: Any = DynamicCache(config=self._model.config)
        self.scores = self._forward(self._rows([[0] * (longest - len(ids)) + list(ids) for ids in sequences]))

    def step(self, tokens: Sequence[int]) -> None:
        """Appends one token to each row."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.scores = self._forward(self._rows([[token] for token in tokens]))

    def keep(self, rows: Sequence[int]) -> None:
        """Drops every other row, and its share of the cache."""
        index = torch.tensor(rows, device=self._device)
        self._cache.reorder_cache(index)  # every kind of layer can, a linear attention too
        self._mask = self._mask[index]
        self.scores = self.scores[index]

    def branch(self, row: int) -> "CachedBatch":
        """One row alone, with a cache of its own."""
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
    """For models that keep no keys (Mamba, RWKV), or whose cache does not give their own numbers."""

    def __init__(self, language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> None:
        self._model = language_model.model
        self._sequences = [list(ids) for ids in sequences]
        self.scores = self._forward()

    def step(self, tokens: Sequence[int]) -> None:
        """Appends one token to each row."""
        self._sequences = [[*ids, token] for ids, token in zip(self._sequences, tokens, strict=True)]
        self.scores = self._forward()

    def keep(self, rows: Sequence[int]) -> None:
        """Drops every other row."""
        self._sequences = [self._sequences[row] for row in rows]
        self.scores = self.scores[list(rows)]

    def branch(self, row: int) -> "RecomputedBatch":
        """One row alone."""
        branch = copy.copy(self)
        branch.keep([row])
        return branch

    def _forward(self) -> torch.Tensor:
        return torch.stack([own_logits(self._model, ids)[-1] for ids in self._sequences])


_log = logging.getLogger(__name__)
BATCH_ROWS = 64
UNLIKE = (TRIAL[:7], TRIAL[2:5])
"""Two sequences of unlike length: the shorter one is padded where they are run together."""


@dataclass(frozen=True, slots=True)
class Way:
    """How rows are written, and how many of them at once."""

    kind: type[DecodingBatch]
    rows: int


_WAYS: WeakKeyDictionary[LanguageModel, Way] = WeakKeyDictionary()


def choose_way(language_model: LanguageModel) -> Way:
    """Rows of unlike length together where that gives the model's own logits, else each alone, else without a cache.

    A model is tried once.
    """
    if language_model not in _WAYS:
        _WAYS[language_model] = _way(language_model)
    return _WAYS[language_model]


@torch.inference_mode()
def _way(language_model: LanguageModel) -> Way:
    if _right(language_model, UNLIKE):
        return Way(CachedBatch, BATCH_ROWS)
    if all(_right(language_model, [sequence]) for sequence in UNLIKE):
        return Way(CachedBatch, 1)
    name = language_model.name
    _log.warning("a cache does not give the numbers of %r; it is run whole for every token, which is slow", name)
    return Way(RecomputedBatch, BATCH_ROWS)


def _right(language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> bool:
    expected = _written(RecomputedBatch, language_model, sequences)
    found = tried(partial(_written, CachedBatch, language_model, sequences))
    return agrees(expected, found, TOLERANCES[language_model.model.dtype])


def _written(
    kind: type[DecodingBatch], language_model: LanguageModel, sequences: Sequence[Sequence[int]]
) -> torch.Tensor:
    """[steps, vocabulary]: the last row's logits while it is written, first beside the others and then alone."""
    batch = kind(language_model, sequences)
    scores = [batch.scores]
    batch.branch(0).step(TRIAL[:1])  # which some models note in themselves and not in the cache
    batch.step([TRIAL[7]] * len(sequences))
    scores.append(batch.scores)
    batch.keep([len(sequences) - 1])
    batch.step([TRIAL[8]])
    return torch.cat([*scores, batch.scores])
