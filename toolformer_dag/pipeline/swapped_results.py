"""swapped_results: a control. The same calls with results of other documents: how many would be kept by chance?

Results are swapped between documents deterministically. Neither which calls are taken nor what they are told depends on
k, m or tau_s: with more calls the rows are more, and those that were there stay as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toolformer_dag.pipeline.losses import compute_losses, losses_finite, losses_identity, planned_losses, with_losses
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import (
    CALL_KEY,
    SCORED,
    TEXT_KEY,
    Claimed,
    Column,
    PartRows,
    Planned,
    Rejected,
    Stage,
    TableOutput,
    counted,
)
from toolformer_dag.pipeline.worker import Worker

METHOD = 2
"""Raised when the same calls would be chosen otherwise or get other results; a golden test notices where it was not."""
PLACE = (*TEXT_KEY, "position")
CALL = (*PLACE, "input")
NOT_SAMPLED, NO_OTHER_RESULT = "not_sampled", "no_other_result"


def exchange(calls: pl.DataFrame, texts: pl.DataFrame, likeliest: pl.DataFrame, limit: int) -> pl.DataFrame:
    """`calls` (CALL, sample, p_api, result, ...) with results of other documents; null, with a `swap_reason`, without.

    Of the `texts` of a shard, whether they have calls or not, the calls of the `limit` with the smallest hashes
    are taken (not_sampled). Results are given by the first samples at the `likeliest` place (PLACE) of each text: they
    are there for every k and m. A call is told one of a place at least as likely as its own, which is there for every
    tau_s under which the call is. All calls stand in a circle in the order of another hash, and a call gets the next
    such result that differs from its own and comes from a document with another digest (no_other_result); equal calls
    at a position get the same one. A result that is right all the same, or of a near-duplicate, is not noticed.
    """
    sampled = calls.join(_sampled(texts, limit), on=TEXT_KEY, maintain_order="left")
    giving = sampled.join(likeliest.select(PLACE, likeliest=True), on=PLACE, how="left", maintain_order="left")
    gives = pl.col("likeliest").fill_null(False) & (pl.col("sample") == 0)
    found = sampled.join(_told(giving.with_columns(gives=gives)), on=CALL, how="left", maintain_order="left")
    absent = pl.when(pl.col("told").is_null()).then(pl.lit(NO_OTHER_RESULT))
    reason = pl.when("sampled").then(absent).otherwise(pl.lit(NOT_SAMPLED))
    return found.with_columns(swap_reason=reason, result="told").drop("sampled", "told")


def likeliest_places(candidates: pl.DataFrame) -> pl.DataFrame:
    """(PLACE): of each text the most probable position, of equals the earlier. `candidates`: (PLACE, p_api)."""
    ordered = candidates.sort("p_api", "position", descending=[True, False])
    return ordered.unique(TEXT_KEY, keep="first", maintain_order=True).select(PLACE)


def _sampled(texts: pl.DataFrame, limit: int) -> pl.DataFrame:
    """(shard, digest, segment, sampled): whether a text is one of its shard's first `limit`."""
    hashed = texts.select(TEXT_KEY).with_columns(hash=_hashes("text", texts.select(TEXT_KEY)))
    number = pl.int_range(pl.len()).over("shard")
    return hashed.sort("hash", *TEXT_KEY).select(*TEXT_KEY, sampled=number < limit)


def _told(calls: pl.DataFrame) -> pl.DataFrame:
    """(CALL, told): the exchanged result of every distinct call that is sampled."""
    distinct = calls.group_by(CALL).agg(pl.col("result", "p_api").first(), pl.col("sampled", "gives").any())
    circle = distinct.with_columns(hash=_hashes("call", distinct.select(CALL))).sort("hash", *CALL)
    results = circle["result"].to_list()
    told = [None if donor is None else results[donor] for donor in _donors(circle)]
    return circle.filter("sampled").select(CALL).with_columns(told=pl.Series(told, dtype=pl.String))


def _donors(circle: pl.DataFrame) -> Iterator[int | None]:
    """For each sampled seat the next one that gives, at a place as likely, in another document, another result."""
    documents, results = _codes(circle["digest"]), _codes(circle["result"])
    likely, gives = circle["p_api"].to_numpy(), circle["gives"].to_numpy()
    for seat in circle["sampled"].arg_true().to_list():
        fitting = (likely >= likely[seat]) & (documents != documents[seat]) & (results != results[seat])
        others = np.flatnonzero(gives & fitting)
        yield int(others[np.searchsorted(others, seat) % len(others)]) if len(others) else None


def _codes(values: pl.Series) -> NDArray[np.uint32]:
    """Equal values, equal numbers."""
    return values.rank("dense").to_numpy()


def _hashes(salt: str, rows: pl.DataFrame) -> pl.Series:
    """The same on every machine and in every version."""
    return pl.Series(_digests(salt, rows.iter_rows()), dtype=pl.String)


def _digests(salt: str, rows: Iterable[tuple[object, ...]]) -> list[str]:
    return [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows]


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the scored calls."""
    texts = plan.settings.evaluation.swapped_texts
    return {**losses_identity(plan, lane), "exchange": METHOD, "swapped_texts": texts}


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of the swapped calls of a shard."""
    texts, calls, _ = _swapped(output, shard)
    return planned_losses(worker, output, calls, texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of `swapped_texts` texts with results of other documents (see `exchange`) and their losses.

    Every scored call has a row or is counted: not_sampled, no_other_result, or the reason it had in loss_deltas.
    """
    _, calls, left_out = _swapped(output, shard)
    scored, stores = with_losses(worker, output, calls)
    table = output.stage.shaped(scored).sort(CALL_KEY)
    return PartRows([table], left_out + counted(table), stores)


def _swapped(output: TableOutput, shard: str) -> tuple[pl.DataFrame, pl.DataFrame, Rejected]:
    """The texts, the calls with swapped results, and the calls that have none by reason."""
    lake, lane = output.plan.lake, output.lane.key
    texts = lake.table(f"{lane}/heuristic_subset").read(shard)
    told = (
        "tool",
        "shard",
        "digest",
        "segment",
        "position",
        "sample",
        "char_offset",
        "input",
        "result",
        "p_api",
        "reason",
    )
    calls = lake.table(f"{lane}/loss_deltas").read(shard).select(told)
    calls = calls.join(texts.select(*TEXT_KEY, "text_digest"), on=TEXT_KEY, how="left", maintain_order="left")
    # no version of the candidates is kept: a text's likeliest place is the same for every k, m and tau_s
    likeliest = likeliest_places(lake.table(f"{lane}/scored_candidates").read(shard))
    limit = output.plan.settings.evaluation.swapped_texts
    swapped = exchange(calls.filter(pl.col("reason").is_null()), texts, likeliest, limit)
    left_out = counted(calls) + counted(swapped, "swap_reason")
    return texts, swapped.filter(pl.col("result").is_not_null()).drop("reason", "swap_reason"), left_out


def by_chance(true: pl.LazyFrame, swapped: pl.LazyFrame, thresholds: Sequence[float]) -> pl.DataFrame:
    """Return (tau_f, sampled, kept, kept_swapped): the calls that were swapped, and how many stay, one per position.

    `true`: loss_deltas, `swapped`: swapped_results of the same shards. The view swapped_statistics says the same.
    """
    pairs = swapped.select(*CALL_KEY, swapped="delta").join(true.select(*CALL_KEY, "delta"), on=CALL_KEY)
    best = pairs.group_by("tool", *PLACE).agg(pl.len(), pl.max("delta", "swapped")).collect()
    rows = [
        (tau, best["len"].sum(), (best["delta"] >= tau).sum(), (best["swapped"] >= tau).sum()) for tau in thresholds
    ]
    schema = {"tau_f": pl.Float64, "sampled": pl.Int64, "kept": pl.Int64, "kept_swapped": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


STAGE = Stage(
    name="swapped_results",
    description="Control: a sample of the scored calls, scored again with results of other documents.",
    columns={**SCORED, "result": Column(pl.String(), "result of a call in another document")},
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset", "loss_deltas"),
    also_reads=("scored_candidates",),
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    checks={"losses_finite": losses_finite},
    chunks=chunks,
    compute=compute_losses,
    rows=rows,
)
