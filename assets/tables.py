"""The assets of the stages: each brings its table up to date, or finds that nothing changed and skips itself."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import dagster as dg
import polars as pl

from assets.metadata import (
    CALLS,
    TOKENS,
    UNCHANGED,
    counts_table,
    figures,
    frame_table,
    image,
    last_metadata,
    shape,
    this_run,
)
from assets.outputs import Output
from assets.plots import delta_histogram
from assets.running import progress, tag_changes
from resources import Compute, WarehouseResource
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import version
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.stages import table_outputs, warehouse_tables
from toolformer_dag.pipeline.swapped_results import by_chance
from toolformer_dag.pipeline.update import TableReport, update

OWNERS = ["team:data"]
THRESHOLDS = (0.5, 1.0, 2.0)
"""Those of Table 2; the lane's own tau_f stands beside them."""


def asset_key(name: str) -> dg.AssetKey:
    """Return the key of "calculator/loss_deltas"."""
    return dg.AssetKey(name.split("/"))


def asset_of(
    output: Output, *, kinds: Collection[str], pool: str, description: str, checks: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Return the decorator that makes a function the asset of an output; `checks`: names of its blocking checks."""
    key = asset_key(output.name)
    return dg.asset(
        key=key,
        group_name=output.name.partition("/")[0],
        deps=[asset_key(name) for name in output.depends_on],
        code_version=output.code_version,
        kinds=set(kinds),
        owners=OWNERS,
        pool=pool,
        check_specs=[dg.AssetCheckSpec(name, asset=key, blocking=True) for name in checks],
        description=description,
    )


def table_asset(table: TableOutput, output: Output) -> dg.AssetsDefinition:
    """Return the asset of a stage: a whole table, whose missing rows are computed in chunks."""
    stage = table.stage
    checks = ["unique_keys", *stage.checks]

    @asset_of(output, kinds=stage.kinds, pool=stage.pool, description=description(table), checks=checks)
    def rows(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], compute: dg.ResourceParam[Compute]
    ) -> dg.MaterializeResult:
        report = update(compute.worker, compute.workers, compute.tables[table.name], progress(context))
        for note in report.work.damaged:
            context.log.warning(note)
        tag_changes(context, report.differences.settings())
        shown = last_metadata(context) if report.unchanged else {}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(report.data_version),
            metadata={**shown, **this_run(report)} if shown else _metadata(table, report),
            check_results=[check_result(report, name) for name in checks],
        )

    return rows


def description(table: TableOutput) -> str:
    """Return the stage's description, with the settings that people change most."""
    lane = table.lane_or_none
    if lane is None:
        return table.stage.description
    told = {
        "scored_candidates": f" {lane.tool.name}: k = {lane.k}, m = {lane.m}, tau_s = {lane.tau_s}.",
        "filtered_calls": f" {lane.tool.name}: tau_f = {lane.tau_f}.",
    }
    return table.stage.description + told.get(table.stage.name, f" {lane.tool.name}.")


def check_result(report: TableReport, name: str) -> dg.AssetCheckResult:
    """Return what was counted when the rows were published."""
    broken = report.violations.get(name, 0)
    return dg.AssetCheckResult(passed=broken == 0, check_name=name, metadata={"rows that break it": broken})


def _metadata(table: TableOutput, report: TableReport) -> Mapping[str, dg.MetadataValue]:
    rows = table.table.scan() if report.rows else table.stage.schema.to_frame().lazy()
    more: Mapping[str, Callable[[], Mapping[str, dg.MetadataValue]]] = {
        "filtered_calls": lambda: _filtered(table),
        "swapped_results": lambda: {"kept": dg.MetadataValue.md(_kept_by_chance(table, rows))},
    }
    examples = report.facts.get("examples")
    shown = {"examples": dg.MetadataValue.md(counts_table("tool", examples))} if examples else {}
    return {**figures(report), **shown, **shape(table.stage, rows), **more.get(table.stage.name, dict)()}


def _filtered(table: TableOutput) -> Mapping[str, dg.MetadataValue]:
    """The threshold, and where it cuts the distribution of delta: on the asset that a new threshold reruns."""
    scored = table.plan.lake.table(f"{table.lane.key}/loss_deltas")
    shown = {"tau_f": dg.MetadataValue.float(table.lane.tau_f)}
    if not scored.parts():
        return shown
    return shown | {"plot": image(delta_histogram(scored.scan().select("delta").collect(), table.lane.tau_f))}


def _kept_by_chance(table: TableOutput, swapped: pl.LazyFrame) -> str:
    """Per cent of the swapped calls that are kept, with their own results and with others; one call per position."""
    thresholds = sorted({*THRESHOLDS, table.lane.tau_f})
    scored = table.plan.lake.table(f"{table.lane.key}/loss_deltas").scan()
    counts = by_chance(scored, swapped, thresholds)
    percent = pl.col("kept", "kept_swapped") / pl.col("sampled") * 100
    return frame_table(counts.with_columns(percent.name.prefix("% ")), len(thresholds))


def prepared_tool_asset(lane: Lane, output: Output) -> dg.AssetsDefinition:
    """Return the asset of what a tool makes before its first call; making it again finds it there."""

    told = f"What {lane.tool.name} needs before its first call (an index of passages); resumable."

    @asset_of(output, kinds={"python"}, pool="tools", description=told)
    def prepared(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        began, advance, made = time.monotonic(), progress(context), 0

        def count(done: int) -> None:
            nonlocal made
            made = done
            advance(done, done)

        lane.tool.prepare(count)
        seconds = round(time.monotonic() - began, 3)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(output.code_version), metadata={"dagster/row_count": made, "seconds": seconds}
        )

    return prepared


def warehouse_asset(plan: Plan, output: Output) -> dg.AssetsDefinition:
    """Return the asset of the DuckDB file: all tables of the lake, with the views of views.sql."""
    tables, lanes = warehouse_tables(table_outputs(plan)), [lane.key for lane in plan.lanes]

    told = "Every scored call in one DuckDB file: loss_deltas, the other tables, the views."

    @asset_of(output, kinds={"duckdb"}, pool="lake", description=told)
    def file(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], warehouse: WarehouseResource
    ) -> dg.MaterializeResult:
        shown = {} if output.reasons() else {**last_metadata(context), UNCHANGED: True}
        if len(shown) < 2:
            rows = warehouse.build(lake, tables, lanes)
            shown = {
                "dagster/row_count": rows["loss_deltas"],
                "rows": dg.MetadataValue.md(counts_table("table", rows)),
                "file": dg.MetadataValue.path(warehouse.database),
                UNCHANGED: False,
            }
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version(lake, tables, lanes)), metadata={**shown, TOKENS: 0, CALLS: 0}
        )

    return file
