"""What DESCRIBE says of the warehouse: DuckDB's own leaves out the comments."""

import re

import duckdb
import polars as pl

from toolformer_dag.lake.queries import rows

DESCRIBE = re.compile(r'desc(?:ribe)?(?:\s+(?:(?:table|view)\s+)?(?:"(?P<quoted>[^"]+)"|(?P<plain>\w+)))?', re.I)
"""`describe`, `desc funnel`, `DESCRIBE TABLE "funnel"`: the whole text, with a name or without."""
ALL = """
SELECT table_name AS name, 'table' AS kind, comment FROM duckdb_tables() WHERE NOT internal AND NOT temporary
UNION ALL
SELECT view_name, 'view', comment FROM duckdb_views() WHERE NOT internal AND NOT temporary
UNION ALL
SELECT function_name || '(' || array_to_string(parameters, ', ') || ')', replace(function_type, '_', ' '), comment
FROM duckdb_functions() WHERE NOT internal
ORDER BY kind, name
"""
"""Every table, view and macro: (name, kind, comment)."""
COLUMNS = """
SELECT column_name, data_type AS column_type, comment FROM duckdb_columns()
WHERE NOT internal AND lower(table_name) = lower($name) ORDER BY column_index
"""
"""The columns of the table or view $name: (column_name, column_type, comment)."""
MACRO = f"FROM ({ALL}) WHERE kind LIKE '%macro' AND lower(name[:position('(' in name) - 1]) = lower($name)"
"""The rows of ALL of the macro $name: (name with parameters, kind, comment)."""


def described(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame | None:
    """Answer the statements `describe` and `describe NAME`, with the comments that DuckDB's own answer leaves out.

    Returns:
        None if `sql` is another statement, or if nothing has that name.
    """
    match = DESCRIBE.fullmatch(sql.strip().removesuffix(";").rstrip())
    if match is None:
        return None

    name = match["quoted"] or match["plain"]
    if name is None:
        return rows(connection, ALL)
    return _query_description(connection, name)


def _query_description(connection: duckdb.DuckDBPyConnection, name: str) -> pl.DataFrame | None:
    """Return the columns of a table or view, or the parameters of a macro; None where nothing has that name."""
    for query in (COLUMNS, MACRO):
        description: pl.DataFrame = connection.sql(query, params={"name": name}).pl()
        if description.height:
            return description
    return None
