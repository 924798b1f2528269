"""The assets of the stages: each brings its table up to date, or finds that nothing changed.

A stage is a step of the method, such as loss_deltas; its own file says what its asset shows, warns of and refuses.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.assets.declaration import AssetDeclaration
from toolformer_dag.assets.metadata import (
    MAX_PREVIEW_ROWS,
    ROW_COUNT_LABEL,
    UNCHANGED_LABEL,
    build_run_metadata,
    format_counts_table,
    format_frame_table,
    read_last_metadata,
)
from toolformer_dag.assets.plots import draw_plot
from toolformer_dag.assets.running import build_progress_reporter, record_changes, record_cost, tag_run_with_changes
from toolformer_dag.computing.change_log import KeptCounts
from toolformer_dag.computing.plan import Lane
from toolformer_dag.computing.reasons import Reasons, find_differences
from toolformer_dag.computing.shown import ShownValue
from toolformer_dag.computing.spending import NON_TOKEN_KINDS, StepCost, sum_token_counts
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.computing.update import TableReport, update_table
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Lake
from toolformer_dag.resources import Compute
from toolformer_dag.settings.servers import build_lane_key
from toolformer_dag.tools.tool import Tool


def declare_table(output: TableOutput) -> AssetDeclaration:
    """Declare the asset of a table that a stage of the method computes, such as "calculator/loss_deltas"."""
    stage = output.stage

    return AssetDeclaration(
        name=output.name,
        settings=output.settings,
        depends_on=(*output.depends_on, *_list_prepared_tool_names(output), *_list_checkpoint_dependency_names(output)),
        description=_describe_table(output),
        kinds=stage.kinds,
        pool=_choose_pool_name(output),  # steps with the same pool run one after another
        find_reasons=partial(find_table_reasons, output),  # why it is out of date
        get_version=output.compute_version,
        make_asset=partial(_make_table_current, output),
        promise_by_check=_map_check_to_promise(stage),
        group=_choose_group_name(output),
    )


def _choose_pool_name(output: TableOutput) -> str:
    """Return the pool of a table's step. Stages that call tools have a pool for each tool."""
    calls_tools = output.stage.pool == "tools"
    return build_tool_pool_name(output.lane) if calls_tools else output.stage.pool


def _describe_table(output: TableOutput) -> str:
    """Return the sentence that describes a table on its page. It names the tool if the table is of one tool."""
    lane = output.lane_or_none
    if lane is None:
        return output.stage.description
    return f"{output.stage.description} {lane.tool.name}."


def _make_table_current(
    output: TableOutput, context: dg.AssetExecutionContext, lake: Lake, compute: Compute
) -> dg.MaterializeResult:
    """Compute what is out of date in a table, and record its cost and changes.

    Args:
        output: The table.
        context: The context of the step.
        lake: The lake.
        compute: The workers that compute.

    Returns:
        The version of the rows, and what the table's page shows.

    Raises:
        Exception: The errors of `update_table`. After the rows are stored, also the error with which the stage ends the
            run because of them, for example because no call was kept.
    """
    stored_before = _StoredState.from_output(output)
    _log_warnings(context, output)

    report = _update_table_with_progress(output, context, compute)
    _raise_fatal_error(output)

    _log_outcome(context, output, report)
    _record_cost(context, lake, report, stored_before)
    _record_changes(context, lake, report, stored_before)

    return _build_result(context, output, report)


def _log_warnings(context: dg.AssetExecutionContext, output: TableOutput) -> None:
    """Log the warnings of a stage about its table before it is computed."""
    for warning in output.stage.asset.list_warnings(output):
        context.log.warning(warning)


def _raise_fatal_error(output: TableOutput) -> None:
    """Raise the error with which a stage ends the run because of the rows of its table, if there is one.

    Raises:
        Exception: The error, for example because no call was kept.
    """
    fatal_error = output.stage.asset.find_fatal_error(output)
    if fatal_error is not None:
        raise fatal_error


def _build_result(context: dg.AssetExecutionContext, output: TableOutput, report: TableReport) -> dg.MaterializeResult:
    """Return the result of a step: the version of the rows, what the page shows, and how the checks ended."""
    return dg.MaterializeResult(
        data_version=dg.DataVersion(report.data_version),
        metadata=_build_metadata(context, output, report),
        check_results=_build_check_results(output.stage, report),
    )


def _update_table_with_progress(
    output: TableOutput, context: dg.AssetExecutionContext, compute: Compute
) -> TableReport:
    """Bring the rows of a table up to date while the step's progress is shown, and return what was done."""
    workers = compute.workers
    worker = compute.worker
    show_progress = build_progress_reporter(
        context,
        output.stage.progress_unit,
        get_spent=lambda: workers.total_spent,
        get_work_ahead=lambda: worker.work_ahead,
    )
    return update_table(worker, workers, compute.tables_by_name[output.name], show_progress)


def find_table_reasons(output: TableOutput) -> Reasons:
    """Find out why a table is out of date.

    Either it differs from its settings and inputs, or its rows are such that its stage ends every run, for example
    because no call was kept. Such a table counts as out of date, so that the next run stops there again and says why.
    """
    reasons = find_differences(output)
    if reasons:
        return reasons

    fatal_error = output.stage.asset.find_fatal_error(output)
    if fatal_error is not None:
        return Reasons({WHOLE_TABLE_PART: [str(fatal_error)]})
    return reasons


def build_tool_pool_name(lane: Lane) -> str:
    """Return the pool of a tool. Its steps run one after another, while steps of other tools run at the same time.

    Args:
        lane: The tool with its settings.
    """
    return f"tools/{lane.tool.key}"


def needs_preparation(tool: Tool) -> bool:
    """Return whether a tool makes something before its first call, such as an index of passages."""
    return type(tool).prepare is not Tool.prepare


def _list_prepared_tool_names(output: TableOutput) -> list[str]:
    """Return the names of the prepared-tool assets that a table depends on.

    Such an asset is what a tool makes before its first call, for each tool that the table's stage calls.
    """
    called_lanes = output.stage.asset.list_called_lanes(output)
    return [_build_prepared_tool_name(lane) for lane in called_lanes if needs_preparation(lane.tool)]


def _build_prepared_tool_name(lane: Lane) -> str:
    """Return the name of the asset of what a tool makes before its first call, such as "wiki_search/prepared_tool"."""
    return f"{lane.tool.key}/prepared_tool"


def _list_checkpoint_dependency_names(output: TableOutput) -> list[str]:
    """Return the name of the checkpoint that a table depends on, in a list that is empty if it depends on none.

    In a later round of annotation, the checkpoint of the round before proposes the calls. The base model computes other
    tables, such as their losses.
    """
    previous_plan = output.plan.previous_plan  # None in the first round
    runs_model = output.stage.pool == "gpu"  # the resource that the stage needs for itself
    if previous_plan is None or not runs_model:
        return []

    is_computed_by_checkpoint = output.settings["model"] == output.plan.proposer_identity
    if not is_computed_by_checkpoint:
        return []
    return [previous_plan.add_round_suffix("training/finetuned_checkpoint")]


def _choose_group_name(output: TableOutput) -> str:
    """Return the group in the graph for the tables of an MCP server, which may have dozens of tools.

    Empty for other tables, whose group is the first part of their name.
    """
    server_name = output.lane.tool.server_name if output.lane_or_none else ""
    if not server_name:
        return ""
    return f"server_{build_lane_key(server_name)}{output.plan.round_suffix}"


@dataclass(frozen=True, slots=True)
class _StoredState:
    """What a table held before a step.

    Attributes:
        data_version: The version of its rows. None if nothing was stored.
        kept_call_count: How many calls of its tool it kept. None for a table that does not hold the kept calls.
    """

    data_version: str | None
    kept_call_count: int | None

    @staticmethod
    def from_output(output: TableOutput) -> "_StoredState":
        """Read the state of a table from the lake's records, without opening its rows."""
        kept_call_count = None
        if output.stage.asset.has_kept_calls:
            pointers = output.table.read_pointers_by_part().values()
            kept_call_count = sum(pointer.row_count for pointer in pointers)
        return _StoredState(output.compute_version(), kept_call_count)


def _log_outcome(context: dg.AssetExecutionContext, output: TableOutput, report: TableReport) -> None:
    """Log which files were damaged and what the stage says of its rows, and tag the run with the changed settings."""
    for damage in report.work.damage_messages:
        context.log.warning(damage)

    for line in output.stage.asset.list_final_log_lines(output):
        level = "WARNING" if line.is_warning else "INFO"
        context.log.log(level, line.text)

    tag_run_with_changes(context, report.reasons.format_setting_changes())


def _record_cost(
    context: dg.AssetExecutionContext, lake: Lake, report: TableReport, stored_before: _StoredState
) -> None:
    """Add the cost of a step to the lake's table of costs, unless it cost nothing and the rows stayed the same."""
    step_cost = StepCost(
        report.seconds,
        tokens=sum_token_counts(report.work.tokens_by_kind),
        calls=report.work.computed_rows_by_kind["calls"],
        computed=report.computed_row_count,
        reused=report.reused_row_count,
    )

    has_new_rows = report.data_version != stored_before.data_version
    if step_cost.tokens or step_cost.calls or has_new_rows:
        record_cost(context, lake, step_cost)


def _record_changes(
    context: dg.AssetExecutionContext, lake: Lake, report: TableReport, stored_before: _StoredState
) -> None:
    """Add a row to the lake's table of changes if settings or the kept calls have changed."""
    setting_changes = report.reasons.list_setting_changes()
    kept_counts = _count_kept_calls(report, stored_before)  # None for a table that is new, or not of the kept calls

    has_new_rows = report.data_version != stored_before.data_version
    kept_calls_changed = kept_counts is not None and has_new_rows
    if setting_changes or kept_calls_changed:
        record_changes(context, lake, setting_changes, kept_counts)


def _count_kept_calls(report: TableReport, stored_before: _StoredState) -> KeptCounts | None:
    """Return how many calls of a tool the filter kept before and after a step, to record the change.

    Returns:
        The two numbers. None if nothing was stored before, or if the table does not hold the kept calls.
    """
    if stored_before.kept_call_count is None or stored_before.data_version is None:
        return None
    kept_after = sum(report.row_count_by_part.values())  # such a table has a row per kept call
    return KeptCounts(stored_before.kept_call_count, kept_after)


def _map_check_to_promise(stage: Stage) -> dict[str, str]:
    """Return what each check of a stage's table promises: that keys are unique, and what the stage itself checks."""
    key_columns = ", ".join(stage.key_columns)
    promise_by_check = {"unique_keys": f"No two rows have the same {key_columns}."}
    for check_name, check in stage.checks.items():
        promise_by_check[check_name] = check.promise
    return promise_by_check


def _build_check_results(stage: Stage, report: TableReport) -> list[dg.AssetCheckResult]:
    """Return the result of each check of a table. A check has passed if no row violates it."""
    results = []
    for check_name in _map_check_to_promise(stage):
        violation_count = report.violations_by_check.get(check_name, 0)
        result = dg.AssetCheckResult(
            passed=violation_count == 0, check_name=check_name, metadata={"rows that break it": violation_count}
        )
        results.append(result)
    return results


def _build_metadata(
    context: dg.AssetExecutionContext, output: TableOutput, report: TableReport
) -> dict[str, dg.MetadataValue]:
    """Build what the page of a table shows: the cost of this run, and what the rows are.

    If the rows have not changed, they are shown as last time, provided that this Dagster instance has shown them.
    """
    last_metadata = read_last_metadata(context) if report.is_unchanged else {}
    if last_metadata:
        return {**last_metadata, **build_run_metadata(report)}

    # Each stage has values of its own to show, such as a plot.
    stage_metadata = {}
    for label, shown_value in output.stage.asset.collect_shown_values(output).items():
        stage_metadata[label] = convert_to_metadata_value(shown_value)

    return {**stage_metadata, **_build_row_metadata(output, report)}


def convert_to_metadata_value(shown_value: ShownValue) -> dg.MetadataValue:
    """Convert a value that a stage shows to Dagster's form. Tables and plots become Markdown."""
    match shown_value:
        case int():
            return dg.MetadataValue.int(shown_value)
        case float():
            return dg.MetadataValue.float(shown_value)
        case str():
            return dg.MetadataValue.text(shown_value)
        case pl.DataFrame():
            return dg.MetadataValue.md(format_frame_table(shown_value, shown_value.height))
        case _:
            return dg.MetadataValue.md(draw_plot(shown_value))


def _build_row_metadata(output: TableOutput, report: TableReport) -> dict[str, dg.MetadataValue]:
    """Build what the page of every table shows: counts, the cost of the run, rejections, columns and first rows."""
    row_count = sum(report.row_count_by_part.values())
    filled_parts = [part for part, part_rows in report.row_count_by_part.items() if part_rows > 0]
    first_rows = format_frame_table(_read_first_rows(output, filled_parts))
    table_schema = _build_table_schema(output.stage)

    return {
        ROW_COUNT_LABEL: dg.MetadataValue.int(row_count),
        **build_run_metadata(report),
        **_build_count_tables(report),
        "dagster/column_schema": dg.MetadataValue.table_schema(table_schema),
        "first rows": dg.MetadataValue.md(first_rows),
    }


def _build_count_tables(report: TableReport) -> dict[str, dg.MetadataValue]:
    """Build Markdown tables of tokens by kind, rejected rows by reason, and rows by shard."""
    tokens_by_kind = {kind: count for kind, count in report.work.tokens_by_kind.items() if kind not in NON_TOKEN_KINDS}
    token_table = format_counts_table("kind", tokens_by_kind)
    rejection_table = format_counts_table("reason", report.rejections_by_reason)
    row_table = format_counts_table("shard", report.row_count_by_part, "rows")
    return {
        "tokens": dg.MetadataValue.md(token_table),
        "rejections": dg.MetadataValue.md(rejection_table),
        "rows per shard": dg.MetadataValue.md(row_table),
    }


def _build_table_schema(stage: Stage) -> dg.TableSchema:
    """Return the columns of a stage's table with their types and descriptions."""
    columns = []
    for name, column in stage.columns.items():
        columns.append(dg.TableColumn(name, str(column.dtype), column.description))
    return dg.TableSchema(columns)


def _read_first_rows(output: TableOutput, filled_parts: Sequence[str]) -> pl.DataFrame:
    """Return the first MAX_PREVIEW_ROWS rows of a table.

    Args:
        output: The table.
        filled_parts: The names of its parts that have rows, in order. A part holds the rows of one shard.
    """
    if not filled_parts:
        return output.stage.schema.to_frame()  # empty, with the table's columns
    # Each of these parts has at least one row, so that so many parts are enough.
    first_parts = filled_parts[:MAX_PREVIEW_ROWS]
    return output.table.scan_parts(first_parts).head(MAX_PREVIEW_ROWS).collect()


def declare_prepared_tool(lane: Lane) -> AssetDeclaration:
    """Declare the asset of what a tool makes before its first call, such as an index of passages.

    Args:
        lane: The tool with its settings.
    """
    settings = {"version": lane.tool.version, "options": lane.compute_tool_identity()}

    return AssetDeclaration(
        name=_build_prepared_tool_name(lane),
        settings=settings,
        depends_on=(),
        description=f"What {lane.tool.name} needs before its first call (an index of passages); resumable.",
        kinds={"python"},
        pool=build_tool_pool_name(lane),
        find_reasons=Reasons,  # none, always: `prepare` itself finds out what is there
        get_version=partial(fingerprint, settings),
        make_asset=partial(_prepare_tool, lane, settings),
    )


def _prepare_tool(lane: Lane, settings: Mapping[str, Any], context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Let a tool make what it needs before its first call, such as an index of passages.

    Args:
        lane: The tool with its settings.
        settings: What determines the result of the preparation.
        context: The context of the step.
    """
    start = time.monotonic()
    indexing_progress = _IndexingProgress(build_progress_reporter(context, "passages"))
    lane.tool.prepare(indexing_progress.report_passages)
    seconds = time.monotonic() - start

    metadata: dict[str, Any] = {"seconds": round(seconds, 3)}
    # Without reported passages, it is not known whether anything was made. The label is left out then.
    if indexing_progress.indexed_count:
        metadata[UNCHANGED_LABEL] = False

    return dg.MaterializeResult(data_version=dg.DataVersion(fingerprint(settings)), metadata=metadata)


@dataclass(slots=True)
class _IndexingProgress:
    """Reports the progress of a tool that indexes passages.

    Attributes:
        report_progress: Takes the number of indexed passages and of all passages, which is 0 if unknown.
        indexed_count: How many passages are indexed so far.
    """

    report_progress: Callable[[int, int], None]
    indexed_count: int = 0

    def report_passages(self, passage_count: int) -> None:
        """Take the number of passages that are indexed so far, and report it as the progress of the step."""
        self.indexed_count = passage_count
        unknown_total = 0
        self.report_progress(passage_count, unknown_total)
