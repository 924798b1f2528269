"""<tool>/tool_results: what the tool answered, once per distinct input in its context."""

import dagster as dg

from assets.checks import specs, unique_keys
from assets.metadata import result
from assets.plan import OWNERS, Plan
from assets.prepared_tool import prepares
from assets.progress import progress
from resources.instance import SHARDS
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.stages import tool_results as stage
from toolformer_dag.storage.lake import Lake


def tool_results(plan: Plan, lane: Lane) -> dg.AssetsDefinition:
    """A row per distinct input and context: the result, or why there is none (section 2, "Executing API Calls")."""
    key = dg.AssetKey([lane.key, "tool_results"])
    deps = [dg.AssetKey([lane.key, "scored_candidates"]), dg.AssetKey([lane.key, "heuristic_subset"])]  # its contexts
    if prepares(lane.tool):
        deps.append(dg.AssetKey([lane.key, "prepared_tool"]))

    @dg.asset(
        key=key,
        group_name=lane.key,
        deps=deps,
        partitions_def=SHARDS,
        code_version=fingerprint(stage.settings(lane=lane)),
        kinds={"python", "parquet"},
        owners=OWNERS,
        check_specs=specs(key, "unique_keys"),
        description=f"{lane.tool.name}'s result per distinct input, or the reason why there is none.",
    )
    def results(context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        report = stage.tool_results(
            lake,
            lane,
            context.partition_key,
            chunk_calls=plan.settings.execution.chunk_calls,
            progress=progress(context),
        )
        rows = lake.table(f"{lane.key}/tool_results").scan([context.partition_key])
        return result(report, rows, [unique_keys(rows, stage.STAGE)])

    return results
