"""Finding what is damaged in the lake, a flipped bit, a truncated or a missing file, and setting it aside."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import polars as pl

from toolformer_dag.files import write_file_atomically
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.inventory import LakeFile, iter_lake_files, parse_lake_file
from toolformer_dag.lake.manifest import MANIFEST_GONE
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.row_store import IDENTITY_FILE_NAME, RowStore
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import DamagedPart, Lake, MissingPart, Table

CLOCK_LAG_NS = 10**9
"""Nanoseconds by which a file's time of change may lag behind the clock."""
LOCK_SUFFIX = ".lock"
"""How the name of a lock ends."""
WRONG_IDENTITY_REASON = "does not say what its folder is named after"
"""The reason for an identity.json whose fingerprint is not the name of its folder."""
VERIFIED_FILE_NAME = ".verified"
"""The file of the lake that holds up to when it was verified, in nanoseconds since 1970."""


def iter_checked_files(lake: Lake, changed_since_ns: int = 0) -> Iterator[CheckedFile]:
    """Check all manifests, all files of tables, and all files of row stores (rows that are computed once).

    The warehouse, the indexes of tools and shard files are not checked.

    Args:
        lake: The lake.
        changed_since_ns: A time in nanoseconds since 1970. If a file has not changed since then, only its size is
            compared. 0 compares the hash of every file.

    Yields:
        Each file with what is wrong with it or None. If `changed_since_ns` is not 0, undamaged Parquet files of
        tables are left out.

    Raises:
        ReadError: A file cannot be read.
    """
    # A few files of each table are enough to find the names of all tables and row stores.
    lake_files = list(iter_lake_files(lake.storage, include_all_parts=False))
    store_names = {file.owner_name for file in lake_files if _is_row_store_file(file)}
    table_names = {file.owner_name for file in lake_files if file.kind in ("manifest", "part")}

    for store_name in sorted(store_names):
        yield from _iter_checked_store_files(lake, store_name, changed_since_ns)
    for table_name in sorted(table_names):
        yield from _list_checked_table_files(lake, table_name, changed_since_ns)


def _is_row_store_file(lake_file: LakeFile) -> bool:
    """Return whether a file belongs to a row store (rows that are computed once).

    Lock files do not count, because one may be left alone in the folder of a store that was removed.
    """
    is_lock = lake_file.path.suffix == LOCK_SUFFIX
    return lake_file.kind == "rows" and not is_lock


def set_aside_damaged_files(lake: Lake) -> list[CheckedFile]:
    """Set aside the files that were damaged since the last call, so that they are computed again.

    Nothing is checked in an object store, because there readers compare the hash of what they fetch.

    Returns:
        The damaged files. Always empty in an object store.
    """
    if isinstance(lake.storage, ObjectStorage) or not lake.root.is_dir():
        return []

    # The time of change of a file may lag behind the clock, so the next call looks back a little further.
    verified_until_ns = time.time_ns() - CLOCK_LAG_NS

    # This file has the time of the last call.
    time_path = lake.root / VERIFIED_FILE_NAME
    damaged_files = _list_damaged_files(lake, changed_since_ns=_read_verified_until_ns(time_path))
    for damaged_file in damaged_files:
        set_aside_file(lake, damaged_file.path)

    # Written last, so that a killed call is repeated.
    write_file_atomically(time_path, str(verified_until_ns).encode())
    return damaged_files


def _list_damaged_files(lake: Lake, changed_since_ns: int) -> list[CheckedFile]:
    """Return the files that are damaged and still exist.

    Args:
        lake: The lake.
        changed_since_ns: A time in nanoseconds since 1970. If a file has not changed since then, only its size is
            compared.
    """
    damaged_files = []
    for checked_file in iter_checked_files(lake, changed_since_ns):
        if checked_file.reason is not None and checked_file.path.exists():
            damaged_files.append(checked_file)
    return damaged_files


def _read_verified_until_ns(time_path: Path) -> int:
    """Read until when the lake was verified, in nanoseconds since 1970.

    Args:
        time_path: The file with the time.

    Returns:
        The time. 0 if there is none, or if it is in the future because a clock was set back.
    """
    try:
        verified_until_ns = int(time_path.read_bytes())
    except (OSError, ValueError):
        return 0

    is_in_future = verified_until_ns > time.time_ns()
    return 0 if is_in_future else verified_until_ns


def set_aside_file(lake: Lake, path: Path) -> None:
    """Set a damaged file of the lake aside, so that what it held is computed again.

    - A manifest (the list of a table's parts) is written again with the parts that can be read.
    - A part of a table is withdrawn if one of its files is damaged.
    - A file of a row store is renamed, so that its rows count as missing.
    - Any other file stays as it is.
    """
    lake_file = parse_lake_file(lake.storage, path)
    if lake_file is None:
        return

    if lake_file.kind == "manifest":
        lake.get_table(lake_file.owner_name).repair_manifest()
    elif lake_file.kind == "part":
        _withdraw_damaged_part(lake.get_table(lake_file.owner_name), lake_file.part_name)
    elif lake_file.kind == "rows":
        lake.storage.set_aside(path)


def _withdraw_damaged_part(table: Table, part_name: str) -> None:
    """Withdraw a part of a table if one of its files is damaged. Listing the files checks them and does that."""
    with suppress(DamagedPart, MissingPart):
        table.list_part_files(part_name)


def _list_checked_table_files(lake: Lake, table_name: str, changed_since_ns: int) -> list[CheckedFile]:
    """Check the manifest of a table (the list of its parts) and the files of the parts.

    Args:
        lake: The lake.
        table_name: The name of the table.
        changed_since_ns: A time in nanoseconds since 1970. If a file has not changed since then, only its size is
            compared.

    Returns:
        The manifest and the files, with what is wrong with them. A missing manifest is left out.
    """
    table = lake.get_table(table_name)
    part_files: list[CheckedFile] = []
    with enter_session():
        manifest_damage = table.find_manifest_damage()
        for part_name in table.list_part_names():
            part_files.extend(table.iter_checked_files(part_name, changed_since_ns))

    # The very first run has not written a manifest yet, or was killed before it did.
    if manifest_damage == MANIFEST_GONE:
        return part_files
    return [_build_checked_manifest(table, manifest_damage), *part_files]


def _build_checked_manifest(table: Table, manifest_damage: str | None) -> CheckedFile:
    """Return the manifest of a table with its size and what is wrong with it."""
    path = table.manifest_path
    size_bytes = path.stat().st_size if path.is_file() else 0
    return CheckedFile(path, size_bytes, manifest_damage)


def _iter_checked_store_files(lake: Lake, store_name: str, changed_since_ns: int) -> Iterator[CheckedFile]:
    """Check the files of a row store: its identity.json (what its rows were computed with) and its files of rows.

    Args:
        lake: The lake.
        store_name: The path of the row store in the lake.
        changed_since_ns: A time in nanoseconds since 1970. If a file of rows has not changed since then, only its size
            is compared.

    Yields:
        Each file with what is wrong with it or None. A missing identity.json is left out.
    """
    with suppress(FileNotFoundError):  # not written yet, or removed by `clean`
        yield _check_identity_file(lake, lake.root / store_name / IDENTITY_FILE_NAME)

    row_store = RowStore(lake.storage, store_name, (), pl.Schema())
    yield from row_store.iter_checked_files(changed_since_ns)


def _check_identity_file(lake: Lake, identity_path: Path) -> CheckedFile:
    """Check the identity.json of a row store, which says what its rows were computed with.

    The fingerprint of its content has to be the name of its folder.

    Raises:
        FileNotFoundError: There is no such file.
    """
    try:
        content, _ = lake.storage.read(identity_path)
    except FileNotFoundError:
        raise
    except OSError:  # it cannot be read
        return CheckedFile(identity_path, size_bytes=0, reason=WRONG_IDENTITY_REASON)

    is_undamaged = _compute_fingerprint_or_none(content) == identity_path.parent.name
    reason = None if is_undamaged else WRONG_IDENTITY_REASON
    return CheckedFile(identity_path, len(content), reason)


def _compute_fingerprint_or_none(json_content: bytes) -> str | None:
    """Return the fingerprint of the value in a JSON file, or None if the content is not JSON."""
    try:
        return fingerprint(json.loads(json_content))
    except (ValueError, RecursionError):
        return None
