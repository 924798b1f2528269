"""Run a model's layers with a custom attention function; compute features and log-probabilities."""

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
UNSUPPORTED_OPTIONS = ("softcap", "s_aux", "position_bias", "head_mask")
_attend: ContextVar[Attend] = ContextVar("attend")


class UnsupportedAttentionError(Exception):
    """The model's attention uses an option that the custom attention does not implement."""


def supports_custom_attention(model: Any) -> bool:
    """Return whether the attention of `model` can be replaced."""
    return bool(getattr(model, "_supports_attention_backend", False)) or bool(_gptj_attentions(model))


@contextmanager
def custom_attention(model: Any, attend: Attend) -> Iterator[None]:
    """Replace every attention of `model` with `attend` within the block; the model's own mask is not applied."""
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
    """Compute causal attention within each sequence; padding on the right is never attended to."""
    return F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, enable_gqa=keys.shape[1] != queries.shape[1]
    )


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    extra = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if extra:
        raise UnsupportedAttentionError(f"attention of {type(module).__name__} uses {', '.join(extra)}")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return _attend.get()(module.layer_idx, query, key, value, scale).transpose(1, 2).contiguous(), None


def _gptj_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    return _attend.get()(module.layer_idx, query, key, value, 1 / module.scale_attn), None


def _gptj_rotations(module: Any, position_ids: Tensor) -> Tensor:
    """Expand the table of sines without copying it: transformers copies 500 kB per row and layer."""
    table: Tensor = module.embed_positions
    return table.expand(len(position_ids), -1, -1)


def _gptj_attentions(model: Any) -> list[Any]:
    if getattr(model.config, "model_type", "") != "gptj":
        return []
    return [module for module in model.modules() if isinstance(module, GPTJAttention)]


AttentionInterface.register(NAME, _interface)


ROWS = 1024  # rows of logits computed at once: their memory grows with the vocabulary


class Backbone:
    """A model split into body and head.

    `features` returns the last hidden states. After `run_whole_model`, it returns the logits: the head of some models
    is more than a matrix.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = model.get_output_embeddings()
        self.body = model.base_model
        self.uses_custom_attention = supports_custom_attention(model)
        self.supports_logits_to_keep = False

    @property
    def device(self) -> torch.device:
        """Return the device of the model's inputs."""
        device: torch.device = self.model.device
        return device

    def run_whole_model(self) -> None:
        """Stop splitting: use this where body and head alone do not reproduce the model's logits."""
        self.body, self.head = self.model, None
        self.supports_logits_to_keep = "logits_to_keep" in signature(self.model.forward).parameters

    def features(
        self, ids: Tensor, positions: Tensor | None = None, attend: Attend = causal, columns: Tensor | None = None
    ) -> Tensor:
        """Compute features [B, T, F] of token ids [B, T]; with `columns` [C], only those columns: [B, C, F]."""
        options = {} if positions is None else {"position_ids": positions}
        if columns is not None and self.supports_logits_to_keep:
            options["logits_to_keep"] = columns  # logits of other columns are not computed
        with custom_attention(self.model, attend) if self.uses_custom_attention else nullcontext():
            output = self.body(input_ids=ids, use_cache=False, **options)
        features: Tensor = output.last_hidden_state if self.head is not None else output.logits
        return features if columns is None or self.supports_logits_to_keep else features[:, columns]

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits [N, V] in float32 from features [N, F]."""
        logits: Tensor = features if self.head is None else self.head(features)
        return logits.float()

    def log_probabilities(self, features: Tensor, targets: Tensor) -> Tensor:
        """Compute log p of one target token per row, [N] in float32, from features [N, F] and targets [N]."""
        parts = [slice(first, first + ROWS) for first in range(0, len(features), ROWS)]
        return torch.cat([target_log_probabilities(self.logits(features[part]), targets[part]) for part in parts])


def target_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute log p of one target token per row, [N], from logits [N, V] and targets [N]."""
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the sequences as a tensor [B, T] on `device`, padded on the right with token 0."""
    width = max(map(len, sequences))
    return on_device([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device)


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Copy plain values to `device`; a GPU reads them from pinned memory, so the host does not wait."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
