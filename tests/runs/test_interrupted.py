"""A run that somebody ends, and workers that die: what was committed stays, and the next run gives the same tables."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import dagster as dg
import pytest

from tests.runs.conftest import assert_same, ended, spent
from toolformer_dag.assets import running
from toolformer_dag.assets.running import Step
from toolformer_dag.resources.live_runs import run_folder

pytestmark = pytest.mark.long


def test_a_cancelled_run_of_the_command_line_ends_at_the_next_chunk_and_goes_on_later(world, made, monkeypatch):
    monkeypatch.setattr(running, "WRITE_EVERY_SECONDS", -1)
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
    assert name == "sums/scored_candidates" and (done < total or not total)  # no total: its texts were not counted yet
    [run] = project.instance.get_runs(limit=1)
    assert run.status is dg.DagsterRunStatus.CANCELED
    assert "sums/scored_candidates" in world.stale(*change)
    assert "sums/scored_candidates" in world.run(*change).ran
    world.run()
    assert_same(world.tables(), made.tables())


@pytest.mark.parametrize("workers", [1, 2])
def test_what_killed_runs_spent_is_reported_by_the_next_run(fresh, workers):
    options = ["--set", f"execution.workers={workers}", "--set", "execution.chunk_texts=2"]
    instance = fresh.project().instance
    seen = 0
    for stage in ("scored_candidates", "loss_deltas"):
        run = fresh.start("run", *options, output=subprocess.DEVNULL)
        while run.poll() is None and not list((fresh.folder / "lake" / "sums").glob(f"{STORES[stage]}/*/*.parquet")):
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        seen += sum(json.loads(file.read_text())["tokens"] for file in newest(instance).glob("[!.]*.json"))
    out, told = ended(fresh.start("run", *options))
    [before] = re.findall(r"([\d,]+) tokens went through the model", told)
    assert "Runs before this one that did not finish" in told
    assert int(before.replace(",", "")) == seen > 0 and spent(out)[0] > 0
    out, told = ended(fresh.start("run", *options))
    assert "Everything is fresh" in out and "tokens went through the model" not in told


STORES = {"scored_candidates": "positions", "loss_deltas": "losses"}
"""Where a stage commits its chunks."""


def newest(instance: dg.DagsterInstance) -> Path:
    """Return the ledger of the newest run."""
    [run] = instance.get_runs(limit=1)
    return run_folder(instance, run)


def test_a_run_that_waits_for_one_that_is_killed_meanwhile_goes_on(fresh, made):
    instance = fresh.project().instance
    first = fresh.start("run", output=subprocess.DEVNULL)
    while first.poll() is None and not list((fresh.folder / "lake" / "sums").glob("positions/*/*.parquet")):
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGSTOP)
    [killed] = instance.get_runs()
    second = fresh.start("run")
    while second.poll() is None and not instance.event_log_storage.get_concurrency_info("gpu").pending_steps:
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    ended(second)
    assert instance.get_run_by_id(killed.run_id).status is dg.DagsterRunStatus.FAILURE
    assert_same(fresh.tables(), made.tables())
