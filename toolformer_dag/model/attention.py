"""Replace a model's attention by a function of our own, with what its layers need beside plain causal attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
    """A sliding window or chunks, which hide tokens from later ones.

    - `mask`: `mask(0, 0, q, k)` says, by element, whether a token at position q attends to one at position k.
    - `size`: the window or chunk. A sequence of at most `size` tokens is not limited by it.
    """

    mask: Callable[..., Tensor]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """What the attention of a layer does with its scores.

    - `number`: the layer's index in the model.
    - `scale`: what products of queries and keys are multiplied by.
    - `softcap`: scores s become softcap * tanh(s / softcap).
    - `sinks` [H]: per query head, the score of an extra key without a value. It takes part in the softmax, and its
      weight is dropped.
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
        """Return the attention weights of S keys: the softmax of their scores, in the same shape.

        - scores: products of queries and keys, [B, H, T, S]. For one query per sequence also [B, G, R, S], where H
          heads are G groups of R.
        - bias: added to the scores; minus infinity where a key is hidden. It broadcasts to their shape.

        Before the softmax a soft cap, if the layer has one, bounds the scores. With attention sinks the weights of the
        keys add up to less than 1, because the sink's weight is dropped.
        """
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + bias
        if self.sinks is None:
            return scores.softmax(-1, torch.float32).to(scores.dtype)
        # The sinks [H] become a column of scores, one per head: [1, H, 1, 1] or [1, G, R, 1], then for all sequences.
        sinks_by_head = self.sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1)
        sink_column = sinks_by_head.expand(*scores.shape[:-1], 1)
        weights_with_sink = torch.cat([scores, sink_column], -1).softmax(-1, torch.float32)
        return weights_with_sink[..., :-1].to(scores.dtype)


Attend = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, T, D], keys and values [B, H_kv, S, D]) -> [B, H, T, D]."""


class Visibility:
    """Which keys the queries of a pass attend to, as a bias per locality, computed once for all layers.

    - `queries`, `keys`: positions in their sequences, which broadcast to [B, T] and [B, S].
    - `longest`: the largest of these positions, plus one.
    - `dtype`: of the bias.
    - `seen`: booleans that broadcast to [B, T, S]; None where queries and keys are the same whole sequences.
    """

    def __init__(
        self, queries: Tensor, keys: Tensor, longest: int, dtype: torch.dtype, seen: Tensor | None = None
    ) -> None:
        self.queries = queries
        self.keys = keys
        self.longest = longest
        self.dtype = dtype
        self.seen = seen
        self._biases: dict[Locality | None, Tensor] = {}

    def bias(self, layer: AttentionLayer) -> Tensor:
        """Return zero where a query attends to a key, else minus infinity; broadcasts to [B, 1, T, S]."""
        locality = self.limiting(layer)
        if locality not in self._biases:
            self._biases[locality] = self._bias(locality)
        return self._biases[locality]

    def _bias(self, locality: Locality | None) -> Tensor:
        """Compute the bias under a sliding window or chunks; None: under neither."""
        queries = self.queries[..., :, None]
        keys = self.keys[..., None, :]
        seen = queries >= keys if self.seen is None else self.seen
        if locality is not None:
            seen = seen & locality.mask(0, 0, queries, keys)
        zeros = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return zeros.masked_fill_(~seen, -torch.inf).unsqueeze(-3)  # the same for all heads

    def limiting(self, layer: AttentionLayer) -> Locality | None:
        """Return the layer's locality where it hides a key of these sequences."""
        if layer.locality is None or self.longest <= layer.locality.size:
            return None
        return layer.locality


def attention(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute attention of queries [B, H, T, D] over keys and values [B, H_kv, S, D]; return [B, H, T, D].

    bias: zero where a query sees a key, else minus infinity; broadcasts to [B, 1, T, S]. Where several query heads
    share a head of keys (H_kv < H), the keys are repeated: with a bias, fused GPU kernels support no such groups.
    """
    heads_per_key_head = queries.shape[1] // keys.shape[1]
    if heads_per_key_head > 1:
        keys = keys.repeat_interleave(heads_per_key_head, 1)
        values = values.repeat_interleave(heads_per_key_head, 1)
    if layer.is_plain:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=layer.scale)
    return layer.weights(queries @ keys.mT * layer.scale, bias) @ values


def causal(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention of whole sequences: queries [B, H, T, D] over keys and values [B, H_kv, T, D].

    Returns [B, H, T, D]. Torch's fused kernel runs unless the layer has a window that is shorter than the sequences, a
    soft cap or sinks. Padding on the right needs no mask: no earlier token sees it.
    """
    length = keys.shape[2]
    is_local = layer.locality is not None and length > layer.locality.size
    if layer.is_plain and not is_local:
        is_grouped = queries.shape[1] > keys.shape[1]  # several query heads share a head of keys
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=layer.scale, enable_gqa=is_grouped
        )
    positions = torch.arange(length, device=keys.device)
    visibility = Visibility(queries=positions, keys=positions, longest=length, dtype=queries.dtype)
    return attention(layer, queries, keys, values, visibility.bias(layer))


NAME = "toolformer_dag"
"""The name of this attention in transformers' `attn_implementation`."""


@dataclass(slots=True, eq=False)
class _Replacement:
    """The attention that replaces a model's own for the length of a pass.

    - `attend`: computes the attention of a layer.
    - `positions` [B, T]: the positions of the tokens in their sequences. None where each row is a whole sequence.
    - `ignores_extras`: whether soft caps and sinks of the layers are ignored, because the model's own kernel (SDPA)
      ignores them too.
    - `rotations`: GPT-J's complex rotations of this pass, [B, T, 1, rotary_dim / 2]. None until its first layer runs.
    """

    attend: Attend
    positions: Tensor | None
    ignores_extras: bool
    rotations: Tensor | None = None

    def gptj_rotations(self, module: Any, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return GPT-J's rotation of each token, cos + i sin, complex [B, T, 1, rotary_dim / 2].

        The first layer computes and stores them, for all layers of the pass. Sine and cosine are rounded to `dtype`.
        """
        if self.rotations is None:
            sines, cosines = module.embed_positions[position_ids].to(dtype).float().chunk(2, -1)
            self.rotations = torch.complex(cosines, sines)[:, :, None]
        return self.rotations


_replacement: ContextVar[_Replacement] = ContextVar("replacement")


@contextmanager
def custom_attention(model: Any, attend: Attend, positions: Tensor | None = None) -> Iterator[None]:
    """Within the block, let every layer of a transformers model compute its attention with `attend`.

    Most models look their attention up by name in transformers' registry, where `NAME` is our function. The classes in
    `_METHODS` do not look it up, so their methods are replaced on each module. After the block all is as it was.

    positions: the positions of the tokens in their sequences, [B, T]; None where each row is a whole sequence.
    """
    original_name = model.config._attn_implementation
    replacement = _Replacement(attend, positions, ignores_extras=original_name == "sdpa")
    reset_token = _replacement.set(replacement)  # our attention functions read it from this context variable
    model.config._attn_implementation = NAME
    try:
        with _replaced_methods(model):
            yield
    finally:
        model.config._attn_implementation = original_name
        _replacement.reset(reset_token)


@contextmanager
def _replaced_methods(model: Any) -> Iterator[None]:
    """Within the block, replace the methods that `_METHODS` names on each module of the model that has such a class."""
    patched_modules = [module for module in model.modules() if type(module) in _METHODS]
    for module in patched_modules:
        for name, function in _METHODS[type(module)].items():
            vars(module)[name] = partial(function, module)  # an attribute of the module hides the method of its class
    try:
        yield
    finally:
        for module in patched_modules:
            for name in _METHODS[type(module)]:
                delattr(module, name)


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Locality | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute a layer's attention with the function that `custom_attention` set; transformers calls this per layer.

    - query [B, H, T, D]; key, value [B, H_kv, T, D].
    - attention_mask: no mask, but the layer's sliding window or chunks: `_mask` gave it to transformers as the mask.
    - options: the layer's scale, soft cap and sinks, by transformers' names.

    Returns the answers [B, T, H, D], and None where transformers would return the weights. Raises NotImplementedError
    for a position bias.
    """
    if options.get("position_bias") is not None:
        raise NotImplementedError(f"attention of {type(module).__name__} has a position bias")
    replacement = _replacement.get()  # of the `custom_attention` block that the model runs in
    layer = AttentionLayer(
        number=module.layer_idx,
        scale=options.get("scaling") or query.shape[-1] ** -0.5,
        # SDPA, the model's own kernel, would ignore soft cap and sinks.
        softcap=None if replacement.ignores_extras else options.get("softcap"),
        sinks=None if replacement.ignores_extras else options.get("s_aux"),
        locality=attention_mask,
    )
    true_query = _with_true_scale(module, query, replacement.positions)  # only Llama 4's changes
    answer = replacement.attend(layer, true_query, key, value)  # [B, H, T, D]
    return answer.transpose(1, 2).contiguous(), None


def _with_true_scale(module: Any, query: Tensor, positions: Tensor | None) -> Tensor:
    """Return Llama 4's queries [B, H, T, D] scaled for their true positions; those of other models as they are.

    In layers without rotary embeddings, transformers' Llama 4 multiplies each query by a number that grows with its
    position, and takes 0..T-1 for the positions. Here the queries are divided by that number, and multiplied by that
    of their true positions.

    positions: the true ones, [B, T]. None where each row is a whole sequence: 0..T-1 is then right.
    """
    if positions is None:
        return query
    scales_by_position = getattr(module, "attn_temperature_tuning", False) and not module.use_rope  # Llama 4 alone
    if not scales_by_position:
        return query
    assumed_positions = torch.arange(query.shape[2], device=query.device)  # [T]
    correction = _llama4_scale(module, positions) / _llama4_scale(module, assumed_positions)  # [B, T]
    scaled: Tensor = query * correction[:, None, :, None]
    return scaled.to(query.dtype)


def _llama4_scale(module: Any, positions: Tensor) -> Tensor:
    """Return the number by which Llama 4 multiplies the query at each position, in their shape; 1 at early ones."""
    steps: Tensor = torch.floor((positions.float() + 1) / module.floor_scale)
    growth: Tensor = torch.log1p(steps) * module.attn_scale
    return growth + 1


def _mask(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Locality | None:
    """Return a layer's sliding window or chunks, None where it has neither; transformers takes it for a mask.

    transformers hands it to `_interface` as it is. mask_function: says which token attends to which; see `Locality`.
    """
    if mask_function is causal_mask_function:
        return None
    return Locality(mask_function, local_size or 0)


def _codegen_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    """Attend in place of CodeGen's `_attn`, which gets queries, keys and values [B, H, T, D]."""
    layer = AttentionLayer(module.layer_idx, scale=1 / float(module.scale_attn))
    return _replacement.get().attend(layer, query, key, value), None


def _gptj_attention(module: Any, hidden_states: Tensor, *, position_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Run a GPT-J attention layer in place of its `forward`; return its output [B, T, F], and None for the weights.

    hidden_states: the layer's input, [B, T, F]. position_ids: the positions of the tokens, [B, T].
    """
    replacement = _replacement.get()  # of the `custom_attention` block that the model runs in
    rotations = replacement.gptj_rotations(module, position_ids, hidden_states.dtype)
    queries, keys = _rotated_queries_and_keys(module, hidden_states, rotations)  # [B, H, T, D] each
    heads_shape = (*hidden_states.shape[:2], module.num_attention_heads, -1)  # [B, T, H, D]
    values = module.v_proj(hidden_states).view(heads_shape).transpose(1, 2)
    layer = AttentionLayer(module.layer_idx, scale=1 / float(module.scale_attn))
    answer = replacement.attend(layer, queries, keys, values)  # [B, H, T, D]
    return module.out_proj(answer.transpose(1, 2).flatten(2)), None


def _rotated_queries_and_keys(module: Any, hidden_states: Tensor, rotations: Tensor) -> Tensor:
    """Return GPT-J's queries and keys after rotary embedding, [2, B, H, T, D].

    Each pair of neighbouring numbers (a, b) among the first `rotary_dim` of a query or key is a complex number a + bi.
    It is multiplied by the rotation cos + i sin of its token's position. Doing so for all of them at once is faster
    than transformers, which copies its table of sines (500 kB) for every row in every layer, and every head's numbers
    five times.

    rotations: complex, [B, T, 1, rotary_dim / 2].
    """
    heads_shape = (*hidden_states.shape[:2], module.num_attention_heads, -1)  # [B, T, H, D]
    projected = torch.stack([module.q_proj(hidden_states), module.k_proj(hidden_states)])  # [2, B, T, F]
    by_head = projected.float().view(2, *heads_shape)  # [2, B, T, H, D]
    pairs = by_head[..., : module.rotary_dim].view(2, *heads_shape, 2)  # [2, B, T, H, rotary_dim / 2, 2]
    torch.view_as_complex(pairs).mul_(rotations)  # in place: `pairs` is a view of `by_head`
    return by_head.to(hidden_states.dtype).transpose(2, 3)


def _gpt_neo_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    """Attend in place of GPT-Neo's `_attn`: without a scale, and with a window in every other layer."""
    window = None
    if module.attention_type == "local":
        size = module.config.window_size
        window = Locality(sliding_window_causal_mask_function(size), size)
    layer = AttentionLayer(module.layer_id, scale=1.0, locality=window)
    return _replacement.get().attend(layer, query, key, value), None


_METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    GPTJAttention: {"forward": _gptj_attention},
    CodeGenAttention: {"_attn": _codegen_attention},
    GPTNeoSelfAttention: {"_attn": _gpt_neo_attention},
}
"""Attention that transformers' interface does not reach: by class, the methods that are replaced."""


AttentionInterface.register(NAME, _interface)
AttentionMaskInterface.register(NAME, _mask)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the sequences as a tensor [B, T] on `device`, padded on the right with token 0.

    [[3, 5], [7]] becomes [[3, 5], [7, 0]].
    """
    width = max(map(len, sequences))
    rows = []
    for sequence in sequences:
        padding = [0] * (width - len(sequence))
        rows.append([*sequence, *padding])
    return on_device(rows, device)


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return numbers, nested lists or an array as a tensor on `device`.

    The copy to a GPU goes through pinned memory, so that the host does not wait for it.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
