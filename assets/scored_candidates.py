"""<tool>/scored_candidates: where the model would call the tool, and the calls it proposes there."""

import dagster as dg

from assets.checks import specs, unique_keys
from assets.metadata import result
from assets.plan import OWNERS, Plan
from assets.progress import progress
from resources.instance import SHARDS
from resources.language_model import LanguageModelResource
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.stages import scored_candidates as stage
from toolformer_dag.storage.lake import Lake


def scored_candidates(plan: Plan, lane: Lane) -> dg.AssetsDefinition:
    """A row per sampled call: its position, p_i and what was written (section 2, "Sampling API Calls")."""
    key = dg.AssetKey([lane.key, "scored_candidates"])

    @dg.asset(
        key=key,
        group_name=lane.key,
        deps=[dg.AssetKey([lane.key, "heuristic_subset"])],
        partitions_def=SHARDS,
        code_version=fingerprint(stage.settings(lane=lane, model=plan.model, sampling=plan.sampling)),
        kinds={"pytorch", "parquet"},
        owners=OWNERS,
        pool="gpu",
        check_specs=specs(key, "unique_keys"),
        description=(
            f"Up to k={lane.k} positions with p_i > {lane.tau_s} per text and m={lane.m} sampled {lane.tool.name} "
            "calls each (paper, section 2); what was discarded stays, with its reason."
        ),
    )
    def candidates(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], language_model: LanguageModelResource
    ) -> dg.MaterializeResult:
        report = stage.scored_candidates(
            lake,
            lane,
            context.partition_key,
            engine=language_model.engine,
            model=plan.model,
            sampling=plan.sampling,
            chunk_texts=plan.settings.execution.chunk_texts,
            progress=progress(context),
        )
        rows = lake.table(f"{lane.key}/scored_candidates").scan([context.partition_key])
        return result(report, rows, [unique_keys(rows, stage.STAGE)])

    return candidates
