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
    Claimed,
    Column,
    PartRows,
    Planned,
    Rejected,
    TableOutput,
    Work,
    count_by_reason,
)
from toolformer_dag.computing.stored_rows import choose_chunk_size, claim
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import StorageError
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.traces.judge import LOSSES, Judge, JudgedUnit, load_variant_writer, losses_identity
from toolformer_dag.traces.units import EMPTY, NONE, OWN, UnitToJudge
from toolformer_dag.traces.variants import VariantWriter
from toolformer_dag.traces.windows import WINDOWS

READING = 2
"""Raised when the same conversation would be read as other tokens, or another overlap would be counted."""
MEASURED = {
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
JUDGED = pl.Schema({"key": pl.String(), **{name: column.dtype for name, column in MEASURED.items()}})
"""The columns of the stored measurements."""
LONGEST_CHUNK = 1_000
"""The maximum number of units of a chunk that goes on to the end of a conversation."""
LOOKED_UP = 20_000
"""How many units are looked up in the row store at once."""


class JudgedStores(NamedTuple):
    """The row stores of the plan's judge.

    - `units`: what was measured of units, a row for each `key`
    - `losses`: single losses, a row for each digest of tokens
    """

    units: RowStore
    losses: RowStore


class UnitChunk(NamedTuple):
    """Units of a shard that a worker judges at once.

    - `shard`: the name of the shard
    - `units`: a frame with a row per unit: `row`, its number among the units of the shard, and what `keys` yields
    """

    shard: str
    units: pl.DataFrame


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the losses of a unit: judge, reading, settings but `swaps`, weights of the window."""
    judge = losses_identity(plan.identity_of("judge"))
    window = WINDOWS[plan.settings.traces.window]
    weights = {"window_weights": list(window.weights)} if window.weights else {}
    return {**judge, "reading": READING, **determining(plan.settings.traces, but=("swaps",)), **weights}


def loss_stores(worker: Worker) -> JudgedStores:
    """Open the two row stores of the plan's judge. They also hold the losses that earlier releases stored there."""
    identity = losses_identity(worker.plan.identity_of("judge"))
    return JudgedStores(
        units=worker.rows("traces/judged_calls", settings(worker.plan, None), ["key"], JUDGED),
        losses=worker.rows("traces/losses", identity, ["digest"], LOSSES),
    )


@dataclass(frozen=True)
class UnitLosses:
    """How a stage computes the losses of its units; the methods are what its `ByChunk` takes.

    - `keys`: yields the units of a shard in frames: the columns of the stage that are not measured, of which one is
      `conversation`, and the `key` of each unit
    - `read`: reads the units of a chunk with their conversations. Raises StorageError if another run has replaced them
    """

    keys: Callable[[TableOutput, str], Iterator[pl.DataFrame]]
    read: Callable[[Plan, UnitChunk], Sequence[UnitToJudge]]

    def chunks(self, worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
        """Plan which units of a shard, such as calls, still have to be judged.

        Args:
            worker: Gives access to the stored measurements.
            output: The table to be computed.
            shard: The name of the shard.
            claimed: For each row store, the keys that earlier shards of this run are judging. They are not planned
                again. The keys that are planned here are added.

        Returns:
            The units in chunks, each key once, and the counts of units to judge and of other units.
        """
        units = self._collect_units_of_shard(output, shard)
        stored_units = loss_stores(worker).units
        units_to_judge = _claim_units_to_judge(units, stored_units, claimed)  # adds their keys to `claimed`

        work = Work(
            computed=Counter(judged=units_to_judge.height),
            reused=Counter(judged=units.height - units_to_judge.height),
        )
        unit_chunks = _iter_unit_chunks(units_to_judge, shard, choose_chunk_size(output.plan.settings))
        chunks = [Chunk(units=chunk.units.height, payload=chunk) for chunk in unit_chunks]
        return Planned(chunks, work)

    def _collect_units_of_shard(self, output: TableOutput, shard: str) -> pl.DataFrame:
        """Return the units of a shard as `keys` yields them, each with the number of its `row`, counted from 0."""
        no_units = pl.DataFrame(schema={"conversation": pl.String(), "key": pl.String()})
        return pl.concat([no_units, *self.keys(output, shard)], how="diagonal").with_row_index("row")

    def compute(self, worker: Worker, output: TableOutput, chunk: UnitChunk) -> Work:
        """Judge the units of a chunk, such as calls, and store what was measured of them.

        The judge stores single losses while it works, so that a killed process loses few of them. What was measured of
        the units is stored at the end.

        Returns:
            How much was computed and how much was reused.
        """
        stores = loss_stores(worker)
        judge = _build_judge(worker, stores.losses)
        judged_units = judge.judged(self.read(output.plan, chunk))  # an iterator: they are judged in the next line
        stores.units.append(_build_measured_frame(chunk.units["key"], judged_units))
        return _build_work(judge)  # what the judge has counted meanwhile

    def rows(self, worker: Worker, output: TableOutput, shard: str) -> PartRows:
        """Return the rows of every unit of a shard. Rejections count units by the reason why they were not judged."""
        stores = loss_stores(worker)
        rejected: Rejected = Counter()
        return PartRows(
            self._iter_frames(output, stores.units, shard, rejected), rejected, [store.name for store in stores]
        )

    def _iter_frames(
        self, output: TableOutput, store: RowStore, shard: str, rejected: Rejected
    ) -> Iterator[pl.DataFrame]:
        """Read the units of a shard, such as calls, with what was measured of them.

        Args:
            output: The table to be computed.
            store: The row store with the measurements.
            shard: The name of the shard.
            rejected: Counts by reason the units that were not judged. It is complete when all frames were yielded.

        Yields:
            Tables with the columns of the stage and at most LOOKED_UP units.

        Raises:
            StorageError: The row store lacks a unit.
        """
        for frame in self.keys(output, shard):
            for units in frame.iter_slices(LOOKED_UP):
                measured_units = _join_measurements(units, store)
                rejected.update(count_by_reason(measured_units, "not_judged"))
                yield measured_units.select(output.stage.schema.names())


def _claim_units_to_judge(units: pl.DataFrame, store: RowStore, claimed: Claimed) -> pl.DataFrame:
    """Select the units that are neither stored nor judged by an earlier shard of this run, one for each key.

    Args:
        units: The units, with the columns `row` and `key`.
        store: The row store with the measurements.
        claimed: For each row store, the keys that earlier shards are judging. The keys of the selected units are added.
    """
    missing_keys = claim(claimed, store.name, store.missing(units))
    distinct_units = units.unique("key", keep="first", maintain_order=True)
    return distinct_units.join(missing_keys, on="key", how="semi").sort("row")


def _iter_unit_chunks(units: pl.DataFrame, shard: str, size: int) -> Iterator[UnitChunk]:
    """Cut the units of a shard into chunks, and keep units of one conversation together where possible.

    A chunk goes on to the end of its last conversation, so that no two chunks read the conversation, but not above
    LONGEST_CHUNK units, unless `size` is larger.

    Example:
        With size 3, units of the conversations a a b b b c are cut into a a b b b and c.

    Args:
        units: The units, with the columns `row`, `conversation` and `key`.
        shard: The name of the shard.
        size: The least number of units in a chunk. Only the last chunk may have fewer.
    """
    # The index after the last unit of each conversation, ascending: 2, 5 and 6 for a a b b b c.
    conversation_ends = _list_conversation_ends(units["conversation"].to_list())

    first = 0
    while first < units.height:
        earliest_end = min(first + size, units.height)
        latest_end = first + max(size, LONGEST_CHUNK)
        end_of_last_conversation = conversation_ends[bisect_left(conversation_ends, earliest_end)]
        end = min(end_of_last_conversation, latest_end)

        yield UnitChunk(shard, units[first:end])
        first = end


def _list_conversation_ends(conversations: Sequence[str]) -> list[int]:
    """Return the index after the last unit of each conversation, as [2, 5, 6] for a a b b b c."""
    ends = []
    for number, conversation in enumerate(conversations, 1):
        is_last = number == len(conversations)
        if is_last or conversations[number] != conversation:
            ends.append(number)
    return ends


def _build_judge(worker: Worker, losses: RowStore) -> Judge:
    """Return the judge of the plan, which stores single losses; its model is loaded for the first one that is new."""
    load_model = partial(worker.engine, "judge")
    return Judge(worker.plan.settings, losses, load=load_model, writer=_get_variant_writer(worker))


def _build_work(judge: Judge) -> Work:
    """Return how many tokens and losses a judge computed, how many losses it reused, and what ran its model."""
    computed = judge.counts["computed"]
    return Work(
        tokens=judge.tokens,
        computed=Counter(losses=computed),
        reused=Counter(losses=judge.counts["reused"]),
        backends=frozenset({judge.engine.backend.identity}) if computed else frozenset(),
    )


@lru_cache(1)
def _get_variant_writer(worker: Worker) -> VariantWriter:
    """Load the writer of variants, which turns conversations into tokens; it is kept for later chunks."""
    return load_variant_writer(worker.plan.settings)


def _build_measured_frame(keys: Iterable[str], units: Iterable[JudgedUnit]) -> pl.DataFrame:
    """Return a frame with the key of each unit and what was measured of it."""
    rows = [{"key": key, **_build_measured_row(unit)} for key, unit in zip(keys, units, strict=True)]
    return pl.DataFrame(rows, schema=JUDGED)


def _build_measured_row(unit: JudgedUnit) -> dict[str, Any]:
    """Convert what was measured of a unit, such as a call, to a row with the columns of MEASURED.

    If the unit could not be judged, its losses are None, and its lists are empty.
    """
    own_overlap = None
    swapped_overlaps: list[float] = []
    if unit.overlap:  # first of the unit's own text, then of each text that was read in its place
        own_overlap, *swapped_overlaps = unit.overlap

    return {
        "not_judged": unit.reason,
        "tokens": unit.tokens,
        "loss_none": unit.losses.get(NONE),  # as if the call was never made
        "loss_empty": unit.losses.get(EMPTY),  # with an empty result
        "loss_result": unit.losses.get(OWN),  # as it was recorded
        "overlap": own_overlap,
        "swapped_losses": unit.swapped_losses,
        "swapped_overlaps": swapped_overlaps,
    }


def _join_measurements(units: pl.DataFrame, store: RowStore) -> pl.DataFrame:
    """Return units with the columns of MEASURED, looked up by `key`. Raises StorageError if the store lacks a unit."""
    measured = units.join(store.stored(units), on="key", how="left", maintain_order="left")
    lacking = measured["tokens"].null_count()  # every stored row has tokens
    if lacking:
        raise StorageError(f"{lacking} judged calls were damaged while they were read; run again")
    return measured
