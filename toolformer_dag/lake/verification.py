"""Finding what is damaged in the lake, a flipped bit, a truncated or a missing file, and setting it aside."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import polars as pl

from toolformer_dag.files import write_whole
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.inventory import LakeFile, inventory, parse_lake_file
from toolformer_dag.lake.manifest import MANIFEST_GONE
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.row_store import IDENTITY, RowStore
from toolformer_dag.lake.session import session
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import DamagedPart, Lake, MissingPart, Table

CLOCK_LAG_NS = 10**9
"""Nanoseconds by which a file's time of change may lag behind the clock."""
LOCK = ".lock"
"""How the name of a lock ends."""
NO_IDENTITY = "does not say what its folder is named after"
"""The reason for an identity.json whose fingerprint is not the name of its folder."""
VERIFIED = ".verified"
"""The file of the lake that holds up to when it was verified, in nanoseconds since 1970."""


def checked_files(lake: Lake, since: int = 0) -> Iterator[CheckedFile]:
    """Check all manifests, all files of tables, and all files of row stores (rows that are computed once).

    The warehouse, the indexes of tools and shard files are not checked.

    Args:
        lake: The lake.
        since: A time in nanoseconds since 1970. Only the size is compared of files that have not changed
            since then. 0 compares the hash of every file.

    Yields:
        Each file with what is wrong with it. With another `since` than 0, undamaged Parquet files of tables are
        left out.

    Raises:
        ReadError: A file cannot be read.
    """
    items = list(inventory(lake.storage, all_parts=False))
    stores = {item.owner for item in items if _is_of_store(item)}
    tables = {item.owner for item in items if item.kind in ("manifest", "part")}

    for store in sorted(stores):
        yield from _verify_store(lake, store, since)
    for table in sorted(tables):
        yield from _verify_table(lake, table, since)


def _is_of_store(item: LakeFile) -> bool:
    """Return whether a file of the lake is of a row store; a lock may lie alone in its folder, and does not count."""
    return item.kind == "rows" and item.path.suffix != LOCK


def set_aside_damaged(lake: Lake) -> list[CheckedFile]:
    """Set aside the files that were damaged since the last call, so that they are computed again.

    Nothing is checked in an object store, because there readers compare the hash of what they fetch.

    Returns:
        The damaged files.
    """
    if isinstance(lake.storage, ObjectStorage) or not lake.root.is_dir():
        return []

    time_file = lake.root / VERIFIED  # has the time of the last call
    # The time of change of a file may lag behind the clock, so the next call looks back a little further.
    began = time.time_ns() - CLOCK_LAG_NS

    damaged = _list_damaged_since(lake, _read_verified_until(time_file))
    for file in damaged:
        set_aside_file(lake, file.path)

    write_whole(time_file, str(began).encode())
    return damaged


def _list_damaged_since(lake: Lake, since: int) -> list[CheckedFile]:
    """Return the damaged files among those that changed since then (nanoseconds since 1970)."""
    return [file for file in checked_files(lake, since) if file.reason is not None and file.path.exists()]


def _read_verified_until(time_file: Path) -> int:
    """Read a time from a file.

    Returns:
        The time, or 0 if there is none or if it is in the future because a clock was set back.
    """
    try:
        until = int(time_file.read_bytes())
    except (OSError, ValueError):
        return 0

    is_future = until > time.time_ns()
    return 0 if is_future else until


def set_aside_file(lake: Lake, path: Path) -> None:
    """Set a damaged file of the lake aside, so that what it held is computed again.

    - A manifest (the list of a table's parts) is written again with the parts that can be read.
    - A part of a table is withdrawn if one of its files is damaged.
    - A file of a row store is renamed, so that its rows count as missing.
    - Any other file stays as it is.
    """
    item = parse_lake_file(lake.storage, path)
    if item is None:
        return

    if item.kind == "manifest":
        lake.table(item.owner).mend()
    elif item.kind == "part":
        _withdraw_damaged_part(lake.table(item.owner), item.part)
    elif item.kind == "rows":
        lake.storage.set_aside(path)


def _withdraw_damaged_part(table: Table, part: str) -> None:
    """Read a part of a table, which withdraws it where one of its files is damaged."""
    with suppress(DamagedPart, MissingPart):
        table.files(part)


def _verify_table(lake: Lake, name: str, since: int) -> list[CheckedFile]:
    """Check the manifest of a table (the list of its parts) and the files of the parts.

    Args:
        lake: The lake.
        name: The name of the table.
        since: A time in nanoseconds since 1970. Only the size is compared of files that have not changed
            since then.

    Returns:
        The manifest and the files, with what is wrong with them. A missing manifest is left out.
    """
    table = lake.table(name)
    part_files: list[CheckedFile] = []
    with session():
        fault = table.damage()
        for part in table.parts():
            part_files.extend(table.checked_files(part, since))

    # The very first run has not written a manifest yet, or was killed before.
    if fault == MANIFEST_GONE:
        return part_files
    return [_build_checked_manifest(table, fault), *part_files]


def _build_checked_manifest(table: Table, fault: str | None) -> CheckedFile:
    """Return the manifest of a table with its size and what is wrong with it."""
    size = table.path.stat().st_size if table.path.is_file() else 0
    return CheckedFile(table.path, size, fault)


def _verify_store(lake: Lake, name: str, since: int) -> Iterator[CheckedFile]:
    """Yield the identity of a row store, what its rows were computed with, and its files of rows."""
    with suppress(FileNotFoundError):  # whoever uses the rows writes it, or `clean` has removed them
        yield _verify_identity(lake, lake.root / name / IDENTITY)
    yield from RowStore(lake.storage, name, (), pl.Schema()).checked_files(since)


def _verify_identity(lake: Lake, path: Path) -> CheckedFile:
    """Check the identity.json of a row store, which says what its rows were computed with.

    The fingerprint of its content has to be the name of its folder.

    Raises:
        FileNotFoundError: There is no such file.
    """
    try:
        content, _ = lake.storage.read(path)
    except FileNotFoundError:
        raise
    except OSError:  # it cannot be read
        return CheckedFile(path, bytes=0, reason=NO_IDENTITY)

    names_its_folder = _compute_fingerprint_or_none(content) == path.parent.name
    return CheckedFile(path, len(content), reason=None if names_its_folder else NO_IDENTITY)


def _compute_fingerprint_or_none(content: bytes) -> str | None:
    """Return the fingerprint of what a JSON file holds; None where it is no JSON."""
    try:
        return fingerprint(json.loads(content))
    except (ValueError, RecursionError):
        return None
