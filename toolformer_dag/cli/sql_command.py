"""`sql`: one query over the warehouse, a saved query by its name, or a prompt for many."""

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from toolformer_dag.cli.input_lines import valid_text
from toolformer_dag.cli.query_results import Format, description, encoded, ending_of, printed, saved_queries
from toolformer_dag.cli.terminal import Config, Force, Profile, Set, path, settings_of
from toolformer_dag.files import UserError, write_output

if TYPE_CHECKING:
    import polars as pl

COMMENTED = re.compile(r"--(\s|[^\n=]*\n)")
"""How a query begins whose first line is a comment; an option has no white space before its value."""
ALONE = ("describe", "summarize")
"""Words that DuckDB takes as a whole query, or says what it lacks."""


class QueryCommand(TyperCommand):
    """A command whose argument may begin with a comment of SQL, `-- kept calls`, which looks like an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put such an argument behind `--`, after which nothing is an option."""
        if "--" not in args:
            queries = [argument for argument in args if COMMENTED.match(argument)]
            if queries:
                args = [*(argument for argument in args if argument not in queries), "--", *queries]
        return super().parse_args(ctx, args)


def _names(incomplete: str) -> list[tuple[str, str]]:
    """Return saved queries for the completion of the shell, each with what it answers."""
    return [(name, description(text)) for name, text in saved_queries().items() if name.startswith(incomplete)]


def sql(
    query: Annotated[
        str | None,
        typer.Argument(
            help="A query in DuckDB's SQL, or the name of a saved one; `-` reads it from the input.",
            autocompletion=_names,
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
        typer.echo(_listed())
        return
    settings = settings_of(config, profile, set)
    from toolformer_dag.lake.warehouse import query as answered
    from toolformer_dag.lake.warehouse import received

    if traces:
        from toolformer_dag.traces.judgement import judged_file
    database = judged_file(settings) if traces else received(settings)
    folders = read or ()
    if query is None and file is None and output is None and sys.stdin.isatty():
        from toolformer_dag.cli.sql_prompt import answer_queries

        answer_queries(database, format or "table", settings.execution.query_gib, folders)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a terminated query removes what it spilled
    text = _query_text(query, file)
    ending = ending_of(format, output)
    _refuse_terminal(format, output)
    rows = answered(database, text, settings.execution.query_gib, folders)
    _put_out(rows, format, ending, output, force)


def _put_out(rows: "pl.DataFrame", format: Format | None, ending: str, output: Path | None, force: bool) -> None:
    """Write rows to the file, or print them. Raises UserError where the file is there, WriteError."""
    if output is not None:
        write_output(output, encoded(rows, ending), "--output", force)
        typer.echo(f"{rows.height:,} rows in {output}", err=True)
    elif format == "parquet":
        sys.stdout.buffer.write(encoded(rows, ending))
    else:
        sys.stdout.write(printed(rows, format or "table"))


def _refuse_terminal(format: Format | None, output: Path | None) -> None:
    """Raise UserError where rows in Parquet would be written to a terminal."""
    if format == "parquet" and output is None and sys.stdout.isatty():
        raise UserError(
            "--format parquet: a terminal cannot show it; name a file with --output, or redirect the output"
        )


def _listed() -> str:
    """Return a line per saved query, with what it answers."""
    queries = saved_queries()
    width = max(map(len, queries))
    return "\n".join(f"{name:<{width}}  {description(text)}" for name, text in queries.items())


def _query_text(query: str | None, file: Path | None) -> str:
    """Return the text of the query that was given in one of four ways. Raises UserError."""
    if (query is None) == (file is None):
        raise UserError(
            "give one query: as the argument, by the name of a saved one (`--list`), with --file, or with `-` on the "
            "standard input; without any, `sql` opens a prompt on a terminal"
        )
    saved = saved_queries()
    if query is not None and query in saved:
        return saved[query]
    text = _typed_or_read(query, file)
    is_name = query == text and text.isidentifier() and text.lower() not in ALONE
    if is_name:
        names = ", ".join(saved)
        raise UserError(f'there is no saved query {text!r}; there are {names}. For a table write "from {text}"')
    return text


def _typed_or_read(query: str | None, file: Path | None) -> str:
    """Return the text of the file, the standard input or the argument. Raises UserError for what is no text."""
    if file is None:
        return valid_text("the query", sys.stdin.read() if query == "-" else str(query))
    try:
        return valid_text(str(file), file.read_text("utf-8-sig", "surrogateescape"))
    except OSError as error:
        raise UserError(f"--file {file}: {error.strerror}; name a file with a query") from error
