"""`toolformer-dag sql`: ask the warehouse, read-only."""

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.options import Config, Profile, Set, settings_of

if TYPE_CHECKING:
    import polars as pl


class Format(StrEnum):
    """How rows are printed."""

    table = "table"
    csv = "csv"
    json = "json"


def sql(
    query: Annotated[str, typer.Argument(help="A query in DuckDB's SQL.")],
    format: Annotated[Format, typer.Option("--format", help="table, csv, or json (a line per row).")] = Format.table,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Run a query over the warehouse and print its rows.

    Example: toolformer-dag sql "select tool, tau_f, examples from filter_statistics"
    """
    import polars as pl

    from toolformer_dag.storage.warehouse import query as ask

    rows = ask(settings_of(config, profile, set).paths.warehouse, query)
    if format is Format.table:
        with pl.Config(
            tbl_rows=-1, tbl_cols=-1, fmt_str_lengths=80, tbl_hide_dataframe_shape=True, tbl_width_chars=200
        ):
            typer.echo(rows)
    else:
        sys.stdout.write(_written(rows, format))


def _written(rows: "pl.DataFrame", format: Format) -> str:
    """Raises WarehouseError for a map whose keys are no text."""
    import polars as pl

    from toolformer_dag.storage.sql import UNSHOWN
    from toolformer_dag.storage.warehouse import WarehouseError

    try:
        return _flat(rows).write_csv() if format is Format.csv else rows.write_ndjson()
    except (pl.exceptions.PolarsError, TypeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise WarehouseError(f"a column has values without a place in {format} ({reason}), {UNSHOWN}") from error


def _flat(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Lists and structs as JSON text: a cell of CSV holds no more than one value."""
    import polars as pl

    nested = [column for column in rows if column.dtype.is_nested()]
    return rows.with_columns(pl.Series(column.name, map(_json, column), dtype=pl.String) for column in nested)


def _json(value: object) -> str | None:
    import polars as pl

    if value is None:
        return None
    plain = value.to_list() if isinstance(value, pl.Series) else value
    return json.dumps(plain, ensure_ascii=False, default=str)  # dates as text
