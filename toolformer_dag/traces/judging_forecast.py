"""What `judge` will cost, forecast from a sample of the calls that is judged for real.

Losses of the sample are stored, so that the `judge` that follows does not compute them again.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.forecast_range import GROUPS, Range, build_range, spread
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import find_table_differences
from toolformer_dag.computing.spending import token_count
from toolformer_dag.computing.stage import Claimed, TableOutput, Work
from toolformer_dag.computing.stored_rows import choose_chunk_size
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.session import session
from toolformer_dag.traces import call_losses, recorded_calls, recorded_conversations
from toolformer_dag.traces.call_losses import CALL_LOSSES
from toolformer_dag.traces.judgement import Advance, update_tables
from toolformer_dag.traces.unit_losses import UnitChunk

SHARE = 5
"""At most one call in SHARE is judged for the forecast."""
FIXED_LOSSES = 3
"""Losses of a call without swapped results: without the call, with an empty result, with the recorded one."""
CALLS = pl.Schema({"shard": pl.String(), "row": pl.UInt32(), "key": pl.String()})
"""Calls to judge: their shard, the number of their row in it, and what their losses are stored under."""


class JudgingForecast(NamedTuple):
    """What judging will cost, beyond what the sample has cost already.

    - `conversations`, `calls`: how many there are
    - `to_judge`: how many of the calls had no stored losses; equal calls of equal conversations count once
    - `sampled`: how many of these were judged for the forecast; 0 where there are too few, and all below is 0 then
    - `losses`: texts whose loss will be computed; a call is read several times, with and without its result
    - `tokens`: that will go through the model
    - `seconds`: that will pass on one worker
    - `spent`: tokens that the sample took
    """

    conversations: int
    calls: int
    to_judge: int
    sampled: int = 0
    losses: Range = Range()
    tokens: Range = Range()
    seconds: Range = Range()
    spent: int = 0


class _Cost(NamedTuple):
    """What judging some calls cost."""

    losses: int
    tokens: int
    seconds: float


class _SampleCost(NamedTuple):
    """What judging a sample cost.

    Attributes:
        first: the call before the groups, with which model and tokenizer were loaded; its time says nothing.
        groups: the groups, whose different costs give the range of the forecast.
    """

    first: _Cost
    groups: Sequence[_Cost]

    @property
    def tokens(self) -> int:
        """How many tokens the whole sample took."""
        return self.first.tokens + sum(group.tokens for group in self.groups)


def forecast_judging(plan: Plan, advance: Advance, seed: int | None = None) -> JudgingForecast:
    """Forecast what judging recorded conversations will cost, by judging a sample of their calls.

    First the conversations are read, and the results are chosen that the calls are compared with.

    Args:
        plan: The plan with the conversations.
        advance: Shows the progress of reading and choosing.
        seed: Determines which calls are drawn, wherever their files lie. Without it they are drawn at random.

    Raises:
        UserError, ModelError, StorageError: As in `judged`, which judges for real.
    """
    update_tables(plan, advance, with_losses=False)
    worker = Worker(plan)
    output = TableOutput(call_losses.STAGE, plan)

    with session():
        calls = _collect_calls_to_judge(worker, output)
        forecast_without_cost = _build_forecast_without_cost(plan, calls)

        group_size = _choose_group_size(plan, calls.height)
        if group_size == 0:  # too few calls for a sample
            return forecast_without_cost

        sample_cost = _judge_sample(worker, output, calls, group_size=group_size, seed=seed)
        worker.close_rows()
    return _with_scaled_cost(forecast_without_cost, sample_cost, group_size)


def _judge_sample(
    worker: Worker, output: TableOutput, calls: pl.DataFrame, *, group_size: int, seed: int | None
) -> _SampleCost:
    """Draw a sample of calls, judge them, and measure what that costs.

    The sample is a first call and GROUPS groups of calls. The first call is measured apart, because its time includes
    loading the model.

    Args:
        worker: Loads the model.
        output: The table of losses.
        calls: The calls to draw from, with the columns of CALLS, at least as many as the sample has.
        group_size: The number of calls in a group.
        seed: Determines which calls are drawn.
    """
    drawn = calls.sort("key").sample(1 + GROUPS * group_size, shuffle=True, seed=seed)
    cost_of_first = _judge_calls(worker, output, drawn[:1])
    costs_of_groups = [_judge_calls(worker, output, group) for group in drawn[1:].iter_slices(group_size)]
    return _SampleCost(cost_of_first, costs_of_groups)


def _collect_calls_to_judge(worker: Worker, output: TableOutput) -> pl.DataFrame:
    """Return the calls that `judge` would compute losses for, with the columns of CALLS."""
    claimed = Claimed()
    frames = [CALLS.to_frame()]
    for shard in find_table_differences(output).parts:
        for chunk in CALL_LOSSES.chunks(worker, output, shard, claimed).chunks:
            frames.append(chunk.payload.units.select(pl.lit(shard).alias("shard"), "row", "key"))
    return pl.concat(frames)


def _build_forecast_without_cost(plan: Plan, to_judge: pl.DataFrame) -> JudgingForecast:
    """Return a forecast that only has the numbers of conversations, of calls, and of calls to judge."""
    return JudgingForecast(
        conversations=_count_rows(plan, recorded_conversations.NAME),
        calls=_count_rows(plan, recorded_calls.NAME),
        to_judge=to_judge.height,
    )


def _count_rows(plan: Plan, table: str) -> int:
    """Return how many rows a table holds of the plan's conversations."""
    return sum(plan.lake.table(table).pointer(shard).rows for shard in plan.conversations)


def _choose_group_size(plan: Plan, call_count: int) -> int:
    """Choose how many calls a group of the sample has.

    They are at most about as many as the model judges at once in a run, and the whole sample is at most about one call
    in SHARE.

    Args:
        plan: The plan with the settings.
        call_count: The number of calls to judge.

    Returns:
        The number, or 0 if there are too few calls for a sample.
    """
    losses_of_call = FIXED_LOSSES + plan.settings.traces.swaps
    judged_at_once = max(1, choose_chunk_size(plan.settings) // losses_of_call)
    return min(judged_at_once, call_count // SHARE // GROUPS)


def _judge_calls(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> _Cost:
    """Compute and store the losses of some calls, and measure what that costs.

    Args:
        worker: Loads the model.
        output: The table of losses.
        calls: The calls, with the columns of CALLS.
    """
    start_time = time.monotonic()
    total_work = Work()  # counts of what was computed
    for calls_of_shard in calls.sort("shard", "row").partition_by("shard", maintain_order=True):
        chunk = UnitChunk(shard=calls_of_shard["shard"][0], units=calls_of_shard.select("row", "key"))
        total_work += CALL_LOSSES.compute(worker, output, chunk)  # stores the losses

    return _Cost(
        losses=total_work.computed["losses"],
        tokens=token_count(total_work.tokens),
        seconds=time.monotonic() - start_time,
    )


def _with_scaled_cost(forecast_without_cost: JudgingForecast, sample: _SampleCost, group_size: int) -> JudgingForecast:
    """Add to a forecast what it will cost to judge the calls that were not sampled.

    The cost of the groups of the sample is scaled to the number of these calls.

    Args:
        forecast_without_cost: The forecast, which only has numbers of conversations and calls so far.
        sample: What the sample cost.
        group_size: The number of calls in each of the GROUPS groups.

    Returns:
        The forecast, with a 95 % interval for each cost.
    """
    calls_in_groups = GROUPS * group_size
    sampled_calls = 1 + calls_in_groups  # a first call was judged before the groups
    remaining_calls = forecast_without_cost.to_judge - sampled_calls
    factor = remaining_calls / calls_in_groups

    return forecast_without_cost._replace(
        sampled=sampled_calls,
        losses=_scale_costs(factor, [group.losses for group in sample.groups]),
        tokens=_scale_costs(factor, [group.tokens for group in sample.groups]),
        seconds=_scale_costs(factor, [group.seconds for group in sample.groups]),
        spent=sample.tokens,
    )


def _scale_costs(factor: float, group_costs: Sequence[float]) -> Range:
    """Return what `factor` times as many calls cost as the groups have, with the spread of the groups' costs."""
    return build_range(factor * sum(group_costs), spread(group_costs))
