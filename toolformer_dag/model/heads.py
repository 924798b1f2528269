"""Texts after a shared prompt, and their continuations, with keys and values that are never copied per row.

A sequence has three parts, whose keys and values are cached apart:

1. the head: the tokens of the prompt, which all sequences have in common;
2. a text after the head, in a slot: a row of the cache of texts;
3. a branch: tokens that continue the text, or its beginning. Many branches may continue one text.

Shapes: B sequences, H heads of queries, H_kv heads of keys, R = H / H_kv heads of queries per head of keys, T new
tokens, D numbers per head.
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
        """Return a cache of zeros for `rows` sequences of `length` tokens, with this one's heads and data type.

        Memory that is not set could hold NaN, which a mask does not hide.
        """
        keys = self.keys.new_zeros(rows, self.keys.shape[1], length, self.keys.shape[3])
        values = self.values.new_zeros(rows, self.values.shape[1], length, self.values.shape[3])
        return LayerCache(keys, values)

    def grown(self, rows: int, length: int) -> "LayerCache":
        """Return a cache with at least `rows` rows of at least `length` tokens: this one, and zeros where it is larger.

        Nothing is copied where it is large enough already; it never becomes smaller.
        """
        more_rows = max(0, rows - self.keys.shape[0])
        more_tokens = max(0, length - self.keys.shape[2])
        if not more_rows and not more_tokens:
            return self
        padding = (0, 0, 0, more_tokens, 0, 0, 0, more_rows)  # pairs, from the last dimension to the first
        return LayerCache(F.pad(self.keys, padding), F.pad(self.values, padding))


Layers = dict[int, LayerCache]
"""The caches of a model by the number of the layer."""


class CachedHead:
    """The tokens of the prompt that all texts follow, with cached keys and values. It may be empty.

    - `length`: the number of its tokens.
    - `layers`: its keys and values by layer, with a single row each.

    Raises ValueError for a model with other layers than attention.
    """

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        """Run the prompt's tokens `ids`, and keep the keys and values of every layer.

        Without tokens, a token is run whose keys are not kept: so `layers` have the shapes of the model, and length 0.
        """
        self.backbone = backbone
        self.length = len(ids)
        self.layers: Layers = {}  # filled by `_attend`, which each layer calls
        any_ids = [0]
        ids_to_run = ids or any_ids
        backbone.features(padded([ids_to_run], backbone.device), attend=self._attend)
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
    """Keys and values of texts after a cached head. A slot is a row for a text; later texts overwrite earlier ones.

    - `head`: the prompt before every text.
    - `slots`: the number of slots.
    - `layers`: keys and values by layer, with a row per slot. They are zero after the end of a text, because a mask
      hides keys, but not NaN or infinity in them.
    """

    def __init__(self, head: CachedHead, slots: int, width: int) -> None:
        self.head = head
        self.slots = slots
        self.layers: Layers = {number: cache.room(slots, width) for number, cache in head.layers.items()}

    def make_room(self, slots: int, width: int) -> None:
        """Make room for at least `slots` texts of at least `width` tokens, with zeros where the cache grows.

        Where slots are missing, their number is at least doubled, so that it seldom grows.
        """
        if slots > self.slots:
            self.slots = max(slots, 2 * self.slots)
        for number, cache in self.layers.items():
            self.layers[number] = cache.grown(self.slots, width)

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text."""
        return len(sequence)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run B texts after the head; return their features, the last hidden states, [B, T - first, F].

        The texts' keys and values are stored in `layers` on the way, by the attention of the pass.

        - slots: the row of the cache for each text, [B]. What was in it is overwritten.
        - sequences: the tokens of each text; T is the length of the longest.
        - first: the index of the token at which the returned features begin.
        """
        backbone = self.head.backbone
        ids = padded(sequences, backbone.device)  # [B, T]
        key_positions = torch.arange(self.head.length + ids.shape[1], device=ids.device)  # [head + T]
        text_positions = key_positions[self.head.length :]  # [T]
        text_pass = _TextPass(
            texts=self,
            slots=on_device(slots, ids.device),
            padding=_padding(sequences, ids.device),
            visibility=Visibility(
                queries=text_positions, keys=key_positions, longest=len(key_positions), dtype=backbone.model.dtype
            ),
        )
        return backbone.features(ids, text_positions.expand_as(ids), text_pass)[:, first:]

    def branches(self, capacity: int, room: int) -> "CachedBranches":
        """Allocate up to `capacity` branches with `room` tokens each; `CachedBranches.admit` starts them."""
        return CachedBranches(self, capacity, room)


def _padding(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """Return which tokens of padded sequences are padding, [B, 1, T, 1]; None where all have the same length.

    It broadcasts to their keys [B, H_kv, T, D]. For sequences of 2 and 1 tokens, rows are [False, False] and
    [False, True].
    """
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    if min(lengths) == width:
        return None
    is_padding = torch.arange(width, device=device) >= on_device(lengths, device)[:, None]  # [B, T]
    return is_padding[:, None, :, None]


@dataclass(frozen=True, eq=False)
class _TextPass:
    """The attention of a pass that runs texts: it stores their keys and values, and attends to head and text.

    - `texts`: the cache that they are stored in.
    - `slots` [B]: the row of the cache for each text.
    - `padding` [B, 1, T, 1]: whether a token is after the end of its text; None where all have the same length.
    - `visibility`: which tokens each token sees, by their positions.
    """

    texts: CachedTexts
    slots: Tensor
    padding: Tensor | None
    visibility: Visibility

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of B texts in a layer, [B, H, T, D]; each token sees the head and the text up to itself.

        queries [B, H, T, D]; keys, values [B, H_kv, T, D], which are also stored in the cache.
        """
        if self.padding is not None:
            keys = keys.masked_fill(self.padding, 0)
            values = values.masked_fill(self.padding, 0)
        self._store(layer, keys, values)

        head = self.texts.head.layers[layer.number]  # [1, H_kv, head, D] each
        all_keys = torch.cat([head.keys.expand(len(keys), -1, -1, -1), keys], 2)  # [B, H_kv, head + T, D]
        all_values = torch.cat([head.values.expand(len(values), -1, -1, -1), values], 2)
        has_window = self.visibility.limiting(layer) is not None  # one that hides a token of these texts
        if has_window or not layer.is_plain:  # not plain: a soft cap or sinks, which torch's kernel does not know
            return attention(layer, queries, all_keys, all_values, self.visibility.bias(layer))
        mask = causal_lower_right(queries.shape[2], all_keys.shape[2])  # the last token sees all keys
        return F.scaled_dot_product_attention(
            queries, all_keys, all_values, attn_mask=mask, scale=layer.scale, enable_gqa=True
        )

    def _store(self, layer: AttentionLayer, keys: Tensor, values: Tensor) -> None:
        """Write the texts' keys and values, [B, H_kv, T, D] each, into their slots of the cache, and zeros after them.

        The zeros overwrite the end of a longer text that was in the slot before.
        """
        cache = self.texts.layers[layer.number]
        unused_length = cache.keys.shape[2] - keys.shape[2]  # a slot may be longer than these texts
        cache.keys[self.slots] = F.pad(keys, (0, 0, 0, unused_length))
        cache.values[self.slots] = F.pad(values, (0, 0, 0, unused_length))


class BranchGrid:
    """A table with B branches in its cells, and a row per text, so that a text's keys are multiplied once for its row.

    With branches 0 and 2 of text 0, and branch 1 of text 1, the rows are [0, 2] and [1, -]. The values in this example:

    - `text` [B, 1]: the row of each branch, [[0], [1], [0]]. `column` [B, 1]: its column, [[0], [0], [1]].
    - `branch_of_cell` [texts, 1, columns]: the branch in each cell, [[[0, 2]], [[1, 0]]]. An empty cell has branch 0,
      and its product is not read.
    - `is_plain`: whether row t has the single branch t, for all rows; then no table is needed. Here it is False.
    """

    def __init__(self, slots: Sequence[int], open_slots: Sequence[int], device: torch.device) -> None:
        """Give each branch the next free cell in the row of its text.

        - slots: for each branch, the slot of its text, which is the text's row in the cache.
        - open_slots: the slots of the texts that have a row here, in the order of the rows.

        Slots [5, 7, 5] and open slots [5, 7] make the example of the class.
        """
        row_of_slot = {slot: row for row, slot in enumerate(open_slots)}
        branches_in_row = [0] * len(open_slots)  # so far
        rows = []  # by branch
        columns = []  # by branch
        for slot in slots:
            row = row_of_slot[slot]
            rows.append(row)
            columns.append(branches_in_row[row])
            branches_in_row[row] += 1
        self.is_plain = rows == list(range(len(open_slots))) and not any(columns)
        self.text = on_device(rows, device)[:, None]
        self.column = on_device(columns, device)[:, None]
        branches = torch.arange(len(slots), device=device)
        self.branch_of_cell = branches.new_zeros(len(open_slots), 1, max(branches_in_row))
        self.branch_of_cell[self.text, 0, self.column] = branches[:, None]

    def multiply(self, rows: Tensor, shared: Tensor, heads: Tensor) -> Tensor:
        """Return `rows[b] @ shared[text of b]` for every branch b, [B, H_kv, R, Y].

        - rows: a matrix per branch, [B, H_kv, R, X]; R query heads share a head of keys.
        - shared: a matrix per text, [texts, H_kv, X, Y].
        - heads: the numbers from 0 to H_kv - 1.

        All branches of a text are multiplied at once, so that its matrix is not copied for each.
        """
        if self.is_plain:
            return rows @ shared
        by_text = rows[self.branch_of_cell, heads[:, None]]  # [texts, H_kv, columns, R, X]
        products = (by_text.flatten(2, 3) @ shared).view(*by_text.shape[:-1], -1)  # [texts, H_kv, columns, R, Y]
        return products[self.text, heads, self.column]  # back to the order of the branches


@dataclass(frozen=True, slots=True, eq=False)
class OpenTexts:
    """The texts whose keys and values the next steps of branches multiply.

    - `slots`: their rows in the cache of texts. `slots[r]` belongs to row r of `layers`.
    - `width`: how many tokens of each are multiplied.
    - `layers`: their keys and values by layer: the cache of all texts itself, or copies of some of its rows.
    """

    slots: Sequence[int]
    width: int
    layers: Layers


NO_TEXTS = OpenTexts(slots=(), width=0, layers={})


@dataclass(frozen=True, slots=True, eq=False)
class BranchLayout:
    """The tensors that all steps of B branches use, until branches come or go.

    - `grid`: the branches in a table with a row per text.
    - `numbers` [B]: the numbers from 0 to B - 1.
    - `starts` [B, 1]: the position of each branch's first token. With a head of 10 tokens, a branch that continues the
      first 3 tokens of its text starts at position 13.
    - `shared_positions` [B, head + text]: the positions of the tokens before branches, 0, 1, 2, ..., in every row.
    """

    grid: BranchGrid
    numbers: Tensor
    starts: Tensor
    shared_positions: Tensor


class CachedBranches:
    """Branches: continuations of cached texts, which all get one token per step. They may begin at different steps.

    Branches are numbered in the order of `admit` and `select`. Three lists say what each branch b is:

    - `slots[b]`: the slot of the text that it continues, a row of the cache of texts.
    - `kept[b]`: how many tokens of this text stand before it.
    - `ages[b]`: how many tokens of its own it has run.

    What follows from these lists is replaced whenever branches come or go (`_arrange`):

    - `open_texts`: the texts whose keys the steps multiply.
    - `layout`: the tensors that all steps use; None while there is no branch.

    The other attributes:

    - `texts`, `backbone`, `device`: the cache of texts, the model, and where it runs.
    - `layers`: keys and values of the branches' own tokens by layer: row b is branch b. Rows without a branch, and
      columns after a branch's last token, are zero.
    - `head_numbers`: by layer, the numbers from 0 to H_kv - 1, [H_kv].
    - `tokens_run`: how many tokens the last step ran.
    """

    def __init__(self, texts: CachedTexts, capacity: int, room: int) -> None:
        """Allocate keys and values for up to `capacity` branches of `room` tokens; there are no branches yet."""
        self.texts = texts
        self.backbone = texts.head.backbone
        self.device = self.backbone.device
        self.layers: Layers = {}
        self.head_numbers: dict[int, Tensor] = {}
        for number, head_cache in texts.head.layers.items():
            self.layers[number] = head_cache.room(capacity, room)
            self.head_numbers[number] = torch.arange(head_cache.keys.shape[1], device=self.device)
        self.slots: list[int] = []
        self.kept: list[int] = []
        self.ages: list[int] = []
        self.open_texts = NO_TEXTS
        self.layout: BranchLayout | None = None
        self.tokens_run = 0

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Append branches without tokens of their own: new branch b continues the first `kept[b]` tokens of a text.

        slots: the row of this text in the cache of texts, by new branch.
        """
        self.open_texts = NO_TEXTS  # open texts may be copies of slots that hold other texts by now
        new_rows = slice(len(self.slots), len(self.slots) + len(slots))
        for cache in self.layers.values():  # remove what earlier branches left in these rows
            cache.keys[new_rows] = 0
            cache.values[new_rows] = 0
        self._arrange(
            slots=[*self.slots, *slots],
            kept=[*self.kept, *kept],
            ages=[*self.ages, *[0] * len(slots)],
        )

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run texts after the head, append a branch at the end of each; return the features of their last tokens.

        These are [texts, F]. A text gets a slot that no branch uses. The caches of texts and branches grow where they
        have no room for the new ones.
        """
        lengths = [len(sequence) for sequence in sequences]
        self.texts.make_room(slots=len(self.slots) + len(lengths), width=max(lengths))
        for number, cache in self.layers.items():
            self.layers[number] = cache.grown(rows=self.texts.slots, length=0)  # rows alone; the length stays
        free_slots = sorted(set(range(self.texts.slots)) - set(self.slots))
        new_slots = free_slots[: len(lengths)]
        features = self.texts.features(new_slots, sequences, first=0)  # [texts, T, F]
        self.admit(new_slots, lengths)
        last_tokens = on_device(lengths, features.device) - 1
        return features[range(len(lengths)), last_tokens]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each branch, [B], and run it; return the features of these tokens, [B, F].

        Adds 1 to the `ages` of all branches, stores the tokens' keys and values in `layers`, and sets `tokens_run`.
        """
        length = max(self.ages) + 1  # tokens of the longest branch, with the new one
        self._double_room(length)
        assert self.layout is not None  # there are branches
        branch_step = _BranchStep(self, self.layout, length)
        positions = branch_step.visibility.queries  # [B, 1]
        features = self.backbone.features(tokens[:, None], positions, attend=branch_step)  # [B, 1, F]
        self.ages = [age + 1 for age in self.ages]
        self.tokens_run = len(tokens)
        return features[:, 0]

    def _double_room(self, length: int) -> None:
        """Double the number of tokens that the cache of branches can hold, where it is less than `length`."""
        for number, cache in self.layers.items():
            room = cache.keys.shape[2]
            if room < length:
                self.layers[number] = cache.grown(rows=0, length=2 * room)  # tokens alone; no more rows

    def select(self, rows: Sequence[int]) -> None:
        """Continue with some branches: new branch b is old branch `rows[b]`. A branch may be there twice.

        Only keys and values of branches that get another number are copied.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            targets, sources = on_device(moved, self.device).T  # new and old rows of the caches
            for cache in self.layers.values():  # the right side is copied before the left side is written
                cache.keys[targets] = cache.keys[sources]
                cache.values[targets] = cache.values[sources]
        self._arrange(
            slots=[self.slots[row] for row in rows],
            kept=[self.kept[row] for row in rows],
            ages=[self.ages[row] for row in rows],
        )

    def branch(self, row: int) -> "CachedBranches":
        """Return a copy of branch `row` alone. What it runs changes neither this object nor its caches."""
        copied = copy(self)
        copied.layers = {}
        for number, cache in self.layers.items():
            copied.layers[number] = LayerCache(cache.keys[[row]], cache.values[[row]])  # copies of one row
        copied._arrange(slots=[self.slots[row]], kept=[self.kept[row]], ages=[self.ages[row]])
        return copied

    def _arrange(self, *, slots: list[int], kept: list[int], ages: list[int]) -> None:
        """Replace the branches by others, and with them `open_texts` and `layout`, which all their steps use.

        Each argument has an entry per new branch:

        - slots: the row of its text in the cache of texts.
        - kept: how many tokens of the text it continues.
        - ages: how many tokens of its own it has run.

        With a head of 10 tokens, slots [5, 5] and kept [3, 8], branches start at positions [[13], [18]] of their
        sequences, and the open text is read up to token 8, so that the positions before branches are 0 to 17.
        """
        self.slots = slots
        self.kept = kept
        self.ages = ages
        if not slots:
            return
        self.open_texts = self._texts_to_open(set(slots), max(kept))  # the texts whose keys the steps multiply
        head_length = self.texts.head.length  # tokens of the prompt, before all texts
        shared_positions = torch.arange(head_length + self.open_texts.width, device=self.device)  # [head + text]
        self.layout = BranchLayout(
            grid=BranchGrid(slots, self.open_texts.slots, self.device),
            numbers=torch.arange(len(slots), device=self.device),  # [B]
            starts=on_device(kept, self.device)[:, None] + head_length,  # [B, 1]
            shared_positions=shared_positions.expand(len(slots), -1),  # [B, head + text]
        )

    def _texts_to_open(self, slots: set[int], width: int) -> OpenTexts:
        """Return the texts whose keys the next steps multiply: those that branches continue, and perhaps more.

        To choose rows of the cache copies them, so that multiplying some that are not needed may be cheaper:

        1. The texts that are open now, if all needed ones are open and are more than half of these.
        2. Else all texts of the cache, without a copy, if the needed ones are more than half of these.
        3. Else copies of the needed texts.

        slots: the rows of the needed texts in the cache. width: how many of their first tokens are needed.
        """
        all_are_open = slots <= set(self.open_texts.slots) and width <= self.open_texts.width
        if all_are_open and 2 * len(slots) > len(self.open_texts.slots):
            return self.open_texts
        needs_most_of_cache = 2 * len(slots) > self.texts.slots
        if needs_most_of_cache:
            return OpenTexts(range(self.texts.slots), width, self.texts.layers)
        sorted_slots = sorted(slots)
        rows = on_device(sorted_slots, self.device)
        copies: Layers = {}  # keys and values by layer
        for number, cache in self.texts.layers.items():
            copies[number] = LayerCache(cache.keys[rows, :, :width], cache.values[rows, :, :width])
        return OpenTexts(sorted_slots, width, copies)


class _BranchStep:
    """The attention of a step, in which B branches run a token each: it sees head, text and branch in one softmax.

    - `branches`: the branches with their caches. `layout`: the tensors that all their steps use.
    - `length`: how many tokens the longest branch has, with the new one.
    - `ages` [B]: how many tokens each branch had before. This is the column of the cache for its new token.
    - `visibility`: which keys each new token sees.
    """

    def __init__(self, branches: CachedBranches, layout: BranchLayout, length: int) -> None:
        self.branches = branches
        self.layout = layout
        self.length = length
        self.ages = on_device(branches.ages, branches.device)
        self.visibility = self._visible()

    def _visible(self) -> Visibility:
        """Return which keys the new token of each branch sees: the head, the kept part of its text, its own tokens.

        The keys have a column per token of the head, of the text and of the longest branch, in this order. Hidden are
        the tokens of the text that the branch does not continue, and columns after the branch's own last token.
        """
        branches = self.branches
        starts = self.layout.starts  # [B, 1], the position of each branch's first token
        shared_positions = self.layout.shared_positions  # [B, head + text]
        branch_positions = starts + torch.arange(self.length, device=branches.device)  # [B, length]
        query_positions = starts + self.ages[:, None]  # [B, 1], of the new tokens
        sees_shared = shared_positions < starts  # a branch starts at the first position of its text that it leaves out
        sees_branch = branch_positions <= query_positions
        lengths_before = [kept + age for kept, age in zip(branches.kept, branches.ages, strict=True)]  # after the head
        return Visibility(
            queries=query_positions,
            keys=torch.cat([shared_positions, branch_positions], 1),
            longest=branches.texts.head.length + max(lengths_before) + 1,
            dtype=branches.backbone.model.dtype,
            seen=torch.cat([sees_shared, sees_branch], 1)[:, None],
        )

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of the new token of each of B branches in a layer, [B, H, 1, D].

        queries [B, H, 1, D]; keys, values [B, H_kv, 1, D], which are stored in the cache first.

        A token sees three parts: the head (the prompt), cached once for all; the text that its branch continues, cached
        once for all branches of the text; and its branch. The scores of each part are computed apart, and one softmax
        goes over all.
        """
        head = self.branches.texts.head.layers[layer.number]  # [1, H_kv, head, D] each
        text = self._texts_of(layer)  # [texts, H_kv, text, D] each
        branch = self._with_new_token(layer, keys, values)  # [B, H_kv, length, D] each
        parts = _Parts(head, text, branch, grid=self.layout.grid, key_heads=self.branches.head_numbers[layer.number])

        # R: the query heads that share a head of keys.
        grouped_queries = queries.reshape(*keys.shape[:2], -1, queries.shape[-1]) * layer.scale  # [B, H_kv, R, D]
        weights = layer.weights(parts.scores(grouped_queries), self.visibility.bias(layer))  # [B, H_kv, R, all keys]
        answer = parts.weighted_sum(weights)  # [B, H_kv, R, D]
        return answer.flatten(1, 2)[:, :, None]

    def _texts_of(self, layer: AttentionLayer) -> LayerCache:
        """Return keys and values of the open texts in a layer, up to the last token that a branch continues."""
        open_texts = self.branches.open_texts
        cache = open_texts.layers[layer.number]
        return LayerCache(cache.keys[:, :, : open_texts.width], cache.values[:, :, : open_texts.width])

    def _with_new_token(self, layer: AttentionLayer, keys: Tensor, values: Tensor) -> LayerCache:
        """Store keys and values of the new tokens in a layer's cache; return all tokens' keys and values.

        keys, values: a token per branch, [B, H_kv, 1, D]. Returns [B, H_kv, length, D] each, as views of the cache. The
        new token of branch b is in column `ages[b]`; after it are zeros.
        """
        cache = self.branches.layers[layer.number]
        views = LayerCache(
            cache.keys[: len(keys), :, : self.length],
            cache.values[: len(values), :, : self.length],
        )
        rows = self.layout.numbers  # 0 to B - 1: with `ages`, the row and the column of each new token
        views.keys[rows, :, self.ages] = keys[:, :, 0]
        views.values[rows, :, self.ages] = values[:, :, 0]
        return views


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Keys and values of a layer that the new tokens of B branches see, in three parts.

    - `head` [1, H_kv, head, D]: the prompt's, common to all branches.
    - `texts` [texts, H_kv, text, D]: common to the branches of a text.
    - `branches` [B, H_kv, length, D]: of each branch.
    - `grid`: the branches in a table with a row per text. `key_heads`: the numbers from 0 to H_kv - 1.
    """

    head: LayerCache
    texts: LayerCache
    branches: LayerCache
    grid: BranchGrid
    key_heads: Tensor

    def scores(self, queries: Tensor) -> Tensor:
        """Return the products of queries [B, H_kv, R, D] and all keys, [B, H_kv, R, head + text + length]."""
        head_scores = _multiply_by_common(queries, self.head.keys.mT)
        text_scores = self.grid.multiply(queries, self.texts.keys.mT, self.key_heads)
        branch_scores = queries @ self.branches.keys.mT
        return torch.cat([head_scores, text_scores, branch_scores], -1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum of all values by their weights [B, H_kv, R, head + text + length], [B, H_kv, R, D].

        D is that of the values here, which may differ from that of the keys.
        """
        lengths = [part.keys.shape[2] for part in (self.head, self.texts, self.branches)]
        head_weights, text_weights, branch_weights = torch.split(weights, lengths, -1)
        text_sum = self.grid.multiply(text_weights, self.texts.values, self.key_heads)
        total = text_sum + _multiply_by_common(head_weights, self.head.values)
        total += branch_weights @ self.branches.values
        return total


def _multiply_by_common(rows: Tensor, common: Tensor) -> Tensor:
    """Return the product of each branch's matrix [B, H_kv, R, X] and one that all share, [1, H_kv, X, Y].

    It is [B, H_kv, R, Y]. There is one product per head, with B * R rows, so that `common` is not copied per branch.
    """
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ common[0]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)
