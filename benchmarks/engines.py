"""A line computed by one worker and by two, local and of Ray, with its lake in a folder and in an object store.

    python -m benchmarks.scale workers [--workers 3]

Wall time of a whole run without finetuning and evaluation, from nothing, in a fresh process: it holds the imports and
the start of the workers, not the start of the cluster or the store. The store is moto's S3 in the process of the run.
Every run must give the rows of one local process. Ray needs the right to make a network namespace.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.object_lake import PLACE, store
from benchmarks.pipeline_world import PipelineWorld
from benchmarks.ray_cluster import HEAD, SPACE, cluster, why_no_namespace

RAY = ('execution.engine="ray"', f'execution.address="{HEAD}"')
CHUNKS = "execution.chunk_texts=64"
Around = Callable[[], AbstractContextManager[object]]
LOCAL = "1 process"
ENGINES: dict[str, tuple[int, tuple[str, ...], Around]] = {
    LOCAL: (1, (), nullcontext),
    "2 processes": (2, (), nullcontext),
    "1 process, S3": (1, PLACE, store),
    "2 processes, S3": (2, PLACE, store),
    "1 Ray actor": (1, RAY, lambda: cluster(2)),
    "2 Ray actors": (2, RAY, lambda: cluster(2)),
}
"""The workers, the settings, and what must run around the line."""


def lines(folder: Path, documents: int) -> dict[str, float]:
    """Return the seconds of a line of two shards of so many documents by each engine."""
    found: dict[str, float] = {}
    for name, (_, overrides, _) in ENGINES.items():
        own = SPACE if overrides == RAY else ()
        if own and (reason := why_no_namespace()):
            print(f"no Ray: {reason}", file=sys.stderr)
            continue
        command = [*own, sys.executable, "-m", "benchmarks.engines", str(folder), str(documents), name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[f"{name}, s"] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(folder: Path, documents: int, engine: str) -> float:
    """Run the line and return its seconds."""
    workers, overrides, around = ENGINES[engine]
    overrides = (*overrides, CHUNKS, f"execution.workers={workers}")
    world = PipelineWorld.make(folder / engine, documents)
    with around():
        seconds = world.run(*overrides).seconds
        world.must_equal(PipelineWorld(folder / LOCAL), *overrides)
    return seconds


if __name__ == "__main__":
    print(json.dumps(line(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
