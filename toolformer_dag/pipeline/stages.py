"""All stages in the order in which they run, the tables of a plan, and what the warehouse is made of."""

from collections.abc import Sequence

from toolformer_dag.lake.warehouse import WarehouseTable
from toolformer_dag.pipeline import (
    augmented_corpus,
    filtered_calls,
    heuristic_subset,
    loss_deltas,
    raw_shards,
    scored_candidates,
    swapped_results,
    tool_results,
)
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stage import Stage, TableOutput

LANE_STAGES: tuple[Stage, ...] = (
    heuristic_subset.STAGE,
    scored_candidates.STAGE,
    tool_results.STAGE,
    loss_deltas.STAGE,
    swapped_results.STAGE,
    filtered_calls.STAGE,
)
STAGES: tuple[Stage, ...] = (raw_shards.STAGE, *LANE_STAGES, augmented_corpus.STAGE)


def table_outputs(plan: Plan) -> list[TableOutput]:
    """Return every table of a plan: shards, a lane per tool, the corpus; each after what it reads."""
    lanes = [TableOutput(stage, plan, lane) for lane in plan.lanes for stage in LANE_STAGES]
    return [TableOutput(raw_shards.STAGE, plan), *lanes, TableOutput(augmented_corpus.STAGE, plan)]


def warehouse_tables(outputs: Sequence[TableOutput]) -> list[WarehouseTable]:
    """Return the warehouse's tables: one per stage, over the tables of all lanes."""
    by_stage: dict[str, list[TableOutput]] = {}
    for output in outputs:
        by_stage.setdefault(output.stage.name, []).append(output)
    return [some[0].warehouse_table([output.name for output in some]) for some in by_stage.values()]
