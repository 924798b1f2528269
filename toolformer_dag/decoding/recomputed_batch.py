"""Rows without a cache: each is run whole at every step. Right for every model, and slow."""

import copy
from collections.abc import Sequence

import torch

from toolformer_dag.decoding.batch import Batch
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.language_model.trial import own_logits


class RecomputedBatch(Batch):
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
