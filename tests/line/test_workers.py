"""Partitions in processes of their own: the rows of one process, and nothing lost when a process dies."""

import multiprocessing

import pytest

from resources.processes import PROCESS
from tests.line.conftest import assert_same
from tests.processes import started_by_a_killed
from toolformer_dag.progress import watched_by

TWO = "execution.workers=2"


@pytest.fixture
def fresh(fresh, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(fresh.folder / ".dagster"))
    return fresh


def test_two_workers_make_the_rows_of_one_process_and_tell_how_far_they_are(made, fresh):
    told = []
    with watched_by(lambda *progress: told.append(progress)):
        ran = fresh.run(TWO)
    assert_same(fresh.tables(), {name: made.tables()[name] for name in fresh.tables()})
    runs = fresh.line().instance.get_runs()
    by_process = {run.tags[PROCESS]: run.tags.get("dagster/partition") for run in runs}
    assert sorted(by_process.values(), key=str) == [None, "one", "two"]
    assert {"calculator/loss_deltas one", "sums/scored_candidates two"} <= {stage for stage, *_ in told}
    assert ran.costs["calculator/loss_deltas[two]"].tokens > 0
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_takes_its_partition_with_it_and_no_other(made, fresh):
    line, killed = fresh.line(TWO), []

    def kill_the_first(batch) -> None:
        if batch.partition and not killed:
            [worker] = multiprocessing.active_children()
            worker.kill()
            killed.append(batch.partition)

    outcome = line.bring_up_to_date(training=False, announce=kill_the_first)
    [reason] = {reason for reason in outcome.failed.values() if "exit code -9" in reason}
    assert "execution.workers" in reason
    assert {asset.partition for asset in outcome.failed} == set(killed)
    assert f"sums/swapped_results[{'two' if killed == ['one'] else 'one'}]" in map(str, outcome.ran)
    assert "warehouse/loss_deltas" not in map(str, outcome.ran)
    fresh.run()
    assert_same(fresh.tables(), {name: made.tables()[name] for name in fresh.tables()})


def test_workers_end_with_the_process_that_started_them(made, fresh):
    settings = str(fresh.folder / "toolformer.toml")
    run = ["stale", "--run", "--config", settings, "--set", TWO]
    lake = fresh.folder / "lake"
    assert len(started_by_a_killed(run, lambda: any(lake.glob("*/samples/*/*.parquet")))) >= 2
    fresh.run()
    assert_same(fresh.tables(), {name: made.tables()[name] for name in fresh.tables()})
