"""What is said of a run: before it, by `run --estimate`; while it goes on, a live line or a line per asset."""

import fcntl
import itertools
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from types import FrameType

import dagster as dg
import pytest

from tests.runs.conftest import World
from toolformer_dag.assets import running
from toolformer_dag.assets.running import Running, build_progress_reporter, track_step
from toolformer_dag.cli.forecast import NOT_COVERED_NOTE, forecast_cost_as_table
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.worker import WorkAhead

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.long
def test_each_asset_has_its_line_as_soon_as_it_was_made(world: World) -> None:
    change = ("--set", "tools.calculator.tau_f=0.3", "--set", "tools.sums.tau_f=0.3")
    with world.start("stale", "--run", *change, TERM="xterm") as run:
        assert run.stdout is not None and run.stderr is not None
        first = next(line for line in run.stderr if line.startswith("calculator/"))
        assert re.fullmatch(r"calculator/filtered_calls: [\d,]+ rows in [\d.]+ s\n", first) and run.poll() is None
        ran = run.stdout.read()
        told = first + run.stderr.read()
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


def test_a_step_says_within_its_first_chunk_how_far_it_is_and_after_it_what_is_left() -> None:
    spent = Spent(250)
    ahead = WorkAhead(40, 0, 1000)
    made = Running("calculator/loss_deltas", "texts", began=time.monotonic() - 10)
    made.get_spent = lambda: spent
    made.get_work_ahead = lambda: ahead
    made.write_progress()
    assert made.progress_text == "250 of some 1,000 tokens, 25 tokens/s, measuring the time left"
    # what was estimated at 200 took 300, so the rest will take half as much again
    made.done = 8
    spent = Spent(300)
    ahead = WorkAhead(40, 200, 1000)
    made.write_progress()
    spent = Spent(500)
    made.write_progress()
    assert made.expected == 1500 and made.progress_text == "8 of 40 texts, 50 tokens/s, 0:00:20 left"


def test_tool_calls_are_counted_while_a_chunk_of_them_is_made() -> None:
    made = Running("calculator/tool_results", "calls", began=time.monotonic() - 10)
    made.get_spent = lambda: Spent(0, 100)
    made.get_work_ahead = lambda: WorkAhead(400)
    made.write_progress()
    assert made.progress_text == "100 of 400 calls, 0:00:30 left"


def test_a_step_that_computes_is_asked_beside_it_how_far_it_is() -> None:
    asked = threading.Event()
    with track_step(dg.build_asset_context(), "calculator/loss_deltas"):
        build_progress_reporter(dg.build_asset_context(), "texts", get_work_ahead=lambda: asked.set() or WorkAhead(1))
        assert asked.wait(60)


def test_a_step_that_is_interrupted_while_it_begins_leaves_no_thread_that_its_process_would_wait_for() -> None:
    moment = 0
    while _interrupted_at(moment):
        moment += 1
        assert [thread for thread in threading.enumerate()[1:] if not thread.daemon] == [], moment
    assert moment > 10


def _interrupted_at(moment: int) -> bool:
    """Begin a step; raise KeyboardInterrupt before the line of its module that is executed as number `moment`."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if event == "line" and frame.f_code.co_filename == running.__file__ and next(lines) == moment:
            raise KeyboardInterrupt
        return trace

    context = dg.build_asset_context()
    sys.settrace(trace)
    try:
        with track_step(context, "calculator/loss_deltas"):
            sys.settrace(None)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


def test_a_finished_world_has_nothing_to_forecast(world):
    assert forecast_cost_as_table(world.project().plan) == "Nothing is left to annotate."


def test_a_forecast_has_a_line_per_lane(world):
    plan = world.project("tools.calculator.m=5").plan
    head, *lanes, total, time, spent, covered = forecast_cost_as_table(plan).splitlines()
    assert head.split()[0] == "lane" and covered == NOT_COVERED_NOTE
    assert [line.split()[0] for line in lanes] == ["calculator", "sums"] and total.startswith("all")
    assert time.startswith("Time on 1 worker: ") and " (" in time
    assert spent.startswith("The sample took ") and "took 0 tokens" not in spent
