"""What a run shows while it goes on: a live line on a terminal, a line per asset elsewhere."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.runs.conftest import World

STALE = (sys.executable, "-m", "toolformer_dag.cli", "stale", "--run")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}


def test_each_asset_has_its_line_as_soon_as_it_was_made(world: World) -> None:
    command = [*STALE, "--set", "tools.calculator.tau_f=0.3", "--set", "tools.sums.tau_f=0.3"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=world.folder, env=environment(), stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        first = run.stdout.readline()
        assert first == "ran calculator/filtered_calls\n" and run.poll() is None
        rest, told = run.stdout.read(), run.stderr.read()
    assert run.returncode == 0 and rest.startswith("ran sums/filtered_calls\n")
    lines = [line for line in told.splitlines() if line.startswith(("calculator/", "sums/", "training/", "warehouse/"))]
    assert re.fullmatch(r"calculator/filtered_calls: [\d,]+ rows in [\d.]+ s", lines[0])
    assert len(lines) == len({line.partition(":")[0] for line in lines}) and "\x1b" not in told


@pytest.mark.long
def test_a_terminal_has_one_live_line_with_texts_tokens_and_what_is_left(fresh: World) -> None:
    command = [*STALE, "--set", "execution.chunk_texts=1"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with subprocess.Popen(command, cwd=fresh.folder, env=environment(), stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert run.returncode == 0
    lines = ESCAPE.sub("\n", shown.decode()).splitlines()
    live = re.compile(r"(calculator|sums)/\w+  [\d,]+ of [\d,]+ texts, [\d,]+ tokens/s, \d:\d\d:\d\d left")
    assert any(map(live.fullmatch, lines)), lines
    assert "ran warehouse/dataset" in "".join(lines)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""
