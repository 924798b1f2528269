"""Texts after a prompt head in the model's own cache, for models whose attention cannot be replaced.

Where even that changes the numbers, the tokens themselves stand in the place of keys, and all of them run at each step.
Keys and values are cut at any token. The states of linear attention (Mamba, RWKV, convolutions) cannot be cut: they are
stored at every `GRID`-th token of a text, and the few tokens up to a position run again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import signature
from itertools import count
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

    def grouped(self, lengths: Sequence[int]) -> Iterable[list[int]]:
        """Return the numbers of the rows that may share a pass, by pass."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            groups[self.mates(row, length)].append(row)
        return groups.values()


class ModelCache:
    """Rows in the model's own cache; row r holds `lengths[r]` tokens from column `starts[r]` on.

    `states`: by number of columns, the states of linear attention after so many columns.
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
        """Append a sequence to each row, padded on the right; return features [B, T, F].

        `every`: the number of new columns after which states are stored.
        """
        ids = padded(sequences, self.backbone.device)
        step = ids.shape[1] if self.use.chunks or not self.width else 1
        if every is not None and self.has_states:
            step = min(step, every)
        before, features = self.width, []
        for first in range(0, ids.shape[1], step):
            features.append(self._forward(ids[:, first : first + step]))
            if every is not None and (self.width - before) % every == 0:
                self.store_states()
        self.lengths = [length + len(ids) for length, ids in zip(self.lengths, sequences, strict=True)]
        return torch.cat(features, 1)

    def store_states(self) -> None:
        """Store the states after the columns so far; they are lost with the next token."""
        self.states[self.width] = [state.clone() for state in self._state_tensors()]

    def select(self, rows: Sequence[int]) -> "ModelCache":
        """Return a cache of these rows as they are; a row that is named twice is duplicated."""
        chosen = on_device(rows, self.backbone.device)
        return self._derived(
            [self.starts[row] for row in rows],
            [self.lengths[row] for row in rows],
            self.width,
            lambda part: part[chosen],
            lambda _, state: state[chosen],
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
            lambda at, _: torch.stack([self.states[end][at][row] for row, end in zip(rows, ends, strict=True)]),
        )

    def texts(self, slots: int, width: int) -> "OwnTexts":
        """Return texts after this single row, to be filled by `OwnTexts.features`; nothing is allocated."""
        return OwnTexts(self)

    def _forward(self, ids: Tensor) -> Tensor:
        if self.use.whole:
            features = self._recomputed(ids)
        else:
            features, self.cache = self.backbone.cached_features(ids, self.name, self.cache, **self._places(ids))
        self.width += ids.shape[1]
        return features

    def _recomputed(self, ids: Tensor) -> Tensor:
        """Run all tokens of rows of equal length, in passes of as many rows as the budget allows."""
        column = ids[:, None, :, None]
        tokens, _ = self.cache.update(column, column, 0)
        rows = max(1, self.backbone.budget.tokens // tokens.shape[2])
        return torch.cat([self.backbone.features(part)[:, self.width :] for part in tokens[:, 0, :, 0].split(rows)])

    def _places(self, ids: Tensor) -> dict[str, Tensor]:
        """Return what tells the model where rows begin whose beginnings are padded."""
        keyed = self.name != "state" and any(isinstance(layer, DynamicLayer) for layer in self.cache.layers)
        if not keyed or not any(self.starts):
            return {}
        columns = torch.arange(self.width + ids.shape[1], device=ids.device)
        mask = (columns >= on_device(self.starts, ids.device)[:, None]).long()
        if "position_ids" not in signature(self.backbone.body.forward).parameters:
            return {"attention_mask": mask}
        return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, self.width :]}

    def _state_tensors(self) -> list[Tensor]:
        if self.name == "state":
            return list(self.cache or ())
        layers = [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]
        parts = [part for layer in layers for part in (layer.conv_states, layer.recurrent_states)]
        return [state for part in parts for state in part.values() if state is not None]

    def _derived(
        self,
        starts: list[int],
        lengths: list[int],
        width: int,
        keys: Callable[[Tensor], Tensor],
        state: Callable[[int, Tensor], Tensor],
    ) -> "ModelCache":
        """Return a cache of other rows: `keys` makes their keys and values, `state` their states, by number."""
        derived = copy(self)
        derived.starts, derived.lengths, derived.width, derived.states = starts, lengths, width, {}
        numbers = count()
        if self.name == "state":
            derived.cache = [state(next(numbers), part) for part in self._state_tensors()]
            return derived
        derived.cache = copy(self.cache)
        derived.cache.layers = list(map(copy, self.cache.layers))
        for layer in derived.cache.layers:
            for kind in ("conv_states", "recurrent_states") if isinstance(layer, LinearAttentionLayer) else ():
                known = getattr(layer, kind).items()
                setattr(layer, kind, {at: None if part is None else state(next(numbers), part) for at, part in known})
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                layer.keys, layer.values = keys(layer.keys), keys(layer.values)
        return derived


def cache_argument(body: Any) -> str:
    """Return the name under which a model takes its cache. Raises NotImplementedError where it takes none."""
    known = signature(body.forward).parameters
    name = next((name for name in ARGUMENTS if name in known), None)
    if name is None:
        raise NotImplementedError(f"{type(body).__name__} takes no cache")
    return name


def _new_cache(backbone: Backbone, name: str) -> DynamicCache | None:
    """Return an empty cache that keeps every token's keys. Raises NotImplementedError for other kinds of layers."""
    if name == "state":
        return None
    cache = DynamicCache(config=backbone.model.config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in KNOWN_LAYERS}
    if unknown:
        raise NotImplementedError(f"caches of {', '.join(sorted(unknown))}")
    return cache


class OwnTexts:
    """Texts after a head in the model's own cache, a copy of the head's keys for each, by slot."""

    def __init__(self, head: ModelCache) -> None:
        self.head = head
        self.sequences: dict[int, Sequence[int]] = {}
        self.rows: dict[int, tuple[ModelCache, int]] = {}

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text: those of the head too where nothing is kept."""
        return len(sequence) + (self.head.width if self.head.use.whole else 0)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run texts after the head and store them in `slots`; return [len(slots), T - first, F]."""
        self.sequences.update(zip(slots, sequences, strict=True))
        apart = self.head.use.company == "none"
        parts = []
        for group in [[slot] for slot in slots] if apart else [slots]:
            cache = self.head.select([0] * len(group))
            cache.store_states()
            parts.append(cache.run([self.sequences[slot] for slot in group], every=GRID)[:, first:])
            self.rows.update((slot, (cache, row)) for row, slot in enumerate(group))
        longest = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])

    def branches(self, capacity: int, room: int) -> "OwnBranches":
        """Return no branches yet; `OwnBranches.admit` starts them."""
        return OwnBranches(self)


class OwnBranches:
    """Continuations of texts, one token at a time, each with keys and states of its own.

    `tokens_run`: the number of tokens that the last step ran, with those that led to the first.
    """

    def __init__(self, texts: OwnTexts) -> None:
        self.texts = texts
        self.tokens_run = 0
        self._rerun = 0
        self.groups: list[tuple[list[int], ModelCache]] = []

    @property
    def count(self) -> int:
        """The number of branches."""
        return sum(len(numbers) for numbers, _ in self.groups)

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Add a branch per slot after those there are; branch b keeps the first `kept[b]` tokens of its text."""
        before = self.count
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for at, (slot, length) in enumerate(zip(slots, kept, strict=True)):
            mates = self.texts.head.use.mates(at, length)
            members[id(self.texts.rows[slot][0]), mates].append(at)
        for group in members.values():
            cache = self.texts.rows[slots[group[0]]][0]
            texts = [self.texts.sequences[slots[at]][: kept[at]] for at in group]
            begun = self._begun(cache, [self.texts.rows[slots[at]][1] for at in group], texts)
            self.groups.append(([before + at for at in group], begun))

    def add(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run sequences from their beginning, start a branch after each, and return the features at their ends [B, F].

        Branches share passes with those that were added with them alone.
        """
        head = self.texts.head
        use = replace(head.use, company="equal") if head.use.company == "any" and head.has_states else head.use
        before = self.count
        ends: dict[int, Tensor] = {}
        for group in use.grouped(list(map(len, sequences))):
            lengths = [len(sequences[at]) for at in group]
            cache = ModelCache(head.backbone, head.use, len(group))
            features = cache.run([sequences[at] for at in group])
            ends.update(zip(group, features[range(len(group)), [length - 1 for length in lengths]], strict=True))
            begun = cache.cut(range(len(group)), lengths) if use.company == "any" else cache
            self.groups.append(([before + at for at in group], begun))
        return torch.stack([ends[at] for at in range(len(sequences))])

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [B] to each branch; return its features [B, F]."""
        parts = [cache.run([[token] for token in tokens[numbers].tolist()])[:, 0] for numbers, cache in self.groups]
        lengths = [sum(cache.lengths) if cache.use.whole else len(numbers) for numbers, cache in self.groups]
        self.tokens_run, self._rerun = sum(lengths) + self._rerun, 0
        features = torch.cat(parts)
        features[[number for numbers, _ in self.groups for number in numbers]] = features.clone()
        return features

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these branches in this order; a row that is named twice is duplicated."""
        groups, self.groups = self.groups, []
        for numbers, cache in groups:
            place = {number: at for at, number in enumerate(numbers)}
            taken = [(new, place[old]) for new, old in enumerate(rows) if old in place]
            for part in [[pair] for pair in taken] if cache.use.company == "none" else filter(None, [taken]):
                self.groups.append(([new for new, _ in part], cache.select([at for _, at in part])))

    def branch(self, row: int) -> "OwnBranches":
        """Return a copy of one branch."""
        copied = copy(self)
        copied.select([row])
        return copied

    def _begun(self, cache: ModelCache, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> ModelCache:
        """Return the cache of a group after these beginnings of its texts."""
        head, ends = self.texts.head.width, list(map(len, texts))
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
