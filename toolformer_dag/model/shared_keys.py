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
        """Enlarge the cache to at least `rows` rows with room for at least `length` tokens each.

        Returns:
            A larger copy, with zeros in the new rows and columns. If the cache is large enough, the cache itself.
        """
        missing_rows = max(0, rows - self.keys.shape[0])
        missing_tokens = max(0, length - self.keys.shape[2])
        if missing_rows == 0 and missing_tokens == 0:
            return self

        # How many zeros to add (before, after) in each dimension of [rows, heads, tokens, D], the last dimension first.
        padding = (0, 0, 0, missing_tokens, 0, 0, 0, missing_rows)
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
    """

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        """Run the prompt, and store the keys and values that each layer computes for it.

        Args:
            backbone: The model.
            ids: The tokens of the prompt. May be empty.

        Raises:
            ValueError: The model has layers other than attention.
        """
        self.backbone = backbone
        self.length = len(ids)
        self.layers: Layers = {}

        # For an empty prompt an arbitrary token runs, because only a pass shows the shapes of the model's keys.
        # `_attend` then stores keys of length 0.
        arbitrary_ids = [0]
        ids_to_run = pad_sequences([ids or arbitrary_ids], backbone.device)

        # Every layer calls `_attend`, which fills `self.layers`. The features returned are not needed.
        backbone.features(ids_to_run, attend=self._attend)
        self._check_layers()

    def _check_layers(self) -> None:
        """Check that every layer of the model stored keys: layers other than attention have none.

        Raises:
            ValueError: A layer stored no keys.
        """
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
        """Make room for at least `slots` texts of at least `width` tokens.

        If more slots are needed, their number is at least doubled, so that the cache seldom has to be copied.
        """
        if slots > self.slots:
            self.slots = max(slots, 2 * self.slots)

        for layer_number, cache in self.layers.items():
            self.layers[layer_number] = cache.grown(self.slots, width)

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text."""
        return len(sequence)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run B texts after the prompt, and store their keys and values in the cache.

        Args:
            slots: For each text, the row of the cache to store it in. An earlier text in that row is overwritten.
            sequences: The tokens of each text. T is the length of the longest.
            first: The features of the tokens before this index are left out.

        Returns:
            The features (last hidden states) of the texts, [B, T - first, F].
        """
        backbone = self.prompt.backbone
        ids = pad_sequences(sequences, backbone.device)  # [B, T]
        visibility = self._build_visibility(width=ids.shape[1])

        # Every layer calls this: it stores the layer's keys and values in the slots, and computes its attention.
        attend = _TextPass(
            texts=self,
            slots=on_device(slots, ids.device),
            padding=_find_padding(sequences, ids.device),
            visibility=visibility,
        )

        positions_after_prompt = visibility.queries.expand_as(ids)  # the same T positions for each text
        features = backbone.features(ids, positions_after_prompt, attend)  # [B, T, F]
        return features[:, first:]

    def _build_visibility(self, width: int) -> Visibility:
        """Define which keys each token of a text may attend to: those at its own position and at earlier ones.

        Positions are counted from the beginning of the prompt. After a prompt of 2 tokens, a text of 3 tokens has
        positions 2, 3 and 4, and its first token attends to positions 0, 1 and 2.

        Args:
            width: The number of tokens of the longest text.
        """
        backbone = self.prompt.backbone
        prompt_length = self.prompt.length

        positions = torch.arange(prompt_length + width, device=backbone.device)  # of prompt and text
        return Visibility(
            queries=positions[prompt_length:],  # only the tokens of the text run now
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
        """Copy the first `width` tokens of the texts in some slots."""
        sorted_slots = sorted(slots)
        rows = on_device(sorted_slots, self.prompt.backbone.device)
        copied_layers = {number: cache.copy_rows(rows, width) for number, cache in self.layers.items()}
        return OpenTexts(sorted_slots, width, copied_layers)


def _find_padding(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """Find out which tokens are padding when sequences are padded on the right to the length of the longest.

    Returns:
        True for padding, such as [[False, False], [False, True]] for sequences of 2 and 1 tokens. The shape is
        [B, 1, T, 1], which fits keys [B, H_kv, T, D]. None if all sequences have the same length.
    """
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    if min(lengths) == longest:
        return None

    columns = torch.arange(longest, device=device)  # [T]
    lengths_column = on_device(lengths, device)[:, None]  # [B, 1]
    is_padding = columns >= lengths_column  # [B, T]
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
        """Compute the attention of a layer, in which B texts attend to the prompt and to themselves.

        The layer's keys and values of the texts are also stored, for branches that continue the texts later.

        Args:
            layer: The layer that calls this.
            queries: Of the T tokens of each text, [B, H, T, D].
            keys: Of the same tokens, [B, H_kv, T, D]. The keys of the prompt are in the cache already.
            values: Like `keys`.

        Returns:
            The output of the attention, [B, H, T, D].
        """
        texts = self._without_padding(LayerCache(keys, values))
        self._store_text(layer, texts)

        prompt_and_texts = self._join_with_prompt(layer, texts)  # [B, H_kv, prompt + T, D]
        if self._can_use_fused_kernel(layer):
            return _attend_by_fused_kernel(layer, queries, prompt_and_texts)

        bias = self.visibility.bias(layer)  # hides later tokens, and those outside of a window
        return attention(layer, queries, prompt_and_texts.keys, prompt_and_texts.values, bias)

    def _can_use_fused_kernel(self, layer: AttentionLayer) -> bool:
        """Return whether torch's fused kernel can compute a layer: it supports no windows, soft caps or sinks."""
        hides_by_window = self.visibility.find_limiting_locality(layer) is not None
        return layer.is_plain and not hides_by_window

    def _without_padding(self, text: LayerCache) -> LayerCache:
        """Return the keys and values of texts with zeros after the end of each text."""
        if self.padding is None:
            return text
        return LayerCache(text.keys.masked_fill(self.padding, 0), text.values.masked_fill(self.padding, 0))

    def _store_text(self, layer: AttentionLayer, text: LayerCache) -> None:
        """Write the keys and values of texts into their slots, and zeros into the rest of each slot.

        The zeros overwrite what is left of a longer text that was in the slot before.
        """
        cache = self.texts.layers[layer.number]
        unused_length = cache.keys.shape[2] - text.keys.shape[2]
        cache.keys[self.slots] = F.pad(text.keys, (0, 0, 0, unused_length))
        cache.values[self.slots] = F.pad(text.values, (0, 0, 0, unused_length))

    def _join_with_prompt(self, layer: AttentionLayer, text: LayerCache) -> LayerCache:
        """Put the keys and values of the prompt before those of each text: [B, H_kv, prompt + T, D] each."""
        prompt = self.texts.prompt.layers[layer.number]  # [1, H_kv, prompt, D] each
        batch = len(text.keys)
        keys = torch.cat([prompt.keys.expand(batch, -1, -1, -1), text.keys], 2)
        values = torch.cat([prompt.values.expand(batch, -1, -1, -1), text.values], 2)
        return LayerCache(keys, values)


def _attend_by_fused_kernel(layer: AttentionLayer, queries: Tensor, visible: LayerCache) -> Tensor:
    """Compute causal attention with torch's fused kernel, [B, H, T, D]. The last of the T queries sees all keys."""
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
        """Place each branch in the row of the text that it continues, in the next free column.

        Args:
            slots: For each branch, the slot (row of the cache) of its text, such as [5, 7, 5].
            open_slots: For each row of the table, the slot of its text, such as [5, 7]. Then branches 0 and 2 are
                in row 0, and branch 1 is in row 1.
            device: Where to create the tensors.
        """
        row_of_slot = {slot: row for row, slot in enumerate(open_slots)}
        row_of_branch = [row_of_slot[slot] for slot in slots]  # in the example: [0, 1, 0]
        column_of_branch = _assign_columns(row_of_branch)  # [0, 0, 1]

        one_branch_per_row = list(range(len(open_slots)))
        self.is_plain = row_of_branch == one_branch_per_row

        self.text = on_device(row_of_branch, device)[:, None]  # [B, 1]
        self.column = on_device(column_of_branch, device)[:, None]  # [B, 1]
        column_count = max(column_of_branch) + 1
        self.branch_of_cell = self._build_cells(len(open_slots), column_count)  # [[[0, 2]], [[1, 0]]]

    def _build_cells(self, row_count: int, column_count: int) -> Tensor:
        """Build the table: the number of the branch in each cell, and 0 in empty cells, [texts, 1, columns]."""
        branch_numbers = torch.arange(len(self.text), device=self.text.device)
        cells = branch_numbers.new_zeros(row_count, 1, column_count)
        cells[self.text, 0, self.column] = branch_numbers[:, None]
        return cells

    def multiply(self, rows: Tensor, shared: Tensor, heads: Tensor) -> Tensor:
        """Multiply a matrix of each branch by a matrix of the text that it continues.

        The matrices of all branches of a text are joined and multiplied at once, so that the matrix of the text need
        not be copied for each branch.

        Args:
            rows: One matrix per branch, [B, H_kv, R, X].
            shared: One matrix per text, [texts, H_kv, X, Y].
            heads: The numbers from 0 to H_kv - 1.

        Returns:
            For each branch `rows[branch] @ shared[its text]`, [B, H_kv, R, Y].
        """
        if self.is_plain:  # text b has the single branch b
            return rows @ shared

        # Put the matrix of each branch into its cell of the table: [texts, H_kv, columns, R, X].
        matrices_in_table = rows[self.branch_of_cell, heads[:, None]]

        # Join the cells of a row, multiply, and split the product into cells again: [texts, H_kv, columns, R, Y].
        products = matrices_in_table.flatten(2, 3) @ shared  # [texts, H_kv, columns * R, Y]
        products_in_table = products.view(*matrices_in_table.shape[:-1], -1)

        # Take the product of each branch out of its cell.
        return products_in_table[self.text, heads, self.column]


def _assign_columns(rows: Sequence[int]) -> list[int]:
    """Assign each entry the next free column of its row: entries in rows [0, 1, 0] get columns [0, 0, 1]."""
    entry_count_by_row = Counter[int]()
    columns = []
    for row in rows:
        columns.append(entry_count_by_row[row])
        entry_count_by_row[row] += 1
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
    - `step_tensors`: the tensors that all steps use; None before the first branch.
    - `tokens_run`: how many tokens the last step ran.

    `open_texts` and `step_tensors` follow from `branches`, and are replaced with them unless none is left
    (`_set_branches`).
    """

    def __init__(self, texts: CachedTexts, capacity: int, max_tokens: int) -> None:
        """Allocate a cache for branches. There are no branches yet.

        Args:
            texts: The cached texts that the branches will continue.
            capacity: How many branches there is room for.
            max_tokens: How many tokens of each branch there is room for at first. `step` makes more room.
        """
        self.texts = texts
        self.backbone = texts.prompt.backbone
        self.device = self.backbone.device

        # By number of the layer, with the shapes and the data type of the prompt's cache.
        prompt_layers = texts.prompt.layers
        self.layers: Layers = {number: cache.zeros(capacity, max_tokens) for number, cache in prompt_layers.items()}
        self.key_heads = {number: cache.head_numbers() for number, cache in prompt_layers.items()}

        self.branches: list[Branch] = []  # branch b is in row b of the tensors in `layers`
        self.lengths: list[int] = []  # for each branch, how many of its tokens have run
        self.tokens_run = 0  # in the last step

        # These follow from the branches.
        self.open_texts = NO_TEXTS  # the texts that the branches continue
        self.step_tensors: StepTensors | None = None  # None before there are branches

    @property
    def count(self) -> int:
        """The number of branches."""
        return len(self.branches)

    def admit(self, slots: Sequence[int], tokens_before: Sequence[int]) -> None:
        """Start branches, which continue cached texts. They have no tokens of their own yet.

        Args:
            slots: For each new branch, the slot (row of the cache) of the text that it continues.
            tokens_before: For each new branch, how many tokens of this text come before it.
        """
        new_branches = [Branch(slot, before) for slot, before in zip(slots, tokens_before, strict=True)]
        new_lengths = [0] * len(new_branches)

        # The new branches get the next rows of the cache, which earlier branches may have used.
        self._clear_rows(slice(self.count, self.count + len(new_branches)))

        # By now some slots may hold other texts, so that copies made for earlier steps are out of date.
        self.open_texts = NO_TEXTS
        self._set_branches(self.branches + new_branches, self.lengths + new_lengths)

    def _clear_rows(self, rows: slice) -> None:
        """Set the keys and values in these rows to zero."""
        for cache in self.layers.values():
            cache.keys[rows] = 0
            cache.values[rows] = 0

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run texts after the prompt, and start a branch at the end of each text.

        The caches of texts and of branches grow if the new ones do not fit.

        Returns:
            The features (last hidden state) of the last token of each text, [texts, F].
        """
        lengths = [len(sequence) for sequence in sequences]
        new_slots = self._allocate_slots(len(lengths), width=max(lengths))
        features = self.texts.features(new_slots, sequences, first=0)  # [texts, T, F]
        self.admit(new_slots, tokens_before=lengths)

        text_indices = range(len(lengths))
        last_token_indices = on_device(lengths, features.device) - 1
        return features[text_indices, last_token_indices]

    def _allocate_slots(self, text_count: int, width: int) -> list[int]:
        """Choose slots for new texts that no branch uses, and enlarge the caches where they may be too small.

        Args:
            text_count: The number of slots that are needed.
            width: The number of tokens of the longest new text.
        """
        used_slots = {branch.slot for branch in self.branches}
        self.texts.grow(slots=self.count + text_count, width=width)

        # As many rows for branches as there are slots for texts. Length 0 means that rows do not get longer.
        for layer_number, cache in self.layers.items():
            self.layers[layer_number] = cache.grown(rows=self.texts.slots, length=0)

        free_slots = sorted(set(range(self.texts.slots)) - used_slots)
        return free_slots[:text_count]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each branch, and run these tokens.

        Their keys and values are added to the cache.

        Args:
            tokens: The next token of each branch, [B].

        Returns:
            The features (last hidden states) of the new tokens, [B, F].
        """
        assert self.step_tensors is not None  # there are branches

        longest = max(self.lengths) + 1  # with the new token
        self._grow_to(longest)

        # Every layer calls `attend_in_step`: it stores the new keys and values, and computes the layer's attention.
        attend_in_step = _BranchStep(self, self.step_tensors, longest)
        positions = attend_in_step.visibility.queries  # of the new tokens, [B, 1]
        features = self.backbone.features(tokens[:, None], positions, attend=attend_in_step)  # [B, 1, F]

        self.lengths = [length + 1 for length in self.lengths]  # `_BranchStep` has read the old ones
        self.tokens_run = len(tokens)
        return features[:, 0]

    def _grow_to(self, length: int) -> None:
        """Double the number of tokens per branch that fit into the cache, if fewer than `length` fit."""
        for layer_number, cache in self.layers.items():
            max_tokens = cache.keys.shape[2]
            if max_tokens < length:
                self.layers[layer_number] = cache.grown(rows=0, length=2 * max_tokens)  # 0: no more rows

    def select(self, rows: Sequence[int]) -> None:
        """Replace the branches: new branch b continues old branch `rows[b]`. A branch may occur twice."""
        self._copy_moved_rows(rows)
        branches = [self.branches[row] for row in rows]
        self._set_branches(branches, [self.lengths[row] for row in rows])

    def _copy_moved_rows(self, rows: Sequence[int]) -> None:
        """Copy row `rows[b]` of the caches to row b, for every b whose row changes."""
        moved_rows = [(new, old) for new, old in enumerate(rows) if new != old]
        if not moved_rows:
            return

        new_rows, old_rows = on_device(moved_rows, self.device).T
        for cache in self.layers.values():
            # Indexing by a tensor copies the old rows before any of them is overwritten.
            cache.keys[new_rows] = cache.keys[old_rows]
            cache.values[new_rows] = cache.values[old_rows]

    def branch(self, row: int) -> "CachedBranches":
        """Return a copy of branch number `row` alone. Running it changes neither this object nor its caches."""
        copied = copy(self)
        copied.layers = {}
        for number, cache in self.layers.items():
            copied.layers[number] = LayerCache(cache.keys[[row]], cache.values[[row]])  # copies of one row
        copied._set_branches([self.branches[row]], [self.lengths[row]])
        return copied

    def _set_branches(self, branches: list[Branch], lengths: list[int]) -> None:
        """Replace the branches, and update `open_texts` and `step_tensors`, which follow from them.

        Args:
            branches: The new branches, which may be none.
            lengths: For each branch, how many of its tokens have run.
        """
        self.branches = branches
        self.lengths = lengths
        if not branches:
            return  # there is no step, which alone would use the rest, until this is called again

        slots = {branch.slot for branch in branches}
        longest_beginning = max(branch.tokens_before for branch in branches)
        self.open_texts = self._choose_open_texts(slots, width=longest_beginning)
        self.step_tensors = self._build_step_tensors()  # reads `self.branches` and `self.open_texts`

    def _build_step_tensors(self) -> StepTensors:
        """Build the tensors that stay the same in all steps of the present branches.

        For example, after a prompt of 10 tokens, two branches that continue the first 3 and the first 8 tokens of
        a text start at positions [[13], [18]]. The positions of prompt and text are then 0 to 17.
        """
        prompt_length = self.texts.prompt.length
        slots = [branch.slot for branch in self.branches]
        starts = [prompt_length + branch.tokens_before for branch in self.branches]  # positions
        shared_width = prompt_length + self.open_texts.width  # how many tokens of prompt and text are read

        return StepTensors(
            table=BranchTable(slots, self.open_texts.slots, self.device),
            numbers=torch.arange(self.count, device=self.device),
            starts=on_device(starts, self.device)[:, None],
            shared_positions=torch.arange(shared_width, device=self.device).expand(self.count, -1),
        )

    def _choose_open_texts(self, slots: set[int], width: int) -> OpenTexts:
        """Choose the cached texts whose keys the next steps read: the needed ones, and perhaps others.

        The needed texts can be read alone only after they are copied. If they are more than half of the texts that
        can be read without a copy, all of these are read instead.

        Args:
            slots: The rows of the cache with the needed texts.
            width: How many tokens of each text are needed.
        """
        needed_count = len(slots)

        most_open_texts_are_needed = 2 * needed_count > len(self.open_texts.slots)
        if most_open_texts_are_needed and self.open_texts.holds(slots, width):
            return self.open_texts  # unchanged

        most_texts_are_needed = 2 * needed_count > self.texts.slots
        if most_texts_are_needed:
            return self.texts.open_all_texts(width)

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
        """Define which keys the new token of each branch sees: the prompt, its text up to the branch, and the branch.

        The keys have one column per token of the prompt, then of the longest text, then of the longest branch.

        Example:
            The prompt has 1 token, the longest text 3 and the longest branch 3. A branch that starts after the first
            token of its text, and whose second token is new, sees the columns marked 1 in [1 | 1 0 0 | 1 1 0].
        """
        starts = self.tensors.starts  # the position of each branch's first token, [B, 1]; in the example: 2
        new_positions = starts + self.lengths[:, None]  # of the new tokens, [B, 1]: 3

        # Of the prompt and text, a branch sees what comes before its start.
        shared_positions = self.tensors.shared_positions  # [B, prompt + text]: 0 to 3
        sees_shared = shared_positions < starts

        # Of the branch, it sees the tokens up to the new one.
        branch_positions = starts + torch.arange(self.longest, device=starts.device)  # [B, longest]: 2 to 4
        sees_branch = branch_positions <= new_positions

        return Visibility(
            queries=new_positions,
            keys=torch.cat([shared_positions, branch_positions], 1),  # [B, prompt + text + longest]
            longest=self._measure_longest_sequence(),
            dtype=self.branches.backbone.model.dtype,
            seen=torch.cat([sees_shared, sees_branch], 1)[:, None],  # for one new token per branch: [B, 1, keys]
        )

    def _measure_longest_sequence(self) -> int:
        """Count the tokens of the longest sequence: prompt, beginning of the text, and branch with its new token."""
        branches_with_lengths = zip(self.branches.branches, self.branches.lengths, strict=True)
        lengths_after_prompt = [branch.tokens_before + length for branch, length in branches_with_lengths]
        return self.branches.texts.prompt.length + max(lengths_after_prompt) + 1

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute the attention of a layer for the new token of each branch, after storing its key and value.

        Args:
            layer: The layer that calls this.
            queries: Of the new tokens, [B, H, 1, D]. Every R = H / H_kv heads of queries share a head of keys.
            keys: Of the new tokens, [B, H_kv, 1, D].
            values: Like `keys`.

        Returns:
            The output of the attention, [B, H, 1, D].
        """
        visible_parts = self._build_visible_parts(layer, LayerCache(keys, values))  # stores the new keys and values

        scaled_queries = _group_queries(queries, keys.shape[1]) * layer.scale  # [B, H_kv, R, D]
        scores = visible_parts.scores(scaled_queries)  # [B, H_kv, R, all keys]
        weights = layer.weights(scores, self.visibility.bias(layer))  # [B, H_kv, R, all keys]
        output = visible_parts.weighted_sum(weights)  # [B, H_kv, R, D]

        return output.flatten(1, 2)[:, :, None]  # joins the groups of heads, and adds the dimension of the one token

    def _build_visible_parts(self, layer: AttentionLayer, new_tokens: LayerCache) -> "_VisibleParts":
        """Store the new tokens of a layer in the cache, and collect what they see: prompt, texts and branches."""
        return _VisibleParts(
            prompt=self.branches.texts.prompt.layers[layer.number],
            texts=self.branches.open_texts.layer(layer.number),
            branches=self._store_new_tokens(layer, new_tokens),
            table=self.tensors.table,
            key_heads=self.branches.key_heads[layer.number],
        )

    def _store_new_tokens(self, layer: AttentionLayer, new_tokens: LayerCache) -> LayerCache:
        """Store the key and value of the new token of each branch in the cache of a layer.

        Args:
            layer: The layer.
            new_tokens: The keys and values of the new tokens, [B, H_kv, 1, D] each.

        Returns:
            Views of the cache with all tokens of the branches, the new ones included, [B, H_kv, longest, D] each.
            They are zero after the last token of a branch.
        """
        cache = self.branches.layers[layer.number]
        branch_count = new_tokens.keys.shape[0]
        views = cache.beginnings(rows=branch_count, width=self.longest)

        rows = self.tensors.numbers  # branch b is in row b
        columns = self.lengths  # the new token of a branch comes after its earlier tokens
        # Writing into the views changes the cache.
        views.keys[rows, :, columns] = new_tokens.keys[:, :, 0]  # [B, H_kv, D]
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
        """Multiply queries [B, H_kv, R, D] by all visible keys: [B, H_kv, R, prompt + text + longest]."""
        prompt_scores = _multiply_by_common(queries, self.prompt.keys.mT)
        text_scores = self.table.multiply(queries, self.texts.keys.mT, self.key_heads)
        branch_scores = queries @ self.branches.keys.mT
        return torch.cat([prompt_scores, text_scores, branch_scores], -1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Add up all visible values, each multiplied by its weight.

        Args:
            weights: Of all keys for each query, [B, H_kv, R, prompt + text + longest].

        Returns:
            The sums, [B, H_kv, R, D].
        """
        part_lengths = [part.keys.shape[2] for part in (self.prompt, self.texts, self.branches)]
        prompt_weights, text_weights, branch_weights = torch.split(weights, part_lengths, -1)

        text_sum = self.table.multiply(text_weights, self.texts.values, self.key_heads)
        total = text_sum + _multiply_by_common(prompt_weights, self.prompt.values)
        total += branch_weights @ self.branches.values
        return total


def _group_queries(queries: Tensor, key_heads: int) -> Tensor:
    """Return the queries of new tokens, [B, H, 1, D], grouped by their head of keys: [B, H_kv, R, D]."""
    return queries.reshape(queries.shape[0], key_heads, -1, queries.shape[-1])


def _multiply_by_common(rows: Tensor, common: Tensor) -> Tensor:
    """Multiply a matrix of each branch by a matrix that is the same for all branches.

    The matrices of all branches are joined to one per head, so that `common` is not copied for each branch.

    Args:
        rows: One matrix per branch, [B, H_kv, R, X].
        common: The common matrix, [1, H_kv, X, Y].

    Returns:
        The product for each branch, [B, H_kv, R, Y].
    """
    batch, heads, repeats, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, batch * repeats, width) @ common[0]  # [H_kv, B * R, Y]
    return product.view(heads, batch, repeats, -1).transpose(0, 1)
