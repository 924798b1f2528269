"""Comments of a warehouse: those that tables declare, and those that views and derived tables take over from them."""

import re
from collections.abc import Mapping, Sequence

import duckdb

from toolformer_dag.lake.queries import quote_sql
from toolformer_dag.lake.warehouse_table import WarehouseTable

VIEW_SOURCE_PATTERN = re.compile(r'\b(?:FROM|JOIN)\s+\(*"?(\w+)"?', re.IGNORECASE)
"""What a view reads, in the SQL as DuckDB keeps it; names of its own WITH clause are among them."""


def write_comments(
    connection: duckdb.DuckDBPyConnection,
    tables: Sequence[WarehouseTable],
    sources_by_derived_table: Mapping[str, Sequence[str]],
) -> None:
    """Write comments (COMMENT ON) to the tables, views and columns of a DuckDB file.

    Each column of a view or derived table that has no comment of its own takes the comment of the
    column with the same name, from the first table that has one.

    Args:
        connection: A connection to the file.
        tables: The tables with declared comments.
        sources_by_derived_table: For each table without a declaration, the tables that it is made from.
    """
    sources_by_view = _query_tables_read_by_views(connection)
    for table in tables:
        kind = "VIEW" if table.name in sources_by_view else "TABLE"
        connection.execute(f'COMMENT ON {kind} "{table.name}" IS {quote_sql(table.comment)}')
        _write_column_comments(connection, table.name, table.comments_by_column)

    # Derived tables come first, then views: a view may take over comments from any of them.
    sources_by_name = {**sources_by_derived_table, **sources_by_view}
    for name, source_names in sources_by_name.items():
        _inherit_comments(connection, name, source_names)


def _query_tables_read_by_views(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """Return the tables that each view reads: the names after FROM and JOIN in its SQL.

    A view comes after the views that it reads, because they were created before it.
    """
    query = (
        "SELECT view_name, sql FROM duckdb_views() "
        "WHERE database_name = current_database() AND NOT internal ORDER BY view_oid"
    )
    return {name: VIEW_SOURCE_PATTERN.findall(sql) for name, sql in connection.execute(query).fetchall()}


def _inherit_comments(connection: duckdb.DuckDBPyConnection, table_name: str, source_names: Sequence[str]) -> None:
    """Give columns without a comment the comment of a column with the same name.

    Args:
        connection: A connection to the file.
        table_name: The table or view.
        source_names: The tables that it is made from. The first one with a comment for a column counts.
    """
    query = "SELECT column_name FROM duckdb_columns() WHERE table_name = ? AND comment IS NULL"
    columns_without_comment = {column for (column,) in connection.execute(query, [table_name]).fetchall()}

    for source_name in source_names:
        source_comments = _query_column_comments(connection, source_name)
        inherited_comments = {
            column: source_comments[column] for column in columns_without_comment if column in source_comments
        }
        _write_column_comments(connection, table_name, inherited_comments)
        columns_without_comment -= inherited_comments.keys()


def _query_column_comments(connection: duckdb.DuckDBPyConnection, table_name: str) -> dict[str, str]:
    """Return the comments of the columns of a table, by column. Columns without a comment are left out."""
    query = "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = ? AND comment IS NOT NULL"
    return dict(connection.execute(query, [table_name]).fetchall())


def _write_column_comments(
    connection: duckdb.DuckDBPyConnection, table_name: str, comments_by_column: Mapping[str, str]
) -> None:
    """Write the comments of columns of a table or view."""
    for column, comment in comments_by_column.items():
        connection.execute(f'COMMENT ON COLUMN "{table_name}"."{column}" IS {quote_sql(comment)}')
