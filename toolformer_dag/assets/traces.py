"""The calls of recorded conversations, judged, where the settings name such conversations."""

import time

import dagster as dg

from toolformer_dag.assets.declaration import AssetDeclaration
from toolformer_dag.assets.metadata import CALLS, ROWS, TOKENS, UNCHANGED, frame_table, last_metadata
from toolformer_dag.assets.running import note_cost, progress
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.computing.spending import StepCost
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.lake.warehouse import query
from toolformer_dag.resources import Compute
from toolformer_dag.traces.judgement import judge_traces, made_from, trace_settings, traces_database, traces_version

TRACES = "traces/judged"


def trace_outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return the asset where the settings name conversations; of projects that start from others the first has it."""
    return [_judged_traces(plan)] if plan.settings.traces.source and plan.start is None else []


def _judged_traces(plan: Plan) -> AssetDeclaration:
    """Return the asset of the file that `judge` writes, of the conversations of `traces.source`."""
    settings, database = plan.settings, traces_database(plan.settings)

    def reasons() -> Reasons:
        changed = made_from(database) != traces_version(settings)
        return Reasons({WHOLE: ["conversations, judge or settings changed, or there is no file"] if changed else []})

    def judged(context: dg.AssetExecutionContext, lake: Lake, compute: Compute) -> dg.MaterializeResult:
        shown = {} if any(reasons().lines) else {**last_metadata(context), UNCHANGED: True}
        if len(shown) < 2:
            compute.workers.close()  # the judge is loaded here
            began = time.monotonic()
            judgement = judge_traces(settings, settings.traces.source, database, progress(context, "calls"))
            note_cost(context, lake, StepCost(time.monotonic() - began, judgement.tokens))
            tools = query(database, "FROM trace_tools")
            shown = {
                ROWS: int(tools["calls"].sum()),
                "verdicts": dg.MetadataValue.md(frame_table(tools, tools.height)),
                "rejections": judgement.rejected,
                "file": dg.MetadataValue.path(str(database)),
                TOKENS: judgement.tokens,
                CALLS: 0,
                UNCHANGED: False,
            }
        return dg.MaterializeResult(data_version=dg.DataVersion(made_from(database) or ""), metadata=shown)

    return AssetDeclaration(
        name=TRACES,
        settings=trace_settings(settings),
        depends_on=(),
        description="Recorded tool calls of other people's conversations: whether what follows rests on their results.",
        kinds={"pytorch", "duckdb"},
        pool="gpu",
        reasons=reasons,
        version=lambda: made_from(database),
        make=judged,
    )
