"""The losses of the units of a table: planned in chunks, computed once for each key, and read again as rows.

A stage of losses, such as `call_losses`, says which units there are and how a chunk of them is read. What was measured
of a unit is stored under its `key` (row store traces/judged_calls), and each loss under a digest of its tokens (row
store traces/losses). So nothing is computed again when a file was moved or a setting changed that does not matter here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import (
    Chunk,
    ClaimedKeys,
    Column,
    PartRows,
    Planned,
    RejectionCounts,
    TableOutput,
    Work,
    count_rejected_rows,
)
from toolformer_dag.computing.stored_rows import choose_chunk_size, claim_keys
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import StorageError
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.traces.judge import LOSSES_SCHEMA, Judge, JudgedUnit, build_losses_identity, load_variant_writer
from toolformer_dag.traces.units import EMPTY_UNIT_VARIANT, NO_UNIT_VARIANT, RECORDED_VARIANT, UnitToJudge
from toolformer_dag.traces.variants import VariantWriter
from toolformer_dag.traces.windows import WINDOWS_BY_NAME

READING_VERSION = 2
"""Raised when the same conversation would be read as other tokens, or another overlap would be counted."""
MEASURED_COLUMNS = {
    "not_judged": Column(pl.String(), "why there are no losses; null for most"),
    "tokens": Column(pl.Int32(), "weighted tokens"),
    "loss_none": Column(pl.Float64(), "loss of the weighted tokens had the call never been made, nats per token"),
    "loss_empty": Column(pl.Float64(), "the same with the call and an empty result"),
    "loss_result": Column(pl.Float64(), "the same with the recorded result"),
    "overlap": Column(pl.Float64(), "share of the weighted words that stand in the result"),
    "swapped_losses": Column(pl.List(pl.Float64()), "the loss with each of the exchanged results"),
    "swapped_overlaps": Column(pl.List(pl.Float64()), "the overlap with each of the exchanged results"),
}
"""The columns with what is measured of a unit, in the words of calls."""
MEASURED_SCHEMA = pl.Schema({"key": pl.String(), **{name: column.dtype for name, column in MEASURED_COLUMNS.items()}})
"""The columns of the stored measurements."""
MAX_CHUNK_UNITS = 1_000
"""The maximum number of units of a chunk that goes on to the end of a conversation."""
MAX_UNITS_PER_LOOKUP = 20_000
"""How many units are looked up in the row store at once."""


class JudgedStores(NamedTuple):
    """The row stores of the plan's judge.

    Attributes:
        unit_store: what was measured of units, a row for each `key`.
        loss_store: single losses, a row for each digest of tokens.
    """

    unit_store: RowStore
    loss_store: RowStore


class UnitChunk(NamedTuple):
    """Units of a shard that a worker judges at once.

    Attributes:
        shard: the name of the shard.
        units: a frame with a row per unit. It has at least the columns `row`, the number of the unit in its shard, and
            `key`, under which its measurements are stored.
    """

    shard: str
    units: pl.DataFrame


def collect_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the losses of a unit: of a recorded call, whose effect on later words is measured.

    That is the judge (a language model), how conversations are read, the settings of recorded conversations except
    `swaps`, and the weights of the tokens after the unit if these are fixed.

    Args:
        plan: The plan with the settings.
        lane: None, because recorded calls belong to no lane (a tool with its settings).
    """
    judge_identity = build_losses_identity(plan.get_model_identity("judge"))
    # The window says which tokens after a call count. Only the paper's has fixed weights for them.
    window = WINDOWS_BY_NAME[plan.settings.traces.window]
    fixed_weights = {"window_weights": list(window.fixed_weights)} if window.fixed_weights else {}
    return {
        **judge_identity,
        "reading": READING_VERSION,
        **select_determining_settings(plan.settings.traces, excluded_keys=("swaps",)),
        **fixed_weights,
    }


def open_judged_stores(worker: Worker) -> JudgedStores:
    """Open the two row stores of the plan's judge. They also hold the losses that earlier releases stored there."""
    unit_settings = collect_settings(worker.plan, None)
    losses_identity = build_losses_identity(worker.plan.get_model_identity("judge"))
    return JudgedStores(
        unit_store=worker.open_row_store("traces/judged_calls", unit_settings, ["key"], MEASURED_SCHEMA),
        loss_store=worker.open_row_store("traces/losses", losses_identity, ["digest"], LOSSES_SCHEMA),
    )


@dataclass(frozen=True)
class UnitLosses:
    """How a stage computes the losses of its units, such as calls. The methods are what its `ByChunk` takes.

    Attributes:
        iter_units: a function that yields the units of a shard in frames: the columns of the stage that are not
            measured, of which one is `conversation`, and the `key` of each unit.
        read_units: a function that reads the units of a chunk with their conversations. It raises StorageError if
            another run has replaced them.
    """

    iter_units: Callable[[TableOutput, str], Iterator[pl.DataFrame]]
    read_units: Callable[[Plan, UnitChunk], Sequence[UnitToJudge]]

    def plan_part(self, worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
        """Plan which units of a shard, such as calls, still have to be judged.

        Args:
            worker: Gives access to the stored measurements.
            output: The table to be computed.
            shard: The name of the shard.
            claimed_keys: For each row store, the keys that earlier shards of this run are judging. They are not planned
                again. The keys that are planned here are added.

        Returns:
            The units in chunks, each key once, and the counts of units to judge and of other units.
        """
        units = self._collect_units_of_shard(output, shard)
        stored_units = open_judged_stores(worker).unit_store
        units_to_judge = _claim_units_to_judge(units, stored_units, claimed_keys)  # adds keys to `claimed_keys`

        work = Work(
            computed_rows_by_kind=Counter(judged=units_to_judge.height),
            reused_rows_by_kind=Counter(judged=units.height - units_to_judge.height),
        )
        unit_chunks = _iter_unit_chunks(units_to_judge, shard, choose_chunk_size(output.plan.settings))
        chunks = [Chunk(unit_count=chunk.units.height, payload=chunk) for chunk in unit_chunks]
        return Planned(chunks, work)

    def _collect_units_of_shard(self, output: TableOutput, shard: str) -> pl.DataFrame:
        """Return the units of a shard as `iter_units` yields them, each with the number of its `row`, from 0 on."""
        no_units = pl.DataFrame(schema={"conversation": pl.String(), "key": pl.String()})  # for a shard without units
        units = pl.concat([no_units, *self.iter_units(output, shard)], how="diagonal")
        return units.with_row_index("row")

    def compute_chunk(self, worker: Worker, output: TableOutput, chunk: UnitChunk) -> Work:
        """Judge the units of a chunk, such as calls, and store what was measured of them.

        The judge stores single losses while it works, so that a killed process loses few of them. What was measured of
        the units is stored at the end.

        Returns:
            How much was computed and how much was reused.
        """
        stores = open_judged_stores(worker)
        judge = _build_judge(worker, stores.loss_store)
        judged_units = judge.iter_judged_units(self.read_units(output.plan, chunk))  # they are judged in the next line
        stores.unit_store.append_rows(_build_measured_frame(chunk.units["key"], judged_units))
        return _build_work(judge)  # what the judge has counted meanwhile

    def make_rows(self, worker: Worker, output: TableOutput, shard: str) -> PartRows:
        """Return a row for every unit of a shard. Rejections count units by the reason why they were not judged."""
        stores = open_judged_stores(worker)
        rejection_counts: RejectionCounts = Counter()  # it grows while the frames are taken
        frames = self._iter_frames(output, stores.unit_store, shard, rejection_counts)
        return PartRows(frames, rejection_counts, [store.name for store in stores])

    def _iter_frames(
        self, output: TableOutput, unit_store: RowStore, shard: str, rejection_counts: RejectionCounts
    ) -> Iterator[pl.DataFrame]:
        """Read the units of a shard, such as calls, with what was measured of them.

        Args:
            output: The table to be computed.
            unit_store: The row store with the measurements.
            shard: The name of the shard.
            rejection_counts: Counts by reason the units that were not judged. It is complete when all frames were
                yielded.

        Yields:
            Tables with the columns of the stage and at most MAX_UNITS_PER_LOOKUP units.

        Raises:
            StorageError: The row store lacks a unit.
        """
        for frame in self.iter_units(output, shard):
            for units in frame.iter_slices(MAX_UNITS_PER_LOOKUP):
                measured_units = _join_measurements(units, unit_store)
                rejection_counts.update(count_rejected_rows(measured_units, "not_judged"))
                yield measured_units.select(output.stage.schema.names())


def _claim_units_to_judge(units: pl.DataFrame, unit_store: RowStore, claimed_keys: ClaimedKeys) -> pl.DataFrame:
    """Select the units that still have to be judged. A unit is what the judge measures, such as one call.

    Left out are units that are stored or that an earlier shard of this run judges. Of units with the same key, which
    would be measured alike, the first is taken.

    Args:
        units: The units of a shard, with the columns `row` and `key`.
        unit_store: The row store with the measurements.
        claimed_keys: For each row store, the keys that earlier shards are judging. The keys of the selected units are
            added.
    """
    missing_keys = unit_store.find_missing_keys(units)
    keys_to_judge = claim_keys(claimed_keys, unit_store.name, missing_keys)

    distinct_units = units.unique("key", keep="first", maintain_order=True)
    return distinct_units.join(keys_to_judge, on="key", how="semi").sort("row")


def _iter_unit_chunks(units: pl.DataFrame, shard: str, min_chunk_units: int) -> Iterator[UnitChunk]:
    """Cut the units of a shard into chunks, and keep units of one conversation together where possible.

    A chunk goes on to the end of its last conversation, so that no two chunks read the conversation, but not above
    MAX_CHUNK_UNITS units, unless `min_chunk_units` is larger.

    Example:
        With at least 3 units in a chunk, units of the conversations a a b b b c are cut into a a b b b and c.

    Args:
        units: The units, with the columns `row`, `conversation` and `key`.
        shard: The name of the shard.
        min_chunk_units: The least number of units in a chunk. Only the last chunk may have fewer.
    """
    # The index after the last unit of each conversation, ascending: 2, 5 and 6 for a a b b b c.
    conversation_ends = _list_conversation_ends(units["conversation"].to_list())

    first = 0
    while first < units.height:
        earliest_end = min(first + min_chunk_units, units.height)
        latest_end = first + max(min_chunk_units, MAX_CHUNK_UNITS)
        end_of_last_conversation = conversation_ends[bisect_left(conversation_ends, earliest_end)]
        end = min(end_of_last_conversation, latest_end)

        yield UnitChunk(shard, units[first:end])
        first = end


def _list_conversation_ends(conversation_names: Sequence[str]) -> list[int]:
    """Return the index after the last unit of each conversation, as [2, 5, 6] for a a b b b c."""
    ends = []
    for next_index, conversation_name in enumerate(conversation_names, 1):
        is_last_unit = next_index == len(conversation_names)
        if is_last_unit or conversation_names[next_index] != conversation_name:
            ends.append(next_index)
    return ends


def _build_judge(worker: Worker, loss_store: RowStore) -> Judge:
    """Return the judge of the plan, which stores single losses. Its model is loaded for the first loss that is new."""
    return Judge(
        worker.plan.settings,
        loss_store,
        load_engine_function=partial(worker.get_engine, "judge"),
        variant_writer=_get_variant_writer(worker),
    )


def _build_work(judge: Judge) -> Work:
    """Return how many tokens and losses a judge computed, how many losses it reused, and what ran its model."""
    computed_count = judge.loss_counts["computed"]
    backend_identities: frozenset[str] = frozenset()
    if computed_count > 0:  # without this condition the model would be loaded for nothing
        backend_identities = frozenset({judge.engine.backend.identity})

    return Work(
        tokens_by_kind=judge.token_counts,
        computed_rows_by_kind=Counter(losses=computed_count),
        reused_rows_by_kind=Counter(losses=judge.loss_counts["reused"]),
        backend_identities=backend_identities,
    )


@lru_cache(1)
def _get_variant_writer(worker: Worker) -> VariantWriter:
    """Load the writer of variants, which turns conversations into tokens; it is kept for later chunks."""
    return load_variant_writer(worker.plan.settings)


def _build_measured_frame(keys: Iterable[str], judged_units: Iterable[JudgedUnit]) -> pl.DataFrame:
    """Return a frame with the key of each unit and what was measured of it."""
    rows = []
    for key, judged_unit in zip(keys, judged_units, strict=True):
        rows.append({"key": key, **_build_measured_row(judged_unit)})
    return pl.DataFrame(rows, schema=MEASURED_SCHEMA)


def _build_measured_row(judged_unit: JudgedUnit) -> dict[str, Any]:
    """Convert what was measured of a unit, such as a call, to a row with the columns MEASURED_COLUMNS.

    A loss says how badly the judge predicts the words after the unit. An overlap is the share of these words that also
    stand in a result. If the unit could not be judged, its losses are None, and its lists are empty.
    """
    recorded_overlap = None
    swapped_overlaps: list[float] = []
    if judged_unit.overlaps:  # first of the recorded text, then of each text that was read in its place
        recorded_overlap, *swapped_overlaps = judged_unit.overlaps

    loss_by_variant = judged_unit.loss_by_variant
    return {
        "not_judged": judged_unit.reason_not_judged,
        "tokens": judged_unit.weighted_token_count,
        "loss_none": loss_by_variant.get(NO_UNIT_VARIANT),  # as if the call was never made
        "loss_empty": loss_by_variant.get(EMPTY_UNIT_VARIANT),  # with an empty result
        "loss_result": loss_by_variant.get(RECORDED_VARIANT),  # as it was recorded
        "overlap": recorded_overlap,
        "swapped_losses": judged_unit.other_text_losses,
        "swapped_overlaps": swapped_overlaps,
    }


def _join_measurements(units: pl.DataFrame, unit_store: RowStore) -> pl.DataFrame:
    """Add to units, such as judged calls, what was measured of them (MEASURED_COLUMNS), looked up by `key`.

    Raises:
        StorageError: The row store lacks a unit. It was stored before, so it must have been damaged since.
    """
    stored_rows = unit_store.read_stored_rows(units)
    measured_units = units.join(stored_rows, on="key", how="left", maintain_order="left")

    lacking_count = measured_units["tokens"].null_count()  # every stored row has tokens
    if lacking_count > 0:
        raise StorageError(f"{lacking_count} judged calls were damaged while they were read; run again")
    return measured_units
