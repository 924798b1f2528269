"""Removing files that nothing needs any more: replaced files, rows of old models, what killed processes left."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from toolformer_dag.lake.inventory import LakeFile, iter_lake_files
from toolformer_dag.lake.local_outputs import find_object_names_in_use
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import STORES_FIELD
from toolformer_dag.lake.row_store import IDENTITY_FILE_NAME
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.table import Lake, Table


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A file that was removed, or would be.

    Attributes:
        path: The path of the file, or the URL of the object.
        size_bytes: Its size in bytes.
        reason: Why nothing needs it, in words.
    """

    path: str
    size_bytes: int
    reason: str


def clean_lake(lake: Lake, grace_period: timedelta, dry_run: bool) -> list[RemovedFile]:
    """Remove files of the lake that nothing needs and that are older than the grace period.

    The form of its name shows whether a file belongs to the lake. All other files in the folder stay.

    Removed:
    - files of parts (mostly one per shard) that were withdrawn from the manifest of their table, or were
      replaced in it before the grace period
    - unfinished files, and files that were set aside as damaged
    - rows under an identity (what determines them, such as a model and a prompt) that no published part was
      made with and no run has opened in the grace period

    Everything that a manifest names is kept. If a manifest is damaged or gone, all files of its table and all
    computed rows are kept too.

    Args:
        lake: The lake.
        grace_period: The grace period until now. It has to be longer than the longest query over the lake and the
            longest step, because readers and writers hold on to files for that long.
        dry_run: Only list the files.

    Returns:
        The files that were removed, or would be.

    Raises:
        ReadError: A file cannot be read.
        WriteError: A copy of a manifest of an object store cannot be written.
        ObjectStoreError: The object store cannot be used.
        OSError: A file in a folder cannot be removed.
    """
    grace_start_timestamp = (datetime.now(UTC) - grace_period).timestamp()
    unneeded_files = _list_unneeded_files(lake, grace_start_timestamp)
    if not dry_run:
        unneeded_files = _remove_unneeded_files(lake, unneeded_files, grace_start_timestamp)
    return [_describe_removed_file(lake, unneeded_file) for unneeded_file in unneeded_files]


class _UnneededFile(NamedTuple):
    """A file that nothing needs.

    Attributes:
        lake_file: The file.
        reason: Why nothing needs it, in words.
    """

    lake_file: LakeFile
    reason: str


def _describe_removed_file(lake: Lake, unneeded_file: _UnneededFile) -> RemovedFile:
    """Return a removed file as it is shown to users."""
    lake_file = unneeded_file.lake_file
    return RemovedFile(
        path=lake.storage.format_location(lake_file.path),
        size_bytes=lake_file.size_bytes,
        reason=unneeded_file.reason,
    )


def _remove_unneeded_files(
    lake: Lake, unneeded_files: Sequence[_UnneededFile], grace_start_timestamp: float
) -> list[_UnneededFile]:
    """Remove files that nothing needs.

    The files of a row store (rows that are computed once) stay if a run has opened the store since the lake was
    listed, because that run may read them.

    Args:
        lake: The lake.
        unneeded_files: The files.
        grace_start_timestamp: The beginning of the grace period, in seconds since 1970.

    Returns:
        The files that were removed.
    """
    store_names = {file.lake_file.owner_name for file in unneeded_files if file.lake_file.kind == "rows"}

    # First the files outside of the row stores that nothing uses.
    removed_files = [file for file in unneeded_files if file.lake_file.owner_name not in store_names]
    _remove_files(lake, removed_files)

    # Then all of these files of a row store, or none of them.
    for store_name in sorted(store_names):
        if _is_row_store_reopened(lake, store_name, grace_start_timestamp):
            continue
        store_files = [file for file in unneeded_files if file.lake_file.owner_name == store_name]
        _remove_files(lake, store_files)
        removed_files += store_files

    return removed_files


def _remove_files(lake: Lake, unneeded_files: Sequence[_UnneededFile]) -> None:
    """Remove files from the lake."""
    paths = [file.lake_file.path for file in unneeded_files]
    lake.storage.remove(*paths)


def _is_row_store_reopened(lake: Lake, store_name: str, grace_start_timestamp: float) -> bool:
    """Return whether a run has opened a row store in the grace period: the time until now whose files all stay.

    Opening a store writes its identity.json or renews the time of this file.
    """
    identity_path = lake.root / store_name / IDENTITY_FILE_NAME
    try:
        opened_timestamp = lake.storage.read_modified_timestamp(identity_path)
    except FileNotFoundError:
        return False
    return opened_timestamp >= grace_start_timestamp


@dataclass
class _FilesInUse:
    """The files and row stores (rows that are computed once) of a lake that are in use.

    It is filled table by table and output by output. Then `find_removal_reason` says for each file why it can go.

    Attributes:
        paths_in_use: Files that are in use.
        folders_in_use: Folders of which all files count as in use.
        store_names_in_use: Row stores that are in use.
        may_use_any_store: Whether any row store may be in use, because a manifest (list of parts) is damaged.
    """

    paths_in_use: set[Path] = field(default_factory=set)
    folders_in_use: set[Path] = field(default_factory=set)
    store_names_in_use: set[str] = field(default_factory=set)
    may_use_any_store: bool = False

    def add_table(
        self, lake: Lake, table_name: str, lake_files: Sequence[LakeFile], grace_start_timestamp: float
    ) -> None:
        """Note the files and row stores that a table uses, by its manifest (the list of its parts).

        If the manifest is damaged or gone, all files of the table and all row stores count as used.

        Args:
            lake: The lake.
            table_name: The name of the table.
            lake_files: All files of the lake.
            grace_start_timestamp: The beginning of the grace period, in seconds since 1970.
        """
        table = lake.get_table(table_name)
        if table.find_manifest_damage():
            # The lost lines of the manifest may have named any file and any row store.
            self.may_use_any_store = True
            for lake_file in lake_files:
                if lake_file.kind == "part" and lake_file.owner_name == table_name:
                    self.folders_in_use.add(lake_file.path.parent)
            return

        for part_name, pointer in table.read_pointers_by_part().items():
            self._add_part(table, part_name, pointer, grace_start_timestamp)

    def _add_part(self, table: Table, part_name: str, pointer: Pointer, grace_start_timestamp: float) -> None:
        """Note the files and row stores of a part.

        If the part was published in the grace period, its whole folder counts as used, because readers may still
        need the files that it replaced.
        """
        self.store_names_in_use.update(pointer.record.get(STORES_FIELD, ()))
        self.paths_in_use.update(table.get_file_path(part_name, file) for file in pointer.files)

        is_recent = pointer.published_timestamp >= grace_start_timestamp
        if is_recent:
            self.folders_in_use.add(table.get_part_folder(part_name))

    def add_local_output(self, lake: Lake, output_folder: Path, grace_start_timestamp: float) -> None:
        """Note the objects that a local output uses, such as a checkpoint. If that is unknown, all of them count."""
        object_names = find_object_names_in_use(lake.storage, output_folder, grace_start_timestamp)
        if object_names is None:
            self.folders_in_use.add(output_folder)
        else:
            self.paths_in_use.update(output_folder / object_name for object_name in object_names)

    def find_removal_reason(self, lake_file: LakeFile) -> str | None:
        """Explain why a file that is older than the grace period can be removed.

        Returns:
            The reason in words, or None if the file is in use and has to stay.
        """
        if lake_file.kind in ("unfinished", "damaged"):
            return lake_file.kind
        if lake_file.kind in ("part", "content") and not self._is_file_in_use(lake_file):
            return "replaced"
        if lake_file.kind == "rows" and not self._is_store_in_use(lake_file.owner_name):
            return "rows of an identity that nothing uses"
        return None

    def _is_file_in_use(self, lake_file: LakeFile) -> bool:
        """Return whether a file of a table, or of an output such as a checkpoint, is in use."""
        return lake_file.path in self.paths_in_use or lake_file.path.parent in self.folders_in_use

    def _is_store_in_use(self, store_name: str) -> bool:
        """Return whether a row store may be in use."""
        return self.may_use_any_store or store_name in self.store_names_in_use


def _list_unneeded_files(lake: Lake, grace_start_timestamp: float) -> list[_UnneededFile]:
    """List the files that nothing needs and that are older than the grace period, sorted by path.

    Args:
        lake: The lake.
        grace_start_timestamp: The beginning of the grace period, in seconds since 1970.
    """
    lake_files = sorted(iter_lake_files(lake.storage), key=lambda lake_file: lake_file.path)
    files_in_use = _collect_files_in_use(lake, lake_files, grace_start_timestamp)

    unneeded_files = []
    for lake_file in lake_files:
        is_recent = lake_file.modified_timestamp >= grace_start_timestamp
        if is_recent:
            continue
        reason = files_in_use.find_removal_reason(lake_file)
        if reason is not None:
            unneeded_files.append(_UnneededFile(lake_file, reason))
    return unneeded_files


def _collect_files_in_use(lake: Lake, lake_files: Sequence[LakeFile], grace_start_timestamp: float) -> _FilesInUse:
    """Collect what is in use: the files and row stores that manifests name.

    These are the manifests of tables and of local outputs, such as checkpoints.

    Args:
        lake: The lake.
        lake_files: All files of the lake.
        grace_start_timestamp: The beginning of the grace period, in seconds since 1970. Files that were replaced since
            then, and row stores that were opened since then, count as used too.
    """
    # Files of tables are manifests, and the Parquet files of parts.
    table_names = {file.owner_name for file in lake_files if file.kind in ("manifest", "part")}
    # The content files of local outputs, such as checkpoints, are named by their hash.
    output_folders = {file.path.parent for file in lake_files if file.kind == "content"}
    recent_stores = _collect_recently_opened_stores(grace_start_timestamp, lake_files)
    files_in_use = _FilesInUse(store_names_in_use=recent_stores)

    with enter_session():  # inside the block, the manifest of each table is read only once
        for table_name in sorted(table_names):
            files_in_use.add_table(lake, table_name, lake_files, grace_start_timestamp)

    for output_folder in output_folders:
        files_in_use.add_local_output(lake, output_folder, grace_start_timestamp)
    return files_in_use


def _collect_recently_opened_stores(grace_start_timestamp: float, lake_files: Sequence[LakeFile]) -> set[str]:
    """Return the names of the row stores that a run has opened, or appended rows to, in the grace period.

    Either changes one of the files of the store.
    """
    store_names = set()
    for lake_file in lake_files:
        is_recent = lake_file.modified_timestamp >= grace_start_timestamp
        if lake_file.kind == "rows" and is_recent:
            store_names.add(lake_file.owner_name)
    return store_names
