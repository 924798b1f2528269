"""A run whose process is gone is marked as failed, and its slot in the pool is free again; others are left alone."""

import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from toolformer_dag.cli.project import open_shared_instance
from toolformer_dag.computing.spending import Spent
from toolformer_dag.files import write_file_atomically
from toolformer_dag.lake.table import Lake
from toolformer_dag.resources import LakeResource, live_runs
from toolformer_dag.resources.live_runs import (
    HOME_TAG,
    end_dead_runs,
    get_live_runs_folder,
    get_or_create_home_name,
    get_run_folder,
    hold_run_lock,
    pop_spending_of_failed_runs,
)

REPOSITORY = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
import dagster as dg
from toolformer_dag.resources import LakeResource
from toolformer_dag.cli.project import open_shared_instance
from toolformer_dag.lake.table import Lake

@dg.asset(pool="gpu")
def scored(lake: dg.ResourceParam[Lake]):
    os.kill(os.getpid(), signal.SIGKILL)

root = Path(sys.argv[1])
dg.materialize([scored], instance=open_shared_instance(root), resources={"lake": LakeResource(root=str(root))})
"""
WITHOUT_A_FILE = """
import os, signal, sys
from pathlib import Path
import dagster as dg
from toolformer_dag.cli.project import open_shared_instance

@dg.asset
def endless():
    print(os.getpid(), flush=True)
    sys.stdin.read()

dg.materialize([endless], instance=open_shared_instance(Path(sys.argv[1])))
"""


@dg.asset(pool="gpu")
def scored() -> None:
    """Wait for a slot as long as another run holds it."""


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dg.DagsterInstance:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster"))
    return open_shared_instance(tmp_path)


def started(
    instance: dg.DagsterInstance,
    tags: Mapping[str, str] | None = None,
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED,
) -> dg.DagsterRun:
    """Add a run that has started."""
    job = dg.Definitions([scored], jobs=[dg.define_asset_job("job", [scored])]).resolve_job_def("job")
    return instance.create_run_for_job(job, status=status, tags=dict(tags or {}))


def status(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


def test_a_run_that_was_killed_before_it_began_is_ended(instance):
    killed = started(instance, {live_runs.RUN_FOLDER_TAG: "killed"}, dg.DagsterRunStatus.NOT_STARTED)
    living = started(instance, {live_runs.RUN_FOLDER_TAG: "living"}, dg.DagsterRunStatus.NOT_STARTED)
    for folder in ("killed", "living"):
        (get_live_runs_folder(instance) / folder).mkdir(parents=True)
    (get_live_runs_folder(instance) / "killed" / "lock").touch()
    with hold_run_lock(get_live_runs_folder(instance) / "living"):
        assert end_dead_runs(instance) == [killed.run_id]
    assert status(instance, killed) is dg.DagsterRunStatus.FAILURE
    assert status(instance, living) is dg.DagsterRunStatus.NOT_STARTED


def test_a_run_that_was_killed_when_a_slot_was_meant_for_it_does_not_keep_the_slot(instance):
    first = started(instance)
    waiting = started(instance)
    slots = instance.event_log_storage
    slots.initialize_concurrency_limit_to_default("gpu")
    assert slots.claim_concurrency_slot("gpu", first.run_id, "scored").is_claimed
    assert not slots.claim_concurrency_slot("gpu", waiting.run_id, "scored").is_claimed
    for run in (first, waiting):
        instance.report_run_failed(run, "killed")
    slots.free_concurrency_slots_for_run(first.run_id)
    assert slots.get_concurrency_info("gpu").assigned_step_count == 1, "of the run that waited"
    assert end_dead_runs(instance) == []
    assert dg.materialize([scored], instance=instance).success


def test_a_killed_run_is_ended_and_the_next_one_gets_its_slot_while_its_retry_lives(instance, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == -9
    [run] = instance.get_runs()
    assert run.status is dg.DagsterRunStatus.STARTED
    assert instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 1
    again = started(instance, {**run.tags, "dagster/parent_run_id": run.run_id, "dagster/root_run_id": run.run_id})
    assert end_dead_runs(instance) == [run.run_id]
    assert status(instance, run) is dg.DagsterRunStatus.FAILURE
    assert status(instance, again) is dg.DagsterRunStatus.STARTED
    assert instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 0
    assert dg.materialize([scored], instance=instance).success
    assert end_dead_runs(instance) == []


def test_a_run_without_a_lock_file_is_told_by_its_process(instance, tmp_path):
    command = [sys.executable, "-c", WITHOUT_A_FILE, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and int(running.stdout.readline()) == running.pid
        [run] = instance.get_runs()
        assert end_dead_runs(instance) == []
        running.kill()
    assert end_dead_runs(instance) == [run.run_id]
    assert status(instance, run) is dg.DagsterRunStatus.FAILURE


def test_a_run_that_never_got_a_process_is_ended_after_a_while_but_none_of_another_machine(instance, monkeypatch):
    starting = dg.DagsterRunStatus.STARTING
    started(instance, {HOME_TAG: "another"}, starting)
    runs = [started(instance, tags, starting).run_id for tags in ({}, {HOME_TAG: get_or_create_home_name(instance)})]
    assert end_dead_runs(instance) == []
    monkeypatch.setattr(live_runs, "NEVER_BEGUN", timedelta(0))
    assert sorted(end_dead_runs(instance)) == sorted(runs)


def test_a_home_whose_name_is_garbage_keeps_what_it_reads_as(instance):
    name = get_or_create_home_name(instance)
    (Path(instance.root_directory) / "home_name").write_bytes(b"\xff\x00" + name.encode())
    assert get_or_create_home_name(instance) == get_or_create_home_name(instance) != name
    assert end_dead_runs(instance) == []


def test_what_unfinished_runs_spent_is_told_once_and_what_others_spent_never(instance, tmp_path):
    failed, succeeded, living = (started(instance) for _ in range(3))
    for number, run in enumerate((failed, succeeded, living)):
        for process in range(2):
            told = b'{"tokens": %d, "calls": %d}' % (10 * 2**number, process)
            write_file_atomically(get_run_folder(instance, run) / f"step{process}.json", told)
            assert pop_spending_of_failed_runs(instance) == Spent()
    instance.report_run_failed(failed)
    instance.report_dagster_event(dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, "job"), succeeded.run_id)
    with hold_run_lock(get_run_folder(instance, failed)):  # its command is about to ask for it
        assert pop_spending_of_failed_runs(instance) == Spent()
    assert pop_spending_of_failed_runs(instance) == Spent(20, 1)
    assert pop_spending_of_failed_runs(instance) == Spent()
    assert [path.name for path in get_live_runs_folder(instance).iterdir()] == [living.run_id]


def test_living_runs_and_those_without_a_lock_file_are_left_alone(instance):
    living = started(instance)
    unknown = started(instance)
    with hold_run_lock(get_run_folder(instance, living)):
        assert end_dead_runs(instance) == []
        assert status(instance, living) is status(instance, unknown) is dg.DagsterRunStatus.STARTED
    assert end_dead_runs(instance) == []  # it ended well: Dagster alone knows how


@pytest.mark.parametrize("steps_apart", [False, True], ids=["the run", "a step of it"])
def test_a_process_that_opened_the_lake_marks_its_run_as_alive_unless_it_is_a_step_s(instance, tmp_path, steps_apart):
    judged = []
    runs = tmp_path / ".dagster" / "live_runs"

    @dg.asset
    def living(context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]) -> None:
        assert [path.name for path in runs.glob("*")] == ([] if steps_apart else [context.run.run_id])
        judged.append(end_dead_runs(instance))

    lake = LakeResource(root=str(tmp_path), steps_apart=steps_apart)
    assert dg.materialize([living], instance=instance, resources={"lake": lake}).success and judged == [[]]
    assert not list(runs.glob("*/*"))
