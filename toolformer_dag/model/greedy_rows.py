"""Rows whose next tokens the caller chooses, with the scores of what may come next."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import CallForm
from toolformer_dag.model.sharing import Branches


class GreedyBatch:
    """Sequences of different lengths; see GreedyRows.

    `scores` [rows, V], float32: the logits of each row's next token.
    """

    def __init__(self, backbone: Backbone, branches: Branches, features: Tensor) -> None:
        self._backbone, self._branches, self._features = backbone, branches, features
        self.scores = backbone.logits(features)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], forms: Mapping[int, CallForm] = MappingProxyType({})) -> None:
        """Append a token to each row; the forms count where they `permit`."""
        self._features = self._branches.step(on_device(tokens, self._backbone.device))
        self.scores = self._backbone.logits(self._features)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._branches.select(rows)
        self._features, self.scores = self._features[list(rows)], self.scores[list(rows)]

    @torch.inference_mode()
    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and add them after the rows."""
        features = self._branches.add(sequences)
        self._features = torch.cat([self._features, features])
        self.scores = torch.cat([self.scores, self._backbone.logits(features)])

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
    def permit(self, row: int, form: CallForm) -> bool:
        """Forbid next tokens that the form of a row does not allow; return whether it allows any."""
        allowed = form.allowed()
        self.scores[row, len(allowed) :] = -torch.inf
        self.scores[row, : len(allowed)].masked_fill_(~torch.from_numpy(allowed).to(self.scores.device), -torch.inf)
        return bool(allowed.any())

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
    def likeliest(self, row: int, tokens: int) -> dict[int, float]:
        """Return so many of the most likely next tokens of a row with their log p, the likeliest first."""
        top = self.scores[row].log_softmax(-1).topk(min(tokens, self.scores.shape[1]))
        return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    @torch.inference_mode()
    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Return the joint log probability of `tokens` as the continuation of a row; nothing is appended."""
        total = float(self.scores[row].log_softmax(-1)[tokens[0]])
        if len(tokens) > 1:
            branch = GreedyBatch(self._backbone, self._branches.branch(row), self._features[[row]])
            for before, token in pairwise(tokens):
                branch.step([before])
                total += float(branch.scores[0].log_softmax(-1)[token])
        return total
