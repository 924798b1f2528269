"""How many workers there are where nobody says it, which GPU each gets, and that they end with their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import at_work
from toolformer_dag.pipeline.workers import cores, worker_count
from toolformer_dag.settings.sections import Settings
from toolformer_dag.synthetic import SMALL_MODEL

REPOSITORY = Path(__file__).parents[2]
TAKE = """
import sys
from toolformer_dag.pipeline.worker import own_gpu
print(own_gpu(2)[0], own_gpu(2)[0], flush=True)
sys.stdin.read()
"""
PARENT = """
import time
from multiprocessing import get_context
from toolformer_dag.pipeline.chunks import end_with_parent

def child(line):
    end_with_parent()
    line.send("ready")
    time.sleep(1000)

if __name__ == "__main__":
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=child, args=(theirs,), daemon=True)
    process.start()
    ours.recv()
    print(process.pid, flush=True)
    time.sleep(1000)
"""


def settings_with(model: dict[str, str], **execution: object) -> Settings:
    values = {"root": ".", "tools": {"calculator": {}}, "model": {"device": "cpu", **model}, "execution": execution}
    return Settings.model_validate(values)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ({"name": str(SMALL_MODEL)}, cores()),
        ({"name": "embedded"}, cores()),
        ({"name": "openai-community/gpt2"}, 1),
        ({"name": str(SMALL_MODEL), "device": "mps"}, 1),
    ],
)
def test_a_small_model_gets_a_process_per_core_and_others_one(model, count):
    assert worker_count(settings_with(model)) == count >= 1
    assert worker_count(settings_with(model, workers=3)) == 3


def test_each_process_takes_a_gpu_of_its_own_and_gives_it_up_when_it_ends(tmp_path):
    def taking() -> "subprocess.Popen[str]":
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
        return subprocess.Popen([sys.executable, "-c", TAKE], env=environment, **pipes)

    with taking() as first:
        assert first.stdout.readline() == "0 0\n"
        with taking() as second:
            assert second.stdout.readline() == "1 1\n"
            first.kill()
            first.wait()
            with taking() as third:
                assert third.stdout.readline() == "0 0\n"
                third.stdin.close()
            second.stdin.close()


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, env=environment) as parent:
        worker = int(parent.stdout.readline())
        assert at_work(worker)
        parent.kill()
    while at_work(worker):
        time.sleep(0.01)
