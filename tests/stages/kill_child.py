"""Runs one stage of the line in a process that a test kills. Arguments: folder, model folder, stage, partition."""

import sys
from pathlib import Path

from conftest import Line, write_shard

folder, model_folder, stage, partition = sys.argv[1:]


def tell(done: int, total: int) -> None:
    """A line per committed chunk, so that the test can choose its moment."""
    print(done, total, flush=True)  # noqa: T201


line = Line(Path(folder), Path(model_folder), chunk_texts=2, progress=tell)
line.shards = {partition: write_shard(Path(folder) / "shards", partition)}
line.stage(stage, partition)
