"""Rows with one key-value cache: one token per row and step goes through the model."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from toolformer_dag.decoding.batch import Batch
from toolformer_dag.language_model.load import LanguageModel


class CachedBatch(Batch):
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
