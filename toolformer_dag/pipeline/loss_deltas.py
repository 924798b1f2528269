"""loss_deltas: by how much each call with its result helps to predict what follows (paper, section 2, "Filtering")."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from toolformer_dag.pipeline.losses import compute_losses, losses_finite, losses_identity, planned_losses, with_losses
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import (
    CALL_KEY,
    SCORED,
    TEXT_KEY,
    Claimed,
    PartRows,
    Planned,
    Stage,
    TableOutput,
    counted,
)
from toolformer_dag.pipeline.update import StaleInput
from toolformer_dag.pipeline.worker import Worker

KEPT_OUT = "tool_keeps_out"


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside calls and results; an option may be there for `Tool.keeps` alone."""
    return {**losses_identity(plan, lane), "version": lane.tool.version, "identity": dict(lane.tool.identity())}


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of every candidate call of a shard that has a result."""
    texts, calls = _calls(output, shard)
    return planned_losses(worker, output, calls, texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return one row per candidate call that has a result.

    `reason` marks what may not stay whatever its delta: does_not_fit and not_finite (their losses are null),
    tool_keeps_out (`Tool.keeps`).
    """
    texts, calls = _calls(output, shard)
    scored, stores = with_losses(worker, output, calls)
    by_digest = dict(texts.select("text_digest", "text").iter_rows())
    places = scored.select("text_digest", "char_offset", "offset", "input").iter_rows()
    keeps = output.lane.tool.keeps
    kept = [keeps(by_digest[digest], place - offset, call) for digest, place, offset, call in places]
    kept_out = pl.when(~pl.Series("kept", kept, dtype=pl.Boolean)).then(pl.lit(KEPT_OUT))
    marked = scored.with_columns(pl.coalesce("reason", kept_out).alias("reason"))
    table = output.stage.shaped(marked).sort(CALL_KEY)
    return PartRows([table], counted(table), stores)


def _calls(output: TableOutput, shard: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The texts, and the candidate calls that have a result."""
    lake, lane = output.plan.lake, output.lane.key
    texts = lake.table(f"{lane}/heuristic_subset").read(shard)
    calls = lake.table(f"{lane}/scored_candidates").read(shard).filter(pl.col("input").is_not_null()).drop("reason")
    answers = lake.table(f"{lane}/tool_results").read(shard).select("input", "context", "result", answered=pl.lit(True))
    calls = calls.join(texts.select(*TEXT_KEY, "text_digest", "context", "offset"), on=TEXT_KEY, how="left")
    calls = calls.join(answers, on=("input", "context"), how="left")
    if calls["answered"].has_nulls():
        raise StaleInput(output.name, shard, "calls that were not run", f"{lane}/tool_results")
    return texts, calls.filter(pl.col("result").is_not_null())


STAGE = Stage(
    name="loss_deltas",
    description="The three losses and their delta for every call with a result, kept or not (paper, section 2).",
    columns=SCORED,
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
