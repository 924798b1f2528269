"""A run whose process is gone is ended, and its slot in the pool is free again."""

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from resources.instance import shared_instance
from resources.lake import LakeResource
from resources.processes import PROCESS, alive, end_dead_runs
from toolformer_dag.storage.lake import Lake

KILLED = """
import os, signal, sys
from pathlib import Path
import dagster as dg
from resources.instance import home, shared_instance
from resources.processes import alive

@dg.asset(pool="gpu")
def scored():
    os.kill(os.getpid(), signal.SIGKILL)

root = Path(sys.argv[1])
with alive(home(root)) as tags:
    dg.materialize([scored], instance=shared_instance(root), tags=tags)
"""
OF_THE_UI = """
import os, signal, sys
from pathlib import Path
import dagster as dg
from resources.instance import shared_instance
from resources.lake import LakeResource
from toolformer_dag.storage.lake import Lake

@dg.asset(pool="gpu")
def scored(lake: dg.ResourceParam[Lake]):
    os.kill(os.getpid(), signal.SIGKILL)

root = Path(sys.argv[1])
dg.materialize([scored], instance=shared_instance(root), resources={"lake": LakeResource(root=str(root))})
"""


@dg.asset(pool="gpu")
def scored() -> None:
    """Waits for a slot as long as another run holds it."""


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dg.DagsterInstance:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster"))
    return shared_instance(tmp_path)


def test_killed_run_is_ended_and_the_next_one_gets_its_slot(instance, tmp_path):
    repository = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=repository, capture_output=True)
    assert done.returncode == -9
    [run] = instance.get_runs()
    assert run.status is dg.DagsterRunStatus.STARTED
    assert instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 1
    assert end_dead_runs(instance, tmp_path / ".dagster") == [run.run_id]
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.FAILURE
    assert dg.materialize([scored], instance=instance).success


def test_living_runs_and_those_without_a_tag_are_left_alone(instance, tmp_path):
    with alive(tmp_path / ".dagster") as tags:
        for run_tags in (tags, {}):
            job = dg.define_asset_job("job", [scored])
            made = dg.Definitions([scored], jobs=[job]).resolve_job_def("job")
            instance.create_run_for_job(made, status=dg.DagsterRunStatus.STARTED, tags=run_tags)
        assert end_dead_runs(instance, tmp_path / ".dagster") == []
    dead = end_dead_runs(instance, tmp_path / ".dagster")
    assert [instance.get_run_by_id(run).tags.get(PROCESS) for run in dead] == [tags[PROCESS]]


def test_a_killed_run_of_the_ui_is_told_by_the_lake_that_it_opened(instance, tmp_path):
    repository = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", OF_THE_UI, str(tmp_path)], cwd=repository, capture_output=True)
    assert done.returncode == -9
    [run] = instance.get_runs()
    assert instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 1
    assert end_dead_runs(instance, tmp_path / ".dagster") == [run.run_id]
    assert instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 0


def test_a_run_that_opened_the_lake_lives_until_it_ends(instance, tmp_path):
    judged = []

    @dg.asset
    def living(lake: dg.ResourceParam[Lake]) -> None:
        judged.append(end_dead_runs(instance, tmp_path / ".dagster"))

    done = dg.materialize([living], instance=instance, resources={"lake": LakeResource(root=str(tmp_path))})
    assert done.success and judged == [[]]
    assert PROCESS in instance.get_run_by_id(done.run_id).tags
    assert not list((tmp_path / ".dagster" / "processes").iterdir())
