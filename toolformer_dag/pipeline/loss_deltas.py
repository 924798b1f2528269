"""loss_deltas: by how much each call with its result helps to predict what follows (paper, section 2, "Filtering")."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from toolformer_dag.pipeline.chained_candidates import ahead, finished
from toolformer_dag.pipeline.losses import (
    compute_losses,
    losses_finite,
    losses_settings,
    planned_losses,
    with_losses,
)
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import (
    CALL_KEY,
    SCORED,
    Claimed,
    Column,
    PartRows,
    Planned,
    Stage,
    TableOutput,
    counted,
)
from toolformer_dag.pipeline.stage import STAGE as OF_STAGE
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts import look_ahead
from toolformer_dag.tools.tool import blamed


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside calls and results; an option may be there for `Tool.keeps` alone."""
    rule = look_ahead.VERSION if lane.look_ahead else None
    tool = {"version": lane.tool.version, "identity": lane.identity()}
    return {**losses_settings(plan, lane), **tool, "look_ahead": rule}


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of every candidate call of a shard that has a result and does not look ahead."""
    texts, calls = _calls(output, shard)
    return planned_losses(worker, output, calls.filter(pl.col("ahead").is_null()), texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return one row per candidate call that has a result.

    `reason` marks what may not stay whatever its delta: looks_ahead, which is not scored, does_not_fit and not_finite
    (the losses of all three are null), and tool_keeps_out (`Tool.keeps`).
    """
    texts, calls = _calls(output, shard)
    scored, stores = with_losses(worker, output, calls.filter(pl.col("ahead").is_null()))
    return marked(output, texts, calls, scored, stores)


def marked(
    output: TableOutput, texts: pl.DataFrame, calls: pl.DataFrame, scored: pl.DataFrame, stores: Sequence[str]
) -> PartRows:
    """Return the rows: `scored`, with those that their tool keeps out, and of `calls` those that look ahead."""
    by_digest = dict(texts.select("text_digest", "text").iter_rows())
    tools = {one.key: one.tool for one in output.lane.behind.values()}
    kept = []
    for key, digest, place, offset, call in scored.select(
        "called", "text_digest", "char_offset", "offset", "input"
    ).iter_rows():
        with blamed(tools[key], "keeps"):
            kept.append(bool(tools[key].keeps(by_digest[digest], place - offset, call)))
    kept_out = pl.when(~pl.Series("kept", kept, dtype=pl.Boolean)).then(pl.lit("tool_keeps_out"))
    found = scored.with_columns(pl.coalesce("reason", kept_out).alias("reason"))
    unscored = calls.filter(pl.col("ahead").is_not_null()).with_columns(reason=pl.lit("looks_ahead"))
    table = output.stage.shaped(pl.concat([found, unscored], how="diagonal")).sort(CALL_KEY)
    return PartRows([table], counted(table), stores, facts={OF_STAGE: STAGE.name})


def _calls(output: TableOutput, shard: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The texts, and the calls that have a result, with what they tell `ahead`."""
    texts, calls = output.plan.lake.table(f"{output.lane.key}/heuristic_subset").read(shard), finished(output, shard, 1)
    return texts, calls.with_columns(**NO_CHAIN, ahead=ahead(output.lane, texts, calls))


NO_CHAIN = {
    "chain": pl.lit(None, pl.String),
    "loss_before": pl.lit(None, pl.Float64),
    "need": pl.lit(None, pl.Float64),
}
"""The columns of a chain for a single call."""
AHEAD = Column(pl.List(pl.String()), "units of the input that the text has only after the call; null for most")
STAGE = Stage(
    name="loss_deltas",
    description="The three losses and their delta for every call with a result, kept or not (paper, section 2).",
    columns={**SCORED, "ahead": AHEAD},
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset", "scored_candidates", "tool_results"),
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    checks={"losses_finite": losses_finite},
    chunks=chunks,
    compute=compute_losses,
    rows=rows,
)
