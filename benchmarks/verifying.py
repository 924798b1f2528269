"""What comparing content hashes costs: its share of a run, and its rate over files of a gigabyte.

python -m benchmarks.verifying [--documents 60] [--gigabytes 1] [--work FOLDER]

The run is that of benchmarks.pipeline_world with one worker; every hash of a file that it computes is timed. The rate
is that of `verify` over a lake of random bytes, once from the disk and once from memory.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from benchmarks.pipeline_world import PipelineWorld
from toolformer_dag import files, identity
from toolformer_dag.lake import parquet, row_store, table, warehouse
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.verification import damaged_files
from toolformer_dag.training import verify_project

HASHING = (
    (parquet, "content_hash"),
    (parquet, "stream_hash"),
    (row_store, "content_hash"),
    (table, "content_hash"),
    (warehouse, "stream_hash"),
    (files, "content_hash"),
    (files, "file_hash"),
    (identity, "_sha256"),
    (verify_project, "stream_hash"),
)
"""Where hashes of files are computed."""
ROWS = 2**19


class Stopwatch:
    """Adds up the time inside the functions that it times; one inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed."""

        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return function(*args, **options)
            self._inside, begin = True, time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.process_time() - begin
                self.calls += 1
                self._inside = False

        return timed


def share(folder: Path, documents: int) -> None:
    """Run a world while hashes are timed; print their share of its processor time."""
    watch = Stopwatch()
    for module, name in HASHING:
        setattr(module, name, watch.timed(getattr(module, name)))
    PipelineWorld.make(folder / "warm", 2).run()  # imports torch
    world = PipelineWorld.make(folder / "world", documents)
    watch.seconds, watch.calls, begin = 0.0, 0, time.process_time()
    world.run()
    whole = time.process_time() - begin
    print(f"{watch.calls:,} hashes take {watch.seconds:.3f} of {whole:.1f} CPU-seconds: {watch.seconds / whole:.2%}")


def rate(folder: Path, gigabytes: float) -> None:
    """Publish random bytes as a table and verify it, from the disk and from memory; print GB/s."""
    lake = Lake(folder / "lake")
    parts = max(1, round(gigabytes * 1e9 / (ROWS * 64)))
    for number in range(parts):
        frame = pl.DataFrame(np.frombuffer(os.urandom(ROWS * 64), np.int64).reshape(ROWS, 8))
        lake.table("made/up").publish(str(number), [frame], dict)
    stored = list(lake.root.rglob("*.parquet"))
    size = sum(path.stat().st_size for path in stored)
    for where in ("disk", "memory"):
        if where == "disk":
            for path in stored:
                _forget(path)
        begin = time.perf_counter()
        assert not list(damaged_files(lake))
        seconds = time.perf_counter() - begin
        print(
            f"{size / 1e9:.2f} GB in {len(stored)} files from {where}: {seconds:.2f} s, {size / 1e9 / seconds:.2f} GB/s"
        )


def _forget(path: Path) -> None:
    """Let the system drop what it has read of a file."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--work", type=Path, help="a folder that does not exist yet; default: a temporary one")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        rate(folder, options.gigabytes)
        share(folder, options.documents)


if __name__ == "__main__":
    main()
