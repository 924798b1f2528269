"""The prompt of `sql`: multi-line queries with a history and completion of names."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import platformdirs
import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import DynamicCompleter, WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.lexers import PygmentsLexer
from pygments.lexers.sql import SqlLexer

from toolformer_dag.cli.query_results import RowFormat, format_rows_as_text, load_saved_queries
from toolformer_dag.cli.terminal import escape_control_characters
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import WarehouseError, query

END_WORDS = ("exit", "quit")
"""Words that end the prompt."""
MAX_SHOWN_ROWS = 200
"""Rows of a query that are printed."""
SQL_KEYWORDS = (
    *("select", "from", "where", "group by", "order by", "having", "limit", "join", "left join", "using", "on", "as"),
    *("with", "case", "when", "then", "else", "end", "and", "or", "not", "in", "is null", "is not null", "between"),
    *("like", "distinct", "count(*)", "filter (where", "qualify", "over (partition by", "union all", "desc"),
    *("describe", "summarize", "pivot", "unpivot", "explain", "show tables"),
)
"""Words of SQL that the prompt completes."""
WELCOME_MESSAGE = (
    "A query ends with `;`. Tab completes, Ctrl-R searches the history, Ctrl-C ends a line or query, Ctrl-D all."
)
COMPLETED_NAMES_SQL = """
select table_name as name, 'table' as kind from duckdb_tables() where not internal
union all select view_name, 'view' from duckdb_views() where not internal
union all select distinct function_name || '(', 'macro' from duckdb_functions() where not internal
union all select distinct column_name, 'column of ' || string_agg(table_name, ', ' order by table_name)
    from duckdb_columns() where not internal group by column_name
"""
"""What the prompt completes of a database: (name, what it is)."""


def run_query_prompt(
    database: Path, row_format: RowFormat, memory_limit_gib: float | None = None, folders: Sequence[Path] = ()
) -> None:
    """Read queries from the terminal and print their rows, until the user ends the prompt.

    Args:
        database: The DuckDB file that is queried.
        row_format: How rows are printed.
        memory_limit_gib: How much memory a query may use, in GiB. None sets no limit.
        folders: The folders whose files a query may read too.

    Raises:
        WarehouseError: There is no database.
        UserError: A terminal cannot show the format.
    """
    if row_format == "parquet":
        raise UserError("--format parquet: a prompt cannot show it; give a query, with --output")
    query(database, "select 1", readable_folders=folders)  # raises an error if there is no database

    session = build_prompt_session(database)
    saved_names = ", ".join(load_saved_queries())
    typer.echo(f"{database} (read only). Saved queries: {saved_names}.\n{WELCOME_MESSAGE}")

    answer_line = partial(print_query_rows, database, format=row_format, gib=memory_limit_gib, folders=folders)
    is_open = True
    while is_open:
        is_open = _answer_next_line(session, answer_line)


def _answer_next_line(session: PromptSession[str], answer_line: Callable[[str], None]) -> bool:
    """Read a line or query of the user and answer it, or print its error.

    Args:
        session: The prompt.
        answer_line: Prints the rows of a query.

    Returns:
        Whether the prompt stays open. False after `exit`, `quit` or Ctrl-D.
    """
    try:
        line = _read_line(session)
        if line in END_WORDS:
            return False
        if line:
            answer_line(line)
    except KeyboardInterrupt:  # ends the line or the query only
        return True
    except EOFError:
        return False
    except UserError as error:
        sys.stderr.write(f"error: {escape_control_characters(str(error))}\n")
    return True


def _read_line(session: PromptSession[str]) -> str:
    """Return what the user types, without white space around it and without `;` at its end.

    Raises:
        KeyboardInterrupt: The user typed Ctrl-C.
        EOFError: The user typed Ctrl-D.
    """
    return session.prompt("sql> ").strip().removesuffix(";").strip()


def print_query_rows(
    database: Path, query_or_name: str, format: RowFormat, gib: float | None = None, folders: Sequence[Path] = ()
) -> None:
    """Print the first MAX_SHOWN_ROWS rows of a query.

    Args:
        database: The DuckDB file that is queried.
        query_or_name: The query, or the name of a saved one.
        format: How the rows are printed. Below a table stands how many rows there are.
        gib: How much memory the query may use, in GiB. None sets no limit.
        folders: The folders whose files the query may read too.

    Raises:
        WarehouseError: The query is wrong, or the database cannot be read.
    """
    query_text = load_saved_queries().get(query_or_name, query_or_name)
    rows = query(database, query_text, gib, folders)
    sys.stdout.write(format_rows_as_text(rows.head(MAX_SHOWN_ROWS), format))

    if format == "table":
        more = f", the first {MAX_SHOWN_ROWS} shown" if rows.height > MAX_SHOWN_ROWS else ""
        sys.stdout.write(f"{rows.height:,} rows{more}\n")


def build_prompt_session(database: Path) -> PromptSession[str]:
    """Return a prompt in which Enter sends the query if it is complete, and otherwise begins another line.

    Args:
        database: The DuckDB file whose names Tab completes.
    """
    # Evaluated at each Enter, for what is typed then.
    is_complete = Condition(lambda: is_complete_query(get_app().current_buffer.text))
    return PromptSession(
        history=open_query_history(),
        completer=DynamicCompleter(lambda: build_name_completer(database)),
        complete_while_typing=False,
        lexer=PygmentsLexer(SqlLexer),
        multiline=~is_complete,
        prompt_continuation=lambda width, number, wrapped: "...> ".rjust(width),
    )


def is_complete_query(typed_text: str) -> bool:
    """Return whether Enter should send a text: it ends with `;`, names a saved query, is `exit`, or is empty."""
    line = typed_text.strip()
    if not line or line.endswith(";"):
        return True
    return line in END_WORDS or line in load_saved_queries()


def open_query_history() -> History:
    """Return the history of the user's queries in all projects, or, if its file cannot be written, an empty one."""
    file = platformdirs.user_state_path("toolformer-dag") / "sql_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)


def build_name_completer(database: Path) -> WordCompleter:
    """Return a completer of saved queries, SQL keywords, and the database's tables, views, macros and columns.

    If the database cannot be read just now, for example because it is being replaced, its names are left out.
    """
    kind_by_name = dict.fromkeys(load_saved_queries(), "saved query")
    kind_by_name |= dict.fromkeys(SQL_KEYWORDS, "")
    with suppress(WarehouseError, OSError):
        kind_by_name |= dict(query(database, COMPLETED_NAMES_SQL).iter_rows())
    return WordCompleter(list(kind_by_name), ignore_case=True, meta_dict=kind_by_name)
