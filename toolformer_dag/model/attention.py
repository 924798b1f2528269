"""Replace a transformers model's attention by a function of our own, layer by layer.

Shapes use these letters: B sequences, T queries, S keys, D numbers per head, H heads of queries, H_kv heads of keys and
values (fewer than H where query heads share one), F features.
"""

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

    - `mask`: `mask(0, 0, q, k)` computes, by element, whether a token at position q attends to one at position k.
    - `size`: the tokens of the window or chunk; in a sequence of at most `size` tokens nothing is hidden.
    """

    mask: Callable[..., Tensor]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """The parameters of a layer's attention.

    - `number`: the layer's index in the model.
    - `scale`: the factor of products of queries and keys; the scaled products are the scores.
    - `softcap`: scores s become softcap * tanh(s / softcap). None: they stay as they are.
    - `sinks` [H]: per query head, the score of an extra key that takes part in the softmax and has no value.
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

    def hides_within(self, length: int) -> bool:
        """Return whether a window or chunks hide tokens in a sequence of `length` tokens."""
        return self.locality is not None and length > self.locality.size

    def weights(self, scores: Tensor, bias: Tensor) -> Tensor:
        """Compute the attention weights: the softmax of the scores over their S keys.

        Sinks (extra keys without values) take part in the softmax, and their weights are dropped.

        Args:
            scores: The scaled products, [B, H, T, S]. With one query per sequence, they may be [B, G, R, S], where the
                H heads are G groups of R.
            bias: Minus infinity where a key is hidden, else zero. It broadcasts to the scores.
        """
        scores = self._cap_scores(scores) + bias  # the same name, so that the memory of the old scores is freed
        if self.sinks is None:
            return scores.softmax(-1, torch.float32).to(scores.dtype)
        return _softmax_with_sinks(scores, self.sinks)

    def _cap_scores(self, scores: Tensor) -> Tensor:
        """Return the scores bounded by the layer's soft cap, if it has one."""
        if self.softcap is None:
            return scores
        return torch.tanh(scores / self.softcap) * self.softcap


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Compute the softmax of scores over S keys and a sink, and drop the weight of the sink.

    Args:
        scores: [B, H, T, S] or [B, G, R, S].
        sinks: The score of each head's sink, [H].
    """
    sink_by_head = sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1)  # [1, H, 1, 1] or [1, G, R, 1]
    sink_column = sink_by_head.expand(*scores.shape[:-1], 1)
    weights_with_sink = torch.cat([scores, sink_column], -1).softmax(-1, torch.float32)  # [..., S + 1]
    return weights_with_sink[..., :-1].to(scores.dtype)


Attend = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, T, D], keys and values [B, H_kv, S, D]) -> [B, H, T, D]."""


class Visibility:
    """Which keys the queries of a pass attend to, as a bias per window size, computed once for all layers.

    - `queries`: the position of each query in its sequence; broadcasts to [B, T].
    - `keys`: the position of each key in its sequence; broadcasts to [B, S].
    - `longest`: the largest of these positions, plus one.
    - `dtype`: the data type of the bias.
    - `seen`: booleans that broadcast to [B, T, S]: whether a query attends to a key, windows apart. None: to each key
      at its own or an earlier position.
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
        locality = self.find_limiting_locality(layer)
        if locality not in self._biases:
            self._biases[locality] = self._compute_bias(locality)
        return self._biases[locality]

    def _compute_bias(self, locality: Locality | None) -> Tensor:
        """Compute the bias under a sliding window or chunks, or under neither (None)."""
        seen = self._compute_seen_mask(locality)
        zeros = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return zeros.masked_fill_(~seen, -torch.inf).unsqueeze(-3)  # the same for all heads

    def _compute_seen_mask(self, locality: Locality | None) -> Tensor:
        """Return whether each query attends to each key under a window or chunks; broadcasts to [B, T, S]."""
        queries = self.queries[..., :, None]
        keys = self.keys[..., None, :]
        seen = queries >= keys if self.seen is None else self.seen
        if locality is None:
            return seen
        return seen & locality.mask(0, 0, queries, keys)

    def find_limiting_locality(self, layer: AttentionLayer) -> Locality | None:
        """Return the layer's window or chunks where they hide a key of these sequences, else None."""
        return layer.locality if layer.hides_within(self.longest) else None


def attention(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute attention of T queries over S keys in B sequences.

    Args:
        layer: The parameters of the layer.
        queries: [B, H, T, D].
        keys: [B, H_kv, S, D]. Each head of keys serves H / H_kv heads of queries.
        values: In the shape of the keys.
        bias: Zero where a query may see a key, else minus infinity. It broadcasts to [B, 1, T, S].

    Returns:
        The attended values, [B, H, T, D].
    """
    # With a bias, fused GPU kernels do not support several query heads per head of keys.
    keys = _repeat_heads(keys, queries.shape[1])  # [B, H, S, D]
    values = _repeat_heads(values, queries.shape[1])

    if layer.is_plain:  # without soft cap and sinks, which torch's kernel does not know
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=layer.scale)
    # The scores, [B, H, T, S], get no name here, so that `weights` can free their memory.
    return layer.weights(queries @ keys.mT * layer.scale, bias) @ values


def _repeat_heads(keys: Tensor, query_heads: int) -> Tensor:
    """Repeat each head of keys or values [B, H_kv, S, D] for the query heads that share it: [B, H, S, D]."""
    times = query_heads // keys.shape[1]
    return keys.repeat_interleave(times, 1) if times > 1 else keys


def attend_causally(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention in B whole sequences, where each token sees itself and the tokens before it.

    Padding on the right needs no mask, because no earlier token sees it.

    Args:
        layer: The parameters of the layer. Its sliding window or chunks may hide tokens, too.
        queries: [B, H, T, D].
        keys: [B, H_kv, T, D]. Each head of keys serves H / H_kv heads of queries.
        values: In the shape of the keys.

    Returns:
        The attended values, [B, H, T, D].
    """
    length = keys.shape[2]
    has_window = layer.hides_within(length)  # also true for chunks
    if layer.is_plain and not has_window:  # "plain" means without soft cap and sinks
        return _attend_causally_by_fused_kernel(layer, queries, keys, values)

    positions = torch.arange(length, device=keys.device)  # [T]; a query sees the keys up to its own position
    visibility = Visibility(queries=positions, keys=positions, longest=length, dtype=queries.dtype)
    return attention(layer, queries, keys, values, visibility.bias(layer))


def _attend_causally_by_fused_kernel(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute what `attend_causally` does by torch's fused kernel, which knows no window, soft cap or sinks."""
    is_grouped = queries.shape[1] > keys.shape[1]  # several query heads share a head of keys
    return F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=layer.scale, enable_gqa=is_grouped
    )


NAME = "toolformer_dag"
"""The name of this attention in transformers' `attn_implementation`."""


@dataclass(slots=True, eq=False)
class _Replacement:
    """The attention that replaces a model's own for the length of a pass.

    - `attend`: computes the attention of a layer.
    - `positions` [B, T]: the positions of the tokens in their sequences. None where each row is a whole sequence.
    - `ignores_extras`: whether soft caps and sinks of layers are ignored, as the model's own kernel (SDPA) does.
    - `rotations`: GPT-J's complex rotations of this pass, [B, T, 1, rotary_dim / 2]. None until its first layer runs.
    """

    attend: Attend
    positions: Tensor | None
    ignores_extras: bool
    rotations: Tensor | None = None

    def layer(self, module: Any, head_size: int, locality: Locality | None, options: Any) -> AttentionLayer:
        """Return the parameters of a module's attention. options: scale, soft cap and sinks by transformers' names."""
        return AttentionLayer(
            number=module.layer_idx,
            scale=options.get("scaling") or head_size**-0.5,
            softcap=None if self.ignores_extras else options.get("softcap"),
            sinks=None if self.ignores_extras else options.get("s_aux"),
            locality=locality,
        )

    def correct_query(self, module: Any, query: Tensor) -> Tensor:
        """Return a layer's queries [B, H, T, D]; Llama 4's are rescaled from positions 0..T-1 to the true ones."""
        if self.positions is not None and _scales_by_position(module):
            return _rescale_llama4_query(module, query, self.positions)
        return query

    def compute_gptj_rotations(self, module: Any, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return GPT-J's rotation of each token, cos + i sin, complex [B, T, 1, rotary_dim / 2].

        They are computed for the first layer of a pass, from sines and cosines rounded to `dtype`.
        """
        if self.rotations is None:
            sines, cosines = module.embed_positions[position_ids].to(dtype).float().chunk(2, -1)
            self.rotations = torch.complex(cosines, sines)[:, :, None]
        return self.rotations


_replacement: ContextVar[_Replacement] = ContextVar("replacement")


@contextmanager
def custom_attention(model: Any, attend: Attend, positions: Tensor | None = None) -> Iterator[None]:
    """Within the `with` block, make every layer of a transformers model compute its attention with `attend`.

    Args:
        model: The model. It gets its own attention back when the block ends.
        attend: Computes the attention of a layer.
        positions: The position of each token in its sequence, [B, T]. None means that each row is a whole sequence.
    """
    # Most models look up their attention in transformers' registry, where NAME is our function. The classes in
    # `_METHODS` do not, so their methods are replaced.
    original_name = model.config._attn_implementation
    ignores_extras = original_name == "sdpa"  # torch's kernel ignores soft caps and sinks, and so do we then
    replacement = _Replacement(attend, positions, ignores_extras)

    reset_token = _replacement.set(replacement)  # a context variable that our attention functions read
    model.config._attn_implementation = NAME
    try:
        with _replaced_methods(model):  # for the classes in `_METHODS`
            yield
    finally:
        model.config._attn_implementation = original_name
        _replacement.reset(reset_token)


@contextmanager
def _replaced_methods(model: Any) -> Iterator[None]:
    """Within the `with` block, replace the methods listed in `_METHODS`, in all modules of the model."""
    modules = [module for module in model.modules() if type(module) in _METHODS]  # most models have none
    for module in modules:
        _replace_methods(module)
    try:
        yield
    finally:
        for module in modules:
            _restore_methods(module)


def _replace_methods(module: Any) -> None:
    """Set our functions as attributes of a module, which hide the methods of its class."""
    for name, function in _METHODS[type(module)].items():
        vars(module)[name] = partial(function, module)


def _restore_methods(module: Any) -> None:
    """Delete the attributes that hide the methods of a module's class."""
    for name in _METHODS[type(module)]:
        delattr(module, name)


def _compute_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Locality | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute a layer's attention with the function that `custom_attention` has set; transformers calls this.

    Args:
        module: The attention layer.
        query: The queries, [B, H, T, D].
        key: The keys, [B, H_kv, T, D].
        value: The values, in the shape of the keys.
        attention_mask: The layer's sliding window or chunks, as `_find_locality` returned it to transformers.
        options: The layer's scale, soft cap and sinks.

    Returns:
        The attended values, [B, T, H, D], and None in place of the attention weights.

    Raises:
        NotImplementedError: The layer adds a bias that depends on positions.
    """
    if options.get("position_bias") is not None:
        raise NotImplementedError(f"attention of {type(module).__name__} has a position bias")

    replacement = _replacement.get()  # set for this pass of the model
    layer = replacement.layer(module, query.shape[-1], locality=attention_mask, options=options)  # its parameters
    query = replacement.correct_query(module, query)  # Llama 4 scales queries by position, as if each row began at 0

    answer = replacement.attend(layer, query, key, value)  # [B, H, T, D]
    return answer.transpose(1, 2).contiguous(), None


def _scales_by_position(module: Any) -> bool:
    """Return whether a layer multiplies queries by a number that grows with their position: some of Llama 4 do."""
    return bool(getattr(module, "attn_temperature_tuning", False) and not module.use_rope)


def _rescale_llama4_query(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Rescale Llama 4's queries to their true positions; transformers scaled them as if they were at 0..T-1.

    Args:
        module: The attention layer.
        query: The queries, [B, H, T, D].
        positions: The true positions of the queries in their sequences, [B, T].
    """
    assumed_positions = torch.arange(query.shape[2], device=query.device)  # [T]
    correction = _compute_llama4_scale(module, positions) / _compute_llama4_scale(module, assumed_positions)  # [B, T]
    scaled: Tensor = query * correction[:, None, :, None]
    return scaled.to(query.dtype)


def _compute_llama4_scale(module: Any, positions: Tensor) -> Tensor:
    """Return the factor of Llama 4's query at each position, in their shape; 1 at the first positions."""
    steps: Tensor = torch.floor((positions.float() + 1) / module.floor_scale)
    growth: Tensor = torch.log1p(steps) * module.attn_scale
    return growth + 1


def _find_locality(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Locality | None:
    """Return a layer's sliding window or chunks, if any, as its mask; transformers hands it to `_compute_attention`."""
    if mask_function is causal_mask_function:
        return None
    return Locality(mask_function, local_size or 0)


def _compute_codegen_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    """Compute attention in place of CodeGen's `_attn`; queries, keys, values and answers are [B, H, T, D]."""
    return _replacement.get().attend(_build_gptj_layer(module), query, key, value), None


def _build_gptj_layer(module: Any) -> AttentionLayer:
    """Return the parameters of a GPT-J or CodeGen layer's attention."""
    return AttentionLayer(module.layer_idx, scale=1 / float(module.scale_attn))


def _run_gptj_attention(module: Any, hidden_states: Tensor, *, position_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Run a GPT-J attention layer; this replaces its `forward`.

    The only difference: the function set by `custom_attention` computes the answer from queries, keys and values.

    Args:
        module: The attention layer.
        hidden_states: The input of the layer, [B, T, F].
        position_ids: The positions of the tokens, [B, T].

    Returns:
        The output of the layer, [B, T, F], and None in place of the attention weights.
    """
    replacement = _replacement.get()  # set for this pass of the model

    rotations = replacement.compute_gptj_rotations(
        module, position_ids, hidden_states.dtype
    )  # the rotary embedding of each token
    queries, keys = _rotate_queries_and_keys(module, hidden_states, rotations)  # [B, H, T, D] each
    values = _split_heads(module, module.v_proj(hidden_states)).transpose(1, 2)  # [B, H, T, D]

    layer = _build_gptj_layer(module)  # number and scale
    answer = replacement.attend(layer, queries, keys, values)  # [B, H, T, D]
    return module.out_proj(answer.transpose(1, 2).flatten(2)), None


def _split_heads(module: Any, projected: Tensor) -> Tensor:
    """Return a view of GPT-J's projected features [..., F] by attention head, [..., H, D]."""
    return projected.view(*projected.shape[:-1], module.num_attention_heads, -1)


def _rotate_queries_and_keys(module: Any, hidden_states: Tensor, rotations: Tensor) -> Tensor:
    """Compute GPT-J's queries and keys and apply the rotary embedding to them.

    Args:
        module: The attention layer.
        hidden_states: The input of the layer, [B, T, F].
        rotations: The rotation of each token as a complex number.

    Returns:
        Queries and keys in one tensor, [2, B, H, T, D].
    """
    # Both are rotated at once, which is faster than transformers: it copies its table of sines (500 kB) for every row
    # in every layer, and every head's numbers five times.
    projected = torch.stack([module.q_proj(hidden_states), module.k_proj(hidden_states)])  # [2, B, T, F]
    by_head = _split_heads(module, projected.float())  # [2, B, T, H, D]
    _rotate_in_place(by_head[..., : module.rotary_dim], rotations)
    return by_head.to(hidden_states.dtype).transpose(2, 3)


def _rotate_in_place(vectors: Tensor, rotations: Tensor) -> None:
    """Multiply each pair of neighbouring numbers (a, b), as a + bi, by the rotation cos + i sin of its token.

    vectors: [2, B, T, H, R]. rotations: complex, [B, T, 1, R / 2].
    """
    pairs = vectors.view(*vectors.shape[:-1], -1, 2)  # [2, B, T, H, R / 2, 2]
    torch.view_as_complex(pairs).mul_(rotations)


def _compute_gpt_neo_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    """Compute attention in place of GPT-Neo's `_attn`: without a scale, and with a window in every other layer."""
    layer = AttentionLayer(module.layer_id, scale=1.0, locality=_find_gpt_neo_window(module))
    return _replacement.get().attend(layer, query, key, value), None


def _find_gpt_neo_window(module: Any) -> Locality | None:
    """Return the sliding window of a GPT-Neo layer; None for a layer that attends to all tokens."""
    if module.attention_type != "local":
        return None
    size = module.config.window_size
    return Locality(sliding_window_causal_mask_function(size), size)


_METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    GPTJAttention: {"forward": _run_gptj_attention},
    CodeGenAttention: {"_attn": _compute_codegen_attention},
    GPTNeoSelfAttention: {"_attn": _compute_gpt_neo_attention},
}
"""Attention that transformers' interface does not reach: by class, the methods that are replaced."""


AttentionInterface.register(NAME, _compute_attention)
AttentionMaskInterface.register(NAME, _find_locality)


def pad_sequences(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Put token sequences into one tensor [B, T] on `device`, and fill up the shorter ones with token 0 on the right.

    Example:
        [[3, 5], [7]] becomes [[3, 5], [7, 0]].
    """
    width = max(map(len, sequences))
    rows = []
    for sequence in sequences:
        padding = [0] * (width - len(sequence))
        rows.append([*sequence, *padding])
    return on_device(rows, device)


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Put numbers, nested lists or an array into a tensor on `device`.

    The copy to a GPU goes through pinned memory, so that the program does not wait for it.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
