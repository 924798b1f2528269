"""Write the tables of the warehouse into a new file, or replace the rows of some shards in a copy of the last file.

The filter has stored the reason of each call, so that the verdict on a call only changes with its shard. The tables
`swapped_places` and `curves` are counted over all verdicts each time.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from toolformer_dag.lake.database_files import write_out
from toolformer_dag.lake.queries import open_in_memory, quote_sql, read_sql_file, rows, run_sql
from toolformer_dag.lake.table_comments import write_comments
from toolformer_dag.lake.warehouse_building import PartFiles
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decided_calls import DECIDED
from toolformer_dag.method.decision_sql import JUDGED, RULE, SCORED, SWAPPED_PLACES
from toolformer_dag.method.scoring import calls_query, choose_table_or_view, list_lanes_reading_cost
from toolformer_dag.method.warehouse_views import build_tool_costs_query, build_views_sql, has_swaps

VERDICTS = read_sql_file(__package__, "verdicts.sql")
"""`verdicts`: every scored call with what became of it."""
DECISIONS = read_sql_file(__package__, "decisions.sql")
"""The empty table `decisions`, with its comments."""
CURVES = read_sql_file(__package__, "curves.sql")
"""`curves`: how many deltas lie in each hundredth of a nat."""
DERIVED_FROM = {"decisions": [SCORED], "swapped_places": ["decisions"], "curves": ["decisions"]}
"""Tables that follow from others: name -> the tables from which columns without a comment take one."""
MEMORY = "3GB"
"""What building may hold in memory; the rest goes to a folder for spilled data."""


def fill(
    file: Path, spilled: Path, tables: Sequence[WarehouseTable], files: PartFiles, shards: Collection[str] | None
) -> dict[str, int]:
    """Write tables, comments and views into the file of the warehouse.

    Any DuckDB from version 1.0 on can open the file.

    Args:
        file: A new file, or a copy of the last one.
        spilled: A folder for data that does not fit into memory.
        tables: All tables of the warehouse.
        files: The Parquet files of each table, by its name (see `DeclaredWarehouse.fill`).
        shards: The shards whose rows are replaced in the copy. None for a new file.

    Returns:
        The number of rows of each table.
    """
    is_new = shards is None
    with _attach_warehouse(file, spilled) as connection:
        _create_replaced_shards(connection, shards or ())
        run_sql(connection, f"CREATE OR REPLACE {RULE}")  # the macro `why_not`, why a call is not kept

        for table in _sort_scores_last(tables):
            query = _build_rows_query(table, files[table.name], tables)
            _fill_table(connection, table, query, is_new)

        _fill_decisions(connection, is_new)  # follows from the scored calls, which are filled now
        if is_new:  # a copy has the views already
            run_sql(connection, build_views_sql(tables))

        tables_in_file = [table for table in tables if table.name != DECIDED]  # that one only fills `decisions`
        write_comments(connection, tables_in_file, DERIVED_FROM)
        return _count_rows(connection, [*(table.name for table in tables_in_file), *DERIVED_FROM])


def _sort_scores_last(tables: Sequence[WarehouseTable]) -> list[WarehouseTable]:
    """Return the tables in their order, those with scores last: a score may read costs from the other tables."""
    return sorted(tables, key=lambda table: bool(table.scores))  # False sorts before True


def _create_replaced_shards(connection: duckdb.DuckDBPyConnection, shards: Collection[str]) -> None:
    """Create the temporary table `replaced` with the names of the shards whose rows are replaced."""
    replaced = "CREATE TEMP TABLE replaced AS SELECT unnest($shards::VARCHAR[]) AS shard"
    connection.execute(replaced, {"shards": list(shards)})


def _count_rows(connection: duckdb.DuckDBPyConnection, names: Sequence[str]) -> dict[str, int]:
    """Return the number of rows of each of the tables with these names."""
    return {name: rows(connection, f'SELECT count(*) FROM "{name}"').item() for name in names}


def _fill_table(connection: duckdb.DuckDBPyConnection, table: WarehouseTable, query: str, is_new: bool) -> None:
    """Fill a table of the warehouse with the rows of a query.

    In a new file the table is created. In a copy of the last file, the rows of some shards are replaced: the
    temporary table `replaced` names these shards.

    The scored calls (SCORED) and the filter's reasons (DECIDED) only become temporary tables or views. They
    are needed to fill `decisions`, and are not part of the file.
    """
    if table.name == SCORED:
        table_or_view = choose_table_or_view(table.scores)
        connection.execute(f"CREATE TEMP {table_or_view} scored AS {query}")
    elif table.name == DECIDED:
        connection.execute(f"CREATE TEMP VIEW {DECIDED} AS {query}")
    elif is_new:
        connection.execute(f'CREATE TABLE "{table.name}" AS {query}')
    else:
        _replace_rows(connection, table, query)


@contextmanager
def _attach_warehouse(file: Path, spilled: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the file of the warehouse as the default database of a connection.

    The file is written and closed when the block ends. If the block raises an error, the file must not be used.

    Args:
        file: The DuckDB file, which is created if it is missing.
        spilled: A folder for data that does not fit into memory.
    """
    with open_in_memory() as connection:
        connection.execute(f"SET memory_limit = {quote_sql(MEMORY)}")
        connection.execute(f"SET temp_directory = {quote_sql(spilled)}")
        connection.execute("SET preserve_insertion_order = false")  # or copied rows would be compressed twice

        connection.execute(f"ATTACH {quote_sql(file)} AS warehouse (STORAGE_VERSION 'v1.0.0')")
        connection.execute("USE warehouse")

        yield connection

        write_out(connection, "warehouse")
        connection.execute("USE memory")
        connection.execute("DETACH warehouse")


def _build_rows_query(table: WarehouseTable, files: Sequence[str], tables: Sequence[WarehouseTable]) -> str:
    """Build the SQL query that computes the rows of a table from Parquet files.

    For most tables it is `WITH rows AS (FROM read_parquet([...])) SELECT`, where SELECT is the query that the
    table declares (`table.select`, such as "FROM rows"). There are two exceptions:
    - For the scored calls (SCORED), it is the query that computes the scores, with a number of each call as `row`.
    - For other calls whose score is not the paper's (`table.scores`), this query takes the place of read_parquet.

    Args:
        table: The table to fill.
        files: Its Parquet files.
        tables: All tables of the warehouse. Some of them say what calls cost.
    """
    if table.name == SCORED:
        return _build_scored_query(table, files, tables)
    if table.scores:
        return (
            f"WITH rows AS (SELECT * EXCLUDE (row) FROM ({_build_scored_query(table, files, tables)})) {table.select}"
        )

    names = ", ".join(map(quote_sql, files))
    # Files of measurements may lack columns (see WarehouseTable.measured), which are then null.
    scan = f"FROM read_parquet([{names}], hive_partitioning = false, union_by_name = {table.measured})"
    return f"WITH rows AS ({scan}) {table.select}"


def _build_scored_query(table: WarehouseTable, files: Sequence[str], tables: Sequence[WarehouseTable]) -> str:
    """Return an SQL query for a table of calls whose `delta` is the score of their lane; `row` numbers them."""
    cost_tables = f"tool_costs AS ({build_tool_costs_query(tables)})" if list_lanes_reading_cost(table.scores) else ""
    return calls_query(files, table.scores, cost_tables, swaps=has_swaps(table))


def _replace_rows(connection: duckdb.DuckDBPyConnection, table: WarehouseTable, query: str) -> None:
    """Replace rows of a table in a copy of the warehouse by the rows of a query.

    A table with rows by shard only loses the rows of the shards that the table `replaced` names. Any other
    table loses all rows. A table to whose row numbers other tables refer (`keeps_places`) loses none: rows are added.
    """
    if not table.keeps_places:
        of_shards = "WHERE shard IN (FROM replaced)" if table.by_shard else ""
        connection.execute(f'DELETE FROM "{table.name}" {of_shards}')
    connection.execute(f'INSERT INTO "{table.name}" {query}')


def _fill_decisions(connection: duckdb.DuckDBPyConnection, is_new: bool) -> None:
    """Fill the table `decisions` (every scored call with its verdict) and the tables that are counted from it.

    Args:
        is_new: Whether the file is new. In a copy of the last file, only the rows of the shards that the table
            `replaced` names change in `decisions`.
    """
    # Views over `scored`, the scored calls: `judged` (which call is best at its position), and over it `verdicts`.
    run_sql(connection, JUDGED + VERDICTS)

    if is_new:
        run_sql(connection, DECISIONS)  # creates the empty table
    else:
        run_sql(connection, "DELETE FROM decisions WHERE shard IN (FROM replaced)")

    # Tool by tool: sorting all calls at once takes longer and may need more memory than there is.
    for tool in rows(connection, "SELECT DISTINCT tool FROM scored ORDER BY tool")["tool"]:
        connection.execute(f"INSERT INTO decisions FROM verdicts WHERE tool = {quote_sql(tool)} ORDER BY delta")

    # Two tables that are counted over all decisions, and so made anew each time.
    run_sql(connection, "DROP TABLE IF EXISTS swapped_places; DROP TABLE IF EXISTS curves;")
    run_sql(connection, SWAPPED_PLACES + CURVES)
