"""The sensor sees shard files come, change and go."""

import os
import shutil

import dagster as dg
import pytest

from assets.plan import Plan
from assets.shard_sensor import shard_sensor
from resources.held_partitions import held_partitions
from tests.stages.conftest import write_shard
from toolformer_dag.settings.load import load_settings

Asked = list[tuple[str, str | None]]


@pytest.fixture
def tick(world):
    """Evaluates the sensor as the daemon does: with the cursor of the tick before, and no request twice."""
    cursor, seen = None, set()

    def evaluate() -> Asked:
        nonlocal cursor
        plan = Plan.of(load_settings(world.folder / "toolformer.toml", environment={}))
        with dg.build_sensor_context(instance=dg.DagsterInstance.get(), cursor=cursor) as context:
            ticked = shard_sensor(plan)(context)
        cursor = ticked.cursor
        new = [
            request for request in ticked.run_requests or () if request.run_key is None or request.run_key not in seen
        ]
        seen.update(request.run_key for request in new)
        return [(request.asset_selection[0].to_user_string(), request.partition_key) for request in new]

    return evaluate


def test_nothing_is_asked_for_where_every_file_has_been_read(tick):
    assert tick() == []
    assert tick() == []


def test_a_file_that_comes_changes_and_goes_is_asked_for_once_each_time(world, tick):
    assert tick() == []
    write_shard(world.folder / "web", "added")
    assert tick() == [("ccnet/raw_shards", "added"), ("ccnet/shard_list", None)]
    assert dg.DagsterInstance.get().has_dynamic_partition("shards", "added")
    assert tick() == []
    os.utime(world.folder / "web" / "one.json.gz")
    assert tick() == [("ccnet/raw_shards", "one")]
    (world.folder / "web" / "two.json.gz").unlink()
    assert tick() == [("ccnet/shard_list", None)]
    assert sorted(dg.DagsterInstance.get().get_dynamic_partitions("shards")) == ["added", "one"]


def test_a_file_that_comes_during_a_run_is_asked_for_after_it(world, tick):
    assert tick() == []
    line = world.line()
    with held_partitions(line.instance, line.shards):
        write_shard(world.folder / "web", "added")
        assert tick() == []
    assert tick() == [("ccnet/raw_shards", "added"), ("ccnet/shard_list", None)]


def test_shards_that_were_asked_for_before_are_asked_for_again_where_the_lake_is_lost(world, tick):
    shards = [("ccnet/raw_shards", "one"), ("ccnet/raw_shards", "two")]
    for _ in range(2):
        shutil.rmtree(world.folder / "lake" / "ccnet")
        assert tick() == shards
        assert tick() == []
        world.run()
