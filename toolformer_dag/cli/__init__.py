"""The command line's root: the commands and how their errors are shown."""

import errno
import io
import sys

import typer

from toolformer_dag.cli.demo_command import demo
from toolformer_dag.cli.embedded import app as embedded
from toolformer_dag.cli.explore_command import explore
from toolformer_dag.cli.export_command import export
from toolformer_dag.cli.generate_command import generate
from toolformer_dag.cli.init_command import init
from toolformer_dag.cli.lake_commands import clean, verify
from toolformer_dag.cli.run import run, stale, ui
from toolformer_dag.cli.serve_command import serve
from toolformer_dag.cli.servers_command import servers
from toolformer_dag.cli.single_pieces import score, tool
from toolformer_dag.cli.sql_command import sql
from toolformer_dag.cli.tables_command import tables
from toolformer_dag.cli.terminal import damaged_history, harmless, of_history
from toolformer_dag.files import UserError, limit_met, require_threads
from toolformer_dag.processes import unfinished

NOT_OURS = {errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EROFS}
"""What the file system says of a folder that this user may not use, or of a file in its place."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ENDED = (
    "error: a tool or a library ended this process with os._exit before the command had ended; correct it and run "
    "again, what was committed is kept\n"
)


class Commands(typer.Typer):
    """Shows a mistake of the user as one message; anything else keeps its traceback."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # half a character, or one that the terminal lacks, is escaped
                stream.reconfigure(errors="backslashreplace")
        try:
            require_threads()
            with unfinished(ENDED):
                return super().__call__(*args, **kwargs)
        except BaseException as error:  # panics of Rust are no Exception
            message = _remedied(error)
            if message is None:
                raise
            sys.stderr.write(f"error: {harmless(message)}\n")
            raise SystemExit(1) from error


def _remedied(error: BaseException) -> str | None:
    """Return the message of an error that a person can mend; None for any other."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in NOT_OURS | FULL:
        remedy = "free space" if error.errno in FULL else "name a folder that can be written, or make this one so"
        return f"{error.filename or 'a file'}: {error.strerror}; {remedy}"
    if limit := limit_met(error):
        return f"{str(error) or type(error).__name__}: {limit} and run again; what was committed is kept"
    return damaged_history(error.__cause__ or error) if of_history(error) else None


app = Commands(
    name="toolformer-dag",
    help="Toolformer as an asset graph: run it, ask it, change a threshold and run only what that changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    init,
    run,
    demo,
    stale,
    sql,
    tables,
    export,
    tool,
    servers,
    generate,
    serve,
    score,
    clean,
    verify,
    ui,
    explore,
):
    app.command()(command)
app.add_typer(embedded, name="embedded")
