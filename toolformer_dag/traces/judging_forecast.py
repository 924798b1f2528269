"""What `judge` will cost, forecast from a sample of the calls that is judged for real.

Losses of the sample are stored, so that the `judge` that follows does not compute them again.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.forecast_range import GROUP_COUNT, Range, build_range, compute_relative_half_interval
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import find_table_differences
from toolformer_dag.computing.spending import sum_token_counts
from toolformer_dag.computing.stage import ClaimedKeys, TableOutput, Work
from toolformer_dag.computing.stored_rows import choose_chunk_size
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.session import enter_session
from toolformer_dag.traces import call_losses, recorded_calls, recorded_conversations
from toolformer_dag.traces.call_losses import CALL_LOSSES
from toolformer_dag.traces.judgement import Advance, update_trace_tables
from toolformer_dag.traces.unit_losses import UnitChunk

MIN_CALLS_PER_SAMPLED_CALL = 5
"""At most about one call in so many is judged for the forecast."""
FIXED_LOSSES_PER_CALL = 3
"""Losses of a call without swapped results: without the call, with an empty result, with the recorded one."""
CALLS_SCHEMA = pl.Schema({"shard": pl.String(), "row": pl.UInt32(), "key": pl.String()})
"""Calls to judge: their shard, the number of their row in it, and what their losses are stored under."""


class JudgingForecast(NamedTuple):
    """What judging will cost, beyond what the sample has cost already.

    Attributes:
        conversation_count: the number of conversations.
        call_count: the number of calls.
        unjudged_call_count: how many of the calls had no stored losses; equal calls of equal conversations count once.
        sampled_call_count: how many of these were judged for the forecast; 0 if there are too few, and then all below
            is 0 too.
        loss_count_range: the texts whose loss will be computed; a call is read several times, with and without its
            result.
        token_count_range: the tokens that will go through the model.
        seconds_range: the seconds that will pass on one worker.
        sample_token_count: the tokens that the sample took.
    """

    conversation_count: int
    call_count: int
    unjudged_call_count: int
    sampled_call_count: int = 0
    loss_count_range: Range = Range()
    token_count_range: Range = Range()
    seconds_range: Range = Range()
    sample_token_count: int = 0


class _Cost(NamedTuple):
    """What judging some calls cost.

    Attributes:
        loss_count: the texts whose loss was computed.
        model_token_count: the tokens that went through the model.
        seconds: the time that passed.
    """

    loss_count: int
    model_token_count: int
    seconds: float


class _SampleCost(NamedTuple):
    """What judging a sample cost.

    Attributes:
        first_call_cost: the call before the groups, with which model and tokenizer were loaded; its time says nothing.
        group_costs: the groups, whose different costs give the range of the forecast.
    """

    first_call_cost: _Cost
    group_costs: Sequence[_Cost]

    @property
    def total_token_count(self) -> int:
        """How many tokens the whole sample took."""
        return self.first_call_cost.model_token_count + sum(group.model_token_count for group in self.group_costs)


def forecast_judging(plan: Plan, advance: Advance, seed: int | None = None) -> JudgingForecast:
    """Forecast what judging recorded conversations will cost, by judging a sample of their calls.

    First the conversations are read, and the results are chosen that the calls are compared with.

    Args:
        plan: The plan with the conversations.
        advance: Shows the progress of reading and choosing.
        seed: Determines which calls are drawn, wherever their files lie. Without it they are drawn at random.

    Raises:
        UserError: No conversation could be read, or no conversation has a call.
        ModelError: The model cannot be used.
        StorageError: The lake cannot be used.
    """
    update_trace_tables(plan, advance, with_losses=False)
    worker = Worker(plan)
    output = TableOutput(call_losses.STAGE, plan)

    with enter_session():
        calls = _collect_calls_to_judge(worker, output)
        forecast_without_cost = _build_forecast_without_cost(plan, calls)

        # The sample has GROUP_COUNT groups of so many calls. The differences between groups give the forecast's range.
        group_size = _choose_group_size(plan, calls.height)
        if group_size == 0:  # too few calls for a sample
            return forecast_without_cost

        sample_cost = _judge_sample(worker, output, calls, group_size=group_size, seed=seed)
        worker.close_row_stores()
    return _add_scaled_cost(forecast_without_cost, sample_cost, group_size)


def _judge_sample(
    worker: Worker, output: TableOutput, calls: pl.DataFrame, *, group_size: int, seed: int | None
) -> _SampleCost:
    """Draw a sample of calls, judge them, and measure what that costs.

    The sample is a first call and GROUP_COUNT groups of calls. The first call is measured apart, because its time
    includes loading the model.

    Args:
        worker: Loads the model.
        output: The table of losses.
        calls: The calls to draw from, with the columns CALLS_SCHEMA, at least as many as the sample has.
        group_size: The number of calls in a group.
        seed: Determines which calls are drawn.
    """
    sample_size = 1 + GROUP_COUNT * group_size
    drawn_calls = calls.sort("key").sample(sample_size, shuffle=True, seed=seed)
    first_call_cost = _judge_calls(worker, output, drawn_calls[:1])
    group_costs = [_judge_calls(worker, output, group) for group in drawn_calls[1:].iter_slices(group_size)]
    return _SampleCost(first_call_cost, group_costs)


def _collect_calls_to_judge(worker: Worker, output: TableOutput) -> pl.DataFrame:
    """Return the calls that `judge` would compute losses for, with the columns CALLS_SCHEMA."""
    claimed_keys = ClaimedKeys()  # of equal calls in several shards only the first is collected
    frames = [CALLS_SCHEMA.to_frame()]
    for shard in find_table_differences(output).reasons_by_part:
        planned_part = CALL_LOSSES.plan_part(worker, output, shard, claimed_keys)
        for chunk in planned_part.chunks:
            calls_of_chunk = chunk.payload.units.select(pl.lit(shard).alias("shard"), "row", "key")
            frames.append(calls_of_chunk)
    return pl.concat(frames)


def _build_forecast_without_cost(plan: Plan, calls_to_judge: pl.DataFrame) -> JudgingForecast:
    """Return a forecast that only has the numbers of conversations, of calls, and of calls to judge."""
    return JudgingForecast(
        conversation_count=_count_table_rows(plan, recorded_conversations.TABLE_NAME),
        call_count=_count_table_rows(plan, recorded_calls.TABLE_NAME),
        unjudged_call_count=calls_to_judge.height,
    )


def _count_table_rows(plan: Plan, table_name: str) -> int:
    """Return how many rows a table holds of the plan's conversations."""
    table = plan.lake.get_table(table_name)
    return sum(table.read_pointer(shard).row_count for shard in plan.conversation_shards_by_name)


def _choose_group_size(plan: Plan, call_count: int) -> int:
    """Choose how many calls a group of the sample has.

    A group is at most about as large as what the model judges at once in a run. And to stay cheap, the sample takes at
    most about one call in MIN_CALLS_PER_SAMPLED_CALL.

    Args:
        plan: The plan with the settings.
        call_count: The number of calls to judge.

    Returns:
        The number, or 0 if there are too few calls for a sample.
    """
    losses_per_call = FIXED_LOSSES_PER_CALL + plan.settings.traces.swaps
    calls_at_once = max(1, choose_chunk_size(plan.settings) // losses_per_call)
    max_group_size = call_count // MIN_CALLS_PER_SAMPLED_CALL // GROUP_COUNT
    return min(calls_at_once, max_group_size)


def _judge_calls(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> _Cost:
    """Compute and store the losses of some calls of the sample, and measure what that costs, for the forecast.

    Args:
        worker: Loads the model.
        output: The table of losses.
        calls: The calls, with the columns CALLS_SCHEMA.
    """
    start_time = time.monotonic()
    total_work = Work()  # counts of what was computed
    for calls_of_shard in calls.sort("shard", "row").partition_by("shard", maintain_order=True):
        chunk = UnitChunk(shard=calls_of_shard["shard"][0], units=calls_of_shard.select("row", "key"))
        total_work += CALL_LOSSES.compute_chunk(worker, output, chunk)  # stores the losses

    return _Cost(
        loss_count=total_work.computed_rows_by_kind["losses"],
        model_token_count=sum_token_counts(total_work.tokens_by_kind),
        seconds=time.monotonic() - start_time,
    )


def _add_scaled_cost(
    forecast_without_cost: JudgingForecast, sample_cost: _SampleCost, group_size: int
) -> JudgingForecast:
    """Add to a forecast what it will cost to judge the calls that were not sampled.

    The cost of the groups of the sample is scaled to the number of these calls.

    Args:
        forecast_without_cost: The forecast, which only has numbers of conversations and calls so far.
        sample_cost: What the sample cost.
        group_size: The number of calls in each of the GROUP_COUNT groups.

    Returns:
        The forecast, with a 95 % interval for each cost.
    """
    grouped_call_count = GROUP_COUNT * group_size
    sampled_call_count = 1 + grouped_call_count  # a first call was judged before the groups
    remaining_call_count = forecast_without_cost.unjudged_call_count - sampled_call_count
    factor = remaining_call_count / grouped_call_count

    group_costs = sample_cost.group_costs
    return forecast_without_cost._replace(
        sampled_call_count=sampled_call_count,
        loss_count_range=_scale_costs(factor, [cost.loss_count for cost in group_costs]),
        token_count_range=_scale_costs(factor, [cost.model_token_count for cost in group_costs]),
        seconds_range=_scale_costs(factor, [cost.seconds for cost in group_costs]),
        sample_token_count=sample_cost.total_token_count,
    )


def _scale_costs(factor: float, group_costs: Sequence[float]) -> Range:
    """Return what `factor` times as many calls as in the groups will cost, as a range.

    The range is wide if the costs of the groups differ much.
    """
    return build_range(factor * sum(group_costs), compute_relative_half_interval(group_costs))
