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
        """Run the head's tokens, and keep the keys and values of every layer."""
        self.backbone = backbone
        self.length = len(ids)
        self.layers: Layers = {}  # filled by `_attend`, which each layer calls
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
        """Run texts after the head, and cache their keys and values; return their features, [B, T - first, F].

        - slots: the row of the cache for each text, [B]. What was in it is overwritten.
        - sequences: the tokens of each text; T is the length of the longest.
        - first: the index of the token at which the returned features begin.
        """
        backbone = self.head.backbone
        ids = padded(sequences, backbone.device)  # [B, T]
        width = ids.shape[1]
        key_positions = torch.arange(self.head.length + width, device=ids.device)  # [head + T]
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
        """Compute the attention of B texts in a layer: each token sees the shared head and the text up to itself.

        queries [B, H, T, D]; keys, values [B, H_kv, T, D], which are also stored in the texts' slots of the cache.
        Returns [B, H, T, D].
        """
        if self.padding is not None:
            keys = keys.masked_fill(self.padding, 0)
            values = values.masked_fill(self.padding, 0)
        cache = self.texts.layers[layer.number]
        unused_length = cache.keys.shape[2] - keys.shape[2]  # a slot may be longer than these texts
        cache.keys[self.slots] = F.pad(keys, (0, 0, 0, unused_length))
        cache.values[self.slots] = F.pad(values, (0, 0, 0, unused_length))

        head = self.texts.head.layers[layer.number]  # [1, H_kv, head, D] each
        all_keys = torch.cat([head.keys.expand(len(keys), -1, -1, -1), keys], 2)  # [B, H_kv, head + T, D]
        all_values = torch.cat([head.values.expand(len(values), -1, -1, -1), values], 2)
        if not layer.is_plain or self.visibility.limiting(layer):  # a soft cap, sinks or a window
            return attention(layer, queries, all_keys, all_values, self.visibility.bias(layer))
        mask = causal_lower_right(queries.shape[2], all_keys.shape[2])  # the last token sees all keys
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
        """Give each branch the next free cell in the row of its text.

        - slots: for each branch, the slot of its text in the cache.
        - open_slots: the slots of the texts that have a row, in the order of the rows.

        With slots [5, 7, 5] and open slots [5, 7], branches 0 and 2 are in row 0, and branch 1 is in row 1.
        """
        row_of_slot = {slot: row for row, slot in enumerate(open_slots)}
        branches_in_row = [0] * len(open_slots)
        cells = []  # pairs of row and column, by branch
        for slot in slots:
            row = row_of_slot[slot]
            cells.append((row, branches_in_row[row]))
            branches_in_row[row] += 1
        self.is_plain = cells == [(row, 0) for row in range(len(open_slots))]
        self.text, self.column = on_device(cells, device).T[..., None]
        branches = torch.arange(len(slots), device=device)
        self.branch_of_cell = branches.new_zeros(len(open_slots), 1, max(branches_in_row))
        self.branch_of_cell[self.text, 0, self.column] = branches[:, None]

    def multiply(self, rows: Tensor, shared: Tensor, heads: Tensor) -> Tensor:
        """Multiply each branch's matrix by that of its text: `rows[b] @ shared[text of b]` for every branch b.

        - rows: [B, H_kv, R, X]; R are the query heads that share a head of keys.
        - shared: [texts, H_kv, X, Y].
        - heads: the numbers from 0 to H_kv - 1.

        Returns [B, H_kv, R, Y]. All branches of a text are multiplied at once, so its matrix is not copied for each.
        """
        if self.is_plain:
            return rows @ shared
        by_text = rows[self.branch_of_cell, heads[:, None]]  # [texts, H_kv, columns, R, X]
        product = (by_text.flatten(2, 3) @ shared).view(*by_text.shape[:-1], -1)  # [texts, H_kv, columns, R, Y]
        return product[self.text, heads, self.column]


@dataclass(frozen=True, slots=True, eq=False)
class OpenTexts:
    """The texts whose keys and values the steps of branches read.

    - `slots`: their slots, in the order of the rows of `layers`.
    - `width`: how many tokens of each are read.
    - `layers`: their keys and values: the cache of all texts itself, or copies of some of its rows.
    """

    slots: Sequence[int]
    width: int
    layers: Layers


NO_TEXTS = OpenTexts(slots=(), width=0, layers={})


@dataclass(frozen=True, slots=True, eq=False)
class BranchLayout:
    """What all steps have in common until branches come or go.

    - `grid`: the branches arranged by text.
    - `numbers` [B]: the numbers from 0 to B - 1.
    - `starts` [B, 1]: the position of each branch's first token: behind the head and the kept part of its text.
    - `shared_positions` [B, head + text]: the positions of the head's and the texts' tokens, the same for all branches.
    """

    grid: BranchGrid
    numbers: Tensor
    starts: Tensor
    shared_positions: Tensor


class CachedBranches:
    """Continuations of texts, one token at a time, each of its own age. Their order is that of `admit` and `select`.

    By branch, [B]:

    - `slots`: its text.
    - `kept`: how many tokens of the text it continues.
    - `ages`: how many tokens of its own it has run.

    `layers` have a row per branch, and rows of zeros for those to come. Rows are zero after their tokens, as texts are.
    `open_texts` and `layout` are replaced whenever branches come or go; there is no layout while there is no branch.

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
        self.open_texts = NO_TEXTS
        self.layout: BranchLayout | None = None
        self.tokens_run = 0

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Start a branch in the text of each of `slots`; it continues the first `kept[b]` tokens of the text.

        The new branches come after those that are there, and have no tokens of their own yet.
        """
        self.open_texts = NO_TEXTS  # a copied slot may hold another text by now
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
        """Run texts after the head, start a branch at the end of each, and return the features of their last tokens.

        These are [texts, F]. The caches grow where they have no room for the texts.
        """
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
        """Append a token to each branch, [B], and run it; return the features of these tokens, [B, F].

        A branch may be longer than the cache has room for: the room is then doubled.
        """
        length = max(self.ages) + 1  # of the longest branch, with its new token
        for number, cache in self.layers.items():
            room = cache.keys.shape[2]
            if room < length:
                self.layers[number] = cache.grown(0, 2 * room)
        assert self.layout is not None
        branch_step = _BranchStep(self, self.layout, length)
        features = self.backbone.features(tokens[:, None], branch_step.visibility.queries, branch_step)[:, 0]
        self.ages = [age + 1 for age in self.ages]
        self.tokens_run = len(tokens)
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Continue with some branches, in this order: new branch b is old branch `rows[b]`. One may be there twice.

        Only the keys of branches that get another number are copied.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            targets, sources = on_device(moved, self.device).T  # new and old rows of the caches
            for cache in self.layers.values():
                cache.keys[targets] = cache.keys[sources]
                cache.values[targets] = cache.values[sources]
        self._arrange(
            slots=[self.slots[row] for row in rows],
            kept=[self.kept[row] for row in rows],
            ages=[self.ages[row] for row in rows],
        )

    def branch(self, row: int) -> "CachedBranches":
        """Return a copy of one branch, which is continued apart; this object and its caches stay as they are."""
        copied = copy(self)
        copied.layers = {
            number: LayerCache(cache.keys[[row]], cache.values[[row]]) for number, cache in self.layers.items()
        }
        copied._arrange(slots=[self.slots[row]], kept=[self.kept[row]], ages=[self.ages[row]])
        return copied

    def _arrange(self, *, slots: list[int], kept: list[int], ages: list[int]) -> None:
        """Replace the branches by others, and compute the tensors that all their steps use (`self.layout`).

        By branch:

        - slots: where its text is cached. kept: how many tokens of the text it continues.
        - ages: how many tokens of its own it has run.
        """
        self.slots = slots
        self.kept = kept
        self.ages = ages
        if not slots:
            return
        self.open_texts = self._texts_to_open(set(slots), max(kept))
        head_length = self.texts.head.length  # tokens of the prompt, before all texts
        shared_positions = torch.arange(head_length + self.open_texts.width, device=self.device)
        self.layout = BranchLayout(
            grid=BranchGrid(slots, self.open_texts.slots, self.device),
            numbers=torch.arange(len(slots), device=self.device),
            starts=on_device(kept, self.device)[:, None] + head_length,
            shared_positions=shared_positions.expand(len(slots), -1),
        )

    def _texts_to_open(self, slots: set[int], width: int) -> OpenTexts:
        """Choose the cached texts whose keys the next steps multiply, at least those that the branches continue.

        Steps multiply the keys of all open texts, needed or not, because choosing rows of the cache copies them.

        1. The texts that are open now, if these suffice and more than half of them are needed.
        2. Else all texts of the cache, without a copy, if more than half of them are needed.
        3. Else copies of the needed ones.

        slots: the rows of the needed texts in the cache. width: how many tokens of them are needed.
        """
        suffices = slots <= set(self.open_texts.slots) and width <= self.open_texts.width
        if suffices and 2 * len(slots) > len(self.open_texts.slots):
            return self.open_texts
        if 2 * len(slots) > self.texts.slots:
            return OpenTexts(range(self.texts.slots), width, self.texts.layers)
        sorted_slots = sorted(slots)
        rows = on_device(sorted_slots, self.device)
        copies: Layers = {}  # keys and values by layer
        for number, cache in self.texts.layers.items():
            copies[number] = LayerCache(cache.keys[rows, :, :width], cache.values[rows, :, :width])
        return OpenTexts(sorted_slots, width, copies)


class _BranchStep:
    """The attention of a step: the next token of each branch attends to head, text and branch in one softmax.

    - `length`: the tokens of the oldest branch, with the new one.
    - `ages` [B]: the column of each branch's new token.
    """

    def __init__(self, branches: CachedBranches, layout: BranchLayout, length: int) -> None:
        self.branches = branches
        self.layout = layout
        self.length = length
        self.ages = on_device(branches.ages, branches.device)
        self.visibility = self._visible()

    def _visible(self) -> Visibility:
        """Return which keys the new token of each branch sees: the head, the kept part of its text, its own tokens.

        The keys of a branch are its columns: those of the head, of the text and of the branch, in this order. Hidden
        are columns of the text that the branch does not keep, and those of longer branches.
        """
        branches = self.branches
        starts = self.layout.starts  # [B, 1]
        shared_positions = self.layout.shared_positions  # [B, head + text]
        branch_positions = starts + torch.arange(self.length, device=branches.device)  # [B, length]
        query_positions = starts + self.ages[:, None]  # [B, 1]
        sees_shared = shared_positions < starts  # a branch starts where the kept part of its text ends
        sees_branch = branch_positions <= query_positions
        longest_continued = max(kept + age for kept, age in zip(branches.kept, branches.ages, strict=True))
        return Visibility(
            queries=query_positions,
            keys=torch.cat([shared_positions, branch_positions], 1),
            longest=branches.texts.head.length + longest_continued + 1,
            dtype=branches.backbone.model.dtype,
            seen=torch.cat([sees_shared, sees_branch], 1)[:, None],
        )

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute the attention of the next token of each of B branches in a layer.

        queries [B, H, 1, D]; keys, values [B, H_kv, 1, D], which are cached first. Returns [B, H, 1, D].

        A token sees three parts: the prompt's head, cached once; the text that its branch continues, cached once for
        all branches of the text; and its branch. Each part's scores are computed apart; one softmax goes over all.
        """
        branches = self.branches
        grid = self.layout.grid
        key_heads = branches.head_numbers[layer.number]

        # 1. The keys and values of the three parts.
        head = branches.texts.head.layers[layer.number]  # [1, H_kv, head, D] each
        text = branches.open_texts.layers[layer.number]
        text_width = branches.open_texts.width
        text_keys = text.keys[:, :, :text_width]  # [texts, H_kv, text_width, D]
        text_values = text.values[:, :, :text_width]
        branch = self._with_new_token(layer, keys, values)  # [B, H_kv, length, D] each

        # 2. Scores of all keys, and their weights. R: the query heads that share a head of keys.
        grouped_queries = queries.reshape(*keys.shape[:2], -1, queries.shape[-1]) * layer.scale  # [B, H_kv, R, D]
        scores = [
            _multiply_by_common(grouped_queries, head.keys.mT),
            grid.multiply(grouped_queries, text_keys.mT, key_heads),
            grouped_queries @ branch.keys.mT,
        ]
        weights = layer.weights(torch.cat(scores, -1), self.visibility.bias(layer))  # [B, H_kv, R, all keys]

        # 3. The sum of the values by their weights; values may have another D than keys.
        part_lengths = [head.keys.shape[2], text_width, self.length]
        head_weights, text_weights, branch_weights = torch.split(weights, part_lengths, -1)
        answer = grid.multiply(text_weights, text_values, key_heads) + _multiply_by_common(head_weights, head.values)
        answer += branch_weights @ branch.values
        return answer.flatten(1, 2)[:, :, None]

    def _with_new_token(self, layer: AttentionLayer, keys: Tensor, values: Tensor) -> LayerCache:
        """Store keys and values of the new tokens in a layer's cache; return those of all tokens of the branches.

        keys, values: a token per branch, [B, H_kv, 1, D]. Returns [B, H_kv, length, D] each, as views of the cache. The
        new token of branch b is in column `ages[b]`; after it are zeros.
        """
        cache = self.branches.layers[layer.number]
        branch = LayerCache(
            cache.keys[: len(keys), :, : self.length],
            cache.values[: len(values), :, : self.length],
        )
        branch.keys[self.layout.numbers, :, self.ages] = keys[:, :, 0]
        branch.values[self.layout.numbers, :, self.ages] = values[:, :, 0]
        return branch


def _multiply_by_common(rows: Tensor, common: Tensor) -> Tensor:
    """Multiply each branch's matrix [B, H_kv, R, X] by one that all have in common, [1, H_kv, X, Y].

    Returns [B, H_kv, R, Y]. It is one product per head, with B * R rows, so `common` is not copied for each branch.
    """
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ common[0]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)
