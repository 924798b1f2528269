"""What DESCRIBE says of the warehouse: DuckDB's own leaves out the comments."""

import re

import duckdb
import polars as pl

from toolformer_dag.lake.queries import query_frame

DESCRIBE_PATTERN = re.compile(
    r'desc(?:ribe)?(?:\s+(?:(?:table|view)\s+)?(?:"(?P<quoted>[^"]+)"|(?P<plain>\w+)))?', re.I
)
"""`describe`, `desc funnel`, `DESCRIBE TABLE "funnel"`: the whole text, with a name or without."""
ALL_OBJECTS_SQL = """
SELECT table_name AS name, 'table' AS kind, comment FROM duckdb_tables() WHERE NOT internal AND NOT temporary
UNION ALL
SELECT view_name, 'view', comment FROM duckdb_views() WHERE NOT internal AND NOT temporary
UNION ALL
SELECT function_name || '(' || array_to_string(parameters, ', ') || ')', replace(function_type, '_', ' '), comment
FROM duckdb_functions() WHERE NOT internal
ORDER BY kind, name
"""
"""Every table, view and macro: (name, kind, comment)."""
COLUMNS_SQL = """
SELECT column_name, data_type AS column_type, comment FROM duckdb_columns()
WHERE NOT internal AND lower(table_name) = lower($name) ORDER BY column_index
"""
"""The columns of the table or view $name: (column_name, column_type, comment)."""
MACRO_SQL = (
    f"FROM ({ALL_OBJECTS_SQL}) WHERE kind LIKE '%macro' AND lower(name[:position('(' in name) - 1]) = lower($name)"
)
"""The rows of ALL of the macro $name: (name with parameters, kind, comment)."""


def answer_describe_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame | None:
    """Answer the statements `describe` and `describe NAME`, with the comments that DuckDB's own answer leaves out.

    Returns:
        None if `sql` is another statement, or if nothing has that name.
    """
    statement = sql.strip().removesuffix(";").rstrip()
    match = DESCRIBE_PATTERN.fullmatch(statement)
    if match is None:
        return None

    object_name = match["quoted"] or match["plain"]
    if object_name is None:
        return query_frame(connection, ALL_OBJECTS_SQL)
    return _query_description(connection, object_name)


def _query_description(connection: duckdb.DuckDBPyConnection, object_name: str) -> pl.DataFrame | None:
    """Return the columns of a table or view, or the parameters of a macro, or None if nothing has that name."""
    for query in (COLUMNS_SQL, MACRO_SQL):
        description: pl.DataFrame = connection.sql(query, params={"name": object_name}).pl()
        if description.height:
            return description
    return None
