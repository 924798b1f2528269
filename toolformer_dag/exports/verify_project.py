"""Verify a project's files: the lake, checkpoints, the data set, the warehouse, shards.

A record is the file of a folder with the hashes of its other files.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolformer_dag.computing.hub_pins import PINS
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.shards import WEB_RECORD, ShardFile
from toolformer_dag.exports import dataset_folder
from toolformer_dag.files import UserError, iter_files_beside, unseal_record
from toolformer_dag.identity import stream_hash
from toolformer_dag.lake import warehouse
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.verification import checked_files, set_aside_damaged, set_aside_file
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.raw_shards import CONTENT, NAME, choose_format
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.tools.passage_index import MANIFEST, set_aside_damaged_index
from toolformer_dag.tools.passage_search import RetrievalOptions
from toolformer_dag.training.checkpoints import checkpoints
from toolformer_dag.training.training_report import CARD, RECORD, build_checkpoint_output, is_card_lost

NOT_WRITTEN = "is missing, or its content is not what was written"
"""The reason of a damaged file."""
FOLDER_RECORDS = (dataset_folder.RECORD, RECORD, MANIFEST)
"""Names of the sealed records of an export, a checkpoint and an index."""


class _FolderKind(NamedTuple):
    """Folders of the lake that people and other programs open: their pattern, and the path of the record in each."""

    pattern: str
    record: str


LAKE_FOLDERS = (
    _FolderKind("training*/*", f"model/{RECORD}"),
    _FolderKind("dataset*", dataset_folder.RECORD),
    _FolderKind("small_web/*", WEB_RECORD),
)
"""Checkpoints, data sets, and the synthetic web."""
WHOLE_FOLDER = re.compile(r"model|dataset(_round_\d+)?")
"""The name of a folder that is damaged if it has no record."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was verified: the damaged files, and the number of bytes that were read."""

    damaged: tuple[CheckedFile, ...]
    bytes: int


def verify_files(plan: Plan) -> Verification:
    """Check all files of a project and its shards.

    A damaged file is touched, so that the next run looks at it. In an object store it is set aside. Models, passages
    and other files that users supply are not checked.
    """
    written = list(_verify_written_files(plan))
    verification = _build_verification([*written, *_verify_shards(plan)])

    for file in written:
        if file.reason is not None:
            _mark_damaged(plan.lake, file)

    return verification


def _verify_written_files(plan: Plan) -> Iterator[CheckedFile]:
    """Check every file that the project has written: published files, rows, the warehouse, indexes."""
    yield from checked_files(plan.lake)
    yield from _verify_files_beside_tables(plan)
    yield from _verify_warehouse(plan)
    for index in _list_index_folders(plan):
        yield from _verify_recorded_files(index / MANIFEST)


def _mark_damaged(lake: Lake, file: CheckedFile) -> None:
    """Set a damaged file aside if it is in an object store, and touch it, so that the next run looks at it."""
    if isinstance(lake.storage, ObjectStorage) and file.path.is_relative_to(lake.root):
        set_aside_file(lake, file.path)
    with suppress(OSError):  # it may be missing, or somebody else's
        os.utime(file.path)


def verify_folder(folder: Path) -> Verification:
    """Check the files of an exported data set, a checkpoint or an index against the record in its folder.

    The folder may be anywhere.

    Raises:
        UserError: The folder holds no such record.
    """
    records = [folder / name for name in FOLDER_RECORDS if os.path.lexists(folder / name)]
    if not records:
        raise UserError(
            f"{folder} holds none of {', '.join(FOLDER_RECORDS)}; name the folder of an export, a model or an index"
        )

    files: list[CheckedFile] = []
    for record in records:
        files += _verify_recorded_files(record)
    return _build_verification(files)


def _build_verification(files: Sequence[CheckedFile]) -> Verification:
    """Return which of the checked files are damaged, and the bytes of all."""
    return Verification(
        damaged=tuple(file for file in files if file.reason is not None),
        bytes=sum(file.bytes for file in files),
    )


def set_aside(plan: Plan) -> Sequence[CheckedFile]:
    """Set aside the damaged rows, published files and indexes of a plan that changed since the last run looked.

    Checkpoints, the data set and the warehouse are compared by their own steps.
    """
    damaged = set_aside_damaged(plan.lake)
    for index in _list_index_folders(plan):
        damaged += [CheckedFile(file, 0, NOT_WRITTEN) for file in set_aside_damaged_index(index)]
    return damaged


def _verify_files_beside_tables(plan: Plan) -> Iterator[CheckedFile]:
    """Check the files that are no rows of tables: checkpoints' cards, LAKE_FOLDERS, pins of hub data sets.

    Each file is yielded with its size and its damage (`reason`), None if it is whole.
    """
    yield from _verify_cards(plan)
    for record in _iter_lake_records(plan.lake):
        yield from _verify_recorded_files(record)
    yield from _verify_pins(plan.lake)


def _verify_cards(plan: Plan) -> Iterator[CheckedFile]:
    """Check the card of each checkpoint, after downloading a checkpoint that another machine has sent."""
    for name in checkpoints(plan.settings):
        build_checkpoint_output(plan.settings, name).receive()
        card = checkpoint_folder(plan.settings, name) / CARD
        if card.parent.is_dir():
            size = card.stat().st_size if card.is_file() else 0
            reason = NOT_WRITTEN if is_card_lost(card.parent) else None
            yield CheckedFile(card, size, reason)


def _iter_lake_records(lake: Lake) -> Iterator[Path]:
    """Yield the records of LAKE_FOLDERS that exist, or that should."""
    for kind in LAKE_FOLDERS:
        for folder in sorted(lake.root.glob(kind.pattern)):
            record = folder / kind.record
            needs_record = WHOLE_FOLDER.fullmatch(record.parent.name) and os.path.lexists(record.parent)
            if needs_record or os.path.lexists(record):
                yield record


def _verify_pins(lake: Lake) -> Iterator[CheckedFile]:
    """Check every pin: a sealed record of the commit at which a data set of the Hugging Face hub was read first.

    If a pin is damaged, the next run asks the hub for the commit again.
    """
    for name in sorted(lake.storage.names(lake.root / PINS)):
        yield _verify_pin(lake, lake.root / PINS / name)


def _verify_pin(lake: Lake, path: Path) -> CheckedFile:
    """Check a pin: the record of the commit at which a data set of the hub is read.

    A pin that cannot be read has the size 0, and counts as damaged.
    """
    content = b""
    reason = None

    try:
        content, _version = lake.storage.read(path)
        unseal_record(content)  # raises ValueError for a damaged record
    except (OSError, ValueError):
        reason = NOT_WRITTEN

    return CheckedFile(path, len(content), reason)


def _verify_recorded_files(record: Path) -> Iterator[CheckedFile]:
    """Check the files that a sealed record lists; of a missing or damaged record, yield the record alone."""
    for path, is_whole in iter_files_beside(record, again=True):
        size = path.stat().st_size if path.is_file() else 0
        yield CheckedFile(path, size, None if is_whole else NOT_WRITTEN)


def _list_index_folders(plan: Plan) -> list[Path]:
    """List the folders of the tools' indexes, each once. An index that was not built yet is left out."""
    folders: list[Path] = []
    for lane in plan.lanes:
        options = lane.tool.options
        if not isinstance(options, RetrievalOptions):
            continue

        folder = options.folder()
        if folder.is_dir() and folder not in folders:
            folders.append(folder)
    return folders


def _verify_warehouse(plan: Plan) -> Iterator[CheckedFile]:
    """Check the warehouse, if there is one."""
    database = warehouse.received(plan.settings)
    if database.is_file():
        yield CheckedFile(database, database.stat().st_size, warehouse.damage(database))


def _verify_shards(plan: Plan) -> Iterator[CheckedFile]:
    """Check each shard file (a file of input texts) that a run has read against its hash in the table `raw_shards`.

    Shards that are not local files are left out.
    """
    raw = plan.lake.table(NAME)
    for name, file in plan.shards.items():
        pointer = raw.find_whole_pointer(name)
        if pointer is not None and isinstance(file, ShardFile) and CONTENT in pointer.record:
            yield _verify_shard(plan, file, pointer)


def _verify_shard(plan: Plan, file: ShardFile, pointer: Pointer) -> CheckedFile:
    """Return a shard file with its size and its damage. pointer: to the rows that were read from it."""
    size = file.stamp().get("bytes", 0)
    try:
        reason = _find_shard_damage(plan, file, pointer)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    return CheckedFile(file.path, size, reason)


def _find_shard_damage(plan: Plan, file: ShardFile, pointer: Pointer) -> str | None:
    """Find the damage of a shard file.

    Args:
        pointer: Points to the rows that were read from the file.

    Returns:
        A description of the damage. None if the file is whole or was replaced on purpose.

    Raises:
        OSError: The file cannot be read.
    """
    if stream_hash(file.path) == pointer.record[CONTENT]:  # whole: its content is what was read
        return None

    if pointer.record["inputs"] == file.stamp():
        return "its content changed since it was read, its size and time did not"

    # Somebody replaced the file, so the content may differ; but where rows were read, it must be readable.
    return _explain_unreadable(plan, file) if pointer.rows else None


def _explain_unreadable(plan: Plan, file: ShardFile) -> str | None:
    """Read a shard file to its end; return why that fails, None if it does not. Raises OSError."""
    try:
        for _ in file.batches(choose_format(plan)):
            pass
    except (ShardFault, ShardError) as error:
        return f"was whole when it was read, and is not any more: {error}"
    return None
