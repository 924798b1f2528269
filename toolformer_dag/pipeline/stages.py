"""List all stages in the order in which they run, the tables of a plan, and the tables of the warehouse."""

from collections.abc import Sequence

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decided_calls import DECIDED, decided_table
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
from toolformer_dag.pipeline.control_stages import chained_control_stage, control_stage

LANE_STAGES: tuple[Stage, ...] = (
    heuristic_subset.STAGE,
    scored_candidates.STAGE,
    tool_results.STAGE,
    loss_deltas.STAGE,
    *map(control_stage, controls.CONTROLS),
    filtered_calls.STAGE,
)
CORPUS: tuple[Stage, ...] = (
    raw_shards.STAGE,
    removed_documents.SCREENED,
    removed_documents.STAGE,
    heldout_texts.STAGE,
)
STAGES: tuple[Stage, ...] = (*CORPUS, *LANE_STAGES, augmented_corpus.STAGE)


def list_lane_stages(plan: Plan, lane: Lane) -> tuple[Stage, ...]:
    """Return the stages (tables) of a lane, a tool with its settings, in the order in which they run.

    Raises ValueError if a stage reads a table of the lane that no stage before it makes.
    """
    stages = [
        _choose_text_stage(plan),
        proposals.stage(lane),
        tool_results.STAGE,
        *_list_chained_call_stages(lane),
        *_list_score_stages(lane),
        filtered_calls.STAGE,
    ]
    _refuse_unknown_reads(plan, lane, stages)
    return tuple(stages)


def _choose_text_stage(plan: Plan) -> Stage:
    """Return the stage that selects texts; in a later round those without a kept call."""
    is_later_round = plan.start is not None
    return left_over_texts.STAGE if is_later_round else heuristic_subset.STAGE


def _list_chained_call_stages(lane: Lane) -> list[Stage]:
    """Return the stages that sample and run the calls after others, level by level: a second call has the level 2."""
    stages: list[Stage] = []
    for level in range(2, lane.depth + 1):
        stages += chained_candidates.stages(level)
    return stages


def _list_score_stages(lane: Lane) -> list[Stage]:
    """Return the stages that score calls with their results and with those of the controls; chains come last."""
    stages = [loss_deltas.STAGE, *map(control_stage, controls.CONTROLS)]
    if lane.depth > 1:
        stages += [chained_deltas.STAGE, *map(chained_control_stage, controls.CONTROLS)]
    return stages


def _refuse_unknown_reads(plan: Plan, lane: Lane, stages: Sequence[Stage]) -> None:
    """Raise ValueError if a stage reads a table of its lane that no stage before it makes."""
    earlier_tables: set[str] = set()
    for stage in stages:
        earlier_tables.update(inner.name for inner in stage.inner)
        unknown = _list_tables_of_lane(stage, plan, lane) - earlier_tables
        if unknown:
            raise ValueError(f"stage {stage.name} of {lane.key} reads {min(unknown)}, which no stage before it makes")
        earlier_tables.add(stage.name)


def _list_tables_of_lane(stage: Stage, plan: Plan, lane: Lane) -> set[str]:
    """Return the names of the tables of its lane that a stage reads: without a slash, which means another lane."""
    reads = stage.reads(plan, lane) if callable(stage.reads) else stage.reads
    return {name for name in reads if "/" not in name}


def list_table_outputs(plan: Plan) -> list[TableOutput]:
    """Return every table of a plan, each after the tables that it reads: documents, lanes (tools), the corpus C*."""
    return [
        *(TableOutput(stage, plan) for stage in CORPUS),
        *_list_lane_outputs(plan),
        TableOutput(augmented_corpus.STAGE, plan),
    ]


def list_shown_outputs(plan: Plan) -> list[TableOutput]:
    """Return the tables that a plan's warehouse shows, earlier projects' lanes first: C* holds their calls too."""
    *earlier_projects, _ = plan.projects
    outputs: list[TableOutput] = []
    for project in earlier_projects:
        outputs += _list_lane_outputs(project)
    return [*outputs, *list_table_outputs(plan)]


def _list_lane_outputs(plan: Plan) -> list[TableOutput]:
    """Return the tables of all lanes, lane by lane."""
    outputs = []
    for lane in plan.lanes:
        for stage in list_lane_stages(plan, lane):
            outputs.append(TableOutput(stage, plan, lane))
    return outputs


def warehouse_tables(outputs: Sequence[TableOutput]) -> list[WarehouseTable]:
    """Return the tables of the warehouse (a DuckDB file for queries) over the tables of the lake.

    The lake has a table for each stage and lane (a tool); the warehouse one per stage over all lanes. Stages of single
    calls and of chains share theirs (`in_warehouse.name`). The last table holds the reason of every scored call.
    """
    scores = _map_lanes_to_scores(outputs)  # key of the lane -> SQL of its score, where it is not the paper's
    tables = []
    for outputs_of_table in _group_outputs_by_table(outputs).values():
        sources = [output.name for output in outputs_of_table]
        first_output = outputs_of_table[0]  # its columns and comments are those of the warehouse's table
        tables.append(first_output.warehouse_table(sources, scores))
    return [*tables, _build_decided_table(outputs)]


def _map_lanes_to_scores(outputs: Sequence[TableOutput]) -> dict[str, str]:
    """Return the scores other than the paper's, as SQL expressions, by the key of the lane."""
    scores: dict[str, str] = {}
    for output in outputs:
        if output.lane_or_none is not None:
            scores.update(output.lane.scores)
    return scores


def _group_outputs_by_table(outputs: Sequence[TableOutput]) -> dict[str, list[TableOutput]]:
    """Group tables of the lake by the name of their table in the warehouse."""
    outputs_of: dict[str, list[TableOutput]] = {}
    for output in outputs:
        name = output.stage.in_warehouse.name or output.stage.name
        outputs_of.setdefault(name, []).append(output)
    return outputs_of


def _build_decided_table(outputs: Sequence[TableOutput]) -> WarehouseTable:
    """Return the table of the reason of each scored call, which the filter publishes beside its own table."""
    filters = [output for output in outputs if DECIDED in output.stage.beside]
    return decided_table([output.lane_table(DECIDED).name for output in filters])
