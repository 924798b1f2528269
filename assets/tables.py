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
from assets.plots import chance_curves, delta_histogram
from assets.running import progress, tag_changes
from resources import Compute, WarehouseResource
from toolformer_dag.exports.corpus_export import asset_folder, export_corpus, tells_the_same
from toolformer_dag.exports.dataset_folder import read_exported
from toolformer_dag.exports.forms import text_form
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import CHOSEN, version
from toolformer_dag.pipeline.chance import CERTIFIED, chance_tables, threshold_told
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.stages import table_outputs, warehouse_tables
from toolformer_dag.pipeline.update import TableReport, update
from toolformer_dag.settings.sections import ChanceThreshold

OWNERS = ["team:data"]
COUNTED = (
    "tau_f",
    "calls",
    "places",
    "swaps",
    "kept_swapped",
    "by_chance",
    "by_chance_low",
    "by_chance_high",
    "fdr",
    "fdr_high",
)
"""The columns of swapped_statistics that the control shows."""


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
        if chosen := report.facts.get(CHOSEN):
            context.log.log("INFO" if chosen["verdict"] == CERTIFIED else "WARNING", threshold_told(chosen))
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
        "filtered_calls": f" {lane.tool.name}: tau_f {_rule(lane)}.",
    }
    return table.stage.description + told.get(table.stage.name, f" {lane.tool.name}.")


def _rule(lane: Lane) -> str:
    return f"by chance {lane.tau_f.by_chance}" if isinstance(lane.tau_f, ChanceThreshold) else f"= {lane.tau_f}"


def check_result(report: TableReport, name: str) -> dg.AssetCheckResult:
    """Return what was counted when the rows were published."""
    broken = report.violations.get(name, 0)
    return dg.AssetCheckResult(passed=broken == 0, check_name=name, metadata={"rows that break it": broken})


def _metadata(table: TableOutput, report: TableReport) -> Mapping[str, dg.MetadataValue]:
    rows = table.table.scan() if report.rows else table.stage.schema.to_frame().lazy()
    more: Mapping[str, Callable[[], Mapping[str, dg.MetadataValue]]] = {
        "filtered_calls": lambda: _filtered(table, report.facts.get(CHOSEN)),
        "swapped_results": lambda: _kept_by_chance(table),
    }
    examples = report.facts.get("examples")
    shown = {"examples": dg.MetadataValue.md(counts_table("tool", examples))} if examples else {}
    return {**figures(report), **shown, **shape(table.stage, rows), **more.get(table.stage.name, dict)()}


def _filtered(table: TableOutput, chosen: Mapping[str, Any] | None) -> Mapping[str, dg.MetadataValue]:
    """The threshold, and where it cuts the distribution of delta: on the asset that a new threshold reruns."""
    scored = table.plan.lake.table(f"{table.lane.key}/loss_deltas")
    tau_f: float | None = chosen["tau_f"] if chosen else None
    if isinstance(table.lane.tau_f, float):
        tau_f = table.lane.tau_f
    shown = {} if tau_f is None else {"tau_f": dg.MetadataValue.float(tau_f)}
    told = {"threshold": dg.MetadataValue.text(threshold_told(chosen))} if chosen else {}
    if not scored.parts():
        return {**shown, **told}
    return {**shown, **told, "plot": image(delta_histogram(scored.scan().select("delta").collect(), tau_f))}


def _kept_by_chance(table: TableOutput) -> Mapping[str, dg.MetadataValue]:
    """How many places are kept by chance beside those that are kept, and the false discovery rate over tau_f."""
    statistics, rates = chance_tables(table.plan, table.lane)
    by_chance = (
        pl.when("too_few_swaps").then(pl.lit("too few swaps to tell")).otherwise(pl.col("by_chance").cast(pl.String))
    )
    counts = statistics.with_columns(by_chance=by_chance).select(COUNTED)
    return {
        "kept": dg.MetadataValue.md(frame_table(counts, counts.height)),
        **({} if rates.is_empty() else {"plot": image(chance_curves(rates))}),
    }


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


def dataset_asset(plan: Plan, output: Output) -> dg.AssetsDefinition:
    """Return the asset of C* as a Hugging Face data set, in the form `text`."""

    @asset_of(output, kinds={"parquet", "huggingface"}, pool="lake", description="C* as a Hugging Face data set.")
    def dataset(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        folder = asset_folder(plan)
        unchanged = not output.reasons() and tells_the_same(plan, folder)
        exported = read_exported(folder) if unchanged else None
        if exported is None:
            exported = export_corpus(plan, folder, text_form(), of_the_lake=True)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(exported.version),
            metadata={
                "dagster/row_count": sum(exported.rows.values()),
                "rows": dg.MetadataValue.md(counts_table("split", exported.rows)),
                "folder": dg.MetadataValue.path(str(folder)),
                UNCHANGED: unchanged,
                TOKENS: 0,
                CALLS: 0,
            },
        )

    return dataset
