"""Several processes may be the first to open the instance, and to size its pools."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from resources.instance import NoShards, shard_names, shared_instance

OPEN = """
import sys, time
from pathlib import Path
from resources.instance import set_pool_slots, shared_instance

root, number, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def together(name):
    (root / f"{name}-{number}").touch()
    while len(list(root.glob(f"{name}-*"))) < processes:
        time.sleep(0.001)

together("open")
instance = shared_instance(root)
for pool in range(20):
    together(f"pool{pool}")
    set_pool_slots(instance, f"pool{pool}", 2)
print(instance.get_runs_count())
"""
PROCESSES = 3


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
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / ".dagster")}
    commands = [[sys.executable, "-c", OPEN, str(tmp_path), str(number), str(PROCESSES)] for number in range(PROCESSES)]
    where = {"cwd": Path(__file__).parents[2], "env": environment}
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **where) for one in commands]
    while any(one.poll() is None for one in running) and not any(one.poll() for one in running):
        pass
    for one in running:
        one.kill()  # where one failed, the others wait for it
    said = [one.communicate() for one in running]
    assert [output.decode().strip() for output, _ in said] == ["0"] * PROCESSES, b"".join(map(b"".join, said)).decode()
    monkeypatch.setenv("DAGSTER_HOME", environment["DAGSTER_HOME"])
    instance = shared_instance(tmp_path)
    assert [instance.event_log_storage.get_concurrency_info(f"pool{pool}").slot_count for pool in range(20)] == [2] * 20
