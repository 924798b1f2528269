"""DuckDB over the package's .sql files and over what people ask, with nothing fetched from outside."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import duckdb
import polars as pl
from duckdb.sqltypes import DuckDBPyType

OFFLINE: dict[str, str | bool | int | float | list[str]] = {"autoinstall_known_extensions": False}
"""DuckDB would otherwise download an extension that a query happens to name."""
NESTED = ("list", "array", "struct", "map", "tuple")
"""DuckDB's types that hold values of other types."""
FOREIGN = ("interval", "union", "blob", "bit", "bignum")
"""DuckDB's types that polars cannot read, or cannot write as text."""
UNSHOWN = "which cannot be shown; turn it into text with ::VARCHAR"
"""The end of the error for an answer with such a type."""


def open_in_memory() -> duckdb.DuckDBPyConnection:
    """Open a new database in memory, which is gone when the connection is closed."""
    return duckdb.connect(config=OFFLINE)


def open_scratch() -> duckdb.DuckDBPyConnection:
    """Open a connection to the one database in memory that all callers in this process share, for small queries.

    TEMP tables are gone when it is closed; anything else stays as long as the process.
    """
    return _open_shared_database().cursor()


@cache
def _open_shared_database() -> duckdb.DuckDBPyConnection:
    """Open the database of this process; once."""
    return open_in_memory()


def read_sql_file(package: str, name: str) -> str:
    """Return the text of the file `name` in a Python package, as in `read_sql_file("toolformer_dag.lake", "rule.sql")`.

    The text belongs in the fingerprint of whatever runs it.
    """
    return files(package).joinpath(name).read_text("utf-8")


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
    values = parameters or {}
    for statement in connection.extract_statements(sql):
        named_values = {name: values[name] for name in statement.named_parameters}
        connection.execute(statement, named_values)


def rows(connection: duckdb.DuckDBPyConnection, query: str) -> pl.DataFrame:
    """Run an SQL query and return its answer as a Polars frame.

    Raises:
        duckdb.Error: The query fails, the text holds no query, or Polars cannot hold a column or a value.
    """
    relation = connection.sql(query)
    if relation is None:
        raise duckdb.ProgrammingError("there is no query in this text; write one, such as `from funnel`")

    _require_readable_columns(relation)
    try:
        answer: pl.DataFrame = relation.pl()
    except pl.exceptions.PolarsError as error:
        raise _build_unshown_error(f"a column has values without a place in polars ({error})") from error
    return answer


def _require_readable_columns(relation: duckdb.DuckDBPyRelation) -> None:
    """Raise duckdb.Error for a column whose type Polars cannot hold."""
    for name, kind in zip(relation.columns, relation.types, strict=True):
        if _is_foreign(kind):
            raise _build_unshown_error(f"column {name!r} is of type {kind}")


def quote_sql(text: object) -> str:
    """Return `text` as a SQL string literal: `it's` becomes `'it''s'`."""
    return "'" + str(text).replace("'", "''") + "'"


def _is_foreign(kind: DuckDBPyType) -> bool:
    """Return whether a type is FOREIGN, or holds one that is."""
    if kind.id not in NESTED:
        return kind.id in FOREIGN
    # The size of an array is a child too, but no type.
    held_types = [child for _, child in kind.children if isinstance(child, DuckDBPyType)]
    return any(_is_foreign(held_type) for held_type in held_types)


def _build_unshown_error(reason: str) -> duckdb.Error:
    """Return the error for an answer that cannot be shown, with what to do."""
    return duckdb.NotSupportedError(f"{reason}, {UNSHOWN}")
