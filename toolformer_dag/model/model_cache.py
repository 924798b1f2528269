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

from toolformer_dag.model.attention import on_device, pad_sequences
from toolformer_dag.model.backbone import Backbone

STATE_INTERVAL = 16
"""Tokens between two stored states of a text."""
RWKV_ARGUMENT = "state"
"""The name under which RWKV takes its cache, a list of tensors without keys."""
ARGUMENTS = ("past_key_values", "cache_params", RWKV_ARGUMENT)
"""Names under which models take their cache."""
KNOWN_LAYERS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""Layers of a cache that can be cut and copied here."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a model's own cache can be used.

    - `chunks`: whether a pass may run several tokens after cached ones. Mamba's scan may not: it begins from zero.
    - `batching`: which rows may share a pass: `any` (shorter rows are padded on the left); rows of `equal_length`; or
      `single`, so that each row runs alone (RWKV in transformers mixes rows).
    - `recomputes`: whether nothing is cached, and every row runs from its beginning at each token.
    """

    chunks: bool
    batching: Literal["any", "equal_length", "single"]
    recomputes: bool = False

    @property
    def runs_rows_alone(self) -> bool:
        """Return whether each row needs a pass of its own."""
        return self.batching == "single"

    def batch_key(self, row: int, length: int) -> int:
        """Return a number that is equal for rows that may share a pass. `length`: the row's tokens."""
        return {"any": 0, "equal_length": length, "single": row}[self.batching]

    def batches(self, lengths: Sequence[int]) -> Iterable[list[int]]:
        """Group rows that may share a pass.

        Args:
            lengths: The number of tokens of each row.

        Returns:
            Lists of row numbers. For lengths [3, 5, 3] they are [[0, 1, 2]] if `batching` is "any",
            [[0, 2], [1]] if it is "equal_length", and [[0], [1], [2]] if it is "single".
        """
        rows_by_key: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            rows_by_key[self.batch_key(row, length)].append(row)
        return rows_by_key.values()


class Rearrangement(Protocol):
    """Makes a new cache's tensors from a cache's tensors, by choosing, duplicating or cutting rows.

    The first dimension of each tensor is the row.
    """

    def keys(self, keys: Tensor) -> Tensor:
        """Return the keys of the new rows, [new rows, H_kv, new columns, D]; also used for values."""

    def state(self, number: int, state: Tensor) -> Tensor:
        """Return a state of the new rows, [new rows, ...]. `number`: its index in `ModelCache._list_state_tensors`."""


@dataclass(frozen=True, eq=False)
class _ChosenRows:
    """Chooses the rows `rows`, whole; see `Rearrangement`."""

    rows: Tensor

    def keys(self, keys: Tensor) -> Tensor:
        return keys[self.rows]

    def state(self, number: int, state: Tensor) -> Tensor:
        return state[self.rows]


@dataclass(frozen=True, eq=False)
class _CutRows:
    """Cuts rows to their beginnings; see `Rearrangement`.

    - `rows`: for each new row, the old row that it is the beginning of.
    - `row_index` [new rows, 1]: the same as a tensor.
    - `columns` [new rows, new width]: for each new column, the old column that it is copied from.
    - `states`: for each new row, all states of the old cache, with all its rows, as they were where the row is cut.
    """

    rows: Sequence[int]
    row_index: Tensor
    columns: Tensor
    states: Sequence[Sequence[Tensor]]

    def keys(self, keys: Tensor) -> Tensor:
        return keys[self.row_index, :, self.columns].transpose(1, 2)  # indices on both sides of a slice put it last

    def state(self, number: int, state: Tensor) -> Tensor:
        return torch.stack([states[number][row] for row, states in zip(self.rows, self.states, strict=True)])


class ModelCache:
    """Rows of tokens in the model's own cache. `run` appends columns; `select` and `cut` return other caches.

    A row may be padded on the left, so that rows end in one column. After `run` it may be padded on the right too,
    until `cut` removes that padding.

    - `backbone`: the model.
    - `use`: how its cache can be used.
    - `argument`: the argument under which the model takes the cache; "" where nothing is cached.
    - `cache`: transformers' cache; for RWKV its list of states, None before the first token. Where nothing is cached
      (`CacheUse.recomputes`), transformers' cache holds the tokens themselves.
    - `starts[r]`: the column of row r's first token.
    - `lengths[r]`: how many tokens row r holds from there on.
    - `width`: the number of columns so far.
    - `states[c]`: copies of the states of linear attention after the first c columns (`store_states`).
    """

    def __init__(self, backbone: Backbone, use: CacheUse, rows: int) -> None:
        self.backbone = backbone
        self.use = use
        self.argument = "" if use.recomputes else find_cache_argument(backbone.body)
        self.cache: Any = DynamicCache() if use.recomputes else _build_empty_cache(backbone, self.argument)
        self.starts = [0] * rows
        self.lengths = [0] * rows
        self.width = 0
        self.states: dict[int, list[Tensor]] = {}

    @property
    def is_rwkv(self) -> bool:
        """Return whether the cache is RWKV's list of states."""
        return self.argument == RWKV_ARGUMENT

    @property
    def has_states(self) -> bool:
        """Return whether the model has states of linear attention, which cannot be cut."""
        return self.is_rwkv or any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers)

    @property
    def has_keys(self) -> bool:
        """Return whether the cache holds keys; rows of models without them are never padded on the left."""
        return not self.is_rwkv and any(isinstance(layer, DynamicLayer) for layer in self.cache.layers)

    def run(self, sequences: Sequence[Sequence[int]], store_every: int | None = None) -> Tensor:
        """Append a sequence of tokens to each row, and run these tokens.

        Args:
            sequences: The new tokens of each row. Shorter sequences are padded on the right.
            store_every: After every so many new columns, the states of linear attention are stored, so that rows can
                be cut there. None stores no states.

        Returns:
            The features (last hidden states) of the new tokens, [B, T, F].
        """
        ids = pad_sequences(sequences, self.backbone.device)  # [B, T]
        features = self._run_in_passes(ids, store_every)

        new_lengths = [len(sequence) for sequence in sequences]  # without padding
        self.lengths = [length + new for length, new in zip(self.lengths, new_lengths, strict=True)]
        return features

    def _run_in_passes(self, ids: Tensor, store_every: int | None) -> Tensor:
        """Run the next T tokens of each row, in as many passes as needed.

        Args:
            ids: The tokens, [B, T].
            store_every: After every so many tokens, the states of linear attention are stored. None stores no states.

        Returns:
            The features of the tokens, [B, T, F].
        """
        width_before = self.width
        columns_per_pass = self._choose_columns_per_pass(ids.shape[1], store_every)

        features_by_pass = []
        for pass_ids in torch.split(ids, columns_per_pass, dim=1):
            features_by_pass.append(self._run_columns(pass_ids))  # also increases `self.width`

            columns_so_far = self.width - width_before
            if store_every is not None and columns_so_far % store_every == 0:
                self.store_states()
        return torch.cat(features_by_pass, 1)

    def _choose_columns_per_pass(self, new_width: int, store_every: int | None) -> int:
        """Choose how many of `new_width` new columns run in one pass."""
        # After cached tokens, some models can run only one token at a time.
        can_run_several = self.use.chunks or self.width == 0
        columns_per_pass = new_width if can_run_several else 1

        # States can only be stored between passes.
        if store_every is not None and self.has_states:
            return min(columns_per_pass, store_every)
        return columns_per_pass

    def store_states(self) -> None:
        """Copy the present states of linear attention into `self.states`, because the next token changes them."""
        self.states[self.width] = [state.clone() for state in self._list_state_tensors()]

    def select(self, rows: Sequence[int]) -> "ModelCache":
        """Return a new cache with whole copies of these rows, in this order. A row may occur twice."""
        row_indices = on_device(rows, self.backbone.device)
        return self._rearrange(
            _ChosenRows(row_indices),
            starts=[self.starts[row] for row in rows],
            lengths=[self.lengths[row] for row in rows],
            width=self.width,
        )

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> "ModelCache":
        """Return a new cache with the beginnings of some rows, padded on the left so that all end in one column.

        If the model has states of linear attention, they must have been stored where a row is cut (`store_states`).

        Args:
            rows: The rows to copy.
            lengths: How many tokens of each of them to keep.

        Example:
            Rows "abcdefg" and "hijklmn", cut to lengths [3, 5], become "--abc" and "hijkl".
        """
        width = max(lengths)
        new_starts = [width - length for length in lengths]  # the columns of the first tokens: [2, 0] in the example

        cut_rows = _CutRows(
            rows=rows,
            row_index=on_device(rows, self.backbone.device)[:, None],
            columns=self._compute_source_columns(rows, new_starts, width),
            states=self._select_states_at_ends(rows, lengths),
        )
        return self._rearrange(cut_rows, starts=new_starts, lengths=list(lengths), width=width)

    def _compute_source_columns(self, rows: Sequence[int], new_starts: Sequence[int], width: int) -> Tensor:
        """Compute from which column of this cache each column of a new cache is copied.

        Args:
            rows: For each row of the new cache, the row of this one that it is copied from.
            new_starts: For each row of the new cache, the column of its first token. Padding comes before it.
            width: The number of columns of the new cache.

        Returns:
            Column numbers, [new rows, width]. If rows start in column 0 of this cache and in columns 2 and 0 of a new
            one with 5 columns, they are [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]].
        """
        device = self.backbone.device
        new_columns = torch.arange(width, device=device)

        # How far to the right of its new column each row's tokens are in this cache: [-2, 0] in the example.
        shifts = [self.starts[row] - new_start for row, new_start in zip(rows, new_starts, strict=True)]
        source_columns = new_columns + on_device(shifts, device)[:, None]
        return source_columns.clamp(min=0)  # negative for padding, which may be copied from any column

    def _select_states_at_ends(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[Tensor]]:
        """Return the states that were stored after the first `length` tokens of each row.

        For a model without states, the list of each row is empty.
        """
        if not self.has_states:
            return [[] for _ in rows]

        end_columns = [self.starts[row] + length for row, length in zip(rows, lengths, strict=True)]
        return [self.states[column] for column in end_columns]

    def texts(self, slots: int, width: int) -> "ModelCacheTexts":
        """Return an empty cache of texts that follow this single row, the prompt.

        The arguments have no effect, because nothing is allocated; `CachedPrompt.texts` has the same ones.
        """
        return ModelCacheTexts(self)

    def _run_columns(self, ids: Tensor) -> Tensor:
        """Run the next tokens of each row, [B, T], in one pass, or from the beginning if nothing is cached.

        Returns:
            The features of these tokens, [B, T, F].
        """
        if self.use.recomputes:
            features = self._recompute_rows(ids)
        else:
            padding = self._build_padding_arguments(ids)
            features, self.cache = self.backbone.compute_features_after_cache(ids, self.argument, self.cache, **padding)

        self.width += ids.shape[1]
        return features

    def _recompute_rows(self, ids: Tensor) -> Tensor:
        """Append tokens to each row, and run all rows from their beginning, because nothing is cached.

        Each pass runs as many rows as the token budget allows. All rows have the same length.

        Args:
            ids: The new tokens, [B, T].

        Returns:
            The features of the new tokens, [B, T, F].
        """
        tokens = self._append_to_tokens(ids)  # [B, width + T]
        first_new_column = self.width  # `_run_columns` increases it after this
        rows_per_pass = max(1, self.backbone.budget.tokens // tokens.shape[1])

        features_by_pass = []
        for pass_tokens in torch.split(tokens, rows_per_pass):
            features = self.backbone.features(pass_tokens)  # [rows of the pass, width + T, F]
            features_by_pass.append(features[:, first_new_column:])
        return torch.cat(features_by_pass)

    def _append_to_tokens(self, ids: Tensor) -> Tensor:
        """Append tokens, [B, T], to those stored in transformers' cache.

        Nothing else is cached in this case, so that the cache serves as a growing table: tokens are stored as if they
        were the keys and values of a layer.

        Returns:
            All tokens so far, [B, width + T].
        """
        new_tokens_as_keys = ids[:, None, :, None]  # [B, 1, T, 1], the shape of keys
        all_tokens_as_keys, _ = self.cache.update(new_tokens_as_keys, new_tokens_as_keys, layer_idx=0)
        all_tokens: Tensor = all_tokens_as_keys[:, 0, :, 0]
        return all_tokens

    def _build_padding_arguments(self, ids: Tensor) -> dict[str, Tensor]:
        """Build the arguments that tell the model which columns are padding on the left of the rows.

        Args:
            ids: The tokens that run next, [B, T].

        Returns:
            Arguments for the model's `forward`. Empty if no row is padded.
        """
        is_any_row_padded = any(start > 0 for start in self.starts)
        if not self.has_keys or not is_any_row_padded:
            return {}

        total_width = self.width + ids.shape[1]
        mask = self._build_token_mask(total_width)  # for cached and new tokens
        if not self._takes_positions:
            return {"attention_mask": mask}

        positions = _compute_token_positions(mask)
        new_positions = positions[:, self.width :]  # the model takes the positions of the new tokens only
        return {"attention_mask": mask, "position_ids": new_positions}

    def _build_token_mask(self, width: int) -> Tensor:
        """Mark the first `width` columns of each row: 0 for padding on the left, 1 for tokens, [B, width].

        Rows that start in columns 0 and 1 give [[1, 1, 1], [0, 1, 1]].
        """
        columns = torch.arange(width, device=self.backbone.device)
        starts = on_device(self.starts, self.backbone.device)[:, None]  # [B, 1]
        return (columns >= starts).long()

    @property
    def _takes_positions(self) -> bool:
        """Return whether the model takes the positions of tokens as an argument."""
        return "position_ids" in signature(self.backbone.body.forward).parameters

    def _list_state_tensors(self) -> list[Tensor]:
        """List the present states of linear attention, layer by layer.

        Within a layer, the states of convolutions come first. Attention layers have none.

        Returns:
            The tensors of the cache itself. The first dimension of each is the row.
        """
        if self.is_rwkv:  # its cache is such a list, and None before the first token
            return list(self.cache or ())

        state_tensors = []
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer_states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
                # A state is None if it is not computed yet, or if this layer has no such state.
                state_tensors += [state for state in layer_states if state is not None]
        return state_tensors

    def _rearrange(
        self, rearrangement: Rearrangement, *, starts: list[int], lengths: list[int], width: int
    ) -> "ModelCache":
        """Return a new cache with other rows. This cache stays as it is.

        Args:
            rearrangement: Makes the new tensors from those of this cache.
            starts: For each new row, the column of its first token.
            lengths: For each new row, the number of its tokens.
            width: The number of columns of the new cache.
        """
        new_cache = copy(self)
        new_cache.starts = starts
        new_cache.lengths = lengths
        new_cache.width = width
        new_cache.states = {}  # states that were stored at earlier columns are not taken over
        new_cache.cache = self._rearrange_tensors(rearrangement)
        return new_cache

    def _rearrange_tensors(self, rearrangement: Rearrangement) -> Any:
        """Return a rearranged copy of the model's cache object: RWKV's list of states, or transformers' cache."""
        if self.is_rwkv:
            return [rearrangement.state(number, state) for number, state in enumerate(self._list_state_tensors())]
        return _rearrange_cache(self.cache, rearrangement)


def _compute_token_positions(mask: Tensor) -> Tensor:
    """Number the tokens of each row from 0, not counting the padding on the left, whose number is 0 too.

    A mask [[1, 1, 1], [0, 1, 1]], with 0 for padding, gives [[0, 1, 2], [0, 0, 1]].
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


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
        state_numbers: Yields the next number for a state. States are numbered through all layers.
    """
    rearranged_layer = copy(layer)

    if isinstance(layer, LinearAttentionLayer):
        rearranged_layer.conv_states = _rearrange_states(layer.conv_states, rearrangement, state_numbers)
        rearranged_layer.recurrent_states = _rearrange_states(layer.recurrent_states, rearrangement, state_numbers)

    if isinstance(layer, DynamicLayer) and layer.keys is not None:
        rearranged_layer.keys = rearrangement.keys(layer.keys)
        rearranged_layer.values = rearrangement.keys(layer.values)  # values are arranged like keys
    return rearranged_layer


def _rearrange_states(
    states: Mapping[Any, Tensor | None], rearrangement: Rearrangement, state_numbers: Iterator[int]
) -> dict[Any, Tensor | None]:
    """Return the states of one layer with other rows, under the same keys.

    Args:
        states: The states of linear attention. A state that is not computed is None, and stays so.
        rearrangement: Makes each new state from the old one and its number.
        state_numbers: Yields the next number for a state. Only states that are computed have one.
    """
    rearranged_states: dict[Any, Tensor | None] = {}
    for key, state in states.items():
        if state is None:
            rearranged_states[key] = None
        else:
            rearranged_states[key] = rearrangement.state(next(state_numbers), state)
    return rearranged_states


def find_cache_argument(body: Any) -> str:
    """Find out under which argument a model takes its cache, such as "past_key_values".

    Raises:
        NotImplementedError: The model takes no cache.
    """
    parameters = signature(body.forward).parameters
    for name in ARGUMENTS:
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
    if argument == RWKV_ARGUMENT:
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
    if type(layer) not in KNOWN_LAYERS:
        raise NotImplementedError(f"caches of {type(layer).__name__}")
    return layer


class CachedRow(NamedTuple):
    """A row of a cache, which holds the tokens of the prompt and then a text.

    - `cache`: the cache of several texts that ran in one pass.
    - `row`: the number of the text's row.
    """

    cache: ModelCache
    row: int


class ModelCacheTexts:
    """Texts after a prompt in the model's own cache, each with a copy of the prompt's keys and states.

    A slot is a number under which a text is cached; a text replaces the earlier text of its slot.

    - `prompt`: the cache of the prompt, which is its only row.
    - `sequences`: the tokens of the text in each slot.
    - `rows`: the row that holds the text of each slot.
    """

    def __init__(self, prompt: ModelCache) -> None:
        self.prompt = prompt
        self.sequences: dict[int, Sequence[int]] = {}
        self.rows: dict[int, CachedRow] = {}

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text; where nothing is cached, the prompt runs too."""
        return len(sequence) + (self.prompt.width if self.prompt.use.recomputes else 0)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run B texts after the prompt, and cache them.

        Args:
            slots: For each text, the number under which to cache it. It replaces an earlier text with this number.
            sequences: The tokens of each text. T is the length of the longest.
            first: The features of the tokens before this index are left out.

        Returns:
            The features (last hidden states) of the texts, [B, T - first, F]. After the end of a shorter text they
            mean nothing.
        """
        self.sequences.update(zip(slots, sequences, strict=True))  # read by `_run_stored_texts`

        slot_groups: list[Sequence[int]]
        if self.prompt.use.runs_rows_alone:
            slot_groups = [[slot] for slot in slots]
        else:
            slot_groups = [slots]

        features_by_group = []
        for group in slot_groups:
            features = self._run_stored_texts(group)  # [texts of the group, T, F]
            features_by_group.append(features[:, first:])
        return _join_rows(features_by_group)

    def _run_stored_texts(self, slots: Sequence[int]) -> Tensor:
        """Run the texts in these slots together after the prompt, and note in `self.rows` where each is cached.

        States of linear attention are stored before the texts and after every STATE_INTERVAL tokens, so that branches
        (continuations of texts) can start there.

        Returns:
            The features of the texts, [slots, T, F].
        """
        # Start with one copy of the prompt per text.
        prompt_row = 0  # the only row of the prompt's cache
        cache = self.prompt.select([prompt_row] * len(slots))
        cache.store_states()

        texts = [self.sequences[slot] for slot in slots]
        features = cache.run(texts, store_every=STATE_INTERVAL)

        for row, slot in enumerate(slots):
            self.rows[slot] = CachedRow(cache, row)
        return features

    def branches(self, capacity: int, max_tokens: int) -> "ModelCacheBranches":
        """Return an object for branches (continuations) of these texts; its `admit` starts them.

        The arguments have no effect, because nothing is allocated; `CachedTexts.branches` has the same ones.
        """
        return ModelCacheBranches(self)


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Join the rows of tensors [rows, columns, F], and append zeros to rows with fewer columns than the longest."""
    longest = max(part.shape[1] for part in parts)
    padded_parts = [F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts]
    return torch.cat(padded_parts)


class ContinuedBranch(NamedTuple):
    """A branch that goes on, perhaps under another number.

    - `number`: its new number among the branches.
    - `row`: its row in the cache of its old group.
    """

    number: int
    row: int


class BranchGroup(NamedTuple):
    """Branches that run in the same passes.

    - `numbers[r]`: the number of the branch in row r of `cache`.
    - `cache`: the tokens of the branches, with prompt and text before them.
    """

    numbers: list[int]
    cache: ModelCache

    @property
    def tokens_of_step(self) -> int:
        """Return how many tokens ran in the last step: one per branch, or all tokens where nothing is cached."""
        return sum(self.cache.lengths) if self.cache.use.recomputes else len(self.numbers)

    def step(self, tokens: Tensor) -> Tensor:
        """Run the next token of each branch of the group.

        Args:
            tokens: The next tokens of all branches, also those of other groups, [B].

        Returns:
            The features of the tokens of this group, [branches of the group, F].
        """
        group_tokens = tokens[self.numbers].tolist()
        sequences = [[token] for token in group_tokens]  # of one token each
        return self.cache.run(sequences)[:, 0]

    def selected(self, branches: Sequence[int]) -> "list[BranchGroup]":
        """Build the groups of the new branches that continue branches of this group.

        Args:
            branches: For each new branch, the number of the old branch that it continues. This may be in another group.

        Returns:
            One group, or none if no branch of this group is continued. If the model can run only one row at a time,
            one group per new branch.
        """
        continued = self._list_continued_branches(branches)
        if self.cache.use.runs_rows_alone:
            return [self._copy_branches([branch]) for branch in continued]
        return [self._copy_branches(continued)] if continued else []

    def _list_continued_branches(self, branches: Sequence[int]) -> list[ContinuedBranch]:
        """List the new branches that continue a branch of this group.

        Args:
            branches: For each new branch, the number of the old branch that it continues. This may be in another group.
        """
        row_by_old_number = {number: row for row, number in enumerate(self.numbers)}
        continued = []
        for new_number, old_number in enumerate(branches):
            if old_number in row_by_old_number:
                row = row_by_old_number[old_number]
                continued.append(ContinuedBranch(new_number, row))
        return continued

    def _copy_branches(self, branches: Sequence[ContinuedBranch]) -> "BranchGroup":
        """Return a group of these branches, with copies of their rows."""
        rows = self.cache.select([branch.row for branch in branches])
        return BranchGroup([branch.number for branch in branches], rows)


class ModelCacheBranches:
    """Branches: continuations of texts, which all get one token per step. Each has a copy of its keys and states.

    Branches are numbered in the order of `admit`, `add` and `select`.

    - `texts`: the texts that they continue.
    - `device`: where the model runs.
    - `groups`: the branches that run in the same passes, with their cache. Each branch is in one group.
    - `tokens_run`: how many tokens the last step ran. The first step after `admit` also counts tokens of texts that
      ran again there, because states are stored after some tokens only.
    """

    def __init__(self, texts: ModelCacheTexts) -> None:
        self.texts = texts
        self.device = texts.prompt.backbone.device
        self.tokens_run = 0
        self.groups: list[BranchGroup] = []
        self._tokens_run_again = 0  # in `admit`, since the last step

    @property
    def count(self) -> int:
        """The number of branches."""
        return sum(len(group.numbers) for group in self.groups)

    def admit(self, slots: Sequence[int], tokens_before: Sequence[int]) -> None:
        """Start branches, each of which continues the beginning of a cached text.

        Args:
            slots: For each new branch, the number under which its text is cached.
            tokens_before: For each new branch, how many tokens of this text come before it.
        """
        first_number = self.count  # new branches are numbered after the present ones
        new_branches = []
        for number, (slot, length) in enumerate(zip(slots, tokens_before, strict=True), start=first_number):
            new_branches.append(self._build_new_branch(number, slot, length))

        for branches_of_group in _group_branches_by_pass(new_branches, self.texts.prompt.use):
            self._start_group(branches_of_group)  # appends to `self.groups`

    def _build_new_branch(self, number: int, slot: int, text_length: int) -> "_NewBranch":
        """Return branch `number`, which continues the first `text_length` tokens of the text in a slot."""
        text_tokens = self.texts.sequences[slot]
        return _NewBranch(number, text=self.texts.rows[slot], beginning=text_tokens[:text_length])

    def _start_group(self, branches: "Sequence[_NewBranch]") -> None:
        """Append a group of new branches that run together, with a cache of their own.

        The cache begins with copies of the prompt and of the beginnings of texts that the branches continue.

        Args:
            branches: The branches of the group. Their texts are all in the same cache.
        """
        cache_of_texts = branches[0].text.cache
        cut = _cut_after_beginnings(
            cache_of_texts,
            rows=[branch.text.row for branch in branches],
            beginnings=[branch.beginning for branch in branches],
            prompt_width=self.texts.prompt.width,
        )
        self._tokens_run_again += cut.tokens_run  # counted with the next step

        numbers = [branch.number for branch in branches]
        self.groups.append(BranchGroup(numbers, cut.cache))

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run whole sequences, without the prompt, and start a branch at the end of each sequence.

        Returns:
            The features (last hidden state) of the last token of each sequence, [sequences, F].
        """
        first_number = self.count  # new branches are numbered after the present ones
        lengths = [len(sequence) for sequence in sequences]
        index_groups = self._choose_sequence_use().batches(lengths)  # indices of sequences that may share a pass

        features_by_index: dict[int, Tensor] = {}  # of the last token of each sequence, [F]
        for indices in index_groups:
            group_sequences = [sequences[index] for index in indices]
            branch_numbers = [first_number + index for index in indices]
            group_features = self._add_group(group_sequences, branch_numbers)
            features_by_index.update(zip(indices, group_features, strict=True))

        # Groups may have changed the order of the sequences.
        return torch.stack([features_by_index[index] for index in range(len(sequences))])

    def _choose_sequence_use(self) -> CacheUse:
        """Choose which whole sequences may share a pass.

        If the model has states, which cannot be cut, only sequences of equal length share one. If the model can run
        only one row at a time, none do.
        """
        prompt = self.texts.prompt
        if prompt.use.batching == "any" and prompt.has_states:
            return replace(prompt.use, batching="equal_length")
        return prompt.use

    def _add_group(self, sequences: Sequence[Sequence[int]], numbers: list[int]) -> Tensor:
        """Run whole sequences together, without the prompt, and append a group of branches that continue them.

        Args:
            sequences: The tokens of sequences that may share a pass.
            numbers: For each sequence, the number of its branch.

        Returns:
            The features of the last token of each sequence, [sequences, F].
        """
        prompt = self.texts.prompt  # its tokens are not used here
        rows = range(len(sequences))
        cache = ModelCache(prompt.backbone, prompt.use, rows=len(sequences))

        features = cache.run(sequences)  # [sequences, T, F], with padding on the right of shorter sequences
        last_token_indices = [length - 1 for length in cache.lengths]

        lengths_may_differ = self._choose_sequence_use().batching == "any"
        if lengths_may_differ:
            # Move padding to the left, so that the next token of every sequence belongs into the next column.
            cache = cache.cut(rows, cache.lengths)

        self.groups.append(BranchGroup(numbers, cache))
        return features[rows, last_token_indices]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each branch, and run these tokens, one group of branches after the other.

        Args:
            tokens: The next token of each branch, [B].

        Returns:
            The features (last hidden states) of the new tokens, [B, F].
        """
        features_by_group = torch.cat([group.step(tokens) for group in self.groups])  # [B, F]

        tokens_of_groups = sum(group.tokens_of_step for group in self.groups)
        self.tokens_run = tokens_of_groups + self._tokens_run_again
        self._tokens_run_again = 0

        return self._sort_by_branch(features_by_group)

    def _sort_by_branch(self, features_by_group: Tensor) -> Tensor:
        """Put the features of all branches, [B, F], in the order of branch numbers instead of group after group."""
        numbers_by_group = [number for group in self.groups for number in group.numbers]
        features = torch.empty_like(features_by_group)
        features[numbers_by_group] = features_by_group
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Replace the branches: new branch b continues old branch `rows[b]`. A branch may occur twice."""
        new_groups = []
        for group in self.groups:
            new_groups += group.selected(rows)
        self.groups = new_groups

    def branch(self, row: int) -> "ModelCacheBranches":
        """Return a copy of branch number `row` alone. Running it does not change this object."""
        copied = copy(self)
        copied.select([row])
        return copied


class _NewBranch(NamedTuple):
    """A branch that is being started.

    - `number`: its number among the branches.
    - `text`: where its text is cached, after the prompt.
    - `beginning`: the tokens of the text that it continues.
    """

    number: int
    text: CachedRow
    beginning: Sequence[int]


def _group_branches_by_pass(branches: Sequence[_NewBranch], use: CacheUse) -> Iterable[list[_NewBranch]]:
    """Group branches that may share a pass of the model, and whose texts are in the same cache."""
    groups: dict[tuple[int, int], list[_NewBranch]] = defaultdict(list)
    for branch in branches:
        cache_id = id(branch.text.cache)
        batch_key = use.batch_key(branch.number, len(branch.beginning))  # equal for branches that may share a pass
        groups[cache_id, batch_key].append(branch)
    return groups.values()


class CutCache(NamedTuple):
    """A cache whose rows were cut.

    - `cache`: the new cache.
    - `tokens_run`: how many tokens had to run again for it.
    """

    cache: ModelCache
    tokens_run: int


def _cut_after_beginnings(
    cache: ModelCache, *, rows: Sequence[int], beginnings: Sequence[Sequence[int]], prompt_width: int
) -> CutCache:
    """Copy some rows of a cache, and cut each copy after the beginning of its text.

    Args:
        cache: The cache. Each row holds the prompt and then a text.
        rows: The rows to copy.
        beginnings: For each of these rows, the first tokens of its text, which are kept.
        prompt_width: The number of tokens of the prompt.

    Returns:
        The new cache, and how many tokens had to run again for it.
    """
    final_lengths = [prompt_width + len(beginning) for beginning in beginnings]
    if cache.has_states:
        return _cut_with_states(cache, rows=rows, beginnings=beginnings, final_lengths=final_lengths)

    cut_cache = cache.cut(rows, final_lengths)  # keys and values can be cut after any token
    return CutCache(cut_cache, tokens_run=0)


def _cut_with_states(
    cache: ModelCache, *, rows: Sequence[int], beginnings: Sequence[Sequence[int]], final_lengths: Sequence[int]
) -> CutCache:
    """Copy some rows of a cache with states of linear attention, and cut each copy after the beginning of its text.

    States cannot be cut, but they were stored after every STATE_INTERVAL (16) tokens of a text. To cut a text after 20
    tokens, its row is cut after 16, and the other 4 tokens run again.

    Args:
        cache: The cache. Each row holds the prompt and then a text.
        rows: The rows to copy.
        beginnings: For each of these rows, the first tokens of its text, which are kept.
        final_lengths: For each of these rows, the number of tokens to keep, those of the prompt included.

    Returns:
        The new cache, and how many tokens had to run again for it.
    """
    tokens_to_run = [_select_tokens_to_run(beginning) for beginning in beginnings]
    run_counts = [len(tokens) for tokens in tokens_to_run]

    # 1. Cut each row where its states were stored last.
    stored_lengths = [length - run_count for length, run_count in zip(final_lengths, run_counts, strict=True)]
    new_cache = cache.cut(rows, stored_lengths)
    new_cache.store_states()  # for rows that need no further tokens

    # 2. Run the other tokens. States are stored after each of them, because rows end after different numbers of tokens.
    if any(run_counts):
        new_cache.run(tokens_to_run, store_every=1)

    # 3. Cut each row at its end, to remove the padding of rows with fewer tokens to run.
    all_rows = range(len(rows))
    cut_at_ends = new_cache.cut(all_rows, final_lengths)
    return CutCache(cut_at_ends, tokens_run=sum(run_counts))


def _select_tokens_to_run(tokens: Sequence[int]) -> Sequence[int]:
    """Select the tokens after the last multiple of STATE_INTERVAL, where states were stored."""
    stored_count = len(tokens) // STATE_INTERVAL * STATE_INTERVAL
    return tokens[stored_count:]
