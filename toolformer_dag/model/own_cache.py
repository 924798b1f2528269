"""Texts after a prompt head in the model's own cache, for models whose attention cannot be replaced.

Where even that changes the numbers, the tokens themselves stand in the place of keys, and all of them run at each step.
Keys and values are cut at any token. The states of linear attention (Mamba, RWKV, convolutions) cannot be cut: they are
stored at every `GRID`-th token of a text, and the few tokens up to a position run again.
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

    - `chunks`: whether several tokens may follow cached ones in a pass (Mamba's scan begins from zero).
    - `company`: the rows that may share a pass: `any` (shorter rows are padded on the left), those of `equal` length,
      or `none` (RWKV in transformers mixes rows).
    - `whole`: whether nothing is cached, and every row runs in full at each token.
    """

    chunks: bool
    company: Literal["any", "equal", "none"]
    whole: bool = False

    def group(self, row: int, length: int) -> int:
        """Return the group of a row of so many tokens: rows of one group may share a pass."""
        return {"any": 0, "equal": length, "none": row}[self.company]

    def grouped(self, lengths: Sequence[int]) -> Iterable[list[int]]:
        """Return the rows, numbered as their lengths, that may share a pass: a list per pass."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            groups[self.group(row, length)].append(row)
        return groups.values()


class Rearrangement(Protocol):
    """Makes the tensors of a cache of other rows from those of a cache; the first dimension of each is the row."""

    def keys(self, keys: Tensor) -> Tensor:
        """Return the keys, or values, [rows, H_kv, columns, D], of the new rows."""

    def state(self, number: int, state: Tensor) -> Tensor:
        """Return a state of the new rows. `number`: its index among the states of the cache."""


@dataclass(frozen=True, eq=False)
class _ChosenRows:
    """Takes the rows `rows` as they are; see `Rearrangement`."""

    rows: Tensor

    def keys(self, keys: Tensor) -> Tensor:
        return keys[self.rows]

    def state(self, number: int, state: Tensor) -> Tensor:
        return state[self.rows]


@dataclass(frozen=True, eq=False)
class _CutRows:
    """Takes the beginnings of rows; see `Rearrangement`.

    - `rows`: the old row of each new one; `row_index` [new rows, 1] is the same.
    - `columns` [new rows, new width]: the old column of each new one.
    - `states`: for each new row, the states of the whole cache after the column at which the row is cut.
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

    Row r holds `lengths[r]` tokens from column `starts[r]` on; before it is padding. A row that `run` padded on the
    right holds padding after its tokens too, until `cut` removes it.

    - `width`: the number of columns so far.
    - `name`: the argument under which the model takes the cache; "" where nothing is cached.
    - `cache`: transformers' cache, or RWKV's list of states, None before its first token. Where nothing is cached
      (`CacheUse.whole`), it holds the tokens themselves.
    - `states`: by number of columns, the states of linear attention after so many columns.
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
        """Return whether something in the cache cannot be cut."""
        return self.name == "state" or any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers)

    def run(self, sequences: Sequence[Sequence[int]], every: int | None = None) -> Tensor:
        """Append a sequence to each row, padded on the right, and run them; return their features [B, T, F].

        every: store the states of linear attention after each so many new columns, so that rows can be cut there.
        """
        ids = padded(sequences, self.backbone.device)  # [B, T]
        new_width = ids.shape[1]
        # All columns run in one pass, unless the model takes a single token after cached ones, or states are stored.
        columns_per_pass = new_width if self.use.chunks or not self.width else 1
        if every is not None and self.has_states:
            columns_per_pass = min(columns_per_pass, every)
        width_before = self.width
        features = []
        for first in range(0, new_width, columns_per_pass):
            features.append(self._forward(ids[:, first : first + columns_per_pass]))
            if every is not None and (self.width - width_before) % every == 0:
                self.store_states()
        self.lengths = [length + len(sequence) for length, sequence in zip(self.lengths, sequences, strict=True)]
        return torch.cat(features, 1)

    def store_states(self) -> None:
        """Store copies of the states after the columns so far: the next token changes them."""
        self.states[self.width] = [state.clone() for state in self._state_tensors()]

    def select(self, rows: Sequence[int]) -> "ModelCache":
        """Return a cache of these rows as they are; a row that is named twice is duplicated."""
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

        A row cut to 3 tokens, beside one cut to 5, has 2 columns of padding and then its tokens. States of linear
        attention cannot be cut: they must have been stored after each row's last token (`store_states`).
        """
        device = self.backbone.device
        width = max(lengths)
        new_starts = []
        shifts = []  # by row: column c of the new cache was column c + shift
        states = []  # by row: those after its last token
        for row, length in zip(rows, lengths, strict=True):
            start = self.starts[row]  # the column of its first token
            new_start = width - length
            new_starts.append(new_start)
            shifts.append(start - new_start)
            states.append(self.states[start + length] if self.has_states else [])
        # The old column of each new one, [rows, width].
        columns = on_device(shifts, device)[:, None] + torch.arange(width, device=device)
        cut_rows = _CutRows(
            rows=rows,
            row_index=on_device(rows, device)[:, None],
            columns=columns.clamp(min=0),  # padding may come from any column
            states=states,
        )
        return self._rearranged(cut_rows, starts=new_starts, lengths=list(lengths), width=width)

    def texts(self, slots: int, width: int) -> "OwnTexts":
        """Return texts after this single row, to be filled by `OwnTexts.features`; nothing is allocated."""
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
        """Append tokens [B, T] to rows of equal length, run every row from its beginning; return the new features.

        For models whose cache changes their numbers. Returns [B, T, F]. A pass has as many rows as the budget allows.
        """
        as_keys = ids[:, None, :, None]  # tokens in the shape of keys, so that transformers' cache holds them
        tokens, _ = self.cache.update(as_keys, as_keys, 0)
        rows_per_pass = max(1, self.backbone.budget.tokens // tokens.shape[2])
        parts = []
        for part in tokens[:, 0, :, 0].split(rows_per_pass):
            parts.append(self.backbone.features(part)[:, self.width :])
        return torch.cat(parts)

    def _padding_of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return arguments for the model that tell it which columns are padding on the left, and the positions.

        ids: the columns that are about to run, [B, T]. No arguments are needed where no row is padded. Rows of models
        without keys never are.
        """
        has_keys = self.name != "state" and any(isinstance(layer, DynamicLayer) for layer in self.cache.layers)
        if not has_keys or not any(self.starts):
            return {}
        columns = torch.arange(self.width + ids.shape[1], device=ids.device)
        mask = (columns >= on_device(self.starts, ids.device)[:, None]).long()  # [B, columns]
        if "position_ids" not in signature(self.backbone.body.forward).parameters:
            return {"attention_mask": mask}
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return {"attention_mask": mask, "position_ids": positions[:, self.width :]}

    def _state_tensors(self) -> list[Tensor]:
        """Return the states in the cache, [rows, ...] each: those of RWKV, or of layers with linear attention.

        They are in the order in which `_rearranged` numbers them.
        """
        if self.name == "state":
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
        """Return a new cache whose rows are made from those of this one, which stays as it is.

        - rearrangement: makes each tensor of the new cache (keys, values or states) from that of this one.
        - starts, lengths, width: those of the new rows, as in the class.
        """
        other = copy(self)
        other.starts = starts
        other.lengths = lengths
        other.width = width
        other.states = {}
        if self.name == "state":
            other.cache = [rearrangement.state(number, state) for number, state in enumerate(self._state_tensors())]
            return other
        other.cache = copy(self.cache)
        other.cache.layers = [copy(layer) for layer in self.cache.layers]
        numbers = count()  # of the states, through all layers
        for layer in other.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.conv_states = _rearranged_states(layer.conv_states, rearrangement, numbers)
                layer.recurrent_states = _rearranged_states(layer.recurrent_states, rearrangement, numbers)
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                layer.keys = rearrangement.keys(layer.keys)
                layer.values = rearrangement.keys(layer.values)
        return other


def _rearranged_states(
    states: Mapping[Any, Tensor | None], rearrangement: Rearrangement, numbers: Iterator[int]
) -> dict[Any, Tensor | None]:
    """Return the states of a layer for the rows of another cache; states that are None stay so.

    numbers: gives the number of each next state, through all layers, by which `rearrangement` knows it.
    """
    rearranged: dict[Any, Tensor | None] = {}
    for key, state in states.items():
        rearranged[key] = None if state is None else rearrangement.state(next(numbers), state)
    return rearranged


def cache_argument(body: Any) -> str:
    """Return the name under which a model takes its cache. Raises NotImplementedError where it takes none."""
    parameters = signature(body.forward).parameters
    for name in ARGUMENTS:
        if name in parameters:
            return name
    raise NotImplementedError(f"{type(body).__name__} takes no cache")


def _new_cache(backbone: Backbone, name: str) -> DynamicCache | None:
    """Return an empty cache for a model, or None for RWKV, whose states it creates itself.

    Layers with a sliding window keep all keys here too, so that rows can be cut. Raises NotImplementedError for layers
    that are neither attention nor linear attention. name: the argument under which the model takes its cache.
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
    """Where a text is cached: a row of a cache, whose first columns are the head's."""

    cache: ModelCache
    row: int


class OwnTexts:
    """Texts after a head in the model's own cache, a copy of the head's keys for each.

    By slot: `sequences`, the tokens of the text; `rows`, where it is cached. A text in a slot replaces the one before.
    """

    def __init__(self, head: ModelCache) -> None:
        self.head = head
        self.sequences: dict[int, Sequence[int]] = {}
        self.rows: dict[int, CachedRow] = {}

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text: those of the head too where nothing is cached."""
        return len(sequence) + (self.head.width if self.head.use.whole else 0)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run texts after the head, and cache them under the numbers `slots`; return features [B, T - first, F].

        - sequences: the tokens of each of B texts; T is the length of the longest.
        - first: the index of the token at which the returned features begin.
        """
        self.sequences.update(zip(slots, sequences, strict=True))
        rows_run_alone = self.head.use.company == "none"
        slots_of_passes = [[slot] for slot in slots] if rows_run_alone else [slots]
        parts = []
        for pass_slots in slots_of_passes:
            cache = self.head.select([0] * len(pass_slots))  # the head's only row, once per text
            cache.store_states()
            features = cache.run([self.sequences[slot] for slot in pass_slots], every=GRID)
            parts.append(features[:, first:])
            for row, slot in enumerate(pass_slots):
                self.rows[slot] = CachedRow(cache, row)
        longest = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])

    def branches(self, capacity: int, room: int) -> "OwnBranches":
        """Return no branches yet; `OwnBranches.admit` starts them."""
        return OwnBranches(self)


class BranchGroup(NamedTuple):
    """Branches that share passes: `numbers[r]` is the branch in row r of the cache."""

    numbers: list[int]
    cache: ModelCache


class OwnBranches:
    """Continuations of texts, one token at a time, each with keys and states of its own.

    Branches are numbered in the order of `admit`, `add` and `select`, and each is in one of `groups`.

    `tokens_run`: how many tokens the last step ran. The first step after `admit` also counts those that ran again
    there, up to which states could not be cut.
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
        """Start a branch in the text of each of `slots`; it continues the first `kept[b]` tokens of the text.

        Branches that may share a pass of the model, and whose texts are in one cache, run together from here on, in a
        new cache with a row per branch.
        """
        count_before = self.count
        # Indices of `slots`, by the cache of their text and by which rows may share a pass.
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (slot, length) in enumerate(zip(slots, kept, strict=True)):
            text_cache = self.texts.rows[slot].cache
            row_group = self.texts.head.use.group(index, length)
            members[id(text_cache), row_group].append(index)
        for indices in members.values():
            cached_rows = [self.texts.rows[slots[index]] for index in indices]
            beginnings = [self.texts.sequences[slots[index]][: kept[index]] for index in indices]
            cut = _cut_after_beginnings(
                cached_rows[0].cache,
                rows=[cached.row for cached in cached_rows],
                beginnings=beginnings,
                head_width=self.texts.head.width,
            )
            self._tokens_run_again += cut.tokens_run
            self.groups.append(BranchGroup([count_before + index for index in indices], cut.cache))

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run whole sequences, start a branch at the end of each, and return the features of their last tokens.

        These are [sequences, F]. Sequences run in one pass where the model's cache allows it.
        """
        head = self.texts.head
        use = head.use
        if use.company == "any" and head.has_states:
            use = replace(use, company="equal")  # states cannot be cut back to the end of a shorter sequence
        count_before = self.count
        features_at_ends: dict[int, Tensor] = {}  # by index of `sequences`, [F]
        for indices in use.grouped([len(sequence) for sequence in sequences]):
            group_sequences = [sequences[index] for index in indices]
            lengths = [len(sequence) for sequence in group_sequences]
            cache = ModelCache(head.backbone, head.use, rows=len(indices))
            features = cache.run(group_sequences)  # [group, T, F]
            last_tokens = [length - 1 for length in lengths]
            features_at_ends.update(zip(indices, features[range(len(indices)), last_tokens], strict=True))
            if use.company == "any":
                cache = cache.cut(range(len(indices)), lengths)  # moves the padding to the left
            self.groups.append(BranchGroup([count_before + index for index in indices], cache))
        return torch.stack([features_at_ends[index] for index in range(len(sequences))])

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each branch, [B], and run it; return the features of these tokens, [B, F].

        Each group of branches runs in a pass of its own. `self.tokens_run` is set to the number of tokens that ran in
        this step, and in `admit` since the last one.
        """
        features_of_groups = []
        numbers = []  # of the branches, group by group
        tokens_run = self._tokens_run_again
        for group in self.groups:
            group_tokens = [[token] for token in tokens[group.numbers].tolist()]
            features_of_groups.append(group.cache.run(group_tokens)[:, 0])
            numbers += group.numbers
            runs_whole_rows = group.cache.use.whole
            tokens_run += sum(group.cache.lengths) if runs_whole_rows else len(group.numbers)
        self.tokens_run = tokens_run
        self._tokens_run_again = 0
        features_by_group = torch.cat(features_of_groups)
        features = torch.empty_like(features_by_group)
        features[numbers] = features_by_group
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Continue with some branches, in this order: new branch b is old branch `rows[b]`. One may be there twice."""
        selected = []
        for group in self.groups:
            row_of_branch = {number: row for row, number in enumerate(group.numbers)}
            members = []  # pairs of a new branch and the row of the group's cache that it continues
            for new_number, old_number in enumerate(rows):
                if old_number in row_of_branch:
                    members.append((new_number, row_of_branch[old_number]))
            rows_run_alone = group.cache.use.company == "none"
            new_groups = [[member] for member in members] if rows_run_alone else [members]
            for new_group in new_groups:
                if new_group:
                    cache = group.cache.select([row for _, row in new_group])
                    selected.append(BranchGroup([number for number, _ in new_group], cache))
        self.groups = selected

    def branch(self, row: int) -> "OwnBranches":
        """Return a copy of one branch, which goes on by itself."""
        copied = copy(self)
        copied.select([row])
        return copied


class CutCache(NamedTuple):
    """A cache with cut rows, and how many tokens had to run again for it."""

    cache: ModelCache
    tokens_run: int


def _cut_after_beginnings(
    cache: ModelCache, *, rows: Sequence[int], beginnings: Sequence[Sequence[int]], head_width: int
) -> CutCache:
    """Return a cache with copies of some rows, each cut after the head and the first tokens of its text.

    - rows: the rows to copy. Each holds the prompt's head, of `head_width` tokens, and then a text.
    - beginnings: for each of them, the tokens of its text that stay.

    Keys and values can be cut after any token. States of linear attention are stored after every GRID-th token of a
    text only: of a beginning of 20 tokens, 16 are cut out of the cache and 4 run again (GRID = 16).
    """
    final_lengths = [head_width + len(beginning) for beginning in beginnings]
    if not cache.has_states:
        return CutCache(cache.cut(rows, final_lengths), tokens_run=0)

    stored_counts = [len(beginning) // GRID * GRID for beginning in beginnings]  # tokens up to the last stored states
    cut = cache.cut(rows, [head_width + count for count in stored_counts])
    cut.store_states()
    remaining = [beginning[count:] for beginning, count in zip(beginnings, stored_counts, strict=True)]
    if any(remaining):
        cut.run(remaining, every=1)  # pads the rows to one length, so each is cut again at its own end
    return CutCache(cut.cut(range(len(rows)), final_lengths), tokens_run=sum(map(len, remaining)))
