"""Write the tables of the warehouse into a new file, or replace the rows of some shards in a copy of the last file.

The filter has stored the reason of each call, so that the verdict on a call only changes with its shard. The tables
`swapped_places` and `curves` are counted over all verdicts each time.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from toolformer_dag.lake.database_files import checkpoint_database
from toolformer_dag.lake.queries import open_memory_database, query_frame, quote_sql, read_sql_file, run_sql
from toolformer_dag.lake.table_comments import write_comments
from toolformer_dag.lake.warehouse_building import FilesByTable
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decided_calls import DECIDED_CALLS_TABLE
from toolformer_dag.method.decision_sql import JUDGED_VIEW_SQL, KEEP_RULE_SQL, SCORED_CALLS_TABLE, SWAPPED_PLACES_SQL
from toolformer_dag.method.scoring import build_scored_calls_query, choose_table_or_view, list_lanes_reading_cost
from toolformer_dag.method.warehouse_views import build_tool_costs_query, build_views_sql, has_swaps

VERDICTS_VIEW_SQL = read_sql_file(__package__, "verdicts.sql")
"""`verdicts`: every scored call with what became of it."""
DECISIONS_TABLE_SQL = read_sql_file(__package__, "decisions.sql")
"""The empty table `decisions`, with its comments."""
CURVES_TABLE_SQL = read_sql_file(__package__, "curves.sql")
"""`curves`: how many deltas lie in each hundredth of a nat."""
SOURCES_BY_DERIVED_TABLE = {"decisions": [SCORED_CALLS_TABLE], "swapped_places": ["decisions"], "curves": ["decisions"]}
"""Tables that follow from others: name -> the tables from which columns without a comment take one."""
MEMORY_LIMIT = "3GB"
"""What building may hold in memory; the rest goes to a folder for spilled data."""


def fill(
    database_path: Path,
    spill_folder: Path,
    tables: Sequence[WarehouseTable],
    files_by_table: FilesByTable,
    replaced_shards: Collection[str] | None,
) -> dict[str, int]:
    """Write tables, comments and views into the file of the warehouse.

    Any DuckDB from version 1.0 on can open the file.

    Args:
        database_path: A new file, or a copy of the last one.
        spill_folder: A folder for data that does not fit into memory.
        tables: All tables of the warehouse.
        files_by_table: The Parquet files of each table, by its name (see `DeclaredWarehouse.fill_database`).
        replaced_shards: The shards whose rows are replaced in the copy. None for a new file.

    Returns:
        The number of rows of each table.
    """
    is_new = replaced_shards is None
    with _open_warehouse(database_path, spill_folder) as connection:
        _create_replaced_shards_table(connection, replaced_shards or ())
        run_sql(connection, f"CREATE OR REPLACE {KEEP_RULE_SQL}")  # the macro `why_not`, why a call is not kept

        for table in _sort_tables_with_scores_last(tables):
            query = _build_rows_query(table, files_by_table[table.name], tables)
            _fill_table(connection, table, query, is_new)

        # The decisions follow from the scored calls, which are filled now.
        _fill_decisions_and_counts(connection, is_new)
        if is_new:  # a copy has the views already
            run_sql(connection, build_views_sql(tables))

        # The table of decided calls only served to fill `decisions`.
        tables_in_file = [table for table in tables if table.name != DECIDED_CALLS_TABLE]
        write_comments(connection, tables_in_file, SOURCES_BY_DERIVED_TABLE)

        table_names = [table.name for table in tables_in_file]
        return _count_rows_by_table(connection, [*table_names, *SOURCES_BY_DERIVED_TABLE])


def _sort_tables_with_scores_last(tables: Sequence[WarehouseTable]) -> list[WarehouseTable]:
    """Return the tables in their order, those with scores last, because a score may read costs from other tables."""
    return sorted(tables, key=lambda table: bool(table.score_sql_by_lane))  # False sorts before True


def _create_replaced_shards_table(connection: duckdb.DuckDBPyConnection, shard_names: Collection[str]) -> None:
    """Create the temporary table `replaced` with the names of the shards whose rows are replaced."""
    query = "CREATE TEMP TABLE replaced AS SELECT unnest($shards::VARCHAR[]) AS shard"
    connection.execute(query, {"shards": list(shard_names)})


def _count_rows_by_table(connection: duckdb.DuckDBPyConnection, table_names: Sequence[str]) -> dict[str, int]:
    """Return the number of rows of each table, by its name."""
    return {name: query_frame(connection, f'SELECT count(*) FROM "{name}"').item() for name in table_names}


def _fill_table(connection: duckdb.DuckDBPyConnection, table: WarehouseTable, rows_query: str, is_new: bool) -> None:
    """Fill a table of the warehouse with the rows of a query.

    In a new file the table is created. In a copy of the last file, the rows of some shards are replaced: the
    temporary table `replaced` names these shards.

    The scored calls (SCORED_CALLS_TABLE) and the filter's reasons (DECIDED_CALLS_TABLE) only become temporary tables or
    views. They are needed to fill `decisions`, and are not part of the file.
    """
    if table.name == SCORED_CALLS_TABLE:
        table_or_view = choose_table_or_view(table.score_sql_by_lane)
        connection.execute(f"CREATE TEMP {table_or_view} scored AS {rows_query}")
    elif table.name == DECIDED_CALLS_TABLE:
        connection.execute(f"CREATE TEMP VIEW {DECIDED_CALLS_TABLE} AS {rows_query}")
    elif is_new:
        connection.execute(f'CREATE TABLE "{table.name}" AS {rows_query}')
    else:
        _replace_rows(connection, table, rows_query)


@contextmanager
def _open_warehouse(database_path: Path, spill_folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the file of the warehouse as the default database of a connection.

    The file is written and closed when the block ends. If the block raises an error, the file must not be used.

    Args:
        database_path: The DuckDB file, which is created if it is missing.
        spill_folder: A folder for data that does not fit into memory.
    """
    with open_memory_database() as connection:
        connection.execute(f"SET memory_limit = {quote_sql(MEMORY_LIMIT)}")
        connection.execute(f"SET temp_directory = {quote_sql(spill_folder)}")
        connection.execute("SET preserve_insertion_order = false")  # or copied rows would be compressed twice

        connection.execute(f"ATTACH {quote_sql(database_path)} AS warehouse (STORAGE_VERSION 'v1.0.0')")
        connection.execute("USE warehouse")

        yield connection

        checkpoint_database(connection, "warehouse")
        connection.execute("USE memory")
        connection.execute("DETACH warehouse")


def _build_rows_query(
    table: WarehouseTable, table_files: Sequence[str], warehouse_tables: Sequence[WarehouseTable]
) -> str:
    """Build the SQL query that computes the rows of a table from Parquet files.

    For most tables it reads the files under the name `rows`, and goes on with the query that the table declares
    (`table.select_sql`, such as "FROM rows"). Scores of calls are computed in two cases:
    - The scored calls (SCORED_CALLS_TABLE) are those of `_build_query_with_scores`, numbered in the column `row`.
    - Of other calls whose score is not the paper's (`table.score_sql_by_lane`), `rows` has the scores, and no numbers.

    Args:
        table: The table to fill.
        table_files: Its Parquet files.
        warehouse_tables: All tables of the warehouse. Some of them say what calls cost.
    """
    if table.name == SCORED_CALLS_TABLE:
        return _build_query_with_scores(table, table_files, warehouse_tables)

    if table.score_sql_by_lane:
        scored_query = _build_query_with_scores(table, table_files, warehouse_tables)
        return f"WITH rows AS (SELECT * EXCLUDE (row) FROM ({scored_query})) {table.select_sql}"

    quoted_files = ", ".join(map(quote_sql, table_files))
    # Files of measurements may lack columns (see WarehouseTable.is_measured), which are then null.
    scan_sql = f"FROM read_parquet([{quoted_files}], hive_partitioning = false, union_by_name = {table.is_measured})"
    return f"WITH rows AS ({scan_sql}) {table.select_sql}"


def _build_query_with_scores(
    table: WarehouseTable, table_files: Sequence[str], warehouse_tables: Sequence[WarehouseTable]
) -> str:
    """Build the SQL query for the calls of a table, with the score of their lane as `delta` and a number as `row`.

    Args:
        table: A table of calls: the real ones, or the control's. In a control, calls are scored with results of others
            (swaps), a row each, and have the cost of the call with its true result.
        table_files: Its Parquet files.
        warehouse_tables: All tables of the warehouse. Some of them say what calls cost.
    """
    cost_tables_sql = ""
    if list_lanes_reading_cost(table.score_sql_by_lane):
        cost_tables_sql = f"tool_costs AS ({build_tool_costs_query(warehouse_tables)})"

    return build_scored_calls_query(table_files, table.score_sql_by_lane, cost_tables_sql, are_swaps=has_swaps(table))


def _replace_rows(connection: duckdb.DuckDBPyConnection, table: WarehouseTable, rows_query: str) -> None:
    """Replace rows of a table in a copy of the warehouse by the rows of a query.

    A table with rows by shard only loses the rows of the shards that the table `replaced` names. Any other table loses
    all rows. A table to whose row numbers other tables refer (`keeps_row_numbers`) loses none: rows are added.
    """
    if not table.keeps_row_numbers:
        condition = "WHERE shard IN (FROM replaced)" if table.has_part_per_shard else ""
        connection.execute(f'DELETE FROM "{table.name}" {condition}')

    connection.execute(f'INSERT INTO "{table.name}" {rows_query}')


def _fill_decisions_and_counts(connection: duckdb.DuckDBPyConnection, is_new: bool) -> None:
    """Fill the table `decisions` (every scored call with its verdict) and the tables that are counted from it.

    Args:
        is_new: Whether the file is new. In a copy of the last file, only the rows of the shards that the table
            `replaced` names change in `decisions`, because `scored` has only the calls of these shards then.
    """
    # Views over `scored`, the scored calls: `judged` (which call is best at its position), and over it `verdicts`.
    run_sql(connection, JUDGED_VIEW_SQL + VERDICTS_VIEW_SQL)

    if is_new:
        run_sql(connection, DECISIONS_TABLE_SQL)  # creates the empty table
    else:
        run_sql(connection, "DELETE FROM decisions WHERE shard IN (FROM replaced)")

    # Tool by tool: sorting all calls at once takes longer and may need more memory than there is.
    for tool in query_frame(connection, "SELECT DISTINCT tool FROM scored ORDER BY tool")["tool"]:
        connection.execute(f"INSERT INTO decisions FROM verdicts WHERE tool = {quote_sql(tool)} ORDER BY delta")

    # Two tables that are counted over all decisions, and so made anew each time.
    run_sql(connection, "DROP TABLE IF EXISTS swapped_places; DROP TABLE IF EXISTS curves;")
    run_sql(connection, SWAPPED_PLACES_SQL + CURVES_TABLE_SQL)
