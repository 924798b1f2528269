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

REQUEST_ID_REGEX = rb'"id"\s*:\s*([0-9]+)'
"""The number of the request that an answer is for."""
ID_AT_END_PATTERN = re.compile(REQUEST_ID_REGEX + rb"\s*\}\s*\Z")
"""Some libraries write the number last: `{"jsonrpc": "2.0", "result": {...}, "id": 7}`."""
ID_AT_START_PATTERN = re.compile(rb"\A.{0,64}?" + REQUEST_ID_REGEX)
"""Others write it first: `{"jsonrpc": "2.0", "id": 7, "result": {...}}`."""
KEPT_END_BYTES = 64
"""Bytes of the end of a long line that are kept, in which the number may stand."""

SURROGATE_ESCAPE_PATTERN = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89a-fA-F]..")
"""An escaped backslash, whose second half begins no escape; a surrogate pair; or half a pair, which has 6 bytes."""


def replace_lone_surrogates(json_lines: bytes) -> bytes:
    r"""Replace each escaped half of a surrogate pair in whole lines of JSON by \ufffd.

    Programs that cut texts between two UTF-16 units write such halves, and strict readers refuse the line.
    """
    return SURROGATE_ESCAPE_PATTERN.sub(_replace_lone_surrogate, json_lines)


def _replace_lone_surrogate(escape_match: re.Match[bytes]) -> bytes:
    r"""Return \ufffd for half a surrogate pair, and any other match of SURROGATE_ESCAPE_PATTERN unchanged."""
    is_half_a_pair = len(escape_match[0]) == 6
    return b"\\ufffd" if is_half_a_pair else escape_match[0]


def run_with_bounded_lines(max_line_bytes: int, error_message: str, command: list[str]) -> int:
    """Run a program (an MCP server) to its end, and pass the lines that it prints on to the standard output.

    Lines that its client could not take are changed: too long ones become errors, and an escaped half of a surrogate
    pair, which strict readers of JSON refuse, becomes U+FFFD.

    Args:
        max_line_bytes: A line with more bytes is replaced by a JSON-RPC error.
        error_message: What this error says.
        command: The program and its arguments.

    Returns:
        The exit code of the program.
    """
    # A thread kills this process and the program as soon as the process that started this one has ended.
    threading.Thread(target=kill_group_after_parent, args=(os.getppid(),), daemon=True).start()

    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        for line in iter_bounded_lines(program.stdout, max_line_bytes, error_message):
            sys.stdout.buffer.write(replace_lone_surrogates(line))
            sys.stdout.buffer.flush()  # the client waits for the line

    return program.returncode


def iter_bounded_lines(stream: IO[bytes], max_line_bytes: int, error_message: str) -> Iterator[bytes]:
    """Read the lines of a stream, without ever keeping more than a certain number of bytes.

    Args:
        stream: The stream.
        max_line_bytes: A line with more bytes is replaced by a JSON-RPC error.
        error_message: What this error says.

    Yields:
        The lines, with their line ends.
    """
    read_next_line = partial(stream.readline, max_line_bytes)  # returns b"" at the end of the stream
    for line in iter(read_next_line, b""):
        if is_line_unfinished(line, max_line_bytes):
            line_end = read_line_end(stream, line, max_line_bytes)
            yield build_error_answer(line, line_end, error_message)
        else:
            yield line


def is_line_unfinished(line: bytes, max_line_bytes: int) -> bool:
    """Return whether a line read with `readline(max_line_bytes)` stopped at this limit, before its newline."""
    return len(line) >= max_line_bytes and not line.endswith(b"\n")


def read_line_end(stream: IO[bytes], line_start: bytes, max_line_bytes: int) -> bytes:
    """Read a long line to its end, and forget all of it but the end.

    Args:
        stream: The stream.
        line_start: What was read of the line already.
        max_line_bytes: How many bytes are read at a time, more than KEPT_END_BYTES.

    Returns:
        At least the last KEPT_END_BYTES bytes of the line.
    """
    # A line is unfinished if it has `max_line_bytes` or more, and no newline. If the stream ends without one, the next
    # round reads nothing, and the kept end alone is too short to count as unfinished.
    line_end = line_start
    while is_line_unfinished(line_end, max_line_bytes):
        line_end = line_end[-KEPT_END_BYTES:] + stream.readline(max_line_bytes)
    return line_end


def build_error_answer(answer_start: bytes, answer_end: bytes, error_message: str) -> bytes:
    """Build a JSON-RPC error that is sent in place of an answer that is too long.

    The error has the field `id` of the answer, by which the client knows to which request it belongs. Some libraries
    write this field first, others last.

    Args:
        answer_start: The beginning of the long answer.
        answer_end: Its end.
        error_message: What the error says.

    Returns:
        The error as a line of JSON. Without an `id` in the answer, it is only `{"jsonrpc": "2.0"}`, because clients
        would ignore an error without one.
    """
    error_answer: dict[str, object] = {"jsonrpc": "2.0"}

    id_match = ID_AT_END_PATTERN.search(answer_end) or ID_AT_START_PATTERN.match(answer_start)
    if id_match:
        request_id = int(id_match[1])
        error_answer["id"] = request_id
        error_answer["error"] = {"code": -32000, "message": error_message}

    return json.dumps(error_answer).encode() + b"\n"


def kill_group_after_parent(parent_pid: int) -> None:
    """Wait until the process `parent_pid` has ended, then kill this process group and the program with it."""
    while os.getppid() == parent_pid:  # an orphan gets another parent
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_with_bounded_lines(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
