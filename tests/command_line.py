"""The command line in this process: what a command printed, and its exit code."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from toolformer_dag.cli import app


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def cli(*arguments: str, stdin: str = "") -> Done:
    """Call a command with `stdin` as its input."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code: object = 0
    hook = sys.excepthook
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode("utf-8", "surrogatepass")), "utf-8"))
            app(list(arguments))
    except SystemExit as end:
        code = end.code
    finally:
        sys.excepthook = hook
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Done(code if isinstance(code, int) else int(code is not None), *texts)
