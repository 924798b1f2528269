"""What `toolformer-dag` and `python -m toolformer_dag.cli` start."""

import atexit
import gc
import logging
import os
from contextlib import suppress

import typer

from toolformer_dag.cli import app

OBJECTS_PER_COLLECTION = 50_000
"""New objects after which Python looks for cycles: its default of 700 costs a command a sixth of its CPU time."""


def main() -> None:
    """Run the command line, then exit without tearing down the interpreter, at which DuckDB would print leaks."""
    exit_code: int | None = None  # None until the command ended by itself

    def exit_now() -> None:
        if exit_code is not None:  # else an uncaught error or a signal: leave the exit to Python
            _exit_without_teardown(exit_code)

    gc.set_threshold(OBJECTS_PER_COLLECTION)
    atexit.register(exit_now)  # early, because the first to be registered runs last
    try:
        app()  # always raises SystemExit, or an error
    except SystemExit as error:
        if isinstance(error.code, int):
            exit_code = error.code
        else:
            exit_code = 0 if error.code is None else 1  # None: success; otherwise a message, which Python prints
        raise


def _exit_without_teardown(exit_code: int) -> None:
    """Flush logs and output, then end the process; return where the output cannot be flushed, which Python reports."""
    logging.shutdown()
    with suppress(OSError):
        typer.echo(nl=False)
        typer.echo(nl=False, err=True)
        os._exit(exit_code)


if __name__ == "__main__":
    main()
