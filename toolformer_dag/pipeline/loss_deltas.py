"""loss_deltas: by how much each call with its result helps to predict what follows (paper, section 2, "Filtering")."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from toolformer_dag.pipeline.chained_candidates import ahead, finished, stage_names
from toolformer_dag.pipeline.chained_losses import chained_calls, compute_scores, planned_scores, with_scores
from toolformer_dag.pipeline.losses import losses_finite, losses_settings
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
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts import look_ahead
from toolformer_dag.tools.tool import blamed


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside calls and results; an option may be there for `Tool.keeps` alone."""
    rule = look_ahead.VERSION if lane.look_ahead else None
    tool = {"version": lane.tool.version, "identity": lane.identity()}
    behind = {one.tool.key: {"version": one.tool.version, "identity": one.identity()} for one in lane.then}
    chains = {"depth": lane.depth, "then": behind} if lane.depth > 1 else {}
    return {**losses_settings(plan, lane), **tool, "look_ahead": rule, **chains}


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read: those of calls behind others too where the lane has chains."""
    chained = [name for level in range(2, lane.depth + 1) for name in stage_names(level)]
    return ("heuristic_subset", "scored_candidates", "tool_results", *chained)


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of every candidate call and chain of a shard that has a result and does not look ahead."""
    texts, calls = _calls(output, shard)
    return planned_scores(worker, output, calls.filter(pl.col("ahead").is_null()), texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return one row per candidate call that has a result, alone or as the last of a chain.

    `reason` marks what may not stay whatever its delta: looks_ahead, which is not scored, does_not_fit and not_finite
    (the losses of all three are null), tool_keeps_out (`Tool.keeps`), and idle_first (no later call of the chain needed
    an earlier one, `need` <= 0).
    """
    texts, calls = _calls(output, shard)
    scored, stores = with_scores(worker, output, calls.filter(pl.col("ahead").is_null()))
    by_digest = dict(texts.select("text_digest", "text").iter_rows())
    tools = {one.key: one.tool for one in output.lane.behind.values()}
    kept = []
    for key, digest, place, offset, call in scored.select(
        "called", "text_digest", "char_offset", "offset", "input"
    ).iter_rows():
        with blamed(tools[key], "keeps"):
            kept.append(bool(tools[key].keeps(by_digest[digest], place - offset, call)))
    kept_out = pl.when(~pl.Series("kept", kept, dtype=pl.Boolean)).then(pl.lit("tool_keeps_out"))
    marked = scored.with_columns(pl.coalesce("reason", kept_out).alias("reason"))
    unscored = calls.filter(pl.col("ahead").is_not_null()).with_columns(reason=pl.lit("looks_ahead"))
    table = output.stage.shaped(pl.concat([marked, unscored], how="diagonal")).sort(CALL_KEY)
    return PartRows([table], counted(table), stores)


def _calls(output: TableOutput, shard: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The texts, and the calls that have a result, alone or as the last of a chain, with what they tell `ahead`."""
    lane, null = output.lane, pl.lit(None, pl.String)
    texts = output.plan.lake.table(f"{lane.key}/heuristic_subset").read(shard)
    single = finished(output, shard, 1).with_columns(chain=null, others=null)
    calls = pl.concat([single, *(chained_calls(output, shard, level) for level in range(2, lane.depth + 1))])
    return texts, calls.with_columns(ahead=ahead(lane, texts, calls))


AHEAD = Column(pl.List(pl.String()), "units of the input that the text has only after the call; null for most")
STAGE = Stage(
    name="loss_deltas",
    description="The three losses and their delta for every call with a result, kept or not (paper, section 2).",
    columns={**SCORED, "ahead": AHEAD},
    key=CALL_KEY,
    settings=settings,
    reads=reads,
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    checks={"losses_finite": losses_finite},
    chunks=chunks,
    compute=compute_scores,
    rows=rows,
)
