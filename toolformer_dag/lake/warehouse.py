"""The warehouse: one DuckDB file with every decision and its reason, for people and their SQL.

Built beside the old file, from nothing or in a copy of it, and renamed over it: readers keep the file they have opened,
and no reader can make a build wait or fail. Builds wait for each other, so the last one has seen every part. Tables are
copies, so the file can be moved. Which tables there are is declared by the stages (`WarehouseTable`); views and macros
stand in views.sql.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.files import ReadError, StorageError, beside, locked, replace_whole, sealed, unsealed, write_whole
from toolformer_dag.identity import fingerprint, stream_hash
from toolformer_dag.lake.descriptions import described
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.queries import OFFLINE, rows
from toolformer_dag.lake.storage import once
from toolformer_dag.lake.table import Lake, Pointer, Table
from toolformer_dag.lake.warehouse_filling import (
    CURVES,
    DECISIONS,
    DOCUMENTS,
    JUDGED,
    RULE,
    SWAPPED_PLACES,
    VERDICTS,
    VIEWS,
    fill,
)
from toolformer_dag.settings.sections import PathSettings

REJECTIONS = pl.Schema(
    {"stage": pl.String(), "tool": pl.String(), "shard": pl.String(), "reason": pl.String(), "count": pl.Int64()}
)
LANES = pl.Schema({"tool": pl.String(), "tau_f": pl.Float64(), "name": pl.String()})
FILTER_RULES = pl.Schema({"tool": pl.String(), "by_chance": pl.Float64(), "verdict": pl.String()})
CHOSEN = "chosen"
"""The field of the record of filter_rule that holds a threshold by chance, as a row of chance_thresholds."""
THRESHOLD = "threshold"
"""The field of the inputs of filtered_calls that holds a threshold by chance: tau_f, by_chance and verdict."""
SOURCES = pl.Schema({"source": pl.String(), "version": pl.String()})
CLOSED: dict[str, str | bool | int | float | list[str]] = {"enable_external_access": False, "lock_configuration": True}
"""A query reads the warehouse and nothing else: no file, no address, no extension."""
QUERIES = ("SELECT", "EXPLAIN", "MULTI")
"""Types of statements: DESCRIBE, SUMMARIZE, FROM and WITH count as SELECT, PIVOT as MULTI."""
MAGIC = b"DUCK"
"""What stands in a DuckDB file behind the checksum of its first block, eight bytes."""
STORAGE_VERSIONS = 2**16
"""More than DuckDB will ever have; the number behind the magic bytes would be far larger in a text."""
SETTINGS = "settings"
"""The row of `sources` that stands for SQL and columns."""
ROWS = "FROM rows"
NO_SPACE = (duckdb.IOException, duckdb.OutOfMemoryException)
"""Errors of a disk that is full, or of memory that could not be spilled to it."""


class WarehouseError(StorageError):
    """No warehouse yet, or SQL that it cannot answer."""


@dataclass(frozen=True, slots=True)
class WarehouseTable:
    """A table of the warehouse: the rows of lake tables, through `select` (which reads from `rows`).

    `columns`: name -> comment; `schema`: of the rows in the lake; `sources`: names of the lake tables; `views`: further
    statements, run after those of views.sql. `measured`: whether the rows are measurements, which a later job makes
    anew: until then parts of an earlier release may lack columns, which are null. `by_shard`: whether the parts are
    shards, which the column `shard` names.
    """

    name: str
    comment: str
    columns: Mapping[str, str]
    schema: pl.Schema
    sources: tuple[str, ...]
    select: str = ROWS
    views: str = ""
    measured: bool = False
    by_shard: bool = False

    def determining(self) -> Mapping[str, object]:
        """Return what the copy depends on beside the rows."""
        schema = {name: str(dtype) for name, dtype in self.schema.items()}
        found = {"comment": self.comment, "columns": dict(self.columns), "schema": schema, "select": self.select}
        return {**found, "views": self.views}


OWN_TABLES = (
    WarehouseTable(
        "rejections",
        "What was left out: how many of what, by stage, tool, shard and reason.",
        {
            "stage": "the stage that left it out",
            "tool": "key of the lane; null for raw_shards, augmented_corpus and outcomes",
            "shard": "name of the shard file; of the benchmark where a question was left out of outcomes",
            "reason": "short name of the reason",
            "count": "how many",
        },
        REJECTIONS,
        (),
    ),
    WarehouseTable(
        "lanes",
        "The tools, each with the tau_f that its filtered_calls were made with.",
        {
            "tool": "key of the lane",
            "tau_f": "the applied threshold; null where there was none yet, or none certified",
            "name": "name of the tool as it stands in a call: Calculator",
        },
        LANES,
        (),
    ),
    WarehouseTable(
        "filter_rules",
        "How the tau_f of each tool was chosen: by chance, with what came out, or as a number of the settings.",
        {
            "tool": "key of the lane",
            "by_chance": "the false discovery rate that was asked for; null for a number",
            "verdict": "certified, or why no threshold was; then the fallback was taken, or nothing was kept",
        },
        FILTER_RULES,
        (),
    ),
    WarehouseTable(
        "sources",
        "The tables of the lake that were copied, each with the version of its rows, rejections and tau_f.",
        {"source": "name of the table in the lake", "version": "version that was copied"},
        SOURCES,
        (),
    ),
)


def warehouse_settings(tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> dict[str, object]:
    """Return what determines the warehouse beside the lake's rows: columns, comments, the text of every view.

    `lanes`: key of the lane -> name of its tool in the text.
    """
    declared = {table.name: table.determining() for table in (*tables, *OWN_TABLES)}
    return {
        "lanes": dict(lanes),
        "tables": fingerprint(declared),
        "views": fingerprint(RULE + JUDGED + VERDICTS + DECISIONS + SWAPPED_PLACES + CURVES + VIEWS),
    }


def build(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str], database: Path) -> Mapping[str, int]:
    """Replace `database` by what the lake has of `tables`; return table -> rows.

    Where few shards changed since the file was built, their rows are replaced in a copy of it; else, and where the file
    is damaged, all is copied from the lake. A source that was never published gives no rows. Raises DamagedPart, and
    WarehouseError where the file cannot be written, DuckDB refuses the rows, or `database` is none of DuckDB's; then
    the old one stays.
    """
    refuse_other_file(database)
    with _alone(database), TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # versions before rows: what is published while these are read makes the file out of date
        sources, found = _sources(lake, tables, lanes), _pointers(lake, tables)
        content = _content(found, tables, lanes)
        last = _last_content(database)
        shards = None if last is None else last.changed_shards(content)
        if shards is None or not _is_whole(database):
            last, shards = None, None
        files = _files(folder, lake, tables, found, last, shards)
        files["sources"] = [_small(folder, "sources", sources)]
        files["rejections"] = [_small(folder, "rejections", _rejections(found))]
        applied = _applied(found, lanes)
        files["lanes"] = [_small(folder, "lanes", pl.DataFrame(applied, LANES))]
        files["filter_rules"] = [_small(folder, "filter_rules", pl.DataFrame(applied, FILTER_RULES))]
        with _beside(database, content) as fresh, _spilled(database) as spilled:
            try:
                if shards is not None:
                    shutil.copyfile(database, fresh)
                return fill(fresh, spilled, (*tables, *OWN_TABLES), files, shards)
            except duckdb.Error as error:
                raise WarehouseError(f"cannot write {database}: {_told(error)}") from error


@dataclass(frozen=True, slots=True)
class Content:
    """What a file was built from. `determining`: fingerprint of columns, comments, views and lanes.

    `documents`: shard -> version of its documents; `shards`: shard -> fingerprint of its parts in all tables by shard.
    """

    determining: str
    documents: Mapping[str, str]
    shards: Mapping[str, str]

    def changed_shards(self, now: "Content") -> list[str] | None:
        """Return the shards whose rows differ; None where a file from nothing is needed, or costs no more.

        Documents keep their places in the file, so none may go or change.
        """
        if self.determining != now.determining or self.documents.items() - now.documents.items():
            return None
        changed = [name for name in {**self.shards, **now.shards} if self.shards.get(name) != now.shards.get(name)]
        return changed if 2 * len(changed) <= len(now.shards) else None


def _content(pointers: "Pointers", tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> Content:
    by_shard: dict[str, list[object]] = {}
    documents = {}
    for table in (table for table in tables if table.by_shard):
        for source in table.sources:
            for part, pointer in pointers[source].items():
                by_shard.setdefault(part, []).append([source, _part_version(pointer)])
                if table.name == DOCUMENTS:
                    documents[part] = pointer.data_version if pointer else ""
    shards = {shard: fingerprint(versions) for shard, versions in by_shard.items()}
    return Content(fingerprint(warehouse_settings(tables, lanes)), documents, shards)


def _last_content(database: Path) -> Content | None:
    """Return what the file was built from, as its seal says; None without one, or with one of an earlier release."""
    try:
        return Content(**unsealed(_seal(database).read_bytes())["content"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_whole(database: Path) -> bool:
    try:
        return stream_hash(database) == _sealed_hash(database)
    except OSError:
        return False


def warehouse_files(lake: Lake, database: Path) -> LocalOutput:
    """Return the file and its seal, as the lake shares them among machines."""
    return LocalOutput(
        lake.storage, "warehouse/toolformer_duckdb", database.parent, (database.name, _seal(database).name)
    )


def received(paths: PathSettings) -> Path:
    """Return the warehouse that the settings name, after bringing it up to what another machine has built."""
    warehouse_files(Lake.of(paths), paths.warehouse).receive()
    return paths.warehouse


def _told(error: duckdb.Error) -> str:
    """Return what DuckDB says, and the remedy."""
    if isinstance(error, NO_SPACE):
        remedy = "free space and run again"
    else:
        remedy = (
            "a file of the lake is damaged, or this is a bug: run `toolformer-dag verify`, and report the bug if "
            "nothing is found"
        )
    return f"{str(error).splitlines()[0]}; {remedy}"


def refuse_other_file(database: Path) -> None:
    """Raise WarehouseError where something lies at `database` that is no DuckDB file.

    A file that was built here, as its seal says, may be damaged beyond recognition and is still replaced.
    """
    if not database.exists() or (database.is_file() and (_begins_as_duckdb(database) or _sealed_hash(database))):
        return
    kind = "a folder" if database.is_dir() else "no DuckDB file and will not be replaced"
    raise WarehouseError(
        f"paths.warehouse: {database} is {kind}; move it away, or name another file, as in "
        "paths.warehouse = 'lake/toolformer.duckdb'"
    )


def _begins_as_duckdb(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(20)
        return head[8:12] == MAGIC and int.from_bytes(head[12:], "little") < STORAGE_VERSIONS
    except OSError as error:
        raise ReadError(file, error) from error


def query(database: Path, sql: str) -> pl.DataFrame:
    """Return the answer to one read-only query, which reaches no other file. Raises WarehouseError.

    DESCRIBE shows the comments.
    """
    with opened(database, CLOSED) as connection:
        _refuse_all_but_a_query(connection, sql)
        told = described(connection, sql)
        return rows(connection, sql) if told is None else told


@contextmanager
def opened(database: Path, config: Mapping[str, Any] = MappingProxyType({})) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the file for reading; temporary tables may be made. Raises WarehouseError, for queries in the block too."""
    if not database.is_file():
        raise WarehouseError(
            f"there is no warehouse at {database} yet; run `toolformer-dag run`, or materialize "
            "warehouse/toolformer_duckdb"
        )
    try:
        with duckdb.connect(database, read_only=True, config={**OFFLINE, **config}) as connection:
            yield connection
    except duckdb.Error as error:
        raise WarehouseError(str(error)) from error


def _refuse_all_but_a_query(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) > 1 or any(statement.type.name not in QUERIES for statement in statements):
        raise WarehouseError("only one read-only query is answered: select, from, with, pivot, describe or summarize")


def out_of_date(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str], database: Path) -> list[str]:
    """Return why `database` is missing, cannot be read or differs from the lake; empty where it is up to date."""
    if not database.is_file():
        return [f"{database} is gone"]
    if reason := damage(database):
        return [f"{database} {reason}"]
    try:
        copied = dict(query(database, "SELECT source, version FROM sources").iter_rows())
    except WarehouseError as error:
        return [f"{database} cannot be read: {str(error).splitlines()[0]}"]
    now = dict(_sources(lake, tables, lanes).iter_rows())
    changed = [name for name in sorted({*copied, *now}) if copied.get(name) != now.get(name)]
    names = ["columns, comments or views" if name == SETTINGS else name for name in changed]
    return [f"{name} changed since it was copied" for name in names]


def damage(database: Path) -> str | None:
    """Read the whole file and return what is wrong with it; None where it is what was built."""
    with _alone(database):  # between the rename and the seal of another build there is a moment
        sealed_hash = _sealed_hash(database)
        if sealed_hash is None:
            return f"cannot be verified: {_seal(database)} is missing or damaged"
        try:
            return None if stream_hash(database) == sealed_hash else "is damaged: its content is not what was built"
        except OSError as error:
            return f"cannot be verified ({error})"


def _sealed_hash(database: Path) -> str | None:
    """The hash of the file that was built last; None without a seal that is whole."""
    try:
        return str(unsealed(_seal(database).read_bytes())["hash"])
    except (OSError, ValueError, KeyError):
        return None


def _seal(database: Path) -> Path:
    return database.with_name(f".{database.name}.seal")


def _alone(database: Path) -> AbstractContextManager[bool]:
    return locked(database.with_name(f".{database.name}.lock"))


def version(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> str:
    """Return the version of the warehouse that `build` would write now."""
    return fingerprint(dict(_sources(lake, tables, lanes).iter_rows()))


def _sources(lake: Lake, tables: Sequence[WarehouseTable], lanes: Mapping[str, str]) -> pl.DataFrame:
    names = [name for table in tables for name in table.sources]
    versions = [(name, _content_version(lake.table(name))) for name in names]
    made = (SETTINGS, fingerprint(warehouse_settings(tables, lanes)))
    return pl.DataFrame([made, *versions], schema=SOURCES, orient="row")


def _content_version(table: Table) -> str:
    """Another one when rows, rejections or the applied tau_f change. A damaged part counts by its name alone."""

    def ask() -> str:
        found: dict[str, object] = {}
        for part in table.parts():
            try:
                pointer = table.pointer(part)
            except StorageError:
                found[part] = None
                continue
            found[part] = [pointer.data_version, pointer.record.get("rejections", []), _filter_rule(pointer.record)]
        return fingerprint(found)

    return once("content", table.storage.shown(table.folder), ask)


Pointers = Mapping[str, Mapping[str, Pointer | None]]
"""The pointers of every part, by source; None for a damaged one."""


def _pointers(lake: Lake, tables: Sequence[WarehouseTable]) -> Pointers:
    found: dict[str, dict[str, Pointer | None]] = {}
    for name in (name for table in tables for name in table.sources):
        source, found[name] = lake.table(name), {}
        for part in source.parts():
            found[name][part] = None
            with suppress(StorageError):
                found[name][part] = source.pointer(part)
    return found


def _part_version(pointer: Pointer | None) -> object:
    """Return what determines a shard's rows in the file: of filtered_calls also what the other shards say."""
    if pointer is None:
        return None
    decided = pointer.record["stage"] == "filtered_calls"
    return [pointer.data_version, *([_filter_rule(pointer.record), pointer.record.get("inputs")] if decided else ())]


def _files(
    scratch: Path,
    lake: Lake,
    tables: Sequence[WarehouseTable],
    pointers: Pointers,
    last: Content | None,
    shards: Collection[str] | None,
) -> dict[str, list[str]]:
    """Return the files of the parts in `pointers`, or of those that `refill` asks for; one without rows at the end."""
    found = {}
    for table in tables:
        parts = [(lake.table(source), part) for source in table.sources for part in pointers[source]]
        if shards is not None and table.by_shard:
            parts = [(source, part) for source, part in parts if part in shards]
        if last is not None and table.name == DOCUMENTS:
            parts = [(source, part) for source, part in parts if part not in last.documents]
        empty = _small(scratch, table.name, table.schema.to_frame())
        found[table.name] = [*(file for source, part in parts for file in source.files(part)), empty]
    return found


def _rejections(pointers: Pointers) -> pl.DataFrame:
    counted = []
    for pointer in (pointer for parts in pointers.values() for pointer in parts.values() if pointer):
        where = {"stage": pointer.record["stage"], "tool": pointer.record["tool"]}
        counted += [{**where, **rejected} for rejected in pointer.record.get("rejections", [])]
    return pl.DataFrame(counted, schema=REJECTIONS)


def _applied(pointers: Pointers, lanes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what each lane's calls were filtered with, whatever the settings say by now."""
    applied = []
    for lane, name in lanes.items():
        parts = pointers.get(f"{lane}/filtered_calls", {}).values()
        rules = (_filter_rule(pointer.record) for pointer in parts if pointer)
        applied.append({"tool": lane, "name": name, **next(rules, {})})
    return applied


def _filter_rule(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the threshold of a record of filtered_calls: of the settings, or chosen by chance."""
    by_chance: dict[str, Any] | None = record.get("inputs", {}).get(THRESHOLD)
    return by_chance or {"tau_f": record.get("settings", {}).get("tau_f")}


def _small(scratch: Path, name: str, frame: pl.DataFrame) -> str:
    path = scratch / f"{name}.parquet"
    frame.write_parquet(path)
    return str(path)


@contextmanager
def _beside(database: Path, content: Content) -> Iterator[Path]:
    """A path for the new file; renamed over `database` where the block ends well, else removed."""
    fresh = beside(database, ".duckdb")
    try:
        yield fresh
        made = {"hash": stream_hash(fresh), "bytes": fresh.stat().st_size, "content": asdict(content)}
        seal = sealed(str(database), made)
        replace_whole(fresh, database)
        write_whole(_seal(database), seal)
    finally:
        fresh.unlink(missing_ok=True)
        fresh.with_suffix(".duckdb.wal").unlink(missing_ok=True)


@contextmanager
def _spilled(database: Path) -> Iterator[Path]:
    """A folder for what does not fit into memory; also removes what a killed build left there. Needs the lock."""
    folder = database.with_name(f".{database.name}.spilled")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
