"""Write the SQL of the warehouse's views and macros, over the tables that stages declare."""

from collections.abc import Sequence

from toolformer_dag.lake.queries import quote_sql, read_sql_file
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decision_sql import CHANCE_VIEWS_SQL, COST_FRONTIER_VIEW_SQL, insert_control_name
from toolformer_dag.method.scoring import CALL_COSTS_VIEW_SQL
from toolformer_dag.settings.tool_settings import MODEL_SOURCE

LOSS_DELTAS_COLUMNS_SQL = (
    "* EXCLUDE (unfit, eligible, best, kept, tau_f, distance, text_offset, domain, date, document) "
    "REPLACE (unfit AS reason)"
)
"""The columns of a scored call without its verdict; replaces `$loss_deltas` in views.sql."""
VIEWS = CHANCE_VIEWS_SQL + insert_control_name(
    read_sql_file(__package__, "views.sql").replace("$loss_deltas", LOSS_DELTAS_COLUMNS_SQL)
)
CONTROL_STATISTICS_TEMPLATE = insert_control_name(read_sql_file(__package__, "control_statistics.sql"))
"""The view control_statistics; `$names` and `$swaps` stand for the names and the rows of all controls."""
SAMPLE_TABLE_PREFIXES = ("candidates", "chained_candidates")
"""Beginnings of the names of tables of samples."""
SWAP_COLUMNS_SQL = "tool, shard, digest, segment, position, sample, swap, delta, delta_is_bound, reason"
"""The columns of a control that control_statistics reads."""
TOOL_CALL_KEY_SQL = "tool, input, context"
"""The key of a tool's call: equal calls are run once."""


def build_views_sql(tables: Sequence[WarehouseTable]) -> str:
    """Return the SQL statements that create every view and macro, in their order."""
    table_views_sql = "".join(table.views_sql for table in tables)
    return (
        _build_sampled_view(tables)
        + VIEWS
        + _build_control_statistics_view(tables)
        + _build_tool_costs_view(tables)
        + CALL_COSTS_VIEW_SQL
        + COST_FRONTIER_VIEW_SQL
        + table_views_sql
    )


def has_costs(table: WarehouseTable) -> bool:
    """Return whether the rows of a table are results of calls, with their costs."""
    return "tool_version" in table.comments_by_column


def has_swaps(table: WarehouseTable) -> bool:
    """Return whether the rows of a table are calls that were scored with other results."""
    return "swap" in table.comments_by_column


def build_tool_costs_query(tables: Sequence[WarehouseTable]) -> str:
    """Return the SQL query for what every distinct call cost, over all tables of results.

    Its rows have the key of a call (tool, input, context), its cost and its seconds.
    """
    result_queries = [
        f'SELECT {TOOL_CALL_KEY_SQL}, cost, seconds FROM "{table.name}"' for table in tables if has_costs(table)
    ]
    all_results_query = " UNION ALL ".join(result_queries)
    return (
        f"SELECT {TOOL_CALL_KEY_SQL}, max(cost) AS cost, max(seconds) AS seconds "
        f"FROM ({all_results_query}) GROUP BY ALL"
    )


def _build_sampled_view(tables: Sequence[WarehouseTable]) -> str:
    """Build the SQL of the view `sampled` (tool, input, source) over all tables of samples, the proposed calls.

    The column `source` says who proposed a call. Tables of chained calls (several in a row at one place) have no such
    column, because only the model proposes these: the view shows MODEL_SOURCE for them.
    """
    select_queries = []
    for table in tables:
        if table.name.startswith(SAMPLE_TABLE_PREFIXES):
            has_source = "source" in table.comments_by_column
            source_sql = "source" if has_source else quote_sql(MODEL_SOURCE)
            select_queries.append(f"SELECT tool, input, {source_sql} AS source FROM {table.name}")

    view_sql = f"CREATE VIEW sampled AS {' UNION ALL '.join(select_queries)};"
    comment = quote_sql("Every sample, of calls after others too.")
    return f"{view_sql}COMMENT ON VIEW sampled IS {comment};"


def _build_control_statistics_view(tables: Sequence[WarehouseTable]) -> str:
    """Return the SQL of the view control_statistics, over the tables of all controls.

    A control is a table of calls that were scored with other results than their own. Since these cannot help, what the
    filter would keep of them shows how much it keeps by chance.
    """
    control_names = [table.name for table in tables if has_swaps(table)]
    quoted_names = ", ".join(map(quote_sql, control_names))
    swap_queries = [f'SELECT {quote_sql(name)} AS control, {SWAP_COLUMNS_SQL} FROM "{name}"' for name in control_names]

    view_sql = CONTROL_STATISTICS_TEMPLATE.replace("$names", quoted_names)
    return view_sql.replace("$swaps", " UNION ALL ".join(swap_queries))


def _build_tool_costs_view(tables: Sequence[WarehouseTable]) -> str:
    """Return the SQL of the view `tool_costs`, over all tables of results, chained calls included."""
    query = build_tool_costs_query(tables)
    return f"CREATE VIEW tool_costs AS {query};COMMENT ON VIEW tool_costs IS 'What every distinct call cost.';"
