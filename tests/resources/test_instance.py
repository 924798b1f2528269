"""Several processes may be the first to open the instance, and to size its pools."""

from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import dagster as dg
import pytest

from resources.instance import NoShards, set_pool_slots, shard_names, shared_instance

PROCESSES, POOLS = 3, 20


def begin(root: Path, together: Barrier) -> None:
    """A process that opens the instance and sizes its pools, each at the same moment as the others."""
    try:
        together.wait()
        instance = shared_instance(root)
        for pool in range(POOLS):
            together.wait()
            set_pool_slots(instance, f"pool{pool}", 2)
    except BaseException:
        together.abort()
        raise


def test_an_instance_without_shards_is_told_to_be_another_one():
    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(NoShards, match=r"set DAGSTER_HOME to the \.dagster beside toolformer\.toml"):
            shard_names(instance)
        instance.add_dynamic_partitions("shards", ["two", "one"])
        assert shard_names(instance) == ["one", "two"]


def test_a_relative_home_counts_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", "home")
    assert shared_instance(tmp_path).get_runs_count() == 0
    assert (tmp_path / "home" / "dagster.yaml").is_file()


def test_the_first_at_once_make_one_instance_and_its_pools(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster"))
    context = get_context("spawn")
    together = context.Barrier(PROCESSES)
    running = [context.Process(target=begin, args=(tmp_path, together)) for _ in range(PROCESSES)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert [one.exitcode for one in running] == [0] * PROCESSES
    instance = shared_instance(tmp_path)
    assert instance.get_runs_count() == 0
    assert [instance.event_log_storage.get_concurrency_info(f"pool{n}").slot_count for n in range(POOLS)] == [2] * POOLS
