"""Run a program and pass on the lines that it prints, each up to a length: BYTES MESSAGE PROGRAM [ARGUMENT ...].

It stands between an MCP server over stdio and its client: the client would keep a line of any length in memory, and
drop a line with half a surrogate pair. In place of a line longer than BYTES the client gets an error that says MESSAGE.
The program ends with the process that started this one. This file is run by its path, and imports nothing of the
package.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import IO

IDENTIFIER = rb'"id"\s*:\s*([0-9]+)'
"""The number of the request that an answer is for."""
ID_AT_THE_END = re.compile(IDENTIFIER + rb"\s*\}\s*\Z")
"""Some libraries write the number last: `{"jsonrpc": "2.0", "result": {...}, "id": 7}`."""
ID_AT_THE_BEGINNING = re.compile(rb"\A.{0,64}?" + IDENTIFIER)
"""Others write it first: `{"jsonrpc": "2.0", "id": 7, "result": {...}}`."""
END_BYTES = 64
"""Bytes of the end of a long line that are kept, in which the number may stand."""

SURROGATES = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89a-fA-F]..")
"""An escaped backslash, whose second half begins no escape; a surrogate pair; or half a pair, which has 6 bytes."""


def mended(content: bytes) -> bytes:
    r"""Replace each escaped half of a surrogate pair in whole lines of JSON by \ufffd.

    Programs that cut texts between two UTF-16 units write such halves, and strict readers refuse the line.
    """
    return SURROGATES.sub(_mend_escape, content)


def _mend_escape(match: re.Match[bytes]) -> bytes:
    is_half_a_pair = len(match[0]) == 6
    return b"\\ufffd" if is_half_a_pair else match[0]


def pass_on(limit: int, message: str, command: list[str]) -> int:
    """Run a program to its end, and copy the lines that it prints to the standard output.

    An escaped half of a surrogate pair, which strict readers of JSON refuse, is replaced by U+FFFD.

    Args:
        limit: A line with more bytes is replaced by a JSON-RPC error.
        message: What this error says.
        command: The program and its arguments.

    Returns:
        The exit code of the program.
    """
    # Kills this process and the program once the process that started this one has ended.
    threading.Thread(target=end_after_parent, args=(os.getppid(),), daemon=True).start()

    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        for line in iter_bounded_lines(program.stdout, limit, message):
            sys.stdout.buffer.write(mended(line))  # without half surrogate pairs
            sys.stdout.buffer.flush()

    return program.returncode


def iter_bounded_lines(stream: IO[bytes], limit: int, message: str) -> Iterator[bytes]:
    """Yield the lines of a stream; in place of a line longer than `limit` bytes, an error that says `message`."""
    for line in iter(partial(stream.readline, limit), b""):
        if is_unfinished(line, limit):
            end = skip_line(stream, line, limit)
            yield build_error_answer(line, end, message)
        else:
            yield line


def is_unfinished(line: bytes, limit: int) -> bool:
    """Return whether `readline(limit)` stopped at its limit, before the end of the line."""
    return len(line) >= limit and not line.endswith(b"\n")


def skip_line(stream: IO[bytes], beginning: bytes, limit: int) -> bytes:
    """Read the rest of a line, `limit` bytes at a time, and return at least its last END_BYTES.

    beginning: what was read of the line already.
    """
    end = beginning
    while is_unfinished(end, limit):
        end = end[-END_BYTES:] + stream.readline(limit)
    return end


def build_error_answer(beginning: bytes, end: bytes, message: str) -> bytes:
    """Build a JSON-RPC error that is sent in place of an answer that is too long.

    Args:
        beginning: The beginning of the long answer, in which the number of its request may be.
        end: Its end, in which the number may be too.
        message: What the error says.
    """
    answer: dict[str, object] = {"jsonrpc": "2.0"}

    number = ID_AT_THE_END.search(end) or ID_AT_THE_BEGINNING.match(beginning)
    if number:  # clients ignore an error without a number
        answer["id"] = int(number[1])
        answer["error"] = {"code": -32000, "message": message}

    return json.dumps(answer).encode() + b"\n"


def end_after_parent(parent: int) -> None:
    """Wait until the process `parent` has ended, then kill this process group and the program with it."""
    while os.getppid() == parent:  # an orphan gets another parent
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(pass_on(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
