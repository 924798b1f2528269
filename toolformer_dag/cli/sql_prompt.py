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

from toolformer_dag.cli.query_results import Format, printed, saved_queries
from toolformer_dag.cli.terminal import escape_controls
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import WarehouseError, query

ENDS = ("exit", "quit")
"""Words that end the prompt."""
SHOWN_ROWS = 200
"""Rows of a query that are printed."""
KEYWORDS = (
    *("select", "from", "where", "group by", "order by", "having", "limit", "join", "left join", "using", "on", "as"),
    *("with", "case", "when", "then", "else", "end", "and", "or", "not", "in", "is null", "is not null", "between"),
    *("like", "distinct", "count(*)", "filter (where", "qualify", "over (partition by", "union all", "desc"),
    *("describe", "summarize", "pivot", "unpivot", "explain", "show tables"),
)
"""Words of SQL that the prompt completes."""
WELCOME = "A query ends with `;`. Tab completes, Ctrl-R searches the history, Ctrl-C ends a line or query, Ctrl-D all."
NAMES = """
select table_name as name, 'table' as kind from duckdb_tables() where not internal
union all select view_name, 'view' from duckdb_views() where not internal
union all select distinct function_name || '(', 'macro' from duckdb_functions() where not internal
union all select distinct column_name, 'column of ' || string_agg(table_name, ', ' order by table_name)
    from duckdb_columns() where not internal group by column_name
"""
"""What the prompt completes of a database: (name, what it is)."""


def answer_queries(database: Path, format: Format, gib: float | None = None, folders: Sequence[Path] = ()) -> None:
    """Read queries from the terminal and print their rows until the user ends the prompt.

    gib: the memory limit of a query. folders: folders whose files a query may read too.

    Raises WarehouseError without a database, and UserError for a format that a terminal cannot show.
    """
    if format == "parquet":
        raise UserError("--format parquet: a prompt cannot show it; give a query, with --output")
    query(database, "select 1", folders=folders)  # raises where there is no database
    session = build_prompt_session(database)
    typer.echo(f"{database} (read only). Saved queries: {', '.join(saved_queries())}.\n{WELCOME}")
    answer_line = partial(answer, database, format=format, gib=gib, folders=folders)
    is_open = True
    while is_open:
        is_open = _answer_next(session, answer_line)


def _answer_next(session: PromptSession[str], answer_line: Callable[[str], None]) -> bool:
    """Read a line and answer it, or print its error; return False where the user ends the prompt."""
    try:
        line = _read_line(session)
        if line in ENDS:
            return False
        if line:
            answer_line(line)
    except KeyboardInterrupt:  # ends the line or the query only
        return True
    except EOFError:
        return False
    except UserError as error:
        sys.stderr.write(f"error: {escape_controls(str(error))}\n")
    return True


def _read_line(session: PromptSession[str]) -> str:
    """Return what the user types, without white space and `;` around it. Raises KeyboardInterrupt, EOFError."""
    return session.prompt("sql> ").strip().removesuffix(";").strip()


def answer(database: Path, line: str, format: Format, gib: float | None = None, folders: Sequence[Path] = ()) -> None:
    """Print the first SHOWN_ROWS rows of a query, which may be the name of a saved one. Raises WarehouseError."""
    rows = query(database, saved_queries().get(line, line), gib, folders)
    sys.stdout.write(printed(rows.head(SHOWN_ROWS), format))
    if format == "table":
        more = f", the first {SHOWN_ROWS} shown" if rows.height > SHOWN_ROWS else ""
        sys.stdout.write(f"{rows.height:,} rows{more}\n")


def build_prompt_session(database: Path) -> PromptSession[str]:
    """Return a prompt in which Enter sends a complete query, and otherwise begins another line."""
    is_complete = Condition(lambda: complete(get_app().current_buffer.text))  # evaluated at each Enter
    return PromptSession(
        history=open_history(),
        completer=DynamicCompleter(lambda: build_name_completer(database)),
        complete_while_typing=False,
        lexer=PygmentsLexer(SqlLexer),
        multiline=~is_complete,
        prompt_continuation=lambda width, number, wrapped: "...> ".rjust(width),
    )


def complete(text: str) -> bool:
    """Return whether a query is complete: empty, with `;` at its end, a saved query, or a word that ends the prompt."""
    line = text.strip()
    return not line or line.endswith(";") or line in ENDS or line in saved_queries()


def open_history() -> History:
    """Return the user's history of all projects; if it cannot be written, a history of this session only."""
    file = platformdirs.user_state_path("toolformer-dag") / "sql_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)


def build_name_completer(database: Path) -> WordCompleter:
    """Return a completer of saved queries, keywords, and the database's tables, views, macros and columns."""
    kinds = dict.fromkeys(saved_queries(), "saved query") | dict.fromkeys(KEYWORDS, "")
    with suppress(WarehouseError, OSError):  # the database is being replaced
        kinds |= dict(query(database, NAMES).iter_rows())
    return WordCompleter(list(kinds), ignore_case=True, meta_dict=kinds)
