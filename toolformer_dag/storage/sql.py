"""Running the .sql files of the package in DuckDB, with nothing fetched from outside."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import duckdb
import polars as pl

OFFLINE: dict[str, str | bool | int | float | list[str]] = {"autoinstall_known_extensions": False}
"""DuckDB would otherwise download an extension that a query happens to name."""


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
    """The answer to a query."""
    answer: pl.DataFrame = connection.sql(query).pl()
    return answer
