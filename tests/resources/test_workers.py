"""How many workers there are where nobody says it, which GPU each gets, and that they end with their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import at_work
from toolformer_dag.computing.workers import choose_worker_count
from toolformer_dag.model.weights import count_cores
from toolformer_dag.settings.sections import Settings
from toolformer_dag.synthetic import SMALL_MODEL_FOLDER

REPOSITORY = Path(__file__).parents[2]
TAKE = """
import sys
from toolformer_dag.computing.worker import list_visible_gpus, take_gpus
visible, size = list_visible_gpus(4), int(sys.argv[1])
print(*take_gpus(visible, size).names, *take_gpus(visible, size).names, flush=True)
sys.stdin.read()
"""
THREADS = """
import os, torch
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from toolformer_dag.model.loading import fit_threads
class Large(torch.nn.Embedding):
    device = torch.device("cpu")
fit_threads(Large(320_000, 64))
print(torch.get_num_threads())
"""
PARENT = """
import time
from multiprocessing import get_context
from toolformer_dag.processes import end_with_parent

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
        ({"name": str(SMALL_MODEL_FOLDER)}, count_cores()),
        ({"name": "embedded"}, count_cores()),
        ({"name": "openai-community/gpt2"}, 1),
        ({"name": str(SMALL_MODEL_FOLDER), "device": "mps"}, 1),
    ],
)
def test_a_small_model_gets_a_process_per_core_and_others_one(model, count):
    assert choose_worker_count(settings_with(model)) == count >= 1
    assert choose_worker_count(settings_with(model, workers=3)) == 3


@pytest.mark.parametrize(
    ("size", "named", "groups"),
    [
        (1, "", ["0", "1", "2"]),
        (1, "7,5", ["7", "5", ""]),
        (2, "", ["0 1", "2 3", ""]),
        (2, "4,GPU-a,6", ["4 GPU-a", "", ""]),
    ],
)
def test_each_process_takes_a_group_of_gpus_of_its_own_and_gives_it_up_when_it_ends(tmp_path, size, named, groups):
    def taking() -> "subprocess.Popen[str]":
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = os.environ | {
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": str(REPOSITORY),
            "CUDA_VISIBLE_DEVICES": named,
        }
        return subprocess.Popen([sys.executable, "-c", TAKE, str(size)], env=environment, **pipes)

    def taken(process: "subprocess.Popen[str]") -> list[str]:
        return process.stdout.readline().split()

    told = [[*group.split()] * 2 for group in groups]
    with taking() as first:
        assert taken(first) == told[0]
        with taking() as second, taking() as third:
            assert sorted([taken(second), taken(third)]) == sorted(told[1:])
            first.kill()
            first.wait()
            with taking() as fourth:
                assert taken(fourth) == told[0]
                fourth.stdin.close()
            second.stdin.close()
            third.stdin.close()


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ({"engine": "transformers"}, 8),
        ({"engine": "vllm"}, 8),
        ({"engine": "vllm", "vllm": {"tensor_parallel_size": 4}}, 2),
        ({"engine": "vllm", "vllm": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}, 2),
        ({"engine": "vllm", "vllm": {"tensor_parallel_size": 16}}, 1),
        ({"engine": "vllm", "url": ["http://gpu:8000"]}, 1),
        ({"engine": "vllm", "device": "cpu"}, 1),
    ],
)
def test_a_machine_with_gpus_gets_a_process_per_group(monkeypatch, model, count):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert choose_worker_count(settings_with({"name": "any", "device": "auto", **model})) == count


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, env=environment) as parent:
        worker = int(parent.stdout.readline())
        assert at_work(worker)
        parent.kill()
    while at_work(worker):
        time.sleep(0.01)


def test_a_large_model_runs_on_no_more_threads_than_there_are_cores() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", THREADS], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert ended.stdout.split() == [b"1"]
