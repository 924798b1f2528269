"""A run that somebody ends, and workers that die: what was committed stays, and the next run gives the same tables."""

import multiprocessing

import dagster as dg
import pytest

import assets.running
from assets.running import watched_by
from tests.runs.conftest import assert_same

pytestmark = pytest.mark.long

TWO = "execution.workers=2"


def test_a_cancelled_run_of_the_command_line_ends_at_the_next_chunk_and_goes_on_later(world, made, monkeypatch):
    monkeypatch.setattr(assets.running, "LOOK_EVERY_SECONDS", -1)
    change = ("tools.sums.k=3", "execution.chunk_texts=1")
    project, seen = world.project(*change), []

    def cancel(name: str, done: int, total: int) -> None:
        seen.append((name, done, total))
        [run] = project.instance.get_runs(limit=1)
        if name == "sums/scored_candidates" and run.status is dg.DagsterRunStatus.STARTED:
            project.instance.report_run_canceling(run)

    with watched_by(cancel), pytest.raises(KeyboardInterrupt):
        project.run(training=False)
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

    def kill_the_first(name: str, done: int, total: int) -> None:
        told.append(name)
        if name == "calculator/heuristic_subset" and not killed:
            worker = multiprocessing.active_children()[0]
            worker.kill()
            killed.append(worker.pid)

    with watched_by(kill_the_first):
        report = fresh.run(TWO)
    assert killed and report.tokens > 0
    assert {"calculator/loss_deltas", "sums/scored_candidates"} <= set(told)
    assert_same(fresh.tables(), made.tables())
    assert not multiprocessing.active_children()
