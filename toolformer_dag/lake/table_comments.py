"""Comments of a warehouse: those that tables declare, and those that views and derived tables take over from them."""

import re
from collections.abc import Mapping, Sequence

import duckdb

from toolformer_dag.lake.queries import quote_sql
from toolformer_dag.lake.warehouse_table import WarehouseTable

READ_BY_VIEW = re.compile(r'\b(?:FROM|JOIN)\s+\(*"?(\w+)"?', re.IGNORECASE)
"""What a view reads, in the SQL as DuckDB keeps it; names of its own WITH clause are among them."""


def write_comments(
    connection: duckdb.DuckDBPyConnection, tables: Sequence[WarehouseTable], derived: Mapping[str, Sequence[str]]
) -> None:
    """Write comments (COMMENT ON) to the tables, views and columns of a DuckDB file.

    Each column of a view or derived table that has no comment of its own takes the comment of the
    column with the same name, from the first table that has one.

    Args:
        connection: A connection to the file.
        tables: The tables with declared comments.
        derived: For each table without a declaration, the tables that it is made from.
    """
    views = _query_tables_read_by_views(connection)
    for table in tables:
        kind = "VIEW" if table.name in views else "TABLE"
        connection.execute(f'COMMENT ON {kind} "{table.name}" IS {quote_sql(table.comment)}')
        _write_column_comments(connection, table.name, table.columns)

    sources_by_name = {**derived, **views}
    for name, sources in sources_by_name.items():
        _inherit_comments(connection, name, sources)


def _query_tables_read_by_views(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """Return for each view what stands behind FROM and JOIN in it; a view comes after the views that it reads."""
    query = (
        "SELECT view_name, sql FROM duckdb_views() "
        "WHERE database_name = current_database() AND NOT internal ORDER BY view_oid"
    )
    return {name: READ_BY_VIEW.findall(sql) for name, sql in connection.execute(query).fetchall()}


def _inherit_comments(connection: duckdb.DuckDBPyConnection, name: str, sources: Sequence[str]) -> None:
    """Give columns without a comment the comment of a column with the same name.

    Args:
        connection: A connection to the file.
        name: The table or view.
        sources: The tables that it is made from. The first one with a comment for a column counts.
    """
    query = "SELECT column_name FROM duckdb_columns() WHERE table_name = ? AND comment IS NULL"
    lacking = {column for (column,) in connection.execute(query, [name]).fetchall()}

    for source in sources:
        comments = _query_column_comments(connection, source)
        inherited = {column: comments[column] for column in lacking if column in comments}
        _write_column_comments(connection, name, inherited)
        lacking -= inherited.keys()


def _query_column_comments(connection: duckdb.DuckDBPyConnection, name: str) -> dict[str, str]:
    """Return the comment of each column of a table that has one."""
    query = "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = ? AND comment IS NOT NULL"
    return dict(connection.execute(query, [name]).fetchall())


def _write_column_comments(connection: duckdb.DuckDBPyConnection, name: str, comments: Mapping[str, str]) -> None:
    """Write comments, by column, to a table or view."""
    for column, comment in comments.items():
        connection.execute(f'COMMENT ON COLUMN "{name}"."{column}" IS {quote_sql(comment)}')
