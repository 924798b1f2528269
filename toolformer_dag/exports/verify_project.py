"""Verify the files that runs rely on and that people take away: the lake, checkpoints, data set, warehouse, shards."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.shards import PINS, WEB_RECORD, ShardFile
from toolformer_dag.exports import dataset_folder
from toolformer_dag.files import UserError, files_beside, unsealed
from toolformer_dag.identity import stream_hash
from toolformer_dag.lake import warehouse
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.verification import checked_files, set_aside_damaged, set_aside_file
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.raw_shards import CONTENT, NAME, format_choice
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.tools.passage_index import MANIFEST, set_aside_damaged_index
from toolformer_dag.tools.passage_search import RetrievalOptions
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.training_report import CARD, RECORD, card_is_lost, checkpoint_files

NOT_WRITTEN = "is missing, or its content is not what was written"
FOLDER_RECORDS = (dataset_folder.RECORD, RECORD, MANIFEST)
"""The sealed record of an export, a checkpoint and an index."""
LAKE_FOLDERS = (("training*/*", f"model/{RECORD}"), ("dataset*", dataset_folder.RECORD), ("small_web/*", WEB_RECORD))
"""Folders of the lake that people and other programs open, and where the sealed record of each lies."""
WHOLE_FOLDER = re.compile(r"model|dataset(_round_\d+)?")
"""The name of a folder that is never without its record."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The damaged files, and the bytes that were read."""

    damaged: tuple[CheckedFile, ...]
    bytes: int


def verified(plan: Plan) -> Verification:
    """Read every published file, computed row, record, checkpoint, data set, index, the warehouse and the shards.

    What is damaged stays where it is; files that the project wrote are touched, so that the next run looks at them.
    Rows in an object store are set aside at once: objects cannot be touched.
    Not covered: models, passages and other files that were given to the project. They are read whenever they are
    loaded, and nothing is made with what is not what their identity says.
    """
    written = [*checked_files(plan.lake), *_taken_away(plan), *_warehouse(plan)]
    written += [file for index in _indexes(plan) for file in _recorded(index / MANIFEST)]
    verification = _verification(chain(written, _shards(plan)))
    for one in written:
        if one.reason is None:
            continue
        if isinstance(plan.lake.storage, ObjectStorage) and one.path.is_relative_to(plan.lake.root):
            set_aside_file(plan.lake, one.path)
        with suppress(OSError):  # it is missing, or somebody else's: it is named all the same
            os.utime(one.path)
    return verification


def verified_folder(folder: Path) -> Verification:
    """Read an export, a checkpoint or an index, wherever it lies. Raises UserError for any other folder."""
    records = [folder / name for name in FOLDER_RECORDS if os.path.lexists(folder / name)]
    if not records:
        raise UserError(
            f"{folder} holds none of {', '.join(FOLDER_RECORDS)}; name the folder of an export, a model or an index"
        )
    return _verification(chain.from_iterable(map(_recorded, records)))


def _verification(checked: Iterator[CheckedFile]) -> Verification:
    files = list(checked)
    return Verification(tuple(one for one in files if one.reason is not None), sum(one.bytes for one in files))


def set_aside(plan: Plan) -> Sequence[CheckedFile]:
    """Set aside the damaged rows, published files and indexes of a plan that changed since the last run looked.

    Checkpoints, the data set and the warehouse are compared by their own steps.
    """
    damaged = set_aside_damaged(plan.lake)
    for index in _indexes(plan):
        damaged += [CheckedFile(file, 0, NOT_WRITTEN) for file in set_aside_damaged_index(index)]
    return damaged


def _taken_away(plan: Plan) -> Iterator[CheckedFile]:
    for name in CHECKPOINTS:
        checkpoint_files(plan.settings, name).receive()
        card = checkpoint_folder(plan.settings, name) / CARD
        if card.parent.is_dir():
            size = card.stat().st_size if card.is_file() else 0
            yield CheckedFile(card, size, NOT_WRITTEN if card_is_lost(card.parent) else None)
    for record in _lake_records(plan.lake):
        yield from _recorded(record)
    yield from _pins(plan.lake)


def _lake_records(lake: Lake) -> Iterator[Path]:
    """Yield the records that are there, or should be."""
    for pattern, name in LAKE_FOLDERS:
        for record in (folder / name for folder in sorted(lake.root.glob(pattern))):
            whole = WHOLE_FOLDER.fullmatch(record.parent.name) and os.path.lexists(record.parent)
            if whole or os.path.lexists(record):
                yield record


def _pins(lake: Lake) -> Iterator[CheckedFile]:
    """Read which commit each data set of the hub is kept at; the next run asks the hub again where that is damaged."""
    for name in sorted(lake.storage.names(lake.root / PINS)):
        path, content, reason = lake.root / PINS / name, b"", None
        try:
            content, _ = lake.storage.read(path)
            unsealed(content)
        except (OSError, ValueError):
            reason = NOT_WRITTEN
        yield CheckedFile(path, len(content), reason)


def _recorded(record: Path) -> Iterator[CheckedFile]:
    """Read the files that a sealed record names."""
    for path, whole in files_beside(record, again=True):
        size = path.stat().st_size if path.is_file() else 0
        yield CheckedFile(path, size, None if whole else NOT_WRITTEN)


def _indexes(plan: Plan) -> list[Path]:
    """Return the folders of the tools' indexes, each once; an index that was not built yet is left out."""
    options = [lane.tool.options for lane in plan.lanes]
    folders = [one.folder() for one in options if isinstance(one, RetrievalOptions)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _warehouse(plan: Plan) -> Iterator[CheckedFile]:
    database = warehouse.received(plan.settings)
    if database.is_file():
        yield CheckedFile(database, database.stat().st_size, warehouse.damage(database))


def _shards(plan: Plan) -> Iterator[CheckedFile]:
    """Check shard files that were read: one that changed, but for its size and time, or can be read no more."""
    raw = plan.lake.table(NAME)
    for name, file in plan.shards.items():
        pointer = raw.whole_pointer(name)
        if pointer is None or not isinstance(file, ShardFile) or CONTENT not in pointer.record:
            continue
        size = file.stamp().get("bytes", 0)
        try:
            if stream_hash(file.path) == pointer.record[CONTENT]:
                reason = None
            elif pointer.record["inputs"] == file.stamp():
                reason = "its content changed since it was read, its size and time did not"
            else:  # another file by now, or a damaged one: compressed files have checksums
                reason = _unreadable(plan, file) if pointer.rows else None
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        yield CheckedFile(file.path, size, reason)


def _unreadable(plan: Plan, file: ShardFile) -> str | None:
    try:
        for _ in file.batches(format_choice(plan)):
            pass
    except (ShardFault, ShardError) as error:
        return f"was whole when it was read, and is not any more: {error}"
    return None
