"""Run a model's layers and its output head apart: features, logits, log-probabilities."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.attention import Attend, causal, custom_attention
from toolformer_dag.model.memory import TokenBudget

ROWS = 1024
"""Rows of logits that are computed at once: their memory grows with the vocabulary."""


class Backbone:
    """A model split into body and head: `features` are the last hidden states, and `logits` runs the head on them.

    The head is the model's own, whatever it does besides a matrix product (scaling, a soft cap). A trial when the model
    is loaded sets how it runs (`choose_sharing`):

    - `body`: the module whose last hidden states are the features.
    - `whole`: whether the model is not split, because body and head apart give other logits. Features are then logits.
    - `uses_custom_attention`: whether `attend` of `features` replaces the model's attention.

    `budget`: the most tokens of a pass.
    """

    def __init__(self, model: Any, budget: TokenBudget) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.budget = budget
        self.body = model.base_model
        self.whole = False
        self.uses_custom_attention = True
        self._output_type: Any = None

    def bodies(self) -> list[Any]:
        """Return the modules that may be the body: the base model, the decoder in it (OPT), or `model` (Llama 4)."""
        modules = [self.model.base_model, self.model.get_decoder(), getattr(self.model, "model", None)]
        return [body for body in modules if body is not None and body is not self.model]

    def run_whole_model(self) -> None:
        """Stop splitting the model: from here on, features are its logits."""
        self.body = self.model
        self.whole = True

    def features(self, ids: Tensor, positions: Tensor | None = None, attend: Attend = causal) -> Tensor:
        """Run the model's layers on token ids [B, T]; return features, its last hidden states, [B, T, F].

        - positions: the positions of the tokens in their sequences, [B, T]; None where each row is a whole sequence.
        - attend: computes the attention in place of the model's own; unused where `uses_custom_attention` is false.
        """
        if not self.uses_custom_attention:
            return self._last_hidden(self.body(input_ids=ids, use_cache=False))
        options = {} if positions is None else {"position_ids": positions}
        # `attend` decides what is hidden. A mask of ones only keeps transformers from guessing by the positions that
        # several sequences are packed into a row.
        mask_of_ones = torch.ones_like(ids)
        with custom_attention(self.model, attend, positions):
            return self._last_hidden(self.body(input_ids=ids, attention_mask=mask_of_ones, use_cache=False, **options))

    def cached_features(self, ids: Tensor, name: str, cache: Any, **options: Any) -> tuple[Tensor, Any]:
        """Run the model's layers on tokens [B, T] that follow cached ones; return features [B, T, F] and the new cache.

        - cache: transformers' cache of keys, values or states. name: the argument of `forward` that takes it.
        - options: further arguments of `forward`.
        """
        output = self.body(input_ids=ids, use_cache=True, **{name: cache}, **options)
        return self._last_hidden(output), getattr(output, name)

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits [N, V] in float32 from features [N, F]."""
        if self.whole:
            return features.float()
        sequence = features[None]  # [1, N, F], as one sequence
        any_ids = torch.zeros_like(sequence[..., 0], dtype=torch.long)  # the body does not read them
        with self._body_returns(sequence):
            logits: Tensor = self.model(input_ids=any_ids).logits
        return logits[0].float()

    def log_probabilities(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return log p of next tokens, in float32 nats, in the shape of `targets`.

        - features: the hidden states after which the tokens follow, [N, F].
        - targets: the token after each, [N], or C alternatives for it, [N, C].

        They are computed in parts of ROWS features, because logits are as wide as the vocabulary.
        """
        columns = targets if targets.ndim > 1 else targets[:, None]  # [N, C]
        parts = []
        for part_features, part_targets in zip(torch.split(features, ROWS), torch.split(columns, ROWS), strict=True):
            logits = self.logits(part_features)  # [up to ROWS, V]
            # log p of a token is its logit minus the logarithm of the sum of exp(logits).
            log_p = logits.gather(1, part_targets) - logits.logsumexp(1, keepdim=True)
            parts.append(log_p)
        return torch.cat(parts).view_as(targets)

    def _last_hidden(self, output: Any) -> Tensor:
        self._output_type = type(output)
        features: Tensor = output.logits if self.whole else output.last_hidden_state
        return features

    @contextmanager
    def _body_returns(self, features: Tensor) -> Iterator[None]:
        """Within the block, let the body return these features, so that the model's forward computes only its head."""
        answer = self._output_type(last_hidden_state=features)
        self.body.forward = lambda *_, **__: answer
        try:
            yield
        finally:
            del self.body.forward
