"""The small world with its lake in an object store: every command, two machines, two runs at once, a killed run."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.object_store import S3, s3, s3_running
from tests.runs.conftest import World, assert_same, ended
from toolformer_dag.assets import TRAINING_JOB
from toolformer_dag.assets.declaration import build_asset_key
from toolformer_dag.assets.metadata import UNCHANGED_LABEL
from toolformer_dag.assets.warehouse_assets import PAPER_TABLE_ASSETS
from toolformer_dag.definitions import build_definitions

__all__ = ["s3", "s3_running"]  # fixtures

pytestmark = pytest.mark.long
FRESH = "Everything is fresh: nothing ran."


class Machine:
    """A world of its own over the lake that it shares: settings, history of runs and copies are its own."""

    def __init__(self, s3: S3, place: str, world: World) -> None:
        self.world = world
        world.edit("[corpus]\n", f'[paths]\nlake = "{place}"\ncache = "copies"\n[corpus]\n')
        self.variables = s3.variables | {"DAGSTER_HOME": str(world.folder / ".dagster")}

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return self.world.start(*arguments, **{**self.variables, **variables})

    def told(self, *arguments: str) -> str:
        """Run a command that succeeds and return what it prints."""
        return ended(self.start(*arguments))[0]


@pytest.fixture
def machine(s3: S3, made: World, tmp_path: Path) -> Callable[[str], Machine]:
    """Machines that share one lake, which nobody has used; the shards keep their times."""
    place = s3.new_place()

    def new(name: str) -> Machine:
        left_out = shutil.ignore_patterns("lake", ".dagster", "__pycache__")
        return Machine(s3, place, World(shutil.copytree(made.folder, tmp_path / name, ignore=left_out)))

    return new


def test_every_command_works_over_a_lake_in_an_object_store(machine, made, s3, monkeypatch):
    one = machine("one")
    other = machine("other")
    assert "assets ran" in one.told("run")
    monkeypatch.setenv("DAGSTER_HOME", one.variables["DAGSTER_HOME"])
    assert_same(one.world.tables(), made.tables())
    assert one.told("run") == "Everything is fresh: nothing ran.\n"
    assert other.told("run") == "Everything is fresh: nothing ran.\n", "its own history is empty, the lake is not"
    assert one.told("stale") == other.told("stale") == "Nothing is stale.\n"
    funnel = ("sql", "from funnel order by all", "--format", "csv")
    assert one.told(*funnel) == other.told(*funnel) == ended(made.start(*funnel))[0]
    assert other.told("tables", "2").splitlines()[0] == one.told("tables", "2").splitlines()[0]
    other.told("explore", "--export", "calls.html")
    assert "calls" in (other.world.folder / "calls.html").read_text()
    assert other.told("generate", "--max-new-tokens", "2", "1 and 2 make")
    other.world.edit("tau_f = 0.0", "tau_f = 0.01")
    assert "settings.tau_f: 0.0 -> 0.01" in other.told("stale", "--why").splitlines()[1]
    ran = set(re.findall("^ran (.*)", other.told("stale", "--run"), re.MULTILINE)) - set(PAPER_TABLE_ASSETS)
    assert {"calculator/filtered_calls", "sums/filtered_calls"} <= ran
    assert not ran & {"calculator/scored_candidates", "sums/loss_deltas"}
    assert "settings.tau_f: 0.01 -> 0.0" in one.told("stale", "--why"), "the other machine's rows are there"
    one.told("stale", "--run")
    assert_same(one.world.tables(), made.tables())
    before = s3.objects(one.world.project().plan.lake)
    assert "gone" in one.told("clean", "--grace-hours", "0")
    assert len(s3.objects(one.world.project().plan.lake)) < len(before)
    assert one.told("verify") == other.told("verify") == ""
    assert_same(one.world.tables(), made.tables())


def test_runs_of_two_machines_at_once_end_in_equal_tables_or_one_says_who_won(machine, made, monkeypatch):
    machines = [machine("one"), machine("other")]
    runs = [one.start("run") for one in machines]
    for run in runs:
        out, error = run.communicate()
        assert run.returncode == 0 or "another run published it" in error, out + error
        assert "Traceback" not in error
    machines[1].told("run")
    assert machines[1].told("stale") == "Nothing is stale.\n"
    monkeypatch.setenv("DAGSTER_HOME", machines[0].variables["DAGSTER_HOME"])
    assert_same(machines[0].world.tables(), made.tables())


def test_a_step_that_waited_while_another_machine_trained_finds_the_checkpoint(machine, monkeypatch):
    one = machine("one")
    other = machine("other")
    one.told("run")
    for each in (one, other):
        each.world.edit("max_steps = 1", "max_steps = 2")
    other.told("run")
    monkeypatch.setenv("DAGSTER_HOME", one.variables["DAGSTER_HOME"])
    project = one.world.project()
    name = "training/finetuned_checkpoint"
    job = build_definitions(project.plan).resolve_job_def(TRAINING_JOB)
    done = job.execute_in_process(instance=project.dagster_instance, asset_selection=[build_asset_key(name)])
    [made] = done.get_asset_materialization_events()
    assert made.materialization.metadata[UNCHANGED_LABEL].value is True


def killed(machine: Machine, ready: Callable[[], bool]) -> None:
    """Start a run and kill it at once when `ready`."""
    with machine.start("run") as run:
        while run.poll() is None and not ready():
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL


@pytest.mark.parametrize("begun", ["samples", "losses", "filtered_calls"])
def test_a_run_that_is_killed_leaves_a_lake_that_the_next_run_finishes(machine, made, s3, monkeypatch, begun):
    one = machine("one")
    other = machine("other")
    lake = one.world.project().plan.lake
    killed(one, lambda: any(f"sums/{begun}/" in name for name in s3.objects(lake)))
    assert "sums/" in other.told("stale")
    assert "assets ran" in other.told("run")
    monkeypatch.setenv("DAGSTER_HOME", other.variables["DAGSTER_HOME"])
    assert_same(other.world.tables(), made.tables())
    assert FRESH in one.told("run")


def test_a_run_that_is_killed_after_any_request_again_and_again_ends_in_equal_tables(machine, made, s3, monkeypatch):
    one = machine("one")
    draw = random.Random(41)
    monkeypatch.setenv("DAGSTER_HOME", one.variables["DAGSTER_HOME"])
    for _ in range(3):
        last = len(s3.requests) + draw.randrange(20, 120)
        killed(one, lambda last=last: len(s3.requests) >= last)
    assert "assets ran" in one.told("run")
    assert_same(one.world.tables(), made.tables())
    assert FRESH in one.told("run") and one.told("verify") == ""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"TOOLFORMER__PATHS__LAKE": "s3://none-such/lake"}, "there is no bucket 'none-such'; create it, or correct"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the object store cannot be reached; correct AWS_ENDPOINT_URL"),
    ],
)
def test_a_store_that_cannot_be_used_is_told_in_one_line_by_every_command(machine, variables, told):
    one = machine("one")
    for command in (("run",), ("stale",), ("sql", "from funnel"), ("verify",), ("clean",)):
        with one.start(*command, **variables) as process:
            _, error = process.communicate()
        assert process.returncode and told in error and "Traceback" not in error, error
        assert len([line for line in error.splitlines() if "cannot" in line]) == 1
