"""The sensor observes shard files; with automation it asks for the job once per change, and never for training."""

import os

import dagster as dg
import pytest

from tests.worlds import write_shard
from toolformer_dag.assets import build_shard_sensor
from toolformer_dag.assets.staleness import SHARD_LIST_KEY


@pytest.fixture
def tick(world):
    """Evaluate the sensor as the daemon does: with the cursor of the tick before, and no request twice."""
    cursor = None
    seen = set()

    def evaluate(*overrides: str) -> int | str:
        nonlocal cursor
        project = world.project(*overrides)
        with dg.build_sensor_context(instance=project.dagster_instance, cursor=cursor) as context:
            found = build_shard_sensor(project.plan)(context)
        if isinstance(found, dg.SkipReason):
            return found.skip_message
        cursor = found.cursor or cursor
        new = {request.run_key for request in found.run_requests or ()} - seen
        seen.update(new)
        return len(new)

    return evaluate


def observed(instance: dg.DagsterInstance) -> int:
    """Count what was told of the shard files."""
    return len(instance.fetch_materializations(SHARD_LIST_KEY, limit=100).records)


def test_files_that_come_change_and_go_are_observed_once_each(world, tick):
    instance = world.project().dagster_instance
    web = world.folder / "web"
    assert tick() == "no shard file changed; automation is off"
    before = observed(instance)
    changes = (
        lambda: write_shard(web, "added"),
        lambda: os.utime(web / "one.json.gz"),
        lambda: (web / "two.json.gz").unlink(),
    )
    for number, change in enumerate(changes, 1):
        change()
        assert tick() == "observed"
        assert tick() == "no shard file changed; automation is off"
        assert observed(instance) == before + number


def test_the_job_s_page_shows_the_sensor_only_where_it_starts_the_job(world):
    off, on = (build_shard_sensor(world.project(*overrides).plan) for overrides in ((), ("execution.automation=true",)))
    assert not off.targets and "automation is off" in off.description
    assert [target.job_name for target in on.targets] == [on.job_name] == ["bring_up_to_date"]
    assert off.default_status is on.default_status is dg.DefaultSensorStatus.RUNNING  # files are observed either way


def test_automation_asks_once_per_change_and_not_for_training(world, tick):
    on = "execution.automation=true"
    assert tick(on) == "nothing is out of date"
    assert tick(on, "training.max_steps=3") == "nothing is out of date"
    write_shard(world.folder / "web", "added")
    assert tick(on) == 1
    assert tick(on) == 0
    os.utime(world.folder / "web" / "one.json.gz")
    assert tick(on) == 1
    assert tick(on, "tools.calculator.tau_f=0.5") == 1
    assert tick(on, "tools.calculator.tau_f=0.5") == 0


@pytest.mark.long
def test_a_file_that_is_lost_twice_is_asked_for_twice(world, tick):
    on = "execution.automation=true"
    for _ in range(2):
        (world.folder / "lake" / "toolformer.duckdb").unlink()
        assert tick(on) == 1
        assert tick(on) == 0
        world.run()
    assert tick(on) == "nothing is out of date"
