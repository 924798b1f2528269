"""A batch of sequences whose next tokens the caller chooses, with the scores of the tokens that may come next."""

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
    """A batch of sequences (rows) that the caller continues token by token; it implements the protocol `GreedyRows`.

    `scores` [rows, V], float32: the logits of each row's next token, minus infinity where a token is forbidden. `step`
    computes them anew, so that every token is allowed again.
    """

    def __init__(self, backbone: Backbone, branches: Branches, features: Tensor) -> None:
        """Begin with the sequences of `branches`, which ran already.

        features: the last hidden state of each sequence, [rows, F].
        """
        self._backbone = backbone
        self._branches = branches
        self._features = features
        self.scores = backbone.logits(features)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], forms: Mapping[int, CallForm] = MappingProxyType({})) -> None:
        """Append a token to each row, and run it. `forms` have no effect: the caller passes them to `permit`."""
        self._features = self._branches.step(on_device(tokens, self._backbone.device))
        self.scores = self._backbone.logits(self._features)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._branches.select(rows)
        self._features = self._features[list(rows)]
        self.scores = self.scores[list(rows)]

    @torch.inference_mode()
    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and append them as rows."""
        features = self._branches.add(sequences)
        self._features = torch.cat([self._features, features])
        self.scores = torch.cat([self.scores, self._backbone.logits(features)])

    def ranks(self, token: int) -> list[int]:
        """Return for each row how many tokens are more likely than `token` as the next one."""
        is_likelier = self.scores > self.scores[:, token, None]  # [rows, V]
        ranks: list[int] = is_likelier.sum(-1).tolist()
        return ranks

    @torch.inference_mode()
    def forbid(self, places: Sequence[tuple[int, int]]) -> None:
        """Forbid next tokens of rows until the next step. places: pairs of a row and a token."""
        if places:
            rows, tokens = zip(*places, strict=True)
            self.scores[list(rows), list(tokens)] = -torch.inf

    @torch.inference_mode()
    def permit(self, row: int, form: CallForm) -> bool:
        """Forbid the next tokens that the grammar of a row's call does not allow; return whether it allows any."""
        allowed = form.allowed()  # may be shorter than V: the model may have rows for tokens beyond the vocabulary
        forbidden = ~torch.from_numpy(allowed).to(self.scores.device)
        self.scores[row, len(allowed) :] = -torch.inf
        self.scores[row, : len(allowed)].masked_fill_(forbidden, -torch.inf)
        return bool(allowed.any())

    def best(self) -> list[int]:
        """Return the most likely next token of each row that is not forbidden."""
        best: list[int] = self.scores.argmax(-1).tolist()
        return best

    @torch.inference_mode()
    def rank_of_sequence(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many single tokens, except `tokens[0]`, are more likely than the whole sequence `tokens`."""
        log_p_of_others = self.scores[row].log_softmax(-1)  # [V]
        log_p_of_others[tokens[0]] = -torch.inf
        return int((log_p_of_others > self.log_probability(row, tokens)).sum())

    @torch.inference_mode()
    def likeliest(self, row: int, tokens: int) -> dict[int, float]:
        """Return a row's `tokens` most likely next tokens with their log p in nats, most likely first."""
        log_p = self.scores[row].log_softmax(-1)  # [V]
        top = log_p.topk(min(tokens, len(log_p)))
        return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    @torch.inference_mode()
    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Return the joint log probability, in nats, of `tokens` as the continuation of a row.

        Nothing is appended to the row: a copy of it runs all tokens but the last.
        """
        total = self._compute_next_log_p(row, tokens[0])
        if len(tokens) > 1:
            copied_row = self._copy_row(row)
            for token, next_token in pairwise(tokens):
                copied_row.step([token])
                total += copied_row._compute_next_log_p(0, next_token)
        return total

    def _compute_next_log_p(self, row: int, token: int) -> float:
        """Return log p of a token as the next one of a row, in nats."""
        return float(self.scores[row].log_softmax(-1)[token])

    def _copy_row(self, row: int) -> "GreedyBatch":
        """Return a copy of a row as a batch of its own."""
        return GreedyBatch(self._backbone, self._branches.branch(row), self._features[[row]])
