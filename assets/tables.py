"""The assets of the stages: each brings its table up to date, or finds that nothing changed and skips itself."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any

import dagster as dg
import polars as pl

from assets.metadata import (
    CALLS,
    PREVIEW_ROWS,
    ROWS,
    TOKENS,
    UNCHANGED,
    counts_table,
    figures,
    frame_table,
    last_metadata,
    shape,
    this_run,
)
from assets.outputs import Output
from assets.running import note_cost, note_failure, progress, step, tag_changes
from assets.small_plots import chance_curves, delta_histogram
from resources import Compute, WarehouseResource
from resources.step_processes import has_own_process, step_tags
from toolformer_dag.evaluation.evaluated_tables import all_tables, withdraw_damaged
from toolformer_dag.exports.corpus_export import asset_files, asset_folder, export_corpus, tells_the_same
from toolformer_dag.exports.dataset_folder import read_exported
from toolformer_dag.exports.forms import text_form
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import CHOSEN, version
from toolformer_dag.pipeline.augmented_corpus import corpus_batches
from toolformer_dag.pipeline.chance import CERTIFIED, chance_tables, threshold_told
from toolformer_dag.pipeline.chunks import end_with_parent
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.spending import StepCost, token_count
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.update import TableReport, update
from toolformer_dag.settings.setting_types import ASSET_GROUPS
from toolformer_dag.settings.tool_settings import ChanceThreshold

OWNERS = ["team:data"]
EXPLORER = "http://127.0.0.1:3001/"
"""The page of `toolformer-dag explore` on its usual port."""
MEASURED_GROUPS = ("training", "evaluation", "tables")
"""The groups whose assets the page shows as evaluation, training and costs."""
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
    """Return the decorator that makes a function the asset of an output; `checks`: names of its blocking checks.

    Whoever watches the run is told how the step ended, also from a process of the step's own.
    """
    key = asset_key(output.name)
    asset = dg.asset(
        key=key,
        group_name=output.name.partition("/")[0],
        deps=[asset_key(name) for name in output.depends_on],
        code_version=output.code_version,
        kinds=set(kinds),
        owners=OWNERS,
        pool=pool,
        op_tags=step_tags(pool),
        check_specs=[dg.AssetCheckSpec(name, asset=key, blocking=True) for name in checks],
        description=description,
        metadata={"explore": dg.MetadataValue.url(explored(output.name))},
    )

    def told(function: Callable[..., dg.MaterializeResult]) -> dg.AssetsDefinition:
        @wraps(function)  # Dagster reads the parameters from it
        def watched(context: dg.AssetExecutionContext, *arguments: Any, **resources: Any) -> dg.MaterializeResult:
            if has_own_process(context):
                end_with_parent()
            with step(context, output.name) as made, session():
                try:
                    result: dg.MaterializeResult = function(context, *arguments, **resources)
                except BaseException:
                    if "lake" in resources:
                        note_failure(context, resources["lake"], made)
                    raise
                made.end(result.metadata or {})
                return result

        return asset(watched)

    return told


def tool_pool(lane: Lane) -> str:
    """Return the pool of a lane's tool: runs take turns calling it, and other lanes' tools are called meanwhile."""
    return f"tools/{lane.key}"


def explored(name: str) -> str:
    """Return where the page of `toolformer-dag explore` shows what an asset made, while it is served."""
    group, _, stage = name.partition("/")
    if group in MEASURED_GROUPS and stage != "table_2":
        return f"{EXPLORER}#view=runs"
    return f"{EXPLORER}#view=thresholds" if group in ASSET_GROUPS else f"{EXPLORER}#tool={group}"


def table_asset(table: TableOutput, output: Output) -> dg.AssetsDefinition:
    """Return the asset of a stage: a whole table, whose missing rows are computed in chunks."""
    stage = table.stage
    checks = ["unique_keys", *stage.checks]
    pool = tool_pool(table.lane) if stage.pool == "tools" else stage.pool

    @asset_of(output, kinds=stage.kinds, pool=pool, description=description(table), checks=checks)
    def rows(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], compute: dg.ResourceParam[Compute]
    ) -> dg.MaterializeResult:
        before = output.version()
        advance = progress(context, stage.unit, lambda: compute.workers.spent)
        report = update(compute.worker, compute.workers, compute.tables[table.name], advance)
        for note in report.work.damaged:
            context.log.warning(note)
        if chosen := report.facts.get(CHOSEN):
            context.log.log("INFO" if chosen["verdict"] == CERTIFIED else "WARNING", threshold_told(chosen))
        tag_changes(context, report.differences.settings())
        cost = _cost(report)
        if cost.tokens or cost.calls or report.data_version != before:
            note_cost(context, lake, cost)
        shown = last_metadata(context) if report.unchanged else {}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(report.data_version),
            metadata={**shown, **this_run(report)} if shown else _metadata(table, report),
            check_results=[check_result(report, name) for name in checks],
        )

    return rows


def _cost(report: TableReport) -> StepCost:
    calls = report.work.counts.get("calls", (0, 0))[0]
    return StepCost(report.seconds, token_count(report.work.tokens), calls, report.computed, report.reused)


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
    filled = [part for part, count in report.rows.items() if count]
    # each has a row at least, so that more are not opened
    rows = table.table.scan(filled[:PREVIEW_ROWS]) if filled else table.stage.schema.to_frame().lazy()
    more: Mapping[str, Callable[[], Mapping[str, dg.MetadataValue]]] = {
        "filtered_calls": lambda: _filtered(table, report.facts.get(CHOSEN), sum(report.rows.values())),
        "swapped_results": lambda: _kept_by_chance(table),
        "augmented_corpus": lambda: _examples(table),
    }
    return {**more.get(table.stage.name, dict)(), **figures(report), **shape(table.stage, rows)}


def _examples(table: TableOutput) -> Mapping[str, dg.MetadataValue]:
    """Texts of C* per lane, as in Table 2, and all."""
    batches = [batch["tools"] for batch in corpus_batches(table.plan.lake)]
    counts = Counter(tool for tools in batches for tool in tools.list.explode())
    found = {**{lane.key: counts[lane.key] for lane in table.plan.lanes}, "all": sum(map(len, batches))}
    return {f"texts with {tool}": dg.MetadataValue.int(count) for tool, count in found.items()}


def _filtered(table: TableOutput, chosen: Mapping[str, Any] | None, kept: int) -> Mapping[str, dg.MetadataValue]:
    """The threshold, and where it cuts the distribution of delta: on the asset that a new threshold reruns."""
    tau_f: float | None = chosen["tau_f"] if chosen else None
    if isinstance(table.lane.tau_f, float):
        tau_f = table.lane.tau_f
    scored = table.plan.lake.table(f"{table.lane.key}/loss_deltas")
    deltas = scored.scan().select("delta").collect() if scored.parts() else pl.DataFrame(schema={"delta": pl.Float64})
    shown: dict[str, dg.MetadataValue] = {"calls kept": dg.MetadataValue.int(kept)}
    if tau_f is not None:
        shown["tau_f"] = dg.MetadataValue.float(tau_f)
    if chosen:
        shown["threshold"] = dg.MetadataValue.text(threshold_told(chosen))
    if deltas.height:
        shown["share of the scored calls kept"] = dg.MetadataValue.float(kept / deltas.height)
        shown["deltas"] = dg.MetadataValue.md(delta_histogram(deltas, tau_f))
    return shown


def _kept_by_chance(table: TableOutput) -> Mapping[str, dg.MetadataValue]:
    """How many places are kept by chance beside those that are kept, and the false discovery rate over tau_f."""
    statistics, rates = chance_tables(table.plan, table.lane)
    by_chance = (
        pl.when("too_few_swaps").then(pl.lit("too few swaps to tell")).otherwise(pl.col("by_chance").cast(pl.String))
    )
    counts = statistics.with_columns(by_chance=by_chance).select(COUNTED)
    told = statistics.filter(pl.col("swaps") > 0).select("tau_f", "by_chance", "fdr").rows()
    numbers = {f"kept by chance at {tau_f:g}": dg.MetadataValue.int(count) for tau_f, count, _ in told}
    rates_at = {f"false discovery rate at {tau_f:g}": dg.MetadataValue.float(fdr) for tau_f, _, fdr in told if fdr}
    return {
        **numbers,
        **rates_at,
        "kept": dg.MetadataValue.md(frame_table(counts, counts.height)),
        **({} if rates.is_empty() else {"kept by chance": dg.MetadataValue.md(chance_curves(rates))}),
    }


def prepared_tool_asset(lane: Lane, output: Output) -> dg.AssetsDefinition:
    """Return the asset of what a tool makes before its first call; making it again finds it there."""

    told = f"What {lane.tool.name} needs before its first call (an index of passages); resumable."

    @asset_of(output, kinds={"python"}, pool=tool_pool(lane), description=told)
    def prepared(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        began, advance, made = time.monotonic(), progress(context, "passages"), 0

        def count(done: int) -> None:
            nonlocal made
            made = done
            advance(done, 0)

        lane.tool.prepare(count)
        seconds = round(time.monotonic() - began, 3)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(output.code_version), metadata={ROWS: made, "seconds": seconds}
        )

    return prepared


def warehouse_asset(plan: Plan, output: Output) -> dg.AssetsDefinition:
    """Return the asset of the DuckDB file: all tables of the lake, with the views of views.sql."""
    tables, lanes = all_tables(table_outputs(plan)), plan.lane_names

    told = "Every scored call in one DuckDB file: loss_deltas, the other tables, the views."

    @asset_of(output, kinds={"duckdb"}, pool="lake", description=told)
    def file(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], warehouse: WarehouseResource
    ) -> dg.MaterializeResult:
        for name, damage in withdraw_damaged(lake).items():
            context.log.warning(f"{name} is left out until it is made again: {damage}")
        shown = {} if output.reasons() else {**last_metadata(context), UNCHANGED: True}
        if len(shown) < 2:
            rows = warehouse.build(lake, tables, lanes)
            shown = {
                ROWS: rows["loss_deltas"],
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
            asset_files(plan).send()
        return dg.MaterializeResult(
            data_version=dg.DataVersion(exported.version),
            metadata={
                ROWS: sum(exported.rows.values()),
                "rows": dg.MetadataValue.md(counts_table("split", exported.rows)),
                "folder": dg.MetadataValue.path(str(folder)),
                UNCHANGED: unchanged,
                TOKENS: 0,
                CALLS: 0,
            },
        )

    return dataset
