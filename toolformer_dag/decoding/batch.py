"""Rows that are written together, and what may come next in each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from toolformer_dag.language_model.load import LanguageModel


class Batch(ABC):
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
    def branch(self, row: int) -> "Batch":
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
