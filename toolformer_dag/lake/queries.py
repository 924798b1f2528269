"""DuckDB over the package's .sql files and over what people ask, with nothing fetched from outside."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import duckdb
import polars as pl
from duckdb.sqltypes import DuckDBPyType

OFFLINE_CONFIG: dict[str, str | bool | int | float | list[str]] = {"autoinstall_known_extensions": False}
"""DuckDB would otherwise download an extension that a query happens to name."""
NESTED_TYPES = ("list", "array", "struct", "map", "tuple")
"""DuckDB's types that hold values of other types."""
UNREADABLE_TYPES = ("interval", "union", "blob", "bit", "bignum")
"""DuckDB's types that polars cannot read, or cannot write as text."""
UNREADABLE_REMEDY = "which cannot be shown; turn it into text with ::VARCHAR"
"""The end of the error for an answer with such a type."""


def open_memory_database() -> duckdb.DuckDBPyConnection:
    """Open a new database in memory, which is gone when the connection is closed."""
    return duckdb.connect(config=OFFLINE_CONFIG)


def open_scratch_connection() -> duckdb.DuckDBPyConnection:
    """Open a connection to the one database in memory that all callers in this process share, for small queries.

    TEMP tables are gone when it is closed; anything else stays as long as the process.
    """
    return _open_shared_database().cursor()


@cache
def _open_shared_database() -> duckdb.DuckDBPyConnection:
    """Open the database in memory that all callers in this process share, at the first call."""
    return open_memory_database()


def read_sql_file(package: str, file_name: str) -> str:
    """Return the text of an SQL file in a Python package. The text belongs in the fingerprint of whatever runs it.

    Example:
        read_sql_file("toolformer_dag.lake", "rule.sql")
    """
    return files(package).joinpath(file_name).read_text("utf-8")


def run_sql(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
    """Run several SQL statements one after the other.

    Args:
        connection: An open connection.
        sql: The statements.
        parameters: Values by name. A statement gets those that it mentions as `$name`.

    Raises:
        duckdb.Error: A statement fails.
        KeyError: A parameter is missing.
    """
    if parameters is None:
        parameters = {}

    for statement in connection.extract_statements(sql):
        # DuckDB refuses parameters that a statement does not mention.
        statement_parameters = {name: parameters[name] for name in statement.named_parameters}
        connection.execute(statement, statement_parameters)


def query_frame(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame:
    """Run an SQL query and return its answer as a Polars frame.

    Raises:
        duckdb.Error: The query fails, the text holds no query, or Polars cannot hold a column or a value.
    """
    relation = connection.sql(sql)
    if relation is None:
        raise duckdb.ProgrammingError("there is no query in this text; write one, such as `from funnel`")

    _require_readable_columns(relation)
    try:
        answer: pl.DataFrame = relation.pl()
    except pl.exceptions.PolarsError as error:
        raise _build_unreadable_error(f"a column has values without a place in polars ({error})") from error
    return answer


def _require_readable_columns(relation: duckdb.DuckDBPyRelation) -> None:
    """Check that Polars can hold all columns of an answer.

    Raises:
        duckdb.Error: It cannot hold the type of a column.
    """
    for column_name, column_type in zip(relation.columns, relation.types, strict=True):
        if _is_unreadable_type(column_type):
            raise _build_unreadable_error(f"column {column_name!r} is of type {column_type}")


def quote_sql(text: object) -> str:
    """Return a text as an SQL string literal: `it's` becomes `'it''s'`."""
    return "'" + str(text).replace("'", "''") + "'"


def _is_unreadable_type(duckdb_type: DuckDBPyType) -> bool:
    """Return whether a type is one of UNREADABLE_TYPES, or a nested type, such as a list, that holds one of them."""
    if duckdb_type.id not in NESTED_TYPES:
        return duckdb_type.id in UNREADABLE_TYPES

    # The size of an array is a child too, but not a type.
    inner_types = [child for _, child in duckdb_type.children if isinstance(child, DuckDBPyType)]
    return any(_is_unreadable_type(inner_type) for inner_type in inner_types)


def _build_unreadable_error(reason: str) -> duckdb.Error:
    """Return the error for an answer that cannot be shown, with what to do about it."""
    return duckdb.NotSupportedError(f"{reason}, {UNREADABLE_REMEDY}")
