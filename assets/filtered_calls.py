"""<tool>/filtered_calls: the calls that lowered the loss by tau_f or more, one per position."""

import dagster as dg

from assets.checks import kept_at_tau_f, specs, unique_keys
from assets.metadata import result
from assets.plan import OWNERS, Plan
from assets.shard_list import KEY as SHARD_LIST
from resources.instance import shard_names
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.stages import filtered_calls as stage
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE


def filtered_calls(plan: Plan, lane: Lane) -> dg.AssetsDefinition:
    """The stage that decides, in SQL; the threshold is part of its code version and of nobody else's."""
    key = dg.AssetKey([lane.key, "filtered_calls"])
    examples = plan.settings.training.examples_per_tool

    @dg.asset(
        key=key,
        group_name=lane.key,
        deps=[dg.AssetKey([lane.key, "loss_deltas"]), SHARD_LIST],
        code_version=fingerprint(stage.settings(lane=lane, examples_per_tool=examples)),
        kinds={"duckdb", "sql"},
        owners=OWNERS,
        check_specs=specs(key, "unique_keys", "kept_at_tau_f"),
        description=f"Calls with L- - L+ >= tau_f = {lane.tau_f}: the best one per position (paper, section 2).",
    )
    def kept(context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        shards = shard_names(context.instance)
        report = stage.filtered_calls(lake, lane, shards, examples_per_tool=examples)
        rows = lake.table(f"{lane.key}/filtered_calls").scan([WHOLE])
        checks = [unique_keys(rows, stage.STAGE), kept_at_tau_f(rows, lane.tau_f)]
        return result(report, rows, checks, tau_f=dg.MetadataValue.float(lane.tau_f))

    return kept
