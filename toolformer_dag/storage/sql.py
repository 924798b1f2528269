"""Running the .sql files of the package in DuckDB, with nothing fetched from outside."""

from collections.abc import Mapping
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
    """A database that is gone when it is closed."""
    return duckdb.connect(config=OFFLINE)


def run_file(
    connection: duckdb.DuckDBPyConnection, package: str, name: str, parameters: Mapping[str, Any] | None = None
) -> None:
    """Runs the statements of `package`'s file `name` in order; each gets those of `parameters` that it names."""
    given = parameters or {}
    for statement in connection.extract_statements(files(package).joinpath(name).read_text("utf-8")):
        connection.execute(statement, {key: given[key] for key in statement.named_parameters})


def rows(connection: duckdb.DuckDBPyConnection, query: str) -> pl.DataFrame:
    """The answer to a query. Raises duckdb.Error, for a text without a query and for values foreign to polars too."""
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


def _is_foreign(kind: DuckDBPyType) -> bool:
    if kind.id in NESTED:
        return any(_is_foreign(child) for _, child in kind.children if isinstance(child, DuckDBPyType))
    return kind.id in FOREIGN


def _unshown(reason: str) -> duckdb.Error:
    return duckdb.NotSupportedError(f"{reason}, {UNSHOWN}")
