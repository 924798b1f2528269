"""The command line's root: the commands and how their errors are shown."""

import errno
import sys

import typer

from toolformer_dag.cli.embedded import app as embedded
from toolformer_dag.cli.lake_commands import clean, sql, verify
from toolformer_dag.cli.run import demo, run, stale, ui
from toolformer_dag.cli.single_pieces import generate, score, tool
from toolformer_dag.files import UserError

NOT_OURS = {errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EROFS}
"""What the file system says of a folder that this user may not use, or of a file in its place."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Commands(typer.Typer):
    """Shows a mistake of the user as one message; anything else keeps its traceback."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return super().__call__(*args, **kwargs)
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(1) from error
        except OSError as error:
            if error.errno not in NOT_OURS | FULL:
                raise
            remedy = "free space" if error.errno in FULL else "name a folder that can be written, or make this one so"
            sys.stderr.write(f"error: {error.filename or 'a file'}: {error.strerror}; {remedy}\n")
            raise SystemExit(1) from error


app = Commands(
    name="toolformer-dag",
    help="Toolformer as an asset graph: run it, ask it, change a threshold and run only what that changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    run,
    demo,
    stale,
    sql,
    tool,
    generate,
    score,
    clean,
    verify,
    ui,
):
    app.command()(command)
app.add_typer(embedded, name="embedded")
