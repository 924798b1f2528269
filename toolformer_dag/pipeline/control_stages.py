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
    CALL_ID_COLUMNS,
    CALL_KEY,
    MADE_BY_FIELD,
    SCORED_COLUMNS,
    ByChunk,
    ClaimedKeys,
    Column,
    InWarehouse,
    PartRows,
    Planned,
    RejectionCounts,
    Stage,
    StageAsset,
    TableOutput,
    count_rejected_rows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.chained_losses import compute_chain_losses, plan_chain_losses, with_chain_losses
from toolformer_dag.pipeline.chance import query_chance_tables
from toolformer_dag.pipeline.control_calls import swap_call_results
from toolformer_dag.pipeline.controls import Control
from toolformer_dag.pipeline.losses import (
    LOSSES_FINITE_CHECK,
    CallsWithLosses,
    collect_losses_settings,
    compute_losses,
    plan_losses,
    with_losses,
)
from toolformer_dag.texts.chains import format_chain_json, parse_chain

SWAP_KEY = (*CALL_KEY, "swap")


@cache
def build_control_stage(control: Control) -> Stage:
    """Return the stage (a step with its table) that scores a sample of the single calls again with swapped results.

    A swapped result, such as that of a call in another document, cannot help. A call that passes the filter with it
    passes by chance.

    Args:
        control: Says which results those are, such as results of other documents.
    """
    functions = _SingleCallFunctions(control)
    # Losses, delta, reason, and whatever else a scored call has.
    score_columns = {name: column for name, column in SCORED_COLUMNS.items() if name not in CALL_ID_COLUMNS}

    return Stage(
        name=control.name,
        description=f"Control: a sample of the scored calls, scored again with {control.results_description}.",
        columns={
            **CALL_ID_COLUMNS,
            "swap": Column(pl.Int32(), "number of the swap, of those of this call: each with another result"),
            **score_columns,
            "result": Column(pl.String(), control.result_description),
        },
        key_columns=SWAP_KEY,
        collect_settings=functions.settings,
        reads=("heuristic_subset", "loss_deltas", "scored_candidates"),
        # A change of these tables makes the rows out of date. Of scored_candidates only the most probable position of
        # each text is read, which is the same whatever the settings of sampling.
        inputs=("heuristic_subset", "loss_deltas"),
        pool="gpu",
        kinds=frozenset({"pytorch", "parquet"}),
        checks={"losses_finite": LOSSES_FINITE_CHECK},
        row_maker=ByChunk(functions.chunks, compute_losses, functions.rows),
        asset=StageAsset(collect_shown_values=functions.collect_shown_values),
    )


@cache
def build_chained_control_stage(control: Control) -> Stage:
    """Return the stage (a step with its table) that scores a sample of the chains again with swapped last results.

    A chain is a sequence of calls at one position, each made after the results of the earlier ones. A chain that passes
    the filter with such a last result, which cannot help, passes by chance.

    Args:
        control: Says which results those are, such as results of other documents.
    """
    functions = _ChainFunctions(control)
    return replace(
        build_control_stage(control),  # columns, key and settings are those of single calls
        name=control.chained_stage_name,
        description=f"Control: a sample of the chains, scored again with last {control.results_description}.",
        reads=("heuristic_subset", "chained_deltas"),
        inputs=("heuristic_subset", "chained_deltas"),
        row_maker=ByChunk(functions.chunks, compute_chain_losses, functions.rows),
        warehouse_form=InWarehouse(control.name),  # single calls and chains share a table of the warehouse
        asset=StageAsset(),  # shows nothing: the asset of single calls counts chains too
    )


@dataclass(frozen=True, slots=True)
class _SingleCallFunctions:
    """The functions of the stage of a control for single calls: calls scored again with results that cannot help."""

    control: Control

    def settings(self, plan: Plan, lane: Lane) -> Mapping[str, Any]:
        """Return what the rows depend on, apart from the scored calls. A change makes the table out of date."""
        return {**collect_losses_settings(plan, lane), **self.control.collect_settings(plan)}

    def chunks(self, worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
        """Plan the losses of a shard's calls with other results.

        Args:
            claimed_keys: The losses that earlier shards of this run compute already. The newly planned ones are added.
        """
        swapped = swap_call_results(self.control, output, shard, "loss_deltas")
        return plan_losses(worker, output, swapped.calls, swapped.texts, claimed_keys)

    def rows(self, worker: Worker, output: TableOutput, shard: str) -> PartRows:
        """Return the control of a shard: calls with other results, scored as if these were their own.

        The calls of up to `evaluation.swapped_texts` texts are taken; a call has up to `control.swaps` rows, each with
        another result. Other calls are counted as not_sampled, no_other_result, or with their reason in loss_deltas.
        """
        swapped = swap_call_results(self.control, output, shard, "loss_deltas")
        calls_with_losses = with_losses(worker, output, swapped.calls)
        return _build_part_rows(self.control, output, calls_with_losses, swapped.left_out_counts)

    def collect_shown_values(self, output: TableOutput) -> Shown:
        """Return what Dagster's page shows: how many calls pass the filter with results that cannot help.

        Returns:
            The shown values by label:

            - "kept by chance at 0.5", "false discovery rate at 0.5" and so on: numbers for single thresholds
            - "kept": a table with the counts at each threshold
            - "kept by chance": the false discovery rate as a curve over the thresholds (left out if there are no rates)
        """
        # Both tables have a row per threshold: counts in `statistics`, false discovery rates in `rates`.
        chance_tables = query_chance_tables(output.plan, output.lane, self.control)

        shown_values = _build_shown_values(chance_tables.statistics)
        shown_values["kept"] = _build_shown_statistics(chance_tables.statistics)
        if not chance_tables.rates.is_empty():
            shown_values["kept by chance"] = ChanceCurves(chance_tables.rates)
        return shown_values


@dataclass(frozen=True, slots=True)
class _ChainFunctions:
    """The functions of the stage of a control for chains: calls at one position, the last with another result."""

    control: Control

    def chunks(self, worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
        """Plan the losses of a shard's chains with other last results.

        Args:
            claimed_keys: The losses that earlier shards of this run compute already. The newly planned ones are added.
        """
        swapped = swap_call_results(self.control, output, shard, "chained_deltas")
        chains = _with_swapped_last_results(swapped.calls)
        return plan_chain_losses(worker, output, chains, swapped.texts, claimed_keys)

    def rows(self, worker: Worker, output: TableOutput, shard: str) -> PartRows:
        """Return the control of a shard, as for single calls: chains scored with other last results."""
        swapped = swap_call_results(self.control, output, shard, "chained_deltas")
        chains = _with_swapped_last_results(swapped.calls)
        chains_with_losses = with_chain_losses(worker, output, chains)
        return _build_part_rows(self.control, output, chains_with_losses, swapped.left_out_counts)


def _build_part_rows(
    control: Control, output: TableOutput, calls_with_losses: CallsWithLosses, left_out_counts: RejectionCounts
) -> PartRows:
    """Build what a control stores for a shard: a row per swap, which is a call that was scored with another result.

    Args:
        control: The control.
        output: The table to build.
        calls_with_losses: The swaps with their losses.
        left_out_counts: How many calls got no other result, by (shard, reason).
    """
    control_rows = output.stage.shape_frame(calls_with_losses.calls).sort(SWAP_KEY)
    return PartRows(
        frames=[control_rows],
        rejection_counts=left_out_counts + count_rejected_rows(control_rows),
        store_names=calls_with_losses.store_names,
        # The stage of single calls. The table of chains names it too, so that both are counted together.
        record_fields={MADE_BY_FIELD: control.name},
    )


def _with_swapped_last_results(swapped_chains: pl.DataFrame) -> pl.DataFrame:
    """Put the swapped result of each call (column `result`) into the last call of its chain (column `chain`, JSON).

    The column `others` becomes null, so that only losses are computed for the chain, and not the figure `need`. It says
    how much the later calls depend on the earlier results, which does not change with the last result.
    """
    chain_jsons = []
    for chain_json, swapped_result in swapped_chains.select("chain", "result").iter_rows():
        *earlier_links, last_link = parse_chain(chain_json)
        swapped_link = replace(last_link, result=swapped_result)
        chain_jsons.append(format_chain_json([*earlier_links, swapped_link]))

    return swapped_chains.with_columns(chain=pl.Series(chain_jsons, dtype=pl.String), others=pl.lit(None, pl.String))


def _build_shown_values(statistics: pl.DataFrame) -> dict[str, ShownValue]:
    """Return how many calls would be kept by chance at each threshold of the filter, by label.

    A call is kept by chance if it reaches the threshold with a swapped result, one that cannot help.

    Args:
        statistics: A row per threshold (`tau_f`), from the table swapped_statistics.

    Returns:
        All counts, then the rates, such as:
        - "kept by chance at 0.5": how many positions have a call at the threshold 0.5 by chance
        - "false discovery rate at 0.5": their share of the positions with a call (left out if it is 0 or unknown)
    """
    with_swaps = statistics.filter(pl.col("swaps") > 0)
    with_rate = with_swaps.filter(pl.col("fdr") != 0)  # leaves out rows whose rate is null, too

    shown_values: dict[str, ShownValue] = {}
    for row in with_swaps.iter_rows(named=True):
        shown_values[f"kept by chance at {row['tau_f']:g}"] = row["by_chance"]
    for row in with_rate.iter_rows(named=True):
        shown_values[f"false discovery rate at {row['tau_f']:g}"] = row["fdr"]
    return shown_values


def _build_shown_statistics(statistics: pl.DataFrame) -> pl.DataFrame:
    """Return the table of kept calls at each threshold, as the asset's page shows it.

    `by_chance` is how many of them are kept by chance, estimated from calls with swapped results. If there are too few
    of these, it is a remark instead.

    Args:
        statistics: A row per threshold, from the table swapped_statistics.
    """
    remark = pl.lit("too few swaps to tell")
    count = pl.col("by_chance").cast(pl.String)
    count_or_remark = pl.when("too_few_swaps").then(remark).otherwise(count)
    return statistics.with_columns(by_chance=count_or_remark).drop("tool", "too_few_swaps", strict=False)
