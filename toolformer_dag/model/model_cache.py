"""Texts after a prompt in transformers' own cache, for models whose attention cannot be replaced (`shared_keys.py`).

Branches are continuations of texts, one token at a time. A cached row can be continued after any of its tokens if what
comes after is cut off. Keys and values are cut after any token. The states of linear attention (Mamba, RWKV,
convolutions) cannot be cut: they are stored after every STATE_INTERVAL tokens of a text, and the few tokens from there
on run again.

Some models give other numbers with a cache. For these, the cache holds the tokens themselves, and every row runs from
its beginning at each step.

Shapes: B rows, T new tokens, F numbers per hidden state, D numbers per key, H_kv heads of keys.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import signature
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from toolformer_dag.model.attention import create_tensor, pad_sequences
from toolformer_dag.model.backbone import Backbone

STATE_INTERVAL = 16
"""Tokens between two stored states of a text."""
RWKV_CACHE_ARGUMENT = "state"
"""The name under which RWKV takes its cache, a list of tensors without keys."""
CACHE_ARGUMENTS = ("past_key_values", "cache_params", RWKV_CACHE_ARGUMENT)
"""Names under which models take their cache."""
CUTTABLE_LAYER_TYPES = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""Layers of a cache that can be cut and copied here."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a model's own cache can be used.

    Attributes:
        can_run_chunks: Whether a pass may run several tokens after cached ones. Mamba's scan may not: it begins from
            zero.
        batching: Which rows may share a pass: `any` (shorter rows are padded on the left); rows of `equal_length`; or
            `single`, so that each row runs alone (RWKV in transformers mixes rows).
        recomputes_rows: Whether nothing is cached, and every row runs from its beginning at each token.
    """

    can_run_chunks: bool
    batching: Literal["any", "equal_length", "single"]
    recomputes_rows: bool = False

    @property
    def runs_rows_alone(self) -> bool:
        """Return whether each row needs a pass of its own."""
        return self.batching == "single"

    def get_batch_key(self, row_index: int, token_count: int) -> int:
        """Return a number that is equal for rows that may share a pass.

        Args:
            row_index: The number of the row.
            token_count: The number of its tokens.
        """
        key_by_batching = {"any": 0, "equal_length": token_count, "single": row_index}
        return key_by_batching[self.batching]

    def group_rows(self, row_lengths: Sequence[int]) -> Iterable[list[int]]:
        """Group rows that may share a pass.

        Args:
            row_lengths: The number of tokens of each row.

        Returns:
            Lists of row numbers. For lengths [3, 5, 3] they are [[0, 1, 2]] if `batching` is "any",
            [[0, 2], [1]] if it is "equal_length", and [[0], [1], [2]] if it is "single".
        """
        rows_by_key: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(row_lengths):
            rows_by_key[self.get_batch_key(row, length)].append(row)
        return rows_by_key.values()


class Rearrangement(Protocol):
    """Makes the tensors of a new cache from those of a cache, by choosing, duplicating or cutting rows.

    The first dimension of each tensor is the row.
    """

    def rearrange_keys(self, keys: Tensor) -> Tensor:
        """Return the keys of the new rows, [new rows, H_kv, new columns, D]. Values are arranged in the same way."""

    def rearrange_state(self, state_index: int, state: Tensor) -> Tensor:
        """Return a state of the new rows, [new rows, ...].

        Args:
            state_index: The index of the state in `ModelCache._list_state_tensors`.
            state: The state of the old rows, [old rows, ...].
        """


@dataclass(frozen=True, eq=False)
class _ChosenRows:
    """A `Rearrangement` that copies whole rows.

    Attributes:
        source_rows: For each new row, the old row that is copied, [new rows].
    """

    source_rows: Tensor

    def rearrange_keys(self, keys: Tensor) -> Tensor:
        return keys[self.source_rows]

    def rearrange_state(self, state_index: int, state: Tensor) -> Tensor:
        return state[self.source_rows]


@dataclass(frozen=True, eq=False)
class _CutRows:
    """A `Rearrangement` that cuts rows to their beginnings.

    Attributes:
        source_rows: For each new row, the old row that it is the beginning of.
        source_row_column: The same as a tensor, [new rows, 1].
        source_columns: For each new column, the old column that it is copied from, [new rows, new width].
        states_by_row: For each new row, all states of the old cache, with all its rows, as they were where the row is
            cut.
    """

    source_rows: Sequence[int]
    source_row_column: Tensor
    source_columns: Tensor
    states_by_row: Sequence[Sequence[Tensor]]

    def rearrange_keys(self, keys: Tensor) -> Tensor:
        # torch puts a slice between two index tensors last: [new rows, new width, H_kv, D].
        chosen_keys = keys[self.source_row_column, :, self.source_columns]
        return chosen_keys.transpose(1, 2)

    def rearrange_state(self, state_index: int, state: Tensor) -> Tensor:
        state_by_row = []
        for row, stored_states in zip(self.source_rows, self.states_by_row, strict=True):
            state_by_row.append(stored_states[state_index][row])
        return torch.stack(state_by_row)


class ModelCache:
    """Rows of tokens in the model's own cache.

    `run_sequences` appends columns to the rows. `copy_rows` and `copy_row_beginnings` return other caches. A row may be
    padded on the left, so that all rows end in the same column. After `run_sequences` it may be padded on the right,
    too, until `copy_row_beginnings` removes that padding.

    Attributes:
        backbone: The model.
        cache_use: How its cache can be used.
        cache_argument: The argument under which the model takes the cache, or "" if nothing is cached.
        native_cache: transformers' cache. For RWKV, it is a list of states, or None before the first token. If nothing
            is cached (`CacheUse.recomputes_rows`), transformers' cache holds the tokens themselves.
        start_columns: For each row, the column of its first token.
        row_lengths: For each row, the number of its tokens from there on.
        column_count: The number of columns so far.
        states_by_column: Copies of the states of linear attention, by the number of columns after which they were
            stored (`store_states`).
    """

    def __init__(self, backbone: Backbone, cache_use: CacheUse, row_count: int) -> None:
        """Create a cache of rows without tokens.

        Args:
            backbone: The model.
            cache_use: How the model's own cache can be used.
            row_count: The number of rows, each for a sequence of tokens.
        """
        self.backbone = backbone
        self.cache_use = cache_use
        # Where rows are recomputed, the model gets no cache, and `native_cache` only holds the tokens.
        self.cache_argument = "" if cache_use.recomputes_rows else find_cache_argument(backbone.body)
        self.native_cache: Any = (
            DynamicCache() if cache_use.recomputes_rows else _build_empty_cache(backbone, self.cache_argument)
        )
        self.start_columns = [0] * row_count  # the column of each row's first token
        self.row_lengths = [0] * row_count  # in tokens, without padding
        self.column_count = 0
        # States of linear attention, by the number of columns that had run when they were stored.
        self.states_by_column: dict[int, list[Tensor]] = {}

    @property
    def is_rwkv(self) -> bool:
        """Return whether the cache is RWKV's list of states."""
        return self.cache_argument == RWKV_CACHE_ARGUMENT

    @property
    def has_states(self) -> bool:
        """Return whether the model has states of linear attention, which cannot be cut."""
        return self.is_rwkv or any(isinstance(layer, LinearAttentionLayer) for layer in self.native_cache.layers)

    @property
    def has_keys(self) -> bool:
        """Return whether the cache holds keys. A model without keys has states only, which have no columns to pad."""
        return not self.is_rwkv and any(isinstance(layer, DynamicLayer) for layer in self.native_cache.layers)

    def run_sequences(self, token_sequences: Sequence[Sequence[int]], state_interval: int | None = None) -> Tensor:
        """Append a sequence of tokens to each row, and run these tokens.

        Args:
            token_sequences: The new tokens of each row. Shorter sequences are padded on the right.
            state_interval: After every so many new columns, the states of linear attention are stored, so that rows can
                be cut there. None stores no states.

        Returns:
            The features (last hidden states) of the new tokens, [B, T, F].
        """
        input_ids = pad_sequences(token_sequences, self.backbone.device)  # [B, T]
        features = self._run_in_passes(input_ids, state_interval)

        # Padding does not count as a part of a row.
        self.row_lengths = [
            length + len(sequence) for length, sequence in zip(self.row_lengths, token_sequences, strict=True)
        ]
        return features

    def _run_in_passes(self, input_ids: Tensor, state_interval: int | None) -> Tensor:
        """Run the next T tokens of each row, in as many passes as needed.

        Args:
            input_ids: The tokens, [B, T].
            state_interval: After every so many tokens, the states of linear attention are stored. None stores no
                states.

        Returns:
            The features of the tokens, [B, T, F].
        """
        width_before = self.column_count
        # A pass ends at every multiple of `state_interval` if there are states to store.
        columns_per_pass = self._choose_columns_per_pass(input_ids.shape[1], state_interval)

        features_by_pass = []
        for pass_ids in torch.split(input_ids, columns_per_pass, dim=1):
            features_by_pass.append(self._run_columns(pass_ids))  # also increases `self.column_count`

            columns_so_far = self.column_count - width_before
            if state_interval is not None and columns_so_far % state_interval == 0:
                self.store_states()
        return torch.cat(features_by_pass, 1)

    def _choose_columns_per_pass(self, new_column_count: int, state_interval: int | None) -> int:
        """Choose how many of `new_column_count` new columns run in one pass. A column has one token of each row.

        If states of linear attention are stored every `state_interval` columns, a pass has no more columns than that.
        """
        # After cached tokens, some models can run only one token at a time.
        can_run_several = self.cache_use.can_run_chunks or self.column_count == 0
        columns_per_pass = new_column_count if can_run_several else 1

        # States can only be stored between passes.
        if state_interval is not None and self.has_states:
            return min(columns_per_pass, state_interval)
        return columns_per_pass

    def store_states(self) -> None:
        """Copy the present states of linear attention, because the next token changes them."""
        self.states_by_column[self.column_count] = [state.clone() for state in self._list_state_tensors()]

    def copy_rows(self, rows_to_copy: Sequence[int]) -> "ModelCache":
        """Return a new cache with whole copies of these rows, in this order. A row may occur twice."""
        row_indices = create_tensor(rows_to_copy, self.backbone.device)
        return self._rearrange(
            _ChosenRows(row_indices),
            start_columns=[self.start_columns[row] for row in rows_to_copy],
            row_lengths=[self.row_lengths[row] for row in rows_to_copy],
            column_count=self.column_count,
        )

    def copy_row_beginnings(self, rows_to_copy: Sequence[int], kept_token_counts: Sequence[int]) -> "ModelCache":
        """Return a new cache with the beginnings of some rows, padded on the left so that all end in one column.

        If the model has states of linear attention, they must have been stored where a row is cut (`store_states`).

        Args:
            rows_to_copy: The rows to copy.
            kept_token_counts: How many tokens of each of them to keep.

        Example:
            Rows "abcdefg" and "hijklmn", cut to lengths [3, 5], become "--abc" and "hijkl".
        """
        width = max(kept_token_counts)
        # The columns of the first tokens: [2, 0] in the example.
        new_starts = [width - length for length in kept_token_counts]

        cut_rows = _CutRows(
            source_rows=rows_to_copy,
            source_row_column=create_tensor(rows_to_copy, self.backbone.device)[:, None],
            source_columns=self._compute_source_columns(rows_to_copy, new_starts, width),
            states_by_row=self._select_states_at_ends(rows_to_copy, kept_token_counts),
        )
        return self._rearrange(
            cut_rows, start_columns=new_starts, row_lengths=list(kept_token_counts), column_count=width
        )

    def _compute_source_columns(
        self, source_rows: Sequence[int], new_start_columns: Sequence[int], column_count: int
    ) -> Tensor:
        """Compute from which column of this cache each column of a new cache is copied.

        Args:
            source_rows: For each row of the new cache, the row of this one that it is copied from.
            new_start_columns: For each row of the new cache, the column of its first token. Padding comes before it.
            column_count: The number of columns of the new cache.

        Returns:
            Column numbers, [new rows, width]. If rows start in column 0 of this cache and in columns 2 and 0 of a new
            one with 5 columns, they are [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]].
        """
        device = self.backbone.device
        new_columns = torch.arange(column_count, device=device)

        # How far to the right of its new column each row's tokens are in this cache: [-2, 0] in the example.
        shifts = [
            self.start_columns[row] - new_start for row, new_start in zip(source_rows, new_start_columns, strict=True)
        ]
        source_columns = new_columns + create_tensor(shifts, device)[:, None]
        return source_columns.clamp(min=0)  # negative for padding, which may be copied from any column

    def _select_states_at_ends(
        self, source_rows: Sequence[int], kept_token_counts: Sequence[int]
    ) -> list[list[Tensor]]:
        """Return the states of each row that were stored after the last of its tokens to keep.

        Args:
            source_rows: The rows of this cache.
            kept_token_counts: For each of them, the number of tokens to keep.

        Returns:
            A list of states for each row, which is empty if the model has no states.

        Raises:
            KeyError: No states were stored after the last token to keep of a row.
        """
        if not self.has_states:
            return [[] for _ in source_rows]

        end_columns = [
            self.start_columns[row] + length for row, length in zip(source_rows, kept_token_counts, strict=True)
        ]
        # The states at column c were stored after the columns before c.
        return [self.states_by_column[column] for column in end_columns]

    def create_text_cache(self, slot_count: int, max_text_tokens: int) -> "ModelCacheTexts":
        """Return an empty cache of texts that follow this single row, the prompt.

        The arguments have no effect, because nothing is allocated. `CachedPrompt.create_text_cache` has the same ones.
        """
        return ModelCacheTexts(self)

    def _run_columns(self, input_ids: Tensor) -> Tensor:
        """Run the next tokens of each row, [B, T], in one pass, or from the beginning if nothing is cached.

        Returns:
            The features of these tokens, [B, T, F].
        """
        if self.cache_use.recomputes_rows:
            features = self._recompute_rows(input_ids)
        else:
            padding = self._build_padding_arguments(input_ids)
            features, self.native_cache = self.backbone.compute_features_after_cache(
                input_ids, self.cache_argument, self.native_cache, **padding
            )

        self.column_count += input_ids.shape[1]
        return features

    def _recompute_rows(self, input_ids: Tensor) -> Tensor:
        """Append tokens to each row, and run all rows from their beginning, because nothing is cached.

        Each pass runs as many rows as the token budget allows. All rows have the same length.

        Args:
            input_ids: The new tokens, [B, T].

        Returns:
            The features of the new tokens, [B, T, F].
        """
        tokens = self._append_to_stored_tokens(input_ids)  # [B, width + T], where width columns were stored before
        first_new_column = self.column_count  # the width, until the caller (`_run_columns`) adds T to it
        rows_per_pass = max(1, self.backbone.token_budget.max_tokens // tokens.shape[1])

        features_by_pass = []
        for pass_tokens in torch.split(tokens, rows_per_pass):
            features = self.backbone.compute_features(pass_tokens)  # [rows of the pass, width + T, F]
            features_by_pass.append(features[:, first_new_column:])
        return torch.cat(features_by_pass)

    def _append_to_stored_tokens(self, input_ids: Tensor) -> Tensor:
        """Append tokens, [B, T], to those stored in transformers' cache.

        Nothing else is cached in this case, so that the cache serves as a growing table: tokens are stored as if they
        were the keys and values of a layer.

        Returns:
            All tokens so far, [B, width + T], where width is the number of columns stored before.
        """
        new_tokens_as_keys = input_ids[:, None, :, None]  # [B, 1, T, 1], the shape of keys
        all_tokens_as_keys, _ = self.native_cache.update(new_tokens_as_keys, new_tokens_as_keys, layer_idx=0)
        all_tokens: Tensor = all_tokens_as_keys[:, 0, :, 0]
        return all_tokens

    def _build_padding_arguments(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Build the arguments that tell the model which columns are padding on the left of the rows.

        Args:
            input_ids: The tokens that run next, [B, T].

        Returns:
            Arguments for the model's `forward`. Empty if no row is padded, or if the cache has no keys: the states of
            linear attention have no columns, so that padding before a row is not in them.
        """
        is_any_row_padded = any(start > 0 for start in self.start_columns)
        if not self.has_keys or not is_any_row_padded:
            return {}

        total_width = self.column_count + input_ids.shape[1]
        mask = self._build_token_mask(total_width)  # for cached and new tokens
        if not self._takes_position_ids:
            return {"attention_mask": mask}

        positions = _compute_token_positions(mask)
        new_positions = positions[:, self.column_count :]  # the model takes the positions of the new tokens only
        return {"attention_mask": mask, "position_ids": new_positions}

    def _build_token_mask(self, column_count: int) -> Tensor:
        """Mark the first `column_count` columns of each row: 0 for padding on the left, 1 for tokens, [B, width].

        Rows that start in columns 0 and 1 give [[1, 1, 1], [0, 1, 1]].
        """
        columns = torch.arange(column_count, device=self.backbone.device)
        starts = create_tensor(self.start_columns, self.backbone.device)[:, None]  # [B, 1]
        return (columns >= starts).long()

    @property
    def _takes_position_ids(self) -> bool:
        """Return whether the model takes the positions of tokens as an argument."""
        return "position_ids" in signature(self.backbone.body.forward).parameters

    def _list_state_tensors(self) -> list[Tensor]:
        """List the present states of linear attention, layer by layer.

        Within a layer, the states of convolutions come first. Attention layers have none.

        Returns:
            The tensors of the cache itself. The first dimension of each is the row.
        """
        if self.is_rwkv:  # its cache is such a list, and None before the first token
            return list(self.native_cache or ())

        state_tensors = []
        for layer in self.native_cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer_states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
                # A state is None if it is not computed yet, or if this layer has no such state.
                state_tensors += [state for state in layer_states if state is not None]
        return state_tensors

    def _rearrange(
        self, rearrangement: Rearrangement, *, start_columns: list[int], row_lengths: list[int], column_count: int
    ) -> "ModelCache":
        """Return a new cache with other rows. This cache stays as it is.

        Args:
            rearrangement: Makes the new tensors from those of this cache.
            start_columns: For each new row, the column of its first token.
            row_lengths: For each new row, the number of its tokens.
            column_count: The number of columns of the new cache.
        """
        new_cache = copy(self)
        new_cache.start_columns = start_columns
        new_cache.row_lengths = row_lengths
        new_cache.column_count = column_count
        new_cache.states_by_column = {}  # states that were stored at earlier columns are not taken over
        new_cache.native_cache = self._rearrange_tensors(rearrangement)
        return new_cache

    def _rearrange_tensors(self, rearrangement: Rearrangement) -> Any:
        """Return a rearranged copy of the model's cache object: RWKV's list of states, or transformers' cache."""
        if self.is_rwkv:
            return [
                rearrangement.rearrange_state(number, state) for number, state in enumerate(self._list_state_tensors())
            ]
        return _rearrange_cache(self.native_cache, rearrangement)


def _compute_token_positions(attention_mask: Tensor) -> Tensor:
    """Number the tokens of each row from 0, not counting the padding on the left, whose number is 0 too.

    A mask [[1, 1, 1], [0, 1, 1]], with 0 for padding, gives [[0, 1, 2], [0, 0, 1]].
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def _rearrange_cache(cache: DynamicCache, rearrangement: Rearrangement) -> DynamicCache:
    """Return a copy of transformers' cache whose keys, values and states are made by `rearrangement`."""
    # Numbers for the states of all layers, in the order of `ModelCache._list_state_tensors`.
    state_numbers = count()
    rearranged_cache = copy(cache)
    rearranged_cache.layers = [_rearrange_layer(layer, rearrangement, state_numbers) for layer in cache.layers]
    return rearranged_cache


def _rearrange_layer(layer: Any, rearrangement: Rearrangement, state_numbers: Iterator[int]) -> Any:
    """Return a copy of one layer of transformers' cache that has other rows.

    Args:
        layer: The layer. Linear attention has states, attention has keys and values, and some layers have both.
        rearrangement: Makes each new tensor from the old one.
        state_numbers: Yields the next number for a state, by which `rearrangement` finds what it has stored for this
            state. States are numbered through all layers, so all calls get the same iterator.
    """
    rearranged_layer = copy(layer)

    if isinstance(layer, LinearAttentionLayer):
        rearranged_layer.conv_states = _rearrange_states(layer.conv_states, rearrangement, state_numbers)
        rearranged_layer.recurrent_states = _rearrange_states(layer.recurrent_states, rearrangement, state_numbers)

    if isinstance(layer, DynamicLayer) and layer.keys is not None:
        rearranged_layer.keys = rearrangement.rearrange_keys(layer.keys)
        rearranged_layer.values = rearrangement.rearrange_keys(layer.values)  # values are arranged like keys
    return rearranged_layer


def _rearrange_states(
    states: Mapping[Any, Tensor | None], rearrangement: Rearrangement, state_numbers: Iterator[int]
) -> dict[Any, Tensor | None]:
    """Return the states of one layer with other rows, under the same keys.

    Args:
        states: The states of linear attention. A state that is not computed is None, and stays so.
        rearrangement: Makes each new state from the old one and its number.
        state_numbers: Yields the next number for a state. The computed states of all layers are numbered in order, so
            all layers share this iterator.
    """
    rearranged_states: dict[Any, Tensor | None] = {}
    for key, state in states.items():
        if state is None:
            rearranged_states[key] = None
        else:
            rearranged_states[key] = rearrangement.rearrange_state(next(state_numbers), state)
    return rearranged_states


def find_cache_argument(body: Any) -> str:
    """Find out under which argument a model takes its cache, such as "past_key_values".

    Raises:
        NotImplementedError: The model takes no cache.
    """
    parameters = signature(body.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise NotImplementedError(f"{type(body).__name__} takes no cache")


def _build_empty_cache(backbone: Backbone, argument: str) -> DynamicCache | None:
    """Create an empty cache whose rows can be cut to their beginnings.

    Args:
        backbone: The model.
        argument: The name of the argument under which the model takes its cache.

    Returns:
        The cache. None for RWKV, which creates its states itself.

    Raises:
        NotImplementedError: The model has layers other than attention and linear attention.
    """
    if argument == RWKV_CACHE_ARGUMENT:
        return None

    cache = DynamicCache(config=backbone.model.config)
    cache.layers = [_to_cuttable_layer(layer) for layer in cache.layers]
    return cache


def _to_cuttable_layer(layer: Any) -> Any:
    """Return the layer of a cache, or one that can replace it if its rows cannot be cut.

    Raises:
        NotImplementedError: The layer is of a kind other than attention and linear attention.
    """
    if type(layer) is DynamicSlidingWindowLayer:  # drops earlier keys, which a row that is cut may need
        return DynamicLayer()  # keeps all keys
    if type(layer) not in CUTTABLE_LAYER_TYPES:
        raise NotImplementedError(f"caches of {type(layer).__name__}")
    return layer


class CachedRow(NamedTuple):
    """A row of a cache, which holds the tokens of the prompt and then a text.

    Attributes:
        cache: The cache of several texts that ran in one pass.
        row_index: The number of the text's row.
    """

    cache: ModelCache
    row_index: int


class ModelCacheTexts:
    """Texts after a prompt in the model's own cache, each with a copy of the prompt's keys and states.

    A slot is a number under which a text is cached; a text replaces the earlier text of its slot.

    Attributes:
        cached_prompt: The cache of the prompt, which is its only row.
        token_ids_by_slot: The tokens of the text in each slot.
        cached_rows_by_slot: The row that holds the text of each slot.
    """

    def __init__(self, cached_prompt: ModelCache) -> None:
        self.cached_prompt = cached_prompt
        self.token_ids_by_slot: dict[int, Sequence[int]] = {}
        self.cached_rows_by_slot: dict[int, CachedRow] = {}

    def count_tokens_to_run(self, token_ids: Sequence[int]) -> int:
        """Count the tokens that `run_texts` runs for a text. If nothing is cached, the prompt runs, too."""
        if self.cached_prompt.cache_use.recomputes_rows:
            return self.cached_prompt.column_count + len(token_ids)
        return len(token_ids)

    def run_texts(
        self, slots: Sequence[int], token_sequences: Sequence[Sequence[int]], first_token_index: int
    ) -> Tensor:
        """Run B texts after the prompt, and cache them.

        Args:
            slots: For each text, the number under which to cache it. It replaces an earlier text with this number.
            token_sequences: The tokens of each text. T is the length of the longest.
            first_token_index: The features of the tokens before this index are left out.

        Returns:
            The features (last hidden states) of the texts, [B, T - first_token_index, F]. After the end of a shorter
            text they mean nothing.
        """
        self.token_ids_by_slot.update(zip(slots, token_sequences, strict=True))  # read by `_run_stored_texts`

        slot_groups: list[Sequence[int]]
        if self.cached_prompt.cache_use.runs_rows_alone:
            slot_groups = [[slot] for slot in slots]
        else:
            slot_groups = [slots]

        features_by_group = []
        for group in slot_groups:
            features = self._run_stored_texts(group)  # [texts of the group, length of their longest, F]
            features_by_group.append(features[:, first_token_index:])
        return _join_rows(features_by_group)  # pads all groups to the length of the longest text

    def _run_stored_texts(self, slots: Sequence[int]) -> Tensor:
        """Run the texts in these slots (numbers of cached texts) together after the prompt.

        `cached_rows_by_slot` gets the row of a new cache that holds each text. States of linear attention are stored
        before the texts and after every STATE_INTERVAL tokens, so that branches (continuations of texts) can start
        there.

        Returns:
            The features of the texts, [slots, T, F].
        """
        # Start with one copy of the prompt per text.
        prompt_row = 0  # the only row of the prompt's cache
        cache = self.cached_prompt.copy_rows([prompt_row] * len(slots))
        cache.store_states()

        texts = [self.token_ids_by_slot[slot] for slot in slots]
        features = cache.run_sequences(texts, state_interval=STATE_INTERVAL)

        for row, slot in enumerate(slots):
            self.cached_rows_by_slot[slot] = CachedRow(cache, row)
        return features

    def create_branch_cache(self, max_branches: int, max_tokens: int) -> "ModelCacheBranches":
        """Create an object for branches (continuations) of these texts. Its method `start_branches` starts them.

        The arguments have no effect, because nothing is allocated. `CachedTexts.create_branch_cache` has the same ones.
        """
        return ModelCacheBranches(self)


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Join the rows of tensors [rows, columns, F], and append zeros to rows with fewer columns than the longest."""
    max_columns = max(part.shape[1] for part in parts)
    padded_parts = [F.pad(part, (0, 0, 0, max_columns - part.shape[1])) for part in parts]
    return torch.cat(padded_parts)


class ContinuedBranch(NamedTuple):
    """A branch that goes on, perhaps under another number.

    Attributes:
        new_number: Its new number among the branches.
        old_row: Its row in the cache of its old group.
    """

    new_number: int
    old_row: int


class BranchGroup(NamedTuple):
    """Branches (continuations of texts) that run in the same passes.

    Attributes:
        branch_numbers: The number of the branch in each row of `cache`.
        cache: The tokens of the branches, with prompt and text before them.
    """

    branch_numbers: list[int]
    cache: ModelCache

    @property
    def step_token_count(self) -> int:
        """Return how many tokens ran in the last step: one per branch, or all tokens if nothing is cached."""
        if self.cache.cache_use.recomputes_rows:
            return sum(self.cache.row_lengths)
        return len(self.branch_numbers)

    def run_next_tokens(self, token_ids: Tensor) -> Tensor:
        """Run the next token of each branch of the group.

        Args:
            token_ids: The next tokens of all branches, also those of other groups, [B].

        Returns:
            The features of the tokens of this group, [branches of the group, F].
        """
        group_token_ids = token_ids[self.branch_numbers].tolist()
        single_token_sequences = [[token_id] for token_id in group_token_ids]
        features = self.cache.run_sequences(single_token_sequences)  # [branches of the group, 1, F]
        return features[:, 0]

    def build_continuing_groups(self, old_branch_numbers: Sequence[int]) -> "list[BranchGroup]":
        """Build the groups of the new branches that continue branches of this group.

        Args:
            old_branch_numbers: For each new branch, the number of the old branch that it continues. This may be in
                another group.

        Returns:
            One group, or none if no branch of this group is continued. If the model can run only one row at a time,
            one group per new branch.
        """
        continued_branches = self._list_continued_branches(old_branch_numbers)
        if self.cache.cache_use.runs_rows_alone:
            return [self._copy_branches([branch]) for branch in continued_branches]
        if not continued_branches:
            return []
        return [self._copy_branches(continued_branches)]

    def _list_continued_branches(self, old_branch_numbers: Sequence[int]) -> list[ContinuedBranch]:
        """List the new branches that continue a branch of this group.

        Args:
            old_branch_numbers: For each new branch, the number of the old branch that it continues. This may be in
                another group.
        """
        row_by_old_number = {number: row for row, number in enumerate(self.branch_numbers)}

        continued_branches = []
        for new_number, old_number in enumerate(old_branch_numbers):
            if old_number in row_by_old_number:
                old_row = row_by_old_number[old_number]
                continued_branches.append(ContinuedBranch(new_number, old_row))
        return continued_branches

    def _copy_branches(self, branches: Sequence[ContinuedBranch]) -> "BranchGroup":
        """Return a group of these branches, with copies of their rows."""
        rows = self.cache.copy_rows([branch.old_row for branch in branches])
        return BranchGroup([branch.new_number for branch in branches], rows)


class ModelCacheBranches:
    """Branches: continuations of texts, which all get one token per step. Each has a copy of its keys and states.

    Branches are numbered in the order of `start_branches`, `add_sequences` and `select_branches`.

    Attributes:
        cached_texts: The texts that they continue.
        device: Where the model runs.
        branch_groups: The branches that run in the same passes, with their cache. Each branch is in one group.
        last_step_token_count: How many tokens the last step ran. The first step after `start_branches` also counts
            tokens of texts that ran again there, because states are stored after some tokens only.
    """

    def __init__(self, cached_texts: ModelCacheTexts) -> None:
        self.cached_texts = cached_texts
        self.device = cached_texts.cached_prompt.backbone.device
        self.last_step_token_count = 0
        self.branch_groups: list[BranchGroup] = []
        self._rerun_token_count = 0  # tokens that `start_branches` ran again since the last step

    @property
    def branch_count(self) -> int:
        """Return the number of branches."""
        return sum(len(group.branch_numbers) for group in self.branch_groups)

    def start_branches(self, slots: Sequence[int], token_counts_before: Sequence[int]) -> None:
        """Start branches, each of which continues the beginning of a cached text.

        Args:
            slots: For each new branch, the number under which its text is cached.
            token_counts_before: For each new branch, how many tokens of this text come before it.
        """
        first_number = self.branch_count  # new branches are numbered after the present ones
        new_branches = []
        for number, (slot, length) in enumerate(zip(slots, token_counts_before, strict=True), start=first_number):
            new_branches.append(self._build_new_branch(number, slot, length))

        for branches_of_group in _group_branches_by_pass(new_branches, self.cached_texts.cached_prompt.cache_use):
            self._start_group(branches_of_group)  # appends to `self.branch_groups`

    def _build_new_branch(self, branch_number: int, slot: int, text_token_count: int) -> "_NewBranch":
        """Return branch `branch_number`, which continues the first `text_token_count` tokens of the text in a slot."""
        text_tokens = self.cached_texts.token_ids_by_slot[slot]
        return _NewBranch(
            branch_number,
            text_row=self.cached_texts.cached_rows_by_slot[slot],
            beginning_ids=text_tokens[:text_token_count],
        )

    def _start_group(self, branches: "Sequence[_NewBranch]") -> None:
        """Append a group of new branches that run together, with a cache of their own.

        The cache begins with copies of the prompt and of the beginnings of texts that the branches continue.

        Args:
            branches: The branches of the group. Their texts are all in the same cache.
        """
        cache_of_texts = branches[0].text_row.cache
        cut = _cut_after_beginnings(
            cache_of_texts,
            rows_to_copy=[branch.text_row.row_index for branch in branches],
            beginnings=[branch.beginning_ids for branch in branches],
            prompt_token_count=self.cached_texts.cached_prompt.column_count,
        )
        self._rerun_token_count += cut.rerun_token_count  # counted with the next step

        numbers = [branch.number for branch in branches]
        self.branch_groups.append(BranchGroup(numbers, cut.cache))

    def add_sequences(self, token_sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run whole sequences, without the prompt, and start a branch at the end of each sequence.

        Returns:
            The features (last hidden state) of the last token of each sequence, [sequences, F].
        """
        first_number = self.branch_count  # new branches are numbered after the present ones
        sequence_lengths = [len(sequence) for sequence in token_sequences]
        # Each group has the indices of sequences that may share a pass.
        index_groups = self._choose_sequence_cache_use().group_rows(sequence_lengths)

        features_by_index: dict[int, Tensor] = {}  # of the last token of each sequence, [F]
        for indices in index_groups:
            group_sequences = [token_sequences[index] for index in indices]
            branch_numbers = [first_number + index for index in indices]
            group_features = self._add_group(group_sequences, branch_numbers)
            features_by_index.update(zip(indices, group_features, strict=True))

        # Groups may have changed the order of the sequences.
        return torch.stack([features_by_index[index] for index in range(len(token_sequences))])

    def _choose_sequence_cache_use(self) -> CacheUse:
        """Choose which whole sequences may share a pass.

        If the model has states, which cannot be cut, only sequences of equal length share one. If the model can run
        only one row at a time, none do.
        """
        prompt = self.cached_texts.cached_prompt
        if prompt.cache_use.batching == "any" and prompt.has_states:
            return replace(prompt.cache_use, batching="equal_length")
        return prompt.cache_use

    def _add_group(self, token_sequences: Sequence[Sequence[int]], branch_numbers: list[int]) -> Tensor:
        """Run whole sequences together, without the prompt, and append a group of branches that continue them.

        Args:
            token_sequences: All tokens of sequences that may share a pass.
            branch_numbers: For each sequence, the number of its branch.

        Returns:
            The features of the last token of each sequence, [sequences, F].
        """
        prompt = self.cached_texts.cached_prompt  # only says which model runs, and how its cache can be used
        rows = range(len(token_sequences))
        cache = ModelCache(prompt.backbone, prompt.cache_use, row_count=len(token_sequences))

        # Shorter sequences are padded on the right.
        features = cache.run_sequences(token_sequences)  # [sequences, T, F]
        last_token_indices = [length - 1 for length in cache.row_lengths]

        # Sequences of different lengths run together only in a model without states of linear attention, because the
        # padding on the right would get into the states. `prompt.cache_use` allows it for padding on the left.
        lengths_may_differ = self._choose_sequence_cache_use().batching == "any"
        if lengths_may_differ:
            # Move padding to the left, so that the next token of every sequence belongs into the next column.
            cache = cache.copy_row_beginnings(rows, cache.row_lengths)

        self.branch_groups.append(BranchGroup(branch_numbers, cache))
        return features[rows, last_token_indices]

    def run_next_tokens(self, token_ids: Tensor) -> Tensor:
        """Run one step: append one token to each branch (continuation of a text), and run these tokens.

        It also sets `last_step_token_count`.

        Args:
            token_ids: The next token of each branch, [B].

        Returns:
            The features (last hidden states) of the new tokens, [B, F].
        """
        # [B, F], the rows of one group of branches after those of the other.
        features_by_group = torch.cat([group.run_next_tokens(token_ids) for group in self.branch_groups])

        tokens_of_groups = sum(group.step_token_count for group in self.branch_groups)
        # `start_branches` may have run some tokens of texts again. They are counted with the first step after it.
        self.last_step_token_count = tokens_of_groups + self._rerun_token_count
        self._rerun_token_count = 0

        return self._sort_by_branch(features_by_group)

    def _sort_by_branch(self, features_by_group: Tensor) -> Tensor:
        """Put the features of all branches, [B, F], in the order of branch numbers instead of group after group."""
        numbers_by_group = [number for group in self.branch_groups for number in group.branch_numbers]
        features = torch.empty_like(features_by_group)
        features[numbers_by_group] = features_by_group
        return features

    def select_branches(self, old_branch_numbers: Sequence[int]) -> None:
        """Replace the branches. New branch b continues old branch `old_branch_numbers[b]`, which may occur twice."""
        new_groups = []
        for group in self.branch_groups:
            new_groups += group.build_continuing_groups(old_branch_numbers)
        self.branch_groups = new_groups

    def copy_branch(self, branch_number: int) -> "ModelCacheBranches":
        """Return a copy with a single branch. Running it does not change this object."""
        copied_branches = copy(self)
        copied_branches.select_branches([branch_number])
        return copied_branches


class _NewBranch(NamedTuple):
    """A branch that is being started.

    Attributes:
        number: Its number among the branches.
        text_row: Where its text is cached, after the prompt.
        beginning_ids: The tokens of the text that it continues.
    """

    number: int
    text_row: CachedRow
    beginning_ids: Sequence[int]


def _group_branches_by_pass(branches: Sequence[_NewBranch], cache_use: CacheUse) -> Iterable[list[_NewBranch]]:
    """Group branches that may share a pass of the model, and whose texts are in the same cache."""
    groups: dict[tuple[int, int], list[_NewBranch]] = defaultdict(list)
    for branch in branches:
        cache_id = id(branch.text_row.cache)
        # This number is equal for branches that may share a pass.
        batch_key = cache_use.get_batch_key(branch.number, len(branch.beginning_ids))
        groups[cache_id, batch_key].append(branch)
    return groups.values()


class CutCache(NamedTuple):
    """A cache whose rows were cut.

    Attributes:
        cache: The new cache.
        rerun_token_count: How many tokens had to run again for it.
    """

    cache: ModelCache
    rerun_token_count: int


def _cut_after_beginnings(
    cache: ModelCache, *, rows_to_copy: Sequence[int], beginnings: Sequence[Sequence[int]], prompt_token_count: int
) -> CutCache:
    """Copy some rows of a cache, and cut each copy after the beginning of its text.

    Args:
        cache: The cache. Each row holds the prompt and then a text.
        rows_to_copy: The rows to copy.
        beginnings: For each of these rows, the first tokens of its text, which are kept.
        prompt_token_count: The number of tokens of the prompt.

    Returns:
        The new cache, and how many tokens had to run again for it.
    """
    final_lengths = [prompt_token_count + len(beginning) for beginning in beginnings]
    if cache.has_states:
        return _cut_with_states(cache, rows_to_copy=rows_to_copy, beginnings=beginnings, final_lengths=final_lengths)

    cut_cache = cache.copy_row_beginnings(rows_to_copy, final_lengths)  # keys and values can be cut after any token
    return CutCache(cut_cache, rerun_token_count=0)


def _cut_with_states(
    cache: ModelCache, *, rows_to_copy: Sequence[int], beginnings: Sequence[Sequence[int]], final_lengths: Sequence[int]
) -> CutCache:
    """Copy some rows of a cache with states of linear attention, and cut each copy after the beginning of its text.

    States cannot be cut, but they were stored after every STATE_INTERVAL (16) tokens of a text. To cut a text after 20
    tokens, its row is cut after 16, and the other 4 tokens run again.

    Args:
        cache: The cache. Each row holds the prompt and then a text.
        rows_to_copy: The rows to copy.
        beginnings: For each of these rows, the first tokens of its text, which are kept.
        final_lengths: For each of these rows, the number of tokens to keep, those of the prompt included.

    Returns:
        The new cache, and how many tokens had to run again for it.
    """
    tokens_to_run = [_select_tokens_to_run(beginning) for beginning in beginnings]
    run_counts = [len(tokens) for tokens in tokens_to_run]

    # 1. Cut each row where its states were stored last.
    stored_lengths = [length - run_count for length, run_count in zip(final_lengths, run_counts, strict=True)]
    new_cache = cache.copy_row_beginnings(rows_to_copy, stored_lengths)
    new_cache.store_states()  # for rows that need no further tokens

    # 2. Run the other tokens. States are stored after each of them, because rows end after different numbers of tokens.
    if any(run_counts):
        new_cache.run_sequences(tokens_to_run, state_interval=1)

    # 3. Cut each row at its end, to remove the padding of rows with fewer tokens to run.
    all_rows = range(len(rows_to_copy))
    cut_at_ends = new_cache.copy_row_beginnings(all_rows, final_lengths)
    return CutCache(cut_at_ends, rerun_token_count=sum(run_counts))


def _select_tokens_to_run(token_ids: Sequence[int]) -> Sequence[int]:
    """Select the tokens after the last multiple of STATE_INTERVAL, where states were stored."""
    stored_count = len(token_ids) // STATE_INTERVAL * STATE_INTERVAL
    return token_ids[stored_count:]
