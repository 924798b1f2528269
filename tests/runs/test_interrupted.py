"""Runs that end or die, several steps at once and two runs at once: the same rows, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import dagster as dg
import pytest

from tests.processes import processes_with
from tests.runs.conftest import ALL_SPENT, World, assert_same, ended, spent
from tests.ui_server import launched, served
from toolformer_dag.assets import COMPUTING_JOB, running
from toolformer_dag.assets.running import Step
from toolformer_dag.computing.plan import Plan
from toolformer_dag.definitions import build_definitions, job_of
from toolformer_dag.resources.live_runs import get_run_folder
from toolformer_dag.settings.sections import Settings


@pytest.mark.long
def test_a_cancelled_run_of_the_command_line_ends_at_the_next_chunk_and_goes_on_later(world, made, monkeypatch):
    monkeypatch.setattr(running, "WRITE_EVERY_SECONDS", -1)
    change = ("tools.sums.k=3", "execution.chunk_texts=1")
    project = world.project(*change)
    seen = []

    def cancel(step: Step) -> None:
        seen.append((step.name, step.done, step.total))
        [run] = project.dagster_instance.get_runs(limit=1)
        if step.name == "sums/scored_candidates" and run.status is dg.DagsterRunStatus.STARTED:
            project.dagster_instance.report_run_canceling(run)

    with pytest.raises(KeyboardInterrupt):
        project.run_rounds(includes_training=False, on_step=cancel)
    name, done, total = seen[-1]
    assert name == "sums/scored_candidates" and (done < total or not total)  # no total: its texts were not counted yet
    [run] = project.dagster_instance.get_runs(limit=1)
    assert run.status is dg.DagsterRunStatus.CANCELED
    assert "sums/scored_candidates" in world.stale(*change)
    assert "sums/scored_candidates" in world.run(*change).made_assets
    world.run()
    assert_same(world.tables(), made.tables())


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_what_killed_runs_spent_is_reported_by_the_next_run(fresh, workers):
    options = ["--set", f"execution.workers={workers}", "--set", "execution.chunk_texts=2"]
    instance = fresh.project().dagster_instance
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
    return get_run_folder(instance, run)


@pytest.mark.long
def test_a_run_that_waits_for_one_that_is_killed_meanwhile_goes_on(fresh, made):
    instance = fresh.project().dagster_instance
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


THREE = "execution.steps_at_once=3"
WITHOUT_TRAINING = ("stale", "--run")
SLOW = '''
"""Sums of a distant service, which goes down with its process while the file `down` is there."""

import os
import time
from pathlib import Path

from sums_tool import Sums

DOWN = Path(__file__).with_name("down")


class Slow(Sums):
    def run(self, calls):
        time.sleep(0.2)
        if DOWN.exists():
            os.abort()
        return super().run(calls)
'''


def begun(world: World, *arguments: str) -> subprocess.Popen[str]:
    """Start a command with three steps at once."""
    return world.start(*arguments, "--set", THREE)


def slowed(world: World) -> World:
    """Let the calls of one lane take 0.2 seconds."""
    (world.folder / "slow_tool.py").write_text(SLOW)
    world.edit("sums_tool:Sums", "slow_tool:Slow")
    return world


def wait_for_tool(world: World, run: subprocess.Popen[str]) -> dg.DagsterRun:
    """Wait until the slow tool is being called; return the run."""
    instance = world.project().dagster_instance
    while run.poll() is None:
        for found in instance.get_runs(limit=1):
            started = instance.all_logs(found.run_id, of_type=dg.DagsterEventType.STEP_START)
            if any(event.step_key == "sums__tool_results" for event in started):
                return found
        time.sleep(0.1)
    raise AssertionError(run.communicate())


def nothing_left(world: World) -> bool:
    """Wait until no process works in the world's folder any more."""
    while processes_with(str(world.folder)):
        time.sleep(0.1)
    return True


def test_one_step_at_a_time_is_the_default_and_the_settings_of_a_step_are_those_of_the_run(world: World) -> None:
    overrides = (THREE, "tools.sums.edition=2", 'paths.lake="s3://bucket/lake"', 'paths.cache="copies"')
    settings = world.settings(*overrides)
    assert Settings.model_validate(json.loads(settings.model_dump_json())) == settings
    file = world.folder / "settings.json"
    file.write_text(world.settings(THREE).model_dump_json())
    job = job_of(str(file), COMPUTING_JOB)
    usual = build_definitions(Plan.from_settings(world.settings())).resolve_job_def(COMPUTING_JOB)
    assert (job.executor_def.name, usual.executor_def.name) == ("multiprocess", "in_process")
    assert [job.asset_layer.get(key).code_version for key in sorted(job.asset_layer.selected_asset_keys)] == [
        usual.asset_layer.get(key).code_version for key in sorted(usual.asset_layer.selected_asset_keys)
    ]


@pytest.mark.long
def test_three_steps_at_once_make_the_tables_of_one_with_the_same_tokens_and_lines(fresh, made):
    out, told = ended(begun(fresh, "run"))
    assert_same(fresh.tables(), made.tables())
    assert fresh.stale() == []
    assert fresh.sql(ALL_SPENT) == made.sql(ALL_SPENT) == [spent(out)]
    names = {line.partition(":")[0] for line in told.splitlines()}
    assert {"sums/tool_results", "evaluation/accuracy"} <= names
    assert all("/" in name for name in names), told  # no line of Dagster's
    assert nothing_left(fresh)


@pytest.mark.long
def test_a_step_whose_process_dies_stops_what_depends_on_it_alone(fresh, made):
    slowed(fresh)
    (fresh.folder / "down").touch()
    run = begun(fresh, *WITHOUT_TRAINING)
    told = run.communicate()[1]
    assert run.returncode == 1 and "sums/tool_results: its process was killed" in told, told
    assert "calculator/filtered_calls" not in told.partition("some assets failed")[2]
    assert not {name for name in fresh.stale() if name.startswith("calculator/")}
    (fresh.folder / "down").unlink()
    ended(begun(fresh, *WITHOUT_TRAINING))
    assert_same(fresh.tables(), made.tables())


@pytest.mark.long
@pytest.mark.parametrize("end", ["Ctrl-C", "kill", "cancel"])
def test_a_run_that_is_ended_leaves_no_process_and_the_next_goes_on(fresh, made, end):
    run = begun(slowed(fresh), *WITHOUT_TRAINING, "--set", "execution.chunk_calls=4")
    record = wait_for_tool(fresh, run)
    instance = fresh.project().dagster_instance
    if end == "Ctrl-C":
        os.killpg(run.pid, signal.SIGINT)
    elif end == "kill":
        run.kill()
    else:
        instance.report_run_canceling(record)
    told = run.communicate()[1]
    assert run.returncode != 0 and "Traceback" not in told, told
    assert nothing_left(fresh)
    ended(begun(fresh, *WITHOUT_TRAINING))
    found = instance.get_run_by_id(record.run_id)
    wanted = dg.DagsterRunStatus.CANCELED if end == "cancel" else dg.DagsterRunStatus.FAILURE
    assert found is not None and found.status is wanted
    assert_same(fresh.tables(), made.tables())


@pytest.mark.long
def test_a_run_of_the_ui_has_its_steps_at_once_too(fresh, made):
    fresh.edit("[execution]\n", "[execution]\nsteps_at_once = 3\n")
    instance = fresh.project().dagster_instance
    with served(fresh.folder) as address:
        run_id = launched(address, COMPUTING_JOB)
        while not (run := instance.get_run_by_id(run_id)).is_finished:
            time.sleep(0.2)
    assert run.status is dg.DagsterRunStatus.SUCCESS
    started = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_WORKER_STARTED)
    assert len({event.dagster_event.event_specific_data.metadata["pid"].value for event in started}) == len(started) > 9
    rows = made.tables()
    assert_same(fresh.tables(), {name: rows[name] for name in fresh.tables()})
    assert nothing_left(fresh)


KEPT_WITHOUT_A_SCORE = """
select count(*) from filtered_calls anti join loss_deltas using (tool, digest, segment, position, sample)
"""
WAITS = "is running; steps that would compute the same rows wait for it"


@pytest.mark.long
def test_a_second_run_says_that_it_waits_and_together_they_spend_what_one_does_and_lock_no_reader_out(fresh, made):
    instance = fresh.project().dagster_instance
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
    assert f"{COMPUTING_JOB} {WAITS}" in told and WAITS not in beside
    assert set(answers) == {(0,)}
    [undisturbed] = made.sql(ALL_SPENT)
    assert tuple(map(sum, zip(spent(one), spent(other), strict=True))) == undisturbed
    assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
    assert_same(fresh.tables(), made.tables())
    assert fresh.stale() == []


@pytest.mark.long
def test_two_homes_over_one_lake_take_turns_and_compute_no_row_twice(fresh, made, tmp_path):
    """As of two clones, or two users: neither Dagster instance knows of the other."""
    runs = [fresh.start("run", DAGSTER_HOME=str(tmp_path / home)) for home in ("one", "other")]
    (one, beside), (other, told) = map(ended, runs)
    assert "waits for another run over this lake (process " in beside + told
    [undisturbed] = made.sql(ALL_SPENT)
    assert tuple(map(sum, zip(spent(one), spent(other), strict=True))) == undisturbed
    assert_same(fresh.tables(), made.tables())
