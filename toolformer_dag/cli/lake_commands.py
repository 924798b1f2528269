"""The lake from outside: `sql` asks the warehouse, `clean` removes files that nothing needs."""

import json
import sys
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import Config, Profile, Set, settings_of
from toolformer_dag.files import UserError

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

    from toolformer_dag.lake.warehouse import query as ask

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

    from toolformer_dag.lake.queries import UNSHOWN
    from toolformer_dag.lake.warehouse import WarehouseError

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


CENTURY = 876_600.0  # hours; much more has no date


def verify(config: Config = None, profile: Profile = None, set: Set = None) -> None:
    """Read everything that runs rely on and name each damaged file. Exit code 1 where there is one.

    `run` makes again what is damaged, at the cost of what was lost.

    Example: toolformer-dag verify
    """
    from toolformer_dag.pipeline.plan import Plan
    from toolformer_dag.training.verify_project import verified

    report = verified(Plan.of(settings_of(config, profile, set)))
    for damaged in report.damaged:
        typer.echo(f"{damaged.path}: {damaged.reason}")
    rate = report.bytes / report.seconds / 2**30 if report.seconds else 0.0
    typer.echo(f"{len(report.damaged)} damaged; {report.bytes:,} bytes verified at {rate:.2f} GiB/s", err=True)
    if report.damaged:
        raise typer.Exit(1)


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    grace_hours: Annotated[float, typer.Option(help="Younger files stay: a reader may still use them.")] = 24.0,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Remove what nothing points to any more, after a grace period.

    That is replaced, damaged and unfinished files, and stored rows of models, prompts and tools that no table is made
    with: going back to those costs again.

    Example: toolformer-dag clean --dry-run
    """
    from toolformer_dag.lake.cleaning import clean as remove
    from toolformer_dag.lake.table import Lake

    lake = Lake(settings_of(config, profile, set).paths.lake)
    gone = remove(lake, _grace(grace_hours), dry_run=dry_run)
    for file in gone:
        typer.echo(f"{file.bytes:>12,}  {file.path}")
    verb = "would go" if dry_run else "gone"
    typer.echo(f"{len(gone)} files, {sum(file.bytes for file in gone):,} bytes {verb}")


def _grace(hours: float) -> timedelta:
    if not 0 <= hours <= CENTURY:  # nan neither
        raise UserError(f"--grace-hours {hours:g}: no such time; write hours from 0 to {CENTURY:,.0f}")
    return timedelta(hours=hours)
