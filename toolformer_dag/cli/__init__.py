"""The command line's root: the commands and how their errors are shown."""

import errno
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from toolformer_dag.cli.demo_command import demo
from toolformer_dag.cli.embedded import app as embedded
from toolformer_dag.cli.explore_command import explore
from toolformer_dag.cli.export_command import export
from toolformer_dag.cli.generate_command import generate
from toolformer_dag.cli.init_command import init
from toolformer_dag.cli.judge_command import judge
from toolformer_dag.cli.lake_commands import clean, verify
from toolformer_dag.cli.run import run, stale, ui
from toolformer_dag.cli.serve_command import serve
from toolformer_dag.cli.servers_command import servers
from toolformer_dag.cli.single_pieces import score, tool
from toolformer_dag.cli.sql_command import QueryCommand, sql
from toolformer_dag.cli.tables_command import tables
from toolformer_dag.cli.terminal import (
    escape_controls,
    explain_damaged_history,
    is_history_error,
    typed_config,
    with_config,
)
from toolformer_dag.files import UserError, explain_limit_met, require_threads
from toolformer_dag.processes import unfinished

NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EROFS}
"""Errors of a folder that this user may not write, or of a file where a folder should be."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk."""
ENDED = (
    "error: a tool or a library ended this process with os._exit before the command had ended; correct it and run "
    "again, what was committed is kept\n"
)


GROUPS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Run": (init, demo, run, stale, servers, ui, clean),
    "Look": (sql, tables, explore, tool, score, judge, verify),
    "Take away": (export,),
    "Serve": (generate, serve),
}
"""The commands as `--help` lists them."""


class Grouped(TyperGroup):
    """Lists commands in GROUPS, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section per group, then the remaining commands under Other."""
        ungrouped = self.list_commands(ctx)
        for title, commands in GROUPS.items():
            names = [command.__name__ for command in commands]
            ungrouped = [name for name in ungrouped if name not in names]
            self._write_section(formatter, title, names)
        self._write_section(formatter, "Other", ungrouped)

    def _write_section(self, formatter: Any, title: str, names: Sequence[str]) -> None:
        """Write a heading and a line of help per command."""
        rows = [(name, self.commands[name].get_short_help_str(1000)) for name in names]
        with formatter.section(title):
            formatter.write_dl(rows)


class Commands(typer.Typer):
    """Shows a user's mistake as a one-line message; any other error keeps its traceback."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the command line. Print an error that the user can fix as one line, and exit with 1; raise any other."""
        _escape_unprintable_output()
        typed_config.set(None)  # the `--config` of an earlier call
        try:
            require_threads()  # raises UserError where this process may not start enough of them
            with unfinished(ENDED):  # the message if a tool ends this process by `os._exit`
                return super().__call__(*args, **kwargs)
        except BaseException as error:  # panics of Rust are no Exception
            message = _find_user_message(error)
            if message is None:  # not for the user to fix
                raise
            sys.stderr.write(f"error: {escape_controls(with_config(message))}\n")
            raise SystemExit(1) from error


def _escape_unprintable_output() -> None:
    """Make the output streams escape characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _find_user_message(error: BaseException) -> str | None:
    """Return the message for an error that the user can fix, or None for any other error.

    Such errors are mistakes (UserError), a folder that cannot be written, a full disk, a limit of this process
    (`ulimit`), and a damaged database of Dagster's history of runs.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in NOT_WRITABLE | FULL:
        return _explain_file_system_error(error)
    limit_and_remedy = explain_limit_met(error)
    if limit_and_remedy:
        return f"{str(error) or type(error).__name__}: {limit_and_remedy} and run again; what was committed is kept"
    if is_history_error(error):  # from Dagster's databases
        database_error = error.__cause__ or error
        return explain_damaged_history(database_error)
    return None


def _explain_file_system_error(error: OSError) -> str:
    """Return what failed on which file, and how to fix it."""
    file = error.filename or "a file"
    if error.errno in FULL:
        remedy = "free space"
    else:
        remedy = "name a folder that can be written, or make this one so"
    return f"{file}: {error.strerror}; {remedy}"


app = Commands(
    name="toolformer-dag",
    cls=Grouped,
    help="Toolformer as an asset graph: run it, ask it, change a threshold and run only what that changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for commands in GROUPS.values():
    for command in commands:
        app.command(cls=QueryCommand if command is sql else None)(command)
app.add_typer(embedded, name="embedded")
