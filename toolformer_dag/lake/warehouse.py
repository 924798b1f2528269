"""The warehouse: one DuckDB file with every decision and its reason, for people and their SQL.

Built beside the old file, from nothing or in a copy of it, and renamed over it: readers keep the file they have opened,
and no reader can make a build wait or fail. Builds wait for each other, so the last one has seen every part. Tables are
copies, so the file can be moved. Which tables there are is declared by the stages (`WarehouseTable`); views and macros
stand in views.sql.
"""

import os
import shutil
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.files import (
    ReadError,
    StorageError,
    WriteError,
    beside,
    limit_met,
    locked,
    replace_whole,
    sealed,
    unsealed,
    write_whole,
)
from toolformer_dag.identity import fingerprint, stream_hash
from toolformer_dag.lake.descriptions import described
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.queries import OFFLINE, quoted, rows
from toolformer_dag.lake.record_tables import filter_rule, record_rows
from toolformer_dag.lake.scoring import reads_cost
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import Lake, Table
from toolformer_dag.lake.warehouse_filling import (
    CURVES,
    DECISIONS,
    DOCUMENTS,
    JUDGED,
    OWN_TABLES,
    RULE,
    SWAPPED_PLACES,
    VERDICTS,
    WarehouseTable,
    fill,
    views_sql,
)
from toolformer_dag.settings.sections import Settings

CHOSEN = "chosen"
"""The field of the record of filter_rule that holds a threshold by chance, as a row of chance_thresholds."""
CLOSED: dict[str, str | bool | int | float | list[str]] = {"enable_external_access": False, "lock_configuration": True}
"""A query reads the warehouse and nothing else: no file, no address, no extension."""
QUERIES = ("SELECT", "EXPLAIN", "MULTI")
"""Types of statements: DESCRIBE, SUMMARIZE, FROM and WITH count as SELECT, PIVOT as MULTI."""
QUERIES_OVER_FOLDERS = ("SELECT", "MULTI")
"""The same where folders may be read: EXPLAIN ANALYZE runs what it explains, a COPY into a folder too."""
MAGIC = b"DUCK"
"""What stands in a DuckDB file behind the checksum of its first block, eight bytes."""
STORAGE_VERSIONS = 2**16
"""More than DuckDB will ever have; the number after the magic bytes would be far larger in a text."""
SETTINGS = "settings"
"""The row of `sources` that stands for SQL and columns."""
NAMES = """
SELECT 'table ' || table_name FROM duckdb_tables() UNION ALL
SELECT 'view ' || view_name FROM duckdb_views() WHERE NOT internal UNION ALL
SELECT 'macro ' || function_name FROM duckdb_functions() WHERE NOT internal UNION ALL
SELECT 'sequence ' || sequence_name FROM duckdb_sequences() UNION ALL
SELECT 'type ' || type_name FROM duckdb_types() WHERE NOT internal
"""
"""What a person may have made in a database."""
NO_FILE = "disabled by configuration"
"""What DuckDB says of a file that a query may not read."""
NO_FILE_REMEDY = (
    "a query reads the warehouse alone; name the folder of a file of your own with `toolformer-dag sql --read FOLDER`, "
    "or attach the warehouse in Python (docs/howto/ask-in-sql.md, Join data of your own)"
)
NO_SPACE = (duckdb.IOException, duckdb.OutOfMemoryException)
"""What DuckDB raises where a disk is full, or memory could not be spilled to it."""
FULL = ("CHECKPOINT", "No space left", "quota exceeded")
"""What other errors say then."""
REMEDIES = {
    "Corrupt database file": "run `toolformer-dag run`, which builds it anew from the lake",
    "Out of Memory Error": "ask for less at once, or give queries more with `--set execution.query_gib=16`",
}
"""What to do about an error of DuckDB while a warehouse is read, by words of it."""
INTERRUPT_SECONDS = 5
"""In so many seconds an interrupted query has to end; after them its process is killed."""
ORIGINAL = "Original error: "
"""What DuckDB writes before the reason of a checkpoint that failed."""


class WarehouseError(StorageError):
    """No warehouse yet, or SQL that it cannot answer."""


def warehouse_settings(tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> dict[str, object]:
    """Return what determines the warehouse beside the lake's rows: columns, comments, the text of every view.

    `lanes`: key of the lane -> name of its tool in the text.
    """
    declared = {table.name: table.determining() for table in (*tables, *OWN_TABLES)}
    return {
        "lanes": dict(lanes),
        "tables": fingerprint(declared),
        "views": fingerprint(RULE + JUDGED + VERDICTS + DECISIONS + SWAPPED_PLACES + CURVES + views_sql(tables)),
    }


def build(
    lake: Lake,
    tables: Sequence[WarehouseTable],
    lanes: Mapping[str, str],
    database: Path,
    named: Mapping[str, str] | None = None,
) -> Mapping[str, int]:
    """Replace `database` by what the lake has of `tables`; return table -> rows.

    `named`: settings that determine nothing, such as the model's name, for the table of settings.

    Where few shards changed since the file was built, their rows are replaced in a copy of it; else, and where the file
    is damaged, all is copied from the lake. A source that was never published gives no rows. Raises DamagedPart, and
    WarehouseError where the file cannot be written, DuckDB refuses the rows, or `database` is none of DuckDB's; then
    the old one stays.
    """
    refuse_other_file(database)
    try:
        with session(), _alone(database), _folder_beside(database) as folder:
            return _built(lake, tables, lanes, database, folder, named or {})
    except (duckdb.Error, pl.exceptions.ComputeError) as error:  # what Polars calls a full disk
        raise WarehouseError(f"cannot write {database}: {_reason(error)}") from error
    except OSError as error:
        raise WriteError(database, error) from error


def _built(
    lake: Lake,
    tables: Sequence[WarehouseTable],
    lanes: Mapping[str, str],
    database: Path,
    folder: Path,
    named: Mapping[str, str],
) -> Mapping[str, int]:
    """Build in `folder`, then rename. Needs the lock. Raises DamagedPart, OSError and what DuckDB and Polars raise."""
    content = _content(lake, tables, lanes)
    last = _last_content(database)
    shards = last.changed_shards(content) if last else None
    files = _part_files(lake, tables, last if shards is not None else None, shards or ())
    # the other tables get an empty last file: `fill` expects one of each table
    empty = {table.name: table.schema.to_frame() for table in tables}
    for name, frame in {**empty, **record_rows(_records(lake, content), content.sources, lanes, named)}.items():
        files.setdefault(name, []).append(str(folder / f"{name}.parquet"))
        frame.write_parquet(files[name][-1])
    fresh = folder / "fresh.duckdb"
    if shards is not None:
        shutil.copyfile(database, fresh)
    counts = fill(fresh, folder, (*tables, *OWN_TABLES), files, shards)
    made = {"hash": stream_hash(fresh), "bytes": fresh.stat().st_size, "content": asdict(content)}
    replace_whole(fresh, database)
    write_whole(_seal_path(database), sealed(str(database), made))
    return counts


@contextmanager
def _folder_beside(database: Path) -> Iterator[Path]:
    """An empty folder for what is not finished; what a killed build left there is removed. Needs the lock."""
    folder = database.with_name(f".{database.name}.spilled")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Content:
    """What a file is built from. `sources`: lake table, or SETTINGS -> version of what is copied.

    `documents`: shard -> version of its documents; `shards`: shard -> fingerprint of its parts in all tables by shard.
    """

    sources: Mapping[str, str]
    documents: Mapping[str, str]
    shards: Mapping[str, str]

    def changed_shards(self, now: "Content") -> list[str] | None:
        """Return the shards whose rows differ; None where a file from nothing is needed, or costs no more.

        Documents keep their places in the file, so none may go or change.
        """
        if self.sources[SETTINGS] != now.sources[SETTINGS] or self.documents.items() - now.documents.items():
            return None
        changed = [name for name in {**self.shards, **now.shards} if self.shards.get(name) != now.shards.get(name)]
        return changed if 2 * len(changed) <= len(now.shards) else None


def _content(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> Content:
    by_shard: dict[str, list[object]] = {}
    documents = {}
    for table, source, part, pointer in _parts(lake, [table for table in tables if table.by_shard]):
        by_shard.setdefault(part, []).append([source, _shard_version(pointer)])
        if table.name == DOCUMENTS:
            documents[part] = pointer.data_version if pointer else ""
    for _, source, part, pointer in _parts(lake, _costs_read(tables)):
        by_shard.setdefault(part, []).append([source, _costs(pointer)])
    shards = {shard: fingerprint(versions) for shard, versions in by_shard.items()}
    return Content(_sources(lake, tables, lanes), documents, shards)


def _last_content(database: Path) -> Content | None:
    """Return what the file was built from; None where it is damaged, or an earlier release built it."""
    seal = _seal(database)
    if seal is None or not database.is_file() or stream_hash(database) != seal["hash"]:
        return None
    try:
        return Content(**seal["content"])
    except TypeError:
        return None


def warehouse_files(lake: Lake, database: Path) -> LocalOutput:
    """Return the file and its seal, as the lake shares them among machines."""
    return LocalOutput(
        lake.storage,
        f"warehouse{lake.suffix}/toolformer_duckdb",
        database.parent,
        (database.name, _seal_path(database).name),
    )


def received(settings: Settings) -> Path:
    """Return the warehouse that the settings name, after bringing it up to what another machine has built."""
    warehouse_files(Lake.of(settings.paths, settings.rounds.suffix), settings.warehouse).receive()
    return settings.warehouse


def _reason(error: Exception) -> str:
    """Return what DuckDB or Polars says, and the remedy."""
    if limit := limit_met(error):
        remedy = f"{limit} and run again"
    elif isinstance(error, NO_SPACE) or any(words in str(error) for words in FULL):
        remedy = "free space and run again"
    else:
        remedy = (
            "a file of the lake is damaged, or this is a bug: run `toolformer-dag verify`, and report the bug if "
            "nothing is found"
        )
    return f"{str(error).rpartition(ORIGINAL)[2].splitlines()[0].strip()}; {remedy}"


def refuse_other_file(database: Path) -> None:
    """Raise WarehouseError where something lies at `database` that was not built here.

    A file that was built here, as its seal says, may be damaged beyond recognition and is still replaced.
    """
    seal = _seal(database)
    if not database.exists() or (database.is_file() and seal and seal["bytes"] == database.stat().st_size):
        return
    kind = "a folder" if database.is_dir() else "no DuckDB file and will not be replaced"
    if database.is_file() and (seal or _begins_as_duckdb(database)):
        if not (foreign := _foreign_names(database)):
            return
        kind = f"a database with the {foreign[0]}, which was not built here and stays"
    raise WarehouseError(
        f"paths.warehouse: {database} is {kind}; move it away, or name another file, as in "
        "paths.warehouse = 'lake/toolformer.duckdb'"
    )


def _foreign_names(database: Path) -> list[str]:
    """Return what a database in which the tables of a warehouse are missing holds, as in `table letters`."""
    names = _names(database)
    return [] if {"table lanes", "table rejections"} <= set(names) else names


def _names(database: Path) -> list[str]:
    """Return what a database holds, each with its kind, tables first; nothing where it cannot be read."""
    with suppress(duckdb.Error), duckdb.connect(database, read_only=True, config={**OFFLINE, **CLOSED}) as connection:
        return [name for (name,) in connection.sql(NAMES).fetchall()]
    return []


def _begins_as_duckdb(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(20)
        return head[8:12] == MAGIC and int.from_bytes(head[12:], "little") < STORAGE_VERSIONS
    except OSError as error:
        raise ReadError(file, error) from error


def query(database: Path, sql: str, gib: float | None = None, folders: Sequence[Path] = ()) -> pl.DataFrame:
    """Return the answer to one read-only query, which reaches no file but those in `folders`. Raises WarehouseError.

    DESCRIBE shows the comments. `gib`: the most memory that it may take, and beside it the most room on the disk.
    Ctrl-C ends the query; where DuckDB does not stop in time, it ends this process.
    """
    limits = {} if gib is None else dict.fromkeys(("memory_limit", "max_temp_directory_size"), f"{gib}GiB")
    access = {} if folders else CLOSED  # DuckDB takes allowed folders of an open connection alone
    with opened(database, {**access, **limits}) as connection, ThreadPoolExecutor(1) as threads:
        if folders:
            _close_all_but(connection, folders)
        asked = threads.submit(_answered, connection, sql, QUERIES_OVER_FOLDERS if folders else QUERIES)
        try:
            while not asked.done():  # DuckDB looks for no signal, and one of its threads may get it
                wait([asked], 0.1)
        except KeyboardInterrupt:
            for _ in range(INTERRUPT_SECONDS * 10):
                connection.interrupt()  # more than once: it may be between two statements
                if wait([asked], 0.1).done:
                    raise
            shutil.rmtree(_spilled(database), ignore_errors=True)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # some functions, such as the sort of a list, do not stop
            os.kill(os.getpid(), signal.SIGINT)
        return asked.result()


@cache
def _spilled(database: Path) -> Path:
    """Return the folder for what does not fit into memory: one of this process, which `clean` knows by its name."""
    return beside(database)


def _close_all_but(connection: duckdb.DuckDBPyConnection, folders: Sequence[Path]) -> None:
    """Leave a connection the files in these folders and below them, and no others. Raises WarehouseError."""
    for folder in folders:
        if not folder.is_dir():
            raise WarehouseError(f"--read {folder}: there is no such folder; name one that holds your files")
    spellings = {spelling: None for folder in folders for spelling in (folder.absolute(), folder.resolve())}
    allowed = ", ".join(map(quoted, spellings))  # DuckDB follows no link before it compares
    connection.execute(f"SET allowed_directories = [{allowed}]")
    for setting, value in CLOSED.items():
        connection.execute(f"SET {setting} = {value}")


def _answered(connection: duckdb.DuckDBPyConnection, sql: str, kinds: Collection[str]) -> pl.DataFrame:
    _refuse_all_but_a_query(connection, sql, kinds)
    description = described(connection, sql)
    return rows(connection, sql) if description is None else description


@contextmanager
def opened(database: Path, config: Mapping[str, Any] = MappingProxyType({})) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the file for reading; temporary tables may be made. Raises WarehouseError, for queries in the block too."""
    if not database.is_file():
        raise WarehouseError(
            f"there is no warehouse at {database} yet; run `toolformer-dag run`, or materialize "
            "warehouse/toolformer_duckdb"
        )
    try:
        # DuckDB takes the folder only once it knows whether external access is closed
        settings = {**OFFLINE, **config, "temp_directory": str(_spilled(database))}
        with duckdb.connect(database, read_only=True, config=settings) as connection:
            yield connection
    except duckdb.Error as error:
        if isinstance(error, duckdb.CatalogException) and not _names(database):
            raise WarehouseError(f"{database} holds no tables yet; run `toolformer-dag run`") from error
        if remedy := next((remedy for words, remedy in REMEDIES.items() if words in str(error)), None):
            raise WarehouseError(f"{database}: {str(error).splitlines()[0]}; {remedy}") from error
        if NO_FILE in str(error):
            raise WarehouseError(f"{error}; {NO_FILE_REMEDY}") from error
        raise WarehouseError(str(error)) from error


def _refuse_all_but_a_query(connection: duckdb.DuckDBPyConnection, sql: str, kinds: Collection[str]) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) > 1 or any(statement.type.name not in kinds for statement in statements):
        raise WarehouseError("only one read-only query is answered: select, from, with, pivot, describe or summarize")


def out_of_date(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str], database: Path) -> list[str]:
    """Return why `database` is missing, damaged or differs from the lake; empty where it is up to date."""
    if not database.is_file():
        return [f"{database} is gone"]
    if reason := damage(database):
        return [f"{database} {reason}"]
    copied = (_seal(database) or {"content": {}})["content"].get("sources", {})
    now = _sources(lake, tables, lanes)
    changed = [name for name in sorted({*copied, *now}) if copied.get(name) != now.get(name)]
    names = ["columns, comments or views" if name == SETTINGS else name for name in changed]
    return [f"{name} changed since it was copied" for name in names]


def damage(database: Path) -> str | None:
    """Read the whole file and return what is wrong with it; None where it is what was built."""
    with _alone(database):  # between the rename and the seal of another build there is a moment
        seal = _seal(database)
        if seal is None:
            return f"cannot be verified: {_seal_path(database)} is missing or damaged"
        try:
            return None if stream_hash(database) == seal["hash"] else "is damaged: its content is not what was built"
        except OSError as error:
            return f"cannot be verified ({error})"


def _seal(database: Path) -> dict[str, Any] | None:
    """The hash of the file that was built last, its bytes and its content; None without a seal that is whole."""
    try:
        return unsealed(_seal_path(database).read_bytes())
    except (OSError, ValueError):
        return None


def _seal_path(database: Path) -> Path:
    return database.with_name(f".{database.name}.seal")


def _alone(database: Path) -> AbstractContextManager[bool]:
    return locked(database.with_name(f".{database.name}.lock"))


def version(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> str:
    """Return the version of the warehouse that `build` would write now."""
    return fingerprint(_sources(lake, tables, lanes))


def _sources(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> dict[str, str]:
    versions = {name: _source_version(lake.table(name)) for table in tables for name in table.sources}
    for _, name, part, pointer in _parts(lake, _costs_read(tables)):
        versions[name] = fingerprint([versions[name], part, _costs(pointer)])
    return {SETTINGS: fingerprint(warehouse_settings(tables, lanes)), **versions}


def _parts(lake: Lake, tables: Sequence[WarehouseTable]) -> Iterator[tuple[WarehouseTable, str, str, Pointer | None]]:
    """Each part of the sources of tables: table, source, part, pointer."""
    for table in tables:
        for source in table.sources:
            yield from ((table, source, *part) for part in _pointers(lake.table(source)).items())


def _costs_read(tables: Sequence[WarehouseTable]) -> list[WarehouseTable]:
    """The tables of results where a score reads what calls cost, which is no part of the version of their results."""
    read = any(reads_cost(table.scores) for table in tables)
    return [table for table in tables if read and table.has_costs]


def _costs(pointer: Pointer | None) -> list[str]:
    return [file.hash for file in pointer.files] if pointer else []


def _source_version(table: Table) -> str:
    def ask() -> str:
        pointers = _pointers(table)
        first = next((pointer.record["settings"] for pointer in pointers.values() if pointer), None)
        return fingerprint([first, {part: _version(pointer) for part, pointer in pointers.items()}])

    return table.remembered("version of what is copied", ask)


def _pointers(table: Table) -> dict[str, Pointer | None]:
    """The pointer of every part; None for a damaged one."""
    pointers: dict[str, Pointer | None] = dict.fromkeys(table.parts())
    for part in pointers:
        with suppress(StorageError):
            pointers[part] = table.pointer(part)
    return pointers


def _version(pointer: Pointer | None) -> list[object] | None:
    """Another one when rows, rejections or the applied tau_f change. A damaged part counts by its name alone."""
    if pointer is None:
        return None
    return [pointer.data_version, pointer.record.get("rejections", []), filter_rule(pointer.record)]


def _shard_version(pointer: Pointer | None) -> list[object] | None:
    """The same; of filtered_calls also what the other shards say, on which verdicts depend.

    Without rows and rejections nothing is decided: another tau_f changes none of the shard's rows.
    """
    if pointer and not (pointer.rows or pointer.record.get("rejections")):
        return [pointer.data_version]
    own = _version(pointer)
    if own and pointer and pointer.record["stage"] == "filtered_calls":
        own.append(pointer.record.get("inputs"))
    return own


def _part_files(
    lake: Lake, tables: Sequence[WarehouseTable], last: Content | None, shards: Collection[str]
) -> dict[str, list[str]]:
    """Return the files of all parts, or of those that the copy of a file with `last` lacks."""

    def lacks(table: WarehouseTable, part: str) -> bool:
        if last is None or not table.by_shard:
            return True
        return part in shards and not (table.name == DOCUMENTS and part in last.documents)

    paths: dict[str, list[str]] = {}
    for table in tables:
        sources = map(lake.table, table.sources)
        paths[table.name] = [
            file
            for source in sources
            for file in source.all_files([part for part in source.parts() if lacks(table, part)])
        ]
    return paths


def _records(lake: Lake, content: Content) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of the whole parts of every source."""
    named = [name for name in content.sources if name != SETTINGS]
    return {name: [one.record for one in _pointers(lake.table(name)).values() if one] for name in named}
