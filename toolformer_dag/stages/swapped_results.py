"""swapped_results: a control. The same calls with results of other documents: how many would be kept by chance?"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages import exchange
from toolformer_dag.stages.errors import StaleInput
from toolformer_dag.stages.loss_store import losses_identity
from toolformer_dag.stages.made_from import made_from
from toolformer_dag.stages.paid_losses import paid_losses
from toolformer_dag.stages.publish import Output
from toolformer_dag.stages.rejections import counted
from toolformer_dag.stages.report import Clock, Progress, StageReport, silent
from toolformer_dag.stages.schema import KEYS, columns
from toolformer_dag.storage.lake import Lake

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

STAGE = "swapped_results"
TEXT = exchange.TEXT
ROW = KEYS[STAGE]


def settings(lane: Lane, model: Mapping[str, object], swapped_texts: int) -> dict[str, Any]:
    """What determines the rows beside the scored calls."""
    return {**losses_identity(lane, model), "exchange": exchange.METHOD, "swapped_texts": swapped_texts}


def swapped_results(
    lake: Lake,
    lane: Lane,
    partition: str,
    *,
    swapped_texts: int,
    engine: "Callable[[], Engine]",
    model: Mapping[str, object],
    chunk_texts: int,
    progress: Progress = silent,
) -> StageReport:
    """Scores the calls of `swapped_texts` texts of each shard again, with results of other documents (see `exchange`).

    A row is a row of loss_deltas with another result, its losses and its delta. Every scored call has one or is
    counted: not_sampled, no_other_result, or the reason it had in loss_deltas. Raises StaleInput, MissingPartition.
    """
    clock = Clock()
    versions, texts, calls = _calls(lake, lane, partition)
    # no version of theirs is kept: a text's likeliest place is the same for every k, m and tau_s that leave it a call
    likeliest = exchange.likeliest_places(lake.table(f"{lane.key}/scored_candidates").read(partition))
    swapped = exchange.exchange(calls.filter(pl.col("reason").is_null()), texts, likeliest, swapped_texts)
    left_out = counted(calls) + counted(swapped, "swap_reason")
    scored, work = paid_losses(
        lake,
        lane,
        swapped.filter(pl.col("result").is_not_null()).drop("reason", "swap_reason"),
        dict(texts.select("text_digest", "text").iter_rows()),
        engine=engine,
        model=model,
        chunk_texts=chunk_texts,
        progress=progress,
    )
    table = scored.select(columns(STAGE).names()).sort(ROW)
    output = Output(lake, STAGE, lane.key, partition, lane.key)
    return output.publish(
        [table], settings(lane, model, swapped_texts), versions, left_out + counted(table), clock, work
    )


def by_chance(true: pl.LazyFrame, swapped: pl.LazyFrame, thresholds: Sequence[float]) -> pl.DataFrame:
    """(tau_f, sampled, kept, kept_swapped): the calls that were swapped, and how many stay, one per position.

    `true`: loss_deltas, `swapped`: swapped_results of the same shards. The view swapped_statistics says the same of
    all shards.
    """
    pairs = swapped.select(*ROW, swapped="delta").join(true.select(*ROW, "delta"), on=ROW)
    best = pairs.group_by("tool", *exchange.PLACE).agg(pl.len(), pl.max("delta", "swapped")).collect()
    rows = [
        (tau, best["len"].sum(), (best["delta"] >= tau).sum(), (best["swapped"] >= tau).sum()) for tau in thresholds
    ]
    schema = {"tau_f": pl.Float64, "sampled": pl.Int64, "kept": pl.Int64, "kept_swapped": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _calls(lake: Lake, lane: Lane, partition: str) -> tuple[dict[str, str], pl.DataFrame, pl.DataFrame]:
    """Data versions of the inputs, the texts, and the scored calls with the digests of their texts."""
    scored, subset = lake.table(f"{lane.key}/loss_deltas"), lake.table(f"{lane.key}/heuristic_subset")
    versions = {table.name.split("/")[1]: table.pointer(partition).data_version for table in (subset, scored)}
    candidates = lake.table(f"{lane.key}/scored_candidates")
    if not (made_from(scored, candidates, partition) and made_from(candidates, subset, partition)):
        raise StaleInput(STAGE, partition, "scored calls of texts that are gone", f"{lane.key}/loss_deltas")
    texts = subset.read(partition)
    calls = scored.read(partition).join(texts.select(*TEXT, "text_digest"), on=TEXT, how="left", maintain_order="left")
    calls = calls.drop("loss_empty", "loss_call", "loss_result", "loss_minus", "loss_plus", "delta")
    return versions, texts, calls
