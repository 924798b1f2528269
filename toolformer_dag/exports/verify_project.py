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

from toolformer_dag.computing.hub_pins import PINS_FOLDER
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.shards import WEB_RECORD_NAME, ShardFile
from toolformer_dag.exports import dataset_folder
from toolformer_dag.files import UserError, iter_listed_files, unseal_record
from toolformer_dag.identity import compute_file_content_hash
from toolformer_dag.lake import warehouse
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.verification import iter_checked_files, set_aside_damaged_files, set_aside_file
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.pipeline.raw_shards import CONTENT_HASH_FIELD, TABLE_NAME, choose_format
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.tools.passage_index import MANIFEST_FILE_NAME, set_aside_damaged_index
from toolformer_dag.tools.passage_search import RetrievalOptions
from toolformer_dag.training.checkpoints import build_checkpoints_by_name
from toolformer_dag.training.training_report import (
    CARD_FILE_NAME,
    RECORD_FILE_NAME,
    build_checkpoint_output,
    is_card_missing_or_changed,
)

CHANGED_CONTENT_REASON = "is missing, or its content is not what was written"
"""The reason of a damaged file."""
FOLDER_RECORD_FILE_NAMES = (dataset_folder.RECORD_FILE_NAME, RECORD_FILE_NAME, MANIFEST_FILE_NAME)
"""Names of the sealed records of an export, a checkpoint and an index."""


class _FolderKind(NamedTuple):
    """Folders of the lake that people and other programs open, such as data sets.

    Attributes:
        folder_pattern: The pattern of the folders' paths within the lake.
        record_path: The path of the record within each folder.
    """

    folder_pattern: str
    record_path: str


LAKE_FOLDER_KINDS = (
    _FolderKind("training*/*", f"model/{RECORD_FILE_NAME}"),
    _FolderKind("dataset*", dataset_folder.RECORD_FILE_NAME),
    _FolderKind("small_web/*", WEB_RECORD_NAME),
)
"""Checkpoints, data sets, and the synthetic web."""
RECORDED_FOLDER_PATTERN = re.compile(r"model|dataset(_round_\d+)?")
"""The name of a folder that is damaged if it has no record."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a check: the damaged files, and the number of bytes of all checked files."""

    damaged_files: tuple[CheckedFile, ...]
    checked_byte_count: int


def verify_project_files(plan: Plan) -> Verification:
    """Check all files that a project has written, and its shards (the files of input texts).

    A damaged file is touched, so that the next run looks at it. In an object store it is set aside. Models, passages
    and other files that users supply are not checked.
    """
    written_files = list(_verify_written_files(plan))
    shard_files = list(_verify_shards(plan))
    verification = _build_verification([*written_files, *shard_files])

    # Shards are not marked, because they are the user's.
    for written_file in written_files:
        if written_file.reason is not None:
            _mark_damaged_file(plan.lake, written_file)

    return verification


def _verify_written_files(plan: Plan) -> Iterator[CheckedFile]:
    """Check every file that the project has written: published files, rows, the warehouse, indexes.

    Yields:
        Each file with its size and its damage (`reason`), which is None for a whole file.
    """
    yield from iter_checked_files(plan.lake)
    yield from _verify_files_beside_tables(plan)
    yield from _verify_warehouse(plan)
    for index_folder in _list_index_folders(plan):
        yield from _verify_recorded_files(index_folder / MANIFEST_FILE_NAME)


def _mark_damaged_file(lake: Lake, damaged_file: CheckedFile) -> None:
    """Touch a damaged file, so that the next run looks at it. If the lake is in an object store, set it aside first."""
    is_in_object_store = isinstance(lake.storage, ObjectStorage) and damaged_file.path.is_relative_to(lake.root)
    if is_in_object_store:
        set_aside_file(lake, damaged_file.path)

    with suppress(OSError):  # the file may be missing, or belong to another user
        os.utime(damaged_file.path)


def verify_folder(folder: Path) -> Verification:
    """Check the files of an exported data set, a checkpoint or an index against the record in its folder.

    A record lists the hashes of the other files. The folder may be anywhere.

    Raises:
        UserError: The folder holds no such record.
    """
    possible_records = [folder / name for name in FOLDER_RECORD_FILE_NAMES]
    record_paths = [path for path in possible_records if os.path.lexists(path)]
    if not record_paths:
        record_names = ", ".join(FOLDER_RECORD_FILE_NAMES)
        raise UserError(f"{folder} holds none of {record_names}; name the folder of an export, a model or an index")

    checked_files: list[CheckedFile] = []
    for record_path in record_paths:
        checked_files += _verify_recorded_files(record_path)
    return _build_verification(checked_files)


def _build_verification(checked_files: Sequence[CheckedFile]) -> Verification:
    """Summarize checked files: select the damaged ones, which have a `reason`, and add up the sizes of all."""
    damaged_files = tuple(file for file in checked_files if file.reason is not None)
    checked_byte_count = sum(file.size_bytes for file in checked_files)
    return Verification(damaged_files, checked_byte_count)


def set_aside_damaged_project_files(plan: Plan) -> Sequence[CheckedFile]:
    """Set aside damaged rows, published files and indexes, so that they are made again.

    Only files that changed since the last run looked at them are checked. Checkpoints, the data set and the warehouse
    are not checked here, because the steps that make them do it.

    Returns:
        The damaged files, each with its damage.
    """
    damaged_files = set_aside_damaged_files(plan.lake)
    for index_folder in _list_index_folders(plan):
        for path in set_aside_damaged_index(index_folder):
            damaged_files.append(CheckedFile(path, 0, CHANGED_CONTENT_REASON))
    return damaged_files


def _verify_files_beside_tables(plan: Plan) -> Iterator[CheckedFile]:
    """Check the files that are not rows of tables.

    These are the cards of checkpoints, the files of the folders LAKE_FOLDER_KINDS, and the pins of data sets of the
    hub (records of the commit at which they are read).

    Yields:
        Each file with its size and its damage (`reason`), which is None for a whole file.
    """
    yield from _verify_cards(plan)
    for record_path in _iter_record_paths(plan.lake):
        yield from _verify_recorded_files(record_path)
    yield from _verify_pins(plan.lake)


def _verify_cards(plan: Plan) -> Iterator[CheckedFile]:
    """Check the card (README.md) of each checkpoint, after downloading a checkpoint that another machine has sent."""
    for checkpoint_name in build_checkpoints_by_name(plan.settings):
        build_checkpoint_output(plan.settings, checkpoint_name).receive_files()

        folder = get_checkpoint_folder(plan.settings, checkpoint_name)
        if not folder.is_dir():
            continue

        card_path = folder / CARD_FILE_NAME
        size = card_path.stat().st_size if card_path.is_file() else 0
        reason = CHANGED_CONTENT_REASON if is_card_missing_or_changed(folder) else None
        yield CheckedFile(card_path, size, reason)


def _iter_record_paths(lake: Lake) -> Iterator[Path]:
    """Yield the paths of the records in the lake's checkpoints, data sets and synthetic web (LAKE_FOLDER_KINDS).

    A record lists the hashes of the other files of its folder. The path of a record that does not exist is yielded as
    well if its folder has to have one.
    """
    for kind in LAKE_FOLDER_KINDS:
        for folder in sorted(lake.root.glob(kind.folder_pattern)):
            record_path = folder / kind.record_path
            recorded_folder = record_path.parent

            # A folder such as `model`, `dataset` or `dataset_round_2` is damaged if it has no record. Others are not.
            has_recorded_name = RECORDED_FOLDER_PATTERN.fullmatch(recorded_folder.name) is not None
            needs_record = has_recorded_name and os.path.lexists(recorded_folder)
            if needs_record or os.path.lexists(record_path):
                yield record_path


def _verify_pins(lake: Lake) -> Iterator[CheckedFile]:
    """Check every pin: a sealed record of the commit at which a data set of the Hugging Face hub was read first.

    If a pin is damaged, the next run asks the hub for the commit again.
    """
    pins_folder = lake.root / PINS_FOLDER
    for file_name in sorted(lake.storage.list_file_names(pins_folder)):
        yield _verify_pin(lake, pins_folder / file_name)


def _verify_pin(lake: Lake, pin_path: Path) -> CheckedFile:
    """Check a pin: the record of the commit at which a data set of the hub is read.

    A pin that cannot be read has the size 0, and counts as damaged.
    """
    content = b""
    reason = None

    try:
        content, _version = lake.storage.read(pin_path)
        unseal_record(content)  # raises ValueError for a damaged record
    except (OSError, ValueError):
        reason = CHANGED_CONTENT_REASON

    return CheckedFile(pin_path, len(content), reason)


def _verify_recorded_files(record_path: Path) -> Iterator[CheckedFile]:
    """Check the files that a sealed record lists with their hashes.

    If the record itself is missing or damaged, only the record is yielded.
    """
    for path, is_whole in iter_listed_files(record_path, force_read=True):
        size = path.stat().st_size if path.is_file() else 0
        yield CheckedFile(path, size, None if is_whole else CHANGED_CONTENT_REASON)


def _list_index_folders(plan: Plan) -> list[Path]:
    """List the folders of the indexes in which tools search passages, each once.

    Indexes that were not built yet are left out.
    """
    folders: list[Path] = []
    for lane in plan.lanes:
        options = lane.tool.options
        if not isinstance(options, RetrievalOptions):
            continue

        folder = options.get_index_folder()
        if folder.is_dir() and folder not in folders:
            folders.append(folder)
    return folders


def _verify_warehouse(plan: Plan) -> Iterator[CheckedFile]:
    """Check the file of the warehouse, the database with all tables. Nothing is yielded if there is none."""
    database = warehouse.receive_warehouse(plan.settings)
    if database.is_file():
        size = database.stat().st_size
        yield CheckedFile(database, size, warehouse.find_warehouse_damage(database))


def _verify_shards(plan: Plan) -> Iterator[CheckedFile]:
    """Check each shard file (a file of input texts) that a run has read against its hash in the table `raw_shards`.

    Shards that are not local files are left out.
    """
    raw_shards = plan.lake.get_table(TABLE_NAME)
    for shard_name, shard in plan.shards_by_name.items():
        pointer = raw_shards.find_checked_pointer(shard_name)  # to the rows that were read from the shard
        if pointer is None or not isinstance(shard, ShardFile):
            continue
        if CONTENT_HASH_FIELD in pointer.record:
            yield _verify_shard_file(plan, shard, pointer)


def _verify_shard_file(plan: Plan, shard_file: ShardFile, pointer: Pointer) -> CheckedFile:
    """Check a shard file (a file of input texts).

    Args:
        plan: The settings with the tables and the model that follow from them.
        shard_file: The file.
        pointer: Points to the rows that were read from the file.

    Returns:
        The file with its size and its damage, which is None for a whole file.
    """
    size = shard_file.read_stamp().get("bytes", 0)
    try:
        reason = _find_shard_damage(plan, shard_file, pointer)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    return CheckedFile(shard_file.path, size, reason)


def _find_shard_damage(plan: Plan, shard_file: ShardFile, pointer: Pointer) -> str | None:
    """Find out whether a shard file (a file of input texts) was damaged since it was read.

    If its content has changed, its size and time tell whether somebody replaced it on purpose: damage changes neither.

    Args:
        plan: The settings with the tables and the model that follow from them.
        shard_file: The file.
        pointer: The entry of the rows that were read from the file, with a record of its content.

    Returns:
        A description of the damage. None if the file is whole or was replaced on purpose.

    Raises:
        OSError: The file cannot be read.
    """
    content_hash = compute_file_content_hash(shard_file.path)
    if content_hash == pointer.record[CONTENT_HASH_FIELD]:  # the content is what was read
        return None

    if pointer.record["inputs"] == shard_file.read_stamp():  # the same size and modification time
        return "its content changed since it was read, its size and time did not"

    # Somebody replaced the file, so the content may differ. But if rows were read from it, it must be readable.
    if pointer.row_count:
        return _explain_unreadable_shard(plan, shard_file)
    return None


def _explain_unreadable_shard(plan: Plan, shard_file: ShardFile) -> str | None:
    """Read a shard file to its end, to find out whether it can be read.

    Returns:
        Why it cannot be read, or None if it can.

    Raises:
        OSError: The file cannot be opened.
    """
    try:
        for _ in shard_file.iter_batches(choose_format(plan)):
            pass
    except (ShardFault, ShardError) as error:
        return f"was whole when it was read, and is not any more: {error}"
    return None
