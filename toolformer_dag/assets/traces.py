"""The asset of the file that shows the judged calls of recorded conversations."""

from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from toolformer_dag.assets.declaration import AssetDeclaration
from toolformer_dag.assets.metadata import ROW_COUNT_LABEL, UNCHANGED_LABEL, format_frame_table, read_last_metadata
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.files import build_temporary_path, replace_file
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import WHOLE_TABLE_PART
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces.judgement import (
    TABLES_SQL,
    VIEWS_SQL,
    build_traces_database,
    compute_traces_version,
    get_traces_database_path,
    read_database_version,
    require_conversations,
)
from toolformer_dag.traces.trace_stages import build_trace_tables

TRACES_ASSET = "traces/judged"


def list_trace_outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return the declared asset of traces.duckdb, or an empty list if the plan has no recorded conversations.

    The file holds views over recorded conversations and over the verdicts on their tool calls.
    """
    table_names = tuple(table.name for table in build_trace_tables(plan))
    if not table_names:
        return []
    return [_declare_traces_asset(plan, table_names)]


def _declare_traces_asset(plan: Plan, table_names: tuple[str, ...]) -> AssetDeclaration:
    """Declare the asset of traces.duckdb, the file that shows which recorded tool calls helped.

    Args:
        table_names: The names of the tables from which the file is built.
    """
    return AssetDeclaration(
        name=TRACES_ASSET,
        settings={"views": fingerprint([TABLES_SQL, VIEWS_SQL]), "share": plan.settings.traces.share},
        depends_on=table_names,
        description="Whether what follows recorded tool calls rests on their results: traces.duckdb.",
        kinds={"duckdb"},
        pool="lake",
        find_reasons=partial(_find_reasons, plan),
        get_version=partial(read_database_version, get_traces_database_path(plan.settings)),
        make_asset=partial(_make_traces_asset, plan),
    )


def _find_reasons(plan: Plan) -> Reasons:
    """Return why the file traces.duckdb is missing or out of date; the reasons are empty if it is current."""
    stored_version = read_database_version(get_traces_database_path(plan.settings))
    if stored_version == compute_traces_version(plan):
        return Reasons({})
    return Reasons({WHOLE_TABLE_PART: ["rows, views or the share changed, or there is no file"]})


def _make_traces_asset(plan: Plan, context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Build the file of judged calls if it is out of date, or if this Dagster instance has not shown it yet.

    Returns:
        The version of the file, and what the asset's page shows: the verdicts by tool. If nothing was built, the page
        shows the same as last time.

    Raises:
        UserError: No conversation could be read.
    """
    require_conversations(plan)
    database_path = get_traces_database_path(plan.settings)
    last_metadata = read_last_metadata(context)

    # Without metadata, the file was made under another Dagster home, and its numbers are not known here.
    if _find_reasons(plan) or not last_metadata:
        _build_traces_file(plan, database_path)
        metadata = _build_verdict_metadata(database_path)
    else:
        metadata = {**last_metadata, UNCHANGED_LABEL: True}

    version = read_database_version(database_path) or ""
    return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=metadata)


def _build_traces_file(plan: Plan, database_path: Path) -> None:
    """Build the file under a temporary name and put it in the place of the old one, so that readers see no half."""
    temporary_path = build_temporary_path(database_path, ".duckdb")
    try:
        build_traces_database(plan, temporary_path, compute_traces_version(plan))
        replace_file(temporary_path, database_path)
    finally:
        temporary_path.unlink(missing_ok=True)


def _build_verdict_metadata(database_path: Path) -> dict[str, Any]:
    """Build what the page shows of a file that was just built: the number of calls, the verdicts by tool, the path."""
    tools = query(database_path, "FROM trace_tools")
    return {
        ROW_COUNT_LABEL: int(tools["calls"].sum()),
        "verdicts": dg.MetadataValue.md(format_frame_table(tools, tools.height)),
        "file": dg.MetadataValue.path(str(database_path)),
        UNCHANGED_LABEL: False,
    }
