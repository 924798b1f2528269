"""Write the SQL of the warehouse's views and macros, over the tables that stages declare."""

from collections.abc import Sequence

from toolformer_dag.lake.queries import quote_sql, read_sql_file
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decision_sql import CHANCE, COST_FRONTIER, of_control
from toolformer_dag.method.scoring import COSTS
from toolformer_dag.settings.tool_settings import MODEL

LOSS_DELTAS = (
    "* EXCLUDE (unfit, eligible, best, kept, tau_f, distance, text_offset, domain, date, document) "
    "REPLACE (unfit AS reason)"
)
"""The columns of a scored call without its verdict; replaces `$loss_deltas` in views.sql."""
VIEWS = CHANCE + of_control(read_sql_file(__package__, "views.sql").replace("$loss_deltas", LOSS_DELTAS))
CONTROL_STATISTICS = of_control(read_sql_file(__package__, "control_statistics.sql"))
"""The view control_statistics; `$names` and `$swaps` stand for the names and the rows of all controls."""
SAMPLES = ("candidates", "chained_candidates")
"""Beginnings of the names of tables of samples."""
SWAP = "tool, shard, digest, segment, position, sample, swap, delta, delta_is_bound, reason"
"""The columns of a control that control_statistics reads."""
TOOL_INPUT = "tool, input, context"
"""The key of a tool's call: equal calls are run once."""


def build_views_sql(tables: Sequence[WarehouseTable]) -> str:
    """Return the statements that create every view and macro, in their order."""
    of_tables = "".join(table.views for table in tables)
    return (
        _build_sampled_view(tables)
        + VIEWS
        + _build_control_statistics_view(tables)
        + _build_tool_costs_view(tables)
        + COSTS
        + COST_FRONTIER
        + of_tables
    )


def has_costs(table: WarehouseTable) -> bool:
    """Return whether the rows of a table are results of calls, with their costs."""
    return "tool_version" in table.columns


def has_swaps(table: WarehouseTable) -> bool:
    """Return whether the rows of a table are calls that were scored with other results."""
    return "swap" in table.columns


def build_tool_costs_query(tables: Sequence[WarehouseTable]) -> str:
    """Return the query for the cost of every distinct call, over all tables of results: (tool, input, context, ...)."""
    results = [f'SELECT {TOOL_INPUT}, cost, seconds FROM "{table.name}"' for table in tables if has_costs(table)]
    return (
        f"SELECT {TOOL_INPUT}, max(cost) AS cost, max(seconds) AS seconds "
        f"FROM ({' UNION ALL '.join(results)}) GROUP BY ALL"
    )


def _build_sampled_view(tables: Sequence[WarehouseTable]) -> str:
    """Build the SQL of the view `sampled` (tool, input, source) over all tables of samples.

    Tables of chained calls have no column `source`. The view shows MODEL for them, because only the model proposes such
    calls.
    """
    selects = []
    for table in tables:
        if table.name.startswith(SAMPLES):
            source = "source" if "source" in table.columns else quote_sql(MODEL)
            selects.append(f"SELECT tool, input, {source} AS source FROM {table.name}")

    view = f"CREATE VIEW sampled AS {' UNION ALL '.join(selects)};"
    comment = quote_sql("Every sample, of calls after others too.")
    return f"{view}COMMENT ON VIEW sampled IS {comment};"


def _build_control_statistics_view(tables: Sequence[WarehouseTable]) -> str:
    """Return the SQL of the view control_statistics, over the tables of all controls."""
    names = [table.name for table in tables if has_swaps(table)]
    swaps = [f'SELECT {quote_sql(name)} AS control, {SWAP} FROM "{name}"' for name in names]
    view = CONTROL_STATISTICS.replace("$names", ", ".join(map(quote_sql, names)))
    return view.replace("$swaps", " UNION ALL ".join(swaps))


def _build_tool_costs_view(tables: Sequence[WarehouseTable]) -> str:
    """Return the SQL of the view `tool_costs`, over all tables of results, chained calls included."""
    query = build_tool_costs_query(tables)
    return f"CREATE VIEW tool_costs AS {query};COMMENT ON VIEW tool_costs IS 'What every distinct call cost.';"
