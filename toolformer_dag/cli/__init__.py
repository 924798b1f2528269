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
    add_config_option,
    escape_control_characters,
    explain_damaged_history,
    is_history_error,
    typed_config_file,
)
from toolformer_dag.files import UserError, explain_exceeded_limit, require_threads
from toolformer_dag.processes import refuse_early_exit

NOT_WRITABLE_ERRORS = {errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EROFS}
"""Errors of a folder that this user may not write, or of a file where a folder should be."""
FULL_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk."""
EARLY_EXIT_MESSAGE = (
    "error: a tool or a library ended this process with os._exit before the command had ended; correct it and run "
    "again, what was committed is kept\n"
)


COMMAND_GROUPS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Run": (init, demo, run, stale, servers, ui, clean),
    "Look": (sql, tables, explore, tool, score, judge, verify),
    "Take away": (export,),
    "Serve": (generate, serve),
}
"""The commands as `--help` lists them."""


class Grouped(TyperGroup):
    """The root command, whose `--help` lists the commands by COMMAND_GROUPS, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section of the help for each group, then one with the remaining commands, under "Other"."""
        ungrouped_names = self.list_commands(ctx)
        for title, commands in COMMAND_GROUPS.items():
            group_names = [command.__name__ for command in commands]
            ungrouped_names = [name for name in ungrouped_names if name not in group_names]
            self._write_group_section(formatter, title, group_names)
        self._write_group_section(formatter, "Other", ungrouped_names)

    def _write_group_section(self, formatter: Any, title: str, command_names: Sequence[str]) -> None:
        """Write a heading, and below it a line for each command with its first sentence."""
        unlimited = 1000  # characters: no sentence is that long
        rows = [(name, self.commands[name].get_short_help_str(unlimited)) for name in command_names]
        with formatter.section(title):
            formatter.write_dl(rows)


class Commands(typer.Typer):
    """The command line. It shows a user's mistake as a message of one line; any other error keeps its traceback."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the command line, and print an error that the user can fix as a message of one line.

        Raises:
            SystemExit: With code 1 after such a message; else with the exit code of the command.
            BaseException: Any error that the user cannot fix.
        """
        _escape_unprintable_output()
        typed_config_file.set(None)  # forget the `--config` of an earlier call in this process
        try:
            require_threads()  # raises UserError if this process may not start enough threads
            with refuse_early_exit(EARLY_EXIT_MESSAGE):  # prints the message if a tool calls `os._exit`
                return super().__call__(*args, **kwargs)
        except BaseException as error:  # errors of Rust libraries (panics) are no Exception
            message = _find_user_message(error)
            if message is None:
                raise
            safe_message = escape_control_characters(add_config_option(message))
            sys.stderr.write(f"error: {safe_message}\n")
            raise SystemExit(1) from error


def _escape_unprintable_output() -> None:
    """Make standard output and standard error escape characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _find_user_message(error: BaseException) -> str | None:
    """Return the message for an error that the user can fix, or None for any other error.

    The user can fix mistakes (UserError), a folder that cannot be written, a full disk, an exceeded limit of the
    process (`ulimit`), and a damaged database of Dagster's history of runs.
    """
    if isinstance(error, UserError):
        return str(error)

    if isinstance(error, OSError) and error.errno in NOT_WRITABLE_ERRORS | FULL_DISK_ERRORS:
        return _explain_file_system_error(error)

    limit_and_remedy = explain_exceeded_limit(error)
    if limit_and_remedy:
        error_text = str(error) or type(error).__name__
        return f"{error_text}: {limit_and_remedy} and run again; what was committed is kept"

    if is_history_error(error):
        database_error = error.__cause__ or error
        return explain_damaged_history(database_error)
    return None


def _explain_file_system_error(error: OSError) -> str:
    """Return a message that says what failed on which file, and how to fix it."""
    file = error.filename or "a file"
    if error.errno in FULL_DISK_ERRORS:
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
for commands in COMMAND_GROUPS.values():
    for command in commands:
        app.command(cls=QueryCommand if command is sql else None)(command)
app.add_typer(embedded, name="embedded")
