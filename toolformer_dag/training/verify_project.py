"""Verify the files that runs rely on: the lake, its shards, the checkpoints, the warehouse, the tools' indexes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolformer_dag.files import damaged_beside
from toolformer_dag.identity import stream_hash
from toolformer_dag.lake import warehouse
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.verification import DamagedFile, damaged_files, set_aside_damaged, set_aside_file
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.raw_shards import CONTENT, NAME
from toolformer_dag.pipeline.shards import ShardFile
from toolformer_dag.tools.passage_search import RetrievalOptions, damaged_index_files, set_aside_damaged_index
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.training_report import CARD, RECORD, card_is_lost, checkpoint_files, checkpoint_folder

NOT_WRITTEN = "is missing, or its content is not what was written"


@dataclass(frozen=True, slots=True)
class Verification:
    """The damaged files, and the bytes that were read."""

    damaged: tuple[DamagedFile, ...]
    bytes: int


def verified(plan: Plan) -> Verification:
    """Read every published file, computed row, record, checkpoint, index, the warehouse and the shards.

    What is damaged stays where it is; files that the project wrote are touched, so that the next run looks at them.
    Rows in an object store are set aside at once: objects cannot be touched.
    Not covered: models, passages and other files that were given to the project; their hashes are part of identities.
    """
    indexes = _indexes(plan)
    written = (
        *damaged_files(plan.lake),
        *_checkpoints(plan),
        *_warehouse(plan),
        *(DamagedFile(file, NOT_WRITTEN) for index in indexes for file in damaged_index_files(index, again=True)),
    )
    for one in written:
        if isinstance(plan.lake.storage, ObjectStorage) and one.path.is_relative_to(plan.lake.root):
            set_aside_file(plan.lake, one.path)
        with suppress(OSError):  # it is missing, or somebody else's: it is named all the same
            os.utime(one.path)
    inside = sum(map(_bytes, (plan.lake.root, *indexes)))
    outside = sum(stamp.get("bytes", 0) for stamp in plan.stamps.values()) if plan.settings.corpus.named else 0
    return Verification((*written, *_shards(plan)), inside + outside)


def set_aside(plan: Plan) -> list[DamagedFile]:
    """Set aside the damaged rows, published files and indexes of a plan that changed since the last run looked.

    Checkpoints and the warehouse are compared by their own steps.
    """
    found = set_aside_damaged(plan.lake)
    for index in _indexes(plan):
        found += [DamagedFile(file, NOT_WRITTEN) for file in set_aside_damaged_index(index)]
    return found


def _checkpoints(plan: Plan) -> Iterator[DamagedFile]:
    for name in CHECKPOINTS:
        checkpoint_files(plan.settings, name).receive()
        folder = checkpoint_folder(plan.settings, name)
        if folder.exists():
            for file in damaged_beside(folder / RECORD, again=True):
                yield DamagedFile(file, NOT_WRITTEN)
            if (folder / CARD).is_file() and card_is_lost(folder):
                yield DamagedFile(folder / CARD, NOT_WRITTEN)


def _indexes(plan: Plan) -> list[Path]:
    """Return the folders of the tools' indexes, each once; an index that was not built yet is left out."""
    options = [lane.tool.options for lane in plan.lanes]
    folders = [one.folder() for one in options if isinstance(one, RetrievalOptions)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _warehouse(plan: Plan) -> Iterator[DamagedFile]:
    database = warehouse.received(plan.settings.paths)
    if database.is_file() and (reason := warehouse.damage(database)):
        yield DamagedFile(database, reason)


def _shards(plan: Plan) -> Iterator[DamagedFile]:
    """Yield shard files that changed although their size and modification time did not."""
    raw = plan.lake.table(NAME)
    for name, file in plan.shards.items():
        pointer = raw.whole_pointer(name)
        if pointer is None or not isinstance(file, ShardFile) or CONTENT not in pointer.record:
            continue
        same_stamp = pointer.record["inputs"] == file.stamp()
        if same_stamp and _differs(file.path, pointer.record[CONTENT]):
            yield DamagedFile(file.path, "its content changed since it was read, its size and time did not")


def _differs(path: Path, content: str) -> bool:
    try:
        return stream_hash(path) != content
    except OSError:
        return True
