"""Judge units, such as recorded calls: how much likelier each makes what the assistant writes next.

A *variant* is a text under which a unit is read: of a call, the call never made, made without its result, as it was
recorded, or with the result of another call. The loss of the same words is computed under each of them, once: it is
stored under a digest of the tokens. `windows.Window` says which words are weighted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from toolformer_dag.computing.stored_rows import choose_chunk_size
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.backend import TokenQuery
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.units import EMPTY, NONE, OWN, UnitToJudge
from toolformer_dag.traces.variants import Variant, VariantWriter

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

METHOD = 1
"""A version number, raised when the same tokens would have another loss."""
LOSSES = pl.Schema({"digest": pl.String(), "loss": pl.Float64()})


@dataclass(frozen=True, slots=True)
class JudgedUnit:
    """A unit with the losses of its variants.

    - `losses`: nats per token by variant: "none", "empty", "own", and "0", "1", ... for the other texts
    - `swaps`: how many other texts were read in place of its own
    - `overlap`: the share of the weighted words that its text contains, then each other text; needs no model
    - `tokens`: the number of weighted tokens
    - `reason`: why there are no losses, as "no_result"; None if there are losses
    """

    losses: Mapping[str, float]
    swaps: int = 0
    overlap: tuple[float, ...] = ()
    tokens: int = 0
    reason: str | None = None

    @property
    def swapped_losses(self) -> list[float]:
        """The loss with each of the other texts."""
        return [self.losses[str(number)] for number in range(self.swaps)]

    @property
    def delta(self) -> float:
        """By how much the unit lowers the loss: min(L(none), L(empty)) - L(own); not every unit can be empty."""
        losses_without = [self.losses[name] for name in (NONE, EMPTY) if name in self.losses]
        return min(losses_without) - self.losses[OWN]

    @property
    def gain(self) -> float:
        """By how much more the unit lowers the loss than other texts do: mean L(other texts) - L(own)."""
        return sum(self.swapped_losses) / self.swaps - self.losses[OWN]


class Judge:
    """A language model that computes the losses of units.

    The model is loaded for the first loss that is not stored. It is `engine` if that is not None, else what `load`
    returns, else the model of the settings. `writer` writes the variants; by default it is made from the settings.

    Attributes:
        settings: all settings.
        store: the row store that keeps losses for other runs; None keeps none.
        counts: how many losses were "computed" and "reused" so far.
        tokens: how many tokens went through the model, by the fields of TokenCounts.
    """

    def __init__(
        self,
        settings: Settings,
        store: RowStore | None = None,
        engine: "Engine | None" = None,
        *,
        load: "Callable[[], Engine] | None" = None,
        writer: VariantWriter | None = None,
    ) -> None:
        """Make a judge, whose model and writer are loaded on first use.

        Args:
            settings: all settings.
            store: the row store that keeps losses for other runs; None keeps none.
            engine: the model, if it is loaded already.
            load: loads the model, in place of the model of the settings.
            writer: turns a unit (a call in its conversation) into the token sequences that the model reads.
        """
        self.settings = settings
        self.store = store
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._engine = engine
        self._load = load
        self._writer = writer

    @cached_property
    def writer(self) -> VariantWriter:
        """Return the writer of variants: it needs a tokenizer, no weights. Raises ModelError, RenderingError."""
        if self._writer is not None:
            return self._writer
        if self._engine is not None:
            return VariantWriter(self.settings.traces, self._engine.encoding, self._engine.backend.context_length)
        return load_variant_writer(self.settings)

    @property
    def engine(self) -> "Engine":
        """Return the model; the first call loads it. Raises ModelError."""
        from toolformer_dag.model.engine import load_engine

        if self._engine is None:
            self._engine = self._load() if self._load is not None else load_engine(self.settings)
        return self._engine

    def judged(self, units: Sequence[UnitToJudge]) -> Iterator[JudgedUnit]:
        """Yield the units with their losses, or with the reason for having none, in the order of `units`.

        They are judged in chunks; the losses of a chunk are stored before the next one is begun. Raises ModelError,
        StorageError.
        """
        size = choose_chunk_size(self.settings)
        for first in range(0, len(units), size):
            yield from self._judge_chunk(units[first : first + size])

    def _judge_chunk(self, units: Sequence[UnitToJudge]) -> Iterator[JudgedUnit]:
        """Yield units with their losses; all of these are computed and stored before the first unit is yielded."""
        variants_or_reasons = [self.writer.variants(unit) for unit in units]
        losses = self._collect_losses([variants for variants in variants_or_reasons if not isinstance(variants, str)])
        for unit, variants in zip(units, variants_or_reasons, strict=True):
            if isinstance(variants, str):  # the reason why the unit cannot be judged
                yield JudgedUnit(losses={}, reason=variants)
            else:
                yield self._build_judged_unit(unit, variants, losses)

    def _build_judged_unit(
        self, unit: UnitToJudge, variants: Mapping[str, Variant], losses: Mapping[str, float]
    ) -> JudgedUnit:
        """Return a unit, such as a call, with its losses; or the reason not_finite if one of them is NaN or infinite.

        variants: the texts under which the unit is read, by name, such as {"none": ..., "own": ..., "0": ...}.
        losses: the losses of this unit and of others, by the digest of a variant's tokens.
        """
        loss_of_variant = {name: losses[variant.digest] for name, variant in variants.items()}
        if not all(isfinite(loss) for loss in loss_of_variant.values()):
            return JudgedUnit(losses={}, reason="not_finite")
        overlaps = self.writer.overlaps(unit)  # of its own text, then of each text that was read in its place
        return JudgedUnit(
            losses=loss_of_variant,
            swaps=len(overlaps) - 1,
            overlap=overlaps,
            tokens=len(variants[OWN].positions),
        )

    def _collect_losses(self, variants_of_units: Sequence[Mapping[str, Variant]]) -> dict[str, float]:
        """Return the losses of all variants by digest; losses that are not stored are computed and stored."""
        wanted = _collect_wanted_losses(variants_of_units)
        stored = self._read_stored_losses(wanted)
        missing = {digest: loss for digest, loss in wanted.items() if digest not in stored}
        self.counts.update(reused=len(stored), computed=len(missing))
        return stored | self._compute_and_store_losses(missing)

    def _compute_and_store_losses(self, missing: Mapping[str, "_WantedLoss"]) -> dict[str, float]:
        """Compute losses in chunks, store each chunk when it is done, and return all by digest."""
        losses: dict[str, float] = {}
        for chunk in _iter_chunks(missing, choose_chunk_size(self.settings)):
            computed = self._compute_losses(chunk)
            self._store_losses(computed)
            losses |= computed
        return losses

    def _read_stored_losses(self, digests: Collection[str]) -> dict[str, float]:
        """Return the losses of these variants that an earlier run has stored, by digest."""
        if self.store is None or not digests:
            return {}
        stored = self.store.stored(pl.DataFrame({"digest": sorted(digests)}))
        return dict(stored.iter_rows())

    def _store_losses(self, losses: Mapping[str, float]) -> None:
        """Store losses for other runs, by digest; do nothing without a store."""
        if self.store is not None:
            self.store.append(pl.DataFrame({"digest": list(losses), "loss": list(losses.values())}, schema=LOSSES))

    def _compute_losses(self, wanted: Mapping[str, "_WantedLoss"]) -> dict[str, float]:
        """Run the model, and return the losses by digest: the sum of weight * -log p over the weighted tokens."""
        queries = [wanted_loss.query() for wanted_loss in wanted.values()]
        losses: dict[str, float] = {}
        with self._count_tokens():
            tables = self.engine.backend.log_probabilities(queries)  # one per query, in their order
            for (digest, wanted_loss), table in zip(wanted.items(), tables, strict=True):
                log_probabilities = table[:, 0].tolist()  # a row per weighted token, with one column for that token
                losses[digest] = _compute_weighted_loss(wanted_loss.variant.weights, log_probabilities)
        return losses

    @contextmanager
    def _count_tokens(self) -> Iterator[None]:
        """Add the tokens that go through the model inside the block to `tokens`."""
        before = Counter(self.engine.counts.as_dict())
        yield
        self.tokens += Counter(self.engine.counts.as_dict()) - before


class _WantedLoss(NamedTuple):
    """A variant whose loss is wanted.

    Attributes:
        variant: the variant.
        shared_length: with how many equal tokens all variants of its unit begin; the model reads them once.
    """

    variant: Variant
    shared_length: int

    def query(self) -> TokenQuery:
        """Return the query for the log probability of each weighted token, from which the loss is computed.

        Its prefix are the tokens that all variants of a unit (a conversation with and without a call) begin with: the
        model reads them once.
        """
        ids = self.variant.ids
        positions = self.variant.positions
        return TokenQuery(
            kind=self.variant.kind,
            prefix=ids[: self.shared_length],
            text=ids[self.shared_length :],
            places=[position - self.shared_length for position in positions],  # counted from the end of the prefix
            tokens=[[ids[position]] for position in positions],
        )


def _collect_wanted_losses(variants_of_units: Sequence[Mapping[str, Variant]]) -> dict[str, _WantedLoss]:
    """Return the losses that are wanted, by the digest of a variant's tokens: variants with equal tokens share one.

    variants_of_units: for each unit, such as a call, the token sequences with it, without it and with others instead.
    """
    wanted: dict[str, _WantedLoss] = {}
    for variants in variants_of_units:
        shared_length = _count_shared_tokens(list(variants.values()))
        for variant in variants.values():
            wanted[variant.digest] = _WantedLoss(variant, shared_length)
    return wanted


def _iter_chunks(wanted: Mapping[str, _WantedLoss], size: int) -> Iterator[dict[str, _WantedLoss]]:
    """Yield wanted losses in chunks of at most `size`, in their order."""
    digests = list(wanted)
    for first in range(0, len(digests), size):
        yield {digest: wanted[digest] for digest in digests[first : first + size]}


def _compute_weighted_loss(weights: Sequence[float], log_probabilities: Sequence[float]) -> float:
    """Return the sum of weight * -log p, as 1.5 for the weights 0.5, 0.5 and the log probabilities -1, -2."""
    weighted = [weight * log_p for weight, log_p in zip(weights, log_probabilities, strict=True)]
    return -sum(weighted)


def _count_shared_tokens(variants: Sequence[Variant]) -> int:
    """Return with how many equal tokens the variants of a unit begin, up to the first weighted token.

    The model reads this beginning once for all of them. As an example, 2 of (5, 6, 7, 8) and (5, 6, 9, 8).
    """
    first_weighted = min(variant.positions[0] for variant in variants)
    for position in range(first_weighted):
        tokens = {variant.ids[position] for variant in variants}
        if len(tokens) > 1:
            return position
    return first_weighted


def load_variant_writer(settings: Settings) -> VariantWriter:
    """Return the writer of variants for the settings' model, without weights. Raises ModelError, RenderingError."""
    from toolformer_dag.model.loading import context_length, load_config, load_encoding

    length = context_length(load_config(settings.model))
    return VariantWriter(settings.traces, load_encoding(settings.model), length)


def losses_identity(model: Mapping[str, object]) -> dict[str, Any]:
    """Return what determines the loss of tokens. model: what determines the probabilities of the model."""
    return {"method": METHOD, "model": dict(model)}
