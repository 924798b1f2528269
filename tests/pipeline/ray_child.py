"""A Ray cluster on a loopback of its own, and a line that computes in it; prints what was found as JSON.

Arguments: what to do (`killed`, `hung`, `cancelled`, `orphaned` or `spread`), the folder of a line. Runs in a network
namespace: Ray listens on every address.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import psutil

from tests.pipeline.conftest import Line, Worker, Workers, executor_of
from tests.processes import processes_with
from tests.ray_cluster import HEAD, Machine, actors, cluster, kill
from toolformer_dag.computing.update import ProgressCallback

ACTOR = "ray::ChunkServer"


def until_none() -> int:
    """Wait until no actor lives, half a minute long; return how many do."""
    for _ in range(300):
        if not processes_with(ACTOR):
            break
        time.sleep(0.1)
    return len(processes_with(ACTOR))


def once_stopped(machines: Sequence[Machine], then: Callable[[], object]) -> ProgressCallback:
    """Stop the first actor of these machines that computes, and do `then` at the next progress."""
    stopped: list[psutil.Process] = []

    def progress(done: int, total: int) -> None:
        if stopped:
            then()
            return
        computing = (one for machine in machines for one in actors(machine) if "answer" in "".join(one.cmdline()))
        stopped.extend(islice(computing, 1))
        for actor in stopped:
            actor.suspend()

    return progress


def lose_machines(line: Line, start: Callable[[], Machine]) -> dict[str, object]:
    """Kill one of two machines in the middle of each stage that has workers; a new one takes its place."""
    start()
    for stage, output in line.outputs().items():
        if output.stage.pool == "tools" or not output.stage.is_sharded:
            line.update(stage)
            continue
        lost = start()
        line.update(stage, executor_of=executor_of, progress=once_stopped([lost], partial(kill, lost)))
        kill(lost)
    return {"engine": line.plan().settings.execution.engine, "actors": until_none()}


def hang(line: Line, start: Callable[[], Machine]) -> dict[str, object]:
    """Stop one of two actors in the middle of a stage."""
    machines = [start(), start()]
    line.update("raw_shards", "heuristic_subset")
    line.set(execution__chunk_hours=30 / 3600)
    line.update("scored_candidates", executor_of=executor_of, progress=once_stopped(machines, lambda: None))
    line.set(execution__chunk_hours=6)
    line.update(executor_of=executor_of)
    return {"actors": until_none()}


def cancel(line: Line) -> dict[str, object]:
    """Raise, as a cancelled run does, in the middle of a stage."""

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    line.update("raw_shards", "heuristic_subset")
    try:
        line.update("scored_candidates", executor_of=executor_of, progress=interrupt)
    except KeyboardInterrupt:
        return {"cancelled": True, "actors": until_none()}
    return {"cancelled": False}


def orphan(line: Line) -> dict[str, object]:
    """Kill a run, which then ends nothing by itself."""
    line.update("raw_shards", "heuristic_subset")
    command = [sys.executable, "-m", "tests.pipeline.ray_child", "run", str(line.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        started = any(processes_with(ACTOR) for _ in run.stdout)  # its first line may come before the first actor
        run.kill()
    return {"started": started, "actors": until_none()}


def spread(line: Line, start: Callable[..., Machine]) -> dict[str, object]:
    """Start the actors of a machine that says it has 8 GPUs, of which a model takes 4."""
    start(cores=2, gpus=8)
    line.set(model__device='"auto"', model__engine='"vllm"', model__vllm__tensor_parallel_size=4, execution__workers=9)
    executor = executor_of(Worker(line.plan()), {})
    places = [executor.start_worker() for _ in range(executor.count_workers())]
    told = [place.handle.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]) for place in places]
    return {"count": len(places), "gpus": sorted(one.future().result(120) for one in told)}


def main(what: str, line: Line) -> dict[str, object]:
    """Return what was found, and what the workers of the run said."""
    line.set(execution__engine='"ray"', execution__address=f'"{HEAD}"')
    if what == "run":
        line.update("scored_candidates", executor_of=executor_of, progress=lambda done, total: print(done, flush=True))  # noqa: T201
        return {}
    said: list[str] = []
    logging.getLogger(Workers.__module__).addFilter(lambda record: said.append(record.getMessage()) is None)
    with cluster() as start:
        if what in ("killed", "hung"):
            return {**{"killed": lose_machines, "hung": hang}[what](line, start), "said": said}
        if what == "spread":
            return spread(line, start)
        start(), start()
        return {"cancelled": cancel, "orphaned": orphan}[what](line)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Line(Path(sys.argv[2])))), flush=True)  # noqa: T201
