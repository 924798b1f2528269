"""Removing files that nothing needs any more: replaced files, rows of old models, what killed processes left."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from toolformer_dag.files import TEMPORARY, plain_name
from toolformer_dag.lake.local_outputs import contents_in_use
from toolformer_dag.lake.manifest import SUFFIX
from toolformer_dag.lake.record import STORES
from toolformer_dag.lake.row_store import IDENTITY, LOCK, parse_row_file
from toolformer_dag.lake.storage import DAMAGED, StoredFile, glance
from toolformer_dag.lake.table import FILE_NAME, DamagedPart, Lake, MissingPart

FINGERPRINT = re.compile(r"[0-9a-f]{16}")
"""The folder of a row store."""
CONTENT = re.compile(rf"{FILE_NAME.pattern}|{FINGERPRINT.pattern}")
"""A file of a part, or the object of a file of a local output."""


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A file that was removed, or would be; `bytes` of it, and why nothing needs it."""

    path: str
    bytes: int
    reason: str


def clean(lake: Lake, grace: timedelta, dry_run: bool) -> list[RemovedFile]:
    """Remove files of the lake older than `grace` that nothing names; with `dry_run` only list them.

    A file is the lake's by the form of its name: everything else in the folder stays.

    Removed: files of parts that were replaced longer than `grace` ago, unfinished files, files set aside as damaged,
    and stored rows under an identity that no published part was made with and no run has opened within `grace`. Kept:
    everything that a current pointer names; where a pointer cannot be read, all files of its table and all stored rows.
    `grace` has to be longer than the longest query over the lake and the longest publication of one part: readers and
    writers hold on to files for that long.
    """
    old = (datetime.now(UTC) - grace).timestamp()
    removed = []
    for file, reason in _unneeded(lake, old):
        removed.append(RemovedFile(lake.storage.shown(file.path), file.bytes, reason))
        if not dry_run:
            lake.storage.remove(file.path)
    return removed


def _unneeded(lake: Lake, old: float) -> Iterator[tuple[StoredFile, str]]:
    """List files before pointers are read, so that a part published in between is not taken for left over."""
    files: Mapping[Path, list[StoredFile]] = defaultdict(list)
    for file in lake.storage.files():
        files[file.path.parent].append(file)
    with glance():
        named, stores = _named(lake, files, old)
    for folder, found in sorted(files.items()):
        unused = stores is not None and _is_unused(lake, folder, found, stores, old)
        for file in (file for file in found if file.changed < old):
            name = file.path.name
            if TEMPORARY.fullmatch(name):
                yield file, "unfinished"
            elif file.withdrawn:
                yield file, "withdrawn"
            elif name.endswith(DAMAGED) and _is_of_the_lake(folder, name.removesuffix(DAMAGED)):
                yield file, "damaged"
            elif folder in named and CONTENT.fullmatch(name) and name not in named[folder]:
                yield file, "replaced"
            elif unused and (name in (IDENTITY, LOCK) or parse_row_file(name)):
                yield file, "rows of an identity that nothing uses"


def _is_of_the_lake(folder: Path, name: str) -> bool:
    in_files = folder.parent.name == "files" and FILE_NAME.fullmatch(name) is not None
    return in_files or name.endswith((".json", SUFFIX)) or parse_row_file(name) is not None


def _named(
    lake: Lake, folders: Mapping[Path, Sequence[StoredFile]], old: float
) -> tuple[dict[Path, set[str]], set[str] | None]:
    """Folder of files -> names of those in use; names of the row stores in use, None where that cannot be known.

    Folders whose pointer changed since `old` are left out: what it replaced may still be read.
    """
    contents = {folder: contents_in_use(lake.storage, folder, old) for folder in folders}
    named = {folder: names for folder, names in contents.items() if names is not None}
    stores: set[str] | None = set()
    faults: dict[str, str | None] = {}
    for folder in (folder for folder in folders if folder.parent.name == "files"):
        table = lake.table(folder.parent.parent.relative_to(lake.root).as_posix())
        part = plain_name(folder.name)
        if not any(FILE_NAME.fullmatch(file.path.name) for file in folders[folder]):
            continue  # as a folder of other people's, named `files`
        if table.name not in faults:
            faults[table.name] = table.fault()
        if faults[table.name]:  # what was lost with its lines may be needed
            stores = None
            continue
        try:
            pointer = table.pointer(part)
            replaced = table.changed(part)  # asked after reading, so never too early
        except MissingPart:
            named[folder] = set()
        except DamagedPart:
            stores = None
        else:
            if replaced < old:
                named[folder] = {file.name for file in pointer.files}
            stores = None if stores is None else stores | set(pointer.record.get(STORES, ()))
    return named, stores


def _is_unused(lake: Lake, folder: Path, files: Sequence[StoredFile], stores: Set[str], old: float) -> bool:
    """Whether `folder` holds rows that no part names; opening touches a file, appending makes one."""
    is_store = FINGERPRINT.fullmatch(folder.name) and any(file.path.name == IDENTITY for file in files)
    named = folder.relative_to(lake.root).as_posix() in stores
    return bool(is_store) and not named and all(file.changed < old for file in files)
