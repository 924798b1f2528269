"""<tool>/loss_deltas: what every call with its result does to the model's own loss."""

import dagster as dg

from assets.checks import losses_finite, specs, unique_keys
from assets.metadata import image, result
from assets.plan import OWNERS, Plan
from assets.plots import delta_histogram
from assets.progress import progress
from resources.instance import SHARDS
from resources.language_model import LanguageModelResource
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.stages import loss_deltas as stage
from toolformer_dag.storage.lake import Lake


def loss_deltas(plan: Plan, lane: Lane) -> dg.AssetsDefinition:
    """A row per call that has a result: L_i of nothing, of e(c) and of e(c, r) (section 2, "Filtering API Calls")."""
    key = dg.AssetKey([lane.key, "loss_deltas"])

    @dg.asset(
        key=key,
        group_name=lane.key,
        deps=[dg.AssetKey([lane.key, read]) for read in ("heuristic_subset", "scored_candidates", "tool_results")],
        partitions_def=SHARDS,
        code_version=fingerprint(stage.settings(lane=lane, model=plan.model)),
        kinds={"pytorch", "parquet"},
        owners=OWNERS,
        pool="gpu",
        check_specs=specs(key, "unique_keys", "losses_finite"),
        description="The three losses and their delta for every call, kept or not (paper, section 2).",
    )
    def deltas(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], language_model: LanguageModelResource
    ) -> dg.MaterializeResult:
        report = stage.loss_deltas(
            lake,
            lane,
            context.partition_key,
            engine=language_model.engine,
            model=plan.model,
            chunk_texts=plan.settings.execution.chunk_texts,
            progress=progress(context),
        )
        rows = lake.table(f"{lane.key}/loss_deltas").scan([context.partition_key])
        plot = image(delta_histogram(rows.select("delta").collect(), lane.tau_f))
        return result(report, rows, [unique_keys(rows, stage.STAGE), losses_finite(rows)], plot=plot)

    return deltas
