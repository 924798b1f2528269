"""The warehouse: one DuckDB file with everything that was decided and why, for people and their SQL.

Built beside the old file and renamed over it: readers keep the file they have opened, and no reader can make a build
wait or fail. Builds wait for each other, so the last one has seen every partition. Tables are copies, so the file can
be moved; see tables.sql and views.sql for what there is.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import duckdb
import polars as pl

from toolformer_dag.stages.publish import WHOLE
from toolformer_dag.stages.rejections import decode
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.files import TEMPORARY, replace_whole
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.lock import locked
from toolformer_dag.storage.sql import OFFLINE, in_memory, rows, run_file
from toolformer_dag.storage.table import Table

STAGES = (
    "raw_shards",
    "heuristic_subset",
    "scored_candidates",
    "tool_results",
    "loss_deltas",
    "swapped_results",
    "filtered_calls",
    "augmented_corpus",
)
LANE_STAGES = STAGES[1:-1]
UNPARTITIONED = ("filtered_calls", "augmented_corpus")
REJECTIONS = {"stage": pl.String, "tool": pl.String, "shard": pl.String, "reason": pl.String, "count": pl.Int64}
LANES = {"tool": pl.String, "tau_f": pl.Float64}


class WarehouseError(StorageError):
    """No warehouse yet, or SQL that it cannot answer."""


def build(lake: Lake, lanes: Sequence[str], partitions: Sequence[str], database: Path) -> Mapping[str, int]:
    """Replaces `database` by one with what `lanes` and `partitions` have published; returns table -> rows.

    A lane or partition that is missing gives no rows; what is published for others is left out. Raises
    DamagedPartition, and then the old file stays.
    """
    with locked(database.with_name(f".{database.name}.lock")), TemporaryDirectory() as scratch:
        sources = _sources(lake, lanes, partitions)
        files = {stage: _files(Path(scratch), stage, sources) for stage in STAGES}
        files["rejections"] = [_small(Path(scratch), "rejections", _rejections(sources))]
        files["lanes"] = [_small(Path(scratch), "lanes", _lanes(lake, lanes))]
        with _beside(database) as fresh:
            return _fill(fresh, files)


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


Source = tuple[str, Table, str]
"""Stage, table, partition."""


def _sources(lake: Lake, lanes: Sequence[str], partitions: Sequence[str]) -> list[Source]:
    """What is published, of what was asked for."""
    tables = [("raw_shards", "ccnet"), *((stage, lane) for lane in lanes for stage in LANE_STAGES)]
    found = [(stage, lake.table(f"{group}/{stage}")) for stage, group in (*tables, ("augmented_corpus", "training"))]
    return [
        (stage, table, partition)
        for stage, table in found
        for partition in ([WHOLE] if stage in UNPARTITIONED else partitions)
        if table.has(partition)
    ]


def _files(scratch: Path, stage: str, sources: Sequence[Source]) -> list[str]:
    empty = _small(scratch, stage, columns(stage).to_frame())
    return [empty, *(file for name, table, partition in sources if name == stage for file in table.files(partition))]


def _rejections(sources: Sequence[Source]) -> pl.DataFrame:
    found = []
    for stage, table, partition in sources:
        record = table.record(partition)
        found += [{"stage": stage, "tool": record["tool"], **rejected} for rejected in decode(record)]
    return pl.DataFrame(found, schema=REJECTIONS)


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
    fresh = database.with_name(f"{TEMPORARY}{uuid4().hex}.duckdb")
    try:
        yield fresh
        replace_whole(fresh, database)
    finally:
        fresh.unlink(missing_ok=True)


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
