"""loss_deltas: by how much each call with its result helps to predict what follows (paper, section 2, "Filtering")."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL_KEY,
    MADE_BY,
    SCORED,
    TEXT_KEY,
    ByChunk,
    Claimed,
    Column,
    PartRows,
    Planned,
    Stage,
    TableOutput,
    counted,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.chained_candidates import ahead, finished
from toolformer_dag.pipeline.losses import (
    LOSSES_FINITE,
    compute_losses,
    losses_settings,
    planned_losses,
    with_losses,
)
from toolformer_dag.settings.tool_settings import RULE
from toolformer_dag.texts import look_ahead
from toolformer_dag.tools.tool import blamed


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside calls and results; all options count, since `Tool.keeps` may read them."""
    rule = look_ahead.VERSION if lane.look_ahead else None
    return {**losses_settings(plan, lane), **tool_settings(lane), "look_ahead": rule}


def tool_settings(lane: Lane) -> Mapping[str, Any]:
    """Return what determines the calls that a lane's tool keeps out."""
    settings = {"version": lane.tool.version, "identity": lane.identity()}
    reasons = lane.tool.kept_out_version
    return {**settings, "kept_out": reasons} if reasons else settings


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of every candidate call of a shard that is to be scored, and of its echo."""
    texts, calls = _calls(output, shard)
    scored = calls.filter(pl.col("unfit").is_null())
    return planned_losses(worker, output, pl.concat([scored, _echoes(scored)]), texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return one row per candidate call that has a result.

    `reason` marks what may not stay whatever its delta. Not scored: looks_ahead; same_result, where a rule proposed a
    call with this result at this place before; words_not_held and no_echo, where the call's result, or that of its
    echo, does not hold what the rule saw after the call. Scored: does_not_fit and not_finite (the losses of both are
    null), and those of `Tool.kept_out`, such as tool_keeps_out and no_operation.
    """
    texts, calls = _calls(output, shard)
    fit = calls.filter(pl.col("unfit").is_null())
    scored, stores = with_losses(worker, output, fit)
    echoes, _ = with_losses(worker, output, _echoes(fit))
    gained = pl.min_horizontal("loss_empty", "loss_call") - pl.col("loss_echo")
    losses = echoes.select(*CALL_KEY, loss_echo="loss_result")
    scored = scored.join(losses, on=CALL_KEY, how="left", maintain_order="left").with_columns(echo=gained)
    return marked(output, texts, calls, scored, stores)


def marked(
    output: TableOutput, texts: pl.DataFrame, calls: pl.DataFrame, scored: pl.DataFrame, stores: Sequence[str]
) -> PartRows:
    """Return the rows: `scored`, with those that their tool keeps out, and of `calls` those that are `unfit`."""
    by_digest = dict(texts.select("text_digest", "text").iter_rows())
    tools = {one.key: one.tool for one in output.lane.chainable.values()}
    reasons = list[str | None]()
    for key, digest, place, offset, call in scored.select(
        "called", "text_digest", "char_offset", "offset", "input"
    ).iter_rows():
        with blamed(tools[key], "keeps"):
            reasons.append(tools[key].kept_out(by_digest[digest], place - offset, call))
    kept_out = pl.Series("kept_out", reasons, dtype=pl.String)
    reasoned = scored.with_columns(pl.coalesce("reason", kept_out).alias("reason"))
    unscored = calls.filter(pl.col("unfit").is_not_null()).with_columns(reason="unfit")
    table = output.stage.shaped(pl.concat([reasoned, unscored], how="diagonal")).sort(CALL_KEY)
    return PartRows([table], counted(table), stores, facts={MADE_BY: STAGE.name})


def _calls(output: TableOutput, shard: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The texts, and the calls that have a result, with the result of their echo and why they are not scored."""
    lane = output.lane
    texts = output.lane_table("heuristic_subset").read(shard)
    calls = finished(output, shard, 1)
    answers = output.lane_table("tool_results").read(shard).select("context", words="input", echoed="result")
    calls = calls.join(answers, on=("words", "context"), how="left", maintain_order="left")
    calls = calls.with_columns(ahead=ahead(lane, texts, calls))
    reasons = {
        "looks_ahead": pl.col("ahead").is_not_null(),
        "words_not_held": ~_holds("result"),
        "no_echo": ~(_holds("echoed") & (pl.col("echoed") != pl.col("result"))),
        "same_result": _repeats(),
    }
    unfit = pl.coalesce(pl.when(which).then(pl.lit(reason)) for reason, which in reasons.items())
    return texts, calls.with_columns(unfit=unfit)


def _holds(result: str) -> pl.Expr:
    """Whether a result holds the words that a rule saw; null without such words."""
    return (
        pl.col(result).fill_null("").str.to_lowercase().str.contains(pl.col("words").str.to_lowercase(), literal=True)
    )


def _repeats() -> pl.Expr:
    """Whether another call at the place has the result, and a rule proposed it, before this one if a rule did too.

    The loss tells results apart, not inputs: among calls with equal results it would choose by noise.
    """
    ruled, group = pl.col("source") == RULE, (*TEXT_KEY, "position", "result")
    first = pl.when(ruled).then("sample").max().over(group)  # from -1 down
    return pl.col("sample") != first


def _echoes(calls: pl.DataFrame) -> pl.DataFrame:
    """The calls that have an echo, with its result."""
    return calls.filter(pl.col("words").is_not_null()).with_columns(result="echoed")


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
    checks={"losses_finite": LOSSES_FINITE},
    make=ByChunk(chunks, compute_losses, rows),
)
