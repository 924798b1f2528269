"""The warehouse: one DuckDB file with everything that was decided and why, for people and their SQL.

Built beside the old file and renamed over it: readers keep the file they have opened, and no reader can make a build
wait or fail. Builds wait for each other, so the last one has seen every partition. Tables are copies, so the file can
be moved; see tables.sql and views.sql for what there is.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import polars as pl

from toolformer_dag.stages.rejections import decode
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.files import beside, replace_whole
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.lock import locked
from toolformer_dag.storage.partition import WHOLE, behind
from toolformer_dag.storage.sql import OFFLINE, in_memory, rows, run_file
from toolformer_dag.storage.table import Table
from toolformer_dag.storage.warehouse_sources import STAGES, Source, sources, version, versions

REJECTIONS = {"stage": pl.String, "tool": pl.String, "shard": pl.String, "reason": pl.String, "count": pl.Int64}
LANES = {"tool": pl.String, "tau_f": pl.Float64}


class WarehouseError(StorageError):
    """No warehouse yet, or SQL that it cannot answer."""


def build(lake: Lake, lanes: Sequence[str], partitions: Sequence[str], database: Path) -> Mapping[str, int]:
    """Replaces `database` by one with what `lanes` and `partitions` have published; returns table -> rows.

    A lane or partition that is missing gives no rows; what is published for others is left out. Raises
    DamagedPartition, and WarehouseError where the file cannot be written; then the old one stays.
    """
    if database.is_dir():
        raise WarehouseError(f"{database} is a folder; name a file, as in paths.warehouse = 'lake/toolformer.duckdb'")
    with locked(database.with_name(f".{database.name}.lock")), TemporaryDirectory() as scratch:
        found = sources(lake, lanes, partitions)
        # versions before rows: what is published while these are read makes the file outdated
        files = {"sources": [_small(Path(scratch), "sources", versions(found))]}
        files |= {stage: _files(Path(scratch), stage, found) for stage in STAGES}
        files["rejections"] = [_small(Path(scratch), "rejections", _rejections(found))]
        files["lanes"] = [_small(Path(scratch), "lanes", _lanes(lake, lanes))]
        with _beside(database) as fresh:
            try:
                return _fill(fresh, files)
            except duckdb.Error as error:
                reason = str(error).splitlines()[0]
                raise WarehouseError(f"cannot write {database}: {reason}; free space and run again") from error


def query(database: Path, sql: str) -> pl.DataFrame:
    """The answer to `sql`, read-only. Raises WarehouseError."""
    if not database.is_file():
        raise WarehouseError(
            f"there is no warehouse at {database} yet; run `toolformer-dag run`, or materialize warehouse/loss_deltas"
        )
    try:
        with duckdb.connect(database, read_only=True, config=OFFLINE) as connection:
            return rows(connection, sql)
    except duckdb.Error as error:
        raise WarehouseError(str(error)) from error


def outdated(lake: Lake, lanes: Sequence[str], partitions: Sequence[str], database: Path) -> str | None:
    """Why `database` is gone, cannot be read or no longer says what the lake says; None where it does.

    Compared are the partitions that it was built from, as far as they can be read, and those that are there now.
    """
    if not database.is_file():
        return f"{database} is gone"
    try:
        built = query(database, "FROM sources").rows()
    except WarehouseError as error:
        return f"{database} cannot be read: {str(error).splitlines()[0]}"
    changed = (name for name, partition, before in built if _changed(lake.table(name), partition, before))
    if name := next(changed, None):
        return f"the rows, rejections or tau_f of {name} changed since they were copied"
    copied = {(name, partition) for name, partition, _ in built}
    there = ((one.table.name, one.partition) for one in sources(lake, lanes, partitions))
    lacking = next((one for one in there if one not in copied), None)
    return None if lacking is None else f"{lacking[0]}{behind(', partition', lacking[1])} is not in it"


def _changed(table: Table, partition: str, before: str) -> bool:
    try:
        return version(table, partition) != before
    except StorageError:  # it is made again first, and compared then
        return False


def _files(scratch: Path, stage: str, found: Sequence[Source]) -> list[str]:
    empty = _small(scratch, stage, columns(stage).to_frame())
    return [empty, *(file for one in found if one.stage == stage for file in one.table.files(one.partition))]


def _rejections(found: Sequence[Source]) -> pl.DataFrame:
    counted = []
    for source in found:
        record = source.table.record(source.partition)
        counted += [{"stage": source.stage, "tool": record["tool"], **rejected} for rejected in decode(record)]
    return pl.DataFrame(counted, schema=REJECTIONS)


def _lanes(lake: Lake, lanes: Sequence[str]) -> pl.DataFrame:
    """The threshold that was applied, whatever the settings say by now."""
    tables = {lane: lake.table(f"{lane}/filtered_calls") for lane in lanes}
    applied = {lane: table.record(WHOLE) for lane, table in tables.items() if table.has(WHOLE)}
    found = [(lane, applied[lane]["settings"]["tau_f"] if lane in applied else None) for lane in lanes]
    return pl.DataFrame(found, schema=LANES, orient="row")


def _small(scratch: Path, name: str, frame: pl.DataFrame) -> str:
    path = scratch / f"{name}.parquet"
    frame.write_parquet(path)
    return str(path)


@contextmanager
def _beside(database: Path) -> Iterator[Path]:
    """A path for the new file; renamed over `database` where the block ends well, else removed."""
    fresh = beside(database, ".duckdb")
    try:
        yield fresh
        replace_whole(fresh, database)
    finally:
        fresh.unlink(missing_ok=True)
        fresh.with_suffix(".duckdb.wal").unlink(missing_ok=True)


def _fill(fresh: Path, files: Mapping[str, list[str]]) -> dict[str, int]:
    """Writes tables and views; an older DuckDB, from 1.0 on, can open the file."""
    with in_memory() as connection:
        connection.execute(f"ATTACH '{_quoted(fresh)}' AS warehouse (STORAGE_VERSION 'v1.0.0')")
        connection.execute("USE warehouse")
        run_file(connection, __package__, "tables.sql", files)
        run_file(connection, __package__, "views.sql")
        tables = rows(connection, "SELECT table_name FROM duckdb_tables() WHERE database_name = 'warehouse'")
        counts = {name: rows(connection, f'SELECT count(*) FROM "{name}"').item() for name in tables["table_name"]}
        connection.execute("USE memory")
        connection.execute("DETACH warehouse")
    return counts


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
