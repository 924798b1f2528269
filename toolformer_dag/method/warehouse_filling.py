"""Writing the tables of the warehouse into its file: all from nothing, or in a copy of it the rows of some shards.

Verdicts are of a shard: the filter has stored the reason of each call, also where it followed from other shards. What
is counted over all verdicts, `swapped_places` and `curves`, is counted again.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from toolformer_dag.lake.database_files import write_out
from toolformer_dag.lake.queries import in_memory, quoted, rows, run_sql, sql_text
from toolformer_dag.lake.table_comments import write_comments
from toolformer_dag.lake.warehouse_building import PartFiles
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decided_calls import DECIDED
from toolformer_dag.method.decision_sql import JUDGED, RULE, SCORED, SWAPPED_PLACES
from toolformer_dag.method.scoring import calls_query, kept_as, reads_cost
from toolformer_dag.method.warehouse_views import tool_costs_query, views_sql

VERDICTS = sql_text(__package__, "verdicts.sql")
"""`verdicts`: every scored call with what became of it."""
DECISIONS = sql_text(__package__, "decisions.sql")
"""The empty table `decisions`, with its comments."""
CURVES = sql_text(__package__, "curves.sql")
"""`curves`: how many deltas lie in each hundredth of a nat."""
DERIVED_FROM = {"decisions": [SCORED], "swapped_places": ["decisions"], "curves": ["decisions"]}
"""Tables that follow from the others, each with what its columns without a comment of their own come from."""
MEMORY = "3GB"
"""What building may hold in memory; the rest is spilled beside the file."""


def fill(
    file: Path, spilled: Path, tables: Sequence[WarehouseTable], files: PartFiles, shards: Collection[str] | None
) -> dict[str, int]:
    """Fill the warehouse, a DuckDB file: tables, comments and views; return table -> number of rows.

    file: a new file, or a copy of the last one in which the rows of `shards` are replaced.
    spilled: a folder for what does not fit into memory.
    tables: every table of the warehouse. files: table -> its Parquet files (see `DeclaredWarehouse.fill`).
    shards: None for a new file.

    Any DuckDB from 1.0 on can open the file.
    """
    with _attached(file, spilled) as connection:
        replaced = "CREATE TEMP TABLE replaced AS SELECT unnest($shards::VARCHAR[]) AS shard"
        connection.execute(replaced, {"shards": list(shards or ())})
        run_sql(connection, f"CREATE OR REPLACE {RULE}")
        for table in sorted(tables, key=lambda table: bool(table.scores)):  # what calls cost is read from the others
            query = _rows_query(table, files[table.name], tables)
            if table.name == SCORED:
                connection.execute(f"CREATE TEMP {kept_as(table.scores)} scored AS {query}")
            elif table.name == DECIDED:
                connection.execute(f"CREATE TEMP VIEW {DECIDED} AS {query}")
            elif shards is None:
                connection.execute(f'CREATE TABLE "{table.name}" AS {query}')
            else:
                _replace_rows(connection, table, query)
        _decide(connection, anew=shards is None)
        if shards is None:
            run_sql(connection, views_sql(tables))
        shown = [table for table in tables if table.name != DECIDED]
        write_comments(connection, shown, DERIVED_FROM)
        names = (*(table.name for table in shown), *DERIVED_FROM)
        return {name: rows(connection, f'SELECT count(*) FROM "{name}"').item() for name in names}


@contextmanager
def _attached(file: Path, spilled: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the file inside the block, as the default database of the connection; `spilled`: a folder to spill to."""
    with in_memory() as connection:
        connection.execute(f"SET memory_limit = {quoted(MEMORY)}")
        connection.execute(f"SET temp_directory = {quoted(spilled)}")
        connection.execute("SET preserve_insertion_order = false")  # of copied rows; with it they are compressed twice
        connection.execute(f"ATTACH {quoted(file)} AS warehouse (STORAGE_VERSION 'v1.0.0')")
        connection.execute("USE warehouse")
        yield connection
        write_out(connection, "warehouse")
        connection.execute("USE memory")
        connection.execute("DETACH warehouse")


def _rows_query(table: WarehouseTable, files: Sequence[str], tables: Sequence[WarehouseTable]) -> str:
    """Return an SQL query for the rows of a table of the warehouse, over Parquet files of the lake.

    files: those of the table. tables: all tables, of which those with results say what calls cost. Rows of the table of
    scored calls get a number, `row`.
    """
    if table.name != SCORED and not table.scores:
        names = ", ".join(map(quoted, files))
        read = f"FROM read_parquet([{names}], hive_partitioning = false, union_by_name = {table.measured})"
    else:
        read_by_costs = f"tool_costs AS ({tool_costs_query(tables)})" if reads_cost(table.scores) else ""
        read = calls_query(files, table.scores, read_by_costs, swaps="swap" in table.columns)
        if table.name == SCORED:
            return read
        read = f"SELECT * EXCLUDE (row) FROM ({read})"
    return f"WITH rows AS ({read}) {table.select}"


def _replace_rows(connection: duckdb.DuckDBPyConnection, table: WarehouseTable, query: str) -> None:
    """Replace in a copy the rows of the shards in `replaced`, or all; where rows keep their places, only add some."""
    if not table.keeps_places:
        of_shards = "WHERE shard IN (FROM replaced)" if table.by_shard else ""
        connection.execute(f'DELETE FROM "{table.name}" {of_shards}')
    connection.execute(f'INSERT INTO "{table.name}" {query}')


def _decide(connection: duckdb.DuckDBPyConnection, anew: bool) -> None:
    """Fill `decisions`, every scored call with its verdict, and the tables that are counted over them.

    anew: create `decisions`. Else it is there, and only the rows of the shards in the table `replaced` change.
    """
    run_sql(connection, JUDGED + VERDICTS)
    run_sql(connection, DECISIONS if anew else "DELETE FROM decisions WHERE shard IN (FROM replaced)")
    for tool in rows(connection, "SELECT DISTINCT tool FROM scored ORDER BY tool")["tool"]:
        connection.execute(f"INSERT INTO decisions FROM verdicts WHERE tool = {quoted(tool)} ORDER BY delta")
    run_sql(connection, "DROP TABLE IF EXISTS swapped_places; DROP TABLE IF EXISTS curves;")
    run_sql(connection, SWAPPED_PLACES + CURVES)
