"""A Ray cluster: the rows of one process, whatever machine is lost, and no actor that outlives its run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Line, NewLine, Worker, assert_same, executor_of
from tests.ray_cluster import SPACE, why_no_namespace
from toolformer_dag.computing.cluster_shares import ClusterError, Share, compute_share
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

pytest.importorskip("ray", reason="the extra [ray] is not installed")
ROOT = Path(__file__).parents[2]
GPUS = [{"CPU": 16.0}, {"CPU": 32.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}]


def in_cluster(what: str, line: Line) -> dict[str, Any]:
    if reason := why_no_namespace():
        pytest.skip(f"no network namespace can be made: {reason}")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*SPACE, sys.executable, "-m", "tests.pipeline.ray_child", what, str(line.folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    [found] = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray prints what its machines tell
    return dict(json.loads(found))


@pytest.mark.long
def test_a_machine_that_is_lost_in_any_stage_changes_no_row(new_line: NewLine, finished: NewLine) -> None:
    names = ["one", "two", "three", "four"]
    line = new_line(*names)
    found = in_cluster("killed", line)
    assert found["engine"] == "ray" and found["actors"] == 0
    said = "\n".join(found["said"])
    assert "memory" not in said
    assert re.search(r"chunk \d+: actor .* was lost with its machine; another worker gets the chunk", said)
    assert_same(line, finished(*names))


@pytest.mark.long
def test_the_chunk_of_an_actor_that_hangs_is_given_to_another(new_line: NewLine, finished: NewLine) -> None:
    line = new_line("one", "two")
    found = in_cluster("hung", line)
    [said] = found["said"]
    assert re.fullmatch(
        r"calculator/scored_candidates, chunk \d+: actor \d+ on .* has not answered for 0:00:30 "
        r"\(execution.chunk_hours\); another worker gets the chunk",
        said,
    )
    assert found["actors"] == 0
    assert_same(line, finished("one", "two"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "expected"),
    [("cancelled", {"cancelled": True, "actors": 0}), ("orphaned", {"started": True, "actors": 0})],
)
def test_a_run_that_ends_early_leaves_no_actor(new_line: NewLine, what: str, expected: dict[str, object]) -> None:
    assert in_cluster(what, new_line("one", "two")) == expected


@pytest.mark.long
def test_an_actor_gets_as_many_gpus_of_a_machine_as_its_model_is_spread_over(new_line: NewLine) -> None:
    assert in_cluster("spread", new_line("one")) == {"count": 2, "gpus": ["0,1,2,3", "4,5,6,7"]}


def test_no_cluster_is_named_with_the_remedy(new_line: NewLine) -> None:
    line = new_line("one")
    line.set(execution__engine='"ray"', execution__address='"127.0.0.1:1"')
    with pytest.raises(
        ClusterError, match=r"execution.address: no Ray cluster answers at '127.0.0.1:1'.*ray start --head"
    ):
        executor_of(Worker(line.plan()), {})


@pytest.mark.parametrize(
    ("nodes", "model", "workers", "expected"),
    [
        (GPUS, {"name": "any"}, None, Share(12, 1, 1)),
        (GPUS, {"name": "any"}, 6, Share(6, 1, 1)),
        (GPUS, {"name": "any", "device": "cpu"}, None, Share(3, 16, 0)),
        (GPUS, {"name": "embedded", "device": "cpu"}, None, Share(64, 1, 0)),
        ([{"CPU": 0.0}, {"CPU": 8.0}], {"name": "any"}, None, Share(1, 8, 0)),
        (GPUS, {"name": "any", "engine": "vllm"}, None, Share(12, 1, 1)),
        (GPUS, {"name": "any", "engine": "vllm", "vllm": {"tensor_parallel_size": 3}}, None, Share(3, 1, 3)),
        (GPUS, {"name": "any", "engine": "vllm", "vllm": {"tensor_parallel_size": 8}}, None, Share(1, 1, 8)),
    ],
)
def test_a_cluster_gets_an_actor_per_gpu_or_core_or_machine(nodes, model, workers, expected) -> None:
    values = {"root": ".", "tools": {"calculator": {}}, "model": model, "execution": {"workers": workers}}
    assert compute_share(nodes, Settings.model_validate(values)) == expected


def test_a_cluster_without_a_core_is_refused() -> None:
    sharded = {"name": "any", "engine": "vllm", "vllm": {"tensor_parallel_size": 16}}
    with pytest.raises(UserError, match=r"model.vllm asks for 16 GPUs per model: no machine .* has so many"):
        compute_share(GPUS, Settings.model_validate({"root": ".", "tools": {"calculator": {}}, "model": sharded}))
    with pytest.raises(UserError, match="no machine of the Ray cluster offers a core"):
        compute_share([{"CPU": 0.0}], Settings.model_validate({"root": ".", "tools": {"calculator": {}}}))
