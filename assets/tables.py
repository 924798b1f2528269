"""The assets of the stages: each brings its table up to date, or finds that nothing changed and skips itself."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
import polars as pl

from assets.declaration import Output
from assets.metadata import PREVIEW_ROWS, ROWS, figures, frame_table, last_metadata, shape, this_run
from assets.running import note_cost, progress, tag_changes
from assets.small_plots import chance_curves, delta_histogram
from resources import Compute
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.augmented_corpus import corpus_batches
from toolformer_dag.pipeline.chance import CERTIFIED, chance_tables, chosen_by_chance, threshold_told
from toolformer_dag.pipeline.plan import Lane
from toolformer_dag.pipeline.spending import StepCost, token_count
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.update import Reasons, TableReport, differences, update
from toolformer_dag.settings.tool_settings import ChanceThreshold
from toolformer_dag.tools.tool import Tool

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


def tool_pool(lane: Lane) -> str:
    """Return the pool of a lane's tool: runs take turns calling it, and other lanes' tools are called meanwhile."""
    return f"tools/{lane.key}"


def prepares(tool: Tool) -> bool:
    """Return whether a tool makes something before its first call, such as an index of passages."""
    return type(tool).prepare is not Tool.prepare


def table(made: TableOutput) -> Output:
    """Return the asset of a stage: a whole table, whose missing rows are computed in chunks."""
    stage, checks, depends_on = made.stage, ("unique_keys", *made.stage.checks), made.depends_on
    if stage.name == "tool_results" and prepares(made.lane.tool):
        depends_on = (*depends_on, f"{made.lane.key}/prepared_tool")

    def rows(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], compute: dg.ResourceParam[Compute]
    ) -> dg.MaterializeResult:
        before = made.table.version()
        advance = progress(context, stage.unit, lambda: compute.workers.spent)
        report = update(compute.worker, compute.workers, compute.tables[made.name], advance)
        _log(context, made, report)
        cost = _cost(report)
        if cost.tokens or cost.calls or report.data_version != before:
            note_cost(context, lake, cost)
        shown = last_metadata(context) if report.unchanged else {}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(report.data_version),
            metadata={**shown, **this_run(report)} if shown else _metadata(made, report),
            check_results=[_check_result(name, report.violations.get(name, 0)) for name in checks],
        )

    return Output(
        name=made.name,
        settings=made.settings,
        depends_on=depends_on,
        description=description(made),
        kinds=stage.kinds,
        pool=tool_pool(made.lane) if stage.pool == "tools" else stage.pool,
        reasons=lambda: differences(made),
        version=made.table.version,
        make=rows,
        checks=checks,
    )


def _log(context: dg.AssetExecutionContext, table: TableOutput, report: TableReport) -> None:
    """Say in the log what was damaged and what was chosen; tag the run with the settings that changed."""
    for note in report.work.damaged:
        context.log.warning(note)
    if chosen := _chosen(table):
        context.log.log("INFO" if chosen["verdict"] == CERTIFIED else "WARNING", threshold_told(chosen))
    tag_changes(context, report.differences.settings())


def _chosen(table: TableOutput) -> Mapping[str, Any] | None:
    return chosen_by_chance(table.plan, table.lane) if table.stage.name == "filtered_calls" else None


def _cost(report: TableReport) -> StepCost:
    work = report.work
    return StepCost(report.seconds, token_count(work.tokens), work.computed["calls"], report.computed, report.reused)


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


def _check_result(name: str, broken: int) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=broken == 0, check_name=name, metadata={"rows that break it": broken})


def _metadata(table: TableOutput, report: TableReport) -> Mapping[str, dg.MetadataValue]:
    filled = [part for part, count in report.rows.items() if count]
    # each has a row at least, so that more are not opened
    rows = table.table.scan(filled[:PREVIEW_ROWS]) if filled else table.stage.schema.to_frame().lazy()
    more: Mapping[str, Callable[[], Mapping[str, dg.MetadataValue]]] = {
        "filtered_calls": lambda: _filtered(table, _chosen(table), sum(report.rows.values())),
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


def prepared_tool(lane: Lane) -> Output:
    """Return the asset of what a tool makes before its first call; making it again finds it there."""
    settings = {"version": lane.tool.version, "options": lane.identity()}

    def prepared(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        began, advance, made = time.monotonic(), progress(context, "passages"), 0

        def count(done: int) -> None:
            nonlocal made
            made = done
            advance(done, 0)

        lane.tool.prepare(count)
        seconds = round(time.monotonic() - began, 3)
        version = dg.DataVersion(fingerprint(settings))
        return dg.MaterializeResult(data_version=version, metadata={ROWS: made, "seconds": seconds})

    return Output(
        name=f"{lane.key}/prepared_tool",
        settings=settings,
        depends_on=(),
        description=f"What {lane.tool.name} needs before its first call (an index of passages); resumable.",
        kinds={"python"},
        pool=tool_pool(lane),
        reasons=Reasons,
        version=lambda: fingerprint(settings),
        make=prepared,
    )
