"""The stages of a control: its calls scored with other results, single calls and chains, and what their asset shows.

The tables have the columns of scored calls, and the number of the swap: whatever counts calls reads both kinds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shown import ChanceCurves, Shown, ShownValue
from toolformer_dag.computing.stage import (
    CALL,
    CALL_KEY,
    MADE_BY,
    SCORED,
    ByChunk,
    Claimed,
    Column,
    InWarehouse,
    PartRows,
    Planned,
    Rejected,
    Stage,
    StageAsset,
    TableOutput,
    count_by_reason,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.chained_losses import compute_chains, plan_chains, with_chains
from toolformer_dag.pipeline.chance import query_chance_tables
from toolformer_dag.pipeline.control_calls import swap_call_results
from toolformer_dag.pipeline.controls import Control
from toolformer_dag.pipeline.losses import (
    LOSSES_FINITE,
    CallsWithLosses,
    compute_losses,
    losses_settings,
    plan_losses,
    with_losses,
)
from toolformer_dag.texts.chains import parse_chain, to_chain_json

SWAP_KEY = (*CALL_KEY, "swap")


@cache
def control_stage(control: Control) -> Stage:
    """Return the stage that scores a sample of the single calls again, with results that cannot help.

    control: which results those are, such as results of other documents. What passes the filter with them passes by
        chance.
    """
    functions = _SingleCalls(control)
    return Stage(
        name=control.name,
        description=f"Control: a sample of the scored calls, scored again with {control.results}.",
        columns={
            **CALL,
            "swap": Column(pl.Int32(), "number of the swap, of those of this call: each with another result"),
            **{name: column for name, column in SCORED.items() if name not in CALL},  # losses, delta, reason, ...
            "result": Column(pl.String(), control.result),
        },
        key=SWAP_KEY,
        settings=functions.settings,
        reads=("heuristic_subset", "loss_deltas", "scored_candidates"),
        inputs=("heuristic_subset", "loss_deltas"),  # those whose changes make the rows out of date
        pool="gpu",
        kinds=frozenset({"pytorch", "parquet"}),
        checks={"losses_finite": LOSSES_FINITE},
        make=ByChunk(functions.chunks, compute_losses, functions.rows),
        asset=StageAsset(shows=functions.kept_by_chance),
    )


@cache
def chained_control_stage(control: Control) -> Stage:
    """Return the stage that scores a sample of the chains again, with last results that cannot help.

    A chain is a sequence of calls at one position, each made after the results of the earlier ones.

    control: which results those are, such as results of other documents.
    """
    functions = _Chains(control)
    return replace(
        control_stage(control),  # columns, key and settings are those of single calls
        name=control.chains_name,
        description=f"Control: a sample of the chains, scored again with last {control.results}.",
        reads=("heuristic_subset", "chained_deltas"),
        inputs=("heuristic_subset", "chained_deltas"),
        make=ByChunk(functions.chunks, compute_chains, functions.rows),
        in_warehouse=InWarehouse(control.name),  # single calls and chains share a table of the warehouse
        asset=StageAsset(),  # shows nothing: the asset of single calls counts chains too
    )


@dataclass(frozen=True, slots=True)
class _SingleCalls:
    """The functions of the stage of a control for single calls: calls scored again with results that cannot help."""

    control: Control

    def settings(self, plan: Plan, lane: Lane) -> Mapping[str, Any]:
        """Return what the rows depend on, apart from the scored calls; a change makes the table out of date."""
        return {**losses_settings(plan, lane), **self.control.settings(plan)}

    def chunks(self, worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
        """Plan the losses of the swapped calls of a shard."""
        swapped = swap_call_results(self.control, output, shard, "loss_deltas")
        return plan_losses(worker, output, swapped.calls, swapped.texts, claimed)

    def rows(self, worker: Worker, output: TableOutput, shard: str) -> PartRows:
        """Return the control of a shard: calls with other results, scored as if these were their own.

        Calls of up to `evaluation.swapped_texts` texts are taken; a call has up to `control.swaps` rows, each with
        another result. Other calls are counted as not_sampled, no_other_result, or with their reason in loss_deltas.
        """
        swapped = swap_call_results(self.control, output, shard, "loss_deltas")
        scored = with_losses(worker, output, swapped.calls)
        return _build_part_rows(self.control, output, scored, swapped.left_out)

    def kept_by_chance(self, output: TableOutput) -> Shown:
        """Return what Dagster's page shows by label: how many calls pass the filter with results that cannot help.

        Beside single values (`_build_shown_values`), "kept" is a table with the counts at each threshold, and "kept by
        chance" the false discovery rate as a curve over the thresholds, if there are any.
        """
        # Both tables have a row per threshold: counts in `statistics`, false discovery rates in `rates`.
        tables = query_chance_tables(output.plan, output.lane, self.control)
        shown = _build_shown_values(tables.statistics)
        shown["kept"] = _format_statistics(tables.statistics)
        if not tables.rates.is_empty():
            shown["kept by chance"] = ChanceCurves(tables.rates)
        return shown


@dataclass(frozen=True, slots=True)
class _Chains:
    """The functions of the stage of a control for chains: calls at one position, of which the last is swapped."""

    control: Control

    def chunks(self, worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
        """Plan the losses of the chains of a shard with other last results."""
        swapped = swap_call_results(self.control, output, shard, "chained_deltas")
        return plan_chains(worker, output, _with_swapped_result(swapped.calls), swapped.texts, claimed)

    def rows(self, worker: Worker, output: TableOutput, shard: str) -> PartRows:
        """Return the control of a shard, as for single calls: chains scored with other last results."""
        swapped = swap_call_results(self.control, output, shard, "chained_deltas")
        scored = with_chains(worker, output, _with_swapped_result(swapped.calls))
        return _build_part_rows(self.control, output, scored, swapped.left_out)


def _build_part_rows(control: Control, output: TableOutput, scored: CallsWithLosses, left_out: Rejected) -> PartRows:
    """Return the rows of a control; the records of both tables name the stage of single calls.

    left_out: how many calls were not swapped, by shard and reason.
    """
    table = output.stage.shaped(scored.calls).sort(SWAP_KEY)
    return PartRows([table], left_out + count_by_reason(table), scored.stores, facts={MADE_BY: control.name})


def _with_swapped_result(calls: pl.DataFrame) -> pl.DataFrame:
    """Put the swapped result of each call (column `result`) into the last call of its chain (column `chain`, JSON).

    The column `others` becomes null, by which only losses are computed for the chain, and no need: how much the later
    calls depend on the earlier results, in which the last result has no part.
    """
    chains = []
    for chain, swapped_result in calls.select("chain", "result").iter_rows():
        *before, last = parse_chain(chain)
        chains.append(to_chain_json([*before, replace(last, result=swapped_result)]))
    return calls.with_columns(chain=pl.Series(chains, dtype=pl.String), others=pl.lit(None, pl.String))


def _build_shown_values(statistics: pl.DataFrame) -> dict[str, ShownValue]:
    """Return counts and rates of the thresholds with swapped calls, by label; first all counts, then the rates.

    - "kept by chance at 0.5": how many positions have a call at the threshold 0.5 by chance
    - "false discovery rate at 0.5": their share of the positions with a call; left out if it is 0 or unknown
    """
    measured = statistics.filter(pl.col("swaps") > 0)
    shown: dict[str, ShownValue] = {}
    for row in measured.iter_rows(named=True):
        shown[f"kept by chance at {row['tau_f']:g}"] = row["by_chance"]
    for row in measured.filter(pl.col("fdr") != 0).iter_rows(named=True):
        shown[f"false discovery rate at {row['tau_f']:g}"] = row["fdr"]
    return shown


def _format_statistics(statistics: pl.DataFrame) -> pl.DataFrame:
    """Return swapped_statistics for the page, with a remark in `by_chance` where there are too few swaps."""
    too_few = pl.lit("too few swaps to tell")
    count = pl.col("by_chance").cast(pl.String)
    by_chance = pl.when("too_few_swaps").then(too_few).otherwise(count)
    return statistics.with_columns(by_chance=by_chance).drop("tool", "too_few_swaps", strict=False)
