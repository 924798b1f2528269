"""Run a model's layers and its output head apart: features, logits, log-probabilities."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.attention import Attend, causal, custom_attention
from toolformer_dag.model.memory import TokenBudget

ROWS = 1024  # rows of logits computed at once: their memory grows with the vocabulary


class Backbone:
    """A model split into body and head.

    `features` returns the last hidden states. `logits` runs the model's own head on them, whatever it does besides a
    matrix product (scaling, a soft cap). After `run_whole_model`, features are the logits themselves. `budget` limits
    the tokens of a pass.
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
        """Stop splitting: use this where body and head apart do not reproduce the model's logits."""
        self.body, self.whole = self.model, True

    def features(self, ids: Tensor, positions: Tensor | None = None, attend: Attend = causal) -> Tensor:
        """Compute features [B, T, F] of token ids [B, T]."""
        if not self.uses_custom_attention:
            return self._last_hidden(self.body(input_ids=ids, use_cache=False))
        options = {} if positions is None else {"position_ids": positions}
        with custom_attention(self.model, attend, positions):
            # a mask, because transformers takes positions without one for packed sequences
            mask = torch.ones_like(ids)
            return self._last_hidden(self.body(input_ids=ids, attention_mask=mask, use_cache=False, **options))

    def cached_features(self, ids: Tensor, name: str, cache: Any, **options: Any) -> tuple[Tensor, Any]:
        """Compute features of tokens after the model's own `cache`, its argument `name`; return the cache too."""
        output = self.body(input_ids=ids, use_cache=True, **{name: cache}, **options)
        return self._last_hidden(output), getattr(output, name)

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits [N, V] in float32 from features [N, F]."""
        if self.whole:
            return features.float()
        with self._body_returns(features[None]):
            logits: Tensor = self.model(input_ids=torch.zeros_like(features[None, :, 0], dtype=torch.long)).logits
        return logits[0].float()

    def log_probabilities(self, features: Tensor, targets: Tensor) -> Tensor:
        """Compute log p of targets [N] or [N, C] in float32, of the same shape, from features [N, F]."""
        several = targets if targets.ndim > 1 else targets[:, None]
        parts = []
        for rows, wanted in zip(torch.split(features, ROWS), torch.split(several, ROWS), strict=True):
            logits = self.logits(rows)
            parts.append(logits.gather(1, wanted) - logits.logsumexp(1, keepdim=True))
        return torch.cat(parts).view_as(targets)

    def _last_hidden(self, output: Any) -> Tensor:
        self._output_type = type(output)
        features: Tensor = output.logits if self.whole else output.last_hidden_state
        return features

    @contextmanager
    def _body_returns(self, features: Tensor) -> Iterator[None]:
        """Let the body answer with these features, so that the model's own forward computes only its head."""
        answer = self._output_type(last_hidden_state=features)
        self.body.forward = lambda *_, **__: answer
        try:
            yield
        finally:
            del self.body.forward
