"""Verify the files that runs rely on: the lake, its shards, the checkpoints and the warehouse."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolformer_dag.identity import stream_hash
from toolformer_dag.lake import warehouse
from toolformer_dag.lake.verification import DamagedFile, damaged_files
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.raw_shards import CONTENT, NAME
from toolformer_dag.pipeline.shards import stamps
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.training_report import checkpoint_folder, damaged_checkpoint_files


@dataclass(frozen=True, slots=True)
class Verification:
    """The damaged files, the bytes that were read, and the seconds it took."""

    damaged: tuple[DamagedFile, ...]
    bytes: int
    seconds: float


def verified(plan: Plan) -> Verification:
    """Read every published file, computed row, record, checkpoint, the warehouse and the shards; change nothing.

    Not covered: indexes of passages, which lie outside the lake; tantivy checks them when it reads them.
    """
    began = time.monotonic()
    damaged = (*damaged_files(plan.lake), *_checkpoints(plan), *_warehouse(plan), *_shards(plan))
    lake = plan.lake.root
    inside = sum(path.stat().st_size for path in lake.rglob("*") if path.is_file()) if lake.is_dir() else 0
    outside = sum(stamp.get("bytes", 0) for stamp in stamps(plan.shards).values()) if plan.settings.corpus.shards else 0
    return Verification(damaged, inside + outside, time.monotonic() - began)


def _checkpoints(plan: Plan) -> Iterator[DamagedFile]:
    for name in CHECKPOINTS:
        folder = checkpoint_folder(plan.settings, name)
        if folder.exists():
            for file in damaged_checkpoint_files(folder, again=True):
                yield DamagedFile(file, "is missing, or its content is not what was written")


def _warehouse(plan: Plan) -> Iterator[DamagedFile]:
    database = plan.settings.paths.warehouse
    if database.is_file() and (reason := warehouse.damage(database)):
        yield DamagedFile(database, reason)


def _shards(plan: Plan) -> Iterator[DamagedFile]:
    """Yield shard files that changed although their size and modification time did not."""
    raw = plan.lake.table(NAME)
    for name, file in plan.shards.items():
        pointer = raw.whole_pointer(name)
        if pointer is None or CONTENT not in pointer.record:
            continue
        same_stamp = pointer.record["inputs"] == stamps({name: file})[name]
        if same_stamp and _differs(file.path, pointer.record[CONTENT]):
            yield DamagedFile(file.path, "its content changed since it was read, its size and time did not")


def _differs(path: Path, content: str) -> bool:
    try:
        return stream_hash(path) != content
    except OSError:
        return True
