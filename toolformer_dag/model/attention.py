"""A model's layers, run from here: its attention taken over, its features and its log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.gptj.modeling_gptj import GPTJAttention

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, queries [B, H, T, D], keys and values [B, H_kv, T, D], scale) -> [B, H, T, D]."""

NAME = "toolformer_dag"
BEYOND_SOFTMAX = ("softcap", "s_aux", "position_bias", "head_mask")
_attend: ContextVar[Attend] = ContextVar("attend")


class UnsupportedAttentionError(Exception):
    """The model's attention does something that ours does not."""


def can_be_taken_over(model: Any) -> bool:
    """Whether the model lets another function do its attention."""
    return bool(getattr(model, "_supports_attention_backend", False)) or bool(_gptj_attentions(model))


@contextmanager
def attending(model: Any, attend: Attend) -> Iterator[None]:
    """Within the block, every attention of the model is `attend`, with no mask from the model."""
    before = model.config._attn_implementation
    token = _attend.set(attend)
    model.config._attn_implementation = NAME
    for module in _gptj_attentions(model):
        module._attn = partial(_gptj_attention, module)
        module._get_embed_positions = partial(_gptj_rotations, module)
    try:
        yield
    finally:
        for module in _gptj_attentions(model):
            del module._attn, module._get_embed_positions
        model.config._attn_implementation = before
        _attend.reset(token)


def causal(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Plain causal attention in each sequence by itself; right padding is never seen by what stands before it."""
    return F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, enable_gqa=keys.shape[1] != queries.shape[1]
    )


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    extra = [name for name in BEYOND_SOFTMAX if options.get(name) is not None]
    if extra:
        raise UnsupportedAttentionError(f"attention of {type(module).__name__} uses {', '.join(extra)}")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return _attend.get()(module.layer_idx, query, key, value, scale).transpose(1, 2).contiguous(), None


def _gptj_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    return _attend.get()(module.layer_idx, query, key, value, 1 / module.scale_attn), None


def _gptj_rotations(module: Any, position_ids: Tensor) -> Tensor:
    """The table of sines, seen by every row: transformers copies it for each, 500 kB a row and layer."""
    table: Tensor = module.embed_positions
    return table.expand(len(position_ids), -1, -1)


def _gptj_attentions(model: Any) -> list[Any]:
    if getattr(model.config, "model_type", "") != "gptj":
        return []
    return [module for module in model.modules() if isinstance(module, GPTJAttention)]


AttentionInterface.register(NAME, _interface)


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
