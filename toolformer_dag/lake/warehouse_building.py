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

from toolformer_dag.files import (
    StorageError,
    WriteError,
    explain_exceeded_limit,
    replace_file,
    seal_record,
    write_file_atomically,
)
from toolformer_dag.identity import compute_file_content_hash, fingerprint
from toolformer_dag.lake.database_files import FULL_DISK_ERRORS, parse_error_reason
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.table import Lake, Table
from toolformer_dag.lake.warehouse import (
    WarehouseError,
    find_warehouse_damage,
    get_seal_path,
    lock_builds,
    read_seal,
    refuse_foreign_file,
)
from toolformer_dag.lake.warehouse_table import WarehouseTable

SETTINGS_KEY = "settings"
"""The key among the versions of sources that stands for SQL, columns and comments."""
MAX_CHANGED_SHARE = 0.5
"""Where more than this share of the shards changed, a file from nothing costs no more than a copy."""
FULL_DISK_WORDS = ("CHECKPOINT", "No space left", "quota exceeded")
"""Words in errors of other types than FULL_DISK_ERRORS that mean that a disk is full."""

RecordsByTable = Mapping[str, Sequence[Mapping[str, Any]]]
"""The records of the parts of each lake table."""
FilesByTable = Mapping[str, list[str]]
"""Parquet files by table; an empty one goes last, because DuckDB takes statistics from the first."""


class DeclaredWarehouse(Protocol):
    """What a warehouse (the DuckDB file for queries) holds, and how it is filled.

    Implemented by a class that knows the tables. The code of this module knows none of them by name.
    """

    @property
    def tables(self) -> Sequence[WarehouseTable]:
        """The tables that are filled with rows of the lake."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Everything that determines the file apart from the rows: columns, comments, the SQL of views."""

    @property
    def tables_versioned_by_file(self) -> Sequence[WarehouseTable]:
        """Tables with columns, such as costs, that the version of a part leaves out.

        A part of such a table counts as changed if the hashes of its files have changed.
        """

    def get_applied_settings(self, record: Mapping[str, Any]) -> object:
        """Return what the warehouse shows of the record of a part, apart from its rows and rejections."""

    def build_record_rows(
        self, records_by_table: RecordsByTable, versions_by_source: Mapping[str, str]
    ) -> Mapping[str, pl.DataFrame]:
        """Compute the rows of those tables that follow from the records of parts, not from their rows.

        For example, the record of a part says how many texts were rejected, and which settings it was made with.

        Args:
            records_by_table: The records of the parts, by the name of the lake table.
            versions_by_source: The version of each lake table. SETTINGS_KEY has the version of the settings.

        Returns:
            The rows, by the name of the table of the warehouse.
        """

    def fill_database(
        self,
        database_path: Path,
        spill_folder: Path,
        files_by_table: FilesByTable,
        changed_shards: Collection[str] | None,
    ) -> Mapping[str, int]:
        """Fill a new file with tables, comments and views, or replace the rows of some shards in a copy.

        Args:
            database_path: The file: missing, or a copy of the last warehouse.
            spill_folder: Where DuckDB writes what does not fit into memory.
            files_by_table: The Parquet files to read, by the name of the table. For a copy, these are only the
                files of changed shards, if the table has one part per shard. For a table that keeps its row
                numbers, they are only the files of shards that the copy lacks.
            changed_shards: The shards whose rows are replaced in the copy. None to build everything from nothing.

        Returns:
            The number of rows by table.
        """


def build_warehouse(lake: Lake, declared_warehouse: DeclaredWarehouse, database_path: Path) -> Mapping[str, int]:
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
    refuse_foreign_file(database_path)
    try:
        with enter_session(), lock_builds(database_path), _create_scratch_folder(database_path) as folder:
            return _build_in_folder(lake, declared_warehouse, database_path, folder)
    except (duckdb.Error, pl.exceptions.ComputeError) as error:  # Polars raises ComputeError where the disk is full
        raise WarehouseError(f"cannot write {database_path}: {_explain_error(error)}") from error
    except OSError as error:
        raise WriteError(database_path, error) from error


def _build_in_folder(
    lake: Lake, declared_warehouse: DeclaredWarehouse, database_path: Path, scratch_folder: Path
) -> Mapping[str, int]:
    """Build the warehouse in a scratch folder, then put it in place.

    Args:
        lake: The lake.
        declared_warehouse: What the warehouse holds.
        database_path: The warehouse file. The caller holds its lock.
        scratch_folder: An empty folder on the same disk.

    Returns:
        The number of rows by table.
    """
    # The versions of everything that the file is built from.
    new_content = _collect_content(lake, declared_warehouse)
    last_content = _read_last_content(database_path)

    sources = _collect_sources(lake, declared_warehouse.tables, new_content, last_content)
    record_file_by_table = _write_record_rows(lake, declared_warehouse, new_content, scratch_folder)
    files_by_table = sources.list_files_by_table(record_file_by_table)

    # Start from a copy of the present file, if only some shards have to be replaced.
    new_database_path = scratch_folder / "fresh.duckdb"
    if sources.changed_shards is not None:
        shutil.copyfile(database_path, new_database_path)

    row_count_by_table = declared_warehouse.fill_database(
        new_database_path, scratch_folder, files_by_table, sources.changed_shards
    )
    _replace_and_seal(new_database_path, database_path, new_content)
    return row_count_by_table


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a build reads from the lake.

    Attributes:
        files_by_table: The Parquet files, by the name of the table of the warehouse.
        changed_shards: The shards whose rows are replaced in a copy of the last file. None to build from nothing.
    """

    files_by_table: dict[str, list[str]]
    changed_shards: list[str] | None

    def list_files_by_table(self, last_file_by_table: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the files of each table, with one more file at the end.

        Args:
            last_file_by_table: The file that comes last, for every table of the warehouse.
        """
        files_by_table = {}
        for table_name, last_file in last_file_by_table.items():
            files_by_table[table_name] = [*self.files_by_table.get(table_name, ()), last_file]
        return files_by_table


def _collect_sources(
    lake: Lake, tables: Sequence[WarehouseTable], new_content: "Content", last_content: "Content | None"
) -> _Sources:
    """Decide which files a build has to read, and whether it can update a copy of the present file.

    Args:
        lake: The lake.
        tables: The tables of the warehouse.
        new_content: What the new file is built from.
        last_content: What the present file was built from, or None if it is missing or damaged.
    """
    if last_content is None:
        return _Sources(_list_all_files(lake, tables), changed_shards=None)

    changed_shards = last_content.find_changed_shards(new_content)
    if changed_shards is None:  # too much has changed to update a copy
        return _Sources(_list_all_files(lake, tables), changed_shards=None)

    # In tables whose rows keep their row numbers, because other tables refer to these, the copy already has the shards
    # of `kept_places`. They are not read again.
    files_by_table = _list_files_of_shards(lake, tables, changed_shards, last_content.kept_places)
    return _Sources(files_by_table, changed_shards)


def _write_record_rows(
    lake: Lake, declared_warehouse: DeclaredWarehouse, content: "Content", scratch_folder: Path
) -> dict[str, str]:
    """Write the rows that follow from the records of parts, not from their rows, to Parquet files.

    For example, the record of a part says how many texts were rejected, and which settings it was made with.

    Args:
        lake: The lake.
        declared_warehouse: What the warehouse holds.
        content: What the file is built from.
        scratch_folder: Where the files are written.

    Returns:
        The path of a file for every table of the warehouse. Most of these files have the right columns and no rows.
    """
    records_by_table = _collect_records(lake, content)
    rows_by_table = {table.name: table.schema.to_frame() for table in declared_warehouse.tables}  # empty frames
    rows_by_table.update(declared_warehouse.build_record_rows(records_by_table, content.sources))

    path_by_table = {}
    for table_name, rows in rows_by_table.items():
        path_by_table[table_name] = str(scratch_folder / f"{table_name}.parquet")
        rows.write_parquet(path_by_table[table_name])
    return path_by_table


def _replace_and_seal(fresh_path: Path, database_path: Path, content: "Content") -> None:
    """Replace the warehouse by a new file, and write its seal: its hash, its size and what it was built from."""
    seal = {
        "hash": compute_file_content_hash(fresh_path),
        "bytes": fresh_path.stat().st_size,
        "content": asdict(content),
    }
    replace_file(fresh_path, database_path)
    write_file_atomically(get_seal_path(database_path), seal_record(str(database_path), seal))


@contextmanager
def _create_scratch_folder(database_path: Path) -> Iterator[Path]:
    """Create an empty scratch folder beside the file, and remove it after the `with` block.

    The caller holds the lock of the file.

    Yields:
        The path of the folder.
    """
    scratch_folder = database_path.with_name(f".{database_path.name}.spilled")
    shutil.rmtree(scratch_folder, ignore_errors=True)  # a killed build may have left it
    scratch_folder.mkdir()

    try:
        yield scratch_folder
    finally:
        shutil.rmtree(scratch_folder, ignore_errors=True)


def _explain_error(error: Exception) -> str:
    """Explain an error of DuckDB or Polars.

    Returns:
        Its first line and what to do about it, such as "...; free space and run again".
    """
    limit_remedy = explain_exceeded_limit(error)
    if limit_remedy:
        remedy = f"{limit_remedy} and run again"
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
    if isinstance(error, FULL_DISK_ERRORS):
        return True
    return any(words in str(error) for words in FULL_DISK_WORDS)


@dataclass(frozen=True, slots=True)
class Content:
    """The versions of everything that a warehouse file is built from. Stored in the seal beside the file.

    Attributes:
        sources: The version of each lake table that is copied, by name. SETTINGS_KEY has the version of columns,
            comments and views.
        kept_places: For tables whose rows keep their row numbers in the file: the version of the rows of each shard.
        shards: For each shard (slice of the corpus), a fingerprint of its parts in all tables that have one part per
            shard.
    """

    sources: Mapping[str, str]
    kept_places: Mapping[str, str]
    shards: Mapping[str, str]

    def find_changed_shards(self, new_content: "Content") -> list[str] | None:
        """List the shards whose rows differ between the present file (self) and the lake.

        Args:
            new_content: What a file would be built from now.

        Returns:
            The shards, or None if the file has to be built from nothing: it cannot be updated, or more than
            MAX_CHANGED_SHARE of the shards differ.
        """
        if not self._can_be_updated_to(new_content):
            return None

        all_shards = dict.fromkeys([*self.shards, *new_content.shards])  # each once, in order
        changed_shards = [shard for shard in all_shards if self.shards.get(shard) != new_content.shards.get(shard)]

        if len(changed_shards) > MAX_CHANGED_SHARE * len(new_content.shards):
            return None
        return changed_shards

    def _can_be_updated_to(self, new_content: "Content") -> bool:
        """Return whether a copy of the present file (self) can be updated to new content.

        It can if columns and views are the same, and if all rows stay that other rows refer to by row number.
        """
        has_same_settings = self.sources[SETTINGS_KEY] == new_content.sources[SETTINGS_KEY]
        keeps_all_places = self.kept_places.items() <= new_content.kept_places.items()
        return has_same_settings and keeps_all_places


def _collect_content(lake: Lake, declared_warehouse: DeclaredWarehouse) -> Content:
    """Collect the versions of everything that the warehouse would be built from now."""
    sharded_tables = [table for table in declared_warehouse.tables if table.has_part_per_shard]
    source_parts = list(_iter_source_parts(lake, sharded_tables))
    return Content(
        shards=_compute_versions_by_shard(lake, declared_warehouse, source_parts),
        kept_places=_collect_kept_place_versions(source_parts),
        sources=_compute_source_versions(lake, declared_warehouse),
    )


def _compute_versions_by_shard(
    lake: Lake, declared_warehouse: DeclaredWarehouse, source_parts: Sequence["SourcePart"]
) -> dict[str, str]:
    """Compute a version of each shard (a file of the corpus), to find out later which shards of the warehouse changed.

    A part is what a lake table has of one shard. The version of a shard combines the versions of its parts in all
    tables.

    Args:
        lake: The lake.
        declared_warehouse: What the warehouse holds.
        source_parts: The parts of all tables that have one part per shard.

    Returns:
        A fingerprint for each shard.
    """
    versions_by_shard: dict[str, list[object]] = {}
    for source_part in source_parts:
        shard_versions = versions_by_shard.setdefault(source_part.part_name, [])
        data_version = _compute_shard_version(declared_warehouse, source_part.pointer)
        shard_versions.append([source_part.lake_table_name, data_version])

    # A data version leaves out columns such as costs. For tables that show these, the hashes of the files count too.
    for source_part in _iter_source_parts(lake, declared_warehouse.tables_versioned_by_file):
        shard_versions = versions_by_shard.setdefault(source_part.part_name, [])
        file_hashes = _list_file_hashes(source_part.pointer)
        shard_versions.append([source_part.lake_table_name, file_hashes])

    return {shard: fingerprint(shard_versions) for shard, shard_versions in versions_by_shard.items()}


def _collect_kept_place_versions(source_parts: Sequence["SourcePart"]) -> dict[str, str]:
    """Return the version of each part whose rows keep their row numbers in the file, or "" if it is damaged."""
    version_by_part = {}
    for source_part in source_parts:
        if source_part.warehouse_table.keeps_row_numbers:
            pointer = source_part.pointer
            version_by_part[source_part.part_name] = pointer.data_version if pointer else ""
    return version_by_part


def _read_last_content(database_path: Path) -> Content | None:
    """Read what the present warehouse file was built from, as its seal (a small file beside it) says.

    Returns:
        None if the file is missing or damaged, or if an earlier release built it.
    """
    seal = read_seal(database_path)
    if seal is None or not database_path.is_file():
        return None

    is_damaged = compute_file_content_hash(database_path) != seal["hash"]
    if is_damaged:
        return None

    try:
        return Content(**seal["content"])
    except TypeError:  # an earlier release sealed other fields
        return None


def explain_out_of_date(lake: Lake, declared_warehouse: DeclaredWarehouse, database_path: Path) -> list[str]:
    """Explain why the warehouse file is out of date.

    Returns:
        One line per reason, none if the file is up to date.
    """
    if not database_path.is_file():
        return [f"{database_path} is gone"]

    damage = find_warehouse_damage(database_path)
    if damage:
        return [f"{database_path} {damage}"]

    copied_versions: Mapping[str, str] = {}
    seal = read_seal(database_path)
    if seal:
        copied_versions = seal["content"].get("sources", {})
    return _describe_changed_sources(copied_versions, _compute_source_versions(lake, declared_warehouse))


def _describe_changed_sources(copied_versions: Mapping[str, str], current_versions: Mapping[str, str]) -> list[str]:
    """List the lake tables that have changed since they were copied into the file.

    Args:
        copied_versions: The version of each table in the file.
        current_versions: The version of each table in the lake.

    Returns:
        One line per table, sorted by name.
    """
    lines = []
    for name in sorted({*copied_versions, *current_versions}):
        if copied_versions.get(name) != current_versions.get(name):
            title = "columns, comments or views" if name == SETTINGS_KEY else name
            lines.append(f"{title} changed since it was copied")
    return lines


def compute_warehouse_version(lake: Lake, declared_warehouse: DeclaredWarehouse) -> str:
    """Return a version of the warehouse file that `build_warehouse` would write now."""
    return fingerprint(_compute_source_versions(lake, declared_warehouse))


def _compute_source_versions(lake: Lake, declared_warehouse: DeclaredWarehouse) -> dict[str, str]:
    """Compute a version of each lake table that is copied into the warehouse, to find out later which tables changed.

    Returns:
        The versions by table name. SETTINGS_KEY has the version of columns, comments and views.
    """
    version_by_source = {SETTINGS_KEY: fingerprint(declared_warehouse.settings)}
    for table in declared_warehouse.tables:
        for source_name in table.source_names:
            lake_table = lake.get_table(source_name)
            version_by_source[source_name] = _compute_table_version(lake_table, declared_warehouse)

    # A data version leaves out columns such as costs. For tables that show these, the file hashes of each part are
    # added to the version of the table, one part after the other.
    for source_part in _iter_source_parts(lake, declared_warehouse.tables_versioned_by_file):
        source_name = source_part.lake_table_name
        file_hashes = _list_file_hashes(source_part.pointer)
        version_by_source[source_name] = fingerprint(
            [version_by_source[source_name], source_part.part_name, file_hashes]
        )
    return version_by_source


class SourcePart(NamedTuple):
    """A part of a lake table that a table of the warehouse is filled from.

    Attributes:
        warehouse_table: The table of the warehouse.
        lake_table_name: The name of the lake table.
        part_name: The name of the part, mostly a shard.
        pointer: The files, version and record of the part. None if the part is damaged.
    """

    warehouse_table: WarehouseTable
    lake_table_name: str
    part_name: str
    pointer: Pointer | None


def _iter_source_parts(lake: Lake, tables: Sequence[WarehouseTable]) -> Iterator[SourcePart]:
    """Yield each part of the lake tables that these tables of the warehouse are filled from."""
    for table in tables:
        for source_name in table.source_names:
            pointers_by_part = _read_pointers_by_part(lake.get_table(source_name))
            for part_name, pointer in pointers_by_part.items():
                yield SourcePart(table, source_name, part_name, pointer)


def _compute_table_version(lake_table: Table, declared_warehouse: DeclaredWarehouse) -> str:
    """Compute a version of a lake table, to find out later whether the warehouse would show something else of it.

    It covers settings, rows, rejections and thresholds. It is remembered until the table changes.
    """

    def compute_version() -> str:
        """Compute a fingerprint of the settings and of each part (mostly one per shard, a file of the corpus)."""
        pointers_by_part = _read_pointers_by_part(lake_table)  # None for a damaged part
        version_by_part = {
            part_name: _compute_part_version(declared_warehouse, pointer)
            for part_name, pointer in pointers_by_part.items()
        }

        # All parts have equal settings, so those of the first undamaged part are enough.
        part_settings = (pointer.record["settings"] for pointer in pointers_by_part.values() if pointer)
        return fingerprint([next(part_settings, None), version_by_part])

    return lake_table.get_or_compute_answer("version of what is copied", compute_version)


def _read_pointers_by_part(lake_table: Table) -> dict[str, Pointer | None]:
    """Return what each part of a table consists of (files, version, record), or None for a damaged part."""
    pointers_by_part: dict[str, Pointer | None] = dict.fromkeys(lake_table.list_part_names())
    for part_name in pointers_by_part:
        with suppress(StorageError):
            pointers_by_part[part_name] = lake_table.read_pointer(part_name)
    return pointers_by_part


def _compute_part_version(declared_warehouse: DeclaredWarehouse, pointer: Pointer | None) -> list[object] | None:
    """Return a version of a part of a lake table, such as its rows of one shard (a file of the corpus).

    It changes if the rows, the rejections or the shown settings of the part change.

    Returns:
        A list for a fingerprint, or None for a damaged part.
    """
    if pointer is None:
        return None
    return [
        pointer.data_version,
        pointer.record.get("rejections", []),
        declared_warehouse.get_applied_settings(pointer.record),
    ]


def _compute_shard_version(declared_warehouse: DeclaredWarehouse, pointer: Pointer | None) -> list[object] | None:
    """Return a version of a shard's part of a table, which changes if the warehouse would show something else of it.

    A part without rows and rejections has nothing to show, so that its settings do not count.

    Returns:
        A list for a fingerprint, or None for a damaged part.
    """
    if pointer is not None:
        is_empty = pointer.row_count == 0 and not pointer.record.get("rejections")
        if is_empty:
            return [pointer.data_version]
    return _compute_part_version(declared_warehouse, pointer)


def _list_file_hashes(pointer: Pointer | None) -> list[str]:
    """Return the hashes of the files of a part, or [] for a damaged part."""
    return [file.hash for file in pointer.files] if pointer else []


def _list_all_files(lake: Lake, tables: Sequence[WarehouseTable]) -> dict[str, list[str]]:
    """Return the Parquet files of all parts, by the name of the table of the warehouse."""
    files_by_table: dict[str, list[str]] = {table.name: [] for table in tables}
    for table in tables:
        for source_name in table.source_names:
            files_by_table[table.name] += lake.get_table(source_name).list_all_files()
    return files_by_table


def _list_files_of_shards(
    lake: Lake, tables: Sequence[WarehouseTable], shards: Collection[str], copied_shards: Collection[str]
) -> dict[str, list[str]]:
    """List the Parquet files that have to be read to replace some shards (files of the corpus) in the warehouse.

    Args:
        lake: The lake.
        tables: The tables of the warehouse.
        shards: The shards to read.
        copied_shards: Shards that the copy of the present warehouse has already. Tables whose rows keep their row
            numbers (`keeps_row_numbers`) do not read them again.

    Returns:
        The files by table of the warehouse.
    """
    files_by_table: dict[str, list[str]] = {}
    for table in tables:
        shards_to_read = set(shards)
        if table.keeps_row_numbers:
            shards_to_read.difference_update(copied_shards)
        files_by_table[table.name] = _list_files_of_table(lake, table, shards_to_read)
    return files_by_table


def _list_files_of_table(lake: Lake, warehouse_table: WarehouseTable, shards: Collection[str]) -> list[str]:
    """List the Parquet files that a table of the warehouse reads for some shards.

    If the table does not have one part per shard, all of its files are listed.
    """
    file_paths: list[str] = []
    for source_name in warehouse_table.source_names:
        lake_table = lake.get_table(source_name)
        part_names = lake_table.list_part_names()
        if warehouse_table.has_part_per_shard:
            part_names = [part_name for part_name in part_names if part_name in shards]
        file_paths += lake_table.list_all_files(part_names)
    return file_paths


def _collect_records(lake: Lake, content: Content) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of all undamaged parts (what they were computed from), by the name of the lake table."""
    records_by_table: dict[str, list[Mapping[str, Any]]] = {}
    for source_name in content.sources:
        if source_name == SETTINGS_KEY:  # not a table
            continue
        pointers_by_part = _read_pointers_by_part(lake.get_table(source_name))
        records_by_table[source_name] = [pointer.record for pointer in pointers_by_part.values() if pointer]
    return records_by_table
