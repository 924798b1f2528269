"""Count what a pass keeps for its backward pass, by running the model's skeleton on torch's meta device."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from toolformer_dag.model.attention import AttentionLayer, custom_attention
from toolformer_dag.model.loading import INCOMPATIBLE_ERRORS

OUTSIDE = -1
"""Where a pass is between its layers."""


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Bytes that a pass keeps.

    - `layers`: what all layers keep, their inputs included; `largest`: the layer that keeps most.
    - `carried`: the inputs of all layers, which is what stays of them under gradient checkpointing.
    - `outside`: of embeddings, the last norm and the head, without the loss.
    """

    layers: int
    largest: int
    carried: int
    outside: int


def kept_activations(model: Any, batch: int, length: int) -> KeptActivations:
    """Run `model`, which lies on the meta device, with `batch` sequences of `length` tokens; nothing is allocated.

    A fused attention kernel is counted with its inputs, grouped keys repeated, its output and a number per query.
    Raises one of INCOMPATIBLE_ERRORS where a pass depends on the values of its tensors (experts).
    """
    shaped = torch.ones(batch, 1, length, length, dtype=model.dtype, device="meta")
    try:
        return _of_a_pass(model, batch, length, shaped)
    except INCOMPATIBLE_ERRORS:  # a model that makes its own mask (ALiBi, states); others look into such a one
        return _of_a_pass(model, batch, length, shaped[:, 0, 0])


def _of_a_pass(model: Any, batch: int, length: int, mask: Tensor) -> KeptActivations:
    record = _Record(model)
    hooks = []
    for number, layer in enumerate(_layers(model)):
        hooks.append(layer.register_forward_pre_hook(partial(record.enter, number), with_kwargs=True))
        hooks.append(layer.register_forward_hook(record.leave))
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    try:
        with _fused(model), saved_tensors_hooks(record.pack, lambda saved: saved):
            model.train()(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    outside = record.sizes.pop(OUTSIDE, 0)
    return KeptActivations(sum(record.sizes.values()), max(record.sizes.values(), default=0), record.carried, outside)


class _Record:
    """The bytes that a pass saves, by layer or outside, each storage once; weights are there anyway."""

    def __init__(self, model: Any) -> None:
        storages = (part.untyped_storage() for part in [*model.parameters(), *model.buffers()])
        self.held = {id(storage): storage for storage in storages}
        self.sizes: defaultdict[int, int] = defaultdict(int)
        self.carried = 0
        self.place = OUTSIDE

    def pack(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if id(storage) not in self.held:
            self.held[id(storage)] = storage  # held, so that no other gets its id
            self.sizes[self.place] += storage.nbytes()
        return saved

    def enter(self, number: int, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.place = number
        self.carried += next(value.nbytes for value in (*given, *named.values()) if isinstance(value, Tensor))

    def leave(self, *_: Any) -> None:
        self.place = OUTSIDE


def _layers(model: Any) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found: nn.ModuleList = max(lists, key=lambda each: sum(weight.numel() for weight in each.parameters()))
    return found


@contextmanager
def _fused(model: Any) -> Iterator[None]:
    """Count attention as a fused kernel where the model uses one: on the meta device torch writes out its scores."""
    if model.config._attn_implementation != "sdpa":
        yield
        return
    with custom_attention(model, _attend):
        yield


def _attend(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    groups = queries.shape[1] // keys.shape[1]
    repeated = (part.repeat_interleave(groups, 1) for part in (keys, values))
    found: Tensor = _FusedAttention.apply(queries, *repeated)  # type: ignore[no-untyped-call]  # torch has no types there
    return found


class _FusedAttention(torch.autograd.Function):
    """Keeps what a fused kernel keeps."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch, heads, length, _ = queries.shape
        answer = values.new_empty(batch, length, heads, values.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(queries, keys, values, answer, queries.new_empty(batch, heads, length))
        return answer
