"""What DESCRIBE says of the warehouse: DuckDB's own leaves out the comments."""

import re

import duckdb
import polars as pl

from toolformer_dag.lake.queries import rows

DESCRIBE = re.compile(
    r'\s*desc(?:ribe)?(?:\s+(?:table\s+|view\s+)?(?:"(?P<quoted>[^"]+)"|(?P<plain>\w+)))?\s*;?\s*', re.I
)
ALL = """
SELECT table_name AS name, 'table' AS kind, comment FROM duckdb_tables() WHERE NOT internal AND NOT temporary
UNION ALL
SELECT view_name, 'view', comment FROM duckdb_views() WHERE NOT internal AND NOT temporary
UNION ALL
SELECT function_name || '(' || array_to_string(parameters, ', ') || ')', replace(function_type, '_', ' '), comment
FROM duckdb_functions() WHERE NOT internal
ORDER BY kind, name
"""
COLUMNS = """
SELECT column_name, data_type AS column_type, comment FROM duckdb_columns()
WHERE NOT internal AND lower(table_name) = lower($name) ORDER BY column_index
"""
MACRO = f"FROM ({ALL}) WHERE kind LIKE '%macro' AND lower(name[:position('(' in name) - 1]) = lower($name)"


def described(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame | None:
    """Return the columns of a table or view with their comments, or a macro's; None where `sql` describes no name.

    `describe` alone lists every table, view and macro.
    """
    match = DESCRIBE.fullmatch(sql)
    if match is None:
        return None
    name = match["quoted"] or match["plain"]
    if name is None:
        return rows(connection, ALL)
    for query in (COLUMNS, MACRO):
        columns: pl.DataFrame = connection.sql(query, params={"name": name}).pl()
        if columns.height:
            return columns
    return None
