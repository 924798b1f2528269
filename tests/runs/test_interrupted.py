"""A run that somebody ends, and workers that die: what was committed stays, and the next run gives the same tables."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest

import assets.running
from assets.running import Step
from resources.live_runs import run_folder
from tests.runs.conftest import assert_same

pytestmark = pytest.mark.long

TWO = "execution.workers=2"
SPENT = re.compile(r"([\d,]+) tokens went through the model")


def test_a_cancelled_run_of_the_command_line_ends_at_the_next_chunk_and_goes_on_later(world, made, monkeypatch):
    monkeypatch.setattr(assets.running, "WRITE_EVERY_SECONDS", -1)
    change = ("tools.sums.k=3", "execution.chunk_texts=1")
    project, seen = world.project(*change), []

    def cancel(step: Step) -> None:
        seen.append((step.name, step.done, step.total))
        [run] = project.instance.get_runs(limit=1)
        if step.name == "sums/scored_candidates" and run.status is dg.DagsterRunStatus.STARTED:
            project.instance.report_run_canceling(run)

    with pytest.raises(KeyboardInterrupt):
        project.run(training=False, sink=cancel)
    name, done, total = seen[-1]
    assert name == "sums/scored_candidates" and done < total
    [run] = project.instance.get_runs(limit=1)
    assert run.status is dg.DagsterRunStatus.CANCELED
    assert "sums/scored_candidates" in world.stale(*change)
    assert "sums/scored_candidates" in world.run(*change).ran
    world.run()
    assert_same(world.tables(), made.tables())


def test_a_worker_that_is_killed_loses_its_chunk_and_two_workers_make_the_rows_of_one(fresh, made):
    told, killed = [], []

    def kill_the_first(step: Step) -> None:
        told.append(step.name)
        if step.name == "calculator/heuristic_subset" and step.outcome is None and not killed:
            worker = multiprocessing.active_children()[0]
            worker.kill()
            killed.append(worker.pid)

    report = fresh.run(TWO, sink=kill_the_first)
    assert killed and report.tokens > 0
    assert {"calculator/loss_deltas", "sums/scored_candidates"} <= set(told)
    assert_same(fresh.tables(), made.tables())
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_killed_runs_spent_is_reported_by_the_next_run(fresh, workers):
    options = ["--set", f"execution.workers={workers}", "--set", "execution.chunk_texts=2"]
    command = [sys.executable, "-m", "toolformer_dag.cli", "run", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    instance = fresh.project().instance
    seen = 0
    for stage in ("scored_candidates", "loss_deltas"):
        run = subprocess.Popen(command, cwd=fresh.folder, env=environment, start_new_session=True)
        while run.poll() is None and not list((fresh.folder / "lake" / "sums").glob(f"{STORES[stage]}/*/*.parquet")):
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        seen += sum(json.loads(file.read_text())["tokens"] for file in newest(instance).glob("[!.]*.json"))
    done = subprocess.run(command, cwd=fresh.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [before], [now] = ([int(n.replace(",", "")) for n in SPENT.findall(text)] for text in (done.stderr, done.stdout))
    assert "Runs before this one that did not finish" in done.stderr
    assert before == seen > 0 and now > 0
    again = subprocess.run(command, cwd=fresh.folder, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "Everything is fresh" in again.stdout and not SPENT.search(again.stderr)


STORES = {"scored_candidates": "positions", "loss_deltas": "losses"}
"""Where a stage commits its chunks."""


def newest(instance: dg.DagsterInstance) -> Path:
    """Return the ledger of the newest run."""
    [run] = instance.get_runs(limit=1)
    return run_folder(instance, run)
