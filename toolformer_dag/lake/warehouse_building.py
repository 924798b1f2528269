"""Building the warehouse: all tables from nothing, or in a copy of the last file the rows of the shards that changed.

A build writes beside the old file and renames the new one over it: readers keep the file they have opened, and no
reader can make a build wait or fail. Builds wait for each other, so the last one has seen every part. Tables are
copies, so the file can be moved. What the tables are, and how rows that follow from others are made, is declared by who
builds (`DeclaredWarehouse`); nothing here knows a table by its name.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import duckdb
import polars as pl

from toolformer_dag.files import StorageError, WriteError, explain_limit_met, replace_whole, seal_record, write_whole
from toolformer_dag.identity import fingerprint, stream_hash
from toolformer_dag.lake.database_files import NO_SPACE, parse_error_reason
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import Lake, Table
from toolformer_dag.lake.warehouse import (
    WarehouseError,
    damage,
    get_seal_path,
    lock_builds,
    read_seal,
    refuse_other_file,
)
from toolformer_dag.lake.warehouse_table import WarehouseTable

SETTINGS = "settings"
"""The key among the versions of sources that stands for SQL, columns and comments."""
MOST_CHANGED_SHARE = 0.5
"""Where more than this share of the shards changed, a file from nothing costs no more than a copy."""
FULL_DISK_WORDS = ("CHECKPOINT", "No space left", "quota exceeded")
"""What errors of other types than NO_SPACE say where a disk is full."""

Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""The records of the parts of each lake table."""
PartFiles = Mapping[str, list[str]]
"""Parquet files by table; an empty one goes last, because DuckDB takes statistics from the first."""


class DeclaredWarehouse(Protocol):
    """What a warehouse holds and how its file is filled, as somebody who knows the tables declares it."""

    @property
    def tables(self) -> Sequence[WarehouseTable]:
        """The tables that are filled with rows of the lake."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Return what determines the file beside the lake's rows: columns, comments, the text of views."""

    @property
    def tables_by_file(self) -> Sequence[WarehouseTable]:
        """Tables with columns, such as costs, that the version of a part leaves out: another file of it is a change."""

    def applied(self, record: Mapping[str, Any]) -> object:
        """Return what the warehouse shows of a part's record, beside its rows and rejections."""

    def record_rows(self, records: Records, versions: Mapping[str, str]) -> Mapping[str, pl.DataFrame]:
        """Return the rows, by table, that follow from records. `versions`: of every source."""

    def fill(self, file: Path, folder: Path, files: PartFiles, shards: Collection[str] | None) -> Mapping[str, int]:
        """Write tables, comments and views into a new file, or replace the rows of `shards` in a copy; table -> rows.

        `folder`: for what does not fit into memory. `files`: for a copy, the files of `shards` alone for tables by
        shard, only of shards that the copy lacks where a table keeps its places, and all files of other tables.
        """


def build(lake: Lake, warehouse: DeclaredWarehouse, database: Path) -> Mapping[str, int]:
    """Bring the warehouse, a DuckDB file for queries, up to date with the tables of the lake.

    If few shards have changed, only their rows are replaced, in a copy of the last file. The file is
    always replaced as a whole, so that the old file stays if anything fails.

    Returns:
        The number of rows by table.

    Raises:
        DamagedPart: A part of a table is damaged.
        WriteError: The file cannot be written.
        WarehouseError: There is another file in its place, or DuckDB or Polars failed.
    """
    refuse_other_file(database)
    try:
        with session(), lock_builds(database), _create_scratch_folder(database) as folder:
            return _build_in_folder(lake, warehouse, database, folder)
    except (duckdb.Error, pl.exceptions.ComputeError) as error:  # Polars raises ComputeError where the disk is full
        raise WarehouseError(f"cannot write {database}: {_explain_error(error)}") from error
    except OSError as error:
        raise WriteError(database, error) from error


def _build_in_folder(lake: Lake, warehouse: DeclaredWarehouse, database: Path, folder: Path) -> Mapping[str, int]:
    """Build the warehouse in a scratch folder, then put it in place.

    Args:
        lake: The lake.
        warehouse: What the warehouse holds.
        database: The warehouse file. The caller holds its lock.
        folder: An empty folder on the same disk.

    Returns:
        The number of rows by table.
    """
    content = _collect_content(lake, warehouse)  # the versions of everything that the file is built from
    sources = _collect_sources(lake, warehouse.tables, content, _read_last_content(database))
    record_files = _write_record_rows(lake, warehouse, content, folder)  # a Parquet file per table

    fresh = folder / "fresh.duckdb"
    updates_copy = sources.changed_shards is not None
    # Start from a copy of the present file. Otherwise all tables are built from nothing.
    if updates_copy:
        shutil.copyfile(database, fresh)

    counts = warehouse.fill(fresh, folder, sources.list_files_with(record_files), sources.changed_shards)
    _put_in_place(fresh, database, content)
    return counts


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a build reads from the lake.

    - `files`: Parquet files by table of the warehouse
    - `changed_shards`: the shards whose rows are replaced in a copy of the last file; None to build from nothing
    """

    files: dict[str, list[str]]
    changed_shards: list[str] | None

    def list_files_with(self, last_files: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the files of each table, with its file of `last_files`, which has every table, at the end."""
        return {name: [*self.files.get(name, ()), last_file] for name, last_file in last_files.items()}


def _collect_sources(
    lake: Lake, tables: Sequence[WarehouseTable], content: "Content", last: "Content | None"
) -> _Sources:
    """Decide which files a build has to read, and whether it can update a copy of the present file.

    Args:
        lake: The lake.
        tables: The tables of the warehouse.
        content: What the new file is built from.
        last: What the present file was built from, or None if it is missing or damaged.
    """
    changed_shards = last.changed_shards(content) if last else None
    if last is None or changed_shards is None:
        return _Sources(_list_all_files(lake, tables), changed_shards=None)

    files = _list_files_of_shards(lake, tables, changed_shards, last.kept_places)
    return _Sources(files, changed_shards)


def _write_record_rows(lake: Lake, warehouse: DeclaredWarehouse, content: "Content", folder: Path) -> dict[str, str]:
    """Write the rows that follow from the records of parts, not from their rows, to Parquet files.

    Args:
        lake: The lake.
        warehouse: What the warehouse holds.
        content: What the file is built from.
        folder: Where the files are written.

    Returns:
        The path of the file of each table. It is empty, with the right columns, if there are no such rows.
    """
    empty_frames = {table.name: table.schema.to_frame() for table in warehouse.tables}
    record_rows = warehouse.record_rows(_collect_records(lake, content), content.sources)

    files = {}
    for name, frame in {**empty_frames, **record_rows}.items():
        files[name] = str(folder / f"{name}.parquet")
        frame.write_parquet(files[name])
    return files


def _put_in_place(fresh: Path, database: Path, content: "Content") -> None:
    """Replace the database by the fresh file, and write its seal: hash, size and what it was built from."""
    seal = {"hash": stream_hash(fresh), "bytes": fresh.stat().st_size, "content": asdict(content)}
    replace_whole(fresh, database)
    write_whole(get_seal_path(database), seal_record(str(database), seal))


@contextmanager
def _create_scratch_folder(database: Path) -> Iterator[Path]:
    """Create an empty scratch folder beside the file, and remove it after the `with` block.

    The caller holds the lock of the file.
    """
    # A killed build may have left the folder, so remove it first.
    folder = database.with_name(f".{database.name}.spilled")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _explain_error(error: Exception) -> str:
    """Explain an error of DuckDB or Polars.

    Returns:
        Its first line and what to do about it, such as "...; free space and run again".
    """
    limit = explain_limit_met(error)
    if limit:
        remedy = f"{limit} and run again"
    elif _is_disk_full(error):
        remedy = "free space and run again"
    else:
        remedy = (
            "a file of the lake is damaged, or this is a bug: run `toolformer-dag verify`, and report the bug if "
            "nothing is found"
        )
    return f"{parse_error_reason(error)}; {remedy}"


def _is_disk_full(error: Exception) -> bool:
    """Return whether DuckDB or Polars failed because a disk is full."""
    return isinstance(error, NO_SPACE) or any(words in str(error) for words in FULL_DISK_WORDS)


@dataclass(frozen=True, slots=True)
class Content:
    """What a file is built from.

    - `sources`: lake table, or SETTINGS -> version of what is copied
    - `kept_places`: shard -> version of its rows in the tables whose rows keep their row numbers in the file
    - `shards`: shard -> fingerprint of its parts in all tables by shard
    """

    sources: Mapping[str, str]
    kept_places: Mapping[str, str]
    shards: Mapping[str, str]

    def changed_shards(self, now: "Content") -> list[str] | None:
        """List the shards whose rows differ between the present file (self) and the lake.

        Args:
            now: What a file would be built from now.

        Returns:
            The shards, or None if the file has to be built from nothing: it cannot be updated, or more than
            MOST_CHANGED_SHARE of the shards differ.
        """
        if not self._can_be_updated(now):
            return None

        shards = dict.fromkeys([*self.shards, *now.shards])  # each once, in order
        changed = [shard for shard in shards if self.shards.get(shard) != now.shards.get(shard)]

        if len(changed) > MOST_CHANGED_SHARE * len(now.shards):
            return None
        return changed

    def _can_be_updated(self, now: "Content") -> bool:
        """Return whether columns and views are the same, and all rows stay that others point to by row number."""
        same_settings = self.sources[SETTINGS] == now.sources[SETTINGS]
        places_stay = self.kept_places.items() <= now.kept_places.items()
        return same_settings and places_stay


def _collect_content(lake: Lake, warehouse: DeclaredWarehouse) -> Content:
    """Collect the versions of everything that the warehouse would be built from now."""
    tables_by_shard = [table for table in warehouse.tables if table.by_shard]
    parts = list(_iter_source_parts(lake, tables_by_shard))
    return Content(
        shards=_compute_versions_of_shards(lake, warehouse, parts),
        kept_places=_collect_kept_places(parts),
        sources=_compute_source_versions(lake, warehouse),
    )


def _compute_versions_of_shards(
    lake: Lake, warehouse: DeclaredWarehouse, parts: Sequence["SourcePart"]
) -> dict[str, str]:
    """Compute a version of each shard, which changes whenever the warehouse would show something else of it.

    The version of a part's data leaves some columns out, such as costs. For tables that show these columns
    (`tables_by_file`), the hashes of the files count too.

    Args:
        lake: The lake.
        warehouse: What the warehouse holds.
        parts: The parts of all tables that have one part per shard.

    Returns:
        A fingerprint for each shard.
    """
    versions: dict[str, list[object]] = {}
    for source in parts:
        shard = source.part
        shard_version = _compute_shard_version(warehouse, source.pointer)
        versions.setdefault(shard, []).append([source.name, shard_version])

    for source in _iter_source_parts(lake, warehouse.tables_by_file):
        shard = source.part
        hashes = _list_file_hashes(source.pointer)
        versions.setdefault(shard, []).append([source.name, hashes])

    return {shard: fingerprint(shard_versions) for shard, shard_versions in versions.items()}


def _collect_kept_places(parts: Sequence["SourcePart"]) -> dict[str, str]:
    """Return the version of each part whose rows keep their row numbers in the file; "" for a damaged part."""
    versions = {}
    for source in parts:
        if source.table.keeps_places:
            versions[source.part] = source.pointer.data_version if source.pointer else ""
    return versions


def _read_last_content(database: Path) -> Content | None:
    """Read what the present file was built from.

    Returns:
        None if the file is missing or damaged, or if an earlier release built it.
    """
    seal = read_seal(database)
    if seal is None or not database.is_file() or stream_hash(database) != seal["hash"]:
        return None

    try:
        return Content(**seal["content"])
    except TypeError:
        return None


def explain_out_of_date(lake: Lake, warehouse: DeclaredWarehouse, database: Path) -> list[str]:
    """Explain why the warehouse file is out of date.

    Returns:
        One line per reason, none if the file is up to date.
    """
    if not database.is_file():
        return [f"{database} is gone"]

    reason = damage(database)
    if reason:
        return [f"{database} {reason}"]

    seal = read_seal(database)
    copied = seal["content"].get("sources", {}) if seal else {}
    return _describe_changed_sources(copied, _compute_source_versions(lake, warehouse))


def _describe_changed_sources(copied: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the lake tables that have changed since they were copied into the file.

    Args:
        copied: The version of each table in the file.
        now: The version of each table in the lake.

    Returns:
        One line per table, sorted by name.
    """
    lines = []
    for name in sorted({*copied, *now}):
        if copied.get(name) != now.get(name):
            title = "columns, comments or views" if name == SETTINGS else name
            lines.append(f"{title} changed since it was copied")
    return lines


def version(lake: Lake, warehouse: DeclaredWarehouse) -> str:
    """Return the version of the file that `build` would write now."""
    return fingerprint(_compute_source_versions(lake, warehouse))


def _compute_source_versions(lake: Lake, warehouse: DeclaredWarehouse) -> dict[str, str]:
    """Compute a version of each lake table that is copied into the warehouse.

    The version of a part's data leaves some columns out, such as costs. For tables that show these columns
    (`tables_by_file`), the hashes of the files count too.

    Returns:
        The versions by table name. SETTINGS has the version of columns, comments and views.
    """
    names = [name for table in warehouse.tables for name in table.sources]
    versions = {SETTINGS: fingerprint(warehouse.settings)}

    for name in names:
        versions[name] = _compute_table_version(lake.table(name), warehouse)

    for source in _iter_source_parts(lake, warehouse.tables_by_file):
        version_so_far = versions[source.name]
        versions[source.name] = fingerprint([version_so_far, source.part, _list_file_hashes(source.pointer)])
    return versions


class SourcePart(NamedTuple):
    """A part of a lake table that a warehouse table is filled from. `pointer`: None where the part is damaged."""

    table: WarehouseTable
    name: str
    part: str
    pointer: Pointer | None


def _iter_source_parts(lake: Lake, tables: Sequence[WarehouseTable]) -> Iterator[SourcePart]:
    """Yield each part of the lake tables that these tables are filled from."""
    for table in tables:
        for name in table.sources:
            for part, pointer in _read_pointers(lake.table(name)).items():
                yield SourcePart(table, name, part, pointer)


def _compute_table_version(table: Table, warehouse: DeclaredWarehouse) -> str:
    """Compute a version of a lake table, which changes whenever the warehouse would show something else of it.

    It covers settings, rows, rejections and thresholds. It is remembered until the table changes.
    """

    def compute_version() -> str:
        pointers = _read_pointers(table)
        settings_of_parts = (pointer.record["settings"] for pointer in pointers.values() if pointer)  # None: damaged
        settings = next(settings_of_parts, None)  # of the first part: all are equal
        part_versions = {part: _compute_part_version(warehouse, pointer) for part, pointer in pointers.items()}
        return fingerprint([settings, part_versions])

    return table.remembered("version of what is copied", compute_version)


def _read_pointers(table: Table) -> dict[str, Pointer | None]:
    """Return the pointer of every part; None for a damaged one."""
    pointers: dict[str, Pointer | None] = dict.fromkeys(table.parts())
    for part in pointers:
        with suppress(StorageError):
            pointers[part] = table.pointer(part)
    return pointers


def _compute_part_version(warehouse: DeclaredWarehouse, pointer: Pointer | None) -> list[object] | None:
    """Return what changes when the rows, the rejections or what is shown of a part change; None for a damaged part."""
    if pointer is None:
        return None
    return [pointer.data_version, pointer.record.get("rejections", []), warehouse.applied(pointer.record)]


def _compute_shard_version(warehouse: DeclaredWarehouse, pointer: Pointer | None) -> list[object] | None:
    """Return the version of a shard's part; without rows and rejections, it is the version of its data alone."""
    if pointer and not (pointer.rows or pointer.record.get("rejections")):
        return [pointer.data_version]
    return _compute_part_version(warehouse, pointer)


def _list_file_hashes(pointer: Pointer | None) -> list[str]:
    """Return the hashes of a part's files; none for a damaged part."""
    return [file.hash for file in pointer.files] if pointer else []


def _list_all_files(lake: Lake, tables: Sequence[WarehouseTable]) -> dict[str, list[str]]:
    """Return the Parquet files of all parts, by table."""
    files: dict[str, list[str]] = {table.name: [] for table in tables}
    for table in tables:
        for name in table.sources:
            files[table.name] += lake.table(name).list_all_files()
    return files


def _list_files_of_shards(
    lake: Lake, tables: Sequence[WarehouseTable], shards: Collection[str], copied_shards: Collection[str]
) -> dict[str, list[str]]:
    """List the Parquet files of some shards, by table of the warehouse.

    Args:
        lake: The lake.
        tables: The tables of the warehouse.
        shards: The shards to read.
        copied_shards: Shards that the copy already has. They are left out for tables whose rows keep their
            row numbers (`keeps_places`).
    """
    files: dict[str, list[str]] = {}
    for table in tables:
        shards_to_read = set(shards)
        if table.keeps_places:
            shards_to_read.difference_update(copied_shards)
        files[table.name] = _list_files_of_table(lake, table, shards_to_read)
    return files


def _list_files_of_table(lake: Lake, table: WarehouseTable, shards: Collection[str]) -> list[str]:
    """List the Parquet files that a table of the warehouse reads for some shards.

    If the table has no part per shard, all of its files are listed.
    """
    files: list[str] = []
    for name in table.sources:
        source = lake.table(name)
        parts = [part for part in source.parts() if part in shards or not table.by_shard]
        files += source.list_all_files(parts)
    return files


def _collect_records(lake: Lake, content: Content) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of all undamaged parts, by lake table."""
    records: dict[str, list[Mapping[str, Any]]] = {}
    for name in content.sources:
        if name != SETTINGS:
            records[name] = [pointer.record for pointer in _read_pointers(lake.table(name)).values() if pointer]
    return records
