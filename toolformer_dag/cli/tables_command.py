"""`toolformer-dag tables`: the paper's tables, with our figures and the paper's."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.query_results import Format, drawn, printed
from toolformer_dag.cli.terminal import Config, Profile, Set, escape_controls, load_command_settings
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from toolformer_dag.evaluation.paper_tables import PaperTable

_drawn = partial(drawn, longest=110, width=180)


def tables(
    number: Annotated[str | None, typer.Argument(help="2 to 10, or figure_4; all of them when left out.")] = None,
    format: Annotated[
        Format, typer.Option("--format", help="table, or the rows of one view as csv, json (a line per row) or md.")
    ] = "table",
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Print Tables 2 to 10 and Figure 4 of the paper: our figures with n and 95 % intervals, and the paper's.

    Example: toolformer-dag tables 9; toolformer-dag tables figure_4 --format csv
    """
    settings = load_command_settings(config, profile, set)
    from toolformer_dag.evaluation.paper_tables import PAPER_TABLES, paper_table
    from toolformer_dag.lake.warehouse import CLOSED, open_warehouse, received

    _refuse_contradictions(format, number)
    chosen = PAPER_TABLES if number is None else (paper_table(number),)
    with open_warehouse(received(settings), CLOSED) as warehouse:
        for table in chosen:
            if format == "table":
                _print_table(warehouse, table)
            else:
                typer.echo(printed(table.rows(warehouse), format), nl=False)


def _refuse_contradictions(format: Format, number: str | None) -> None:
    """Raise UserError for Parquet, and for a format other than a table where no single table is named."""
    if format == "parquet":
        raise UserError(
            '--format parquet: `toolformer-dag sql "from table_9" --output FILE.parquet` writes such a file'
        )
    if format != "table" and number is None:
        raise UserError(f"--format {format}: every table has columns of its own; name one, such as `tables 9`")


def _print_table(warehouse: "DuckDBPyConnection", table: "PaperTable") -> None:
    """Print a table of the paper with its title, the tools that were called, and its notes."""
    from toolformer_dag.evaluation.paper_tables import notes, query_tool_shares

    rows = table.rows(warehouse)
    typer.echo(f"{table.title}\n{_drawn(table.wide(rows))}")
    called = query_tool_shares(warehouse, table)
    if called is not None:
        typer.echo(f"Questions with a call, by tool, %\n{_drawn(called)}")
    note_lines = [f"  {escape_controls(note)}\n" for note in notes(warehouse, table)]
    typer.echo("".join(note_lines))
