"""swapped_results: the control. Score calls again with results of other documents, to count calls kept by chance.

In a swap, a call gets the result of a call in another document, which cannot help. Calls that pass the filter with it
pass by chance. Swaps are deterministic and do not depend on the sampling settings k (positions per text), m (samples
per position) and tau_s (the least probability of a call, p_api): more calls add rows, and leave the other rows as they
are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shown import ChanceCurves, Shown, ShownValue
from toolformer_dag.computing.stage import (
    CALL,
    CALL_KEY,
    MADE_BY,
    SCORED,
    TEXT_KEY,
    ByChunk,
    Claimed,
    Column,
    PartRows,
    Planned,
    Rejected,
    Stage,
    StageAsset,
    TableOutput,
    counted,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import chained_candidates
from toolformer_dag.pipeline.chance import chance_tables
from toolformer_dag.pipeline.losses import LOSSES_FINITE, compute_losses, losses_settings, planned_losses, with_losses
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.tool import NO_OPERATION

Array = NDArray[Any]
METHOD = 3
"""Raised when other calls would be chosen or get other results; a golden test notices where it was not."""
PLACE = (*TEXT_KEY, "position")
"""Key of a place: a position of a text."""
DISTINCT_CALL = (*PLACE, "input")
"""Key of the calls that get results: samples that wrote the same call at the same place get the same ones."""
SWAP_KEY = (*CALL_KEY, "swap")
SWAPPED = pl.List(pl.String())
"""The type of a column with the other results of a call, one per swap."""
SWAPPED_COLUMNS = (*CALL_KEY, "source", "char_offset", "input", "result", "p_api", "reason", "chain")
"""Columns of a scored call that its swaps have too."""
FIRST_SAMPLES = (0, -1, chained_candidates.FIRST_SAMPLE, 2 * chained_candidates.FIRST_SAMPLE)
"""The numbers (`sample`) of the first calls at a position: sampled, of another source, after one and two calls."""


def exchange(
    calls: pl.DataFrame, texts: pl.DataFrame, likeliest: pl.DataFrame, limit: int, swaps: int = 1
) -> pl.DataFrame:
    """Replace the results of a shard's calls by results of other documents; return a row per call and swap.

    The columns are those of `calls`, with the other result, and `swap`, its number from 0. A call without another
    result has one row with a null result and a `swap_reason`: not_sampled or no_other_result.

    calls: (tool, shard, digest, segment, position, input, sample, p_api, result, ...), of one shard. `sample` is
        negative for a call that a rule or a file proposes.
    texts: (shard, digest, segment, text_digest), all texts of the shard.
    likeliest: (shard, digest, segment, position), see `likeliest_places`.
    limit: calls of so many texts are taken, and of as many among the texts with calls of a rule or a file.
    swaps: at most so many rows per call, each with another result.
    """
    proposed = calls.filter(pl.col("sample") < 0).select(TEXT_KEY).unique()
    calls = calls.join(_sampled_texts(texts, limit, proposed), on=TEXT_KEY, maintain_order="left")
    exchanged = _swapped_results(calls.with_columns(gives=_gives_result(calls, likeliest)), swaps)
    return _with_swaps(calls, exchanged)


def _with_swaps(calls: pl.DataFrame, exchanged: pl.DataFrame) -> pl.DataFrame:
    """Return a row per call and swap; a call without another result stays as one row, with its `swap_reason`.

    calls: with the column `sampled`, which is dropped. exchanged: (DISTINCT_CALL, swap, swapped).
    """
    joined = calls.join(exchanged, on=DISTINCT_CALL, how="left", maintain_order="left")
    without_result = pl.when(pl.col("swapped").is_null()).then(pl.lit("no_other_result"))
    reason = pl.when("sampled").then(without_result).otherwise(pl.lit("not_sampled"))
    numbered = joined.with_columns(pl.col("swap").fill_null(0), swap_reason=reason, result="swapped")
    return numbered.drop("sampled", "swapped")


def _gives_result(calls: pl.DataFrame, likeliest: pl.DataFrame) -> pl.Series:
    """Return for each call whether others may get its result: it is a first sample at the likeliest place of its text.

    Such calls exist for every k and m, so that neither changes which results the other calls get.
    """
    marked = calls.join(likeliest.select(PLACE, likeliest=True), on=PLACE, how="left", maintain_order="left")
    return marked["likeliest"].fill_null(False) & marked["sample"].is_in(FIRST_SAMPLES)


def likeliest_places(candidates: pl.DataFrame) -> pl.DataFrame:
    """Return the most probable position of each text, of equals the earliest: (shard, digest, segment, position).

    candidates: (shard, digest, segment, position, p_api).
    """
    ordered = candidates.sort("p_api", "position", descending=[True, False])
    return ordered.unique(TEXT_KEY, keep="first", maintain_order=True).select(PLACE)


def _sampled_texts(texts: pl.DataFrame, limit: int, proposed: pl.DataFrame) -> pl.DataFrame:
    """Return all texts as (shard, digest, segment, text_digest, sampled); calls of `sampled` texts are swapped.

    Those are the `limit` distinct texts of a shard with the smallest hashes, and as many of its `proposed` texts
    (shard, digest, segment).
    """
    hashed = texts.with_columns(hash=_hashes("text", texts.select("text_digest")))
    marked = hashed.join(proposed.with_columns(proposed=True), on=TEXT_KEY, how="left", maintain_order="left")
    hash_of_proposed = pl.when("proposed").then("hash")  # null for other texts, which then have no rank
    is_sampled = _is_among_smallest(pl.col("hash"), limit)
    is_sampled_of_proposed = _is_among_smallest(hash_of_proposed, limit).fill_null(False)
    return marked.select(*TEXT_KEY, "text_digest", sampled=is_sampled | is_sampled_of_proposed)


def _is_among_smallest(hashes: pl.Expr, limit: int) -> pl.Expr:
    """Return whether a hash is among the `limit` smallest distinct ones of its shard; equal texts count once."""
    return hashes.rank("dense").over("shard") <= limit


def _swapped_results(calls: pl.DataFrame, swaps: int) -> pl.DataFrame:
    """Choose other results for the sampled calls: return (DISTINCT_CALL, swap, swapped), a row per call and swap.

    A sampled call gets up to `swaps` results, and has no row where no other call fits.

    calls: (DISTINCT_CALL, text_digest, result, p_api, sampled, gives); `gives`: whether others may get its result.
    """
    circle = _circle(calls)
    sampled = circle.filter("sampled").select(DISTINCT_CALL)
    sampled = sampled.with_columns(swapped=pl.Series(_other_results(circle, swaps), dtype=SWAPPED))
    numbered = sampled.with_columns(swap=pl.int_ranges(pl.col("swapped").list.len(), dtype=pl.Int32))
    return numbered.explode("swapped", "swap").drop_nulls("swapped")


def _other_results(circle: pl.DataFrame, swaps: int) -> list[list[str]]:
    """Return up to `swaps` other results for each sampled call of the circle, in its order."""
    seats = _Seats.of(circle)
    giving = seats.where(circle["gives"].to_numpy())
    results = circle["result"].to_list()
    other_results: list[list[str]] = []
    for seat in circle["sampled"].arg_true():
        donors = _donors(seat, seats, giving, swaps)
        other_results.append([results[donor] for donor in donors])
    return other_results


def _circle(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct calls in the order of a hash: (DISTINCT_CALL, text_digest, result, p_api, sampled, gives).

    Equal samples are one row, which is `sampled` or `gives` its result if one of them is or does.
    """
    shared = pl.col("text_digest", "result", "p_api").first()
    distinct = calls.group_by(DISTINCT_CALL).agg(shared, pl.col("sampled", "gives").any())
    hashes = _hashes("call", distinct.select("text_digest", "position", "input"))
    return distinct.with_columns(hash=hashes).sort("hash", *DISTINCT_CALL)


@dataclass(frozen=True, slots=True, eq=False)
class _Seats:
    """Calls in the circle by their seats (row numbers in it), or some of them: four arrays with an entry per seat.

    - number: the number of the seat in the circle, from 0, ascending
    - document: equal numbers for calls of equal documents
    - result: equal numbers for calls with equal results
    - probability: of a call at this position of its text (p_api)
    """

    number: Array
    document: Array
    result: Array
    probability: Array

    @classmethod
    def of(cls, circle: pl.DataFrame) -> "_Seats":
        """Return all seats. circle: (digest, result, p_api), a row per seat."""
        return cls(
            number=np.arange(circle.height),
            document=circle["digest"].rank("dense").to_numpy(),
            result=circle["result"].rank("dense").to_numpy(),
            probability=circle["p_api"].to_numpy(),
        )

    def where(self, mask: Array) -> "_Seats":
        """Return the seats for which `mask` is true."""
        return _Seats(self.number[mask], self.document[mask], self.result[mask], self.probability[mask])


def _donors(seat: int, circle: _Seats, giving: _Seats, most: int) -> list[int]:
    """Choose the calls whose results a call gets: the first that fit on a walk around the circle, from its seat on.

    seat: the number of the receiving call. circle: all seats. giving: the seats that may give a result.

    Returns the numbers of at most `most` seats, in walking order, all with different results.
    """
    in_order = _walked_from(seat, _fitting(seat, circle, giving), giving)
    chosen = in_order[_first_of_each(giving.result[in_order])[:most]]
    donors: list[int] = giving.number[chosen].tolist()
    return donors


def _fitting(seat: int, circle: _Seats, giving: _Seats) -> Array:
    """Return the indices into `giving` of calls of other documents with other results, at places as probable or more.

    A call at such a place exists for every tau_s for which the receiving call exists.
    """
    as_likely = giving.probability >= circle.probability[seat]
    other_document = giving.document != circle.document[seat]
    other_result = giving.result != circle.result[seat]
    return np.flatnonzero(as_likely & other_document & other_result)


def _walked_from(seat: int, indices: Array, giving: _Seats) -> Array:
    """Return `indices` into `giving`, ascending, in walking order: first those behind `seat`, then those before it.

    With the seats 2, 5, 9 at the indices [0, 1, 2], a walk from seat 4 takes them as [1, 2, 0].
    """
    start = np.searchsorted(giving.number[indices], seat)
    return np.concatenate([indices[start:], indices[:start]])


def _first_of_each(values: Array) -> Array:
    """Return where each value stands for the first time, ascending: [0, 1, 3] for the values [7, 4, 7, 9]."""
    _, first_indices = np.unique(values, return_index=True)  # in the order of the values
    return np.sort(first_indices)


def _hashes(salt: str, rows: pl.DataFrame) -> pl.Series:
    """Return a hash of each row, the same on every machine. Another `salt` gives other hashes of the same rows."""
    digests = [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows.iter_rows()]
    return pl.Series(digests, dtype=pl.String)


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the rows depend on, apart from the scored calls; a change makes the table out of date."""
    control = determining(plan.settings.evaluation, "swapped_texts") | determining(plan.settings.control)
    return {**losses_settings(plan, lane), "exchange": METHOD, **control}


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of the swapped calls of a shard."""
    swapped_calls = swapped(output, shard, "loss_deltas")
    return planned_losses(worker, output, swapped_calls.calls, swapped_calls.texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the control of a shard: calls with results of other documents, scored as if these were their own.

    Calls of up to `evaluation.swapped_texts` texts are taken; a call has up to `control.swaps` rows, each with another
    result. Other calls are counted as not_sampled, no_other_result, or with their reason in loss_deltas.
    """
    swapped_calls = swapped(output, shard, "loss_deltas")
    scored, stores = with_losses(worker, output, swapped_calls.calls)
    return control(output, scored, stores, swapped_calls.left_out)


def control(output: TableOutput, scored: pl.DataFrame, stores: Sequence[str], left_out: Rejected) -> PartRows:
    """Return the rows of the control.

    scored: calls with swapped results and their losses. stores: the names of the row stores with these losses.
    left_out: how many calls were not swapped, by shard and reason.
    """
    table = output.stage.shaped(scored).sort(SWAP_KEY)
    return PartRows([table], left_out + counted(table), stores, facts={MADE_BY: STAGE.name})


class SwappedCalls(NamedTuple):
    """The control of a shard before it is scored.

    - texts: all texts of the shard
    - calls: the calls that got another result, a row per swap
    - left_out: how many calls got none, by shard and reason; also those that had a reason before
    """

    texts: pl.DataFrame
    calls: pl.DataFrame
    left_out: Rejected


def swapped(output: TableOutput, shard: str, name: str) -> SwappedCalls:
    """Give the scored calls of a shard results of other documents (see `exchange`), before they are scored again.

    A call with a reason not to stay gets no other result and is counted by that reason.

    name: the table with the calls: loss_deltas (single calls) or chained_deltas (chains).

    Raises MissingPart, DamagedPart.
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    calls = _scored_calls(output, shard, name)
    # Calls without an operation have no swaps themselves, but others may get their results.
    exchangeable = calls.filter(pl.col("reason").is_null() | (pl.col("reason") == NO_OPERATION))
    places = _candidate_places(output, shard) if name == "loss_deltas" else exchangeable
    exchanged = _exchanged(output.plan, exchangeable, texts, places)
    without_reason = exchanged.filter(pl.col("reason").is_null())
    return SwappedCalls(
        texts=texts,
        calls=without_reason.filter(pl.col("result").is_not_null()).drop("reason", "swap_reason"),
        left_out=counted(calls) + counted(without_reason, "swap_reason"),
    )


def _scored_calls(output: TableOutput, shard: str, name: str) -> pl.DataFrame:
    """Return the calls of a shard in a table of scores (SWAPPED_COLUMNS)."""
    table = output.plan.lake.table(f"{output.lane.key}/{name}")
    return table.read(shard).select(SWAPPED_COLUMNS).with_columns(_likelihood())


def _exchanged(plan: Plan, calls: pl.DataFrame, texts: pl.DataFrame, places: pl.DataFrame) -> pl.DataFrame:
    """Exchange results with the limits of the settings. places: calls, among them the likeliest of each text."""
    return exchange(
        calls,
        texts,
        likeliest_places(places),
        limit=plan.settings.evaluation.swapped_texts,
        swaps=plan.settings.control.swaps,
    )


def _candidate_places(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return all sampled calls of a shard, among which the likeliest place of a text is found.

    The version of their table is no input of the stage: that place is the same for every k, m and tau_s.
    """
    return output.lane_table("scored_candidates").read(shard).with_columns(_likelihood())


def _likelihood() -> pl.Expr:
    """Return the column p_api with 0 instead of null: calls of a file may have none, and are then equally likely."""
    return pl.col("p_api").fill_null(0.0)


def kept_by_chance(output: TableOutput) -> Shown:
    """Return what Dagster's page shows of the control, by label: how much passes the filter with wrong results.

    Beside single values (`_shown_values`), "kept" is the whole table, a row per threshold, and "kept by chance" the
    curves over the thresholds, if there are any.
    """
    tables = chance_tables(output.plan, output.lane)
    shown: dict[str, ShownValue] = {**_shown_values(tables.statistics), "kept": _shown_statistics(tables.statistics)}
    if not tables.rates.is_empty():
        shown["kept by chance"] = ChanceCurves(tables.rates)
    return shown


def _shown_values(statistics: pl.DataFrame) -> dict[str, ShownValue]:
    """Return counts and rates of the thresholds with swapped calls, by label; first all counts, then the rates.

    - "kept by chance at 0.5": how many positions have a call at the threshold 0.5 by chance
    - "false discovery rate at 0.5": their share of the positions with a call; left out if it is 0 or unknown
    """
    measured = statistics.filter(pl.col("swaps") > 0)
    shown: dict[str, ShownValue] = {}
    for row in measured.iter_rows(named=True):
        shown[f"kept by chance at {row['tau_f']:g}"] = row["by_chance"]
    for row in measured.filter(pl.col("fdr") != 0).iter_rows(named=True):
        shown[f"false discovery rate at {row['tau_f']:g}"] = row["fdr"]
    return shown


def _shown_statistics(statistics: pl.DataFrame) -> pl.DataFrame:
    """Return swapped_statistics for the page, with a remark in `by_chance` where there are too few swaps."""
    too_few = pl.lit("too few swaps to tell")
    count = pl.col("by_chance").cast(pl.String)
    by_chance = pl.when("too_few_swaps").then(too_few).otherwise(count)
    return statistics.with_columns(by_chance=by_chance).drop("tool", "too_few_swaps", strict=False)


STAGE = Stage(
    name="swapped_results",
    description="Control: a sample of the scored calls, scored again with results of other documents.",
    columns={
        **CALL,
        "swap": Column(pl.Int32(), "number of the swap, of those of this call: each with another result"),
        **{name: column for name, column in SCORED.items() if name not in CALL},
        "result": Column(pl.String(), "result of a call in another document"),
    },
    key=SWAP_KEY,
    settings=settings,
    reads=("heuristic_subset", "loss_deltas", "scored_candidates"),
    inputs=("heuristic_subset", "loss_deltas"),
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    checks={"losses_finite": LOSSES_FINITE},
    make=ByChunk(chunks, compute_losses, rows),
    asset=StageAsset(shows=kept_by_chance),
)
