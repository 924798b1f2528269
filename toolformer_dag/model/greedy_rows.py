"""A batch of sequences whose next tokens the caller chooses, with the scores of the tokens that may come next."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from toolformer_dag.model.attention import create_tensor
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import CallForm
from toolformer_dag.model.sharing import Branches


class GreedyBatch:
    """A batch of sequences (rows) that the caller continues token by token, as the protocol `GreedyRows` requires.

    Attributes:
        next_token_logits: The logits of each row's next token, [rows, V], float32. They are minus infinity for a
            forbidden token. `append_tokens` computes them anew, so that every token is allowed again.
    """

    def __init__(self, backbone: Backbone, branches: Branches, features: Tensor) -> None:
        """Begin with sequences that already ran through the model, and compute the logits of their next tokens.

        Args:
            backbone: The model.
            branches: The cached keys and values of the sequences.
            features: The last hidden state of each sequence, [rows, F].
        """
        self._backbone = backbone
        self._branches = branches
        self._features = features
        self.next_token_logits = backbone.compute_logits(features)

    @torch.inference_mode()
    def append_tokens(
        self, token_ids: Sequence[int], call_forms_by_row: Mapping[int, CallForm] = MappingProxyType({})
    ) -> None:
        """Append a token to each row, and run it.

        Args:
            token_ids: The token of each row.
            call_forms_by_row: Has no effect here, because the caller passes each form to `apply_call_form`.
        """
        self._features = self._branches.run_next_tokens(create_tensor(token_ids, self._backbone.device))
        self.next_token_logits = self._backbone.compute_logits(self._features)

    @torch.inference_mode()
    def keep_rows(self, kept_rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        row_indices = list(kept_rows)
        self._branches.select_branches(kept_rows)
        self._features = self._features[row_indices]
        self.next_token_logits = self.next_token_logits[row_indices]

    @torch.inference_mode()
    def add_sequences(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and append them as rows."""
        new_features = self._branches.add_sequences(token_sequences)
        new_logits = self._backbone.compute_logits(new_features)
        self._features = torch.cat([self._features, new_features])
        self.next_token_logits = torch.cat([self.next_token_logits, new_logits])

    def compute_token_ranks(self, token_id: int) -> list[int]:
        """Count for each row the tokens that are more likely than `token_id` as the next one."""
        is_likelier = self.next_token_logits > self.next_token_logits[:, token_id, None]  # [rows, V]
        ranks: list[int] = is_likelier.sum(-1).tolist()
        return ranks

    @torch.inference_mode()
    def forbid_tokens(self, row_token_pairs: Sequence[tuple[int, int]]) -> None:
        """Forbid next tokens of rows until a token is appended. Each pair is the index of a row and a token."""
        if not row_token_pairs:
            return
        rows, tokens = zip(*row_token_pairs, strict=True)
        self.next_token_logits[list(rows), list(tokens)] = -torch.inf

    @torch.inference_mode()
    def apply_call_form(self, row_index: int, call_form: CallForm) -> bool:
        """Forbid the next tokens of a row that the grammar of its call does not allow.

        Returns:
            Whether the grammar allows any token.
        """
        is_allowed = call_form.compute_allowed_mask()  # [tokens of the vocabulary]
        vocabulary_size = len(is_allowed)
        is_forbidden = ~torch.from_numpy(is_allowed).to(self.next_token_logits.device)

        # The model may have logits for more tokens than the vocabulary has. These are forbidden, too.
        self.next_token_logits[row_index, vocabulary_size:] = -torch.inf
        self.next_token_logits[row_index, :vocabulary_size].masked_fill_(is_forbidden, -torch.inf)
        return bool(is_allowed.any())

    def find_best_tokens(self) -> list[int]:
        """Return the most likely next token of each row that is not forbidden."""
        best: list[int] = self.next_token_logits.argmax(-1).tolist()
        return best

    @torch.inference_mode()
    def compute_sequence_rank(self, row_index: int, token_ids: Sequence[int]) -> int:
        """Count the single tokens, except `token_ids[0]`, that are more likely than the whole sequence `token_ids`."""
        log_p_by_token = self.next_token_logits[row_index].log_softmax(-1)  # [V]
        log_p_by_token[token_ids[0]] = -torch.inf  # so that the first token of the sequence is not counted
        is_likelier = log_p_by_token > self.compute_log_probability(row_index, token_ids)
        return int(is_likelier.sum())

    @torch.inference_mode()
    def find_likeliest_tokens(self, row_index: int, token_count: int) -> dict[int, float]:
        """Return a row's `token_count` most likely next tokens with their log p in nats, most likely first."""
        log_p_by_token = self.next_token_logits[row_index].log_softmax(-1)  # [V]
        likeliest = log_p_by_token.topk(min(token_count, len(log_p_by_token)))
        return dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))

    @torch.inference_mode()
    def compute_log_probability(self, row_index: int, token_ids: Sequence[int]) -> float:
        """Compute the joint log probability, in nats, of `token_ids` as the continuation of a row.

        Nothing is appended to the row: a copy of it runs all tokens but the last.
        """
        total_log_p = self._compute_next_log_p(row_index, token_ids[0])
        if len(token_ids) == 1:
            return total_log_p

        copied_row = self._copy_row(row_index)
        for token, next_token in pairwise(token_ids):
            copied_row.append_tokens([token])
            total_log_p += copied_row._compute_next_log_p(0, next_token)  # the copy is row 0 of its own batch
        return total_log_p

    def _compute_next_log_p(self, row_index: int, token_id: int) -> float:
        """Compute log p of a token as the next one of a row, in nats."""
        log_p_by_token = self.next_token_logits[row_index].log_softmax(-1)  # [V]
        return float(log_p_by_token[token_id])

    def _copy_row(self, row_index: int) -> "GreedyBatch":
        """Return a copy of a row as a batch of its own."""
        return GreedyBatch(self._backbone, self._branches.copy_branch(row_index), self._features[[row_index]])
