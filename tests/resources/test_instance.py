"""Several processes may be the first to open the instance."""

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
from resources.instance import shared_instance

root = Path(sys.argv[1])
(root / f"ready{sys.argv[2]}").touch()
while not (root / "go").exists():
    time.sleep(0.001)
print(shared_instance(root).get_runs_count())
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


def test_first_openings_at_once_make_one_instance(tmp_path):
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / ".dagster")}
    commands = [[sys.executable, "-c", OPEN, str(tmp_path), str(number)] for number in range(PROCESSES)]
    where = {"cwd": Path(__file__).parents[2], "env": environment}
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **where) for one in commands]
    while len(list(tmp_path.glob("ready*"))) < PROCESSES and all(one.poll() is None for one in running):
        pass
    (tmp_path / "go").touch()
    said = [one.communicate() for one in running]
    assert [output.decode().strip() for output, _ in said] == ["0"] * PROCESSES, said
