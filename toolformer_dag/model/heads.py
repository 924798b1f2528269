"""Texts behind a shared prompt head, and their continuations, with keys and values that are never copied per row."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from toolformer_dag.model.attention import AttentionLayer, Visibility, attention, causal, on_device, padded
from toolformer_dag.model.backbone import Backbone

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [B, H_kv, T, D] by layer."""


class CachedHead:
    """The shared prompt head, run once; its keys and values stay cached."""

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        self.backbone = backbone
        self.length = len(ids)
        self.layers: Layers = {}
        self._run(ids)

    def texts(self, sequences: Sequence[Sequence[int]]) -> "CachedTexts":
        """Allocate texts behind this head; `CachedTexts.features` computes their keys."""
        return CachedTexts(self, sequences)

    def _run(self, ids: Sequence[int]) -> None:
        self.backbone.features(padded([ids], self.backbone.device), attend=self._attend)

    def _attend(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.layers[layer.number] = keys.contiguous(), values.contiguous()
        return causal(layer, queries, keys, values)


class CachedTexts:
    """Texts behind a cached head, with memory for the keys and values of all of them.

    `lengths`: the number of tokens that `features` runs, by text.
    """

    def __init__(self, head: CachedHead, sequences: Sequence[Sequence[int]]) -> None:
        self.head = head
        self.backbone = head.backbone
        self.sequences = sequences
        self.lengths = [len(sequence) for sequence in sequences]
        shape = (len(sequences), max(self.lengths))
        self.layers: Layers = {
            layer: (_room(keys, *shape).zero_(), _room(values, *shape).zero_())
            for layer, (keys, values) in head.layers.items()
        }

    def features(self, chosen: Sequence[int], first: int) -> Tensor:
        """Run the chosen texts (consecutive numbers) behind the head; return [len(chosen), T - first, F]."""
        ids = padded([self.sequences[text] for text in chosen], self.backbone.device)
        places = torch.arange(self.head.length + ids.shape[1], device=ids.device)
        positions = places[self.head.length :]
        rows = slice(chosen[0], chosen[-1] + 1)
        visibility = Visibility(positions, places, len(places), self.backbone.model.dtype)

        def attend(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._store(layer.number, rows, keys, values)
            return _behind(self.head.layers[layer.number], layer, queries, keys, values, visibility)

        return self.backbone.features(ids, positions.expand_as(ids), attend)[:, first:]

    def branches(self, texts: Sequence[int], kept: Sequence[int], room: int, capacity: int) -> "CachedBranches":
        """Start one branch per text number; branch b keeps the first `kept[b]` tokens of its text.

        Each branch has memory for `room` tokens of its own. There may be up to `capacity` branches after `select`.
        """
        return CachedBranches(self, texts, kept, room, capacity)

    def _store(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        for room, new in zip(self.layers[layer], (keys, values), strict=True):
            room[rows, :, : new.shape[2]] = new


class CachedBranches:
    """Continuations of texts, one token at a time; all branches have the same number of own tokens.

    `tokens_run`: the number of tokens that the last step ran.
    """

    def __init__(
        self, texts: CachedTexts, of_text: Sequence[int], kept: Sequence[int], room: int, capacity: int
    ) -> None:
        self.texts = texts
        self.backbone = texts.backbone
        self.device = texts.backbone.device
        self.age = 0
        self._visibility: Visibility | None = None
        self.own: Layers = {
            layer: (_room(keys, capacity, room), _room(values, capacity, room))
            for layer, (keys, values) in texts.head.layers.items()
        }
        self.open_texts: list[int] = []
        self._arrange(list(of_text), list(kept))

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [B] to each branch; return its features [B, F]."""
        positions = self.positions + self.age
        self._visibility = None
        features = self.backbone.features(tokens[:, None], positions[:, None], self._attend)[:, 0]
        self.age += 1
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
                    part[to, :, : self.age] = part[origin, :, : self.age]
        self._arrange([self.of_text[row] for row in rows], [self.kept[row] for row in rows])

    def _arrange(self, of_text: list[int], kept: list[int]) -> None:
        """Arrange branches in a rectangle [text, slot], so that each text's keys are multiplied once."""
        self.of_text, self.kept = of_text, kept
        self._open(of_text, max(kept))
        group = {text: number for number, text in enumerate(self.open_texts)}
        slots = _occurrence_numbers(of_text)
        self.group = on_device([group[text] for text in of_text], self.device)
        self.slot = on_device(slots, self.device)
        self.rectangle = (len(group), max(slots) + 1)
        lengths = on_device(kept, self.device)
        self.positions = lengths + self.texts.head.length
        unseen = torch.arange(self.width, device=self.device) >= lengths[:, None]
        self.bias = torch.zeros(unseen.shape, device=self.device).masked_fill_(unseen, -torch.inf)[:, None, None]

    def _open(self, of_text: list[int], width: int) -> None:
        """Gather the keys of texts with branches; repeat only when a quarter of the gathered texts has none."""
        wanted = sorted(set(of_text))
        if self.open_texts and len(wanted) > 0.75 * len(self.open_texts):
            return
        self.open_texts, self.width = wanted, width
        chosen = on_device(wanted, self.device)
        whole = len(wanted) == len(self.texts.sequences)
        self.text_layers = {
            layer: tuple((part if whole else part[chosen])[:, :, :width] for part in parts)
            for layer, parts in self.texts.layers.items()
        }

    def _attend(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to head, text and own tokens in one softmax; inputs and output are [B, H, 1, D]."""
        heads = keys.shape[1]
        asked = queries.reshape(len(queries), heads, -1, queries.shape[-1]) * layer.scale
        own_keys, own_values = (part[: len(queries)] for part in self.own[layer.number])
        own_keys[:, :, self.age] = keys[:, :, 0]
        own_values[:, :, self.age] = values[:, :, 0]
        head_keys, head_values = self.texts.head.layers[layer.number]
        text_keys, text_values = self.text_layers[layer.number]
        now = self.age + 1
        parts = [
            _with_all(asked, head_keys.transpose(2, 3)),
            self._with_texts(asked, text_keys.transpose(2, 3)),
            asked @ own_keys[:, :, :now].transpose(2, 3),
        ]
        scores = layer.capped(torch.cat(parts, -1))
        scores[..., head_keys.shape[2] : -now] += self.bias
        if layer.locality is not None and self.texts.head.length + max(self.kept) + now > layer.locality.size:
            scores += self._visible().bias(layer)
        weights = layer.weights(scores).to(values.dtype)
        of_head, of_text, of_own = torch.split(weights, [head_keys.shape[2], text_keys.shape[2], now], -1)
        answer = _with_all(of_head, head_values) + self._with_texts(of_text, text_values)
        answer += of_own @ own_values[:, :, :now]
        return answer.reshape(*queries.shape[:3], -1)  # values may be narrower than keys

    def _visible(self) -> Visibility:
        """Return which keys the next token of each branch attends to, by its position alone; made once per step."""
        if self._visibility is not None:
            return self._visibility
        head = self.texts.head.length
        behind = torch.arange(head + self.width, device=self.device).expand(len(self.kept), -1)
        own = self.positions[:, None] + torch.arange(self.age + 1, device=self.device)
        queries = self.positions[:, None] + self.age
        longest = head + max(self.kept) + self.age + 1
        keys = torch.cat([behind, own], 1)  # by position, the text behind a branch's own tokens is hidden by `bias`
        seen = torch.ones_like(keys, dtype=torch.bool)[:, None]
        dtype = self.backbone.model.dtype
        self._visibility = Visibility(queries, keys, longest, dtype, seen)
        return self._visibility

    def _with_texts(self, rows: Tensor, shared: Tensor) -> Tensor:
        """Multiply rows [B, H_kv, R, X] by the [H_kv, X, Y] of each row's text."""
        groups, slots = self.rectangle
        _, heads, repeats, width = rows.shape
        grid = rows.new_zeros(groups, slots, heads, repeats, width)
        grid[self.group, self.slot] = rows
        product = grid.transpose(1, 2).reshape(groups, heads, slots * repeats, width) @ shared
        return product.view(groups, heads, slots, repeats, -1)[self.group, :, self.slot]


def _behind(
    head: tuple[Tensor, Tensor],
    layer: AttentionLayer,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
) -> Tensor:
    shape = (len(queries), -1, -1, -1)
    keys = torch.cat([head[0].expand(shape), keys], 2)
    values = torch.cat([head[1].expand(shape), values], 2)
    if layer.softcap is None and layer.sinks is None and visibility.limiting(layer) is None:
        mask = causal_lower_right(queries.shape[2], keys.shape[2])
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale, enable_gqa=True)
    return attention(layer, queries, keys, values, visibility.bias(layer))


def _with_all(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply rows [B, H_kv, R, X] by a common [1, H_kv, X, Y], as one product per head."""
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ shared[0]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)


def _room(like: Tensor, batch: int, length: int) -> Tensor:
    return like.new_empty(batch, like.shape[1], length, like.shape[3])


def _occurrence_numbers(values: Sequence[int]) -> list[int]:
    """Return, for each value, how many equal values come before it."""
    seen: Counter[int] = Counter()
    numbers = []
    for value in values:
        numbers.append(seen[value])
        seen[value] += 1
    return numbers
