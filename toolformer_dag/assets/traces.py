"""The asset of the file that shows the judged calls of recorded conversations."""

from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from toolformer_dag.assets.declaration import AssetDeclaration
from toolformer_dag.assets.metadata import ROWS, UNCHANGED, format_frame_table, read_last_metadata
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.files import build_temporary_path, replace_whole
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces.judgement import (
    TABLES,
    VIEWS,
    build_traces_database,
    compute_traces_version,
    made_from,
    refuse_unread,
    traces_database,
)
from toolformer_dag.traces.trace_stages import trace_tables

TRACES = "traces/judged"


def build_trace_outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return the asset of traces.duckdb, a file of views over recorded conversations; empty without such tables."""
    table_names = tuple(table.name for table in trace_tables(plan))
    return [_build_traces_asset(plan, table_names)] if table_names else []


def _build_traces_asset(plan: Plan, table_names: tuple[str, ...]) -> AssetDeclaration:
    """Return the asset of traces.duckdb, which is built from the tables of these names."""
    return AssetDeclaration(
        name=TRACES,
        settings={"views": fingerprint([TABLES, VIEWS]), "share": plan.settings.traces.share},
        depends_on=table_names,
        description="Whether what follows recorded tool calls rests on their results: traces.duckdb.",
        kinds={"duckdb"},
        pool="lake",
        reasons=partial(_find_reasons, plan),
        version=partial(made_from, traces_database(plan.settings)),
        make=partial(_make_traces_file, plan),
    )


def _find_reasons(plan: Plan) -> Reasons:
    """Return why the file is missing or out of date."""
    is_current = made_from(traces_database(plan.settings)) == compute_traces_version(plan)
    return Reasons({} if is_current else {WHOLE: ["rows, views or the share changed, or there is no file"]})


def _make_traces_file(plan: Plan, context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Build the file of judged calls if it is out of date; return what the asset's page shows: the verdicts by tool.

    It is also built if this Dagster instance has never shown it: then another Dagster home has made the file. If
    nothing changed, the page shows again what it showed last. Raises UserError if no conversation could be read.
    """
    refuse_unread(plan)
    database = traces_database(plan.settings)
    shown_last = read_last_metadata(context)
    if _find_reasons(plan) or not shown_last:
        _build_traces_file(plan, database)
        shown = _build_verdict_metadata(database)
    else:
        shown = {**shown_last, UNCHANGED: True}
    version = made_from(database) or ""  # the version of what the file was built from
    return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=shown)


def _build_traces_file(plan: Plan, database: Path) -> None:
    """Build the file under another name and replace the old one with it."""
    fresh = build_temporary_path(database, ".duckdb")
    try:
        build_traces_database(plan, fresh, compute_traces_version(plan))
        replace_whole(fresh, database)
    finally:
        fresh.unlink(missing_ok=True)


def _build_verdict_metadata(database: Path) -> dict[str, Any]:
    """Return what the page shows of a file that was built: the verdicts by tool."""
    tools = query(database, "FROM trace_tools")
    return {
        ROWS: int(tools["calls"].sum()),
        "verdicts": dg.MetadataValue.md(format_frame_table(tools, tools.height)),
        "file": dg.MetadataValue.path(str(database)),
        UNCHANGED: False,
    }
