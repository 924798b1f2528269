"""Removing files that nothing needs any more: replaced files, rows of old models, what killed processes left."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from toolformer_dag.lake.inventory import LakeFile, inventory
from toolformer_dag.lake.local_outputs import read_contents_in_use
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import STORES
from toolformer_dag.lake.row_store import IDENTITY
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import Lake, Table


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A file that was removed, or would be.

    - `path`: where it lies, for people: in an object store the address of the object
    - `bytes`: its size
    - `reason`: why nothing needs it
    """

    path: str
    bytes: int
    reason: str


def clean(lake: Lake, grace: timedelta, dry_run: bool) -> list[RemovedFile]:
    """Remove files of the lake that nothing needs and that are older than the grace period.

    Whether a file is the lake's is told by the form of its name. All other files in the folder stay.

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
        grace: The grace period until now. It has to be longer than the longest query over the lake and the
            longest step, because readers and writers hold on to files for that long.
        dry_run: Only list the files.

    Returns:
        The files that were removed, or would be.

    Raises:
        ReadError: A file cannot be read.
        WriteError: A file cannot be written.
    """
    kept_since = (datetime.now(UTC) - grace).timestamp()
    unneeded = _list_unneeded_files(lake, kept_since)
    removed = unneeded if dry_run else _remove(lake, unneeded, kept_since)
    return [
        RemovedFile(path=lake.storage.shown(file.item.path), bytes=file.item.bytes, reason=file.reason)
        for file in removed
    ]


class _Unneeded(NamedTuple):
    """A file that nothing needs, and why."""

    item: LakeFile
    reason: str


def _remove(lake: Lake, unneeded: Sequence[_Unneeded], kept_since: float) -> list[_Unneeded]:
    """Remove files that nothing needs.

    The files of a row store stay if a run has opened the store since the lake was listed.

    Args:
        lake: The lake.
        unneeded: The files.
        kept_since: The beginning of the grace period, in seconds since 1970.

    Returns:
        The files that were removed.
    """
    row_stores = {file.item.owner for file in unneeded if file.item.kind == "rows"}
    removed = [file for file in unneeded if file.item.owner not in row_stores]
    _remove_files(lake, removed)

    # Of each row store, remove all of these files or none.
    for store in sorted(row_stores):
        if _is_in_use_again(lake, store, kept_since):
            continue
        store_files = [file for file in unneeded if file.item.owner == store]
        _remove_files(lake, store_files)

        removed += store_files
    return removed


def _remove_files(lake: Lake, files: Sequence[_Unneeded]) -> None:
    """Remove files from the lake."""
    lake.storage.remove(*(file.item.path for file in files))


def _is_in_use_again(lake: Lake, store: str, kept_since: float) -> bool:
    """Return whether a run has opened a row store since the lake was listed: opening it touches its identity.json."""
    try:
        return lake.storage.changed(lake.root / store / IDENTITY) >= kept_since
    except FileNotFoundError:
        return False


@dataclass
class _Use:
    """What of a lake is in use; filled table by table and output by output, then asked for the reason of each file.

    - `files`: these files
    - `folders`: all files of these folders
    - `stores`: these row stores
    - `any_store`: whether any row store may be in use, since a manifest is not whole
    """

    files: set[Path] = field(default_factory=set)
    folders: set[Path] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    any_store: bool = False

    def add_table(self, lake: Lake, name: str, items: Sequence[LakeFile], kept_since: float) -> None:
        """Note the files and row stores that a table uses, by its manifest (the list of its parts).

        If the manifest is damaged or gone, all files of the table and all row stores count as used.

        Args:
            lake: The lake.
            name: The name of the table.
            items: All files of the lake.
            kept_since: The beginning of the grace period, in seconds since 1970.
        """
        table = lake.table(name)
        if table.damage():
            # The lost lines of the manifest may have named any file and any row store.
            self.any_store = True
            files_of_table = (item.path for item in items if item.kind == "part" and item.owner == name)
            self.folders.update(path.parent for path in files_of_table)
            return

        for part, pointer in table.pointers().items():
            self._add_part(table, part, pointer, kept_since)

    def _add_part(self, table: Table, part: str, pointer: Pointer, kept_since: float) -> None:
        """Note the files and row stores of a part; its whole folder, also replaced files, in the grace period."""
        self.stores.update(pointer.record.get(STORES, ()))
        self.files.update(table.file_path(part, file) for file in pointer.files)
        if pointer.published >= kept_since:
            self.folders.add(table.get_part_folder(part))

    def add_local_output(self, lake: Lake, folder: Path, kept_since: float) -> None:
        """Note what the manifest of a local output names, such as a checkpoint; all its files where that is unknown."""
        contents = read_contents_in_use(lake.storage, folder, kept_since)
        if contents is None:
            self.folders.add(folder)
        else:
            self.files.update(folder / name for name in contents)

    def reason(self, item: LakeFile) -> str | None:
        """Explain why a file can be removed that is older than the grace period.

        Returns:
            The reason, or None if the file is in use and has to stay.
        """
        if item.kind in ("unfinished", "damaged"):
            return item.kind
        if item.kind in ("part", "content") and not self._is_file_in_use(item):
            return "replaced"
        if item.kind == "rows" and not self._is_store_in_use(item.owner):
            return "rows of an identity that nothing uses"
        return None

    def _is_file_in_use(self, item: LakeFile) -> bool:
        """Return whether a file of a table, or of an output such as a checkpoint, is in use."""
        return item.path in self.files or item.path.parent in self.folders

    def _is_store_in_use(self, store: str) -> bool:
        """Return whether a row store may be in use."""
        return self.any_store or store in self.stores


def _list_unneeded_files(lake: Lake, kept_since: float) -> list[_Unneeded]:
    """List the files that nothing needs and that are older than the grace period, sorted by path.

    Args:
        lake: The lake.
        kept_since: The beginning of the grace period, in seconds since 1970.
    """
    items = sorted(inventory(lake.storage), key=lambda item: item.path)
    use = _collect_use(lake, items, kept_since)

    unneeded = []
    for item in items:
        reason = use.reason(item) if item.changed < kept_since else None
        if reason is not None:
            unneeded.append(_Unneeded(item, reason))
    return unneeded


def _collect_use(lake: Lake, items: Sequence[LakeFile], kept_since: float) -> _Use:
    """Collect what is in use: the files and row stores that manifests name.

    These are the manifests of tables and of local outputs, such as checkpoints.

    Args:
        lake: The lake.
        items: All files of the lake.
        kept_since: The beginning of the grace period, in seconds since 1970. Files that were replaced since
            then, and row stores that were opened since then, count as used too.
    """
    tables = {item.owner for item in items if item.kind in ("manifest", "part")}
    output_folders = {item.path.parent for item in items if item.kind == "content"}
    use = _Use(stores=_collect_stores_opened_since(kept_since, items))

    with session():
        for table in sorted(tables):
            use.add_table(lake, table, items, kept_since)

    for folder in output_folders:
        use.add_local_output(lake, folder, kept_since)
    return use


def _collect_stores_opened_since(kept_since: float, items: Sequence[LakeFile]) -> set[str]:
    """Return the row stores that a run has opened or appended to since then: either changes one of their files."""
    return {item.owner for item in items if item.kind == "rows" and item.changed >= kept_since}
