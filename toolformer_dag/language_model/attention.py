"""Taking over a model's attention for a forward pass, so that sequences can share keys and values.

A model of transformers asks for its attention function by name, or (GPT-J) calls methods of its own; for the time of a
`with` block ours stand in their places. Not covered: attention that is more than softmax(q k) v, such as soft caps,
sinks, ALiBi or recurrent layers; such a model is run without shared keys (see `heads.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

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
