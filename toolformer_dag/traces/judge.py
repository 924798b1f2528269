"""Judge recorded calls: by how much a result tells what the assistant writes next, and what other results tell of it.

The loss of the same words is computed under each variant of a call, once: it is stored by the tokens that it is of.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from operator import mul
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.computing.stored_rows import chunk_size
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.backend import TokenQuery
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.variants import EMPTY, NONE, OWN, AskedCall, Reader, Variant

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

METHOD = 1
"""Raised when the same tokens would have another loss."""
LOSSES = pl.Schema({"digest": pl.String(), "loss": pl.Float64()})


@dataclass(frozen=True, slots=True)
class JudgedCall:
    """A call with the losses of its variants, nats per token, and of the swapped results in their order.

    `reason`: why there are no losses. `overlap`: the share of the weighted words that the result holds, and that each
    swapped result holds: what tells without a model. `tokens`: weighted ones.
    """

    losses: Mapping[str, float]
    swapped: tuple[str, ...] = ()
    overlap: tuple[float, ...] = ()
    tokens: int = 0
    reason: str | None = None

    @property
    def delta(self) -> float:
        """Return by how much the result lowers the loss: min(L(none), L(empty)) - L(own)."""
        return min(self.losses[NONE], self.losses[EMPTY]) - self.losses[OWN]

    @property
    def gain(self) -> float:
        """Return by how much it lowers the loss more than swapped results do: mean L(swapped) - L(own)."""
        swapped = [self.losses[str(number)] for number in range(len(self.swapped))]
        return sum(swapped) / len(swapped) - self.losses[OWN]


class Judge:
    """A model that reads calls; its weights are loaded with the first loss that is not stored.

    - `store`: where losses are kept; None keeps none
    - `counts`: how many losses were computed and reused so far
    - `tokens`: how many tokens went through the model for them, by kind

    engine, or load: the model, or what loads it; without either that of the settings is loaded. reader: what writes the
    variants, where there is one already.
    """

    def __init__(
        self,
        settings: Settings,
        store: RowStore | None = None,
        engine: "Engine | None" = None,
        *,
        load: "Callable[[], Engine] | None" = None,
        reader: Reader | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._engine = engine
        self._load = load
        self._reader = reader

    @cached_property
    def reader(self) -> Reader:
        """Return what writes the variants: the tokenizer, without weights. Raises ModelError, RenderingError."""
        if self._reader is not None:
            return self._reader
        if self._engine is not None:
            return Reader(self.settings.traces, self._engine.encoding, self._engine.backend.context_length)
        return reader_of(self.settings)

    @property
    def engine(self) -> "Engine":
        """Return the model; the first call loads it. Raises ModelError."""
        from toolformer_dag.model.engine import load_engine

        if self._engine is None:
            self._engine = self._load() if self._load is not None else load_engine(self.settings)
        return self._engine

    def judged(self, calls: Sequence[AskedCall]) -> Iterator[JudgedCall]:
        """Yield the calls with their losses, in their order; a chunk of losses is stored before the next is begun.

        Raises ModelError, StorageError.
        """
        size = chunk_size(self.settings)
        for first in range(0, len(calls), size):
            some = calls[first : first + size]
            variants = [self.reader.variants(call) for call in some]
            losses = self._losses([found for found in variants if isinstance(found, dict)])
            for call, found in zip(some, variants, strict=True):
                yield self._judged(call, found, losses)

    def _judged(self, asked: AskedCall, found: dict[str, Variant] | str, losses: Mapping[str, float]) -> JudgedCall:
        if isinstance(found, str):
            return JudgedCall({}, reason=found)
        by_name = {name: losses[variant.digest] for name, variant in found.items()}
        if not all(map(isfinite, by_name.values())):
            return JudgedCall({}, reason="not_finite")
        results = (asked.call.result or "", *asked.swapped)
        overlap = self.reader.overlaps(asked, results)
        return JudgedCall(by_name, asked.swapped, overlap, len(found[OWN].places))

    def _losses(self, calls: Sequence[Mapping[str, Variant]]) -> dict[str, float]:
        """Return the losses of all variants by digest: the stored ones, and those that are computed and stored now."""
        wanted = {one.digest: (call, one) for call in calls for one in call.values()}
        found: dict[str, float] = {}
        if self.store is not None and wanted:
            found = dict(self.store.stored(pl.DataFrame({"digest": sorted(wanted)})).iter_rows())
        lacking = [(digest, one) for digest, one in wanted.items() if digest not in found]
        self.counts.update(reused=len(found), computed=len(lacking))
        for first in range(0, len(lacking), size := chunk_size(self.settings)):
            found |= self._computed(dict(lacking[first : first + size]))
        return found

    def _computed(self, lacking: Mapping[str, tuple[Mapping[str, Variant], Variant]]) -> dict[str, float]:
        """Return the losses by digest, over the places the sum of weight times -log p, once they are stored."""
        queries = [_query(variant, _shared(list(call.values()))) for call, variant in lacking.values()]
        weights = [variant.weights for _, variant in lacking.values()]
        tokens_before = Counter(self.engine.counts.as_dict())
        values = [found[:, 0].tolist() for found in self.engine.backend.log_probabilities(queries)]
        self.tokens += Counter(self.engine.counts.as_dict()) - tokens_before
        losses = [-sum(map(mul, *each)) for each in zip(weights, values, strict=True)]
        if self.store is not None:
            self.store.append(pl.DataFrame({"digest": list(lacking), "loss": losses}, schema=LOSSES))
        return dict(zip(lacking, losses, strict=True))


def _shared(call: Sequence[Variant]) -> int:
    """Return how many tokens the variants of a call begin with alike: a prefix that is run once."""
    first = min(one.places[0] for one in call)
    columns = enumerate(zip(*(one.ids[:first] for one in call), strict=True))
    return next((at for at, column in columns if len(set(column)) > 1), first)


def _query(one: Variant, shared: int) -> TokenQuery:
    places = [place - shared for place in one.places]
    return TokenQuery(one.kind, one.ids[:shared], one.ids[shared:], places, [[one.ids[place]] for place in one.places])


def reader_of(settings: Settings) -> Reader:
    """Load what writes the variants of calls: a tokenizer, no weights. Raises ModelError, RenderingError."""
    from toolformer_dag.model.loading import context_length, load_config, load_encoding

    length = context_length(load_config(settings.model))
    return Reader(settings.traces, load_encoding(settings.model), length)


def losses_identity(model: Mapping[str, object]) -> dict[str, Any]:
    """Return what determines a loss beside the tokens. model: what determines the model's values."""
    return {"method": METHOD, "model": dict(model)}
