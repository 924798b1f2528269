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
    PREVIEW_ROWS,
    ROWS,
    UNCHANGED,
    build_run_metadata,
    format_counts_table,
    format_frame_table,
    read_last_metadata,
)
from toolformer_dag.assets.plots import drawn
from toolformer_dag.assets.running import note_changes, note_cost, progress, tag_changes
from toolformer_dag.computing.change_log import KeptCounts
from toolformer_dag.computing.plan import Lane
from toolformer_dag.computing.reasons import Reasons, differences
from toolformer_dag.computing.shown import ShownValue
from toolformer_dag.computing.spending import NO_TOKENS, StepCost, token_count
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.computing.update import TableReport, update
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.resources import Compute
from toolformer_dag.settings.servers import lane_key
from toolformer_dag.tools.tool import Tool


def table(output: TableOutput) -> AssetDeclaration:
    """Declare the asset of a table that a stage of the method computes, such as "calculator/loss_deltas"."""
    stage = output.stage

    return AssetDeclaration(
        name=output.name,
        settings=output.settings,
        depends_on=(*output.depends_on, *_list_prepared_tools(output), *_list_checkpoint_dependencies(output)),
        description=_describe_table(output),
        kinds=stage.kinds,
        pool=_choose_pool(output),  # steps with the same pool run one after another
        reasons=partial(find_table_reasons, output),  # why it is out of date
        version=output.version,
        make=partial(_bring_up_to_date, output),
        checks=_map_check_to_promise(stage),
        group=_choose_group(output),
    )


def _choose_pool(output: TableOutput) -> str:
    """Return the pool of a table: its stage's, or one per tool for a stage that calls tools."""
    return name_tool_pool(output.lane) if output.stage.pool == "tools" else output.stage.pool


def _describe_table(output: TableOutput) -> str:
    """Return what the page says of a table; a table of one tool names it."""
    lane = output.lane_or_none
    return f"{output.stage.description} {lane.tool.name}." if lane else output.stage.description


def _bring_up_to_date(
    output: TableOutput, context: dg.AssetExecutionContext, lake: Lake, compute: Compute
) -> dg.MaterializeResult:
    """Compute what is out of date in a table, and log its cost and changes.

    Returns:
        What the table's page shows.

    Raises:
        Exception: The errors of `update`. After the rows are stored, also the error with which the stage ends the
            run because of them, for example because no call was kept.
    """
    stored_before = _Stored.of(output)
    _log_warnings(context, output)

    report = _update_with_progress(output, context, compute)
    _raise_refusal(output)

    _log_outcome(context, output, report)
    _note_cost(context, lake, report, stored_before)
    _note_changes(context, lake, report, stored_before)

    return _build_result(context, output, report)


def _log_warnings(context: dg.AssetExecutionContext, output: TableOutput) -> None:
    """Log what a stage warns of before its table is computed."""
    for warning in output.stage.asset.warns(output):
        context.log.warning(warning)


def _raise_refusal(output: TableOutput) -> None:
    """Raise the error at which a stage ends every run, for example if no call was kept."""
    refusal = output.stage.asset.refuses(output)
    if refusal is not None:
        raise refusal


def _build_result(context: dg.AssetExecutionContext, output: TableOutput, report: TableReport) -> dg.MaterializeResult:
    """Return the result of a step: the version of the rows, what the page shows, how the checks ended."""
    return dg.MaterializeResult(
        data_version=dg.DataVersion(report.data_version),
        metadata=_build_metadata(context, output, report),
        check_results=_build_check_results(output.stage, report),
    )


def _update_with_progress(output: TableOutput, context: dg.AssetExecutionContext, compute: Compute) -> TableReport:
    """Bring the rows of a table up to date while the step's progress is shown."""
    workers = compute.workers
    worker = compute.worker
    advance = progress(context, output.stage.unit, spent=lambda: workers.spent, ahead=lambda: worker.ahead)
    return update(worker, workers, compute.tables[output.name], advance)


def find_table_reasons(output: TableOutput) -> Reasons:
    """Find out why a table is out of date.

    Either it differs from its settings and inputs, or its stage refuses its rows. A refusal is an error that ends the
    run after the table was stored, for example because no call was kept. The table then counts as out of date, so that
    the next run stops there again and says why.
    """
    reasons = differences(output)
    if reasons:
        return reasons

    refusal = output.stage.asset.refuses(output)
    if refusal is not None:
        return Reasons({WHOLE: [str(refusal)]})  # of the whole table, not of a part
    return reasons


def name_tool_pool(lane: Lane) -> str:
    """Return the pool of a lane's tool: runs call one tool in turns, but different tools at the same time."""
    return f"tools/{lane.tool.key}"


def needs_preparation(tool: Tool) -> bool:
    """Return whether a tool makes something before its first call, such as an index of passages."""
    return type(tool).prepare is not Tool.prepare


def _list_prepared_tools(output: TableOutput) -> list[str]:
    """Return the names of the prepared-tool assets of the tools that a stage calls."""
    return [_name_prepared_tool(lane) for lane in output.stage.asset.calls(output) if needs_preparation(lane.tool)]


def _name_prepared_tool(lane: Lane) -> str:
    """Return the name of the asset for what a lane's tool prepares before its first call."""
    return f"{lane.tool.key}/prepared_tool"


def _list_checkpoint_dependencies(output: TableOutput) -> list[str]:
    """Return the checkpoint asset that a table depends on, as a list of names; empty if it depends on none.

    In a later round of annotation the checkpoint of the round before proposes the calls; the base model computes other
    tables, such as their losses.
    """
    earlier_round = output.plan.start
    runs_a_model = output.stage.pool == "gpu"
    if earlier_round is None or not runs_a_model:
        return []
    is_computed_by_checkpoint = output.settings["model"] == output.plan.proposer
    if not is_computed_by_checkpoint:
        return []
    return [earlier_round.named("training/finetuned_checkpoint")]


def _choose_group(output: TableOutput) -> str:
    """Return the group of a server's tables, one for its dozens of tools; empty for other tables."""
    server = output.lane.tool.server if output.lane_or_none else ""
    return f"server_{lane_key(server)}{output.plan.suffix}" if server else ""


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a table held before a step.

    - `version`: the data version of its rows; None if nothing was stored
    - `kept_calls`: how many calls the table's lane (its tool) kept; None for a table without kept calls
    """

    version: str | None
    kept_calls: int | None

    @staticmethod
    def of(output: TableOutput) -> "_Stored":
        """Read it from the lake, without opening rows."""
        kept_calls = None
        if output.stage.asset.keeps_calls:
            kept_calls = sum(pointer.rows for pointer in output.table.pointers().values())
        return _Stored(output.version(), kept_calls)


def _log_outcome(context: dg.AssetExecutionContext, output: TableOutput, report: TableReport) -> None:
    """Log what was damaged and what the stage concludes; tag the run with the settings that changed."""
    for damage in report.work.damaged:
        context.log.warning(damage)
    for line in output.stage.asset.concludes(output):
        context.log.log("WARNING" if line.is_warning else "INFO", line.text)
    tag_changes(context, report.differences.settings())


def _note_cost(context: dg.AssetExecutionContext, lake: Lake, report: TableReport, before: _Stored) -> None:
    """Add the cost of the step to the lake's table of costs, unless it cost nothing and the rows stayed the same."""
    cost = StepCost(
        report.seconds,
        tokens=token_count(report.work.tokens),
        calls=report.work.computed["calls"],
        computed=report.computed,
        reused=report.reused,
    )

    if cost.tokens or cost.calls or report.data_version != before.version:
        note_cost(context, lake, cost)


def _note_changes(context: dg.AssetExecutionContext, lake: Lake, report: TableReport, before: _Stored) -> None:
    """Add the changed settings to the lake's table of changes, and the kept calls if they changed."""
    settings = report.differences.setting_changes()
    kept = _count_kept_calls(report, before)
    calls_changed = kept is not None and report.data_version != before.version
    if settings or calls_changed:
        note_changes(context, lake, settings, kept)


def _count_kept_calls(report: TableReport, before: _Stored) -> KeptCounts | None:
    """Return the kept calls before and after a step; None for a first run or a table without kept calls."""
    if before.kept_calls is None or before.version is None:
        return None
    return KeptCounts(before.kept_calls, sum(report.rows.values()))


def _map_check_to_promise(stage: Stage) -> dict[str, str]:
    """Return check name -> promise for a stage: unique keys, and the stage's own checks."""
    promises = {"unique_keys": f"No two rows have the same {', '.join(stage.key)}."}
    for name, check in stage.checks.items():
        promises[name] = check.promise
    return promises


def _build_check_results(stage: Stage, report: TableReport) -> list[dg.AssetCheckResult]:
    """Return the result of each check of a table; it passed if no row breaks it."""
    results = []
    for name in _map_check_to_promise(stage):
        broken = report.violations.get(name, 0)
        results.append(dg.AssetCheckResult(passed=not broken, check_name=name, metadata={"rows that break it": broken}))
    return results


def _build_metadata(
    context: dg.AssetExecutionContext, output: TableOutput, report: TableReport
) -> dict[str, dg.MetadataValue]:
    """Build what the page of a table shows: the cost of this run, and what the rows are.

    If the rows have not changed, they are shown as last time, provided that this Dagster instance has shown them.
    """
    shown_before = read_last_metadata(context) if report.unchanged else {}
    if shown_before:
        return {**shown_before, **build_run_metadata(report)}

    metadata = {}
    for name, value in output.stage.asset.shows(output).items():
        metadata[name] = to_metadata_value(value)

    return {**metadata, **_build_row_metadata(output, report)}


def to_metadata_value(value: ShownValue) -> dg.MetadataValue:
    """Convert a value that a stage shows to Dagster's form. Tables and plots become Markdown."""
    match value:
        case int():
            return dg.MetadataValue.int(value)
        case float():
            return dg.MetadataValue.float(value)
        case str():
            return dg.MetadataValue.text(value)
        case pl.DataFrame():
            return dg.MetadataValue.md(format_frame_table(value, value.height))
        case _:
            return dg.MetadataValue.md(drawn(value))


def _build_row_metadata(output: TableOutput, report: TableReport) -> dict[str, dg.MetadataValue]:
    """Build what the page of every table shows: counts, the cost of the run, rejections, columns and the first rows."""
    filled_parts = [part for part, count in report.rows.items() if count]
    first_rows = format_frame_table(_read_first_rows(output, filled_parts))

    return {
        ROWS: dg.MetadataValue.int(sum(report.rows.values())),
        **build_run_metadata(report),
        **_build_count_tables(report),
        "dagster/column_schema": dg.MetadataValue.table_schema(_build_table_schema(output.stage)),
        "first rows": dg.MetadataValue.md(first_rows),
    }


def _build_count_tables(report: TableReport) -> dict[str, dg.MetadataValue]:
    """Return tokens by kind, rejections by reason and rows by shard, as Markdown tables."""
    tokens = {kind: count for kind, count in report.work.tokens.items() if kind not in NO_TOKENS}
    return {
        "tokens": dg.MetadataValue.md(format_counts_table("kind", tokens)),
        "rejections": dg.MetadataValue.md(format_counts_table("reason", report.rejections)),
        "rows per shard": dg.MetadataValue.md(format_counts_table("shard", report.rows, "rows")),
    }


def _build_table_schema(stage: Stage) -> dg.TableSchema:
    """Return the columns of a stage's table with their types and descriptions."""
    columns = []
    for name, column in stage.columns.items():
        columns.append(dg.TableColumn(name, str(column.dtype), column.description))
    return dg.TableSchema(columns)


def _read_first_rows(output: TableOutput, filled_parts: Sequence[str]) -> pl.DataFrame:
    """Return the first PREVIEW_ROWS rows of a table. filled_parts: its parts with rows, in order."""
    if not filled_parts:
        return output.stage.schema.to_frame()
    # each part has a row at least, so that no more of them are opened
    return output.table.scan(filled_parts[:PREVIEW_ROWS]).head(PREVIEW_ROWS).collect()


def prepared_tool(lane: Lane) -> AssetDeclaration:
    """Declare the asset of what a tool makes before its first call, such as an index.

    Args:
        lane: The tool with its settings.
    """
    settings = {"version": lane.tool.version, "options": lane.identity()}

    return AssetDeclaration(
        name=_name_prepared_tool(lane),
        settings=settings,
        depends_on=(),
        description=f"What {lane.tool.name} needs before its first call (an index of passages); resumable.",
        kinds={"python"},
        pool=name_tool_pool(lane),
        reasons=Reasons,  # none, always: `prepare` itself finds out what is there
        version=partial(fingerprint, settings),
        make=partial(_prepare_tool, lane, settings),
    )


def _prepare_tool(lane: Lane, settings: Mapping[str, Any], context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Let a tool make what it needs before its first call, such as an index of passages.

    Args:
        lane: The tool with its settings.
        settings: What determines the result of the tool's preparation.
    """
    began = time.monotonic()
    indexing = _IndexingProgress(progress(context, "passages"))
    lane.tool.prepare(indexing.note)

    shown: dict[str, Any] = {"seconds": round(time.monotonic() - began, 3)}

    # A tool that reports no passages may have changed something or not: then the run counts the step as neither.
    if indexing.passages:
        shown[UNCHANGED] = False

    return dg.MaterializeResult(data_version=dg.DataVersion(fingerprint(settings)), metadata=shown)


@dataclass(slots=True)
class _IndexingProgress:
    """Reports the passages that a tool has indexed.

    - `advance`: takes the number of indexed passages and of all, 0 for an unknown number
    - `passages`: indexed so far
    """

    advance: Callable[[int, int], None]
    passages: int = 0

    def note(self, passages: int) -> None:
        """Take the number of passages that are indexed so far."""
        self.passages = passages
        self.advance(passages, 0)
