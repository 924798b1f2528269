"""Run a program and pass on the lines that it prints, each up to a length: BYTES MESSAGE PROGRAM [ARGUMENT ...].

A client of MCP over stdio keeps a line of any length in memory, and drops one with half a surrogate. A line that is
longer than BYTES is answered in the program's place, with an error that says MESSAGE. The program ends with the process
that started this one. This file is run by its path, and imports nothing of the package.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

IDENTIFIER = rb'"id"\s*:\s*([0-9]+)'
AT_THE_END, AT_THE_BEGINNING = re.compile(IDENTIFIER + rb"\s*\}\s*\Z"), re.compile(rb"\A.{0,64}?" + IDENTIFIER)
"""Where the number of the request stands in an answer, as the servers' libraries write it."""

SURROGATES = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89a-fA-F]..")


def mended(content: bytes) -> bytes:
    """Return whole lines of JSON with U+FFFD for half a surrogate pair, as programs cut texts."""
    return SURROGATES.sub(lambda match: b"\\ufffd" if len(match[0]) == 6 else match[0], content)


def pass_on(limit: int, message: str, command: list[str]) -> int:
    """Run the command to its end; return its exit code."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    out = sys.stdout.buffer
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        while line := program.stdout.readline(limit):
            rest, whole = line, True
            while len(rest) >= limit and not rest.endswith(b"\n"):
                whole, rest = False, rest[-64:] + program.stdout.readline(limit)
            if not whole:
                number = AT_THE_END.search(rest) or AT_THE_BEGINNING.match(line)
                answer = {"id": int(number[1]), "error": {"code": -32000, "message": message}} if number else {}
                line = json.dumps({"jsonrpc": "2.0", **answer}).encode() + b"\n"
            out.write(mended(line))
            out.flush()
    return program.returncode


def end_with(parent: int) -> None:
    """End this process and what it started when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(pass_on(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
