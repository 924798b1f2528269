"""evaluation/accuracy: held-out questions of the made world and the paper's benchmarks, with tools and without."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg
import polars as pl

from assets.finetuned_checkpoint import CHECKPOINT_KEYS, checkpoint_versions
from assets.metadata import frame_table, image
from assets.plan import OWNERS, Plan
from assets.plots import accuracy_bars
from assets.progress import progress
from toolformer_dag.decoding.generation import DECODING
from toolformer_dag.evaluation.accuracy_tables import ACCURACY, OUTCOMES, publish
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.catalogue import chosen_benchmarks, chosen_identity
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.stages import tool_results
from toolformer_dag.storage.lake import Lake
from toolformer_dag.synthetic.phenomena import TOOLS

if TYPE_CHECKING:
    from toolformer_dag.evaluation.asking import AskedBenchmark


def accuracy_settings(plan: Plan) -> dict[str, Any]:
    """What determines the answers beside the checkpoints. Raises BenchmarkError."""
    return {
        "questions": chosen_identity(plan.settings.evaluation),
        "decoding": {**plan.settings.decoding.model_dump(), "version": DECODING},
        "max_call_tokens": plan.sampling.max_call_tokens,
        "model": plan.model,
        "lanes": {lane.key: tool_results.settings(lane) for lane in plan.lanes},
    }


def accuracy(plan: Plan) -> dg.AssetsDefinition:
    """Questions right under four conditions, of the made world and of the paper's benchmarks (sections 4.2 and 4.3)."""
    determining = accuracy_settings(plan)

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
        from toolformer_dag.evaluation.accuracy_tables import accuracy_by_condition, outcome_table, score_table
        from toolformer_dag.evaluation.scores import score

        benchmarks = chosen_benchmarks(plan.settings.evaluation, [lane.key for lane in plan.lanes if lane.key in TOOLS])
        versions = checkpoint_versions(plan)  # before asking: what is replaced meanwhile makes this stale
        found = _ask(plan, benchmarks, context)
        table = score_table([score(group.outcomes) for group in found])
        stores = sorted({group.store for group in found})
        outcomes = outcome_table([outcome for group in found for outcome in group.outcomes])
        publish(lake, OUTCOMES, outcomes, determining, versions, stores)
        version = publish(lake, ACCURACY, table, determining, versions)
        percent = table.with_columns(pl.col("accuracy", "low", "high") * 100)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version),
            metadata={
                "dagster/row_count": table.height,
                "accuracy": dg.MetadataValue.md(frame_table(accuracy_by_condition(table), 20)),
                "left_out": {one.name: dict(one.left_out) for one in benchmarks if one.left_out},
                "plot": image(accuracy_bars(percent)),
            },
        )

    return scores


def _ask(plan: Plan, benchmarks: list[Benchmark], context: dg.AssetExecutionContext) -> "list[AskedBenchmark]":
    from toolformer_dag.evaluation.asking import benchmark_outcomes, compared
    from toolformer_dag.evaluation.scores import Condition, refuse_outage
    from toolformer_dag.model.loading import LanguageModel

    advance = progress(context)

    def asked(model: LanguageModel, conditions: list[Condition]) -> "Iterator[AskedBenchmark]":
        for condition in conditions:
            for benchmark in benchmarks:
                yield benchmark_outcomes(plan.settings, plan.lanes, model, condition, benchmark)

    found: list[AskedBenchmark] = []
    for group in compared(plan.settings, asked):
        refuse_outage(group.outcomes)
        found.append(group)
        advance(len(found), 4 * len(benchmarks))
    return found
