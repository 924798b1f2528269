"""evaluation/accuracy: held-out questions of the made world, answered with tools and without."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import dagster as dg
import polars as pl

from assets.finetuned_checkpoint import CHECKPOINT_KEYS
from assets.metadata import frame_table, image
from assets.plan import OWNERS, Plan
from assets.plots import accuracy_bars
from assets.progress import progress
from toolformer_dag.embedded.phenomenon import TOOLS
from toolformer_dag.evaluation.results import ACCURACY, OUTCOMES, publish
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.stages import tool_results
from toolformer_dag.storage.lake import Lake

if TYPE_CHECKING:
    from toolformer_dag.evaluation.outcome import Outcome


def accuracy(plan: Plan) -> dg.AssetsDefinition:
    """What the calls are good for."""
    determining = {
        "questions": plan.settings.evaluation.model_dump(include={"questions", "seed"}),
        "decoding": plan.settings.decoding.model_dump(),
        "max_call_tokens": plan.sampling.max_call_tokens,
        "model": plan.model,
        "lanes": {lane.key: tool_results.settings(lane) for lane in plan.lanes},
    }

    @dg.asset(
        key=["evaluation", "accuracy"],
        group_name="evaluation",
        deps=CHECKPOINT_KEYS,
        code_version=fingerprint(determining),
        kinds={"pytorch"},
        owners=OWNERS,
        pool="gpu",
        description="Held-out questions per tool: base, base + C, Toolformer disabled, Toolformer; 95 % intervals.",
    )
    def scores(context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        from toolformer_dag.evaluation.outcome import score
        from toolformer_dag.evaluation.table import accuracy_by_condition, outcome_table, score_table

        found = _ask(plan, context)
        table = score_table([score(group) for group in found])
        publish(lake, OUTCOMES, outcome_table([outcome for group in found for outcome in group]), determining)
        version = publish(lake, ACCURACY, table, determining)
        percent = table.with_columns(pl.col("accuracy", "low", "high") * 100)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version),
            metadata={
                "dagster/row_count": table.height,
                "accuracy": dg.MetadataValue.md(frame_table(accuracy_by_condition(table), 20)),
                "plot": image(accuracy_bars(percent)),
            },
        )

    return scores


def _ask(plan: Plan, context: dg.AssetExecutionContext) -> "list[list[Outcome]]":
    from toolformer_dag.evaluation.accuracy import Condition
    from toolformer_dag.evaluation.compared import compared
    from toolformer_dag.evaluation.made_world_outcomes import made_world_outcomes
    from toolformer_dag.evaluation.outcome import refuse_outage
    from toolformer_dag.language_model.load import LanguageModel

    advance = progress(context)
    tools = [lane.key for lane in plan.lanes if lane.key in TOOLS]

    def asked(model: LanguageModel, conditions: list[Condition]) -> "Iterator[list[Outcome]]":
        for condition in conditions:
            for tool in tools:
                yield made_world_outcomes(plan.settings, plan.lanes, model, condition, tool, "seen")

    found: list[list[Outcome]] = []
    for outcomes in compared(plan.settings, asked):
        refuse_outage(outcomes)
        found.append(outcomes)
        advance(len(found), 4 * len(tools))
    return found
