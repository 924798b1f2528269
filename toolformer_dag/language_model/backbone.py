"""A model in two parts: tokens to features, and features to logits where somebody reads them."""

from collections.abc import Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.language_model.attention import Attend, attending, can_be_taken_over, causal

ROWS = 1024  # logits of so many places at a time: their memory grows with the vocabulary


class Backbone:
    """`features` are the last hidden states, or the logits themselves where a model's head is more than a matrix."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = model.get_output_embeddings()
        self.body = model.base_model
        self.takes_attention = can_be_taken_over(model)
        self.keeps_columns = False

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        device: torch.device = self.model.device
        return device

    def without_split(self) -> None:
        """From now on whole models are run: the split did not reproduce this model's logits."""
        self.body, self.head = self.model, None
        self.keeps_columns = "logits_to_keep" in signature(self.model.forward).parameters

    def features(
        self, ids: Tensor, positions: Tensor | None = None, attend: Attend = causal, columns: Tensor | None = None
    ) -> Tensor:
        """[B, T] token ids (and position ids) -> [B, T, features], or [B, C, features] at `columns` [C] alone."""
        options = {} if positions is None else {"position_ids": positions}
        if columns is not None and self.keeps_columns:
            options["logits_to_keep"] = columns  # logits of other columns are never made
        with attending(self.model, attend) if self.takes_attention else nullcontext():
            output = self.body(input_ids=ids, use_cache=False, **options)
        features: Tensor = output.last_hidden_state if self.head is not None else output.logits
        return features if columns is None or self.keeps_columns else features[:, columns]

    def logits(self, features: Tensor) -> Tensor:
        """[N, features] -> [N, V] in float32."""
        logits: Tensor = features if self.head is None else self.head(features)
        return logits.float()

    def log_probabilities(self, features: Tensor, targets: Tensor) -> Tensor:
        """log p of one target token per row: [N, features], [N] -> [N] in float32."""
        parts = [slice(first, first + ROWS) for first in range(0, len(features), ROWS)]
        return torch.cat([_log_probabilities(self.logits(features[part]), targets[part]) for part in parts])


def _log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, T] on the device, filled up on the right with token 0."""
    width = max(map(len, sequences))
    return on_device([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device)


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """A tensor of plain values; for a GPU by pinned memory, so that the transfer does not hold up the host."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
