"""Rows that go through the model together: one key-value cache, one token per row and step."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from toolformer_dag.language_model.errors import ModelError
from toolformer_dag.language_model.load import LanguageModel


class Batch:
    """Sequences of different lengths, padded on the left; padding is masked and takes no position.

    To be used in inference mode. Raises ModelError for a model whose state is in no key-value cache (Mamba, RWKV).
    """

    def __init__(self, language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> None:
        self._model = language_model.model
        self._device = language_model.device
        taken = inspect.signature(self._model.forward).parameters
        if "past_key_values" not in taken:
            raise ModelError(
                f"{language_model.name!r} keeps no key-value cache and would forget its text at every token; take a "
                "model whose forward takes past_key_values"
            )
        self._positioned = "position_ids" in taken
        longest = max(map(len, sequences))
        self._mask = self._rows([[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences])
        self._cache: Any = DynamicCache(config=self._model.config)
        self.scores = self._forward(self._rows([[0] * (longest - len(ids)) + list(ids) for ids in sequences]))

    def step(self, tokens: Sequence[int]) -> None:
        """Appends one token to each row; `scores` [rows, vocabulary], float32, are those of what comes next."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.scores = self._forward(self._rows([[token] for token in tokens]))

    def keep(self, rows: Sequence[int]) -> None:
        """Drops every other row, and its share of the cache."""
        index = torch.tensor(rows, device=self._device)
        self._cache.reorder_cache(index)  # every kind of layer can, a linear attention too
        self._mask = self._mask[index]
        self.scores = self.scores[index]

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
        branch = copy.copy(self)
        branch._cache = copy.deepcopy(self._cache)
        branch.keep([row])
        total = 0.0
        for at, token in enumerate(tokens):
            total += float(branch.scores[0].log_softmax(-1)[token])
            if at + 1 < len(tokens):
                branch.step([token])
        return total

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
