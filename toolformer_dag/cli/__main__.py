"""What `toolformer-dag` and `python -m toolformer_dag.cli` start."""

import atexit
import gc
import logging
import os
from contextlib import suppress

import typer

from toolformer_dag.cli import app

NEW_OBJECTS_PER_COLLECTION = 50_000
"""New objects after which Python looks for cycles: its default of 700 costs a command a sixth of its CPU time."""


def main() -> None:
    """Run the command line, and end the process without tearing down the interpreter.

    During the teardown, DuckDB would report objects as leaked that merely still exist.
    """
    exit_code: int | None = None  # None until the command has ended by itself

    def exit_now() -> None:
        if exit_code is not None:  # otherwise an uncaught error or a signal ends the process, as Python does it
            _exit_without_teardown(exit_code)

    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION)
    atexit.register(exit_now)  # registered first, so that it runs last

    try:
        app()  # always raises SystemExit, or another error
    except SystemExit as error:
        if isinstance(error.code, int):
            exit_code = error.code
        else:
            # No code means success. Anything else is a message, which Python prints.
            exit_code = 0 if error.code is None else 1
        raise


def _exit_without_teardown(exit_code: int) -> None:
    """End the process at once, without the teardown of the interpreter, in which DuckDB would report leaks (`main`).

    Logs and output are flushed first. If the output cannot be flushed, the function returns, and Python reports the
    error in its own way.
    """
    logging.shutdown()
    with suppress(OSError):
        typer.echo(nl=False)  # prints nothing, but flushes the output
        typer.echo(nl=False, err=True)
        os._exit(exit_code)


if __name__ == "__main__":
    main()
