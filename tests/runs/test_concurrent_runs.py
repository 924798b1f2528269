"""Two runs at once over one lake, of the command line and of the UI, and a reader who asks the warehouse meanwhile."""

import time

import dagster as dg
import pytest

from tests.runs.conftest import ALL_SPENT, assert_same, ended, spent
from toolformer_dag.assets import JOB

pytestmark = pytest.mark.long

KEPT_WITHOUT_A_SCORE = """
select count(*) from filtered_calls anti join loss_deltas using (tool, digest, segment, position, sample)
"""
WAITS = "is running; steps that would compute the same rows wait for it"


def test_a_second_run_says_that_it_waits_and_together_they_spend_what_one_does_and_lock_no_reader_out(fresh, made):
    instance = fresh.project().instance
    first = fresh.start("run")
    while first.poll() is None and not instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
        time.sleep(0.1)
    second = fresh.start("run")
    answers = []
    while first.poll() is None or second.poll() is None:
        if (fresh.folder / "lake" / "toolformer.duckdb").exists():
            answers += fresh.sql(KEPT_WITHOUT_A_SCORE)
        time.sleep(0.5)
    (one, beside), (other, told) = ended(first), ended(second)
    assert f"{JOB} {WAITS}" in told and WAITS not in beside
    assert set(answers) == {(0,)}
    [undisturbed] = made.sql(ALL_SPENT)
    assert tuple(map(sum, zip(spent(one), spent(other), strict=True))) == undisturbed
    assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
    assert_same(fresh.tables(), made.tables())
    assert fresh.stale() == []


def test_two_homes_over_one_lake_take_turns_and_compute_no_row_twice(fresh, made, tmp_path):
    """As of two clones, or two users: neither Dagster instance knows of the other."""
    runs = [fresh.start("run", DAGSTER_HOME=str(tmp_path / home)) for home in ("one", "other")]
    (one, beside), (other, told) = map(ended, runs)
    assert "waits for another run over this lake (process " in beside + told
    [undisturbed] = made.sql(ALL_SPENT)
    assert tuple(map(sum, zip(spent(one), spent(other), strict=True))) == undisturbed
    assert_same(fresh.tables(), made.tables())
