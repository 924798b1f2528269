"""kill -9 in the middle of a stage: at most a chunk is lost, and the tables become those of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pipeline.conftest import Line, NewLine, cost

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
STAGES = ("raw_shards", "heuristic_subset", "scored_candidates", "tool_results", "loss_deltas")
KINDS = {"scored_candidates": "samples", "tool_results": "calls", "loss_deltas": "losses"}
SMALL = {"execution__chunk_texts": 2, "execution__chunk_calls": 2}


def start(line: Line, stage: str) -> "subprocess.Popen[str]":
    """Start bringing a table up to date in another process, in chunks of two."""
    command = [sys.executable, "-m", "tests.pipeline.kill_child", str(line.folder), stage]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)


def killed(line: Line, stage: str, chunks: int, wait: float) -> int:
    """Start the stage, kill it `wait` seconds after its chunk number `chunks`; return the exit status."""
    with start(line, stage) as child:
        assert child.stdout is not None
        for _ in range(chunks):
            child.stdout.readline()
        time.sleep(wait)
        os.kill(child.pid, signal.SIGKILL)
        return child.wait()


@pytest.fixture(scope="module")
def undisturbed(new_line: NewLine) -> Line:
    """Run a line in chunks of two."""
    line = new_line("one")
    line.set(**SMALL)
    line.update()
    return line


@pytest.mark.parametrize(
    ("stage", "chunks", "wait"), [("scored_candidates", 2, 0.01), ("tool_results", 1, 0.0), ("loss_deltas", 3, 0.02)]
)
def test_a_killed_stage_goes_on_where_it_was(
    new_line: NewLine, undisturbed: Line, stage: str, chunks: int, wait: float
) -> None:
    line = new_line("one")
    line.set(**SMALL)
    line.update(*STAGES[: STAGES.index(stage)])
    assert killed(line, stage, chunks, wait) == -signal.SIGKILL
    assert not line.output(stage).table.has("one")
    report = line.update(stage)[stage]
    computed, reused = cost({stage: report}, KINDS[stage])
    assert reused >= chunks and computed > 0
    line.update()
    rows, others = line.tables(), undisturbed.tables()
    assert rows.keys() == others.keys()
    assert all(rows[name].equals(others[name]) for name in others)
