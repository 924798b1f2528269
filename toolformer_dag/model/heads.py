"""Texts after a shared prompt head, and their continuations, with keys and values that are never copied per row.

A sequence is in three parts, each cached apart: the head, common to all; a text after it, in a slot; and the tokens of
a branch, which continues a text. Many branches share a text.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from toolformer_dag.model.attention import AttentionLayer, Visibility, attention, causal, on_device, padded
from toolformer_dag.model.backbone import Backbone


class LayerCache(NamedTuple):
    """Cached keys and values of a layer, [B, H_kv, T, D] each; values may have another D than keys."""

    keys: Tensor
    values: Tensor

    def room(self, rows: int, length: int) -> "LayerCache":
        """Return zeros for `rows` sequences of `length` tokens; not just any memory, since NaN stays under a mask."""
        keys = self.keys.new_zeros(rows, self.keys.shape[1], length, self.keys.shape[3])
        values = self.values.new_zeros(rows, self.values.shape[1], length, self.values.shape[3])
        return LayerCache(keys, values)

    def grown(self, rows: int, length: int) -> "LayerCache":
        """Return the cache with at least so many rows and so long, zero where it is new."""
        more_rows = max(0, rows - self.keys.shape[0])
        more_tokens = max(0, length - self.keys.shape[2])
        if not more_rows and not more_tokens:
            return self
        padding = (0, 0, 0, more_tokens, 0, 0, 0, more_rows)  # pairs, from the last dimension to the first
        return LayerCache(F.pad(self.keys, padding), F.pad(self.values, padding))


Layers = dict[int, LayerCache]
"""The caches of a model by the number of the layer."""


class CachedHead:
    """The shared prompt head, run once; its keys and values stay cached. An empty one has layers without tokens.

    - `length`: its tokens.
    - `layers`: with one row each.

    Raises ValueError for a model with other layers than attention.
    """

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        self.backbone = backbone
        self.length = len(ids)
        self.layers: Layers = {}
        any_ids = [0]
        backbone.features(padded([ids or any_ids], backbone.device), attend=self._attend)
        layer_count = backbone.model.config.get_text_config().num_hidden_layers
        if len(self.layers) != layer_count:
            raise ValueError(f"{len(self.layers)} of {layer_count} layers are attention")

    def texts(self, slots: int, width: int) -> "CachedTexts":
        """Allocate `slots` texts of at most `width` tokens after this head; `CachedTexts.features` runs them."""
        return CachedTexts(self, slots, width)

    def _attend(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend causally, and keep the keys and values of the head's tokens."""
        self.layers[layer.number] = LayerCache(
            keys[:, :, : self.length].contiguous(), values[:, :, : self.length].contiguous()
        )
        return causal(layer, queries, keys, values)


class CachedTexts:
    """Texts after a cached head, in slots: a text's keys and values overwrite those of one that is done.

    `layers` have a row per slot. What is after the end of a text is zero: a mask hides keys, but not their NaN or
    infinity.
    """

    def __init__(self, head: CachedHead, slots: int, width: int) -> None:
        self.head = head
        self.slots = slots
        self.layers: Layers = {number: cache.room(slots, width) for number, cache in head.layers.items()}

    def make_room(self, slots: int, width: int) -> None:
        """Allocate slots and width where there are fewer than these; further slots at least double their number."""
        if slots > self.slots:
            self.slots = max(slots, 2 * self.slots)
        for number, cache in self.layers.items():
            self.layers[number] = cache.grown(self.slots, width)

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text."""
        return len(sequence)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run texts after the head and store them in `slots`; return features [len(slots), T - first, F].

        first: the token of the texts at which the features begin; T is the length of the longest text.
        """
        backbone = self.head.backbone
        ids = padded(sequences, backbone.device)  # [B, T]
        width = ids.shape[1]
        key_positions = torch.arange(self.head.length + width, device=ids.device)
        positions = key_positions[self.head.length :]  # [T]
        lengths = [len(sequence) for sequence in sequences]
        padding = None
        if min(lengths) < width:  # else nothing has to be set to zero
            is_padding = torch.arange(width, device=ids.device) >= on_device(lengths, ids.device)[:, None]  # [B, T]
            padding = is_padding[:, None, :, None]
        attend = _TextPass(
            texts=self,
            slots=on_device(slots, ids.device),
            padding=padding,
            visibility=Visibility(
                queries=positions, keys=key_positions, longest=len(key_positions), dtype=backbone.model.dtype
            ),
        )
        return backbone.features(ids, positions.expand_as(ids), attend)[:, first:]

    def branches(self, capacity: int, room: int) -> "CachedBranches":
        """Allocate up to `capacity` branches with `room` tokens each; `CachedBranches.admit` starts them."""
        return CachedBranches(self, capacity, room)


@dataclass(frozen=True, eq=False)
class _TextPass:
    """The attention of a pass that runs texts: it stores their keys and values, and attends to head and text.

    - `slots` [B]: where the text of each row is stored.
    - `padding` [B, 1, T, 1]: what is after the end of each text; None where all have the same length.
    """

    texts: CachedTexts
    slots: Tensor
    padding: Tensor | None
    visibility: Visibility

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to head and text; queries and result are [B, H, T, D], keys and values [B, H_kv, T, D]."""
        if self.padding is not None:
            keys = keys.masked_fill(self.padding, 0)
            values = values.masked_fill(self.padding, 0)
        stored = self.texts.layers[layer.number]
        more = stored.keys.shape[2] - keys.shape[2]  # a slot may be longer than these texts
        stored.keys[self.slots] = F.pad(keys, (0, 0, 0, more))
        stored.values[self.slots] = F.pad(values, (0, 0, 0, more))

        head = self.texts.head.layers[layer.number]
        all_keys = torch.cat([head.keys.expand(len(keys), -1, -1, -1), keys], 2)
        all_values = torch.cat([head.values.expand(len(values), -1, -1, -1), values], 2)
        if not layer.is_plain or self.visibility.limiting(layer):
            return attention(layer, queries, all_keys, all_values, self.visibility.bias(layer))
        mask = causal_lower_right(queries.shape[2], all_keys.shape[2])
        return F.scaled_dot_product_attention(
            queries, all_keys, all_values, attn_mask=mask, scale=layer.scale, enable_gqa=True
        )


class BranchGrid:
    """B branches arranged by text: a row per text, a column per branch, so that a text's keys are multiplied once.

    - `branch_of_cell` [texts, 1, columns]: the branch in each cell. Cells without a branch have branch 0, whose product
      nobody reads.
    - `text`, `column` [B, 1]: the cell of each branch.
    - `is_plain`: whether text t has the single branch t, so that nothing has to be arranged.
    """

    def __init__(self, slots: Sequence[int], open_slots: Sequence[int], device: torch.device) -> None:
        """Arrange branches by their slots. `open_slots`: the slots of the texts whose keys are multiplied."""
        text_of_slot = {slot: text for text, slot in enumerate(open_slots)}
        next_columns = [0] * len(open_slots)
        cells = []
        for slot in slots:
            text = text_of_slot[slot]
            cells.append((text, next_columns[text]))
            next_columns[text] += 1
        self.is_plain = cells == [(text, 0) for text in range(len(open_slots))]
        self.text, self.column = on_device(cells, device).T[..., None]
        branches = torch.arange(len(slots), device=device)
        self.branch_of_cell = branches.new_zeros(len(open_slots), 1, max(next_columns))
        self.branch_of_cell[self.text, 0, self.column] = branches[:, None]

    def multiply(self, rows: Tensor, shared: Tensor, heads: Tensor) -> Tensor:
        """Multiply rows [B, H_kv, R, X] of branches by the matrices [texts, H_kv, X, Y] of their texts.

        Returns [B, H_kv, R, Y]. R: the query heads that share keys. heads: the numbers from 0 to H_kv - 1.
        """
        if self.is_plain:
            return rows @ shared
        grid = rows[self.branch_of_cell, heads[:, None]]  # [texts, H_kv, columns, R, X]
        product = (grid.flatten(2, 3) @ shared).view(*grid.shape[:-1], -1)
        return product[self.text, heads, self.column]


class CachedBranches:
    """Continuations of texts, one token at a time, each of its own age. Their order is that of `admit` and `select`.

    By branch, [B]:

    - `slots`: its text.
    - `kept`: how many tokens of the text it continues.
    - `ages`: how many tokens of its own it has run.

    `layers` have a row per branch, and rows of zeros for those to come. Rows are zero after their tokens, as texts are.

    The texts whose keys are multiplied are open, in the order of `open_slots`, with their first `open_width` tokens in
    `open_layers`. Whenever branches come or go, `_arrange` opens texts and sets `grid`, `branch_numbers`, `starts` and
    `shared_positions`, which all steps until the next change use.

    `tokens_run`: how many tokens the last step ran.
    """

    def __init__(self, texts: CachedTexts, capacity: int, room: int) -> None:
        """Allocate for `capacity` branches of `room` tokens; there are no branches yet."""
        self.texts = texts
        self.backbone = texts.head.backbone
        self.device = self.backbone.device
        self.layers: Layers = {number: cache.room(capacity, room) for number, cache in texts.head.layers.items()}
        self.head_numbers: dict[int, Tensor] = {}  # by layer, [H_kv]
        for number, cache in texts.head.layers.items():
            self.head_numbers[number] = torch.arange(cache.keys.shape[1], device=self.device)
        self.slots: list[int] = []
        self.kept: list[int] = []
        self.ages: list[int] = []
        self.open_slots: list[int] = []
        self.open_width = 0
        self.open_layers: Layers = {}
        self.tokens_run = 0

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Append a branch for each of `slots`; branch b keeps the first `kept[b]` tokens of its text."""
        self.open_slots = []  # a gathered slot may hold another text by now
        new_rows = slice(len(self.slots), len(self.slots) + len(slots))
        for cache in self.layers.values():
            cache.keys[new_rows] = 0
            cache.values[new_rows] = 0
        self._arrange(
            slots=[*self.slots, *slots],
            kept=[*self.kept, *kept],
            ages=[*self.ages, *[0] * len(slots)],
        )

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run texts after the head, start a branch after each, and return the features at their ends [B, F]."""
        lengths = [len(sequence) for sequence in sequences]
        self.texts.make_room(len(self.slots) + len(lengths), max(lengths))
        for number, cache in self.layers.items():
            self.layers[number] = cache.grown(self.texts.slots, 0)
        free_slots = sorted(set(range(self.texts.slots)) - set(self.slots))
        slots = free_slots[: len(lengths)]
        features = self.texts.features(slots, sequences, first=0)
        self.admit(slots, lengths)
        last_tokens = on_device(lengths, features.device) - 1
        return features[range(len(lengths)), last_tokens]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [B] to each branch; return its features [B, F]."""
        length = max(self.ages) + 1
        for number, cache in self.layers.items():
            room = cache.keys.shape[2]
            if room < length:
                self.layers[number] = cache.grown(0, 2 * room)
        branch_step = _BranchStep(self, length)
        features = self.backbone.features(tokens[:, None], branch_step.visibility.queries, branch_step)[:, 0]
        self.ages = [age + 1 for age in self.ages]
        self.tokens_run = len(tokens)
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these branches in this order; a row that is named twice is duplicated.

        Only the keys of rows that change their place are copied.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            targets, sources = on_device(moved, self.device).T
            for cache in self.layers.values():
                cache.keys[targets] = cache.keys[sources]
                cache.values[targets] = cache.values[sources]
        self._arrange(
            slots=[self.slots[row] for row in rows],
            kept=[self.kept[row] for row in rows],
            ages=[self.ages[row] for row in rows],
        )

    def branch(self, row: int) -> "CachedBranches":
        """Return a copy of one branch, which goes on by itself."""
        copied = copy(self)
        copied.layers = {
            number: LayerCache(cache.keys[[row]], cache.values[[row]]) for number, cache in self.layers.items()
        }
        copied._arrange(slots=[self.slots[row]], kept=[self.kept[row]], ages=[self.ages[row]])
        return copied

    def _arrange(self, *, slots: list[int], kept: list[int], ages: list[int]) -> None:
        """Replace the branches, open their texts, and compute what all steps until the next change have in common."""
        self.slots = slots
        self.kept = kept
        self.ages = ages
        if not slots:
            return
        self._open_texts(set(slots), max(kept))
        self.grid = BranchGrid(slots, self.open_slots, self.device)
        self.branch_numbers = torch.arange(len(slots), device=self.device)  # [B]
        self.starts = on_device(kept, self.device)[:, None] + self.texts.head.length  # [B, 1], first positions
        shared_positions = torch.arange(self.texts.head.length + self.open_width, device=self.device)
        self.shared_positions = shared_positions.expand(len(slots), -1)  # [B, head + text]

    def _open_texts(self, slots: set[int], width: int) -> None:
        """Choose whose keys are multiplied: at least those of `slots`, with their first `width` tokens.

        What is open stays open while it has all of these, and more than half of it is needed. Else all slots are
        opened, without a copy; or, where at most half of them are used, copies of the used ones.
        """
        is_open = slots <= set(self.open_slots) and width <= self.open_width
        if is_open and 2 * len(slots) > len(self.open_slots):
            return
        self.open_width = width
        if 2 * len(slots) > self.texts.slots:
            self.open_slots = list(range(self.texts.slots))
            self.open_layers = self.texts.layers
            return
        self.open_slots = sorted(slots)
        chosen = on_device(self.open_slots, self.device)
        self.open_layers = {}
        for number, cache in self.texts.layers.items():
            self.open_layers[number] = LayerCache(cache.keys[chosen, :, :width], cache.values[chosen, :, :width])


class _BranchStep:
    """The attention of a step: the next token of each branch attends to head, text and branch in one softmax.

    - `length`: the tokens of the oldest branch, with the new one.
    - `ages` [B]: the column of each branch's new token.
    """

    def __init__(self, branches: CachedBranches, length: int) -> None:
        self.branches = branches
        self.length = length
        self.ages = on_device(branches.ages, branches.device)
        self.visibility = self._visible()

    def _visible(self) -> Visibility:
        """Return which keys the new token of each branch attends to: those of head, kept text and branch.

        Their columns stand in this order: head, text up to `open_width`, branch up to `length`.
        """
        branches = self.branches
        branch_positions = branches.starts + torch.arange(self.length, device=branches.device)  # [B, length]
        queries = branches.starts + self.ages[:, None]  # [B, 1]
        sees_shared = branches.shared_positions < branches.starts
        sees_branch = branch_positions <= queries
        longest_continued = max(kept + age for kept, age in zip(branches.kept, branches.ages, strict=True))
        return Visibility(
            queries=queries,
            keys=torch.cat([branches.shared_positions, branch_positions], 1),
            longest=branches.texts.head.length + longest_continued + 1,
            dtype=branches.backbone.model.dtype,
            seen=torch.cat([sees_shared, sees_branch], 1)[:, None],
        )

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to head, text and branch, the new token with them; queries and result are [B, H, 1, D].

        The weights of all three parts come from one softmax over their scores.
        """
        branches = self.branches
        heads = branches.head_numbers[layer.number]
        head = branches.texts.head.layers[layer.number]
        text = branches.open_layers[layer.number]
        text_keys = text.keys[:, :, : branches.open_width]
        text_values = text.values[:, :, : branches.open_width]
        branch = self._with_new_token(layer, keys, values)

        # [B, H_kv, R, D], R: the query heads that share keys.
        grouped = queries.reshape(*keys.shape[:2], -1, queries.shape[-1]) * layer.scale
        scores = [
            _with_all(grouped, head.keys.mT),
            branches.grid.multiply(grouped, text_keys.mT, heads),
            grouped @ branch.keys.mT,
        ]
        weights = layer.weights(torch.cat(scores, -1), self.visibility.bias(layer))  # [B, H_kv, R, all keys]
        sizes = [head.keys.shape[2], branches.open_width, self.length]
        head_weights, text_weights, branch_weights = torch.split(weights, sizes, -1)
        answer = branches.grid.multiply(text_weights, text_values, heads) + _with_all(head_weights, head.values)
        answer += branch_weights @ branch.values
        return answer.flatten(1, 2)[:, :, None]  # values may be narrower than keys

    def _with_new_token(self, layer: AttentionLayer, keys: Tensor, values: Tensor) -> LayerCache:
        """Store the keys and values of the new token, [B, H_kv, 1, D]; return those of each branch's tokens so far."""
        stored = self.branches.layers[layer.number]
        branch = LayerCache(
            stored.keys[: len(keys), :, : self.length],
            stored.values[: len(values), :, : self.length],
        )  # views: what is stored below is stored in the cache
        branch.keys[self.branches.branch_numbers, :, self.ages] = keys[:, :, 0]
        branch.values[self.branches.branch_numbers, :, self.ages] = values[:, :, 0]
        return branch


def _with_all(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply rows [B, H_kv, R, X] by a matrix [1, H_kv, X, Y] common to all; return [B, H_kv, R, Y].

    As one product per head, with all B * R rows.
    """
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ shared[0]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)
