"""Writing the tables of the warehouse into its file: all from nothing, or in a copy of it the rows of some shards.

Verdicts are of a shard, as what shards have to know of each other stands in filtered_calls. What is counted over all
verdicts, `swapped_places` and `curves`, is counted again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from toolformer_dag.lake.queries import in_memory, quoted, rows, run_sql, sql_text

if TYPE_CHECKING:
    from toolformer_dag.lake.warehouse import WarehouseTable

RULE = sql_text(__package__, "rule.sql")
"""Does a call stay? The filter, the warehouse and the page ask this."""
JUDGED = sql_text(__package__, "judged.sql")
VERDICTS = sql_text(__package__, "verdicts.sql")
DECISIONS = sql_text(__package__, "decisions.sql")
SWAPPED_PLACES = sql_text(__package__, "swapped_places.sql")
CURVES = sql_text(__package__, "curves.sql")
CHANCE = sql_text(__package__, "chance.sql")
"""Views over `decisions` and `swapped_places`; the filter makes these of one lane, the warehouse of all."""
VIEWS = CHANCE + sql_text(__package__, "views.sql")
SCORED = "loss_deltas"
"""The table whose rows stand in `decisions`, each with its verdict; in the warehouse it is a view of them."""
DOCUMENTS = "documents"
"""The table whose row numbers stand in `decisions`: its rows stay where they are as long as the file is copied."""
DERIVED = ("decisions", "swapped_places", "curves")
MEMORY = "3GB"
"""What building may hold in memory; the rest is spilled beside the file."""
SCORED_DOCUMENTS = "CREATE TEMP VIEW scored_documents AS SELECT tool, shard, digest FROM scored"
OF_OTHER_SHARDS = """
UNION ALL
SELECT tool, shard, digest FROM decisions SEMI JOIN (SELECT DISTINCT tool, digest FROM scored) AS judged_documents
USING (tool, digest)
"""
Files = Mapping[str, list[str]]
"""Part files by table, one without rows at the end: DuckDB estimates all of them by the first."""


def fill(
    file: Path, spilled: Path, tables: Sequence["WarehouseTable"], files: Files, shards: Collection[str] | None
) -> dict[str, int]:
    """Write tables, comments and views into a new file, or in a copy replace the rows of `shards`; table -> rows.

    `files`: of a copy those of `shards` alone for tables by shard; of `documents`, which keep their places, those of
    shards that the file does not have; of other tables all. Any DuckDB from 1.0 on can open the file.
    """
    others = OF_OTHER_SHARDS if shards is not None else ""
    with _attached(file, spilled) as connection:
        replaced = "CREATE TEMP TABLE replaced AS SELECT unnest($shards::VARCHAR[]) AS shard"
        connection.execute(replaced, {"shards": list(shards or ())})
        run_sql(connection, f"CREATE OR REPLACE {RULE}")
        for table in tables:
            if table.name == SCORED:
                scored(connection, files[table.name])
                continue
            verb = f'CREATE TABLE "{table.name}" AS'
            if shards is not None:
                verb = f'INSERT INTO "{table.name}"'
                of_shards = (
                    f"WHERE {table.name != DOCUMENTS} AND {'shard IN (FROM replaced)' if table.by_shard else 'true'}"
                )
                connection.execute(f'DELETE FROM "{table.name}" {of_shards}')
            connection.execute(f"{verb} {_rows_of(table)}", {"files": files[table.name]})
        run_sql(connection, SCORED_DOCUMENTS + others)
        run_sql(connection, JUDGED + VERDICTS)
        run_sql(connection, DECISIONS if shards is None else "DELETE FROM decisions WHERE shard IN (FROM replaced)")
        _decide(connection)
        run_sql(
            connection, "DROP TABLE IF EXISTS swapped_places; DROP TABLE IF EXISTS curves;" + SWAPPED_PLACES + CURVES
        )
        if shards is None:
            run_sql(connection, VIEWS + "".join(table.views for table in tables))
        return _finished(connection, tables)


@contextmanager
def _attached(file: Path, spilled: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with in_memory() as connection:
        connection.execute(f"SET memory_limit = {quoted(MEMORY)}")
        connection.execute(f"SET temp_directory = {quoted(spilled)}")
        connection.execute("SET preserve_insertion_order = false")  # of copied rows; with it they are compressed twice
        connection.execute(f"ATTACH {quoted(file)} AS warehouse (STORAGE_VERSION 'v1.0.0')")
        connection.execute("USE warehouse")
        yield connection
        connection.execute("USE memory")
        connection.execute("DETACH warehouse")


def _rows_of(table: "WarehouseTable") -> str:
    source = f"FROM read_parquet($files, hive_partitioning = false, union_by_name = {table.measured})"
    return f"WITH rows AS ({source}) {table.select}"


def scored(connection: duckdb.DuckDBPyConnection, files: Sequence[str]) -> None:
    """Make the view `scored` over part files of loss_deltas, with a number of each row."""
    read = f"read_parquet([{', '.join(map(quoted, files))}], hive_partitioning = false, file_row_number = true)"
    number = "file_index::BIGINT << 32 | file_row_number"
    connection.execute(f"CREATE TEMP VIEW scored AS SELECT * EXCLUDE (file_row_number), {number} AS row FROM {read}")


def _decide(connection: duckdb.DuckDBPyConnection) -> None:
    for tool in rows(connection, "SELECT DISTINCT tool FROM homes ORDER BY tool")["tool"]:
        connection.execute(f"INSERT INTO decisions FROM verdicts WHERE tool = {quoted(tool)} ORDER BY delta")


def _finished(connection: duckdb.DuckDBPyConnection, tables: Sequence["WarehouseTable"]) -> dict[str, int]:
    _comment(connection, tables)
    names = (*(table.name for table in tables), *DERIVED)
    return {name: rows(connection, f'SELECT count(*) FROM "{name}"').item() for name in names}


def _comment(connection: duckdb.DuckDBPyConnection, tables: Sequence["WarehouseTable"]) -> None:
    """Write the declared comments.

    A column of a view that has none takes that of its name in loss_deltas, else decisions, else the first table.
    """
    for table in tables:
        kind = "VIEW" if table.name == SCORED else "TABLE"
        connection.execute(f'COMMENT ON {kind} "{table.name}" IS {quoted(table.comment)}')
        _comment_columns(connection, table.name, table.columns)
    [scored] = [table.columns for table in tables if table.name == SCORED]
    for known in (scored, _comments(connection, "decisions"), *(table.columns for table in tables)):
        lacking = (
            "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = 'warehouse' AND comment IS NULL"
        )
        for name, column in connection.execute(lacking).fetchall():
            if column in known:
                _comment_columns(connection, name, {column: known[column]})


def _comments(connection: duckdb.DuckDBPyConnection, name: str) -> dict[str, str]:
    found = "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = ? AND comment IS NOT NULL"
    return dict(connection.execute(found, [name]).fetchall())


def _comment_columns(connection: duckdb.DuckDBPyConnection, name: str, comments: Mapping[str, str]) -> None:
    for column, comment in comments.items():
        connection.execute(f'COMMENT ON COLUMN "{name}"."{column}" IS {quoted(comment)}')
