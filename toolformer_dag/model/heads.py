"""Texts after a shared prompt head, and their continuations, with keys and values that are never copied per row."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from toolformer_dag.model.attention import AttentionLayer, Visibility, attention, causal, on_device, padded
from toolformer_dag.model.backbone import Backbone

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [B, H_kv, T, D] by layer."""


class CachedHead:
    """The shared prompt head, run once; its keys and values stay cached. An empty one has layers without tokens.

    Raises ValueError for a model with other layers than attention.
    """

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        self.backbone = backbone
        self.length = len(ids)
        self.layers: Layers = {}
        backbone.features(padded([ids or [0]], backbone.device), attend=self._attend)
        layers = backbone.model.config.get_text_config().num_hidden_layers
        if len(self.layers) != layers:
            raise ValueError(f"{len(self.layers)} of {layers} layers are attention")

    def texts(self, slots: int, width: int) -> "CachedTexts":
        """Allocate `slots` texts of at most `width` tokens after this head; `CachedTexts.features` runs them."""
        return CachedTexts(self, slots, width)

    def _attend(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.layers[layer.number] = keys[:, :, : self.length].contiguous(), values[:, :, : self.length].contiguous()
        return causal(layer, queries, keys, values)


class CachedTexts:
    """Texts after a cached head, in slots: a text's keys and values overwrite those of one that is done.

    Whatever stands after a text is zero: a mask hides keys, but not their NaN or infinity.
    """

    def __init__(self, head: CachedHead, slots: int, width: int) -> None:
        self.head = head
        self.slots = slots
        self.layers: Layers = {
            layer: (_room(keys, slots, width), _room(values, slots, width))
            for layer, (keys, values) in head.layers.items()
        }

    def make_room(self, slots: int, width: int) -> None:
        """Allocate further slots, at least twice those there are, and wider ones, where these are too few."""
        slots = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        for layer, parts in self.layers.items():
            self.layers[layer] = _grown(parts, slots, width)
        self.slots = slots

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text."""
        return len(sequence)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run texts after the head and store them in `slots`; return [len(slots), T - first, F]."""
        backbone, ids = self.head.backbone, padded(sequences, self.head.backbone.device)
        places = torch.arange(self.head.length + ids.shape[1], device=ids.device)
        positions = places[self.head.length :]
        rows = on_device(slots, ids.device)
        lengths = [len(sequence) for sequence in sequences]
        padding = None
        if min(lengths) < ids.shape[1]:
            hidden = torch.arange(ids.shape[1], device=ids.device) >= on_device(lengths, ids.device)[:, None]
            padding = hidden[:, None, :, None]
        visibility = Visibility(positions, places, len(places), backbone.model.dtype)

        def attend(layer: AttentionLayer, queries: Tensor, *own: Tensor) -> Tensor:
            """Store the texts' own keys and values, and attend to them after the head's."""
            parts = own if padding is None else [part.masked_fill(padding, 0) for part in own]
            for room, new in zip(self.layers[layer.number], parts, strict=True):
                room[rows] = F.pad(new, (0, 0, 0, room.shape[2] - new.shape[2]))
            head = [part.expand(len(ids), -1, -1, -1) for part in self.head.layers[layer.number]]
            keys, values = (torch.cat(both, 2) for both in zip(head, parts, strict=True))
            if not layer.is_plain or visibility.limiting(layer):
                return attention(layer, queries, keys, values, visibility.bias(layer))
            mask = causal_lower_right(queries.shape[2], keys.shape[2])
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=layer.scale, enable_gqa=True
            )

        return backbone.features(ids, positions.expand_as(ids), attend)[:, first:]

    def branches(self, capacity: int, room: int) -> "CachedBranches":
        """Allocate up to `capacity` branches with `room` tokens of their own; `CachedBranches.admit` starts them."""
        return CachedBranches(self, capacity, room)


class CachedBranches:
    """Continuations of texts, one token at a time, each of its own age.

    `tokens_run`: the number of tokens that the last step ran. Rows are zero after their own tokens, as texts are.
    """

    def __init__(self, texts: CachedTexts, capacity: int, room: int) -> None:
        self.texts = texts
        self.backbone = texts.head.backbone
        self.device = self.backbone.device
        self.own: Layers = {
            layer: (_room(keys, capacity, room), _room(values, capacity, room))
            for layer, (keys, values) in texts.head.layers.items()
        }
        self.slots: list[int] = []
        self.kept: list[int] = []
        self.ages: list[int] = []
        self.open: list[int] = []
        self.width = 0
        self.heads = {
            layer: torch.arange(keys.shape[1], device=self.device)[:, None]
            for layer, (keys, _) in texts.head.layers.items()
        }

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Add a branch per slot after those there are; branch b keeps the first `kept[b]` tokens of its text."""
        self.open = []  # a gathered slot may hold another text by now
        new = slice(len(self.slots), len(self.slots) + len(slots))
        for parts in self.own.values():
            for part in parts:
                part[new] = 0
        self._arrange([*self.slots, *slots], [*self.kept, *kept], [*self.ages, *[0] * len(slots)])

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run texts after the head, start a branch after each, and return the features at their ends [B, F]."""
        lengths = list(map(len, sequences))
        self.texts.make_room(len(self.slots) + len(lengths), max(lengths))
        for layer, parts in self.own.items():
            self.own[layer] = _grown(parts, self.texts.slots, 0)
        free = sorted(set(range(self.texts.slots)) - set(self.slots))[: len(lengths)]
        features = self.texts.features(free, sequences, 0)
        self.admit(free, lengths)
        return features[range(len(lengths)), on_device(lengths, features.device) - 1]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [B] to each branch; return its features [B, F]."""
        self._now = max(self.ages) + 1
        self.age = on_device(self.ages, self.device)
        for layer, parts in self.own.items():
            if parts[0].shape[2] < self._now:  # the room for own tokens is full: double it
                self.own[layer] = _grown(parts, 0, 2 * parts[0].shape[2])
        self._visibility = self._visible()
        features = self.backbone.features(tokens[:, None], self._visibility.queries, self._attend)[:, 0]
        self.ages = [age + 1 for age in self.ages]
        self.tokens_run = len(tokens)
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these branches in this order; a row that is named twice is duplicated.

        Only the keys of rows that change their place are copied.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            to, origin = on_device(moved, self.device).T
            for parts in self.own.values():
                for part in parts:
                    part[to] = part[origin]
        self._arrange(*([values[row] for row in rows] for values in (self.slots, self.kept, self.ages)))

    def branch(self, row: int) -> "CachedBranches":
        """Return a copy of one branch."""
        copied = copy(self)
        copied.own = {layer: (keys[[row]], values[[row]]) for layer, (keys, values) in self.own.items()}
        copied._arrange([self.slots[row]], [self.kept[row]], [self.ages[row]])
        return copied

    def _arrange(self, slots: list[int], kept: list[int], ages: list[int]) -> None:
        """Arrange branches in a rectangle [text, column], so that each text's keys are multiplied once."""
        self.slots, self.kept, self.ages = slots, kept, ages
        if not slots:
            return
        self._open(set(slots), max(kept))
        group = {slot: number for number, slot in enumerate(self.open)}
        next_column: dict[int, Iterator[int]] = defaultdict(count)
        places = [(group[slot], next(next_column[slot])) for slot in slots]
        self.in_order = places == [(row, 0) for row in range(len(group))]
        self.group, self.column = on_device(places, self.device).T[..., None]
        self.order = torch.arange(len(slots), device=self.device)
        self.rows = self.order.new_zeros(len(group), 1, 1 + max(column for _, column in places))
        self.rows[self.group, 0, self.column] = self.order[:, None]
        lengths = on_device(kept, self.device)
        self.starts = lengths[:, None] + self.texts.head.length
        shared = torch.arange(self.texts.head.length + self.width, device=self.device)
        self.shared_positions = shared.expand(len(slots), -1)

    def _open(self, slots: set[int], width: int) -> None:
        """Choose whose keys are multiplied: of all slots in place, or, where less than half are used, gathered."""
        if slots <= set(self.open) and 2 * len(slots) > len(self.open) and width <= self.width:
            return
        self.width = width
        if 2 * len(slots) > self.texts.slots:
            self.open = list(range(self.texts.slots))
            self.text_layers = self.texts.layers
            return
        self.open = sorted(slots)
        chosen = on_device(self.open, self.device)
        self.text_layers = {
            layer: (keys[chosen, :, :width], values[chosen, :, :width])
            for layer, (keys, values) in self.texts.layers.items()
        }

    def _attend(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to head, text and own tokens in one softmax; inputs and output are [B, H, 1, D]."""
        asked = queries.reshape(*keys.shape[:2], -1, queries.shape[-1]) * layer.scale
        own_keys, own_values = (part[: len(queries), :, : self._now] for part in self.own[layer.number])
        own_keys[self.order, :, self.age] = keys[:, :, 0]
        own_values[self.order, :, self.age] = values[:, :, 0]
        head_keys, head_values = self.texts.head.layers[layer.number]
        text_keys, text_values = (part[:, :, : self.width] for part in self.text_layers[layer.number])
        heads, sizes = self.heads[layer.number], [head_keys.shape[2], self.width, self._now]
        parts = [_with_all(asked, head_keys.mT), self._with_texts(heads, asked, text_keys.mT), asked @ own_keys.mT]
        weights = layer.weights(torch.cat(parts, -1), self._visibility.bias(layer))
        of_head, of_text, of_own = torch.split(weights, sizes, -1)
        answer = self._with_texts(heads, of_text, text_values) + _with_all(of_head, head_values)
        answer += of_own @ own_values
        return answer.flatten(1, 2)[:, :, None]  # values may be narrower than keys

    def _visible(self) -> Visibility:
        """Return which keys the next token of each branch attends to."""
        head = self.texts.head.length
        own = self.starts + torch.arange(self._now, device=self.device)
        queries = self.starts + self.age[:, None]
        seen = torch.cat([self.shared_positions < self.starts, own <= queries], 1)[:, None]
        longest = head + max(kept + age for kept, age in zip(self.kept, self.ages, strict=True)) + 1
        return Visibility(queries, torch.cat([self.shared_positions, own], 1), longest, self.backbone.model.dtype, seen)

    def _with_texts(self, heads: Tensor, rows: Tensor, shared: Tensor) -> Tensor:
        """Multiply rows [B, H_kv, R, X] by the [H_kv, X, Y] of each row's text, laid out by text."""
        if self.in_order:
            return rows @ shared
        grid = rows[self.rows, heads]
        product = (grid.flatten(2, 3) @ shared).view(*grid.shape[:-1], -1)
        return product[self.group, heads[:, 0], self.column]


def _with_all(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply rows [B, H_kv, R, X] by a common [1, H_kv, X, Y], as one product per head."""
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ shared[0]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)


def _grown(parts: tuple[Tensor, Tensor], rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, H, T, D] with at least so many rows and so long, zero where they are new."""
    more = (0, 0, 0, max(0, length - parts[0].shape[2]), 0, 0, 0, max(0, rows - len(parts[0])))
    return (F.pad(parts[0], more), F.pad(parts[1], more)) if any(more) else parts


def _room(like: Tensor, batch: int, length: int) -> Tensor:
    return like.new_zeros(batch, like.shape[1], length, like.shape[3])  # NaN would stay NaN under any mask
