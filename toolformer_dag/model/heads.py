"""Texts behind a shared prompt head, and their continuations, with keys and values that are never copied per row."""

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
        """Allocate `slots` texts of at most `width` tokens behind this head; `CachedTexts.features` runs them."""
        return CachedTexts(self, slots, width)

    def _attend(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.layers[layer.number] = keys[:, :, : self.length].contiguous(), values[:, :, : self.length].contiguous()
        return causal(layer, queries, keys, values)


class CachedTexts:
    """Texts behind a cached head, in slots: a text's keys and values overwrite those of one that is done.

    Whatever stands behind a text is zero: a mask hides keys, but not their NaN or infinity.
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
        """Run texts behind the head and store them in `slots`; return [len(slots), T - first, F]."""
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
            """Store the texts' own keys and values, and attend to them behind the head's."""
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

    `tokens_run`: the number of tokens that the last step ran. Rows are zero behind their own tokens, as texts are.
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
        self._visibility: Visibility | None = None

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Add a branch per slot behind those there are; branch b keeps the first `kept[b]` tokens of its text."""
        self.open = []  # a gathered slot may hold another text by now
        new = slice(len(self.slots), len(self.slots) + len(slots))
        for parts in self.own.values():
            for part in parts:
                part[new] = 0
        self._arrange([*self.slots, *slots], [*self.kept, *kept], [*self.ages, *[0] * len(slots)])

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run texts behind the head, start a branch behind each, and return the features at their ends [B, F]."""
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
        own = torch.arange(self._now, device=self.device)
        self._bias = torch.cat([self.text_bias, _hidden(own > self.age[:, None])], -1)
        self._visibility = None
        positions = self.starts + self.age
        features = self.backbone.features(tokens[:, None], positions[:, None], self._attend)[:, 0]
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
        other = copy(self)
        other.own = {layer: (keys[[row]], values[[row]]) for layer, (keys, values) in self.own.items()}
        other._arrange([self.slots[row]], [self.kept[row]], [self.ages[row]])
        return other

    def _arrange(self, slots: list[int], kept: list[int], ages: list[int]) -> None:
        """Arrange branches in a rectangle [text, column], so that each text's keys are multiplied once."""
        self.slots, self.kept, self.ages = slots, kept, ages
        if not slots:
            return
        self._open(set(slots), max(kept))
        group = {slot: number for number, slot in enumerate(self.open)}
        next_column: dict[int, Iterator[int]] = defaultdict(count)
        columns = [next(next_column[slot]) for slot in slots]
        self.group = on_device([group[slot] for slot in slots], self.device)
        self.column = on_device(columns, self.device)
        self.rectangle = (len(group), max(columns) + 1)
        lengths = on_device(kept, self.device)
        self.starts = lengths + self.texts.head.length
        self.text_bias = _hidden(torch.arange(self.width, device=self.device) >= lengths[:, None])

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
        heads, now = keys.shape[1], self._now
        asked = queries.reshape(len(queries), heads, -1, queries.shape[-1]) * layer.scale
        own_keys, own_values = (part[: len(queries)] for part in self.own[layer.number])
        rows = torch.arange(len(queries), device=queries.device)
        own_keys[rows, :, self.age] = keys[:, :, 0]
        own_values[rows, :, self.age] = values[:, :, 0]
        head_keys, head_values = self.texts.head.layers[layer.number]
        text_keys, text_values = (part[:, :, : self.width] for part in self.text_layers[layer.number])
        parts = [
            _with_all(asked, head_keys.transpose(2, 3)),
            self._with_texts(asked, text_keys.transpose(2, 3)),
            asked @ own_keys[:, :, :now].transpose(2, 3),
        ]
        scores = layer.capped(torch.cat(parts, -1))
        scores[..., head_keys.shape[2] :] += self._bias
        if layer.locality is not None and self._longest() > layer.locality.size:
            scores += self._visible().bias(layer)
        weights = layer.weights(scores).to(values.dtype)
        of_head, of_text, of_own = torch.split(weights, [head_keys.shape[2], self.width, now], -1)
        answer = _with_all(of_head, head_values) + self._with_texts(of_text, text_values)
        answer += of_own @ own_values[:, :, :now]
        return answer.reshape(*queries.shape[:3], -1)  # values may be narrower than keys

    def _longest(self) -> int:
        return self.texts.head.length + max(kept + age for kept, age in zip(self.kept, self.ages, strict=True)) + 1

    def _visible(self) -> Visibility:
        """Return which keys the next token of each branch attends to, by its position alone; made once per step."""
        if self._visibility is not None:
            return self._visibility
        behind = torch.arange(self.texts.head.length + self.width, device=self.device).expand(len(self.kept), -1)
        own = self.starts[:, None] + torch.arange(self._now, device=self.device)
        queries = (self.starts + self.age)[:, None]
        keys = torch.cat([behind, own], 1)  # by position, what lies behind a branch's own tokens is hidden by the bias
        seen = torch.ones_like(keys, dtype=torch.bool)[:, None]
        self._visibility = Visibility(queries, keys, self._longest(), self.backbone.model.dtype, seen)
        return self._visibility

    def _with_texts(self, rows: Tensor, shared: Tensor) -> Tensor:
        """Multiply rows [B, H_kv, R, X] by the [H_kv, X, Y] of each row's text."""
        groups, columns = self.rectangle
        _, heads, repeats, width = rows.shape
        grid = rows.new_zeros(groups, columns, heads, repeats, width)
        grid[self.group, self.column] = rows
        product = grid.transpose(1, 2).reshape(groups, heads, columns * repeats, width) @ shared
        return product.view(groups, heads, columns, repeats, -1)[self.group, :, self.column]


def _with_all(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply rows [B, H_kv, R, X] by a common [1, H_kv, X, Y], as one product per head."""
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ shared[0]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)


def _hidden(hidden: Tensor) -> Tensor:
    """Return booleans [B, S] as a bias [B, 1, 1, S]: minus infinity where true."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]


def _grown(parts: tuple[Tensor, Tensor], rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, H, T, D] with at least so many rows and so long, zero where they are new."""
    more = (0, 0, 0, max(0, length - parts[0].shape[2]), 0, 0, 0, max(0, rows - len(parts[0])))
    return (F.pad(parts[0], more), F.pad(parts[1], more)) if any(more) else parts


def _room(like: Tensor, batch: int, length: int) -> Tensor:
    return like.new_zeros(batch, like.shape[1], length, like.shape[3])  # NaN would stay NaN under any mask
