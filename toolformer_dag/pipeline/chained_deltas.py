"""chained_deltas: score chains of calls (beyond the paper).

The table has the columns of loss_deltas, the table of single calls. Whatever filters, counts or shows calls reads both.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from toolformer_dag.computing.lane_tables import call_tables
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import ByChunk, Claimed, InWarehouse, PartRows, Planned, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import loss_deltas
from toolformer_dag.pipeline.chained_candidates import find_units_ahead
from toolformer_dag.pipeline.chained_losses import compute_chains, plan_chains, read_chained_calls, with_chains


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the scores of chains depend on, apart from calls and results: every tool that a chain may call."""
    later_tools = {later.tool.key: loss_deltas.tool_settings(later) for later in lane.then}
    return {**loss_deltas.settings(plan, lane), "depth": lane.depth, "then": later_tools}


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read. Losses of single calls come before chains, which use some of them."""
    tables = ["heuristic_subset", "loss_deltas"]
    for level in range(2, lane.depth + 1):
        tables += call_tables(level)
    return tuple(tables)


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of a shard's chains that are to be scored: the last call has a result and does not look ahead.

    claimed: losses that earlier shards of this run compute already. They are left out; the planned ones are added.
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    chains = _read_chains_with_unfit(output, shard, texts)
    to_score = chains.filter(pl.col("unfit").is_null())
    return plan_chains(worker, output, to_score, texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the scores of the chains of a shard from the stored losses: a row per chain, keyed by its last call.

    A chain is a sequence of calls at one position, each made after the results of the earlier calls, such as
    `[Calculator(3 * 4) -> 12] [Calculator(12 + 1) -> 13]`. Its row has the input and result of the last call, the
    losses in nats and their delta.

    `reason` says why a chain may not stay whatever its delta: looks_ahead, does_not_fit, not_finite, a reason of its
    last tool, or idle_first, where no later call needed the earlier results (`need` <= 0).
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    chains = _read_chains_with_unfit(output, shard, texts)
    to_score = chains.filter(pl.col("unfit").is_null())  # `unfit`: why a chain is not scored
    scored = with_chains(worker, output, to_score)  # adds the stored losses, `need` and `reason`
    unscored = chains.filter(pl.col("unfit").is_not_null())
    return loss_deltas.build_scored_rows(output, texts, scored=scored.calls, unscored=unscored, stores=scored.stores)


def _read_chains_with_unfit(output: TableOutput, shard: str, texts: pl.DataFrame) -> pl.DataFrame:
    """Return the chains of a shard whose calls have results, a row for the last call of each, with two more columns.

    - ahead: numbers and names of the input that the text has only after the call, else null
    - unfit: why the chain is not scored (looks_ahead), else null

    texts: the texts of the shard (text_digest, text, ...).
    """
    # A chain of level 2 has two calls; the lane's longest has `depth`.
    chains = pl.concat(read_chained_calls(output, shard, level) for level in range(2, output.lane.depth + 1))
    chains = chains.with_columns(ahead=find_units_ahead(output.lane, texts, chains))
    looks_ahead = pl.when(pl.col("ahead").is_not_null()).then(pl.lit("looks_ahead"))
    return chains.with_columns(unfit=looks_ahead)


STAGE = replace(
    loss_deltas.STAGE,
    name="chained_deltas",
    description="The losses and their delta for every chain with a result, kept or not.",
    settings=settings,
    reads=reads,
    make=ByChunk(chunks, compute_chains, rows),
    in_warehouse=InWarehouse("loss_deltas"),
)
