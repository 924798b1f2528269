"""What is said of a run: before it, by `run --estimate`; while it goes on, a live line or a line per asset."""

import fcntl
import os
import pty
import re
import struct
import termios

import pytest

from tests.runs.conftest import World
from toolformer_dag.cli.forecast import NOT_COVERED, forecast

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.long
def test_each_asset_has_its_line_as_soon_as_it_was_made(world: World) -> None:
    change = ("--set", "tools.calculator.tau_f=0.3", "--set", "tools.sums.tau_f=0.3")
    with world.start("stale", "--run", *change, TERM="xterm") as run:
        assert run.stdout is not None and run.stderr is not None
        first = next(line for line in run.stderr if line.startswith("calculator/"))
        assert re.fullmatch(r"calculator/filtered_calls: [\d,]+ rows in [\d.]+ s\n", first) and run.poll() is None
        ran, told = run.stdout.read(), first + run.stderr.read()
    assert run.returncode == 0 and ran.startswith("ran calculator/filtered_calls\nran sums/filtered_calls\n")
    lines = [line for line in told.splitlines() if line.startswith(("calculator/", "sums/", "training/", "warehouse/"))]
    assert len(lines) == len({line.partition(":")[0] for line in lines}) and "\x1b" not in told


@pytest.mark.long
def test_a_terminal_has_one_live_line_with_texts_tokens_and_what_is_left(fresh: World) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with fresh.start("stale", "--run", "--set", "execution.chunk_texts=1", output=theirs, TERM="xterm") as run:
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


def test_a_finished_world_has_nothing_to_forecast(world):
    assert forecast(world.project().plan) == "Nothing is left to annotate."


def test_a_forecast_has_a_line_per_lane(world):
    plan = world.project("tools.calculator.m=5").plan
    head, *lanes, total, time, engine, spent, covered = forecast(plan).splitlines()
    assert head.split()[0] == "lane" and covered == NOT_COVERED
    assert [line.split()[0] for line in lanes] == ["calculator", "sums"] and total.startswith("all")
    assert time.startswith("Time on 1 worker: ") and " (" in time
    assert re.fullmatch(r'With model.engine = "vllm": some [\d,]+ tokens \(1.14 times as many\)', engine)
    assert spent.startswith("The sample took ") and "took 0 tokens" not in spent
