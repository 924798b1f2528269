"""swapped_results: a control. The same calls with results of other documents: how many would be kept by chance?

Results are swapped between documents deterministically. Neither which calls are taken nor which results they get
depends on k, m or tau_s: with more calls the rows are more, and those that were there stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import polars as pl

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

METHOD = 3
"""Raised when the same calls would be chosen otherwise or get other results; a golden test notices where it was not."""
PLACE = (*TEXT_KEY, "position")
ASKED = (*PLACE, "input")
SWAP_KEY = (*CALL_KEY, "swap")
FIRST_SAMPLES = (0, -1, chained_candidates.FIRST_SAMPLE, 2 * chained_candidates.FIRST_SAMPLE)
"""The first numbers at a position: of samples, of other sources, of calls after one and after two others."""


def exchange(
    calls: pl.DataFrame, texts: pl.DataFrame, likeliest: pl.DataFrame, limit: int, swaps: int = 1
) -> pl.DataFrame:
    """`calls` (ASKED, sample, p_api, result, ...) with results of other documents; null, with a `swap_reason`, without.

    Of the distinct `texts` (TEXT_KEY, text_digest) of a shard, whether they have calls or not, the calls of the `limit`
    with the smallest hashes are taken (not_sampled), and of the texts for which a rule or a file proposes calls, which
    may be few, as many. Results are given by the first samples, or other calls, at the `likeliest` place (PLACE) of
    each text: they are there for every k and m. A call gets those of places at least as likely as its own, which are
    there for every tau_s, so the donors do not change with tau_s. All calls stand in a circle in the order
    of another hash of their texts, and a call gets the next such results that differ from its own and come from
    documents with another digest (no_other_result); equal calls at a position get the same ones. A result that is right
    all the same, or of a near-duplicate, is not noticed.

    A call has a row per swap (`swap` counts from 0), at most `swaps`, each with another result.
    """
    proposed = calls.filter(pl.col("sample") < 0).select(TEXT_KEY).unique()
    sampled = calls.join(_sampled(texts, limit, proposed), on=TEXT_KEY, maintain_order="left")
    giving = sampled.join(likeliest.select(PLACE, likeliest=True), on=PLACE, how="left", maintain_order="left")
    gives = pl.col("likeliest").fill_null(False) & pl.col("sample").is_in(FIRST_SAMPLES)
    exchanged = _exchanged(giving.with_columns(gives=gives), swaps)
    joined = sampled.join(exchanged, on=ASKED, how="left", maintain_order="left").with_columns(
        pl.col("swap").fill_null(0)
    )
    absent = pl.when(pl.col("swapped").is_null()).then(pl.lit("no_other_result"))
    reason = pl.when("sampled").then(absent).otherwise(pl.lit("not_sampled"))
    return joined.with_columns(swap_reason=reason, result="swapped").drop("sampled", "swapped")


def likeliest_places(candidates: pl.DataFrame) -> pl.DataFrame:
    """(PLACE): of each text the most probable position, of equals the earlier. `candidates`: (PLACE, p_api)."""
    ordered = candidates.sort("p_api", "position", descending=[True, False])
    return ordered.unique(TEXT_KEY, keep="first", maintain_order=True).select(PLACE)


def _sampled(texts: pl.DataFrame, limit: int, proposed: pl.DataFrame) -> pl.DataFrame:
    """(TEXT_KEY, text_digest, sampled): whether a text is one of its shard's first `limit`, or of the proposed ones."""
    hashed = texts.with_columns(hash=_hashes("text", texts.select("text_digest")))
    hashed = hashed.join(proposed.with_columns(proposed=True), on=TEXT_KEY, how="left", maintain_order="left")
    first, own = (
        key.rank("dense").over("shard") <= limit for key in (pl.col("hash"), pl.when("proposed").then("hash"))
    )
    return hashed.select(*TEXT_KEY, "text_digest", sampled=first | own.fill_null(False))


def _exchanged(calls: pl.DataFrame, swaps: int) -> pl.DataFrame:
    """(ASKED, swap, swapped): the exchanged results of every distinct call that is sampled and has some."""
    of_call = pl.col("text_digest", "result", "p_api").first()
    distinct = calls.group_by(ASKED).agg(of_call, pl.col("sampled", "gives").any())
    placed = distinct.select("text_digest", "position", "input")
    circle = distinct.with_columns(hash=_hashes("call", placed)).sort("hash", *ASKED)
    results = circle["result"].to_list()
    given = [[results[donor] for donor in donors] for donors in _donors(circle, swaps)]
    seats = circle.filter("sampled").select(ASKED).with_columns(swapped=pl.Series(given, dtype=pl.List(pl.String)))
    numbered = seats.with_columns(swap=pl.int_ranges(pl.col("swapped").list.len(), dtype=pl.Int32))
    return numbered.explode("swapped", "swap").drop_nulls("swapped")


def _donors(circle: pl.DataFrame, swaps: int) -> Iterator[list[int]]:
    """For each sampled seat the next seats that give, at places as likely, in other documents, all other results."""
    givers = circle["gives"].arg_true().to_numpy()
    document, result = (circle[name].rank("dense").to_numpy() for name in ("digest", "result"))  # equal numbers: equal
    likely = circle["p_api"].to_numpy()
    documents, results, chances = document[givers], result[givers], likely[givers]
    for seat in circle["sampled"].arg_true().to_list():
        others = (chances >= likely[seat]) & (documents != document[seat]) & (results != result[seat])
        fitting = np.flatnonzero(others)
        ordered = np.roll(fitting, -int(np.searchsorted(givers[fitting], seat)))
        _, first = np.unique(results[ordered], return_index=True)
        yield givers[ordered[np.sort(first)[:swaps]]].tolist()


def _hashes(salt: str, rows: pl.DataFrame) -> pl.Series:
    """The same on every machine and in every version."""
    digests = [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows.iter_rows()]
    return pl.Series(digests, dtype=pl.String)


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the scored calls."""
    control = determining(plan.settings.evaluation, "swapped_texts") | determining(plan.settings.control)
    return {**losses_settings(plan, lane), "exchange": METHOD, **control}


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of the swapped calls of a shard."""
    texts, calls, _ = swapped(output, shard, "loss_deltas")
    return planned_losses(worker, output, calls, texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of `swapped_texts` texts with results of other documents (see `exchange`) and their losses.

    A call has up to `control.swaps` rows, fewer where fewer other results fit.

    Every scored call has a row or is counted: not_sampled, no_other_result, or the reason it had in loss_deltas.
    """
    _, calls, left_out = swapped(output, shard, "loss_deltas")
    scored, stores = with_losses(worker, output, calls)
    return control(output, scored, stores, left_out)


def control(output: TableOutput, scored: pl.DataFrame, stores: Sequence[str], left_out: Rejected) -> PartRows:
    """Return the rows of swapped calls."""
    table = output.stage.shaped(scored).sort(SWAP_KEY)
    return PartRows([table], left_out + counted(table), stores, facts={MADE_BY: STAGE.name})


def swapped(output: TableOutput, shard: str, name: str) -> tuple[pl.DataFrame, pl.DataFrame, Rejected]:
    """Return the texts, the calls of `name` with swapped results, and the calls that have none by reason."""
    lake, lane = output.plan.lake, output.lane.key
    texts = lake.table(f"{lane}/heuristic_subset").read(shard)
    columns = (*CALL_KEY, "source", "char_offset", "input", "result", "p_api", "reason", "chain")
    chance = pl.col("p_api").fill_null(0.0)  # calls of a file may have none: all places are as likely then
    calls = lake.table(f"{lane}/{name}").read(shard).select(columns).with_columns(chance)
    # Calls without an operation give their results as they did before they were kept out, so that every other call is
    # swapped as before and no loss is computed again; they have no row themselves.
    scored = calls.filter(pl.col("reason").is_null() | (pl.col("reason") == NO_OPERATION))
    # no version of the candidates is kept: a text's likeliest place is the same for every k, m and tau_s
    places = (
        lake.table(f"{lane}/scored_candidates").read(shard).with_columns(chance) if name == "loss_deltas" else scored
    )
    limit, swaps = output.plan.settings.evaluation.swapped_texts, output.plan.settings.control.swaps
    exchanged = exchange(scored, texts, likeliest_places(places), limit, swaps).filter(pl.col("reason").is_null())
    left_out = counted(calls) + counted(exchanged, "swap_reason")
    return texts, exchanged.filter(pl.col("result").is_not_null()).drop("reason", "swap_reason"), left_out


def kept_by_chance(output: TableOutput) -> Shown:
    """Return for the asset how many places chance keeps beside those that are kept, and the false discovery rates.

    By threshold; of those without a swapped call only the places that are kept.
    """
    statistics, rates = chance_tables(output.plan, output.lane)
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
