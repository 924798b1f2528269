"""The list of shards while runs go on: shared by those that have the same one, and changed under nobody."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from resources.held_partitions import ShardsInUse, held_partitions, keep_partitions
from resources.instance import shared_instance

HOLD = """
import sys
from pathlib import Path
from resources.held_partitions import held_partitions
from resources.instance import shared_instance

with held_partitions(shared_instance(Path(sys.argv[1])), sys.argv[2:]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dg.DagsterInstance:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster"))
    return shared_instance(tmp_path)


@contextmanager
def another_process(root: Path, *names: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the list inside the block, if nobody kills it."""
    command = [sys.executable, "-c", HOLD, str(root), *names]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        yield process


def test_a_list_is_shared_and_no_other_one_takes_its_place(instance, tmp_path):
    assert keep_partitions(instance, ["a", "gone"]) == []
    with another_process(tmp_path, "a", "b") as process:
        with held_partitions(instance, ["b", "a"]) as gone:
            assert gone == []
        for other in (["a"], ["a", "b", "c"], ["c"]):
            with pytest.raises(ShardsInUse, match=f"a run over a, b is going on, this one wants {', '.join(other)};"):
                keep_partitions(instance, other)
        assert sorted(instance.get_dynamic_partitions("shards")) == ["a", "b"]
        process.kill()
        process.wait()
        assert keep_partitions(instance, ["a", "c"]) == ["b"]
    assert sorted(instance.get_dynamic_partitions("shards")) == ["a", "c"]


def test_a_process_that_comes_second_is_refused(instance, tmp_path):
    with held_partitions(instance, ["a"]):
        command = [sys.executable, "-c", HOLD, str(tmp_path), "b"]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert "a run over a is going on" in done.stderr
    assert instance.get_dynamic_partitions("shards") == ["a"]
