"""Runs of the command line and of Dagster at once over one lake, and a reader who asks the warehouse all the while."""

import os
import re
import subprocess
import sys
import time

import dagster as dg
import pytest

from assets import JOB, TRAINING_JOB
from assets.metadata import TOKENS
from assets.outputs import BY_HAND
from tests.runs.conftest import World, assert_same
from tests.ui_server import launched, served

pytestmark = pytest.mark.long

KEPT_WITHOUT_A_SCORE = """
select count(*) from filtered_calls anti join loss_deltas using (tool, digest, segment, position, sample)
"""
CLI = ("toolformer_dag.cli", "stale", "--run")
DAGSTER = ("dagster", "job", "execute", "-m", "toolformer_dag.definitions", "-j", JOB)


def computed(world: World, name: str) -> int:
    """Sum the rows that were computed over all materializations of an asset."""
    found = dg.DagsterInstance.get().fetch_materializations(dg.AssetKey(name.split("/")), limit=100).records
    return sum(int(one.asset_materialization.metadata["computed"].value) for one in found)


@pytest.mark.parametrize("commands", [(CLI, DAGSTER)], ids=["the command line and Dagster"])
def test_runs_at_once_compute_no_row_twice_and_lock_no_reader_out(fresh, made, monkeypatch, commands):
    instance = fresh.project().instance  # Dagster's own command finds its settings there
    settings = {"TOOLFORMER_CONFIG": str(fresh.folder / "toolformer.toml")}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=fresh.folder,
            env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command in commands
    ]
    answers = []
    while any(run.poll() is None for run in runs):
        if (fresh.folder / "lake" / "toolformer.duckdb").exists():
            answers += fresh.sql(KEPT_WITHOUT_A_SCORE)
        for run in runs:
            if run.poll() is None:
                try:
                    run.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue
    told = [run.communicate()[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(told)
    assert set(answers) <= {(0,)}
    assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
    assert_same(fresh.tables(), made.tables())
    names = [f"{lane}/{stage}" for lane in ("calculator", "sums") for stage in ("scored_candidates", "tool_results")]
    together = {name: computed(fresh, name) for name in names}
    assert set(fresh.stale()) == set(BY_HAND)
    monkeypatch.setenv("DAGSTER_HOME", str(made.folder / ".dagster"))
    assert together == {name: computed(made, name) for name in names}
    assert all(together.values())


RUN = (sys.executable, "-m", "toolformer_dag.cli", "run")
SPENT = re.compile(r"([\d,]+) tokens went through the model, ([\d,]+) tool calls were made")
WAITS = "is running; steps that would compute the same rows wait for it"


def start(world: World) -> subprocess.Popen[str]:
    """Start `toolformer-dag run` in the world's folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(RUN, cwd=world.folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(run: subprocess.Popen[str]) -> tuple[int, int, str]:
    """Wait for a run that succeeds; return its tokens and calls, 0 where nothing ran, and what it said beside."""
    out, told = run.communicate()
    assert run.returncode == 0, told
    found = SPENT.search(out)
    tokens, calls = (int(number.replace(",", "")) for number in found.groups()) if found else (0, 0)
    return tokens, calls, told


def undisturbed(made: World, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the tokens and calls of the run that made a world."""
    names = [f"{lane}/{stage}" for lane in ("calculator", "sums") for stage in STAGES]
    with monkeypatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(made.folder / ".dagster"))
        tokens = sum(int(made.figures(name)[TOKENS].value or 0) for name in names)
        return tokens, computed(made, "calculator/tool_results") + computed(made, "sums/tool_results")


STAGES = ("scored_candidates", "tool_results", "loss_deltas", "swapped_results")


def test_a_second_run_says_that_it_waits_and_together_they_spend_what_one_does(fresh, made, monkeypatch):
    instance = fresh.project().instance
    first = start(fresh)
    while first.poll() is None and not instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
        time.sleep(0.1)
    second = start(fresh)
    one, other = ended(first), ended(second)
    assert f"{JOB} {WAITS}" in other[2] and WAITS not in one[2]
    assert (one[0] + other[0], one[1] + other[1]) == undisturbed(made, monkeypatch)
    assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
    assert_same(fresh.tables(), made.tables())
    assert fresh.stale() == []


def test_a_run_beside_one_of_the_ui_waits_and_together_they_spend_what_one_does(fresh, made, monkeypatch):
    instance = fresh.project().instance
    with served(fresh.folder) as address:
        run_id = launched(address, JOB)
        while instance.get_run_by_id(run_id).status is not dg.DagsterRunStatus.STARTED:
            time.sleep(0.1)
        tokens, calls, told = ended(start(fresh))
        assert f"{JOB} {WAITS}" in told
        while not instance.get_run_by_id(run_id).is_finished:
            time.sleep(0.1)
    assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
    assert {run.job_name for run in instance.get_runs()} == {JOB, TRAINING_JOB}
    records = [
        one.asset_materialization.metadata
        for lane in ("calculator", "sums")
        for stage in STAGES
        for one in instance.fetch_materializations(dg.AssetKey([lane, stage]), limit=100).records
    ]
    assert sum(int(one[TOKENS].value) for one in records) == undisturbed(made, monkeypatch)[0]
    assert tokens <= undisturbed(made, monkeypatch)[0] and calls <= undisturbed(made, monkeypatch)[1]
    assert_same(fresh.tables(), made.tables())
    assert fresh.stale() == []
