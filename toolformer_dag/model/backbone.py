"""Run a model's layers and its output head apart: features, logits, log-probabilities.

Shapes use these letters: B sequences, T tokens, F numbers of a hidden state, N hidden states, V tokens of the
vocabulary, C alternatives for a next token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.attention import AttentionFunction, compute_causal_attention, use_custom_attention
from toolformer_dag.model.memory import TokenBudget

MAX_LOGIT_ROWS = 1024
"""Rows of logits that are computed at once: their memory grows with the vocabulary."""


class Backbone:
    """A language model split into its body, which computes hidden states, and its output head, which computes logits.

    The last hidden state of a token is called its features. When a model is loaded, a trial (`choose_sharing`) sets
    `body`, `is_whole_model` and `uses_custom_attention`.

    Attributes:
        model: The whole model of transformers.
        device: Where the model runs.
        token_budget: The maximum number of tokens in a pass.
        body: The module whose last hidden states are the features.
        is_whole_model: Whether the model is not split, because body and head apart give other logits. Features are then
            logits.
        uses_custom_attention: Whether the attention function passed to `compute_features` replaces the model's own.
    """

    def __init__(self, model: Any, token_budget: TokenBudget) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.token_budget = token_budget
        self.body = model.base_model
        self.is_whole_model = False
        self.uses_custom_attention = True
        self._body_output_type: Any = None

    def list_possible_bodies(self) -> list[Any]:
        """List the modules that may be the body: the base model, the decoder in it (OPT), or `model` (Llama 4)."""
        llama4_text_model = getattr(self.model, "model", None)
        candidates = [self.model.base_model, self.model.get_decoder(), llama4_text_model]
        return [module for module in candidates if module is not None and module is not self.model]

    def stop_splitting_model(self) -> None:
        """Stop splitting the model: from here on, features are its logits."""
        self.body = self.model
        self.is_whole_model = True

    def compute_features(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_function: AttentionFunction = compute_causal_attention,
    ) -> Tensor:
        """Run the model's layers on B sequences of T tokens, and return the last hidden states.

        Args:
            input_ids: The tokens, [B, T].
            position_ids: The position of each token in its sequence, [B, T]. None means that each row is a whole
                sequence.
            attention_function: Replaces the model's attention. It is ignored, like `position_ids`, if
                `uses_custom_attention` is False.

        Returns:
            The features, [B, T, F].
        """
        if not self.uses_custom_attention:
            return self._extract_features(self.body(input_ids=input_ids, use_cache=False))

        # `attention_function` alone decides what is hidden, and this mask hides nothing. Without a mask, transformers
        # would take positions that do not rise by one each for several sequences packed into a row.
        options = {"attention_mask": torch.ones_like(input_ids)}  # [B, T]
        if position_ids is not None:
            options["position_ids"] = position_ids

        # Within this block, every layer of the model calls `attention_function`.
        with use_custom_attention(self.model, attention_function, position_ids):
            return self._extract_features(self.body(input_ids=input_ids, use_cache=False, **options))

    def compute_features_after_cache(
        self, input_ids: Tensor, cache_argument: str, cache: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """Run the model's layers on tokens that follow cached ones.

        Args:
            input_ids: The tokens, [B, T].
            cache_argument: The argument of `forward` that takes the cache.
            cache: A cache of transformers, with keys, values or states.
            options: More arguments for `forward`.

        Returns:
            The features, [B, T, F], and the new cache.
        """
        output = self.body(input_ids=input_ids, use_cache=True, **{cache_argument: cache}, **options)
        return self._extract_features(output), getattr(output, cache_argument)

    def compute_logits(self, features: Tensor) -> Tensor:
        """Run the output head on features [N, F], and return the logits [N, V] in float32."""
        if self.is_whole_model:  # features are logits already
            return features.float()

        # The whole model is called, but its body only hands back these features, so that nothing but the head runs.
        feature_sequence = features[None]  # [1, N, F], as if they were one sequence
        placeholder_ids = torch.zeros_like(feature_sequence[..., 0], dtype=torch.long)  # nothing reads them
        with self._make_body_return(feature_sequence):
            logits: Tensor = self.model(input_ids=placeholder_ids).logits
        return logits[0].float()

    def compute_log_probabilities(self, features: Tensor, target_ids: Tensor) -> Tensor:
        """Compute the natural logarithm of the probability of next tokens, in float32.

        Args:
            features: The N hidden states that predict the tokens, [N, F].
            target_ids: The next token after each hidden state, [N], or C alternatives for it, [N, C].

        Returns:
            The log probabilities, in the shape of `target_ids`.
        """
        alternatives = target_ids if target_ids.ndim > 1 else target_ids[:, None]  # [N, C]

        # Work in parts: logits have a column for each token of the vocabulary, so all rows may not fit into memory.
        feature_parts = torch.split(features, MAX_LOGIT_ROWS)
        target_parts = torch.split(alternatives, MAX_LOGIT_ROWS)
        log_p_parts = []
        for feature_part, target_part in zip(feature_parts, target_parts, strict=True):
            # The logits, [rows of the part, V], get no name, which would keep them during the next part.
            log_p = _compute_log_p(self.compute_logits(feature_part), target_part)
            log_p_parts.append(log_p)  # [rows of the part, C]
        return torch.cat(log_p_parts).view_as(target_ids)

    def _extract_features(self, output: Any) -> Tensor:
        """Take the features from the body's output, and remember the output's type for `_make_body_return`."""
        self._body_output_type = type(output)
        features: Tensor = output.logits if self.is_whole_model else output.last_hidden_state
        return features

    @contextmanager
    def _make_body_return(self, features: Tensor) -> Iterator[None]:
        """Within the `with` block, make the body return these features, so that the model computes only its head.

        The output has the type that the body returned last, so the body must have run before.
        """
        output = self._body_output_type(last_hidden_state=features)
        # An attribute of the instance hides the method of its class until it is deleted.
        self.body.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self.body.forward


def _compute_log_p(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Compute log p of tokens [N, C] from logits [N, V]: a token's logit minus log(sum(exp(logits)))."""
    return logits.gather(1, token_ids) - logits.logsumexp(1, keepdim=True)
