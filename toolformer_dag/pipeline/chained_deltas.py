"""chained_deltas: score chains of calls (beyond the paper).

The table has the columns of loss_deltas, the table of single calls. Whatever filters, counts or shows calls reads both.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from toolformer_dag.computing.lane_tables import get_call_tables
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import ByChunk, ClaimedKeys, InWarehouse, PartRows, Planned, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import loss_deltas
from toolformer_dag.pipeline.chained_candidates import find_units_ahead
from toolformer_dag.pipeline.chained_losses import (
    compute_chain_losses,
    plan_chain_losses,
    read_chained_calls,
    with_chain_losses,
)


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings that put the scores of chains out of date when they change.

    They are the settings for the scores of single calls, the maximum length of a chain ("depth"), and the settings of
    every tool that a chain may call after the lane's own tool ("then").
    """
    later_tool_settings = {
        next_lane.tool.key: loss_deltas.collect_tool_settings(next_lane) for next_lane in lane.next_lanes
    }
    return {**loss_deltas.settings(plan, lane), "depth": lane.max_chain_calls, "then": later_tool_settings}


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the names of the tables that are read: the texts, the losses of single calls, and the calls of chains.

    The losses of single calls have to come first, because chains use some of them.
    """
    table_names = ["heuristic_subset", "loss_deltas"]
    for level in range(2, lane.max_chain_calls + 1):
        table_names += get_call_tables(level)
    return tuple(table_names)


def chunks(worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
    """Plan the losses of a shard's chains that are to be scored: the last call has a result and does not look ahead.

    A call looks ahead if its input has something that the text says only after it.

    Args:
        claimed_keys: The losses that earlier shards of this run compute already, which are left out here. The newly
            planned ones are added to it.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard)
    chains = _read_chains_with_unfit_reason(output, shard, texts)
    scorable_chains = chains.filter(pl.col("unfit").is_null())
    return plan_chain_losses(worker, output, scorable_chains, texts, claimed_keys)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the scores of the chains of a shard from the stored losses: a row per chain, keyed by its last call.

    A chain is a sequence of calls at one position, each made after the results of the earlier calls, such as
    `[Calculator(3 * 4) -> 12] [Calculator(12 + 1) -> 13]`. Its row has the input and result of the last call, the
    losses in nats and their delta.

    `reason` says why a chain may not stay whatever its delta: looks_ahead, does_not_fit, not_finite, a reason of its
    last tool, or idle_first if no later call needed the earlier results (`need` <= 0).
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard)
    chains = _read_chains_with_unfit_reason(output, shard, texts)
    scorable_chains = chains.filter(pl.col("unfit").is_null())
    unscorable_chains = chains.filter(pl.col("unfit").is_not_null())

    # Adds the stored losses, `need` and `reason`.
    chains_with_losses = with_chain_losses(worker, output, scorable_chains)
    return loss_deltas.build_scored_rows(
        output,
        texts,
        scored_calls=chains_with_losses.calls,
        unscored_calls=unscorable_chains,
        store_names=chains_with_losses.store_names,
    )


def _read_chains_with_unfit_reason(output: TableOutput, shard: str, texts: pl.DataFrame) -> pl.DataFrame:
    """Return the chains of a shard whose calls have results, with a row for the last call of each.

    Args:
        texts: The texts of the shard, in the columns text_digest, text and others.

    Returns:
        The columns of chained calls and two more:
        - ahead: numbers and names of the input that the text has only after the call, else null
        - unfit: why the chain is not scored (looks_ahead), else null
    """
    # A chain of level 2 has two calls. The longest has `max_chain_calls`, at least 2: other lanes have no such table.
    levels = range(2, output.lane.max_chain_calls + 1)
    chains = pl.concat(read_chained_calls(output, shard, level) for level in levels)

    chains_with_ahead = chains.with_columns(ahead=find_units_ahead(output.lane, texts, chains))
    unfit_reason = pl.when(pl.col("ahead").is_not_null()).then(pl.lit("looks_ahead"))
    return chains_with_ahead.with_columns(unfit=unfit_reason)


STAGE = replace(
    loss_deltas.STAGE,
    name="chained_deltas",
    description="The losses and their delta for every chain with a result, kept or not.",
    collect_settings=settings,
    reads=reads,
    row_maker=ByChunk(chunks, compute_chain_losses, rows),
    warehouse_form=InWarehouse("loss_deltas"),
)
