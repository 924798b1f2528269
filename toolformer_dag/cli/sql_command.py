"""`sql`: one query over the warehouse, a saved query by its name, or a prompt for many."""

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from toolformer_dag.cli.input_lines import require_utf8
from toolformer_dag.cli.query_results import Format, choose_ending, description, encoded, printed, saved_queries
from toolformer_dag.cli.terminal import Config, Force, Profile, Set, load_command_settings, path
from toolformer_dag.files import UserError, write_output
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    import polars as pl

COMMENTED = re.compile(r"--(\s|[^\n=]*\n)")
"""The beginning of a query whose first line is a comment; an option has no white space before its value."""
ALONE = ("describe", "summarize")
"""Single words that DuckDB takes as a query, or explains what is missing."""


class QueryCommand(TyperCommand):
    """A command whose argument may begin with an SQL comment, `-- kept calls`, which looks like an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move such arguments behind `--`, after which nothing is an option."""
        if "--" not in args:
            queries = [argument for argument in args if COMMENTED.match(argument)]
            if queries:
                others = [argument for argument in args if argument not in queries]
                args = [*others, "--", *queries]
        return super().parse_args(ctx, args)


def _complete_names(incomplete: str) -> list[tuple[str, str]]:
    """Return the saved queries that begin with the typed text, each with its description, for the shell."""
    return [(name, description(text)) for name, text in saved_queries().items() if name.startswith(incomplete)]


def sql(
    query: Annotated[
        str | None,
        typer.Argument(
            help="A query in DuckDB's SQL, or the name of a saved one; `-` reads it from the input.",
            autocompletion=_complete_names,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the saved queries.")] = False,
    file: Annotated[Path | None, typer.Option(parser=path, help="Read the query from this file.")] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, help="Write the rows to a .csv, .json, .jsonl, .md or .parquet.")
    ] = None,
    format: Annotated[
        Format | None,
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
    force: Force = False,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
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
    if query is None and file is None and output is None and sys.stdin.isatty():
        from toolformer_dag.cli.sql_prompt import answer_queries

        answer_queries(database, format or "table", settings.execution.query_gib, folders)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a terminated query removes what it spilled
    text = _read_query_text(query, file)
    ending = choose_ending(format, output)
    _refuse_terminal(format, output)
    rows = run_query(database, text, settings.execution.query_gib, folders)
    if output is not None:
        write_output(output, encoded(rows, ending), "--output", force)
        typer.echo(f"{rows.height:,} rows in {output}", err=True)
    else:
        _print_rows(rows, format or "table")


def _choose_database(settings: Settings, traces: bool) -> Path:
    """Return the warehouse, or with `traces` the file of `judge`. Raises UserError where `judge` wrote none."""
    if traces:
        from toolformer_dag.traces.judgement import require_judged_file

        return require_judged_file(settings)
    from toolformer_dag.lake.warehouse import received

    return received(settings)


def _print_rows(rows: "pl.DataFrame", format: Format) -> None:
    """Write rows to standard output; Parquet as bytes."""
    if format == "parquet":
        sys.stdout.buffer.write(encoded(rows, ".parquet"))
    else:
        sys.stdout.write(printed(rows, format))


def _refuse_terminal(format: Format | None, output: Path | None) -> None:
    """Raise UserError where rows in Parquet would be written to a terminal."""
    if format == "parquet" and output is None and sys.stdout.isatty():
        raise UserError(
            "--format parquet: a terminal cannot show it; name a file with --output, or redirect the output"
        )


def _format_saved_queries() -> str:
    """Return a line per saved query, with its description."""
    queries = saved_queries()
    width = max(map(len, queries))
    return "\n".join(f"{name:<{width}}  {description(text)}" for name, text in queries.items())


def _read_query_text(query: str | None, file: Path | None) -> str:
    """Return the query: an argument, a saved query, a file or standard input. Raises UserError."""
    if (query is None) == (file is None):
        raise UserError(
            "give one query: as the argument, by the name of a saved one (`--list`), with --file, or with `-` on the "
            "standard input; without any, `sql` opens a prompt on a terminal"
        )
    if file is not None:
        return _read_query_file(file)
    if query == "-":
        return require_utf8("the query", sys.stdin.read())
    return _resolve_query(str(query))


def _resolve_query(query: str) -> str:
    """Return the saved query of that name, else the query itself. Raises UserError for an unknown name."""
    saved = saved_queries()
    if query in saved:
        return saved[query]
    text = require_utf8("the query", query)
    if text.isidentifier() and text.lower() not in ALONE:
        names = ", ".join(saved)
        raise UserError(f'there is no saved query {text!r}; there are {names}. For a table write "from {text}"')
    return text


def _read_query_file(file: Path) -> str:
    """Return the query in a file. Raises UserError if it cannot be read or is no UTF-8."""
    try:
        return require_utf8(str(file), file.read_text("utf-8-sig", "surrogateescape"))
    except OSError as error:
        raise UserError(f"--file {file}: {error.strerror}; name a file with a query") from error
