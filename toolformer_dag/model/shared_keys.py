"""Cached keys and values of a prompt, of texts after it and of their continuations; none is copied per sequence.

A sequence has three parts, whose keys and values are cached apart:

1. the prompt: the first tokens of all sequences;
2. a text after the prompt, in a slot: a row of the cache of texts;
3. a branch: tokens that continue the text, or its beginning. Many branches may continue one text.

Shapes: B sequences, H heads of queries, H_kv heads of keys, R = H / H_kv heads of queries per head of keys, T new
tokens, D numbers per head, F numbers per hidden state.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from toolformer_dag.model.attention import (
    AttentionLayer,
    Visibility,
    attend_causally,
    attention,
    on_device,
    pad_sequences,
)
from toolformer_dag.model.backbone import Backbone


class LayerCache(NamedTuple):
    """Keys and values of a layer, [B, H_kv, T, D] each; values may have another D than keys."""

    keys: Tensor
    values: Tensor

    def head_numbers(self) -> Tensor:
        """Return the numbers of the heads of keys, from 0 to H_kv - 1."""
        return torch.arange(self.keys.shape[1], device=self.keys.device)

    def zeros(self, rows: int, length: int) -> "LayerCache":
        """Return a cache of zeros for `rows` sequences of `length` tokens, with this one's heads and data type.

        Memory that is not set could hold NaN, which a mask does not hide.
        """
        keys = self.keys.new_zeros(rows, self.keys.shape[1], length, self.keys.shape[3])
        values = self.values.new_zeros(rows, self.values.shape[1], length, self.values.shape[3])
        return LayerCache(keys, values)

    def grown(self, rows: int, length: int) -> "LayerCache":
        """Return a cache with at least `rows` rows of at least `length` tokens; zeros are appended where it is smaller.

        Returns this cache itself, without a copy, where it is large enough.
        """
        more_rows = max(0, rows - self.keys.shape[0])
        more_tokens = max(0, length - self.keys.shape[2])
        if not more_rows and not more_tokens:
            return self
        # For [rows, heads, tokens, D]: zeros (before, after) each dimension, from the last dimension to the first.
        padding = (0, 0, 0, more_tokens, 0, 0, 0, more_rows)
        return LayerCache(F.pad(self.keys, padding), F.pad(self.values, padding))

    def with_width(self, width: int) -> "LayerCache":
        """Return views of the first `width` tokens of each row."""
        return LayerCache(self.keys[:, :, :width], self.values[:, :, :width])

    def beginnings(self, rows: int, width: int) -> "LayerCache":
        """Return views of the first `width` tokens of the first `rows` rows."""
        return LayerCache(self.keys[:rows, :, :width], self.values[:rows, :, :width])

    def copy_rows(self, rows: Tensor, width: int) -> "LayerCache":
        """Return copies of the first `width` tokens of some rows."""
        return LayerCache(self.keys[rows, :, :width], self.values[rows, :, :width])


Layers = dict[int, LayerCache]
"""The caches of a model by the number of the layer."""


class CachedPrompt:
    """The tokens before all texts, with cached keys and values. It may be empty.

    - `backbone`: the model.
    - `length`: the number of tokens.
    - `layers`: keys and values by layer, with a single row each.

    Raises ValueError for a model with other layers than attention.
    """

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        """Run the tokens `ids`, and store the keys and values of every layer.

        Without tokens, some token is run, and none of its keys are stored: so `layers` have the model's shapes and
        length 0.
        """
        self.backbone = backbone
        self.length = len(ids)
        self.layers: Layers = {}
        any_ids = [0]
        ids_to_run = pad_sequences([ids or any_ids], backbone.device)
        # Every layer calls `_attend`, which stores the layer's keys and values in `layers`; the features are not used.
        backbone.features(ids_to_run, attend=self._attend)
        self._check_layers()

    def _check_layers(self) -> None:
        """Raise ValueError where some layer of the model called no attention function, and so has no keys."""
        layer_count = self.backbone.model.config.get_text_config().num_hidden_layers
        if len(self.layers) != layer_count:
            raise ValueError(f"{len(self.layers)} of {layer_count} layers are attention")

    def texts(self, slots: int, width: int) -> "CachedTexts":
        """Allocate a cache for `slots` texts of at most `width` tokens after this prompt."""
        return CachedTexts(self, slots, width)

    def _attend(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend causally, and store the keys and values of the prompt's tokens, [1, H_kv, T, D] each."""
        prompt_keys = keys[:, :, : self.length].contiguous()
        prompt_values = values[:, :, : self.length].contiguous()
        self.layers[layer.number] = LayerCache(prompt_keys, prompt_values)
        return attend_causally(layer, queries, keys, values)


class CachedTexts:
    """Keys and values of texts after a cached prompt. A slot is the row of a text; a later text overwrites it.

    - `prompt`: the cached tokens before every text.
    - `slots`: the number of slots.
    - `layers`: keys and values by layer, with a row per slot. They are zero after the end of a text, because a mask
      hides keys, but not NaN or infinity in them.
    """

    def __init__(self, prompt: CachedPrompt, slots: int, width: int) -> None:
        self.prompt = prompt
        self.slots = slots
        self.layers: Layers = {number: cache.zeros(slots, width) for number, cache in prompt.layers.items()}

    def grow(self, slots: int, width: int) -> None:
        """Grow the cache to at least `slots` texts of at least `width` tokens.

        The number of slots is at least doubled where it grows, so that it seldom does.
        """
        if slots > self.slots:
            self.slots = max(slots, 2 * self.slots)
        for number, cache in self.layers.items():
            self.layers[number] = cache.grown(self.slots, width)

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text."""
        return len(sequence)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run B texts after the prompt, and cache their keys and values; return their features, [B, T - first, F].

        - slots: for each text, the row of the cache that it is written to, [B]; an earlier text there is overwritten.
        - sequences: the tokens of each text; T is the length of the longest.
        - first: the index of the token at which the returned features (last hidden states) begin.
        """
        backbone = self.prompt.backbone
        ids = pad_sequences(sequences, backbone.device)  # [B, T]
        visibility = self._build_visibility(width=ids.shape[1])
        # Computes the attention of every layer, and writes the layer's keys and values into the slots.
        attend = _TextPass(
            texts=self,
            slots=on_device(slots, ids.device),
            padding=_find_padding(sequences, ids.device),
            visibility=visibility,
        )
        positions_after_prompt = visibility.queries.expand_as(ids)  # the same T positions for each text
        return backbone.features(ids, positions_after_prompt, attend)[:, first:]

    def _build_visibility(self, width: int) -> Visibility:
        """Return which keys the tokens of texts of `width` tokens attend to: the prompt, and the text up to them.

        It is made from positions: a token attends to the keys at its own position and before it.
        """
        backbone = self.prompt.backbone
        prompt_length = self.prompt.length
        positions = torch.arange(prompt_length + width, device=backbone.device)  # [prompt + T]
        return Visibility(
            queries=positions[prompt_length:],  # [T], the tokens of the text alone
            keys=positions,
            longest=len(positions),
            dtype=backbone.model.dtype,
        )

    def branches(self, capacity: int, max_tokens: int) -> "CachedBranches":
        """Allocate a cache for up to `capacity` branches of `max_tokens` tokens; `CachedBranches.admit` starts them."""
        return CachedBranches(self, capacity, max_tokens)

    def open_all_texts(self, width: int) -> "OpenTexts":
        """Return all slots of the cache, without a copy, to be read up to `width` tokens."""
        return OpenTexts(range(self.slots), width, self.layers)

    def copies(self, slots: Iterable[int], width: int) -> "OpenTexts":
        """Return copies of the first `width` tokens of the texts in some slots."""
        sorted_slots = sorted(slots)
        rows = on_device(sorted_slots, self.prompt.backbone.device)
        layers = {number: cache.copy_rows(rows, width) for number, cache in self.layers.items()}
        return OpenTexts(sorted_slots, width, layers)


def _find_padding(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """Return which of the T tokens of each of B padded sequences are padding; None where all have the same length.

    For sequences of 2 and 1 tokens, rows are [False, False] and [False, True]. The shape is [B, 1, T, 1], to mask keys,
    [B, heads, T, D].
    """
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    if min(lengths) == width:
        return None
    columns = torch.arange(width, device=device)  # [T]
    is_padding = columns >= on_device(lengths, device)[:, None]  # [B, T]
    return is_padding[:, None, :, None]


@dataclass(frozen=True, eq=False)
class _TextPass:
    """The attention of a pass that runs texts: it stores their keys and values, and attends to prompt and text.

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
        """Store a layer's keys and values of B texts; return their attention to prompt and text, [B, H, T, D].

        - queries: [B, H, T, D], of T tokens of each text in H heads.
        - keys, values: [B, H_kv, T, D], of the same tokens; those of the prompt are cached already.
        """
        text = self._without_padding(LayerCache(keys, values))
        self._store_text(layer, text)  # for branches, which continue these texts later
        visible = self._join_with_prompt(layer, text)  # [B, H_kv, prompt + T, D]
        if self._is_plain(layer):  # without window, soft cap and sinks, which the fused kernel does not know
            return _attend_by_fused_kernel(layer, queries, visible)
        return attention(layer, queries, visible.keys, visible.values, self.visibility.bias(layer))

    def _is_plain(self, layer: AttentionLayer) -> bool:
        """Return whether torch's fused kernel computes a layer: it knows no window, soft cap or sinks."""
        hides_by_window = self.visibility.find_limiting_locality(layer) is not None
        return layer.is_plain and not hides_by_window

    def _without_padding(self, text: LayerCache) -> LayerCache:
        """Return the keys and values of texts with zeros after the end of each text."""
        if self.padding is None:
            return text
        return LayerCache(text.keys.masked_fill(self.padding, 0), text.values.masked_fill(self.padding, 0))

    def _store_text(self, layer: AttentionLayer, text: LayerCache) -> None:
        """Write the keys and values of texts into their slots, with zeros in the rest of each slot.

        The zeros overwrite the end of a longer text that was in the slot before.
        """
        cache = self.texts.layers[layer.number]
        unused_length = cache.keys.shape[2] - text.keys.shape[2]  # a slot may be longer than these texts
        cache.keys[self.slots] = F.pad(text.keys, (0, 0, 0, unused_length))
        cache.values[self.slots] = F.pad(text.values, (0, 0, 0, unused_length))

    def _join_with_prompt(self, layer: AttentionLayer, text: LayerCache) -> LayerCache:
        """Return the keys and values of prompt and texts in one, [B, H_kv, prompt + T, D] each."""
        prompt = self.texts.prompt.layers[layer.number]  # [1, H_kv, prompt, D] each
        batch = len(text.keys)
        keys = torch.cat([prompt.keys.expand(batch, -1, -1, -1), text.keys], 2)
        values = torch.cat([prompt.values.expand(batch, -1, -1, -1), text.values], 2)
        return LayerCache(keys, values)


def _attend_by_fused_kernel(layer: AttentionLayer, queries: Tensor, visible: LayerCache) -> Tensor:
    """Return causal attention by torch's fused kernel, [B, H, T, D]; the last of T queries sees all keys."""
    mask = causal_lower_right(queries.shape[2], visible.keys.shape[2])
    return F.scaled_dot_product_attention(
        queries, visible.keys, visible.values, attn_mask=mask, scale=layer.scale, enable_gqa=True
    )


class BranchTable:
    """A table with B branches in its cells, and a row per text, so that a text's keys are multiplied once for its row.

    With branches 0 and 2 of text 0, and branch 1 of text 1, the rows are [0, 2] and [1, -]. The values in this example:

    - `text` [B, 1]: the row of each branch, [[0], [1], [0]].
    - `column` [B, 1]: the column of each branch, [[0], [0], [1]].
    - `branch_of_cell` [texts, 1, columns]: the branch in each cell, [[[0, 2]], [[1, 0]]]. An empty cell has branch 0,
      and its product is not read.
    - `is_plain`: whether row t has the single branch t, for all rows; then no table is needed. Here it is False.
    """

    def __init__(self, slots: Sequence[int], open_slots: Sequence[int], device: torch.device) -> None:
        """Give each of B branches, which continue texts, the next free cell in its text's row of the table.

        - slots: for each branch, the number under which its text is cached.
        - open_slots: these numbers of the texts that have a row here, in the order of the rows.

        With slots [5, 7, 5] and open slots [5, 7], branches 0 and 2 are in row 0, and branch 1 is in row 1.
        """
        row_of_slot = {slot: row for row, slot in enumerate(open_slots)}
        rows = [row_of_slot[slot] for slot in slots]  # by branch: [0, 1, 0]
        columns = _assign_columns(rows)  # by branch: [0, 0, 1]
        self.is_plain = rows == list(range(len(open_slots)))  # each text has one branch, in order: no table is needed
        self.text = on_device(rows, device)[:, None]  # [B, 1]
        self.column = on_device(columns, device)[:, None]  # [B, 1]
        self.branch_of_cell = self._build_cells(
            text_count=len(open_slots), width=max(columns) + 1
        )  # [[[0, 2]], [[1, 0]]]

    def _build_cells(self, text_count: int, width: int) -> Tensor:
        """Return the number of the branch in each cell, 0 in empty ones, [texts, 1, columns]."""
        branches = torch.arange(len(self.text), device=self.text.device)
        cells = branches.new_zeros(text_count, 1, width)
        cells[self.text, 0, self.column] = branches[:, None]
        return cells

    def multiply(self, rows: Tensor, shared: Tensor, heads: Tensor) -> Tensor:
        """Return `rows[b] @ shared[text of b]` for every branch b (a continuation of a text), [B, H_kv, R, Y].

        All branches of a text stand in its row of the table, so that their matrices are joined and multiplied at once,
        without a copy of the text's matrix for each branch.

        - rows: a matrix per branch, [B, H_kv, R, X].
        - shared: a matrix per text, [texts, H_kv, X, Y].
        - heads: the numbers from 0 to H_kv - 1.
        """
        if self.is_plain:  # text b has the single branch b
            return rows @ shared
        by_cell = rows[self.branch_of_cell, heads[:, None]]  # [texts, H_kv, columns, R, X]
        products = by_cell.flatten(2, 3) @ shared  # [texts, H_kv, columns * R, Y]
        products = products.view(*by_cell.shape[:-1], -1)  # [texts, H_kv, columns, R, Y]
        return products[self.text, heads, self.column]  # of each branch's cell, [B, H_kv, R, Y]


def _assign_columns(rows: Sequence[int]) -> list[int]:
    """Return for each entry the next free column of its row, from left to right: rows [0, 1, 0] give [0, 0, 1]."""
    entries_of_row = Counter[int]()
    columns = []
    for row in rows:
        columns.append(entries_of_row[row])
        entries_of_row[row] += 1
    return columns


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

    def holds(self, slots: set[int], width: int) -> bool:
        """Return whether the first `width` tokens of the texts in all these slots are open."""
        return slots <= set(self.slots) and width <= self.width

    def layer(self, number: int) -> LayerCache:
        """Return keys and values of the texts in a layer, [texts, H_kv, width, D] each."""
        return self.layers[number].with_width(self.width)


NO_TEXTS = OpenTexts(slots=(), width=0, layers={})


class Branch(NamedTuple):
    """A continuation of the beginning of a cached text.

    - `slot`: the row of the text in the cache of texts.
    - `tokens_before`: how many tokens of the text stand before the branch.
    """

    slot: int
    tokens_before: int


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """The tensors that all steps of B branches use, until branches come or go.

    - `table`: the branches in a table with a row per text.
    - `numbers` [B]: the numbers from 0 to B - 1.
    - `starts` [B, 1]: the position of each branch's first token. After a prompt of 10 tokens, a branch that continues
      the first 3 tokens of its text starts at position 13.
    - `shared_positions` [B, prompt + text]: the positions of the tokens before branches, 0, 1, 2, ..., in every row.
    """

    table: BranchTable
    numbers: Tensor
    starts: Tensor
    shared_positions: Tensor


class CachedBranches:
    """Branches: continuations of cached texts, which all get one token per step. They may begin at different steps.

    - `texts`: the cache of texts that they continue.
    - `backbone`, `device`: the model, and where it runs.
    - `branches`: the branches by number. `admit` and `add` append to them, `select` numbers them anew.
    - `lengths`: how many tokens of each branch have run.
    - `layers`: keys and values of the branches' tokens by layer: row b is branch b. Rows without a branch, and columns
      after a branch's last token, are zero.
    - `key_heads`: by layer, the numbers from 0 to H_kv - 1, [H_kv].
    - `open_texts`: the texts whose keys the steps multiply.
    - `step_tensors`: the tensors that all steps use; None while there is no branch.
    - `tokens_run`: how many tokens the last step ran.

    `open_texts` and `step_tensors` follow from `branches`, and are replaced with them (`_set_branches`).
    """

    def __init__(self, texts: CachedTexts, capacity: int, max_tokens: int) -> None:
        """Allocate keys and values for up to `capacity` branches of `max_tokens` tokens; there are no branches yet.

        texts: the cached texts, whose continuations the branches are.
        """
        self.texts = texts
        self.backbone = texts.prompt.backbone
        self.device = self.backbone.device
        prompt_layers = texts.prompt.layers
        self.layers: Layers = {number: cache.zeros(capacity, max_tokens) for number, cache in prompt_layers.items()}
        self.key_heads = {number: cache.head_numbers() for number, cache in prompt_layers.items()}  # by layer
        self.branches: list[Branch] = []  # branch b has row b of the tensors in `layers`
        self.lengths: list[int] = []  # by branch: how many of its tokens have run
        self.open_texts = NO_TEXTS  # the texts that the present branches continue: every step attends to their keys
        self.step_tensors: StepTensors | None = None  # what the steps of the present branches share; None before any
        self.tokens_run = 0  # by the last step

    @property
    def count(self) -> int:
        """The number of branches."""
        return len(self.branches)

    def admit(self, slots: Sequence[int], tokens_before: Sequence[int]) -> None:
        """Append branches, which continue cached texts; they have no tokens of their own yet.

        - slots: by new branch, the number under which its text is cached.
        - tokens_before: by new branch, how many tokens of its text it continues.
        """
        new_branches = [Branch(slot, before) for slot, before in zip(slots, tokens_before, strict=True)]
        new_lengths = [0] * len(new_branches)
        # Branch b has row b of the caches of keys, which an earlier branch may have used.
        self._clear_rows(slice(self.count, self.count + len(new_branches)))
        # Copies of texts that were made for earlier steps are out of date where slots hold other texts by now.
        self.open_texts = NO_TEXTS
        self._set_branches(self.branches + new_branches, self.lengths + new_lengths)  # opens their texts anew

    def _clear_rows(self, rows: slice) -> None:
        """Set keys and values in these rows to zero: earlier branches may have left some there."""
        for cache in self.layers.values():
            cache.keys[rows] = 0
            cache.values[rows] = 0

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run texts after the prompt, and append a branch for each, which continues it after its last token.

        Returns the last hidden state of each text's last token, [texts, F]. The caches of texts and branches grow where
        the new ones do not fit.
        """
        lengths = [len(sequence) for sequence in sequences]
        new_slots = self._allocate_slots(len(lengths), width=max(lengths))  # free rows of the cache of texts
        features = self.texts.features(new_slots, sequences, first=0)  # [texts, T, F]
        self.admit(new_slots, tokens_before=lengths)  # appends the branches
        last_tokens = on_device(lengths, features.device) - 1
        return features[range(len(lengths)), last_tokens]

    def _allocate_slots(self, text_count: int, width: int) -> list[int]:
        """Return slots that no branch uses for texts of at most `width` tokens; the caches grow for them."""
        used_slots = {branch.slot for branch in self.branches}
        self.texts.grow(slots=self.count + text_count, width=width)
        for number, cache in self.layers.items():
            self.layers[number] = cache.grown(rows=self.texts.slots, length=0)  # rows alone; the length stays
        free_slots = sorted(set(range(self.texts.slots)) - used_slots)
        return free_slots[:text_count]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each of B branches, [B], and run it; return the features of these tokens, [B, F].

        Stores the tokens' keys and values in `layers`, and sets `tokens_run`.
        """
        assert self.step_tensors is not None  # there are branches
        longest = max(self.lengths) + 1  # with the new token
        self._grow_to(longest)  # the caches in `layers`
        branch_step = _BranchStep(self, self.step_tensors, longest)  # reads `lengths`, still without the new token
        positions = branch_step.visibility.queries  # [B, 1]
        # In every layer, `branch_step` stores the new keys and values and computes the attention.
        features = self.backbone.features(tokens[:, None], positions, attend=branch_step)  # [B, 1, F]
        self.lengths = [length + 1 for length in self.lengths]
        self.tokens_run = len(tokens)
        return features[:, 0]

    def _grow_to(self, length: int) -> None:
        """Double the tokens per branch that the cache has room for, where they are fewer than `length`."""
        for number, cache in self.layers.items():
            max_tokens = cache.keys.shape[2]
            if max_tokens < length:
                self.layers[number] = cache.grown(rows=0, length=2 * max_tokens)  # tokens alone; no more rows

    def select(self, rows: Sequence[int]) -> None:
        """Replace the branches: new branch b continues old branch `rows[b]`. A branch may occur twice."""
        self._copy_moved_rows(rows)
        branches = [self.branches[row] for row in rows]
        self._set_branches(branches, [self.lengths[row] for row in rows])

    def _copy_moved_rows(self, rows: Sequence[int]) -> None:
        """Copy old row `rows[b]` of the caches to row b, for all rows that get another number."""
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if not moved:
            return
        targets, sources = on_device(moved, self.device).T  # new and old rows
        for cache in self.layers.values():  # the right side is copied before the left side is written
            cache.keys[targets] = cache.keys[sources]
            cache.values[targets] = cache.values[sources]

    def branch(self, row: int) -> "CachedBranches":
        """Return a copy of branch number `row` alone. Running it changes neither this object nor its caches."""
        copied = copy(self)
        copied.layers = {}
        for number, cache in self.layers.items():
            copied.layers[number] = LayerCache(cache.keys[[row]], cache.values[[row]])  # copies of one row
        copied._set_branches([self.branches[row]], [self.lengths[row]])
        return copied

    def _set_branches(self, branches: list[Branch], lengths: list[int]) -> None:
        """Replace the branches, and what their steps use: the texts that they continue, and tensors such as positions.

        lengths: how many tokens of each branch have run.
        """
        self.branches = branches
        self.lengths = lengths
        if not branches:  # no step reads `open_texts` and `step_tensors` before there are branches again
            return
        slots = {branch.slot for branch in branches}
        longest_beginning = max(branch.tokens_before for branch in branches)  # tokens of a text before a branch
        self.open_texts = self._choose_open_texts(slots, width=longest_beginning)
        self.step_tensors = self._build_step_tensors()

    def _build_step_tensors(self) -> StepTensors:
        """Return the tensors that all steps of the present branches, which continue cached texts, have in common.

        After a prompt of 10 tokens, branches that continue the first 3 and the first 8 tokens of a text start at
        positions [[13], [18]]. The positions of prompt and text are 0 to 17, for the 10 and these 8 tokens.
        """
        prompt_length = self.texts.prompt.length
        slots = [branch.slot for branch in self.branches]  # by branch: the number under which its text is cached
        starts = [prompt_length + branch.tokens_before for branch in self.branches]
        shared_width = prompt_length + self.open_texts.width  # the tokens of prompt and text that steps attend to
        return StepTensors(
            table=BranchTable(slots, self.open_texts.slots, self.device),
            numbers=torch.arange(self.count, device=self.device),
            starts=on_device(starts, self.device)[:, None],
            shared_positions=torch.arange(shared_width, device=self.device).expand(self.count, -1),
        )

    def _choose_open_texts(self, slots: set[int], width: int) -> OpenTexts:
        """Return cached texts whose keys the steps of branches multiply: those in `slots`, perhaps with others.

        Choosing rows of the cache copies them. So texts that are not needed are multiplied too where they are fewer.

        - slots: the rows of the cache that hold the needed texts.
        - width: how many tokens of each are needed.
        """
        needed_count = len(slots)
        if self.open_texts.holds(slots, width) and 2 * needed_count > len(self.open_texts.slots):
            return self.open_texts  # as they were chosen for earlier branches
        if 2 * needed_count > self.texts.slots:
            return self.texts.open_all_texts(width)  # all texts of the cache, without a copy
        return self.texts.copies(slots, width)


class _BranchStep:
    """The attention of a step, in which B branches run a token each: it sees prompt, text and branch in one softmax.

    - `branches`: the branches with their caches.
    - `tensors`: the tensors that all their steps use.
    - `longest`: how many tokens the longest branch has, with the new one.
    - `lengths` [B]: how many tokens each branch had before. This is the column of the cache for its new token.
    - `visibility`: which keys each new token sees.
    """

    def __init__(self, branches: CachedBranches, tensors: StepTensors, longest: int) -> None:
        self.branches = branches
        self.tensors = tensors
        self.longest = longest
        self.lengths = on_device(branches.lengths, branches.device)
        self.visibility = self._build_step_visibility()

    def _build_step_visibility(self) -> Visibility:
        """Return which keys the new token of each of B branches (continuations of texts) sees.

        The keys have a column per token of the prompt, of the text and of the longest branch, in this order. With 1, 3
        and 3 tokens, a branch after the text's first token, whose second token is new, sees [1, 1 0 0, 1 1 0].
        """
        shared_positions = self.tensors.shared_positions  # [B, prompt + text]; in the example, 0 to 3
        starts = self.tensors.starts  # [B, 1], the position of each branch's first token: 2
        branch_positions = starts + torch.arange(self.longest, device=starts.device)  # [B, longest]: 2 to 4
        query_positions = starts + self.lengths[:, None]  # [B, 1], of the new tokens: 3
        sees_shared = shared_positions < starts  # the branch replaces the text from its start on
        sees_branch = branch_positions <= query_positions
        return Visibility(
            queries=query_positions,
            keys=torch.cat([shared_positions, branch_positions], 1),  # [B, prompt + text + longest]
            longest=self._measure_longest_sequence(),
            dtype=self.branches.backbone.model.dtype,
            seen=torch.cat([sees_shared, sees_branch], 1)[:, None],  # for one new token: [B, 1, keys]
        )

    def _measure_longest_sequence(self) -> int:
        """Return the tokens of the longest sequence: prompt, beginning of the text, and branch with its new token."""
        branches = self.branches
        lengths = zip(branches.branches, branches.lengths, strict=True)
        texts_and_branches = [branch.tokens_before + length for branch, length in lengths]
        return branches.texts.prompt.length + max(texts_and_branches) + 1

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of the new token of each of B branches in a layer, [B, H, 1, D].

        R = H / H_kv heads of queries share a head of keys.

        - queries: of the new tokens, [B, H, 1, D].
        - keys, values: of the new tokens, [B, H_kv, 1, D]; they are stored in the cache first.
        """
        parts = self._build_visible_parts(layer, LayerCache(keys, values))  # prompt, texts and branches, from the cache
        grouped_queries = _group_queries(queries, keys.shape[1]) * layer.scale  # [B, H_kv, R, D]
        scores = parts.scores(grouped_queries)  # [B, H_kv, R, all keys]
        weights = layer.weights(scores, self.visibility.bias(layer))  # [B, H_kv, R, all keys]
        answer = parts.weighted_sum(weights)  # [B, H_kv, R, D]
        return answer.flatten(1, 2)[:, :, None]  # heads in one dimension, then one token: [B, H, 1, D]

    def _build_visible_parts(self, layer: AttentionLayer, new_tokens: LayerCache) -> "_VisibleParts":
        """Store the new tokens of a layer in the cache; return prompt, texts and branches, which the new tokens see."""
        return _VisibleParts(
            prompt=self.branches.texts.prompt.layers[layer.number],
            texts=self.branches.open_texts.layer(layer.number),
            branches=self._store_new_tokens(layer, new_tokens),
            table=self.tensors.table,
            key_heads=self.branches.key_heads[layer.number],
        )

    def _store_new_tokens(self, layer: AttentionLayer, new_tokens: LayerCache) -> LayerCache:
        """Store keys and values of each branch's new token in a layer's cache; return those of all its tokens.

        Returns views of the cache, [B, H_kv, longest, D], with zeros after the last token of a branch.

        new_tokens: [B, H_kv, 1, D].
        """
        cache = self.branches.layers[layer.number]
        branch_count = new_tokens.keys.shape[0]
        views = cache.beginnings(rows=branch_count, width=self.longest)
        rows = self.tensors.numbers  # [0, 1, ..., B - 1]: branch b has row b of the cache
        columns = self.lengths  # [B]: a new token comes after those that its branch had before
        views.keys[rows, :, columns] = new_tokens.keys[:, :, 0]  # [B, H_kv, D]; writing into a view fills the cache
        views.values[rows, :, columns] = new_tokens.values[:, :, 0]
        return views


@dataclass(frozen=True, slots=True, eq=False)
class _VisibleParts:
    """Keys and values of a layer that the new tokens of B branches see, in three parts.

    - `prompt` [1, H_kv, prompt, D]: common to all branches.
    - `texts` [texts, H_kv, text, D]: common to the branches of a text.
    - `branches` [B, H_kv, longest, D]: of each branch.
    - `table`: the branches in a table with a row per text.
    - `key_heads`: the numbers from 0 to H_kv - 1.
    """

    prompt: LayerCache
    texts: LayerCache
    branches: LayerCache
    table: BranchTable
    key_heads: Tensor

    def scores(self, queries: Tensor) -> Tensor:
        """Return the products of queries, [B, H_kv, R, D], and all keys: [B, H_kv, R, prompt + text + longest]."""
        prompt_scores = _multiply_by_common(queries, self.prompt.keys.mT)
        text_scores = self.table.multiply(queries, self.texts.keys.mT, self.key_heads)
        branch_scores = queries @ self.branches.keys.mT
        return torch.cat([prompt_scores, text_scores, branch_scores], -1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum of all values by their weights, [B, H_kv, R, prompt + text + longest]: [B, H_kv, R, D]."""
        lengths = [part.keys.shape[2] for part in (self.prompt, self.texts, self.branches)]
        prompt_weights, text_weights, branch_weights = torch.split(weights, lengths, -1)
        text_sum = self.table.multiply(text_weights, self.texts.values, self.key_heads)
        total = text_sum + _multiply_by_common(prompt_weights, self.prompt.values)
        total += branch_weights @ self.branches.values
        return total


def _group_queries(queries: Tensor, key_heads: int) -> Tensor:
    """Return the queries of new tokens, [B, H, 1, D], grouped by their head of keys: [B, H_kv, R, D]."""
    return queries.reshape(queries.shape[0], key_heads, -1, queries.shape[-1])


def _multiply_by_common(rows: Tensor, common: Tensor) -> Tensor:
    """Return each branch's matrix, [B, H_kv, R, X], times a common one, [1, H_kv, X, Y]: [B, H_kv, R, Y].

    There is one product per head, with B * R rows, so that `common` is not copied per branch.
    """
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ common[0]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)
