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
    compute_causal_attention,
    compute_masked_attention,
    create_tensor,
    pad_sequences,
)
from toolformer_dag.model.backbone import Backbone


class LayerCache(NamedTuple):
    """The cached keys and values of a layer.

    Attributes:
        keys: The keys, [B, H_kv, T, D].
        values: The values in the same shape, where D may be another number.
    """

    keys: Tensor
    values: Tensor

    def build_head_indices(self) -> Tensor:
        """Return the numbers of the heads of keys, from 0 to H_kv - 1."""
        return torch.arange(self.keys.shape[1], device=self.keys.device)

    def create_zeros(self, row_count: int, token_count: int) -> "LayerCache":
        """Create a cache of zeros for other sequences, with the same heads and data type.

        Memory that is not set could hold NaN, which a mask does not hide.
        """
        keys = self.keys.new_zeros(row_count, self.keys.shape[1], token_count, self.keys.shape[3])
        values = self.values.new_zeros(row_count, self.values.shape[1], token_count, self.values.shape[3])
        return LayerCache(keys, values)

    def enlarge(self, min_rows: int, min_tokens: int) -> "LayerCache":
        """Enlarge the cache to at least `min_rows` rows with room for at least `min_tokens` tokens each.

        Returns:
            A larger copy, with zeros in the new rows and columns. If the cache is large enough, the cache itself.
        """
        missing_rows = max(0, min_rows - self.keys.shape[0])
        missing_tokens = max(0, min_tokens - self.keys.shape[2])
        if missing_rows == 0 and missing_tokens == 0:
            return self

        # How many zeros to add (before, after) in each dimension of [rows, heads, tokens, D], the last dimension first.
        padding = (0, 0, 0, missing_tokens, 0, 0, 0, missing_rows)
        return LayerCache(F.pad(self.keys, padding), F.pad(self.values, padding))

    def slice_tokens(self, token_count: int) -> "LayerCache":
        """Return views of the first `token_count` tokens of each row."""
        return LayerCache(self.keys[:, :, :token_count], self.values[:, :, :token_count])

    def slice_rows(self, row_count: int, token_count: int) -> "LayerCache":
        """Return views of the first `token_count` tokens of the first `row_count` rows."""
        return LayerCache(self.keys[:row_count, :, :token_count], self.values[:row_count, :, :token_count])

    def copy_rows(self, row_indices: Tensor, token_count: int) -> "LayerCache":
        """Return copies of the first `token_count` tokens of some rows."""
        return LayerCache(self.keys[row_indices, :, :token_count], self.values[row_indices, :, :token_count])


LayerCaches = dict[int, LayerCache]
"""The caches of a model by the number of the layer."""


class CachedPrompt:
    """The tokens before all texts, with cached keys and values. It may be empty.

    Attributes:
        backbone: The model.
        token_count: The number of tokens.
        caches_by_layer: Keys and values by layer, with a single row each.
    """

    def __init__(self, backbone: Backbone, prompt_ids: Sequence[int]) -> None:
        """Run the prompt, and store the keys and values that each layer computes for it.

        Args:
            backbone: The model.
            prompt_ids: The tokens of the prompt. May be empty.

        Raises:
            ValueError: The model has layers other than attention.
        """
        self.backbone = backbone
        self.token_count = len(prompt_ids)
        self.caches_by_layer: LayerCaches = {}

        # For an empty prompt an arbitrary token runs, because only a pass shows the shapes of the model's keys.
        # `_attend_and_store` then stores keys of length 0.
        arbitrary_ids = [0]
        ids_to_run = pad_sequences([prompt_ids or arbitrary_ids], backbone.device)

        # Every layer calls `_attend_and_store`, which fills `self.caches_by_layer`. The features are not needed.
        backbone.compute_features(ids_to_run, attention_function=self._attend_and_store)
        self._check_layers()

    def _check_layers(self) -> None:
        """Check that every layer of the model stored keys: layers other than attention have none.

        Raises:
            ValueError: A layer stored no keys.
        """
        layer_count = self.backbone.model.config.get_text_config().num_hidden_layers
        if len(self.caches_by_layer) != layer_count:
            raise ValueError(f"{len(self.caches_by_layer)} of {layer_count} layers are attention")

    def create_text_cache(self, slot_count: int, max_text_tokens: int) -> "CachedTexts":
        """Allocate a cache for `slot_count` texts of at most `max_text_tokens` tokens after this prompt."""
        return CachedTexts(self, slot_count, max_text_tokens)

    def _attend_and_store(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend causally, and store the keys and values of the prompt's tokens, [1, H_kv, T, D] each."""
        prompt_keys = keys[:, :, : self.token_count].contiguous()
        prompt_values = values[:, :, : self.token_count].contiguous()
        self.caches_by_layer[layer.index] = LayerCache(prompt_keys, prompt_values)
        return compute_causal_attention(layer, queries, keys, values)


class CachedTexts:
    """Keys and values of texts after a cached prompt.

    A slot is the row of a text in the cache. A later text overwrites it.

    Attributes:
        cached_prompt: The cached tokens before every text.
        slot_count: The number of slots.
        caches_by_layer: Keys and values by layer, with a row per slot. They are zero after the end of a text, because a
            mask hides keys, but not NaN or infinity in them.
    """

    def __init__(self, cached_prompt: CachedPrompt, slot_count: int, max_text_tokens: int) -> None:
        self.cached_prompt = cached_prompt
        self.slot_count = slot_count
        self.caches_by_layer: LayerCaches = {
            number: cache.create_zeros(slot_count, max_text_tokens)
            for number, cache in cached_prompt.caches_by_layer.items()
        }

    def enlarge(self, min_slots: int, min_text_tokens: int) -> None:
        """Make room for at least `min_slots` texts of at least `min_text_tokens` tokens.

        If more slots are needed, their number is at least doubled, so that the cache seldom has to be copied.
        """
        if min_slots > self.slot_count:
            self.slot_count = max(min_slots, 2 * self.slot_count)

        for layer_number, cache in self.caches_by_layer.items():
            self.caches_by_layer[layer_number] = cache.enlarge(self.slot_count, min_text_tokens)

    def count_tokens_to_run(self, token_ids: Sequence[int]) -> int:
        """Count the tokens that `run_texts` runs for a text."""
        return len(token_ids)

    def run_texts(
        self, slots: Sequence[int], token_sequences: Sequence[Sequence[int]], first_token_index: int
    ) -> Tensor:
        """Run B texts after the prompt, and store their keys and values in the cache.

        Args:
            slots: For each text, the row of the cache to store it in. An earlier text in that row is overwritten.
            token_sequences: The tokens of each text. T is the length of the longest.
            first_token_index: The features of the tokens before this index are left out.

        Returns:
            The features (last hidden states) of the texts, [B, T - first_token_index, F].
        """
        backbone = self.cached_prompt.backbone
        input_ids = pad_sequences(token_sequences, backbone.device)  # [B, T]
        visibility = self._build_visibility(text_width=input_ids.shape[1])

        # Every layer calls this: it stores the layer's keys and values in the slots, and computes its attention.
        text_pass = _TextPass(
            cached_texts=self,
            slots=create_tensor(slots, input_ids.device),
            padding_mask=_build_padding_mask(token_sequences, input_ids.device),
            visibility=visibility,
        )

        positions_after_prompt = visibility.query_positions.expand_as(input_ids)  # the same T positions for each text
        features = backbone.compute_features(input_ids, positions_after_prompt, text_pass)  # [B, T, F]
        return features[:, first_token_index:]

    def _build_visibility(self, text_width: int) -> Visibility:
        """Define which keys each token of a text may attend to: those at its own position and at earlier ones.

        Positions are counted from the beginning of the prompt. After a prompt of 2 tokens, a text of 3 tokens has
        positions 2, 3 and 4, and its first token attends to positions 0, 1 and 2.

        Args:
            text_width: The number of tokens of the longest text.
        """
        backbone = self.cached_prompt.backbone
        prompt_length = self.cached_prompt.token_count

        positions = torch.arange(prompt_length + text_width, device=backbone.device)  # of prompt and text
        return Visibility(
            query_positions=positions[prompt_length:],  # only the tokens of the text run now
            key_positions=positions,
            longest_sequence_length=len(positions),
            dtype=backbone.model.dtype,
        )

    def create_branch_cache(self, max_branches: int, max_tokens: int) -> "CachedBranches":
        """Allocate a cache for up to `max_branches` branches of `max_tokens` tokens each.

        `CachedBranches.start_branches` starts the branches, which are continuations of texts.
        """
        return CachedBranches(self, max_branches, max_tokens)

    def open_all_texts(self, token_count: int) -> "OpenTexts":
        """Return all slots of the cache, without a copy, to be read up to `token_count` tokens."""
        return OpenTexts(range(self.slot_count), token_count, self.caches_by_layer)

    def copy_texts(self, slots: Iterable[int], token_count: int) -> "OpenTexts":
        """Copy the first `token_count` tokens of the texts in some slots."""
        sorted_slots = sorted(slots)
        rows = create_tensor(sorted_slots, self.cached_prompt.backbone.device)
        copied_caches = {layer: cache.copy_rows(rows, token_count) for layer, cache in self.caches_by_layer.items()}
        return OpenTexts(sorted_slots, token_count, copied_caches)


def _build_padding_mask(token_sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """Find out which tokens are padding when sequences are padded on the right to the length of the longest.

    Returns:
        True for padding, such as [[False, False], [False, True]] for sequences of 2 and 1 tokens. The shape is
        [B, 1, T, 1], which fits keys [B, H_kv, T, D]. None if all sequences have the same length.
    """
    lengths = [len(sequence) for sequence in token_sequences]
    longest_length = max(lengths)
    if min(lengths) == longest_length:
        return None

    columns = torch.arange(longest_length, device=device)  # [T]
    lengths_column = create_tensor(lengths, device)[:, None]  # [B, 1]
    is_padding = columns >= lengths_column  # [B, T]
    return is_padding[:, None, :, None]


@dataclass(frozen=True, eq=False)
class _TextPass:
    """The attention of a pass that runs texts: it stores their keys and values, and attends to prompt and text.

    Attributes:
        cached_texts: The cache that they are stored in.
        slots: The row of the cache for each text, [B].
        padding_mask: Whether a token is after the end of its text, [B, 1, T, 1]. None if all have the same length.
        visibility: Which tokens each token sees, by their positions.
    """

    cached_texts: CachedTexts
    slots: Tensor
    padding_mask: Tensor | None
    visibility: Visibility

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute the attention of a layer, in which B texts attend to the prompt and to themselves.

        The layer's keys and values of the texts are also stored, for branches that continue the texts later.

        Args:
            layer: The layer that calls this.
            queries: The queries of the T tokens of each text, [B, H, T, D].
            keys: The keys of the same tokens, [B, H_kv, T, D]. The keys of the prompt are in the cache already.
            values: The values of the same tokens, in the shape of the keys.

        Returns:
            The output of the attention, [B, H, T, D].
        """
        text_cache = self._clear_padding(LayerCache(keys, values))
        self._store_texts(layer, text_cache)

        visible_cache = self._join_with_prompt(layer, text_cache)  # keys and values, [B, H_kv, prompt + T, D] each
        if self._can_use_fused_kernel(layer):
            return _attend_by_fused_kernel(layer, queries, visible_cache)

        bias = self.visibility.get_attention_bias(layer)  # hides later tokens, and those outside of a window
        return compute_masked_attention(layer, queries, visible_cache.keys, visible_cache.values, bias)

    def _can_use_fused_kernel(self, layer: AttentionLayer) -> bool:
        """Return whether torch's fused kernel can compute a layer: it supports no windows, soft caps or sinks."""
        hides_by_window = self.visibility.find_limiting_locality(layer) is not None
        return layer.has_plain_softmax and not hides_by_window

    def _clear_padding(self, text_cache: LayerCache) -> LayerCache:
        """Return the keys and values of texts with zeros after the end of each text."""
        if self.padding_mask is None:
            return text_cache
        return LayerCache(
            text_cache.keys.masked_fill(self.padding_mask, 0), text_cache.values.masked_fill(self.padding_mask, 0)
        )

    def _store_texts(self, layer: AttentionLayer, text_cache: LayerCache) -> None:
        """Write the keys and values of texts into their slots, and zeros into the rest of each slot.

        The zeros overwrite what is left of a longer text that was in the slot before.
        """
        cache = self.cached_texts.caches_by_layer[layer.index]
        unused_length = cache.keys.shape[2] - text_cache.keys.shape[2]
        cache.keys[self.slots] = F.pad(text_cache.keys, (0, 0, 0, unused_length))
        cache.values[self.slots] = F.pad(text_cache.values, (0, 0, 0, unused_length))

    def _join_with_prompt(self, layer: AttentionLayer, text_cache: LayerCache) -> LayerCache:
        """Put the keys and values of the prompt before those of each text: [B, H_kv, prompt + T, D] each."""
        prompt = self.cached_texts.cached_prompt.caches_by_layer[layer.index]  # [1, H_kv, prompt, D] each
        batch = len(text_cache.keys)
        keys = torch.cat([prompt.keys.expand(batch, -1, -1, -1), text_cache.keys], 2)
        values = torch.cat([prompt.values.expand(batch, -1, -1, -1), text_cache.values], 2)
        return LayerCache(keys, values)


def _attend_by_fused_kernel(layer: AttentionLayer, queries: Tensor, visible_cache: LayerCache) -> Tensor:
    """Compute causal attention with torch's fused kernel, [B, H, T, D]. The last of the T queries sees all keys."""
    mask = causal_lower_right(queries.shape[2], visible_cache.keys.shape[2])
    return F.scaled_dot_product_attention(
        queries, visible_cache.keys, visible_cache.values, attn_mask=mask, scale=layer.scale, enable_gqa=True
    )


class BranchTable:
    """A table with B branches in its cells, and a row per text, so that a text's keys are multiplied once for its row.

    With branches 0 and 2 of text 0, and branch 1 of text 1, the rows are [0, 2] and [1, -]. The values in this example:

    Attributes:
        row_by_branch: The row of each branch, [B, 1]: [[0], [1], [0]].
        column_by_branch: The column of each branch, [B, 1]: [[0], [0], [1]].
        branch_by_cell: The branch in each cell, [texts, 1, columns]: [[[0, 2]], [[1, 0]]]. An empty cell has branch 0,
            and its product is not read.
        has_one_branch_per_row: Whether row t has the single branch t, for all rows, so that no table is needed: False.
    """

    def __init__(self, slot_by_branch: Sequence[int], slot_by_row: Sequence[int], device: torch.device) -> None:
        """Place each branch in the row of the text that it continues, in the next free column.

        Args:
            slot_by_branch: For each branch, the slot (row of the cache) of its text, such as [5, 7, 5].
            slot_by_row: For each row of the table, the slot of its text, such as [5, 7]. Then branches 0 and 2 are
                in row 0, and branch 1 is in row 1.
            device: Where to create the tensors.
        """
        row_of_slot = {slot: row for row, slot in enumerate(slot_by_row)}
        row_of_branch = [row_of_slot[slot] for slot in slot_by_branch]  # in the example: [0, 1, 0]
        column_of_branch = _assign_columns(row_of_branch)  # [0, 0, 1]

        one_branch_per_row = list(range(len(slot_by_row)))
        self.has_one_branch_per_row = row_of_branch == one_branch_per_row

        self.row_by_branch = create_tensor(row_of_branch, device)[:, None]  # [B, 1]
        self.column_by_branch = create_tensor(column_of_branch, device)[:, None]  # [B, 1]
        column_count = max(column_of_branch) + 1
        # [rows, 1, columns], in the example [[[0, 2]], [[1, 0]]]. The last 0 fills an empty cell, which nobody reads.
        self.branch_by_cell = self._build_cells(len(slot_by_row), column_count)

    def _build_cells(self, row_count: int, column_count: int) -> Tensor:
        """Build the table: the number of the branch in each cell, and 0 in empty cells, [texts, 1, columns]."""
        branch_numbers = torch.arange(len(self.row_by_branch), device=self.row_by_branch.device)
        cells = branch_numbers.new_zeros(row_count, 1, column_count)
        cells[self.row_by_branch, 0, self.column_by_branch] = branch_numbers[:, None]
        return cells

    def multiply_matrices(self, branch_matrices: Tensor, text_matrices: Tensor, head_indices: Tensor) -> Tensor:
        """Multiply a matrix of each branch by a matrix of the text that it continues.

        The matrices of all branches of a text are joined and multiplied at once, so that the matrix of the text need
        not be copied for each branch.

        Args:
            branch_matrices: One matrix per branch, [B, H_kv, R, X].
            text_matrices: One matrix per text, [texts, H_kv, X, Y].
            head_indices: The numbers from 0 to H_kv - 1.

        Returns:
            For each branch its matrix multiplied by the matrix of its text, [B, H_kv, R, Y].
        """
        if self.has_one_branch_per_row:  # text b has the single branch b
            return branch_matrices @ text_matrices

        # Put the matrix of each branch into its cell of the table: [texts, H_kv, columns, R, X].
        matrices_in_table = branch_matrices[self.branch_by_cell, head_indices[:, None]]

        # Join the cells of a row, multiply, and split the product into cells again: [texts, H_kv, columns, R, Y].
        products = matrices_in_table.flatten(2, 3) @ text_matrices  # [texts, H_kv, columns * R, Y]
        products_in_table = products.view(*matrices_in_table.shape[:-1], -1)

        # Take the product of each branch out of its cell.
        return products_in_table[self.row_by_branch, head_indices, self.column_by_branch]


def _assign_columns(entry_rows: Sequence[int]) -> list[int]:
    """Assign each entry the next free column of its row: entries in rows [0, 1, 0] get columns [0, 0, 1]."""
    entry_count_by_row = Counter[int]()
    columns = []
    for row in entry_rows:
        columns.append(entry_count_by_row[row])
        entry_count_by_row[row] += 1
    return columns


@dataclass(frozen=True, slots=True, eq=False)
class OpenTexts:
    """The texts whose keys and values the next steps of branches multiply.

    Attributes:
        slots: Their rows in the cache of texts. `slots[r]` belongs to row r of `caches_by_layer`.
        token_count: How many tokens of each are multiplied.
        caches_by_layer: Their keys and values by layer: the cache of all texts itself, or copies of some of its rows.
    """

    slots: Sequence[int]
    token_count: int
    caches_by_layer: LayerCaches

    def has_texts(self, slots: set[int], token_count: int) -> bool:
        """Return whether the first `token_count` tokens of the texts in all these slots are open."""
        return slots <= set(self.slots) and token_count <= self.token_count

    def get_layer_cache(self, layer_index: int) -> LayerCache:
        """Return keys and values of the texts in a layer, [texts, H_kv, token_count, D] each."""
        return self.caches_by_layer[layer_index].slice_tokens(self.token_count)


NO_OPEN_TEXTS = OpenTexts(slots=(), token_count=0, caches_by_layer={})


class Branch(NamedTuple):
    """A continuation of the beginning of a cached text.

    Attributes:
        slot: The row of the text in the cache of texts.
        token_count_before: How many tokens of the text stand before the branch.
    """

    slot: int
    token_count_before: int


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """The tensors that all steps of B branches use, until branches come or go.

    Attributes:
        branch_table: The branches in a table with a row per text.
        branch_numbers: The numbers from 0 to B - 1, [B].
        start_positions: The position of each branch's first token, [B, 1]. After a prompt of 10 tokens, a branch that
            continues the first 3 tokens of its text starts at position 13.
        shared_positions: The positions of the tokens before branches, [B, prompt + text]: 0, 1, 2 and so on in every
            row.
    """

    branch_table: BranchTable
    branch_numbers: Tensor
    start_positions: Tensor
    shared_positions: Tensor


class CachedBranches:
    """Branches: continuations of cached texts, which all get one token per step. They may begin at different steps.

    `open_texts` and `step_tensors` follow from `branches`, and are replaced with them unless none is left
    (`_set_branches`).

    Attributes:
        cached_texts: The cache of texts that the branches continue.
        backbone: The model.
        device: Where the model runs.
        branches: The branches by number. `start_branches` and `add_sequences` append to them, `select_branches` numbers
            them anew.
        branch_lengths: How many tokens of each branch have run.
        caches_by_layer: Keys and values of the branches' tokens by layer: row b is branch b. Rows without a branch, and
            columns after a branch's last token, are zero.
        head_indices_by_layer: By layer, the numbers from 0 to H_kv - 1, [H_kv].
        open_texts: The texts whose keys the steps multiply.
        step_tensors: The tensors that all steps use, or None before the first branch.
        last_step_token_count: How many tokens the last step ran.
    """

    def __init__(self, cached_texts: CachedTexts, max_branches: int, max_tokens: int) -> None:
        """Allocate a cache for branches. There are no branches yet.

        Args:
            cached_texts: The cached texts that the branches will continue.
            max_branches: How many branches there is room for.
            max_tokens: How many tokens of each branch there is room for at first. `run_next_tokens` makes more room.
        """
        self.cached_texts = cached_texts
        self.backbone = cached_texts.cached_prompt.backbone
        self.device = self.backbone.device

        # By number of the layer, with the shapes and the data type of the prompt's cache.
        prompt_layers = cached_texts.cached_prompt.caches_by_layer
        self.caches_by_layer: LayerCaches = {
            number: cache.create_zeros(max_branches, max_tokens) for number, cache in prompt_layers.items()
        }
        # The numbers of the heads of keys, with which a step picks matrices of branches head by head.
        self.head_indices_by_layer = {number: cache.build_head_indices() for number, cache in prompt_layers.items()}

        self.branches: list[Branch] = []  # branch b is in row b of the caches
        self.branch_lengths: list[int] = []  # how many tokens of each branch have run
        self.last_step_token_count = 0  # how many tokens the last step ran

        # These follow from the branches: the texts whose keys the steps read, and the tensors that all steps use.
        self.open_texts = NO_OPEN_TEXTS
        self.step_tensors: StepTensors | None = None

    @property
    def branch_count(self) -> int:
        """Return the number of branches."""
        return len(self.branches)

    def start_branches(self, slots: Sequence[int], token_counts_before: Sequence[int]) -> None:
        """Add branches, each of which continues the beginning of a cached text. They have no tokens of their own yet.

        Args:
            slots: For each new branch, the slot (row of the cache) of the text that it continues.
            token_counts_before: For each new branch, how many tokens of this text come before it.
        """
        new_branches = [Branch(slot, token_count) for slot, token_count in zip(slots, token_counts_before, strict=True)]
        new_lengths = [0] * len(new_branches)

        # The new branches get the next rows of the cache, which earlier branches may have used.
        self._clear_rows(slice(self.branch_count, self.branch_count + len(new_branches)))

        # `open_texts` may be a copy of the keys that earlier steps read. It is out of date if some slots hold other
        # texts by now.
        self.open_texts = NO_OPEN_TEXTS
        self._set_branches(self.branches + new_branches, self.branch_lengths + new_lengths)

    def _clear_rows(self, rows: slice) -> None:
        """Set the keys and values in these rows to zero."""
        for cache in self.caches_by_layer.values():
            cache.keys[rows] = 0
            cache.values[rows] = 0

    def add_sequences(self, token_sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run texts after the prompt, and start a branch at the end of each text.

        The caches of texts and of branches grow if the new ones do not fit.

        Returns:
            The features (last hidden state) of the last token of each text, [texts, F].
        """
        lengths = [len(sequence) for sequence in token_sequences]
        new_slots = self._allocate_slots(len(lengths), max_text_tokens=max(lengths))
        features = self.cached_texts.run_texts(new_slots, token_sequences, first_token_index=0)  # [texts, T, F]
        self.start_branches(new_slots, token_counts_before=lengths)

        text_indices = range(len(lengths))
        last_token_indices = create_tensor(lengths, features.device) - 1
        return features[text_indices, last_token_indices]

    def _allocate_slots(self, text_count: int, max_text_tokens: int) -> list[int]:
        """Choose free slots (rows of the cache of texts) for new texts, and enlarge the caches that are too small.

        The cache of branches gets room for one more branch per new text, too.

        Args:
            text_count: The number of slots that are needed.
            max_text_tokens: The number of tokens of the longest new text.
        """
        used_slots = {branch.slot for branch in self.branches}
        # Each used slot has a branch or more, so with so many slots at least `text_count` are free.
        self.cached_texts.enlarge(min_slots=self.branch_count + text_count, min_text_tokens=max_text_tokens)

        # There are at least as many slots as old and new branches. Length 0 means that rows do not get longer.
        for layer_number, cache in self.caches_by_layer.items():
            self.caches_by_layer[layer_number] = cache.enlarge(min_rows=self.cached_texts.slot_count, min_tokens=0)

        free_slots = sorted(set(range(self.cached_texts.slot_count)) - used_slots)
        return free_slots[:text_count]

    def run_next_tokens(self, token_ids: Tensor) -> Tensor:
        """Append one token to each branch, and run these tokens.

        Their keys and values are added to the cache.

        Args:
            token_ids: The next token of each branch, [B].

        Returns:
            The features (last hidden states) of the new tokens, [B, F].
        """
        assert self.step_tensors is not None  # there are branches

        longest_length = max(self.branch_lengths) + 1  # with the new token
        self._ensure_branch_capacity(longest_length)

        # Every layer calls `branch_step`: it stores the new keys and values, and computes the layer's attention.
        branch_step = _BranchStep(self, self.step_tensors, longest_length)
        positions = branch_step.visibility.query_positions  # of the new tokens, [B, 1]
        input_ids = token_ids[:, None]  # [B, 1]
        features = self.backbone.compute_features(input_ids, positions, attention_function=branch_step)  # [B, 1, F]

        self.branch_lengths = [length + 1 for length in self.branch_lengths]  # `_BranchStep` has read the old ones
        self.last_step_token_count = len(token_ids)
        return features[:, 0]

    def _ensure_branch_capacity(self, token_count: int) -> None:
        """Double the number of tokens per branch that fit into the cache, if fewer than `token_count` fit."""
        for layer_number, cache in self.caches_by_layer.items():
            max_tokens = cache.keys.shape[2]
            if max_tokens < token_count:
                # With 0 as the minimum, the number of rows stays as it is.
                self.caches_by_layer[layer_number] = cache.enlarge(min_rows=0, min_tokens=2 * max_tokens)

    def select_branches(self, old_branch_numbers: Sequence[int]) -> None:
        """Replace the branches. New branch b continues old branch `old_branch_numbers[b]`, which may occur twice."""
        self._copy_moved_rows(old_branch_numbers)
        branches = [self.branches[number] for number in old_branch_numbers]
        branch_lengths = [self.branch_lengths[number] for number in old_branch_numbers]
        self._set_branches(branches, branch_lengths)

    def _copy_moved_rows(self, source_rows: Sequence[int]) -> None:
        """Copy row `source_rows[b]` of the caches to row b, for every b whose row changes.

        With [0, 2, 1], rows 1 and 2 change places. With [2, 2], row 2 is copied to rows 0 and 1.
        """
        moved_rows = [(new_row, old_row) for new_row, old_row in enumerate(source_rows) if new_row != old_row]
        if not moved_rows:
            return

        new_rows, old_rows = create_tensor(moved_rows, self.device).T
        for cache in self.caches_by_layer.values():
            # Indexing by a tensor copies the old rows before any of them is overwritten.
            cache.keys[new_rows] = cache.keys[old_rows]
            cache.values[new_rows] = cache.values[old_rows]

    def copy_branch(self, branch_number: int) -> "CachedBranches":
        """Return a copy with a single branch. Running it changes neither this object nor its caches."""
        copied_branch = copy(self)

        copied_branch.caches_by_layer = {}
        for layer, cache in self.caches_by_layer.items():
            # Indexing by a list copies the row.
            row_copy = LayerCache(cache.keys[[branch_number]], cache.values[[branch_number]])
            copied_branch.caches_by_layer[layer] = row_copy

        copied_branch._set_branches([self.branches[branch_number]], [self.branch_lengths[branch_number]])
        return copied_branch

    def _set_branches(self, branches: list[Branch], branch_lengths: list[int]) -> None:
        """Replace the branches, and with them `open_texts` (whose keys the steps read) and `step_tensors`.

        Args:
            branches: The new branches, which may be none.
            branch_lengths: For each branch, how many of its tokens have run.
        """
        self.branches = branches
        self.branch_lengths = branch_lengths
        if not branches:  # no step reads `open_texts` and `step_tensors` until this is called again
            return

        slots = {branch.slot for branch in branches}
        longest_beginning_length = max(branch.token_count_before for branch in branches)
        self.open_texts = self._choose_open_texts(slots, token_count=longest_beginning_length)
        self.step_tensors = self._build_step_tensors()  # reads `self.branches` and `self.open_texts`

    def _build_step_tensors(self) -> StepTensors:
        """Build the tensors that stay the same in all steps of the present branches (continuations of cached texts).

        For example, after a prompt of 10 tokens, two branches that continue the first 3 and the first 8 tokens of
        a text start at positions [[13], [18]]. Of the prompt and the text, the positions 0 to 17 are read then.
        """
        # `open_texts` has the texts whose keys the steps read, and the number of tokens that are read of each.
        prompt_length = self.cached_texts.cached_prompt.token_count
        slots = [branch.slot for branch in self.branches]
        starts = [prompt_length + branch.token_count_before for branch in self.branches]  # positions
        shared_width = prompt_length + self.open_texts.token_count  # how many tokens of prompt and text are read

        return StepTensors(
            branch_table=BranchTable(slots, self.open_texts.slots, self.device),
            branch_numbers=torch.arange(self.branch_count, device=self.device),
            start_positions=create_tensor(starts, self.device)[:, None],
            shared_positions=torch.arange(shared_width, device=self.device).expand(self.branch_count, -1),
        )

    def _choose_open_texts(self, slots: set[int], token_count: int) -> OpenTexts:
        """Choose the open texts, the cached texts whose keys the next steps read: the needed ones, perhaps with others.

        To read others with them takes time at every step, but saves the copy that is made of keys to read the needed
        texts alone. The first of these three is chosen:

        1. the texts that are open now, if they have the needed ones and more than half of them are needed
        2. all texts of the cache, if more than half of its slots are needed
        3. a copy of the needed texts

        Args:
            slots: The rows of the cache with the needed texts.
            token_count: How many tokens of each text are needed.
        """
        needed_count = len(slots)

        most_open_texts_are_needed = 2 * needed_count > len(self.open_texts.slots)
        if most_open_texts_are_needed and self.open_texts.has_texts(slots, token_count):
            return self.open_texts  # unchanged

        most_texts_are_needed = 2 * needed_count > self.cached_texts.slot_count
        if most_texts_are_needed:
            return self.cached_texts.open_all_texts(token_count)

        return self.cached_texts.copy_texts(slots, token_count)


class _BranchStep:
    """The attention of a step, in which B branches run a token each: it sees prompt, text and branch in one softmax.

    Attributes:
        cached_branches: The branches with their caches.
        step_tensors: The tensors that all their steps use.
        longest_branch_length: How many tokens the longest branch has, with the new one.
        lengths_before_step: How many tokens each branch had before, [B]. This is the column of the cache for its new
            token.
        visibility: Which keys each new token sees.
    """

    def __init__(self, cached_branches: CachedBranches, step_tensors: StepTensors, longest_branch_length: int) -> None:
        self.cached_branches = cached_branches
        self.step_tensors = step_tensors
        self.longest_branch_length = longest_branch_length
        self.lengths_before_step = create_tensor(cached_branches.branch_lengths, cached_branches.device)
        self.visibility = self._build_step_visibility()

    def _build_step_visibility(self) -> Visibility:
        """Define which keys the new token of each branch sees: the prompt, its text up to the branch, and the branch.

        The keys have one column per token of the prompt, then of the longest text, then of the longest branch.

        Example:
            The prompt has 1 token, the longest text 3 and the longest branch 3. A branch that starts after the first
            token of its text, and whose second token is new, sees the columns marked 1 in [1 | 1 0 0 | 1 1 0].
        """
        # The comments give the values in the example.
        starts = self.step_tensors.start_positions  # of the first token of each branch, [B, 1]: 2
        new_positions = starts + self.lengths_before_step[:, None]  # of the new tokens, [B, 1]: 3

        # Of the prompt and text, a branch sees what comes before its start.
        shared_positions = self.step_tensors.shared_positions  # [B, prompt + text]: 0 to 3
        sees_shared = shared_positions < starts

        # Of the branch, it sees the tokens up to the new one.
        steps = torch.arange(self.longest_branch_length, device=starts.device)
        branch_positions = starts + steps  # [B, longest]: 2 to 4
        sees_branch = branch_positions <= new_positions

        sees_key = torch.cat([sees_shared, sees_branch], 1)  # [B, prompt + text + longest]
        return Visibility(
            query_positions=new_positions,
            key_positions=torch.cat([shared_positions, branch_positions], 1),  # [B, prompt + text + longest]
            longest_sequence_length=self._measure_longest_sequence(),
            dtype=self.cached_branches.backbone.model.dtype,
            attention_mask=sees_key[:, None],  # with a dimension for the one new token per branch
        )

    def _measure_longest_sequence(self) -> int:
        """Count the tokens of the longest sequence: prompt, beginning of the text, and branch with its new token."""
        branches_and_lengths = zip(self.cached_branches.branches, self.cached_branches.branch_lengths, strict=True)
        lengths_after_prompt = [branch.token_count_before + length for branch, length in branches_and_lengths]

        prompt_length = self.cached_branches.cached_texts.cached_prompt.token_count
        return prompt_length + max(lengths_after_prompt) + 1

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute the attention of a layer for the new token of each branch, after storing its key and value.

        Args:
            layer: The layer that calls this.
            queries: The queries of the new tokens, [B, H, 1, D]. Every R = H / H_kv of their heads share one head of
                keys.
            keys: The keys of the new tokens, [B, H_kv, 1, D].
            values: The values of the new tokens, in the shape of the keys.

        Returns:
            The output of the attention, [B, H, 1, D].
        """
        visible_parts = self._build_visible_parts(layer, LayerCache(keys, values))  # stores the new keys and values

        scaled_queries = _group_queries(queries, keys.shape[1]) * layer.scale  # [B, H_kv, R, D]
        scores = visible_parts.compute_scores(scaled_queries)  # [B, H_kv, R, all keys]
        attention_bias = self.visibility.get_attention_bias(layer)
        weights = layer.compute_attention_weights(scores, attention_bias)  # [B, H_kv, R, all keys]
        output = visible_parts.compute_weighted_sum(weights)  # [B, H_kv, R, D]

        # Join the groups of heads, and add the dimension of the one token.
        return output.flatten(1, 2)[:, :, None]

    def _build_visible_parts(self, layer: AttentionLayer, new_tokens: LayerCache) -> "_VisibleParts":
        """Store the new tokens of a layer in the cache, and collect what they see: prompt, texts and branches."""
        return _VisibleParts(
            prompt_cache=self.cached_branches.cached_texts.cached_prompt.caches_by_layer[layer.index],
            text_cache=self.cached_branches.open_texts.get_layer_cache(layer.index),
            branch_cache=self._store_new_tokens(layer, new_tokens),
            branch_table=self.step_tensors.branch_table,
            head_indices=self.cached_branches.head_indices_by_layer[layer.index],
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
        cache = self.cached_branches.caches_by_layer[layer.index]
        branch_count = new_tokens.keys.shape[0]
        views = cache.slice_rows(row_count=branch_count, token_count=self.longest_branch_length)

        rows = self.step_tensors.branch_numbers  # branch b is in row b
        columns = self.lengths_before_step  # the new token of a branch comes after its earlier tokens
        # Writing into the views changes the cache.
        views.keys[rows, :, columns] = new_tokens.keys[:, :, 0]  # [B, H_kv, D]
        views.values[rows, :, columns] = new_tokens.values[:, :, 0]
        return views


@dataclass(frozen=True, slots=True, eq=False)
class _VisibleParts:
    """Keys and values of a layer that the new tokens of B branches see, in three parts.

    Attributes:
        prompt_cache: The prompt's, which all branches share, [1, H_kv, prompt, D].
        text_cache: Those of the texts, which the branches of a text share, [texts, H_kv, text, D].
        branch_cache: Those of each branch, [B, H_kv, longest, D].
        branch_table: The branches in a table with a row per text.
        head_indices: The numbers from 0 to H_kv - 1.
    """

    prompt_cache: LayerCache
    text_cache: LayerCache
    branch_cache: LayerCache
    branch_table: BranchTable
    head_indices: Tensor

    def compute_scores(self, queries: Tensor) -> Tensor:
        """Multiply queries [B, H_kv, R, D] by all visible keys: [B, H_kv, R, prompt + text + longest]."""
        prompt_scores = _multiply_by_common_matrix(queries, self.prompt_cache.keys.mT)
        text_scores = self.branch_table.multiply_matrices(queries, self.text_cache.keys.mT, self.head_indices)
        branch_scores = queries @ self.branch_cache.keys.mT
        return torch.cat([prompt_scores, text_scores, branch_scores], -1)

    def compute_weighted_sum(self, weights: Tensor) -> Tensor:
        """Compute the output of attention: the sum of all visible values, each multiplied by its weight.

        It is `weights @ values` for the values of prompt, text and branch in a row, which are stored in three parts.

        Args:
            weights: The attention weights, [B, H_kv, R, prompt + text + longest]: for each of B branches and H_kv heads
                of keys, R query heads that share these keys.

        Returns:
            The sums, [B, H_kv, R, D], with D numbers per value.
        """
        part_lengths = [part.keys.shape[2] for part in (self.prompt_cache, self.text_cache, self.branch_cache)]
        prompt_weights, text_weights, branch_weights = torch.split(weights, part_lengths, -1)

        # The table multiplies the values of each text once for all branches that continue the text.
        weighted_sum = self.branch_table.multiply_matrices(text_weights, self.text_cache.values, self.head_indices)
        weighted_sum = weighted_sum + _multiply_by_common_matrix(prompt_weights, self.prompt_cache.values)
        weighted_sum += branch_weights @ self.branch_cache.values
        return weighted_sum


def _group_queries(queries: Tensor, key_head_count: int) -> Tensor:
    """Return the queries of new tokens, [B, H, 1, D], grouped by their head of keys: [B, H_kv, R, D]."""
    return queries.reshape(queries.shape[0], key_head_count, -1, queries.shape[-1])


def _multiply_by_common_matrix(branch_matrices: Tensor, common_matrix: Tensor) -> Tensor:
    """Multiply a matrix of each branch by a matrix that is the same for all branches.

    The matrices of all branches are joined to one per head, so that `common_matrix` is not copied for each branch.

    Args:
        branch_matrices: One matrix per branch, [B, H_kv, R, X].
        common_matrix: The common matrix, [1, H_kv, X, Y].

    Returns:
        The product for each branch, [B, H_kv, R, Y].
    """
    branch_count, head_count, row_count, width = branch_matrices.shape
    joined_matrices = branch_matrices.transpose(0, 1).reshape(head_count, branch_count * row_count, width)
    product = joined_matrices @ common_matrix[0]  # [H_kv, B * R, Y]
    return product.view(head_count, branch_count, row_count, -1).transpose(0, 1)
