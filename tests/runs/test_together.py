"""Runs of the command line and of Dagster at once over one lake, and a reader who asks the warehouse all the while."""

import os
import subprocess
import sys

import dagster as dg
import pytest

from assets import JOB
from assets.outputs import BY_HAND
from tests.runs.conftest import World, assert_same

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
