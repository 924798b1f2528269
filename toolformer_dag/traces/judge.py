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
from toolformer_dag.traces.units import EMPTY_UNIT_VARIANT, NO_UNIT_VARIANT, RECORDED_VARIANT, UnitToJudge
from toolformer_dag.traces.variants import Variant, VariantWriter

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

LOSSES_VERSION = 1
"""A version number, raised when the same tokens would have another loss."""
LOSSES_SCHEMA = pl.Schema({"digest": pl.String(), "loss": pl.Float64()})


@dataclass(frozen=True, slots=True)
class JudgedUnit:
    """A unit, such as a recorded call, with the losses of its variants.

    Attributes:
        loss_by_variant: the loss in nats per token by variant: "none", "empty", "own", and "0", "1", ... for the other
            texts.
        other_text_count: how many other texts were read in place of its own.
        overlaps: the share of the weighted words that its own text contains, then the share for each other text.
        weighted_token_count: the number of weighted tokens, over which the loss is computed.
        reason_not_judged: why there are no losses, such as "no_result"; None if there are losses.
    """

    loss_by_variant: Mapping[str, float]
    other_text_count: int = 0
    overlaps: tuple[float, ...] = ()
    weighted_token_count: int = 0
    reason_not_judged: str | None = None

    @property
    def other_text_losses(self) -> list[float]:
        """The loss with each of the other texts."""
        return [self.loss_by_variant[str(number)] for number in range(self.other_text_count)]

    @property
    def delta(self) -> float:
        """By how much the unit lowers the loss: min(L(none), L(empty)) - L(own); not every unit can be empty."""
        losses_without_unit = []
        for variant_name in (NO_UNIT_VARIANT, EMPTY_UNIT_VARIANT):
            if variant_name in self.loss_by_variant:
                losses_without_unit.append(self.loss_by_variant[variant_name])
        return min(losses_without_unit) - self.loss_by_variant[RECORDED_VARIANT]

    @property
    def gain(self) -> float:
        """By how much more the unit lowers the loss than other texts do: mean L(other texts) - L(own)."""
        mean_other_loss = sum(self.other_text_losses) / self.other_text_count
        return mean_other_loss - self.loss_by_variant[RECORDED_VARIANT]


class Judge:
    """A language model that computes the losses of units, such as recorded calls.

    The model is loaded for the first loss that is not stored.

    Attributes:
        settings: all settings.
        loss_store: the row store that keeps losses for other runs; None keeps none.
        loss_counts: how many losses were "computed" and "reused" so far.
        token_counts: how many tokens went through the model, by the fields of TokenCounts.
    """

    def __init__(
        self,
        settings: Settings,
        loss_store: RowStore | None = None,
        engine: "Engine | None" = None,
        *,
        load_engine_function: "Callable[[], Engine] | None" = None,
        variant_writer: VariantWriter | None = None,
    ) -> None:
        """Make a judge, whose model and writer are loaded on first use.

        Args:
            settings: All settings.
            loss_store: The row store that keeps losses for other runs. None keeps none.
            engine: The model, if it is loaded already.
            load_engine_function: Loads the model if `engine` is None. Without it the model of the settings is loaded.
            variant_writer: Turns a unit (a call in its conversation) into the token sequences that the model reads. By
                default it is made for the model.
        """
        self.settings = settings
        self.loss_store = loss_store
        self.loss_counts: Counter[str] = Counter()
        self.token_counts: Counter[str] = Counter()
        self._engine = engine
        self._load_engine_function = load_engine_function
        self._variant_writer = variant_writer

    @cached_property
    def variant_writer(self) -> VariantWriter:
        """The writer of variants, the token sequences that the model reads. It needs a tokenizer, no weights.

        Raises:
            ModelError: The model of the settings cannot be read.
            RenderingError: No chat template fits the model.
        """
        if self._variant_writer is not None:  # the caller has passed one in
            return self._variant_writer
        if self._engine is not None:  # a loaded model has its tokenizer, otherwise only the tokenizer is loaded
            return VariantWriter(self.settings.traces, self._engine.encoding, self._engine.backend.context_length)
        return load_variant_writer(self.settings)

    @property
    def engine(self) -> "Engine":
        """The model, which is loaded on first use.

        Raises:
            ModelError: The model cannot be loaded.
        """
        from toolformer_dag.model.engine import load_engine

        if self._engine is not None:
            return self._engine

        if self._load_engine_function is not None:
            self._engine = self._load_engine_function()
        else:
            self._engine = load_engine(self.settings)
        return self._engine

    def iter_judged_units(self, units: Sequence[UnitToJudge]) -> Iterator[JudgedUnit]:
        """Yield each unit (such as a recorded call) with its losses, or with the reason for having none, in order.

        The losses of a chunk of units are stored before the next chunk is begun.

        Raises:
            ModelError: The model cannot be loaded.
            StorageError: Losses cannot be read or stored.
        """
        chunk_size = choose_chunk_size(self.settings)
        for first in range(0, len(units), chunk_size):
            yield from self._iter_judged_chunk(units[first : first + chunk_size])

    def _iter_judged_chunk(self, units: Sequence[UnitToJudge]) -> Iterator[JudgedUnit]:
        """Yield units (such as recorded calls) with their losses, after all of these are computed and stored."""
        # For each unit its variants (token sequences with the unit, without it and with other texts in its place), or
        # the reason (a string) why it cannot be judged.
        variants_or_reasons = [self.variant_writer.write_variants(unit) for unit in units]
        variants_of_units = [variants for variants in variants_or_reasons if not isinstance(variants, str)]
        loss_by_digest = self._collect_losses(variants_of_units)

        for unit, variants_or_reason in zip(units, variants_or_reasons, strict=True):
            if isinstance(variants_or_reason, str):
                yield JudgedUnit(loss_by_variant={}, reason_not_judged=variants_or_reason)
            else:
                yield self._build_judged_unit(unit, variants_or_reason, loss_by_digest)

    def _build_judged_unit(
        self, unit: UnitToJudge, variant_by_name: Mapping[str, Variant], loss_by_digest: Mapping[str, float]
    ) -> JudgedUnit:
        """Look up the losses of a unit (such as a recorded call), which the model has computed already.

        Args:
            unit: The unit.
            variant_by_name: The token sequences that the model read: the conversation without the unit ("none"), with
                its own text ("own"), and with other texts in its place ("0", "1", ...).
            loss_by_digest: The losses of this unit and of others, by the digest of a variant's tokens.

        Returns:
            The unit with its losses, or with the reason "not_finite" if one of them is NaN or infinite.
        """
        loss_by_variant = {name: loss_by_digest[variant.digest] for name, variant in variant_by_name.items()}
        if not all(isfinite(loss) for loss in loss_by_variant.values()):
            return JudgedUnit(loss_by_variant={}, reason_not_judged="not_finite")

        # The weighted words come after the unit, and the loss is computed over them. An overlap is the share of them
        # that a text contains: one for the unit's own text, then one for each other text that was read in its place.
        overlaps = self.variant_writer.compute_overlaps(unit)
        return JudgedUnit(
            loss_by_variant=loss_by_variant,
            other_text_count=len(overlaps) - 1,
            overlaps=overlaps,
            weighted_token_count=len(variant_by_name[RECORDED_VARIANT].weighted_positions),
        )

    def _collect_losses(self, variants_of_units: Sequence[Mapping[str, Variant]]) -> dict[str, float]:
        """Return the losses of all variants by the digest of their tokens. Those that are not stored are computed.

        Args:
            variants_of_units: For each unit, such as a call, the token sequences with it, without it and with other
                texts in its place, by the name of the variant.
        """
        wanted_loss_by_digest = _collect_wanted_losses(variants_of_units)
        stored_losses = self._read_stored_losses(wanted_loss_by_digest)
        missing_losses = {
            digest: wanted_loss for digest, wanted_loss in wanted_loss_by_digest.items() if digest not in stored_losses
        }

        self.loss_counts.update(reused=len(stored_losses), computed=len(missing_losses))
        return stored_losses | self._compute_and_store_losses(missing_losses)

    def _compute_and_store_losses(self, missing_losses: Mapping[str, "_WantedLoss"]) -> dict[str, float]:
        """Compute losses in chunks, store each chunk when it is done, and return all by digest."""
        loss_by_digest: dict[str, float] = {}
        for chunk in _iter_wanted_loss_chunks(missing_losses, choose_chunk_size(self.settings)):
            losses_of_chunk = self._compute_losses(chunk)
            self._store_losses(losses_of_chunk)
            loss_by_digest |= losses_of_chunk
        return loss_by_digest

    def _read_stored_losses(self, digests: Collection[str]) -> dict[str, float]:
        """Return the losses of these variants that an earlier run has stored, by digest."""
        if self.loss_store is None or not digests:
            return {}
        stored = self.loss_store.read_stored_rows(pl.DataFrame({"digest": sorted(digests)}))
        return dict(stored.iter_rows())

    def _store_losses(self, loss_by_digest: Mapping[str, float]) -> None:
        """Store losses for other runs, or do nothing if there is no store."""
        if self.loss_store is None:
            return
        columns = {"digest": list(loss_by_digest), "loss": list(loss_by_digest.values())}
        self.loss_store.append_rows(pl.DataFrame(columns, schema=LOSSES_SCHEMA))

    def _compute_losses(self, wanted_losses: Mapping[str, "_WantedLoss"]) -> dict[str, float]:
        """Run the model, and return the loss of each variant (a token sequence) by the digest of its tokens.

        A loss is the sum of weight * -log p over the weighted tokens, those of messages after the unit.
        """
        queries = [wanted_loss.build_query() for wanted_loss in wanted_losses.values()]
        loss_by_digest: dict[str, float] = {}
        with self._count_tokens():
            tables = self.engine.backend.compute_log_probabilities(queries)  # one per query, in their order
            for (digest, wanted_loss), table in zip(wanted_losses.items(), tables, strict=True):
                log_probabilities = table[:, 0].tolist()  # a row per weighted token, with one column for that token
                loss = _compute_weighted_loss(wanted_loss.variant.token_weights, log_probabilities)
                loss_by_digest[digest] = loss
        return loss_by_digest

    @contextmanager
    def _count_tokens(self) -> Iterator[None]:
        """Add the tokens that go through the model inside the `with` block to `token_counts`."""
        counts_before = Counter(self.engine.token_counts.as_dict())
        yield
        counts_after = Counter(self.engine.token_counts.as_dict())
        self.token_counts += counts_after - counts_before


class _WantedLoss(NamedTuple):
    """A variant whose loss is wanted.

    Attributes:
        variant: the variant.
        shared_token_count: with how many equal tokens all variants of its unit begin; the model reads them once.
    """

    variant: Variant
    shared_token_count: int

    def build_query(self) -> TokenQuery:
        """Return the query for the log probability of each weighted token, from which the loss is computed.

        Its prefix is the tokens that all variants of a unit (a conversation with and without a call) begin with. The
        model reads them once.
        """
        token_ids = self.variant.token_ids
        positions = self.variant.weighted_positions
        prefix_length = self.shared_token_count
        return TokenQuery(
            count_field=self.variant.token_count_field,
            prefix_ids=token_ids[:prefix_length],
            text_ids=token_ids[prefix_length:],
            query_positions=[position - prefix_length for position in positions],  # counted from the end of the prefix
            target_ids_by_place=[[token_ids[position]] for position in positions],
        )


def _collect_wanted_losses(variants_of_units: Sequence[Mapping[str, Variant]]) -> dict[str, _WantedLoss]:
    """Collect the losses that are wanted, by the digest of a variant's tokens. Variants with equal tokens share one.

    Args:
        variants_of_units: For each unit, such as a call, the token sequences with it, without it and with other texts
            in its place, by the name of the variant.
    """
    wanted_loss_by_digest: dict[str, _WantedLoss] = {}
    for variant_by_name in variants_of_units:
        # The tokens with which all variants of this unit begin. If units have a variant in common, the number of the
        # last unit is kept: it only decides which tokens the model reads once.
        shared_token_count = _count_shared_tokens(list(variant_by_name.values()))
        for variant in variant_by_name.values():
            wanted_loss_by_digest[variant.digest] = _WantedLoss(variant, shared_token_count)
    return wanted_loss_by_digest


def _iter_wanted_loss_chunks(
    wanted_losses: Mapping[str, _WantedLoss], chunk_size: int
) -> Iterator[dict[str, _WantedLoss]]:
    """Yield wanted losses in chunks of at most `chunk_size`, in their order."""
    digests = list(wanted_losses)
    for first in range(0, len(digests), chunk_size):
        yield {digest: wanted_losses[digest] for digest in digests[first : first + chunk_size]}


def _compute_weighted_loss(weights: Sequence[float], log_probabilities: Sequence[float]) -> float:
    """Return the sum of weight * -log p, as 1.5 for the weights 0.5, 0.5 and the log probabilities -1, -2."""
    products = [weight * log_p for weight, log_p in zip(weights, log_probabilities, strict=True)]
    return -sum(products)


def _count_shared_tokens(variants: Sequence[Variant]) -> int:
    """Count with how many equal tokens the variants of a unit begin, up to the first weighted token.

    The model reads this beginning once for all of them.

    Example:
        The count is 2 for the tokens (5, 6, 7, 8) and (5, 6, 9, 8).
    """
    first_weighted_position = min(variant.weighted_positions[0] for variant in variants)
    for position in range(first_weighted_position):
        tokens_at_position = {variant.token_ids[position] for variant in variants}
        if len(tokens_at_position) > 1:
            return position
    return first_weighted_position


def load_variant_writer(settings: Settings) -> VariantWriter:
    """Load what turns a unit (such as a call) into the token sequences that the model of the settings reads.

    It needs the tokenizer, but no weights.

    Raises:
        ModelError: The model cannot be read.
        RenderingError: No chat template fits the model.
    """
    from toolformer_dag.model.loading import load_config, load_encoding, read_context_length

    context_length = read_context_length(load_config(settings.model))
    return VariantWriter(settings.traces, load_encoding(settings.model), context_length)


def build_losses_identity(model_identity: Mapping[str, object]) -> dict[str, Any]:
    """Return what determines the loss of a sequence of tokens.

    Args:
        model_identity: What determines the probabilities of the model.
    """
    return {"method": LOSSES_VERSION, "model": dict(model_identity)}
