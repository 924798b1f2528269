"""`sql`: one query over the warehouse, a saved query by its name, or a prompt for many."""

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from toolformer_dag.cli.input_lines import require_utf8
from toolformer_dag.cli.query_results import (
    RowFormat,
    choose_file_ending,
    encode_rows,
    format_rows_as_text,
    get_query_description,
    load_saved_queries,
)
from toolformer_dag.cli.terminal import ConfigOption, ForceOption, ProfileOption, SetOption, load_command_settings, path
from toolformer_dag.files import UserError, write_output_file
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    import polars as pl

COMMENTED_QUERY_PATTERN = re.compile(r"--(\s|[^\n=]*\n)")
"""The beginning of a query whose first line is a comment; an option has no white space before its value."""
SINGLE_WORD_QUERIES = ("describe", "summarize")
"""Single words that DuckDB takes as a query, or explains what is missing."""


class QueryCommand(TyperCommand):
    """A command whose argument may begin with an SQL comment, `-- kept calls`, which looks like an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments so that a query that begins with an SQL comment (`-- ...`) is not taken for an option.

        Such queries are moved behind `--`, after which click sees no options. If the user has typed `--`, nothing is
        moved.
        """
        if "--" not in args:
            commented_queries = [argument for argument in args if COMMENTED_QUERY_PATTERN.match(argument)]
            if commented_queries:
                other_arguments = [argument for argument in args if argument not in commented_queries]
                args = [*other_arguments, "--", *commented_queries]
        return super().parse_args(ctx, args)


def _complete_query_names(incomplete: str) -> list[tuple[str, str]]:
    """Return (name, description) of each saved query that begins with the typed text, for the shell's Tab key."""
    completions = []
    for name, query_text in load_saved_queries().items():
        if name.startswith(incomplete):
            completions.append((name, get_query_description(query_text)))
    return completions


def sql(
    query: Annotated[
        str | None,
        typer.Argument(
            help="A query in DuckDB's SQL, or the name of a saved one; `-` reads it from the input.",
            autocompletion=_complete_query_names,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the saved queries.")] = False,
    file: Annotated[Path | None, typer.Option(parser=path, help="Read the query from this file.")] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, help="Write the rows to a .csv, .json, .jsonl, .md or .parquet.")
    ] = None,
    format: Annotated[
        RowFormat | None,
        typer.Option(
            "--format",
            help="table, record (a line per value), csv, json (a line per row), parquet or md; with --output: of the "
            "file.",
        ),
    ] = None,
    traces: Annotated[
        bool, typer.Option("--traces", help="Ask the file of `judge` in place of the warehouse.")
    ] = False,
    read: Annotated[
        list[Path] | None,
        typer.Option(
            "--read", parser=path, help="A folder whose files a query may read too; more than one by repeating it."
        ),
    ] = None,
    force: ForceOption = False,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Run a read-only query over the warehouse; print its rows, or write them to a file.

    Without a query, on a terminal, open a prompt: with history, completion of names, and the saved queries by name.

    Example: toolformer-dag sql; toolformer-dag sql "select tool, tau_f, examples from filter_statistics";
    toolformer-dag sql --list; toolformer-dag sql most_helpful --format md; toolformer-dag sql --file kept.sql
    --output kept.parquet; toolformer-dag sql --read mine "from calls semi join 'mine/domains.csv' using (domain)"
    """
    if list_:
        typer.echo(_format_saved_queries())
        return
    settings = load_command_settings(config, profile, set)
    from toolformer_dag.lake.warehouse import query as run_query

    database = _choose_database(settings, traces)
    folders = read or ()
    wants_prompt = query is None and file is None and output is None
    if wants_prompt and sys.stdin.isatty():
        from toolformer_dag.cli.sql_prompt import run_query_prompt

        run_query_prompt(database, format or "table", settings.execution.query_gib, folders)
        return

    # A query that is terminated then raises an error, and removes the files that it has spilled to the disk.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    query_text = _read_query_text(query, file)
    file_ending = choose_file_ending(format, output)
    _refuse_parquet_on_terminal(format, output)
    rows = run_query(database, query_text, settings.execution.query_gib, folders)
    if output is not None:
        write_output_file(output, encode_rows(rows, file_ending), "--output", force)
        typer.echo(f"{rows.height:,} rows in {output}", err=True)
    else:
        _print_rows(rows, format or "table")


def _choose_database(settings: Settings, reads_traces: bool) -> Path:
    """Return the database to query: the warehouse, or the file of the command `judge` about recorded conversations.

    Args:
        settings: The settings of the project.
        reads_traces: Whether to take the file of `judge`.

    Raises:
        UserError: `judge` has not written its file yet.
    """
    if reads_traces:
        from toolformer_dag.traces.judgement import require_judged_file

        return require_judged_file(settings)
    from toolformer_dag.lake.warehouse import receive_warehouse

    return receive_warehouse(settings)


def _print_rows(rows: "pl.DataFrame", row_format: RowFormat) -> None:
    """Write rows to the standard output, in Parquet as bytes and in other formats as text."""
    if row_format == "parquet":
        sys.stdout.buffer.write(encode_rows(rows, ".parquet"))
    else:
        sys.stdout.write(format_rows_as_text(rows, row_format))


def _refuse_parquet_on_terminal(row_format: RowFormat | None, output_file: Path | None) -> None:
    """Check that rows in Parquet, which is no text, are not written to a terminal.

    Raises:
        UserError: They would be.
    """
    if row_format == "parquet" and output_file is None and sys.stdout.isatty():
        raise UserError(
            "--format parquet: a terminal cannot show it; name a file with --output, or redirect the output"
        )


def _format_saved_queries() -> str:
    """Return a line for each saved query: its name and its description."""
    query_by_name = load_saved_queries()
    name_width = max(map(len, query_by_name))

    lines = []
    for name, query_text in query_by_name.items():
        lines.append(f"{name:<{name_width}}  {get_query_description(query_text)}")
    return "\n".join(lines)


def _read_query_text(query_argument: str | None, query_file: Path | None) -> str:
    """Return the text of the query, wherever the user has put it.

    Args:
        query_argument: The query itself, the name of a saved one, or `-` for standard input.
        query_file: A file with the query.

    Raises:
        UserError: Both or neither are given, the query cannot be read, or there is no such saved query.
    """
    if (query_argument is None) == (query_file is None):
        raise UserError(
            "give one query: as the argument, by the name of a saved one (`--list`), with --file, or with `-` on the "
            "standard input; without any, `sql` opens a prompt on a terminal"
        )
    if query_file is not None:
        return _read_query_file(query_file)
    if query_argument == "-":
        return require_utf8("the query", sys.stdin.read())
    return _resolve_query(str(query_argument))


def _resolve_query(query_or_name: str) -> str:
    """Return the text of a saved query, or the argument itself if it is a query.

    Raises:
        UserError: The argument is a single word that names no saved query, or it is not UTF-8.
    """
    query_by_name = load_saved_queries()
    if query_or_name in query_by_name:
        return query_by_name[query_or_name]

    query_text = require_utf8("the query", query_or_name)
    is_unknown_name = query_text.isidentifier() and query_text.lower() not in SINGLE_WORD_QUERIES
    if is_unknown_name:
        names = ", ".join(query_by_name)
        raise UserError(
            f'there is no saved query {query_text!r}; there are {names}. For a table write "from {query_text}"'
        )
    return query_text


def _read_query_file(query_file: Path) -> str:
    """Return the query in a file.

    Raises:
        UserError: The file cannot be read, or it is not UTF-8.
    """
    try:
        return require_utf8(str(query_file), query_file.read_text("utf-8-sig", "surrogateescape"))
    except OSError as error:
        raise UserError(f"--file {query_file}: {error.strerror}; name a file with a query") from error
