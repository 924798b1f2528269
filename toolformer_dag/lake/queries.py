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
FOREIGN = ("interval", "union", "blob", "bit", "bignum")
"""Types that polars cannot read, or cannot write as text."""
UNSHOWN = "which cannot be shown; turn it into text with ::VARCHAR"


def in_memory() -> duckdb.DuckDBPyConnection:
    """Open a database that is gone when it is closed."""
    return duckdb.connect(config=OFFLINE)


def scratch() -> duckdb.DuckDBPyConnection:
    """Open a connection whose TEMP tables are gone when it is closed; anything else stays as long as the process.

    For many small queries: to open and close a database takes longer than they do.
    """
    return _kept().cursor()


@cache
def _kept() -> duckdb.DuckDBPyConnection:
    return in_memory()


def sql_text(package: str, name: str) -> str:
    """Return the text of `package`'s file `name`; it belongs in the fingerprint of whatever runs it."""
    return files(package).joinpath(name).read_text("utf-8")


def run_sql(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
    """Run the statements in order; each gets those of `parameters` that it names."""
    given = parameters or {}
    for statement in connection.extract_statements(sql):
        connection.execute(statement, {key: given[key] for key in statement.named_parameters})


def rows(connection: duckdb.DuckDBPyConnection, query: str) -> pl.DataFrame:
    """Return the answer to a query. Raises duckdb.Error, also for a text without a query and for unreadable values."""
    relation = connection.sql(query)
    if relation is None:
        raise duckdb.ProgrammingError("there is no query in this text; write one, such as `from funnel`")
    for name, kind in zip(relation.columns, relation.types, strict=True):
        if _is_foreign(kind):
            raise _unshown(f"column {name!r} is of type {kind}")
    try:
        answer: pl.DataFrame = relation.pl()
    except pl.exceptions.PolarsError as error:
        raise _unshown(f"a column has values without a place in polars ({error})") from error
    return answer


def quoted(text: object) -> str:
    """Return a SQL string literal."""
    return "'" + str(text).replace("'", "''") + "'"


def _is_foreign(kind: DuckDBPyType) -> bool:
    if kind.id in NESTED:
        return any(_is_foreign(child) for _, child in kind.children if isinstance(child, DuckDBPyType))
    return kind.id in FOREIGN


def _unshown(reason: str) -> duckdb.Error:
    return duckdb.NotSupportedError(f"{reason}, {UNSHOWN}")
