"""Texts after a prompt in transformers' own cache, for models whose attention cannot be replaced (`heads.py`).

The prompt is called the head; branches are continuations of texts, one token at a time. A cached row can be continued
after any of its tokens if what comes after is cut off. Keys and values are cut after any token. The states of linear
attention (Mamba, RWKV, convolutions) cannot be cut: they are stored after every `GRID`-th token of a text, and the few
tokens from there on run again.

Some models give other numbers with a cache. For these, the cache holds the tokens themselves, and every row runs from
its beginning at each step.
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

from toolformer_dag.model.attention import on_device, padded
from toolformer_dag.model.backbone import Backbone

GRID = 16
"""Tokens between two stored states of a text."""
ARGUMENTS = ("past_key_values", "cache_params", "state")
"""Names under which models take their cache; `state` is RWKV's, a list of tensors without keys."""
KNOWN_LAYERS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""Layers of a cache that can be cut and copied here."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a model's own cache can be used.

    - `chunks`: whether a pass may run several tokens after cached ones. Mamba's scan may not: it begins from zero.
    - `company`: which rows may share a pass: `any` (shorter rows are padded on the left); rows of `equal` length; or
      `none`, so that each row runs alone (RWKV in transformers mixes rows).
    - `whole`: whether nothing is cached, and every row runs from its beginning at each token.
    """

    chunks: bool
    company: Literal["any", "equal", "none"]
    whole: bool = False

    def group(self, row: int, length: int) -> int:
        """Return the number of a row's group; rows of one group may share a pass. `length`: the row's tokens."""
        return {"any": 0, "equal": length, "none": row}[self.company]

    def grouped(self, lengths: Sequence[int]) -> Iterable[list[int]]:
        """Return lists of the rows that may share a pass. Row r has `lengths[r]` tokens.

        For lengths [3, 5, 3]: [[0, 1, 2]] for company "any", [[0, 2], [1]] for "equal", [[0], [1], [2]] for "none".
        """
        groups: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            groups[self.group(row, length)].append(row)
        return groups.values()


class Rearrangement(Protocol):
    """Makes a new cache's tensors from a cache's tensors, by choosing, duplicating or cutting rows.

    The first dimension of each tensor is the row.
    """

    def keys(self, keys: Tensor) -> Tensor:
        """Return the keys of the new rows, [new rows, H_kv, new columns, D]; also used for values."""

    def state(self, number: int, state: Tensor) -> Tensor:
        """Return a state of the new rows, [new rows, ...]. `number`: its index in `ModelCache._state_tensors`."""


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

    - `rows`: for each new row, the old row that it is the beginning of; `row_index` [new rows, 1] is the same.
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

    A row may be padded on the left, so that rows end in one column. A row that `run` padded on the right is so until
    `cut` removes the padding.

    - `backbone`: the model. `use`: how its cache can be used.
    - `starts[r]`: the column of row r's first token. `lengths[r]`: how many tokens row r holds from there on.
    - `width`: the number of columns so far.
    - `name`: the argument under which the model takes the cache. "state" is RWKV's; "" where nothing is cached.
    - `cache`: transformers' cache; for RWKV its list of states, None before the first token. Where nothing is cached
      (`CacheUse.whole`), transformers' cache holds the tokens themselves.
    - `states[c]`: copies of the states of linear attention after the first c columns (`store_states`).
    """

    def __init__(self, backbone: Backbone, use: CacheUse, rows: int) -> None:
        self.backbone = backbone
        self.use = use
        self.name = "" if use.whole else cache_argument(backbone.body)
        self.cache: Any = DynamicCache() if use.whole else _new_cache(backbone, self.name)
        self.starts = [0] * rows
        self.lengths = [0] * rows
        self.width = 0
        self.states: dict[int, list[Tensor]] = {}

    @property
    def has_states(self) -> bool:
        """Return whether the model has states of linear attention, which cannot be cut."""
        return self.name == "state" or any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers)

    def run(self, sequences: Sequence[Sequence[int]], every: int | None = None) -> Tensor:
        """Append a sequence to each row, padded on the right, and run them; return their features [B, T, F].

        every: store the states of linear attention after every so many new columns, so that rows can be cut there.
        """
        ids = padded(sequences, self.backbone.device)  # [B, T]
        new_width = ids.shape[1]
        takes_several = self.use.chunks or not self.width  # some models take one token at a time after cached ones
        columns_per_pass = new_width if takes_several else 1
        if every is not None and self.has_states:
            columns_per_pass = min(columns_per_pass, every)
        features = []
        for first in range(0, new_width, columns_per_pass):
            pass_ids = ids[:, first : first + columns_per_pass]
            features.append(self._forward(pass_ids))  # adds these columns to `self.width`
            columns_run = first + pass_ids.shape[1]
            if every is not None and columns_run % every == 0:
                self.store_states()
        self.lengths = [length + len(sequence) for length, sequence in zip(self.lengths, sequences, strict=True)]
        return torch.cat(features, 1)

    def store_states(self) -> None:
        """Store copies of the states after the columns so far in `self.states`; the next token changes the states."""
        self.states[self.width] = [state.clone() for state in self._state_tensors()]

    def select(self, rows: Sequence[int]) -> "ModelCache":
        """Return a new cache of these rows, whole; a row that is named twice is there twice."""
        return self._rearranged(
            _ChosenRows(on_device(rows, self.backbone.device)),
            starts=[self.starts[row] for row in rows],
            lengths=[self.lengths[row] for row in rows],
            width=self.width,
        )

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> "ModelCache":
        """Return a new cache with copies of some rows, each cut to its first tokens.

        - rows: the rows to copy; one may be there twice.
        - lengths: how many tokens each keeps. Shorter rows are padded on the left, so that all end in one column.

        Rows that start in column 0, cut to 3 and to 5 tokens, get 5 columns and the starts [2, 0]. Their shifts are
        [-2, 0]: column 2 of the first new row was column 0 of the old one.

        States of linear attention cannot be cut: they must have been stored after each row's last token
        (`store_states`).
        """
        device = self.backbone.device
        width = max(lengths)
        new_starts = []
        shifts = []  # by row: column c of the new cache was column c + shift of this one
        for row, length in zip(rows, lengths, strict=True):
            new_start = width - length
            new_starts.append(new_start)
            shifts.append(self.starts[row] - new_start)
        # The old column of each new one, [new rows, width]; below zero in padding, which may be copied from any column.
        columns = on_device(shifts, device)[:, None] + torch.arange(width, device=device)
        cut_rows = _CutRows(
            rows=rows,
            row_index=on_device(rows, device)[:, None],
            columns=columns.clamp(min=0),
            states=self._states_at_ends(rows, lengths),
        )
        return self._rearranged(cut_rows, starts=new_starts, lengths=list(lengths), width=width)

    def _states_at_ends(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[Tensor]]:
        """Return for each row the stored states after its first `length` tokens; none for models without states."""
        if not self.has_states:
            return [[] for _ in rows]
        return [self.states[self.starts[row] + length] for row, length in zip(rows, lengths, strict=True)]

    def texts(self, slots: int, width: int) -> "OwnTexts":
        """Return an empty cache of texts that follow this single row, the prompt. `OwnTexts.features` runs texts.

        The arguments have no effect, because nothing is allocated; `CachedHead.texts` has the same ones.
        """
        return OwnTexts(self)

    def _forward(self, ids: Tensor) -> Tensor:
        """Run the next columns [B, T]; return their features [B, T, F]."""
        if self.use.whole:
            features = self._recomputed(ids)
        else:
            features, self.cache = self.backbone.cached_features(ids, self.name, self.cache, **self._padding_of(ids))
        self.width += ids.shape[1]
        return features

    def _recomputed(self, ids: Tensor) -> Tensor:
        """Append tokens [B, T], and run every row from its beginning; return the features of the new tokens [B, T, F].

        For models whose cache changes their numbers. All rows have the same length. Transformers' cache holds the
        tokens in place of keys. A pass has as many rows as the token budget allows.
        """
        as_keys = ids[:, None, :, None]  # the shape of keys: [B, 1, T, 1]
        all_as_keys, _ = self.cache.update(as_keys, as_keys, layer_idx=0)  # [B, 1, width + T, 1]
        tokens = all_as_keys[:, 0, :, 0]  # [B, width + T]; `self.width` are the tokens before
        rows_per_pass = max(1, self.backbone.budget.tokens // tokens.shape[1])
        parts = []
        for part_tokens in tokens.split(rows_per_pass):
            part_features = self.backbone.features(part_tokens)  # [rows, width + T, F]
            parts.append(part_features[:, self.width :])
        return torch.cat(parts)

    def _padding_of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return arguments for the model that say which columns are padding on the left; empty where none is.

        ids: the columns that are about to run, [B, T].

        `attention_mask` is 0 in padding and else 1, in all columns so far and the new ones: [[1, 1, 1], [0, 1, 1]] for
        rows that start in columns 0 and 1. `position_ids`, which some models do not take, count each row's tokens from
        0, in the new columns: with one new column, [[2], [1]].
        """
        is_rwkv = self.name == "state"
        has_keys = not is_rwkv and any(isinstance(layer, DynamicLayer) for layer in self.cache.layers)
        is_padded = any(self.starts)
        if not has_keys or not is_padded:  # rows of models without keys are never padded on the left
            return {}
        columns = torch.arange(self.width + ids.shape[1], device=ids.device)
        mask = (columns >= on_device(self.starts, ids.device)[:, None]).long()  # [B, columns]
        if "position_ids" not in signature(self.backbone.body.forward).parameters:
            return {"attention_mask": mask}
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return {"attention_mask": mask, "position_ids": positions[:, self.width :]}

    def _state_tensors(self) -> list[Tensor]:
        """Return the states in the cache, [rows, ...] each, layer by layer.

        RWKV's cache is a list of states. In others, a layer with linear attention has convolution states and then
        recurrent states; `_rearranged` numbers them in the same order.
        """
        is_rwkv = self.name == "state"
        if is_rwkv:
            return list(self.cache or ())
        tensors = []
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                for states in (layer.conv_states, layer.recurrent_states):
                    tensors += [state for state in states.values() if state is not None]
        return tensors

    def _rearranged(
        self, rearrangement: Rearrangement, *, starts: list[int], lengths: list[int], width: int
    ) -> "ModelCache":
        """Return a new cache whose rows are made from rows of this one, which stays as it is. No states are stored yet.

        - rearrangement: makes each tensor of the new cache (keys, values or states) from one of this cache.
        - starts, lengths, width: the attributes of the new cache.
        """
        other = copy(self)
        other.starts = starts
        other.lengths = lengths
        other.width = width
        other.states = {}
        is_rwkv = self.name == "state"
        if is_rwkv:
            other.cache = [rearrangement.state(number, state) for number, state in enumerate(self._state_tensors())]
        else:
            other.cache = _rearranged_cache(self.cache, rearrangement)
        return other


def _rearranged_cache(cache: DynamicCache, rearrangement: Rearrangement) -> DynamicCache:
    """Return a copy of transformers' cache with other rows: keys, values and states are made by `rearrangement`.

    A layer has keys and values, or states of linear attention, or both. States are numbered through all layers, in the
    order of `ModelCache._state_tensors`.
    """
    rearranged = copy(cache)
    rearranged.layers = [copy(layer) for layer in cache.layers]
    state_numbers = count()  # advanced by each state of each layer
    for layer in rearranged.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.conv_states = _rearranged_states(layer.conv_states, rearrangement, state_numbers)
            layer.recurrent_states = _rearranged_states(layer.recurrent_states, rearrangement, state_numbers)
        if isinstance(layer, DynamicLayer) and layer.keys is not None:
            layer.keys = rearrangement.keys(layer.keys)
            layer.values = rearrangement.keys(layer.values)  # their rows and columns are those of the keys
    return rearranged


def _rearranged_states(
    states: Mapping[Any, Tensor | None], rearrangement: Rearrangement, state_numbers: Iterator[int]
) -> dict[Any, Tensor | None]:
    """Return one kind of a layer's states for other rows, under the same keys; None stays None.

    state_numbers: an iterator that all layers share. Each state takes its number, by which `rearrangement` knows it.
    """
    rearranged: dict[Any, Tensor | None] = {}
    for key, state in states.items():
        rearranged[key] = None if state is None else rearrangement.state(next(state_numbers), state)
    return rearranged


def cache_argument(body: Any) -> str:
    """Return the name of the argument by which a model takes its cache, such as `past_key_values`.

    Raises NotImplementedError for a model that takes no cache.
    """
    parameters = signature(body.forward).parameters
    for name in ARGUMENTS:
        if name in parameters:
            return name
    raise NotImplementedError(f"{type(body).__name__} takes no cache")


def _new_cache(backbone: Backbone, name: str) -> DynamicCache | None:
    """Return an empty cache for a model; None for RWKV, which creates its states itself.

    Layers with a sliding window get a cache that keeps all keys, so that rows can be cut. name: the argument by which
    the model takes its cache. Raises NotImplementedError for layers that are neither attention nor linear attention.
    """
    if name == "state":
        return None
    cache = DynamicCache(config=backbone.model.config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in KNOWN_LAYERS}
    if unknown:
        raise NotImplementedError(f"caches of {', '.join(sorted(unknown))}")
    return cache


class CachedRow(NamedTuple):
    """Where a text is cached: in row `row` of `cache`, which begins with the tokens of the prompt."""

    cache: ModelCache
    row: int


class OwnTexts:
    """Texts after a prompt in the model's own cache, each with a copy of the prompt's keys and states.

    A slot is a number under which a text is cached; a text replaces the earlier text of its slot.

    - `head`: the cache of the prompt, which is its only row.
    - `sequences`: the tokens of the text in each slot.
    - `rows`: where the text in each slot is cached.
    """

    def __init__(self, head: ModelCache) -> None:
        self.head = head
        self.sequences: dict[int, Sequence[int]] = {}
        self.rows: dict[int, CachedRow] = {}

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text: also those of the prompt where nothing is cached."""
        return len(sequence) + (self.head.width if self.head.use.whole else 0)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run B texts after the prompt, and cache them under the numbers `slots`; return features [B, T - first, F].

        - sequences: the tokens of each text; T is the length of the longest. Features after a shorter one mean nothing.
        - first: the index of the token at which the returned features begin.

        All texts run in one pass, or each in a pass of its own where the model mixes rows (company "none").
        """
        self.sequences.update(zip(slots, sequences, strict=True))
        rows_run_alone = self.head.use.company == "none"
        slots_of_passes = [[slot] for slot in slots] if rows_run_alone else [slots]
        parts = []  # the features of each pass, [rows, its longest text - first, F]
        for pass_slots in slots_of_passes:
            features = self._run_in_a_pass(pass_slots)
            parts.append(features[:, first:])
        longest = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])

    def _run_in_a_pass(self, slots: Sequence[int]) -> Tensor:
        """Run the texts in these slots after the prompt, and note in `rows` where they are cached.

        States of linear attention are stored before the texts and after every GRID tokens, so that branches can begin
        there. Returns features [slots, T, F].
        """
        cache = self.head.select([0] * len(slots))  # the prompt, row 0, once per text
        cache.store_states()
        features = cache.run([self.sequences[slot] for slot in slots], every=GRID)
        for row, slot in enumerate(slots):
            self.rows[slot] = CachedRow(cache, row)
        return features

    def branches(self, capacity: int, room: int) -> "OwnBranches":
        """Return an object for branches of these texts, still without any; `OwnBranches.admit` starts them.

        The arguments have no effect, because nothing is allocated; `CachedTexts.branches` has the same ones.
        """
        return OwnBranches(self)


class BranchGroup(NamedTuple):
    """Branches that run in the same passes. `numbers[r]` is the number of the branch in row r of `cache`."""

    numbers: list[int]
    cache: ModelCache


class OwnBranches:
    """Branches: continuations of texts, which all get one token per step. Each has keys and states of its own.

    Branches are numbered in the order of `admit`, `add` and `select`.

    - `texts`: the texts that they continue.
    - `groups`: the branches that run in the same passes, with their cache. Each branch is in one group.
    - `tokens_run`: how many tokens the last step ran. The first step after `admit` also counts tokens of texts that
      ran again there, because states are stored after some tokens only.
    """

    def __init__(self, texts: OwnTexts) -> None:
        self.texts = texts
        self.tokens_run = 0
        self.groups: list[BranchGroup] = []
        self._tokens_run_again = 0

    @property
    def count(self) -> int:
        """The number of branches."""
        return sum(len(group.numbers) for group in self.groups)

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Append branches: new branch b continues the first `kept[b]` tokens of the text in slot `slots[b]`.

        Branches that may share a pass of the model, and whose texts are in one cache, become a group with a new cache.
        """
        first_number = self.count
        # Caches of texts, and the new branches of each group, both by the cache's identity and the group of the rows.
        caches: dict[tuple[int, int], ModelCache] = {}
        members: dict[tuple[int, int], list[_NewBranch]] = defaultdict(list)
        for index, (slot, length) in enumerate(zip(slots, kept, strict=True)):
            cached_row = self.texts.rows[slot]
            beginning = self.texts.sequences[slot][:length]
            new_branch = _NewBranch(number=first_number + index, row=cached_row.row, beginning=beginning)
            row_group = self.texts.head.use.group(index, length)
            cache_and_group = (id(cached_row.cache), row_group)
            members[cache_and_group].append(new_branch)
            caches[cache_and_group] = cached_row.cache
        for cache_and_group, new_branches in members.items():
            cut = _cut_after_beginnings(
                caches[cache_and_group],
                rows=[branch.row for branch in new_branches],
                beginnings=[branch.beginning for branch in new_branches],
                head_width=self.texts.head.width,
            )
            self._tokens_run_again += cut.tokens_run
            self.groups.append(BranchGroup([branch.number for branch in new_branches], cut.cache))

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run whole sequences, append a branch at the end of each; return the features of their last tokens.

        These are [sequences, F]. The sequences do not follow the prompt. A group of them runs in a pass, as
        `CacheUse.company` allows: all; sequences of equal length; or each alone. In models with states they must have
        equal length, because states cannot be cut back to the end of a shorter sequence.
        """
        head = self.texts.head
        use = head.use
        if use.company == "any" and head.has_states:
            use = replace(use, company="equal")
        first_number = self.count
        features_at_ends: dict[int, Tensor] = {}  # by index of `sequences`, [F]
        for indices in use.grouped([len(sequence) for sequence in sequences]):
            cache, features = self._run_whole([sequences[index] for index in indices])
            features_at_ends.update(zip(indices, features, strict=True))
            self.groups.append(BranchGroup([first_number + index for index in indices], cache))
        return torch.stack([features_at_ends[index] for index in range(len(sequences))])

    def _run_whole(self, sequences: Sequence[Sequence[int]]) -> tuple[ModelCache, Tensor]:
        """Run sequences in a pass; return a new cache of them, and the features of their last tokens, [sequences, F].

        Shorter sequences run with padding on the right, which the cache then has on the left.
        """
        head = self.texts.head
        lengths = [len(sequence) for sequence in sequences]
        cache = ModelCache(head.backbone, head.use, rows=len(sequences))
        features = cache.run(sequences)  # [sequences, T, F]
        last_tokens = [length - 1 for length in lengths]
        may_be_padded = head.use.company == "any" and not head.has_states  # else all have the same length
        if may_be_padded:
            cache = cache.cut(range(len(sequences)), lengths)  # moves the padding to the left
        return cache, features[range(len(sequences)), last_tokens]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each branch, [B], and run it; return the features of these tokens, [B, F].

        Each group of branches runs in a pass of its own. Sets `tokens_run` to the number of tokens that ran in this
        step, and again in `admit` since the last step.
        """
        features_of_groups = []
        numbers = []  # of the branches, group by group
        for group in self.groups:
            group_tokens = [[token] for token in tokens[group.numbers].tolist()]
            features_of_groups.append(group.cache.run(group_tokens)[:, 0])
            numbers += group.numbers
        self.tokens_run = self._tokens_run_again + sum(map(_tokens_of_step, self.groups))
        self._tokens_run_again = 0
        features_by_group = torch.cat(features_of_groups)
        features = torch.empty_like(features_by_group)
        features[numbers] = features_by_group  # in the order of the branches
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Continue with some branches: new branch b is old branch `rows[b]`. A branch may be there twice.

        The groups are replaced by new ones, with copies of the rows that go on.
        """
        new_groups = []
        for group in self.groups:
            new_groups += _selected(group, rows)
        self.groups = new_groups

    def branch(self, row: int) -> "OwnBranches":
        """Return a copy of branch `row` alone. What it runs does not change this object."""
        copied = copy(self)
        copied.select([row])
        return copied


class _NewBranch(NamedTuple):
    """A branch that is being started.

    - `number`: its number among the branches.
    - `row`: the row of a cache that holds its text.
    - `beginning`: the tokens of the text that it continues.
    """

    number: int
    row: int
    beginning: Sequence[int]


def _tokens_of_step(group: BranchGroup) -> int:
    """Return how many tokens ran in a group's last step: one per branch, or all tokens where nothing is cached."""
    return sum(group.cache.lengths) if group.cache.use.whole else len(group.numbers)


def _selected(group: BranchGroup, branches: Sequence[int]) -> list[BranchGroup]:
    """Return groups of the new branches that continue branches of `group`: one, none, or one per branch.

    branches: the number of the old branch that each new branch continues, in any group. Each new branch has a group of
    its own where the model mixes rows (company "none").
    """
    row_of_branch = {number: row for row, number in enumerate(group.numbers)}
    new_numbers = []
    cache_rows = []  # the row of the group's cache that each of these new branches continues
    for new_number, old_number in enumerate(branches):
        if old_number in row_of_branch:
            new_numbers.append(new_number)
            cache_rows.append(row_of_branch[old_number])
    rows_run_alone = group.cache.use.company == "none"
    if rows_run_alone:
        numbers_and_rows = zip(new_numbers, cache_rows, strict=True)
        return [BranchGroup([number], group.cache.select([row])) for number, row in numbers_and_rows]
    return [BranchGroup(new_numbers, group.cache.select(cache_rows))] if new_numbers else []


class CutCache(NamedTuple):
    """A cache whose rows were cut. `tokens_run`: how many tokens had to run again for it."""

    cache: ModelCache
    tokens_run: int


def _cut_after_beginnings(
    cache: ModelCache, *, rows: Sequence[int], beginnings: Sequence[Sequence[int]], head_width: int
) -> CutCache:
    """Return a cache with copies of some rows, each cut after the prompt and the first tokens of its text.

    - rows: the rows to copy. Each holds the prompt, of `head_width` tokens, and then a text.
    - beginnings: for each of them, the tokens of its text that stay.
    """
    final_lengths = [head_width + len(beginning) for beginning in beginnings]
    if cache.has_states:
        return _cut_with_states(cache, rows=rows, beginnings=beginnings, final_lengths=final_lengths)
    return CutCache(cache.cut(rows, final_lengths), tokens_run=0)  # keys and values can be cut after any token


def _cut_with_states(
    cache: ModelCache, *, rows: Sequence[int], beginnings: Sequence[Sequence[int]], final_lengths: Sequence[int]
) -> CutCache:
    """Return a cache with rows of a model with linear attention, each cut to `final_lengths` tokens.

    Its states are stored after every GRID-th token of a text only. With GRID = 16, a row whose `beginning` has 20
    tokens of the text is cut after 16 of them, and the other 4 run again.
    """
    remaining = [beginning[len(beginning) // GRID * GRID :] for beginning in beginnings]  # after the last stored states
    stored_lengths = [length - len(tokens) for length, tokens in zip(final_lengths, remaining, strict=True)]
    cut = cache.cut(rows, stored_lengths)
    cut.store_states()
    if any(remaining):
        cut.run(remaining, every=1)  # stores states after every token, so that each row can be cut at its own end
    return CutCache(cut.cut(range(len(rows)), final_lengths), tokens_run=sum(map(len, remaining)))
