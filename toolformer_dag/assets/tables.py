"""The assets of the stages: each brings its table up to date, or finds that nothing changed and skips itself."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.assets.declaration import Output
from toolformer_dag.assets.metadata import (
    PREVIEW_ROWS,
    ROWS,
    UNCHANGED,
    counts_table,
    frame_table,
    last_metadata,
    this_run,
)
from toolformer_dag.assets.plots import chance_curves, delta_histogram, frontier_curve
from toolformer_dag.assets.running import note_changes, note_cost, progress, tag_changes
from toolformer_dag.computing.change_log import KeptCalls
from toolformer_dag.computing.plan import Lane
from toolformer_dag.computing.reasons import Reasons, differences
from toolformer_dag.computing.spending import NO_TOKENS, StepCost, token_count
from toolformer_dag.computing.stage import TableOutput
from toolformer_dag.computing.update import TableReport, update
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.pipeline.augmented_corpus import corpus_batches
from toolformer_dag.pipeline.chance import CERTIFIED, chance_tables, chosen_by_chance, threshold_line
from toolformer_dag.pipeline.proposals import rarely_written
from toolformer_dag.pipeline.raw_shards import NAME as RAW_SHARDS
from toolformer_dag.pipeline.raw_shards import UnreadCorpus, nothing_read
from toolformer_dag.pipeline.scores import cost_frontier, scored_deltas
from toolformer_dag.resources import Compute
from toolformer_dag.settings.servers import lane_key
from toolformer_dag.tools.tool import Tool

CHECKS = {
    "losses_finite": "Every loss is a finite number, or missing with a reason.",
    "kept_at_tau_f": "Every kept call gains at least tau_f.",
    "gives_text_back": "A text of C* without its calls is the document's text, byte for byte.",
}
"""What the checks of the stages promise."""


def refuse_unread(made: TableOutput) -> None:
    """Raise UnreadCorpus where the documents were read and there is none: nothing that follows would find more."""
    if made.name == RAW_SHARDS and (reason := nothing_read(made.plan)):
        raise UnreadCorpus(reason)


def table_reasons(made: TableOutput) -> Reasons:
    """Return why a table is out of date; the documents also where there is none, so that each run says so."""
    reasons = differences(made)
    reason = None if reasons or made.name != RAW_SHARDS else nothing_read(made.plan)
    return Reasons({WHOLE: [reason]}) if reason else reasons


def tool_pool(lane: Lane) -> str:
    """Return the pool of a lane's tool: runs take turns calling it, and other lanes' tools are called meanwhile."""
    return f"tools/{lane.tool.key}"


def prepares(tool: Tool) -> bool:
    """Return whether a tool makes something before its first call, such as an index of passages."""
    return type(tool).prepare is not Tool.prepare


def _prepared(made: TableOutput) -> list[str]:
    """Return the assets of what the tools that a table calls make before their first call."""
    if made.stage.pool != "tools":
        return []
    called = (made.lane,) if made.stage.name == "tool_results" else made.lane.chainable.values()
    return [f"{lane.tool.key}/prepared_tool" for lane in called if prepares(lane.tool)]


def _checkpoint_of(made: TableOutput) -> list[str]:
    """Return the asset of the checkpoint that a table's plan starts from, where the table is computed by it."""
    start = made.plan.start
    asked = start and made.stage.pool == "gpu" and made.settings["model"] == made.plan.proposer
    return [start.named("training/finetuned_checkpoint")] if start and asked else []


def _group(made: TableOutput) -> str:
    """Return one group for all lanes of a server, which may be dozens."""
    server = made.lane.tool.server if made.lane_or_none else ""
    return f"server_{lane_key(server)}{made.plan.suffix}" if server else ""


def table(made: TableOutput) -> Output:
    """Return the asset of a stage: a whole table, whose missing rows are computed in chunks."""
    stage = made.stage
    checks = {
        "unique_keys": f"No two rows have the same {', '.join(stage.key)}.",
        **{name: CHECKS[name] for name in stage.checks},
    }

    def rows(context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        before = made.table.version()
        kept_before = _kept_calls(made)
        _warn_of_name(context, made)
        advance = progress(context, stage.unit, lambda: compute.workers.spent, lambda: compute.worker.ahead)
        report = update(compute.worker, compute.workers, compute.tables[made.name], advance)
        refuse_unread(made)
        _log(context, made, report)
        tokens, calls = token_count(report.work.tokens), report.work.computed["calls"]
        cost = StepCost(report.seconds, tokens, calls, report.computed, report.reused)
        if cost.tokens or cost.calls or report.data_version != before:
            note_cost(context, lake, cost)
        _note_changes(context, lake, report, before, kept_before)
        shown = last_metadata(context) if report.unchanged else {}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(report.data_version),
            metadata={**shown, **this_run(report)} if shown else _metadata(made, report),
            check_results=_check_results(checks, report),
        )

    return Output(
        name=made.name,
        settings=made.settings,
        depends_on=(*made.depends_on, *_prepared(made), *_checkpoint_of(made)),
        description=f"{stage.description} {made.lane.tool.name}." if made.lane_or_none else stage.description,
        kinds=stage.kinds,
        pool=tool_pool(made.lane) if stage.pool == "tools" else stage.pool,
        reasons=lambda: table_reasons(made),
        version=made.table.version,
        make=rows,
        checks=checks,
        group=_group(made),
    )


def _warn_of_name(context: dg.AssetExecutionContext, made: TableOutput) -> None:
    """Say before a token is spent where the model hardly writes calls of the lane's tool."""
    if made.stage.name == "scored_candidates":
        for line in rarely_written(made.plan, [made.lane]):
            context.log.warning(line)


def _log(context: dg.AssetExecutionContext, table: TableOutput, report: TableReport) -> None:
    """Say in the log what was damaged and what was chosen; tag the run with the settings that changed."""
    for note in report.work.damaged:
        context.log.warning(note)
    if chosen := _chosen(table):
        context.log.log("INFO" if chosen["verdict"] == CERTIFIED else "WARNING", threshold_line(chosen))
    tag_changes(context, report.differences.settings())


def _kept_calls(made: TableOutput) -> int | None:
    """Return how many calls the lane of filtered_calls keeps now; None for another table."""
    if made.stage.name != "filtered_calls":
        return None
    return sum(part.rows for part in made.table.pointers().values())


def _note_changes(
    context: dg.AssetExecutionContext, lake: Lake, report: TableReport, version: str | None, kept_before: int | None
) -> None:
    """Log the settings that changed, and kept calls that did; `version`: of the table before, None for a first run."""
    settings = report.differences.setting_changes()
    kept = None if kept_before is None or version is None else KeptCalls(kept_before, sum(report.rows.values()))
    has_other_calls = kept is not None and report.data_version != version
    if settings or has_other_calls:
        note_changes(context, lake, settings, kept)


def _check_results(names: Iterable[str], report: TableReport) -> list[dg.AssetCheckResult]:
    return [
        dg.AssetCheckResult(passed=not broken, check_name=name, metadata={"rows that break it": broken})
        for name, broken in ((name, report.violations.get(name, 0)) for name in names)
    ]


def _chosen(table: TableOutput) -> Mapping[str, Any] | None:
    return chosen_by_chance(table.plan, table.lane) if table.stage.name == "filtered_calls" else None


def _metadata(table: TableOutput, report: TableReport) -> Mapping[str, dg.MetadataValue]:
    filled = [part for part, count in report.rows.items() if count]
    # each has a row at least, so that more are not opened
    rows = table.table.scan(filled[:PREVIEW_ROWS]) if filled else table.stage.schema.to_frame().lazy()
    more: Mapping[str, Callable[[], Mapping[str, dg.MetadataValue]]] = {
        "filtered_calls": lambda: _filtered(table, _chosen(table), sum(report.rows.values())),
        "swapped_results": lambda: _kept_by_chance(table),
        "augmented_corpus": lambda: _examples(table),
    }
    columns = [
        dg.TableColumn(name, str(column.dtype), column.description) for name, column in table.stage.columns.items()
    ]
    tokens = {kind: n for kind, n in report.work.tokens.items() if kind not in NO_TOKENS}
    return {
        **more.get(table.stage.name, dict)(),
        ROWS: dg.MetadataValue.int(sum(report.rows.values())),
        **this_run(report),
        "tokens": dg.MetadataValue.md(counts_table("kind", tokens)),
        "rejections": dg.MetadataValue.md(counts_table("reason", report.rejections)),
        "rows per shard": dg.MetadataValue.md(counts_table("shard", report.rows, "rows")),
        "dagster/column_schema": dg.MetadataValue.table_schema(dg.TableSchema(columns)),
        "first rows": dg.MetadataValue.md(frame_table(rows.head(PREVIEW_ROWS).collect())),
    }


def _examples(table: TableOutput) -> Mapping[str, dg.MetadataValue]:
    """Texts of C* per lane, as in Table 2, all with calls, and those that stand as they are."""
    batches = [batch["tools"] for batch in corpus_batches(table.plan.lake)]
    counts = Counter(tool for tools in batches for tool in tools.list.explode())  # None for a text without calls
    texts = {lane: counts[lane] for lane in table.plan.lane_names}
    texts["all"] = sum(map(len, batches)) - counts[None]
    shown = {f"texts with {tool}": dg.MetadataValue.int(count) for tool, count in texts.items()}
    return {**shown, **({"texts without calls": dg.MetadataValue.int(counts[None])} if counts[None] else {})}


def _filtered(table: TableOutput, chosen: Mapping[str, Any] | None, kept: int) -> Mapping[str, dg.MetadataValue]:
    """The threshold, and where it cuts the distribution of delta: on the asset that a new threshold reruns."""
    tau_f = table.lane.tau_f if isinstance(table.lane.tau_f, float) else None
    deltas = scored_deltas(table.plan, table.lane)
    shown: dict[str, dg.MetadataValue] = {"calls kept": dg.MetadataValue.int(kept)}
    if chosen:
        tau_f = chosen["tau_f"]
        shown["threshold"] = dg.MetadataValue.text(threshold_line(chosen))
    if tau_f is not None:
        shown["tau_f"] = dg.MetadataValue.float(tau_f)
    if deltas.height:
        shown["share of the scored calls kept"] = dg.MetadataValue.float(kept / deltas.height)
        shown["deltas"] = dg.MetadataValue.md(delta_histogram(deltas, tau_f))
        frontier = cost_frontier(table.plan, table.lane, tau_f)
        if frontier is not None:
            shown["nats over cost"] = dg.MetadataValue.md(frontier_curve(frontier))
    return shown


def _kept_by_chance(table: TableOutput) -> Mapping[str, dg.MetadataValue]:
    """How many places are kept by chance beside those that are kept, and the false discovery rate over tau_f."""
    statistics, rates = chance_tables(table.plan, table.lane)
    by_chance = (
        pl.when("too_few_swaps").then(pl.lit("too few swaps to tell")).otherwise(pl.col("by_chance").cast(pl.String))
    )
    counts = statistics.with_columns(by_chance=by_chance).drop("tool", "too_few_swaps", strict=False)
    measured = statistics.filter(pl.col("swaps") > 0).select("tau_f", "by_chance", "fdr").rows()
    return {
        **{f"kept by chance at {tau_f:g}": dg.MetadataValue.int(count) for tau_f, count, _ in measured},
        **{f"false discovery rate at {tau_f:g}": dg.MetadataValue.float(fdr) for tau_f, _, fdr in measured if fdr},
        "kept": dg.MetadataValue.md(frame_table(counts, counts.height)),
        **({} if rates.is_empty() else {"kept by chance": dg.MetadataValue.md(chance_curves(rates))}),
    }


def prepared_tool(lane: Lane) -> Output:
    """Return the asset of what a tool makes before its first call; making it again finds it there."""
    settings = {"version": lane.tool.version, "options": lane.identity()}

    def prepared(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        began = time.monotonic()
        advance = progress(context, "passages")
        indexed = 0

        def note(done: int) -> None:
            nonlocal indexed
            indexed = done
            advance(done, 0)

        lane.tool.prepare(note)
        shown: dict[str, Any] = {"seconds": round(time.monotonic() - began, 3)}
        if indexed:  # without progress nobody knows whether the tool made something or found it there
            shown[UNCHANGED] = False
        return dg.MaterializeResult(data_version=dg.DataVersion(fingerprint(settings)), metadata=shown)

    return Output(
        name=f"{lane.tool.key}/prepared_tool",
        settings=settings,
        depends_on=(),
        description=f"What {lane.tool.name} needs before its first call (an index of passages); resumable.",
        kinds={"python"},
        pool=tool_pool(lane),
        reasons=Reasons,
        version=lambda: fingerprint(settings),
        make=prepared,
    )
