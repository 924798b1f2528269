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

    Attributes:
        mask_function: `mask_function(0, 0, q, k)` computes, by element, whether a token at position q attends to one at
            position k.
        window_size: The number of tokens in the window or chunk. In a sequence that is no longer, nothing is hidden.
    """

    mask_function: Callable[..., Tensor]
    window_size: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """The parameters of a layer's attention.

    Attributes:
        index: The layer's index in the model.
        scale: The factor of products of queries and keys. The scaled products are the scores.
        softcap: Scores s become softcap * tanh(s / softcap). If it is None, they stay as they are.
        sinks: For each query head, the score of an extra key that takes part in the softmax and has no value, [H].
        locality: The sliding window or chunks of the layer. None if a token attends to all tokens before it.
    """

    index: int
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    locality: Locality | None = None

    @property
    def has_plain_softmax(self) -> bool:
        """Return whether scores have neither a soft cap nor sinks."""
        return self.softcap is None and self.sinks is None

    def has_hidden_tokens(self, sequence_length: int) -> bool:
        """Return whether a window or chunks hide tokens in a sequence of `sequence_length` tokens."""
        return self.locality is not None and sequence_length > self.locality.window_size

    def compute_attention_weights(self, scores: Tensor, attention_bias: Tensor) -> Tensor:
        """Compute the attention weights: the softmax of the scores over their S keys.

        Sinks (extra keys without values) take part in the softmax, and their weights are dropped.

        Args:
            scores: The scaled products, [B, H, T, S]. With one query per sequence, they may be [B, G, R, S], where the
                H heads are G groups of R.
            attention_bias: Minus infinity where a key is hidden, else zero. It broadcasts to the scores.
        """
        # The result gets the same name, so that the memory of the old scores is freed.
        scores = self._cap_scores(scores) + attention_bias
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

    A sink is an extra key without a value. It takes a part of the weight, so those of the S keys sum to less than 1.

    Args:
        scores: [B, H, T, S]. With one query per sequence, they may be [B, G, R, S] instead, where the H heads in their
            order are cut into G groups of R.
        sinks: The score of each head's sink, [H].
    """
    sink_by_head = sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1)  # [1, H, 1, 1] or [1, G, R, 1]
    sink_column = sink_by_head.expand(*scores.shape[:-1], 1)
    weights_with_sink = torch.cat([scores, sink_column], -1).softmax(-1, torch.float32)  # [..., S + 1]
    return weights_with_sink[..., :-1].to(scores.dtype)


AttentionFunction = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, T, D], keys and values [B, H_kv, S, D]) -> [B, H, T, D]."""


class Visibility:
    """Decides which keys the queries of a pass attend to.

    The answer is a bias that is added to the scores. It is computed once for each window size, not in every layer.

    Attributes:
        query_positions: The position of each query in its sequence, in a shape that broadcasts to [B, T].
        key_positions: The position of each key in its sequence, in a shape that broadcasts to [B, S].
        longest_sequence_length: The largest of these positions, plus one.
        dtype: The data type of the bias.
        attention_mask: Booleans that broadcast to [B, T, S]: whether a query attends to a key, apart from windows. If
            it is None, a query attends to each key at its own or an earlier position.
    """

    def __init__(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        longest_sequence_length: int,
        dtype: torch.dtype,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Store what decides which keys the T queries of B sequences attend to. No bias is computed yet.

        Args:
            query_positions: The position of each query in its sequence, in a shape that broadcasts to [B, T].
            key_positions: The position of each key in its sequence, in a shape that broadcasts to [B, S].
            longest_sequence_length: The largest of these positions, plus one.
            dtype: The data type of the biases.
            attention_mask: True where a query attends to a key, as far as sliding windows and chunks allow it, in a
                shape that broadcasts to [B, T, S]. If it is None, positions decide: a query attends to each key at its
                own or an earlier one.
        """
        self.query_positions = query_positions
        self.key_positions = key_positions
        self.longest_sequence_length = longest_sequence_length
        self.dtype = dtype
        self.attention_mask = attention_mask
        # A bias for each sliding window or chunking, and for None, which layers without either have.
        self._biases_by_locality: dict[Locality | None, Tensor] = {}

    def get_attention_bias(self, layer: AttentionLayer) -> Tensor:
        """Return the bias of a layer's scores, which is computed once for layers with the same window.

        Returns:
            Zero where a query attends to a key, else minus infinity. The bias broadcasts to [B, 1, T, S].
        """
        locality = self.find_limiting_locality(layer)
        if locality not in self._biases_by_locality:
            self._biases_by_locality[locality] = self._compute_bias(locality)
        return self._biases_by_locality[locality]

    def _compute_bias(self, locality: Locality | None) -> Tensor:
        """Compute the bias under a sliding window or chunks, or under neither (None).

        Returns:
            Zero where a query attends to a key, else minus infinity. The bias broadcasts to [B, 1, T, S].
        """
        attends = self._compute_attention_mask(locality)
        zeros = torch.zeros(attends.shape, dtype=self.dtype, device=attends.device)
        bias = zeros.masked_fill_(~attends, -torch.inf)
        return bias.unsqueeze(-3)  # the same for all heads

    def _compute_attention_mask(self, locality: Locality | None) -> Tensor:
        """Compute whether each query attends to each key.

        `self.attention_mask` decides it or, without one, the positions: a query attends to no later key. A window or
        chunks then hide further keys.

        Args:
            locality: A sliding window or chunks, or None.

        Returns:
            Booleans that broadcast to [B, T, S].
        """
        query_positions = self.query_positions[..., :, None]
        key_positions = self.key_positions[..., None, :]

        attends = query_positions >= key_positions if self.attention_mask is None else self.attention_mask
        if locality is None:
            return attends
        # The zeros stand for a sequence and a head, on which a window does not depend.
        return attends & locality.mask_function(0, 0, query_positions, key_positions)

    def find_limiting_locality(self, layer: AttentionLayer) -> Locality | None:
        """Return the layer's window or chunks if they hide a key of these sequences, else None."""
        return layer.locality if layer.has_hidden_tokens(self.longest_sequence_length) else None


def compute_masked_attention(
    layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor, attention_bias: Tensor
) -> Tensor:
    """Compute attention of T queries over S keys in B sequences.

    Args:
        layer: The parameters of the layer.
        queries: [B, H, T, D].
        keys: [B, H_kv, S, D]. Each head of keys serves H / H_kv heads of queries.
        values: In the shape of the keys.
        attention_bias: Zero where a query may see a key, else minus infinity. It broadcasts to [B, 1, T, S].

    Returns:
        The attended values, [B, H, T, D].
    """
    # With a bias, fused GPU kernels do not support several query heads per head of keys.
    keys = _repeat_heads(keys, queries.shape[1])  # [B, H, S, D]
    values = _repeat_heads(values, queries.shape[1])

    if layer.has_plain_softmax:  # without soft cap and sinks, which torch's kernel does not know
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=attention_bias, scale=layer.scale)

    # The scores, [B, H, T, S], get no name here, so that `compute_attention_weights` can free their memory.
    return layer.compute_attention_weights(queries @ keys.mT * layer.scale, attention_bias) @ values


def _repeat_heads(keys: Tensor, query_head_count: int) -> Tensor:
    """Repeat each head of keys or values [B, H_kv, S, D] for the query heads that share it: [B, H, S, D]."""
    queries_per_key = query_head_count // keys.shape[1]
    return keys.repeat_interleave(queries_per_key, 1) if queries_per_key > 1 else keys


def compute_causal_attention(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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
    sequence_length = keys.shape[2]
    is_fully_causal = not layer.has_hidden_tokens(sequence_length)  # no window or chunk hides an earlier token
    if layer.has_plain_softmax and is_fully_causal:
        return _compute_causal_attention_by_fused_kernel(layer, queries, keys, values)

    positions = torch.arange(sequence_length, device=keys.device)  # [T]; a query sees the keys up to its own position
    visibility = Visibility(
        query_positions=positions,
        key_positions=positions,
        longest_sequence_length=sequence_length,
        dtype=queries.dtype,
    )
    attention_bias = visibility.get_attention_bias(layer)
    return compute_masked_attention(layer, queries, keys, values, attention_bias)


def _compute_causal_attention_by_fused_kernel(
    layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Compute causal attention with torch's fused kernel, which does not support windows, soft caps and sinks.

    Shapes are as in `compute_causal_attention`.
    """
    is_grouped = queries.shape[1] > keys.shape[1]  # several query heads share a head of keys
    return F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=layer.scale, enable_gqa=is_grouped
    )


ATTENTION_NAME = "toolformer_dag"
"""The name of this attention in transformers' `attn_implementation`."""


@dataclass(slots=True, eq=False)
class _Replacement:
    """The attention that replaces a model's own for the length of a pass.

    Attributes:
        attention_function: Computes the attention of a layer.
        position_ids: The positions of the tokens in their sequences, [B, T]. None where each row is a whole sequence.
        ignores_softcap_and_sinks: Whether soft caps and sinks of layers are ignored, as the model's own kernel (SDPA)
            does.
        gptj_rotations: GPT-J's complex rotations of this pass, [B, T, 1, rotary_dim / 2]. None until its first layer
            runs.
    """

    attention_function: AttentionFunction
    position_ids: Tensor | None
    ignores_softcap_and_sinks: bool
    gptj_rotations: Tensor | None = None

    def build_attention_layer(
        self, module: Any, head_size: int, locality: Locality | None, options: Any
    ) -> AttentionLayer:
        """Collect the parameters of a module's attention. Soft cap and sinks are None if its model ignores them.

        Args:
            module: The attention layer of transformers.
            head_size: The numbers per head, D.
            locality: The sliding window or chunks of the layer, or None.
            options: Scale, soft cap and sinks by transformers' names, where the layer has them.
        """
        return AttentionLayer(
            index=module.layer_idx,
            scale=options.get("scaling") or head_size**-0.5,
            softcap=None if self.ignores_softcap_and_sinks else options.get("softcap"),
            sinks=None if self.ignores_softcap_and_sinks else options.get("s_aux"),
            locality=locality,
        )

    def correct_query(self, module: Any, query: Tensor) -> Tensor:
        """Return a layer's queries [B, H, T, D]. Llama 4's are rescaled from positions 0..T-1 to the true ones."""
        if self.position_ids is None or not _has_position_scaling(module):
            return query
        return _rescale_llama4_query(module, query, self.position_ids)

    def compute_gptj_rotations(self, module: Any, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute GPT-J's rotation of each token, or return those computed for an earlier layer of this pass.

        Args:
            module: The attention layer, which has a table of sines and cosines.
            position_ids: The position of each token in its sequence, [B, T].
            dtype: The data type to which sines and cosines are rounded first.

        Returns:
            Complex numbers cos + i sin, [B, T, 1, rotary_dim / 2].
        """
        if self.gptj_rotations is None:
            sines_and_cosines = module.embed_positions[position_ids].to(dtype).float()
            sines, cosines = sines_and_cosines.chunk(2, -1)
            self.gptj_rotations = torch.complex(cosines, sines)[:, :, None]
        return self.gptj_rotations


_current_replacement: ContextVar[_Replacement] = ContextVar("replacement")


@contextmanager
def use_custom_attention(
    model: Any, attention_function: AttentionFunction, position_ids: Tensor | None = None
) -> Iterator[None]:
    """Within the `with` block, make every layer of a transformers model compute its attention with our function.

    Args:
        model: The model. It gets its own attention back when the block ends.
        attention_function: Computes the attention of a layer.
        position_ids: The position of each token in its sequence, [B, T]. None means that each row is a whole sequence.
    """
    original_name = model.config._attn_implementation
    # "sdpa" is torch's kernel, which ignores soft caps and sinks, so they have to be ignored here, too.
    replacement = _Replacement(attention_function, position_ids, ignores_softcap_and_sinks=original_name == "sdpa")

    # Most models look up their attention in transformers' registry, where our function has the name ATTENTION_NAME. It
    # reads this context variable. The classes in `_REPLACEMENT_METHODS` do not, so their methods are replaced.
    reset_token = _current_replacement.set(replacement)
    model.config._attn_implementation = ATTENTION_NAME
    try:
        with _use_replaced_methods(model):
            yield
    finally:
        model.config._attn_implementation = original_name
        _current_replacement.reset(reset_token)


@contextmanager
def _use_replaced_methods(model: Any) -> Iterator[None]:
    """Within the `with` block, replace the methods listed in `_REPLACEMENT_METHODS` in all modules of a model.

    Most models have no such modules.
    """
    modules_to_change = [module for module in model.modules() if type(module) in _REPLACEMENT_METHODS]
    for module in modules_to_change:
        _replace_methods(module)
    try:
        yield
    finally:
        for module in modules_to_change:
            _restore_methods(module)


def _replace_methods(module: Any) -> None:
    """Set our functions as attributes of a module, which hide the methods of its class."""
    for method_name, function in _REPLACEMENT_METHODS[type(module)].items():
        vars(module)[method_name] = partial(function, module)


def _restore_methods(module: Any) -> None:
    """Delete the attributes that hide the methods of a module's class."""
    for method_name in _REPLACEMENT_METHODS[type(module)]:
        delattr(module, method_name)


def _compute_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Locality | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute a layer's attention with the function that `use_custom_attention` has set.

    transformers calls this in each layer.

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

    replacement = _current_replacement.get()  # set for this pass of the model
    head_size = query.shape[-1]
    layer = replacement.build_attention_layer(module, head_size, locality=attention_mask, options=options)

    # Llama 4 has scaled its queries by position, as if each row began at 0.
    query = replacement.correct_query(module, query)

    attended_values = replacement.attention_function(layer, query, key, value)  # [B, H, T, D]
    return attended_values.transpose(1, 2).contiguous(), None


def _has_position_scaling(module: Any) -> bool:
    """Return whether a layer multiplies queries by a number that grows with their position, as some of Llama 4 do."""
    has_tuning = bool(getattr(module, "attn_temperature_tuning", False))
    return has_tuning and not module.use_rope


def _rescale_llama4_query(module: Any, query: Tensor, position_ids: Tensor) -> Tensor:
    """Rescale Llama 4's queries to their true positions.

    transformers scaled them as if they were at positions 0 to T - 1.

    Args:
        module: The attention layer.
        query: The queries, [B, H, T, D].
        position_ids: The true positions of the queries in their sequences, [B, T].

    Returns:
        The rescaled queries, [B, H, T, D].
    """
    assumed_positions = torch.arange(query.shape[2], device=query.device)  # [T]
    assumed_scale = _compute_llama4_scale(module, assumed_positions)  # [T]
    true_scale = _compute_llama4_scale(module, position_ids)  # [B, T]
    correction = true_scale / assumed_scale  # [B, T]

    rescaled_query: Tensor = query * correction[:, None, :, None]
    return rescaled_query.to(query.dtype)


def _compute_llama4_scale(module: Any, position_ids: Tensor) -> Tensor:
    """Compute the factor by which Llama 4 multiplies the query at each position, in the shape of the positions.

    It is 1 at the first positions.
    """
    steps: Tensor = torch.floor((position_ids.float() + 1) / module.floor_scale)
    growth: Tensor = torch.log1p(steps) * module.attn_scale
    return growth + 1


def _find_locality(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Locality | None:
    """Return a layer's sliding window or chunks, or None if it has neither.

    transformers calls this to build the mask of a layer, and passes the result on to `_compute_attention`.

    Args:
        mask_function: transformers' mask of the layer: `causal_mask_function` if it has neither.
        local_size: The number of tokens of the window or chunk.
    """
    if mask_function is causal_mask_function:
        return None
    return Locality(mask_function, local_size or 0)


def _compute_codegen_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    """Compute attention in place of CodeGen's `_attn`.

    Args:
        module: The attention layer.
        query: The queries, [B, H, T, D].
        key: The keys, in the same shape.
        value: The values, in the same shape.
        mask: Has no effect, because the replacing function itself knows which keys are visible.

    Returns:
        The attended values, [B, H, T, D], and None in place of the attention weights.
    """
    replacement = _current_replacement.get()  # set for this pass of the model
    return replacement.attention_function(_build_gptj_layer(module), query, key, value), None


def _build_gptj_layer(module: Any) -> AttentionLayer:
    """Return the parameters of a GPT-J or CodeGen layer's attention."""
    return AttentionLayer(module.layer_idx, scale=1 / float(module.scale_attn))


def _run_gptj_attention(module: Any, hidden_states: Tensor, *, position_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Run a GPT-J attention layer, in place of its `forward`.

    The only difference is that the function set by `use_custom_attention` computes the attention from queries, keys and
    values.

    Args:
        module: The attention layer.
        hidden_states: The input of the layer, [B, T, F].
        position_ids: The positions of the tokens, [B, T].

    Returns:
        The output of the layer, [B, T, F], and None in place of the attention weights.
    """
    replacement = _current_replacement.get()  # set for this pass of the model

    # The rotary embedding rotates queries and keys by an angle that depends on the position of the token.
    rotations = replacement.compute_gptj_rotations(module, position_ids, hidden_states.dtype)
    queries, keys = _rotate_queries_and_keys(module, hidden_states, rotations)  # [B, H, T, D] each
    values = _split_heads(module, module.v_proj(hidden_states)).transpose(1, 2)  # [B, H, T, D]

    layer = _build_gptj_layer(module)
    attended_values = replacement.attention_function(layer, queries, keys, values)  # [B, H, T, D]
    joined_heads = attended_values.transpose(1, 2).flatten(2)  # [B, T, F]
    return module.out_proj(joined_heads), None


def _split_heads(module: Any, projected: Tensor) -> Tensor:
    """Return a view of GPT-J's projected features [..., F] by attention head, [..., H, D]."""
    return projected.view(*projected.shape[:-1], module.num_attention_heads, -1)


def _rotate_queries_and_keys(module: Any, hidden_states: Tensor, rotations: Tensor) -> Tensor:
    """Compute GPT-J's queries and keys and apply the rotary embedding to them.

    Args:
        module: The attention layer.
        hidden_states: The input of the layer, [B, T, F].
        rotations: The rotation of each token as complex numbers, [B, T, 1, rotary_dim / 2].

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
    """Multiply each pair of neighboring numbers (a, b), as a + bi, by the rotation cos + i sin of its token.

    Args:
        vectors: The numbers, [2, B, T, H, R], which are changed in place.
        rotations: Complex numbers, [B, T, 1, R / 2].
    """
    pairs = vectors.view(*vectors.shape[:-1], -1, 2)  # [2, B, T, H, R / 2, 2]
    torch.view_as_complex(pairs).mul_(rotations)


def _compute_gpt_neo_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    """Compute attention in place of GPT-Neo's `_attn`, without a scale, and with a window in some of the layers.

    Args:
        module: The attention layer.
        query: The queries, [B, H, T, D].
        key: The keys, in the same shape.
        value: The values, in the same shape.
        mask: Has no effect, because the replacing function itself knows which keys are visible.

    Returns:
        The attended values, [B, H, T, D], and None in place of the attention weights.
    """
    replacement = _current_replacement.get()  # set for this pass of the model
    layer = AttentionLayer(module.layer_id, scale=1.0, locality=_find_gpt_neo_window(module))
    return replacement.attention_function(layer, query, key, value), None


def _find_gpt_neo_window(module: Any) -> Locality | None:
    """Return the sliding window of a GPT-Neo layer, or None for a layer that attends to all tokens."""
    if module.attention_type != "local":
        return None
    window_size = module.config.window_size
    return Locality(sliding_window_causal_mask_function(window_size), window_size)


_REPLACEMENT_METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    GPTJAttention: {"forward": _run_gptj_attention},
    CodeGenAttention: {"_attn": _compute_codegen_attention},
    GPTNeoSelfAttention: {"_attn": _compute_gpt_neo_attention},
}
"""Attention that transformers' interface does not reach: by class, the methods that are replaced."""


AttentionInterface.register(ATTENTION_NAME, _compute_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _find_locality)


def pad_sequences(token_sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Put token sequences into one tensor [B, T] on `device`, and fill up the shorter ones with token 0 on the right.

    Example:
        [[3, 5], [7]] becomes [[3, 5], [7, 0]].
    """
    longest_length = max(map(len, token_sequences))

    rows = []
    for sequence in token_sequences:
        padding = [0] * (longest_length - len(sequence))
        rows.append([*sequence, *padding])
    return create_tensor(rows, device)


def create_tensor(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Put numbers, nested lists or an array into a tensor on `device`.

    The copy to a GPU goes through pinned memory, so that the program does not wait for it.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
