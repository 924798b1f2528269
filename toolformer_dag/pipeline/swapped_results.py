"""swapped_results: a control. The same calls with results of other documents: how many would be kept by chance?

Results are swapped between documents deterministically. Neither which calls are taken nor which results they get
depends on k, m or tau_s: with more calls the rows are more, and those that were there stay as they are.
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
"""Raised when the same calls would be chosen otherwise or get other results; a golden test notices where it was not."""
PLACE = (*TEXT_KEY, "position")
"""Key of a place: a position of a text."""
DISTINCT_CALL = (*PLACE, "input")
"""Key of what is swapped: the samples of a place that wrote the same call get the same results."""
SWAP_KEY = (*CALL_KEY, "swap")
SWAPPED = pl.List(pl.String())
"""The other results of a call, one per swap."""
SWAPPED_COLUMNS = (*CALL_KEY, "source", "char_offset", "input", "result", "p_api", "reason", "chain")
"""Columns of a scored call that its swaps have too."""
FIRST_SAMPLES = (0, -1, chained_candidates.FIRST_SAMPLE, 2 * chained_candidates.FIRST_SAMPLE)
"""The first numbers at a position: of samples, of other sources, of calls after one and after two others."""


def exchange(
    calls: pl.DataFrame, texts: pl.DataFrame, likeliest: pl.DataFrame, limit: int, swaps: int = 1
) -> pl.DataFrame:
    """Replace the results of a shard's calls by results of other documents: a control, what would be kept by chance?

    Returns a row per call and swap, with the other result in `result` and the number of the swap (from 0) in `swap`. A
    call that gets none has one row with a null result, and `swap_reason` says why.

    calls: (tool, shard, digest, segment, position, input, sample, p_api, result, ...), of one shard.
    texts: (shard, digest, segment, text_digest), the texts of the shard whether they have calls or not.
    likeliest: (shard, digest, segment, position), see `likeliest_places`.
    limit: calls of so many texts are taken.
    swaps: at most so many rows per call, each with another result.

    Which calls: those of the `limit` distinct texts with the smallest hashes, and of as many among the texts for which
    a rule or a file proposes calls, which may be few. Others have the reason not_sampled.

    Which results: all calls stand in a circle, in the order of another hash of their texts. A call gets the next
    results after its own seat that differ from its own and from each other, from documents with another digest;
    no_other_result where there is none. Only the first samples, or other calls, at the likeliest place of each text
    give results: they are there for every k and m. They must be at places at least as likely as the call's own, which
    are there for every tau_s. So the donors depend on none of these settings. A result that is right all the same, or
    comes from a near-duplicate, is not noticed.
    """
    proposed = calls.filter(pl.col("sample") < 0).select(TEXT_KEY).unique()
    calls = calls.join(_sampled_texts(texts, limit, proposed), on=TEXT_KEY, maintain_order="left")
    at_likeliest = calls.join(likeliest.select(PLACE, likeliest=True), on=PLACE, how="left", maintain_order="left")
    gives = pl.col("likeliest").fill_null(False) & pl.col("sample").is_in(FIRST_SAMPLES)
    exchanged = _swapped_results(at_likeliest.with_columns(gives=gives), swaps)

    joined = calls.join(exchanged, on=DISTINCT_CALL, how="left", maintain_order="left")
    without_result = pl.when(pl.col("swapped").is_null()).then(pl.lit("no_other_result"))
    reason = pl.when("sampled").then(without_result).otherwise(pl.lit("not_sampled"))
    numbered = joined.with_columns(pl.col("swap").fill_null(0), swap_reason=reason, result="swapped")
    return numbered.drop("sampled", "swapped")


def likeliest_places(candidates: pl.DataFrame) -> pl.DataFrame:
    """Return the most probable position of each text, of equals the earlier: (shard, digest, segment, position).

    candidates: (shard, digest, segment, position, p_api).
    """
    ordered = candidates.sort("p_api", "position", descending=[True, False])
    return ordered.unique(TEXT_KEY, keep="first", maintain_order=True).select(PLACE)


def _sampled_texts(texts: pl.DataFrame, limit: int, proposed: pl.DataFrame) -> pl.DataFrame:
    """Choose the texts whose calls are swapped: return (shard, digest, segment, text_digest, sampled), all texts.

    `sampled` is true where a text's hash is among the `limit` smallest distinct ones of its shard, or among the `limit`
    smallest of the `proposed` texts (shard, digest, segment) of its shard.
    """
    hashed = texts.with_columns(hash=_hashes("text", texts.select("text_digest")))
    marked = hashed.join(proposed.with_columns(proposed=True), on=TEXT_KEY, how="left", maintain_order="left")
    hash_of_proposed = pl.when("proposed").then("hash")  # null for other texts, which then have no rank
    first_of_all = pl.col("hash").rank("dense").over("shard") <= limit
    first_of_proposed = hash_of_proposed.rank("dense").over("shard") <= limit
    return marked.select(*TEXT_KEY, "text_digest", sampled=first_of_all | first_of_proposed.fill_null(False))


def _swapped_results(calls: pl.DataFrame, swaps: int) -> pl.DataFrame:
    """Choose other results for the sampled calls: return (DISTINCT_CALL, swap, swapped), a row per call and swap.

    All distinct calls stand in a circle, in the order of a hash. A sampled call gets the results of up to `swaps` calls
    behind it that may give theirs and fit (`_donors`). One for which none fits has no row.

    calls: (DISTINCT_CALL, text_digest, result, p_api, sampled, gives); `gives`: whether others may get its result.
    """
    # A row per place in the circle; of equal samples one gives or is sampled as soon as any of them is.
    shared = pl.col("text_digest", "result", "p_api").first()
    distinct = calls.group_by(DISTINCT_CALL).agg(shared, pl.col("sampled", "gives").any())
    hashes = _hashes("call", distinct.select("text_digest", "position", "input"))
    circle = distinct.with_columns(hash=hashes).sort("hash", *DISTINCT_CALL)

    seats = _Seats.of(circle)
    giving = seats.where(circle["gives"].to_numpy())
    results = circle["result"].to_list()
    swapped: list[list[str]] = []
    for seat in circle["sampled"].arg_true():
        donors = _donors(seat, seats, giving, swaps)
        swapped.append([results[donor] for donor in donors])

    sampled = circle.filter("sampled").select(DISTINCT_CALL).with_columns(swapped=pl.Series(swapped, dtype=SWAPPED))
    numbered = sampled.with_columns(swap=pl.int_ranges(pl.col("swapped").list.len(), dtype=pl.Int32))
    return numbered.explode("swapped", "swap").drop_nulls("swapped")


@dataclass(frozen=True, slots=True, eq=False)
class _Seats:
    """Seats of the circle of calls: four arrays with an entry per seat.

    number: of the seat in the circle, ascending. document, result: numbers that are equal where the documents, or the
    results, are. probability: p_i of the call's place.
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
    """Choose the calls whose results a call gets: walk the circle of calls from its seat on, and take those that fit.

    A fitting call is from another document, has another result, and stands at a place at least as probable.

    seat: the number of the call in the circle. circle: all seats. giving: those that may give their results.

    Returns the numbers of at most `most` seats, in walking order, all with different results.
    """
    as_likely = giving.probability >= circle.probability[seat]
    other_document = giving.document != circle.document[seat]
    other_result = giving.result != circle.result[seat]
    fitting = np.flatnonzero(as_likely & other_document & other_result)  # indices into `giving`

    # The circle is walked from the seat on: those after it, then those before it.
    start = np.searchsorted(giving.number[fitting], seat)
    in_order = np.concatenate([fitting[start:], fitting[:start]])

    # np.unique returns the first index of each result, ordered by result; sorted again they are in walking order.
    _, first_with_result = np.unique(giving.result[in_order], return_index=True)
    chosen = in_order[np.sort(first_with_result)[:most]]
    donors: list[int] = giving.number[chosen].tolist()
    return donors


def _hashes(salt: str, rows: pl.DataFrame) -> pl.Series:
    """Return a hash of each row, the same on every machine and in every version."""
    digests = [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows.iter_rows()]
    return pl.Series(digests, dtype=pl.String)


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the scored calls."""
    control = determining(plan.settings.evaluation, "swapped_texts") | determining(plan.settings.control)
    return {**losses_settings(plan, lane), "exchange": METHOD, **control}


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of the swapped calls of a shard."""
    swapped_calls = swapped(output, shard, "loss_deltas")
    return planned_losses(worker, output, swapped_calls.calls, swapped_calls.texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the control of a shard: calls with results of other documents (see `exchange`), scored like true ones.

    Calls of up to `evaluation.swapped_texts` texts are taken. A call has up to `control.swaps` rows, each with another
    result. Every scored call has a row or is counted in `rejected`: not_sampled, no_other_result, or the reason it had
    in loss_deltas.
    """
    swapped_calls = swapped(output, shard, "loss_deltas")
    scored, stores = with_losses(worker, output, swapped_calls.calls)
    return control(output, scored, stores, swapped_calls.left_out)


def control(output: TableOutput, scored: pl.DataFrame, stores: Sequence[str], left_out: Rejected) -> PartRows:
    """Return the rows of swapped calls. `scored`: with their losses, which come from `stores`."""
    table = output.stage.shaped(scored).sort(SWAP_KEY)
    return PartRows([table], left_out + counted(table), stores, facts={MADE_BY: STAGE.name})


class SwappedCalls(NamedTuple):
    """The control of a shard before it is scored.

    texts: all texts of the shard. calls: those that got another result, a row per swap. left_out: the other calls, and
    those that loss_deltas had a reason against.
    """

    texts: pl.DataFrame
    calls: pl.DataFrame
    left_out: Rejected


def swapped(output: TableOutput, shard: str, name: str) -> SwappedCalls:
    """Give the scored calls of a shard results of other documents (see `exchange`), before they are scored again.

    name: the table with the calls: loss_deltas (single calls) or chained_deltas (chains).

    A call that has a reason against it in that table gets no other result and is counted by that reason. Which calls
    may give their results follows from the likeliest place of each text: of single calls among all candidates, of
    chains among the scored ones.

    Raises MissingPart, DamagedPart.
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    likelihood = pl.col("p_api").fill_null(0.0)  # calls of a file may have none: all places are as likely then
    scored_table = output.plan.lake.table(f"{output.lane.key}/{name}")
    calls = scored_table.read(shard).select(SWAPPED_COLUMNS).with_columns(likelihood)
    # Calls without an operation give their results as they did before they were kept out, so that every other call is
    # swapped as before and no loss is computed again; they have no row themselves.
    exchangeable = calls.filter(pl.col("reason").is_null() | (pl.col("reason") == NO_OPERATION))
    places = exchangeable
    if name == "loss_deltas":
        # no version of the candidates is kept: a text's likeliest place is the same for every k, m and tau_s
        places = output.lane_table("scored_candidates").read(shard).with_columns(likelihood)
    settings = output.plan.settings
    exchanged = exchange(
        exchangeable,
        texts,
        likeliest_places(places),
        limit=settings.evaluation.swapped_texts,
        swaps=settings.control.swaps,
    )
    scored = exchanged.filter(pl.col("reason").is_null())
    return SwappedCalls(
        texts=texts,
        calls=scored.filter(pl.col("result").is_not_null()).drop("reason", "swap_reason"),
        left_out=counted(calls) + counted(scored, "swap_reason"),
    )


def kept_by_chance(output: TableOutput) -> Shown:
    """Return what Dagster's page shows of the control, by label: for each threshold how much is kept by chance.

    "kept by chance at 0.5" counts places that would be kept with results of other documents, "false discovery rate at
    0.5" is their share; "kept" is the whole table, and "kept by chance" holds the curves. Thresholds without a swapped
    call stand in the table alone.
    """
    statistics, rates = chance_tables(output.plan, output.lane)  # a row per threshold tau_f
    measured = statistics.filter(pl.col("swaps") > 0)
    shown: dict[str, ShownValue] = {}
    for row in measured.iter_rows(named=True):
        shown[f"kept by chance at {row['tau_f']:g}"] = row["by_chance"]
    for row in measured.iter_rows(named=True):
        if row["fdr"]:
            shown[f"false discovery rate at {row['tau_f']:g}"] = row["fdr"]
    by_chance = (
        pl.when("too_few_swaps").then(pl.lit("too few swaps to tell")).otherwise(pl.col("by_chance").cast(pl.String))
    )
    shown["kept"] = statistics.with_columns(by_chance=by_chance).drop("tool", "too_few_swaps", strict=False)
    if not rates.is_empty():
        shown["kept by chance"] = ChanceCurves(rates)
    return shown


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
