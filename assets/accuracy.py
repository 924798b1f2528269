"""evaluation/accuracy: held-out questions of the made world, answered with tools and without."""

from typing import TYPE_CHECKING

import dagster as dg
import polars as pl

from assets.conditions import CHECKPOINTS, compared
from assets.metadata import frame_table, image
from assets.plan import OWNERS, Plan
from assets.plots import accuracy_bars
from assets.progress import progress
from toolformer_dag.embedded.phenomenon import TOOLS
from toolformer_dag.evaluation.results import ACCURACY, OUTCOMES, publish
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.storage.lake import Lake

if TYPE_CHECKING:
    from toolformer_dag.evaluation.outcome import Outcome


def accuracy(plan: Plan) -> dg.AssetsDefinition:
    """What the calls are good for."""
    questions = plan.settings.evaluation.model_dump(include={"questions", "seed"})
    asked = {"questions": questions, "decoding": plan.settings.decoding.model_dump()}

    @dg.asset(
        key=["evaluation", "accuracy"],
        group_name="evaluation",
        deps=CHECKPOINTS,
        code_version=fingerprint({**asked, "lanes": [lane.key for lane in plan.lanes]}),
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
        publish(lake, OUTCOMES, outcome_table([outcome for group in found for outcome in group]), asked)
        version = publish(lake, ACCURACY, table, asked)
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
    from toolformer_dag.evaluation.accuracy import outcomes
    from toolformer_dag.evaluation.made_world import made_world

    settings, advance = plan.settings, progress(context)
    lanes = [lane for lane in plan.lanes if lane.key in TOOLS]
    benchmarks = [
        made_world(lane.key, settings.evaluation.questions, settings.evaluation.seed, "seen") for lane in lanes
    ]
    tools = {lane.tool.name: lane.tool for lane in plan.lanes}
    limits = {lane.tool.name: lane.limits for lane in plan.lanes}
    found: list[list[Outcome]] = []
    for model, conditions in compared(plan):
        for condition in conditions:
            for benchmark in benchmarks:
                found.append(
                    outcomes(
                        model,
                        benchmark,
                        tools,
                        condition,
                        max_new_tokens=settings.decoding.max_new_tokens,
                        max_call_tokens=plan.sampling.max_call_tokens,
                        limits=limits,
                    )
                )
                advance(len(found), 4 * len(benchmarks))
    return found
