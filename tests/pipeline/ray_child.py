"""A Ray cluster on a loopback of its own, and a line that computes in it; prints what was found as JSON.

Arguments: what to do (`killed`, `cancelled` or `orphaned`), the folder of a line. Runs in a network
namespace: Ray listens on every address.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.pipeline.conftest import Line, crew_of
from tests.processes import processes_with
from tests.ray_cluster import HEAD, Machine, cluster, kill

ACTOR = "ray::ChunkServer"


def until_none() -> int:
    """Wait until no actor lives, half a minute long; return how many do."""
    for _ in range(300):
        if not processes_with(ACTOR):
            break
        time.sleep(0.1)
    return len(processes_with(ACTOR))


def lose_a_machine(line: Line, machines: list[Machine]) -> dict[str, object]:
    """Kill one of two machines while positions and samples are computed there; then run the rest of the line."""
    lost: list[int] = []

    def lose(done: int, total: int) -> None:
        if not lost and 0 < done < total:
            lost.append(machines[1].pid)
            kill(machines[1])

    line.update("raw_shards", "heuristic_subset")
    reports = line.update("scored_candidates", crews=crew_of, progress=lose)
    for stage in line.outputs():
        line.update(stage, crews=crew_of)
    tokens = reports["scored_candidates"].work.tokens["positions"]
    engine = line.plan().settings.execution.engine
    return {"lost": len(lost), "tokens": tokens, "actors": until_none(), "engine": engine}


def cancel(line: Line) -> dict[str, object]:
    """Raise, as a cancelled run does, in the middle of a stage."""

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    line.update("raw_shards", "heuristic_subset")
    try:
        line.update("scored_candidates", crews=crew_of, progress=interrupt)
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


def main(what: str, line: Line) -> dict[str, object]:
    """Return what was found."""
    line.set(execution__engine='"ray"', execution__address=f'"{HEAD}"')
    if what == "run":
        line.update("scored_candidates", crews=crew_of, progress=lambda done, total: print(done, flush=True))  # noqa: T201
        return {}
    with cluster(2) as machines:
        return (
            lose_a_machine(line, machines)
            if what == "killed"
            else {"cancelled": cancel, "orphaned": orphan}[what](line)
        )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Line(Path(sys.argv[2])))), flush=True)  # noqa: T201
