"""kill -9 in the middle of a stage: at most a chunk is lost, and the tables become those of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest

if TYPE_CHECKING:
    from conftest import Line

CHILD = Path(__file__).with_name("kill_child.py")
STAGES = ("raw_shards", "heuristic_subset", "scored_candidates", "tool_results", "loss_deltas")
KINDS = {"scored_candidates": "samples", "tool_results": "calls", "loss_deltas": "losses"}


def killed(line: "Line", stage: str, chunks: int, wait: float) -> int:
    """Starts the stage, kills it `wait` seconds after its chunk number `chunks`; returns the exit status."""
    command = [sys.executable, str(CHILD), str(line.folder), str(line.model_folder), stage, "one"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        for _ in range(chunks):
            child.stdout.readline()
        time.sleep(wait)
        os.kill(child.pid, signal.SIGKILL)
        return child.wait()


def published(line: "Line") -> dict[str, pl.DataFrame]:
    names = ("scored_candidates", "tool_results", "loss_deltas")
    return {name: line.lake.table(f"calculator/{name}").read("one").drop("seconds", strict=False) for name in names}


@pytest.mark.parametrize(
    ("stage", "chunks", "wait"), [("scored_candidates", 2, 0.01), ("tool_results", 1, 0.0), ("loss_deltas", 3, 0.02)]
)
def test_a_killed_stage_goes_on_where_it_was(
    new_line: Callable[..., "Line"], stage: str, chunks: int, wait: float
) -> None:
    line, undisturbed = new_line(["one"]), new_line(["one"])
    line.chunk_texts = undisturbed.chunk_texts = 2
    whole = undisturbed.run()[f"{stage}/one"]
    for name in STAGES[: STAGES.index(stage)]:
        line.stage(name, "one")
    assert killed(line, stage, chunks, wait) == -signal.SIGKILL
    assert not line.lake.table(f"calculator/{stage}").has("one")
    computed, reused = line.stage(stage, "one").work[KINDS[stage]]
    assert computed + reused == sum(whole.work[KINDS[stage]])
    assert reused > 0 and computed > 0
    line.run()
    rows, others = published(line), published(undisturbed)
    assert all(rows[name].equals(others[name]) for name in others)
