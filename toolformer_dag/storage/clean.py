"""Removing what nothing needs any more: old part files, rows of old models, what killed processes left."""

import re
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from stat import S_ISDIR

from upath import UPath

from toolformer_dag.storage.errors import DamagedPartition, MissingPartition
from toolformer_dag.storage.files import TEMPORARY, plain_name
from toolformer_dag.storage.lake import IDENTITY, Lake
from toolformer_dag.storage.pointer import PART_NAME
from toolformer_dag.storage.record import STORES
from toolformer_dag.storage.row_part import parse_name
from toolformer_dag.storage.rows import DAMAGED, LOCK
from toolformer_dag.storage.table import Table

FINGERPRINT = re.compile(r"[0-9a-f]{16}")  # the folder of a row store


@dataclass(frozen=True, slots=True)
class Removed:
    """A file that was removed, or would be; `bytes` of it, and why nothing needs it."""

    path: str
    bytes: int
    reason: str


def clean(lake: Lake, grace: timedelta, dry_run: bool) -> list[Removed]:
    """Removes files of the lake older than `grace` that nothing names; with `dry_run` only tells.

    A file is the lake's by the form of its name: what else lies in the folder stays.

    What goes: parts that were replaced longer than `grace` ago, unfinished files, parts put aside as damaged, and
    stored rows under an identity that no published partition was made with and no run has opened within `grace`. What
    stays: everything that a current pointer names; where a pointer cannot be read, all of its table's parts and all
    stored rows. `grace` has to be longer than the longest query over the lake and the longest publication of one
    partition: readers and writers hold on to files for that long.
    """
    if not lake.root.is_dir():
        return []
    old = (datetime.now(UTC) - grace).timestamp()
    removed = []
    for file, reason in _unneeded(lake, old):
        removed.append(Removed(str(file.path), file.bytes, reason))
        if not dry_run:
            file.path.unlink(missing_ok=True)
    return removed


@dataclass(frozen=True, slots=True)
class _File:
    path: UPath
    bytes: int
    changed: float


def _unneeded(lake: Lake, old: float) -> Iterator[tuple[_File, str]]:
    """Files are listed before pointers are read, so that what is published in between is not taken for left over."""
    folders = [lake.root, *_folders(lake.root)]
    files = {folder: list(_listed(folder)) for folder in folders}
    parts, stores = _named(lake, folders, old)
    for folder, found in files.items():
        unused = stores is not None and _is_unused(lake, folder, found, stores, old)
        for file in (file for file in found if file.changed < old):
            name = file.path.name
            if TEMPORARY.fullmatch(name):
                yield file, "unfinished"
            elif name.endswith(DAMAGED) and parse_name(name.removesuffix(DAMAGED)):
                yield file, "damaged"
            elif folder in parts and PART_NAME.fullmatch(name) and name not in parts[folder]:
                yield file, "replaced"
            elif unused and (name in (IDENTITY, LOCK) or parse_name(name)):
                yield file, "rows of an identity that nothing uses"


def _listed(folder: UPath) -> Iterator[_File]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # merged or finished by another process since it was listed
            status = path.stat()
            if not S_ISDIR(status.st_mode):
                yield _File(path, status.st_size, status.st_mtime)


def _folders(root: UPath) -> Iterator[UPath]:
    for path in sorted(root.iterdir(), key=str):
        if path.is_dir():
            yield path
            yield from _folders(path)


def _named(lake: Lake, folders: Sequence[UPath], old: float) -> tuple[dict[UPath, set[str]], set[str] | None]:
    """Folder of parts -> names of those in use; names of the row stores in use, None where that cannot be known.

    Folders whose pointer changed since `old` are left out: what it replaced may still be read.
    """
    parts: dict[UPath, set[str]] = {}
    stores: set[str] | None = set()
    for folder in (folder for folder in folders if folder.parent.name == "parts"):
        table = Table(folder.parent.parent, str(folder.parent.parent.relative_to(lake.root)))
        try:
            pointer = table.pointer(plain_name(folder.name))
            replaced = table.changed(plain_name(folder.name))  # asked after reading, so never too early
        except MissingPartition:
            parts[folder] = set()
        except DamagedPartition:
            stores = None
        else:
            if replaced < old:
                parts[folder] = {part.name for part in pointer.parts}
            stores = None if stores is None else stores | set(pointer.record.get(STORES, ()))
    return parts, stores


def _is_unused(lake: Lake, folder: UPath, files: Sequence[_File], stores: Set[str], old: float) -> bool:
    """Whether `folder` holds rows that no partition names; opening touches a file, appending makes one."""
    is_store = FINGERPRINT.fullmatch(folder.name) and any(file.path.name == IDENTITY for file in files)
    named = str(folder.relative_to(lake.root)) in stores
    return bool(is_store) and not named and all(file.changed < old for file in files)
