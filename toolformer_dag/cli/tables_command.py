"""`toolformer-dag tables`: the paper's tables, with our figures and the paper's."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.query_results import RowFormat, format_rows_as_table, format_rows_as_text
from toolformer_dag.cli.terminal import (
    ConfigOption,
    ProfileOption,
    SetOption,
    escape_control_characters,
    load_command_settings,
)
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from toolformer_dag.evaluation.paper_tables import PaperTable

_format_wide_table = partial(format_rows_as_table, longest=110, width=180)


def tables(
    number: Annotated[str | None, typer.Argument(help="2 to 10, or figure_4; all of them when left out.")] = None,
    format: Annotated[
        RowFormat, typer.Option("--format", help="table, or the rows of one view as csv, json (a line per row) or md.")
    ] = "table",
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Print Tables 2 to 10 and Figure 4 of the paper: our figures with n and 95 % intervals, and the paper's.

    Example: toolformer-dag tables 9; toolformer-dag tables figure_4 --format csv
    """
    settings = load_command_settings(config, profile, set)
    from toolformer_dag.evaluation.paper_tables import PAPER_TABLES, get_paper_table
    from toolformer_dag.lake.warehouse import NO_EXTERNAL_ACCESS_CONFIG, open_warehouse, receive_warehouse

    _refuse_conflicting_options(format, number)
    chosen = PAPER_TABLES if number is None else (get_paper_table(number),)
    with open_warehouse(receive_warehouse(settings), NO_EXTERNAL_ACCESS_CONFIG) as warehouse:
        for table in chosen:
            if format == "table":
                _print_paper_table(warehouse, table)
            else:
                typer.echo(format_rows_as_text(table.query_rows(warehouse), format), nl=False)


def _refuse_conflicting_options(row_format: RowFormat, table_number: str | None) -> None:
    """Check that the rows can be printed in a format.

    Args:
        row_format: The format.
        table_number: The table that the user named, such as "9". None for all tables.

    Raises:
        UserError: The format is Parquet. Or it is no table, and no single table of the paper is named.
    """
    if row_format == "parquet":
        raise UserError(
            '--format parquet: `toolformer-dag sql "from table_9" --output FILE.parquet` writes such a file'
        )
    if row_format != "table" and table_number is None:
        raise UserError(f"--format {row_format}: every table has columns of its own; name one, such as `tables 9`")


def _print_paper_table(warehouse: "DuckDBPyConnection", table: "PaperTable") -> None:
    """Print a table of the paper with its title, how often each tool was called, and its notes."""
    from toolformer_dag.evaluation.paper_tables import list_table_notes, query_tool_shares

    rows = table.query_rows(warehouse)
    typer.echo(f"{table.title}\n{_format_wide_table(table.format_rows(rows))}")

    tool_shares = query_tool_shares(warehouse, table)  # None for a table that shows no benchmark
    if tool_shares is not None:
        typer.echo(f"Questions with a call, by tool, %\n{_format_wide_table(tool_shares)}")

    note_lines = [f"  {escape_control_characters(note)}\n" for note in list_table_notes(warehouse, table)]
    typer.echo("".join(note_lines))
