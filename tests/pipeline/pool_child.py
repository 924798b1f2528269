"""Starts two workers on shard files that never end, prints their process ids and waits. Argument: folder of a line."""

import multiprocessing
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # the workers import this module again
    from tests.pipeline.conftest import Line, Task, Worker, Workers, local_processes

    output = Line(Path(sys.argv[1])).output("raw_shards")
    pool = Workers(Worker(output.plan), {}, partial(local_processes, 2))
    for _ in pool.map_chunks(Task(output.name, output.code_version, shard) for shard in output.plan.shards_by_name):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)  # noqa: T201
