"""Starts two workers on shard files that never end, prints their process ids and waits. Argument: folder of a line."""

import multiprocessing
import sys
from pathlib import Path

if __name__ == "__main__":  # the workers import this module again
    from tests.pipeline.conftest import Line
    from toolformer_dag.pipeline.chunks import Task
    from toolformer_dag.pipeline.worker import Worker
    from toolformer_dag.pipeline.workers import LocalProcesses

    output = Line(Path(sys.argv[1])).output("raw_shards")
    pool = LocalProcesses(Worker(output.plan), 2)
    for _ in pool.map_chunks(Task(output.name, output.code_version, shard) for shard in output.plan.shards):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)  # noqa: T201
