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
        """Return lists of the rows that may share a pass. Row r has `lengths[r]` tokens.

        Lengths [3, 5, 3] give [[0, 1, 2]] for "any", [[0, 2], [1]] for "equal_length", [[0], [1], [2]] for "single".
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
        """Append a sequence to each row, padded on the right; return the features of the new tokens, [B, T, F].

        store_every: after how many new columns to store the states of linear attention, so that rows can be cut there.
        """
        features = self._run_in_passes(pad_sequences(sequences, self.backbone.device), store_every)
        new_lengths = [len(sequence) for sequence in sequences]
        self.lengths = [length + new for length, new in zip(self.lengths, new_lengths, strict=True)]
        return features

    def _run_in_passes(self, ids: Tensor, store_every: int | None) -> Tensor:
        """Run the next T tokens of B rows, [B, T], in as many passes as the model needs; return features, [B, T, F].

        store_every: after how many of them the states of linear attention are stored, so that rows can be cut there;
        None for never.
        """
        width_before = self.width
        columns_per_pass = self._choose_columns_per_pass(ids.shape[1], store_every)
        features = []
        for pass_ids in torch.split(ids, columns_per_pass, dim=1):
            features.append(self._run_columns(pass_ids))  # adds the pass's columns to `self.width`
            new_columns = self.width - width_before
            if store_every is not None and new_columns % store_every == 0:
                self.store_states()
        return torch.cat(features, 1)

    def _choose_columns_per_pass(self, new_width: int, store_every: int | None) -> int:
        """Return how many of `new_width` new columns a pass may run: at most `store_every`, where states are stored."""
        takes_several = self.use.chunks or not self.width  # some models take one token at a time after cached ones
        columns = new_width if takes_several else 1
        if store_every is not None and self.has_states:
            return min(columns, store_every)
        return columns

    def store_states(self) -> None:
        """Copy the present states of linear attention into `self.states`; the next token changes them."""
        self.states[self.width] = [state.clone() for state in self._list_state_tensors()]

    def select(self, rows: Sequence[int]) -> "ModelCache":
        """Return a new cache with whole copies of these rows, in this order; a row may occur twice."""
        return self._rearrange(
            _ChosenRows(on_device(rows, self.backbone.device)),
            starts=[self.starts[row] for row in rows],
            lengths=[self.lengths[row] for row in rows],
            width=self.width,
        )

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> "ModelCache":
        """Return a new cache with copies of some rows, each cut to its first `length` tokens and padded on the left.

        Cut to lengths [3, 5], rows abcdefg and hijklmn become --abc and hijkl, which start in columns [2, 0]. States of
        linear attention must have been stored after each row's last token that stays (`store_states`).
        """
        width = max(lengths)
        new_starts = [width - length for length in lengths]  # by new row: the column of its first token
        cut_rows = _CutRows(
            rows=rows,
            row_index=on_device(rows, self.backbone.device)[:, None],
            columns=self._compute_source_columns(rows, new_starts, width),  # where each new column is copied from
            states=self._select_states_at_ends(rows, lengths),
        )
        return self._rearrange(cut_rows, starts=new_starts, lengths=list(lengths), width=width)

    def _compute_source_columns(self, rows: Sequence[int], new_starts: Sequence[int], width: int) -> Tensor:
        """Return the column of this cache that each column of the new one is copied from, [new rows, width].

        A row starts in the column of its first token, after padding. For rows that start in column 0 here, and in
        columns 2 and 0 of the new cache, with 5 columns:

            [[0, 0, 0, 1, 2],
             [0, 1, 2, 3, 4]]
        """
        device = self.backbone.device
        new_columns = torch.arange(width, device=device)
        shifts = [self.starts[row] - new_start for row, new_start in zip(rows, new_starts, strict=True)]
        source_columns = new_columns + on_device(shifts, device)[:, None]  # negative for padding
        return source_columns.clamp(min=0)  # padding may be copied from any column

    def _select_states_at_ends(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[Tensor]]:
        """Return the states stored after the first `length` tokens of each row; none for a model without states."""
        if not self.has_states:
            return [[] for _ in rows]
        return [self.states[self.starts[row] + length] for row, length in zip(rows, lengths, strict=True)]

    def texts(self, slots: int, width: int) -> "ModelCacheTexts":
        """Return an empty cache of texts that follow this single row, the prompt.

        The arguments have no effect, because nothing is allocated; `CachedPrompt.texts` has the same ones.
        """
        return ModelCacheTexts(self)

    def _run_columns(self, ids: Tensor) -> Tensor:
        """Run the next columns [B, T]; return their features [B, T, F]."""
        if self.use.recomputes:
            features = self._recompute_rows(ids)
        else:
            padding = self._build_padding_arguments(ids)
            features, self.cache = self.backbone.compute_features_after_cache(ids, self.argument, self.cache, **padding)
        self.width += ids.shape[1]
        return features

    def _recompute_rows(self, ids: Tensor) -> Tensor:
        """Append tokens, [B, T], and run each row from its beginning; return the features of the new tokens, [B, T, F].

        All rows have the same length. A pass has as many rows as the token budget allows.
        """
        tokens = self._append_to_tokens(ids)  # [B, width + T]
        width_before = self.width  # `_run_columns` adds the new columns after this
        rows_per_pass = max(1, self.backbone.budget.tokens // tokens.shape[1])
        new_features = []
        for pass_tokens in torch.split(tokens, rows_per_pass):
            features = self.backbone.features(pass_tokens)  # [rows, width + T, F]
            new_features.append(features[:, width_before:])
        return torch.cat(new_features)

    def _append_to_tokens(self, ids: Tensor) -> Tensor:
        """Append tokens, [B, T], to those in transformers' cache; return all tokens, [B, width + T].

        The cache holds them as keys: it is used as a growing table of tokens.
        """
        as_keys = ids[:, None, :, None]  # the shape of keys: [B, 1, T, 1]
        all_as_keys, _ = self.cache.update(as_keys, as_keys, layer_idx=0)  # [B, 1, width + T, 1]
        tokens: Tensor = all_as_keys[:, 0, :, 0]
        return tokens

    def _build_padding_arguments(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the model's arguments that mark padding on the left of the rows; none where no row is padded.

        ids: the tokens that run next, [B, T].
        """
        is_padded = any(self.starts)  # a row's start is the column of its first token
        if not self.has_keys or not is_padded:
            return {}
        mask = self._build_token_mask(self.width + ids.shape[1])  # [B, width + T]: cached columns, then the new ones
        if not self._takes_positions:
            return {"attention_mask": mask}
        positions = _compute_token_positions(mask)  # [B, width + T], counted without padding
        return {"attention_mask": mask, "position_ids": positions[:, self.width :]}  # positions of new tokens alone

    def _build_token_mask(self, width: int) -> Tensor:
        """Return 0 for padding on the left and 1 for tokens, [B, width].

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
        """Return the states of linear attention in the cache, [rows, ...] each, layer by layer.

        A layer has convolution states, then recurrent ones; attention layers have keys instead.
        """
        if self.is_rwkv:  # its cache is this list itself, and None before the first token
            return list(self.cache or ())
        tensors = []
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
                tensors += [state for state in states if state is not None]  # None: not computed, or not in this layer
        return tensors

    def _rearrange(
        self, rearrangement: Rearrangement, *, starts: list[int], lengths: list[int], width: int
    ) -> "ModelCache":
        """Return a new cache with other rows, which `rearrangement` chooses, duplicates or cuts. This one stays.

        - starts: by new row, the column of its first token.
        - lengths: by new row, the number of its tokens.
        - width: the number of columns.
        """
        other = copy(self)
        other.starts = starts
        other.lengths = lengths
        other.width = width
        other.states = {}  # copies of states at earlier columns stay with this cache
        other.cache = self._rearrange_tensors(rearrangement)  # keys, values and present states
        return other

    def _rearrange_tensors(self, rearrangement: Rearrangement) -> Any:
        """Return a rearranged copy of the model's cache object: RWKV's list of states, or transformers' cache."""
        if self.is_rwkv:
            return [rearrangement.state(number, state) for number, state in enumerate(self._list_state_tensors())]
        return _rearrange_cache(self.cache, rearrangement)


def _compute_token_positions(mask: Tensor) -> Tensor:
    """Return the number of each token in its row, from 0, for rows with padding on the left; both are [B, columns].

    Mask [[1, 1, 1], [0, 1, 1]] gives [[0, 1, 2], [0, 0, 1]]; padding gets 0.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _rearrange_cache(cache: DynamicCache, rearrangement: Rearrangement) -> DynamicCache:
    """Return a copy of transformers' cache whose keys, values and states are made by `rearrangement`.

    States are numbered through all layers, in the order of `ModelCache._list_state_tensors`.
    """
    rearranged = copy(cache)
    state_numbers = count()  # each state of each layer takes the next number
    rearranged.layers = [_rearrange_layer(layer, rearrangement, state_numbers) for layer in cache.layers]
    return rearranged


def _rearrange_layer(layer: Any, rearrangement: Rearrangement, state_numbers: Iterator[int]) -> Any:
    """Return a copy of a layer of transformers' cache whose keys and values, or states, have other rows.

    - rearrangement: returns such a tensor with rows chosen, duplicated or cut.
    - state_numbers: yields 0, 1, 2, ... for the states of all layers, by which `rearrangement` tells states apart.
    """
    rearranged = copy(layer)
    # A layer of linear attention has states, one of attention has keys and values, and some layers have both.
    if isinstance(layer, LinearAttentionLayer):
        rearranged.conv_states = _rearrange_states(layer.conv_states, rearrangement, state_numbers)
        rearranged.recurrent_states = _rearrange_states(layer.recurrent_states, rearrangement, state_numbers)
    if isinstance(layer, DynamicLayer) and layer.keys is not None:
        rearranged.keys = rearrangement.keys(layer.keys)
        rearranged.values = rearrangement.keys(layer.values)  # values have the rows and columns of keys
    return rearranged


def _rearrange_states(
    states: Mapping[Any, Tensor | None], rearrangement: Rearrangement, state_numbers: Iterator[int]
) -> dict[Any, Tensor | None]:
    """Return a layer's states of linear attention with other rows, under the same keys.

    - states: None for a state that is not computed; it stays None, and has no number.
    - rearrangement: returns a state with rows chosen, duplicated or cut.
    - state_numbers: yields 0, 1, 2, ... for the states of all layers, by which `rearrangement` tells states apart.
    """
    rearranged: dict[Any, Tensor | None] = {}
    for key, state in states.items():
        if state is None:
            rearranged[key] = None
        else:
            rearranged[key] = rearrangement.state(next(state_numbers), state)
    return rearranged


def find_cache_argument(body: Any) -> str:
    """Return the name of the argument by which a model takes its cache, such as `past_key_values`.

    Raises NotImplementedError for a model that takes no cache.
    """
    parameters = signature(body.forward).parameters
    for name in ARGUMENTS:
        if name in parameters:
            return name
    raise NotImplementedError(f"{type(body).__name__} takes no cache")


def _build_empty_cache(backbone: Backbone, argument: str) -> DynamicCache | None:
    """Return an empty cache for a model; None for RWKV, which creates its states itself.

    Raises NotImplementedError for a model with layers other than attention and linear attention.

    argument: the name under which the model takes its cache.
    """
    if argument == RWKV_ARGUMENT:
        return None
    cache = DynamicCache(config=backbone.model.config)
    # Rows are cut to their beginnings later, so that sliding windows, which drop keys, keep all keys here.
    cache.layers = [_to_cuttable_layer(layer) for layer in cache.layers]
    return cache


def _to_cuttable_layer(layer: Any) -> Any:
    """Return a layer of a cache whose rows can be cut: instead of a sliding window, one that keeps all keys.

    Raises NotImplementedError for layers other than attention and linear attention.
    """
    if type(layer) is DynamicSlidingWindowLayer:
        return DynamicLayer()
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
        """Run B texts after the prompt, and cache them; return their last hidden states, [B, T - first, F].

        - slots: for each text, the number under which it is cached, in place of an earlier text.
        - sequences: the tokens of each text; T is the length of the longest. Features after a shorter one mean nothing.
        - first: the index of the token at which the returned features begin.
        """
        self.sequences.update(zip(slots, sequences, strict=True))  # the tokens that the passes run
        if self.prompt.use.runs_rows_alone:  # this model can run only one text at a time
            slots_of_passes: list[Sequence[int]] = [[slot] for slot in slots]
        else:
            slots_of_passes = [slots]
        features_of_passes = []
        for pass_slots in slots_of_passes:
            features = self._run_in_a_pass(pass_slots)  # [slots of the pass, T, F]
            features_of_passes.append(features[:, first:])
        return _join_rows(features_of_passes)

    def _run_in_a_pass(self, slots: Sequence[int]) -> Tensor:
        """Run the texts that are stored under these numbers (slots) after the prompt; return features, [slots, T, F].

        Notes in `rows` where each text is cached. States of linear attention are stored before the texts and after
        every STATE_INTERVAL tokens, so that branches (continuations of texts) can begin there.
        """
        prompt_row = 0  # the only row of the prompt's cache
        cache = self.prompt.select([prompt_row] * len(slots))  # a row per text, which holds the prompt so far
        cache.store_states()
        texts = [self.sequences[slot] for slot in slots]
        features = cache.run(texts, store_every=STATE_INTERVAL)
        self.rows.update({slot: CachedRow(cache, row) for row, slot in enumerate(slots)})
        return features

    def branches(self, capacity: int, max_tokens: int) -> "ModelCacheBranches":
        """Return an object for branches (continuations) of these texts; its `admit` starts them.

        The arguments have no effect, because nothing is allocated; `CachedTexts.branches` has the same ones.
        """
        return ModelCacheBranches(self)


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts, [rows, columns, F] each, with zeros after those with fewer columns."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])


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
        """Run the next token of each branch of the group; return their features, [branches of the group, F].

        tokens: the next token of every branch, in any group, [B].
        """
        group_tokens = [[token] for token in tokens[self.numbers].tolist()]
        return self.cache.run(group_tokens)[:, 0]

    def selected(self, branches: Sequence[int]) -> "list[BranchGroup]":
        """Return groups of the new branches that continue branches of this one: one group, none, or one per branch.

        branches: the number of the old branch that each new branch continues, in any group.
        """
        continued = self._list_continued_branches(branches)
        if self.cache.use.runs_rows_alone:
            return [self._copy_branches([branch]) for branch in continued]
        return [self._copy_branches(continued)] if continued else []

    def _list_continued_branches(self, branches: Sequence[int]) -> list[ContinuedBranch]:
        """Return the new branches that continue a branch of this group.

        branches: the number of the old branch that each new branch continues, in any group.
        """
        row_of_branch = {number: row for row, number in enumerate(self.numbers)}
        continued = []
        for new_number, old_number in enumerate(branches):
            if old_number in row_of_branch:
                continued.append(ContinuedBranch(new_number, row_of_branch[old_number]))
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
        """Append branches, each of which continues the beginning of a cached text.

        Branches that may share a pass of the model, and whose texts are in one cache, become a group with a new cache.

        - slots: by new branch, the number under which its text is cached.
        - tokens_before: by new branch, how many tokens of the text it continues.
        """
        new_branches = []
        for number, (slot, text_length) in enumerate(zip(slots, tokens_before, strict=True), start=self.count):
            new_branches.append(self._build_new_branch(number, slot, text_length))
        for group_branches in _group_branches_by_pass(new_branches, self.texts.prompt.use):
            self._start_group(group_branches)  # appends to `groups`

    def _build_new_branch(self, number: int, slot: int, text_length: int) -> "_NewBranch":
        """Return branch `number`, which continues the first `text_length` tokens of the text in a slot."""
        text_tokens = self.texts.sequences[slot]
        return _NewBranch(number, text=self.texts.rows[slot], beginning=text_tokens[:text_length])

    def _start_group(self, branches: "Sequence[_NewBranch]") -> None:
        """Append a group of branches that step together, with a cache of their own.

        Each branch continues the beginning of a cached text. The texts are rows of one cache, from which their
        beginnings are copied.
        """
        cache_of_texts = branches[0].text.cache  # the same for all of them
        cut = _cut_after_beginnings(
            cache_of_texts,
            rows=[branch.text.row for branch in branches],
            beginnings=[branch.beginning for branch in branches],  # tokens
            prompt_width=self.texts.prompt.width,
        )
        self._tokens_run_again += cut.tokens_run  # counted with the next step
        numbers = [branch.number for branch in branches]
        self.groups.append(BranchGroup(numbers, cut.cache))

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run whole sequences, without the prompt, and append a branch for each, which later steps continue.

        Returns the last hidden state of each sequence's last token, [sequences, F].
        """
        first_number = self.count  # branches are numbered in the order in which they are added
        last_features: dict[int, Tensor] = {}  # by index of a sequence, [F]
        lengths = [len(sequence) for sequence in sequences]
        for indices in self._choose_sequence_use().batches(lengths):  # sequences that can share a pass, in any order
            group_sequences = [sequences[index] for index in indices]
            numbers = [first_number + index for index in indices]
            group_features = self._add_group(group_sequences, numbers)  # runs them, and appends to `groups`
            last_features.update(zip(indices, group_features, strict=True))
        return torch.stack([last_features[index] for index in range(len(sequences))])

    def _choose_sequence_use(self) -> CacheUse:
        """Return how whole sequences share passes: with states, which cannot be cut, only if they are equally long."""
        prompt = self.texts.prompt
        if prompt.use.batching == "any" and prompt.has_states:
            return replace(prompt.use, batching="equal_length")
        return prompt.use

    def _add_group(self, sequences: Sequence[Sequence[int]], numbers: list[int]) -> Tensor:
        """Run whole sequences in a pass, without the prompt, and append a group of branches, which continue them.

        A group steps together: each step appends a column to its cache, with a token of every branch. Returns the last
        hidden state of each sequence's last token, [sequences, F].

        numbers: for each sequence, the number of its branch.
        """
        prompt = self.texts.prompt  # says only how the model runs
        rows = range(len(sequences))
        cache = ModelCache(prompt.backbone, prompt.use, rows=len(sequences))
        features = cache.run(sequences)  # [sequences, T, F]; shorter ones are padded on the right
        last_tokens = [length - 1 for length in cache.lengths]
        if self._choose_sequence_use().batching == "any":  # lengths may differ
            # Padding moves to the left, so that all sequences end in the last column, and the next tokens follow.
            cache = cache.cut(rows, cache.lengths)
        self.groups.append(BranchGroup(numbers, cache))
        return features[rows, last_tokens]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each branch, [B], and run it; return the features of these tokens, [B, F].

        Each group of branches runs in a pass of its own. Sets `tokens_run`.
        """
        features_by_group = torch.cat([group.step(tokens) for group in self.groups])  # [B, F]
        self.tokens_run = self._tokens_run_again + sum(group.tokens_of_step for group in self.groups)
        self._tokens_run_again = 0
        return self._sort_by_branch(features_by_group)

    def _sort_by_branch(self, features_by_group: Tensor) -> Tensor:
        """Return the features of all branches, [B, F], ordered by branch number instead of group after group."""
        numbers = [number for group in self.groups for number in group.numbers]
        features = torch.empty_like(features_by_group)
        features[numbers] = features_by_group
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
    """Return lists of the branches that may share a pass of the model, and whose texts are in one cache."""
    batches: dict[tuple[int, int], list[_NewBranch]] = defaultdict(list)
    for branch in branches:
        batch_key = use.batch_key(branch.number, len(branch.beginning))
        batches[id(branch.text.cache), batch_key].append(branch)
    return batches.values()


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
    """Return a cache with copies of some rows, each cut after the prompt and the beginning of its text.

    - rows: the rows to copy. Each holds the prompt, of `prompt_width` tokens, and then a text.
    - beginnings: for each row, the tokens of its text that stay.
    """
    final_lengths = [prompt_width + len(beginning) for beginning in beginnings]
    if cache.has_states:  # of linear attention, which stand for all tokens so far and cannot be cut
        return _cut_with_states(cache, rows=rows, beginnings=beginnings, final_lengths=final_lengths)
    cut_cache = cache.cut(rows, final_lengths)  # keys and values can be cut after any token
    return CutCache(cut_cache, tokens_run=0)  # none had to run again


def _cut_with_states(
    cache: ModelCache, *, rows: Sequence[int], beginnings: Sequence[Sequence[int]], final_lengths: Sequence[int]
) -> CutCache:
    """Return a cache with copies of some rows, each cut after the prompt and the beginning of its text.

    For models with linear attention. Its states cannot be cut, but they were stored after every STATE_INTERVAL tokens
    of a text: with 16, to cut after 20 tokens of a text, the row is cut after 16, and 4 run again.

    - beginnings: for each row, the tokens of its text that stay.
    - final_lengths: for each row, how many tokens stay, with the prompt.
    """
    tokens_to_run = [_select_tokens_to_run(beginning) for beginning in beginnings]
    run_counts = [len(tokens) for tokens in tokens_to_run]
    # 1. Cut each row after its last stored states.
    stored_lengths = [length - run_count for length, run_count in zip(final_lengths, run_counts, strict=True)]
    cut_at_states = cache.cut(rows, stored_lengths)
    cut_at_states.store_states()  # for rows that end here
    # 2. Run the tokens between there and the row's end. Rows end at different ones, so states are stored after each.
    if any(run_counts):
        cut_at_states.run(tokens_to_run, store_every=1)
    # 3. Cut each row at its end, which removes the padding of rows with fewer tokens to run.
    cut_at_ends = cut_at_states.cut(range(len(rows)), final_lengths)
    return CutCache(cut_at_ends, tokens_run=sum(run_counts))


def _select_tokens_to_run(tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens of a text's beginning after its last stored states."""
    stored_count = len(tokens) // STATE_INTERVAL * STATE_INTERVAL
    return tokens[stored_count:]
