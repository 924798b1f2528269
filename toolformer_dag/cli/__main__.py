"""What `toolformer-dag` and `python -m toolformer_dag.cli` start."""

import atexit
import logging
import os
from contextlib import suppress

import typer

from toolformer_dag.cli import app


def main() -> None:
    """Run the command, and end the process without taking the interpreter down.

    DuckDB would list what torch has kept alive until then as leaked, in fifty lines below the run's own.
    """
    exit_code: int | None = None  # None until the command ended by itself

    def leave() -> None:
        if exit_code is None:  # an error that nobody caught, or a signal, ends as Python ends it
            return
        logging.shutdown()
        with suppress(OSError):  # what cannot be written is Python's to say
            typer.echo(nl=False)
            typer.echo(nl=False, err=True)
            os._exit(exit_code)

    atexit.register(leave)  # the first to be registered runs last
    try:
        app()
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise


if __name__ == "__main__":
    main()
