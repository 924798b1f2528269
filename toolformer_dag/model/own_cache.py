"""Texts behind a prompt head in the model's own cache, for models whose attention cannot be replaced.

Where even that changes the numbers, whole rows take the cache's place, and nothing is kept. Keys and values are cut at
any token. The states of linear attention (Mamba, RWKV, convolutions) cannot be cut: they are stored at every `GRID`-th
token of a text, and the few tokens up to a position run again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

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
KNOWN_LAYERS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a model's own cache can be used.

    - `chunks`: whether several tokens may follow cached ones in a pass (Mamba's scan begins from zero).
    - `company`: the rows that share a pass: `any` (shorter rows are padded on the left), those of `equal` length, or
      `none` (RWKV in transformers mixes rows).
    - `whole`: whether nothing is kept, and every row runs in full at each token.
    """

    chunks: bool
    company: Literal["any", "equal", "none"]
    whole: bool = False

    def mates(self, row: int, length: int) -> int:
        """Return a number that is equal for rows, of this number and length, that may share a pass."""
        return {"any": 0, "equal": length, "none": row}[self.company]

    def rows(self, backbone: Backbone, count: int = 1) -> "ModelCache | WholeRows":
        """Return so many rows without tokens."""
        return WholeRows(backbone, self, count) if self.whole else ModelCache(backbone, self, count)


class WholeRows:
    """Rows of equal length that run in full, with the interface of ModelCache. `ran`: tokens of the last pass."""

    has_states = False

    def __init__(self, backbone: Backbone, use: CacheUse, rows: int) -> None:
        self.backbone, self.use = backbone, use
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.ran = 0

    @property
    def width(self) -> int:
        """Return the number of tokens of each row."""
        return len(self.ids[0])

    def run(self, sequences: Sequence[Sequence[int]], every: int | None = None) -> Tensor:
        """Append a sequence to each row; return features [B, T, F], in passes of as many rows as the budget allows."""
        before = self.width
        self.ids = [[*ids, *sequence] for ids, sequence in zip(self.ids, sequences, strict=True)]
        ids = padded(self.ids, self.backbone.device)
        self.ran = sum(map(len, self.ids))
        parts = torch.split(ids, max(1, self.backbone.budget.tokens // ids.shape[1]))
        return torch.cat([self.backbone.features(part)[:, before:] for part in parts])

    def store_states(self) -> None:
        """Store nothing."""

    def select(self, rows: Sequence[int]) -> "WholeRows":
        """Return these rows; a row that is named twice is duplicated."""
        return self.cut(rows, [len(self.ids[row]) for row in rows])

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> "WholeRows":
        """Return these rows, each cut to its first tokens."""
        other = copy(self)
        other.ids = [self.ids[row][:length] for row, length in zip(rows, lengths, strict=True)]
        return other


class ModelCache:
    """Rows in the model's own cache; row r holds `lengths[r]` tokens from column `starts[r]` on.

    `states`: by number of columns, the states of linear attention behind so many columns. `ran`: tokens of the last
    pass.
    """

    def __init__(self, backbone: Backbone, use: CacheUse, rows: int) -> None:
        self.backbone = backbone
        self.use = use
        self.name = cache_argument(backbone.body)
        self.cache: Any = None if self.name == "state" else _new_cache(backbone.model.config)
        self._positioned = "position_ids" in signature(backbone.body.forward).parameters
        self.starts = [0] * rows
        self.lengths = [0] * rows
        self.width = self.ran = 0
        self.states: dict[int, list[Tensor]] = {}

    @property
    def has_states(self) -> bool:
        """Return whether something in the cache cannot be cut."""
        return self.name == "state" or any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers)

    def run(self, sequences: Sequence[Sequence[int]], every: int | None = None) -> Tensor:
        """Append a sequence to each row, padded on the right; return features [B, T, F].

        `every`: the number of new columns after which states are stored.
        """
        ids = padded(sequences, self.backbone.device)
        step = ids.shape[1] if self.use.chunks or not self.width else 1
        if every is not None and self.has_states:
            step = min(step, every)
        before, found = self.width, []
        for first in range(0, ids.shape[1], step):
            found.append(self._forward(ids[:, first : first + step]))
            if every is not None and (self.width - before) % every == 0:
                self.store_states()
        self.ran = sum(map(len, sequences))
        self.lengths = [length + len(ids) for length, ids in zip(self.lengths, sequences, strict=True)]
        return torch.cat(found, 1)

    def store_states(self) -> None:
        """Store the states behind the columns so far; they are lost with the next token."""
        self.states[self.width] = [state.clone() for state in self._state_tensors()]

    def select(self, rows: Sequence[int]) -> "ModelCache":
        """Return a cache of these rows as they are; a row that is named twice is duplicated."""
        chosen = on_device(rows, self.backbone.device)
        return self._derived(
            [self.starts[row] for row in rows],
            [self.lengths[row] for row in rows],
            self.width,
            lambda part: part[chosen],
            (state[chosen] for state in self._state_tensors()),
        )

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> "ModelCache":
        """Return a cache of these rows, each cut to its first tokens; padding stands on the left.

        Where the cache has states, they must have been stored at each of these lengths.
        """
        device, width = self.backbone.device, max(lengths)
        padding = [width - length for length in lengths]
        starts = [self.starts[row] for row in rows]
        offsets = [start - more for start, more in zip(starts, padding, strict=True)]
        columns = (on_device(offsets, device)[:, None] + torch.arange(width, device=device)).clamp(min=0)
        chosen = on_device(rows, device)[:, None]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        return self._derived(
            padding,
            list(lengths),
            width,
            lambda part: part[chosen, :, columns].transpose(1, 2),
            self._stored_states(rows, ends) if self.has_states else (),
        )

    def _forward(self, ids: Tensor) -> Tensor:
        options = {}
        if any(self.starts) and self._keyed():
            columns = torch.arange(self.width + ids.shape[1], device=ids.device)
            mask = (columns >= on_device(self.starts, ids.device)[:, None]).long()
            options["attention_mask"] = mask
            if self._positioned:
                options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, self.width :]
        features, self.cache = self.backbone.cached_features(ids, self.name, self.cache, **options)
        self.width += ids.shape[1]
        return features

    def _keyed(self) -> bool:
        """Return whether the cache holds keys and values."""
        return self.name != "state" and any(isinstance(layer, DynamicLayer) for layer in self.cache.layers)

    def _state_tensors(self) -> list[Tensor]:
        if self.name == "state":
            return list(self.cache or ())
        layers = [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]
        parts = [part for layer in layers for part in (layer.conv_states, layer.recurrent_states)]
        return [state for part in parts for state in part.values() if state is not None]

    def _stored_states(self, rows: Sequence[int], ends: Sequence[int]) -> Iterable[Tensor]:
        """Return the states of each row as they were after its `ends` column."""
        chosen = [self.states[end] for end in ends]
        for number in range(len(chosen[0])):
            yield torch.stack([states[number][row] for states, row in zip(chosen, rows, strict=True)])

    def _derived(
        self,
        starts: list[int],
        lengths: list[int],
        width: int,
        keys: Callable[[Tensor], Tensor],
        states: Iterable[Tensor],
    ) -> "ModelCache":
        """Return a cache with these rows, whose keys and values come from `keys` and whose states are `states`."""
        other = copy(self)
        other.starts, other.lengths, other.width, other.states = starts, lengths, width, {}
        found = iter(states)
        if self.name == "state":
            other.cache = list(found)
        else:
            other.cache = copy(self.cache)
            other.cache.layers = [_derived_layer(layer, keys, found) for layer in self.cache.layers]
        return other


def _derived_layer(layer: Any, keys: Callable[[Tensor], Tensor], states: Iterator[Tensor]) -> Any:
    other = copy(layer)
    for kind in ("conv_states", "recurrent_states") if isinstance(layer, LinearAttentionLayer) else ():
        known = getattr(layer, kind).items()
        setattr(other, kind, {at: None if state is None else next(states) for at, state in known})
    if isinstance(layer, DynamicLayer) and layer.is_initialized and layer.keys is not None:
        other.keys, other.values = keys(layer.keys), keys(layer.values)
    return other


def cache_argument(body: Any) -> str:
    """Return the name under which a model takes its cache. Raises NotImplementedError where it takes none."""
    known = signature(body.forward).parameters
    name = next((name for name in ARGUMENTS if name in known), None)
    if name is None:
        raise NotImplementedError(f"{type(body).__name__} takes no cache")
    return name


def _new_cache(config: Any) -> DynamicCache:
    """Return an empty cache that keeps every token's keys. Raises NotImplementedError for other kinds of layers."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in KNOWN_LAYERS}
    if unknown:
        raise NotImplementedError(f"caches of {', '.join(sorted(unknown))}")
    return cache


class OwnHead:
    """The shared prompt head, run once, in the model's own cache."""

    def __init__(self, backbone: Backbone, ids: Sequence[int], use: CacheUse) -> None:
        self.cache = use.rows(backbone)
        self.cache.run([ids])

    def texts(self, slots: int, width: int) -> "OwnTexts":
        """Return texts behind this head, to be filled by `OwnTexts.features`; nothing is allocated."""
        return OwnTexts(self)


class OwnTexts:
    """Texts behind a head in the model's own cache, a copy of the head's keys for each, by slot."""

    def __init__(self, head: OwnHead) -> None:
        self.head = head
        self.sequences: dict[int, Sequence[int]] = {}
        self.rows: dict[int, tuple[ModelCache | WholeRows, int]] = {}

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text: those of the head too where nothing is kept."""
        return len(sequence) + (self.head.cache.width if self.head.cache.use.whole else 0)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run texts behind the head and store them in `slots`; return [len(slots), T - first, F]."""
        self.sequences.update(zip(slots, sequences, strict=True))
        apart = self.head.cache.use.company == "none"
        groups = [[slot] for slot in slots] if apart else [list(slots)]
        parts = [self._run(group)[:, first:] for group in groups]
        longest = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])

    def _run(self, group: list[int]) -> Tensor:
        cache = self.head.cache.select([0] * len(group))
        cache.store_states()
        features = cache.run([self.sequences[slot] for slot in group], every=GRID)
        self.rows.update((slot, (cache, row)) for row, slot in enumerate(group))
        return features

    def branches(self, capacity: int, room: int) -> "OwnBranches":
        """Return no branches yet; `OwnBranches.admit` starts them."""
        return OwnBranches(self)


def own_rows(backbone: Backbone, use: CacheUse, sequences: Sequence[Sequence[int]]) -> "tuple[OwnBranches, Tensor]":
    """Run sequences from their beginning; return branches behind them, and the features at their ends [B, F]."""
    uncut = use.company == "any" and use.rows(backbone).has_states
    company = replace(use, company="equal") if uncut else use
    groups: dict[int, list[int]] = defaultdict(list)
    for at, sequence in enumerate(sequences):
        groups[company.mates(at, len(sequence))].append(at)
    branches = OwnBranches(None)
    branches.count = len(sequences)
    found: dict[int, Tensor] = {}
    for group in groups.values():
        lengths = [len(sequences[at]) for at in group]
        cache = use.rows(backbone, len(group))
        features = cache.run([sequences[at] for at in group])
        found.update(zip(group, features[range(len(group)), [length - 1 for length in lengths]], strict=True))
        branches.groups.append((group, cache.cut(range(len(group)), lengths) if company.company == "any" else cache))
    return branches, torch.stack([found[at] for at in range(len(sequences))])


class OwnBranches:
    """Continuations of texts, one token at a time, each with keys and states of its own.

    `tokens_run`: the number of tokens that the last step ran, with those that led to the first.
    """

    def __init__(self, texts: OwnTexts | None) -> None:
        self._texts = texts
        self.count = 0
        self.tokens_run = 0
        self._rerun = 0
        self.groups: list[tuple[list[int], ModelCache | WholeRows]] = []

    @property
    def texts(self) -> OwnTexts:
        """Return the texts behind which branches begin."""
        assert self._texts is not None
        return self._texts

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Add a branch per slot behind those there are; branch b keeps the first `kept[b]` tokens of its text."""
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for at, (slot, length) in enumerate(zip(slots, kept, strict=True)):
            mates = self.texts.head.cache.use.mates(at, length)
            members[id(self.texts.rows[slot][0]), mates].append(at)
        for group in members.values():
            cache = self.texts.rows[slots[group[0]]][0]
            texts = [self.texts.sequences[slots[at]][: kept[at]] for at in group]
            begun = self._begun(cache, [self.texts.rows[slots[at]][1] for at in group], texts)
            self.groups.append(([self.count + at for at in group], begun))
        self.count += len(slots)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [B] to each branch; return its features [B, F]."""
        parts = [
            (numbers, cache.run([[token] for token in tokens[numbers].tolist()])) for numbers, cache in self.groups
        ]
        self.tokens_run, self._rerun = sum(cache.ran for _, cache in self.groups) + self._rerun, 0
        features = parts[0][1].new_empty(self.count, parts[0][1].shape[-1])
        for numbers, part in parts:
            features[numbers] = part[:, 0]
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these branches in this order; a row that is named twice is duplicated."""
        groups = []
        for numbers, cache in self.groups:
            place = {number: at for at, number in enumerate(numbers)}
            taken = [(new, place[old]) for new, old in enumerate(rows) if old in place]
            for part in [[pair] for pair in taken] if cache.use.company == "none" else filter(None, [taken]):
                groups.append(([new for new, _ in part], cache.select([at for _, at in part])))
        self.groups, self.count = groups, len(rows)

    def branch(self, row: int) -> "OwnBranches":
        """Return a copy of one branch."""
        other = copy(self)
        other.select([row])
        return other

    def _begun(
        self, cache: "ModelCache | WholeRows", rows: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> "ModelCache | WholeRows":
        """Return the cache of a group behind these beginnings of its texts."""
        head, ends = self.texts.head.cache.width, list(map(len, texts))
        if not cache.has_states:
            return cache.cut(rows, [head + end for end in ends])
        stored = [end // GRID * GRID for end in ends]
        begun = cache.cut(rows, [head + end for end in stored])
        again = [ids[first:] for ids, first in zip(texts, stored, strict=True)]
        self._rerun += sum(map(len, again))
        begun.store_states()
        if any(again):
            begun.run(again, every=1)
        return begun.cut(range(len(rows)), [head + end for end in ends])
