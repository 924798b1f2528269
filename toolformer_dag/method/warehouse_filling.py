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
    """Fill the warehouse, a DuckDB file: tables, comments and views; return table -> number of rows.

    file: a new file, or a copy of the last one where the rows of `shards` are replaced.
    spilled: a folder for what does not fit into memory.
    tables: every table of the warehouse. files: table -> its Parquet files (see `DeclaredWarehouse.fill`).
    shards: None for a new file.

    Any DuckDB from 1.0 on can open the file.
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
    """Create a table of a new file from the rows of `query`; in a copy of the last file, replace rows of the table.

    Which rows are replaced, the temporary table `replaced` says, which names shards. The scored calls (SCORED) and the
    filter's reasons (DECIDED) are only needed to fill `decisions`: they are temporary and not written into the file.
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
    """Open a connection whose default database is the file; when the block ends, the file is written and closed.

    If the block raises, the file is not to be used. spilled: a folder for what does not fit into memory.
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
    """Return an SQL query for the rows of a table of the warehouse, over Parquet files of the lake.

    files: the Parquet files of the table. tables: all tables; the results among them say what calls cost.

    Three kinds of table differ:
    - the scored calls (SCORED): the query that computes their scores, with a number of each call in the column `row`
    - other calls with another score than the paper's (`table.scores`): that query without numbers, as `rows`, and then
      the table's `select`, a query over `rows` such as "FROM rows"
    - all others: `WITH rows AS (FROM read_parquet([...])) FROM rows`, where the last part is `select`
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
    """Replace the rows of a table in a copy of the warehouse by the rows of `query`.

    A table by shard loses its rows of the shards in the table `replaced`, any other table all rows. A table whose row
    numbers others hold (`keeps_places`) only gets rows added.
    """
    if not table.keeps_places:
        of_shards = "WHERE shard IN (FROM replaced)" if table.by_shard else ""
        connection.execute(f'DELETE FROM "{table.name}" {of_shards}')
    connection.execute(f'INSERT INTO "{table.name}" {query}')


def _fill_decisions(connection: duckdb.DuckDBPyConnection, is_new: bool) -> None:
    """Fill `decisions`, every scored call with its verdict, and the tables that are counted over it.

    In a copy of the warehouse (not `is_new`) only the rows of `decisions` of the shards in the table `replaced` change.
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
