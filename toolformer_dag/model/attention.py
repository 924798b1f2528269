"""Replace a model's attention by a function of our own, with what its layers need beside plain causal attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention


@dataclass(frozen=True, slots=True, eq=False)
class Locality:
    """A sliding window or chunks: `mask(0, 0, q, k)` says which positions k a token at position q attends to.

    A sequence of at most `size` tokens is not limited by it.
    """

    mask: Callable[..., Tensor]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """What the attention of layer `number` does with its scores.

    - `softcap`: scores s become softcap * tanh(s / softcap).
    - `sinks` [H]: a score beside those of the keys, whose weight is dropped after the softmax.
    - `locality`: None where a token attends to all tokens before it.
    """

    number: int
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    locality: Locality | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether scores have neither a soft cap nor sinks."""
        return self.softcap is None and self.sinks is None

    def weights(self, scores: Tensor, bias: Tensor) -> Tensor:
        """Return the softmax of scores [B, G, R, S], where G * R = H heads (or H, T), under the soft cap."""
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + bias
        if self.sinks is None:
            return scores.softmax(-1, torch.float32).to(scores.dtype)
        sinks = self.sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1, torch.float32)[..., :-1].to(scores.dtype)


Attend = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, T, D], keys and values [B, H_kv, S, D]) -> [B, H, T, D]."""


class Visibility:
    """The keys that the queries of one pass attend to, as a bias per locality.

    - `seen`: booleans that broadcast to [B, T, S]; None where queries and keys are the same whole sequences.
    - `queries` and `keys`: positions that broadcast to [B, T] and [B, S].
    - `longest`: the largest of these positions, plus one.
    """

    def __init__(
        self, queries: Tensor, keys: Tensor, longest: int, dtype: torch.dtype, seen: Tensor | None = None
    ) -> None:
        self.queries, self.keys, self.longest, self.dtype = queries, keys, longest, dtype
        self.seen = seen
        self._biases: dict[Locality | None, Tensor] = {}

    def bias(self, layer: AttentionLayer) -> Tensor:
        """Return zero where a query attends to a key, else minus infinity; broadcasts to [B, 1, T, S]."""
        locality = self.limiting(layer)
        if locality not in self._biases:
            queries, keys = self.queries[..., :, None], self.keys[..., None, :]
            seen = self.seen if self.seen is not None else queries >= keys
            if locality is not None:
                seen = seen & locality.mask(0, 0, queries, keys)
            zeros = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
            self._biases[locality] = zeros.masked_fill_(~seen, -torch.inf).unsqueeze(-3)
        return self._biases[locality]

    def limiting(self, layer: AttentionLayer) -> Locality | None:
        """Return the layer's locality where it hides a key of these sequences."""
        return layer.locality if layer.locality is not None and self.longest > layer.locality.size else None


def attention(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute attention of queries [B, H, T, D] over keys [B, H_kv, S, D]; `bias` broadcasts to [B, 1, T, S].

    Grouped keys are repeated: with a bias, fused GPU kernels support no groups.
    """
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    if layer.is_plain:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=layer.scale)
    return layer.weights(queries @ keys.mT * layer.scale, bias) @ values


def causal(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention within each sequence; padding on the right is never attended to."""
    if layer.is_plain and (layer.locality is None or keys.shape[2] <= layer.locality.size):
        grouped = queries.shape[1] > keys.shape[1]
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=layer.scale, enable_gqa=grouped
        )
    places = torch.arange(keys.shape[2], device=keys.device)
    return attention(layer, queries, keys, values, Visibility(places, places, len(places), queries.dtype).bias(layer))


NAME = "toolformer_dag"


@dataclass(frozen=True, slots=True)
class _Replacement:
    """The attention of a pass. `ignores_extras`: the model's own kernel (SDPA) knows no soft cap and no sinks.

    `rotations`: what GPT-J's layers rotate by, once the first of them has made it.
    """

    attend: Attend
    positions: Tensor | None
    ignores_extras: bool
    rotations: list[Tensor] = field(default_factory=list)


_replacement: ContextVar[_Replacement] = ContextVar("replacement")


@contextmanager
def custom_attention(model: Any, attend: Attend, positions: Tensor | None = None) -> Iterator[None]:
    """Replace every attention of `model` with `attend` within the block.

    `positions` [B, T]: those of the tokens that run; None where each sequence runs whole.
    """
    before = model.config._attn_implementation
    token = _replacement.set(_Replacement(attend, positions, before == "sdpa"))
    model.config._attn_implementation = NAME
    patched = [module for module in model.modules() if type(module) in _METHODS]
    for module in patched:
        vars(module).update({name: partial(method, module) for name, method in _METHODS[type(module)].items()})
    try:
        yield
    finally:
        for module in patched:
            for name in _METHODS[type(module)]:
                delattr(module, name)
        model.config._attn_implementation = before
        _replacement.reset(token)


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Locality | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks: see `AttentionInterface` there. Raises NotImplementedError for a position bias."""
    if options.get("position_bias") is not None:
        raise NotImplementedError(f"attention of {type(module).__name__} has a position bias")
    chosen = _replacement.get()
    extras = {} if chosen.ignores_extras else {"softcap": options.get("softcap"), "sinks": options.get("s_aux")}
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    layer = AttentionLayer(module.layer_idx, scale, locality=attention_mask, **extras)
    answer = chosen.attend(layer, _tuned(module, query, chosen.positions), key, value)
    return answer.transpose(1, 2).contiguous(), None


def _tuned(module: Any, query: Tensor, positions: Tensor | None) -> Tensor:
    """Scale Llama 4's queries by their true positions; the model takes them for the first of a sequence."""
    if positions is None or not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    taken = torch.arange(query.shape[2], device=query.device)
    wanted, given = (
        torch.log1p(torch.floor((places.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        for places in (positions, taken)
    )
    scaled: Tensor = query * (wanted / given)[:, None, :, None]
    return scaled.to(query.dtype)


def _mask(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Locality | None:
    """Return what a layer hides beyond causality, instead of the mask that transformers asks for."""
    return None if mask_function is causal_mask_function else Locality(mask_function, local_size or 0)


def _codegen_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    layer = AttentionLayer(module.layer_idx, 1 / float(module.scale_attn))
    return _replacement.get().attend(layer, query, key, value), None


def _gptj_attention(module: Any, hidden_states: Tensor, *, position_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Attend with all rotations of a layer as one complex product: GPT-J turns neighbouring numbers as a pair.

    transformers copies the table of sines (500 kB) for every row in every layer, and every head's numbers five times.
    """
    chosen, dtype = _replacement.get(), hidden_states.dtype
    if not chosen.rotations:
        sines, cosines = module.embed_positions[position_ids].to(dtype).float().chunk(2, -1)
        chosen.rotations.append(torch.complex(cosines, sines)[:, :, None])
    heads = (*hidden_states.shape[:2], module.num_attention_heads, -1)
    turned = torch.stack([module.q_proj(hidden_states), module.k_proj(hidden_states)]).float().view(2, *heads)
    pairs = turned[..., : module.rotary_dim].view(2, *heads, 2)
    torch.view_as_complex(pairs).mul_(chosen.rotations[0])
    queries, keys = turned.to(dtype).transpose(2, 3)
    values = module.v_proj(hidden_states).view(heads).transpose(1, 2)
    answer = chosen.attend(AttentionLayer(module.layer_idx, 1 / float(module.scale_attn)), queries, keys, values)
    return module.out_proj(answer.transpose(1, 2).flatten(2)), None


def _gpt_neo_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    size, local = module.config.window_size, module.attention_type == "local"
    window = Locality(sliding_window_causal_mask_function(size), size) if local else None
    layer = AttentionLayer(module.layer_id, 1.0, locality=window)
    return _replacement.get().attend(layer, query, key, value), None


_METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    GPTJAttention: {"forward": _gptj_attention},
    CodeGenAttention: {"_attn": _codegen_attention},
    GPTNeoSelfAttention: {"_attn": _gpt_neo_attention},
}
"""Attention that transformers' interface does not reach, with what replaces its methods."""


AttentionInterface.register(NAME, _interface)
AttentionMaskInterface.register(NAME, _mask)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the sequences as a tensor [B, T] on `device`, padded on the right with token 0."""
    width = max(map(len, sequences))
    return on_device([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device)


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Copy plain values to `device`; a GPU reads them from pinned memory, so the host does not wait."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
