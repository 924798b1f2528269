"""Run a model's layers and its output head apart: features, logits, log-probabilities.

Shapes use these letters: B sequences, T tokens, F numbers of a hidden state, N hidden states, V tokens of the
vocabulary, C alternatives for a next token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.attention import Attend, attend_causally, custom_attention
from toolformer_dag.model.memory import TokenBudget

LOGIT_ROWS = 1024
"""Rows of logits that are computed at once: their memory grows with the vocabulary."""


class Backbone:
    """A model split into body and head: `features` are the last hidden states, and `logits` runs the head on them.

    - `budget`: the most tokens of a pass.
    - `body`: the module whose last hidden states are the features.
    - `whole`: whether the model is not split, because body and head apart give other logits. Features are then logits.
    - `uses_custom_attention`: whether `attend` of `features` replaces the model's attention.

    A trial when the model is loaded sets the last three (`choose_sharing`).
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
        llama4_text_model = getattr(self.model, "model", None)
        modules = [self.model.base_model, self.model.get_decoder(), llama4_text_model]
        return [module for module in modules if module is not None and module is not self.model]

    def run_whole_model(self) -> None:
        """Stop splitting the model: from here on, features are its logits."""
        self.body = self.model
        self.whole = True

    def features(self, ids: Tensor, positions: Tensor | None = None, attend: Attend = attend_causally) -> Tensor:
        """Run the model's layers on tokens, and return the last hidden states.

        Args:
            ids: The tokens, [B, T].
            positions: The position of each token in its sequence, [B, T]. None means that each row is a whole sequence.
            attend: Replaces the model's attention. It is ignored if `uses_custom_attention` is False.

        Returns:
            The features, [B, T, F].
        """
        if not self.uses_custom_attention:
            return self._extract_features(self.body(input_ids=ids, use_cache=False))

        # `attend` alone decides what is hidden, and this mask hides nothing. Without a mask, transformers would take
        # positions that do not rise by one each for several sequences packed into a row.
        options = {"attention_mask": torch.ones_like(ids)}  # [B, T]
        if positions is not None:
            options["position_ids"] = positions

        with custom_attention(self.model, attend, positions):  # every layer calls `attend`
            return self._extract_features(self.body(input_ids=ids, use_cache=False, **options))

    def compute_features_after_cache(self, ids: Tensor, name: str, cache: Any, **options: Any) -> tuple[Tensor, Any]:
        """Run the model's layers on tokens that follow cached ones.

        Args:
            ids: The tokens, [B, T].
            name: The argument of `forward` that takes the cache.
            cache: A cache of transformers, with keys, values or states.
            options: More arguments for `forward`.

        Returns:
            The features, [B, T, F], and the new cache.
        """
        output = self.body(input_ids=ids, use_cache=True, **{name: cache}, **options)
        return self._extract_features(output), getattr(output, name)

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
        """Compute the natural logarithm of the probability of next tokens, in float32.

        Args:
            features: The N hidden states that predict the tokens, [N, F].
            targets: The next token after each, [N], or C alternatives for it, [N, C].

        Returns:
            The log probabilities, in the shape of `targets`.
        """
        alternatives = targets if targets.ndim > 1 else targets[:, None]  # [N, C]

        # Work in parts: logits have a column for each token of the vocabulary, so all rows may not fit into memory.
        feature_parts = torch.split(features, LOGIT_ROWS)
        target_parts = torch.split(alternatives, LOGIT_ROWS)
        log_p_parts = [
            _compute_log_p(self.logits(part), part_targets)  # [rows of the part, C]
            for part, part_targets in zip(feature_parts, target_parts, strict=True)
        ]
        return torch.cat(log_p_parts).view_as(targets)

    def _extract_features(self, output: Any) -> Tensor:
        """Take the features from the body's output, and remember the output's type for `_body_returns`."""
        self._output_type = type(output)
        features: Tensor = output.logits if self.whole else output.last_hidden_state
        return features

    @contextmanager
    def _body_returns(self, features: Tensor) -> Iterator[None]:
        """Within the `with` block, make the body return these features, so that the model computes only its head."""
        output = self._output_type(last_hidden_state=features)
        self.body.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self.body.forward


def _compute_log_p(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log p of tokens [N, C] by logits [N, V]: a token's logit minus the logarithm of the sum of exp(logits)."""
    return logits.gather(1, tokens) - logits.logsumexp(1, keepdim=True)
