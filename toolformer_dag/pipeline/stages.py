"""List all stages in the order in which they run, the tables of a plan, and the tables of the warehouse."""

from collections.abc import Sequence

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decided_calls import DECIDED_CALLS_TABLE, build_decided_table
from toolformer_dag.pipeline import (
    augmented_corpus,
    chained_candidates,
    chained_deltas,
    controls,
    filtered_calls,
    heldout_texts,
    heuristic_subset,
    left_over_texts,
    loss_deltas,
    proposals,
    raw_shards,
    removed_documents,
    scored_candidates,
    tool_results,
)
from toolformer_dag.pipeline.control_stages import build_chained_control_stage, build_control_stage

LANE_STAGES: tuple[Stage, ...] = (
    heuristic_subset.STAGE,
    scored_candidates.STAGE,
    tool_results.STAGE,
    loss_deltas.STAGE,
    *map(build_control_stage, controls.CONTROLS),
    filtered_calls.STAGE,
)
CORPUS_STAGES: tuple[Stage, ...] = (
    raw_shards.STAGE,
    removed_documents.SCREENED_STAGE,
    removed_documents.STAGE,
    heldout_texts.STAGE,
)
STAGES: tuple[Stage, ...] = (*CORPUS_STAGES, *LANE_STAGES, augmented_corpus.STAGE)


def list_lane_stages(plan: Plan, lane: Lane) -> tuple[Stage, ...]:
    """Return the stages of a lane (a tool with its settings) in the order in which they run. Each makes a table.

    Raises:
        ValueError: A stage reads a table of the lane that no stage before it makes.
    """
    stages = [
        _choose_text_stage(plan),
        proposals.build_candidates_stage(lane),
        tool_results.STAGE,
        *_list_chained_call_stages(lane),
        *_list_score_stages(lane),
        filtered_calls.STAGE,
    ]
    _refuse_unknown_reads(plan, lane, stages)
    return tuple(stages)


def _choose_text_stage(plan: Plan) -> Stage:
    """Return the stage that selects texts. In a later round of annotation, it takes the texts without a kept call."""
    is_later_round = plan.previous_plan is not None
    return left_over_texts.STAGE if is_later_round else heuristic_subset.STAGE


def _list_chained_call_stages(lane: Lane) -> list[Stage]:
    """Return the stages that sample and run calls after other calls, level by level.

    A call that uses the result of a first call has the level 2, and so on.
    """
    stages: list[Stage] = []
    for level in range(2, lane.max_chain_calls + 1):
        stages += chained_candidates.build_level_stages(level)
    return stages


def _list_score_stages(lane: Lane) -> list[Stage]:
    """Return the stages that score calls, first single calls, then chains (several calls in a row).

    Calls are scored with their own results, then with those of each control, which cannot help.
    """
    stages = [loss_deltas.STAGE, *map(build_control_stage, controls.CONTROLS)]
    if lane.max_chain_calls > 1:
        stages += [chained_deltas.STAGE, *map(build_chained_control_stage, controls.CONTROLS)]
    return stages


def _refuse_unknown_reads(plan: Plan, lane: Lane, stages: Sequence[Stage]) -> None:
    """Check that every stage of a lane reads only tables that an earlier stage makes.

    Raises:
        ValueError: A stage reads a table of its lane that no stage before it makes.
    """
    earlier_tables: set[str] = set()

    for stage in stages:
        # The inner tables of a stage are made before its own table, which reads them.
        earlier_tables.update(inner.name for inner in stage.inner_stages)

        unknown_tables = _list_lane_tables_read(stage, plan, lane) - earlier_tables
        if unknown_tables:
            raise ValueError(
                f"stage {stage.name} of {lane.key} reads {min(unknown_tables)}, which no stage before it makes"
            )

        earlier_tables.add(stage.name)


def _list_lane_tables_read(stage: Stage, plan: Plan, lane: Lane) -> set[str]:
    """Return the names of the tables that a stage reads from its own lane.

    A name with a slash, such as "calculator/loss_deltas", is a table outside the lane.
    """
    tables_read = stage.reads(plan, lane) if callable(stage.reads) else stage.reads
    return {name for name in tables_read if "/" not in name}


def list_table_outputs(plan: Plan) -> list[TableOutput]:
    """Return every table of a plan, each after the tables that it reads.

    First come the tables of the documents, then those of the lanes (tools), then the corpus C*.
    """
    return [
        *(TableOutput(stage, plan) for stage in CORPUS_STAGES),
        *_list_lane_outputs(plan),
        TableOutput(augmented_corpus.STAGE, plan),
    ]


def list_shown_outputs(plan: Plan) -> list[TableOutput]:
    """Return the tables that a plan's warehouse shows.

    The lanes of earlier rounds come first. They are shown because C* (the corpus to finetune on) holds their calls
    too.
    """
    *earlier_plans, _ = plan.plans_by_round  # the last one is `plan` itself

    earlier_outputs: list[TableOutput] = []
    for earlier_plan in earlier_plans:
        earlier_outputs += _list_lane_outputs(earlier_plan)

    return [*earlier_outputs, *list_table_outputs(plan)]


def _list_lane_outputs(plan: Plan) -> list[TableOutput]:
    """Return the tables of all lanes of a plan, lane by lane."""
    outputs = []
    for lane in plan.lanes:
        for stage in list_lane_stages(plan, lane):
            outputs.append(TableOutput(stage, plan, lane))
    return outputs


def build_warehouse_tables(outputs: Sequence[TableOutput]) -> list[WarehouseTable]:
    """Return the tables of the warehouse (a DuckDB file for queries) over the tables of the lake.

    The lake has a table for each stage and lane (a tool). The warehouse has one for each stage, over all lanes. Stages
    of single calls and of chains share a table (`warehouse_form.name`).

    Args:
        outputs: The tables of the lake.

    Returns:
        The tables in the order in which their first lake tables come. The last one holds the reason of every scored
        call.
    """
    score_sql_by_lane = _map_lane_to_score(outputs)

    tables = []
    for outputs_of_table in _group_outputs_by_warehouse_table(outputs).values():
        source_names = [output.name for output in outputs_of_table]
        # The warehouse's table has the columns and comments of the first lake table.
        first_output = outputs_of_table[0]
        tables.append(first_output.build_warehouse_table(source_names, score_sql_by_lane))

    return [*tables, _build_decided_table(outputs)]


def _map_lane_to_score(outputs: Sequence[TableOutput]) -> dict[str, str]:
    """Map the key of each lane to the SQL expression of its score. Lanes with the paper's score are left out."""
    score_sql_by_lane: dict[str, str] = {}
    for output in outputs:
        if output.lane_or_none is not None:
            score_sql_by_lane.update(output.lane.score_by_lane_key)
    return score_sql_by_lane


def _group_outputs_by_warehouse_table(outputs: Sequence[TableOutput]) -> dict[str, list[TableOutput]]:
    """Group tables of the lake by the name of their table in the warehouse."""
    outputs_by_table: dict[str, list[TableOutput]] = {}
    for output in outputs:
        table_name = output.stage.warehouse_form.name or output.stage.name
        outputs_by_table.setdefault(table_name, []).append(output)
    return outputs_by_table


def _build_decided_table(outputs: Sequence[TableOutput]) -> WarehouseTable:
    """Return the warehouse's table with the reason of each scored call.

    Its rows come from the tables that the filter of each lane publishes beside its own table.
    """
    filter_outputs = [output for output in outputs if DECIDED_CALLS_TABLE in output.stage.sibling_table_names]
    source_names = [output.get_lane_table(DECIDED_CALLS_TABLE).name for output in filter_outputs]
    return build_decided_table(source_names)
