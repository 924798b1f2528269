"""Shard files that came, went or changed since their rows were made: what Dagster cannot see."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from toolformer_dag.shards import ShardFile
from toolformer_dag.storage.errors import DamagedPartition
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.table import Table

TABLE = "ccnet/raw_shards"
RESOLUTION = 1.0
"""Seconds: a record's time is cut to whole ones."""


def unread_shards(lake: Lake, files: Mapping[str, Sequence[ShardFile]]) -> list[str]:
    """Partitions of `files` without rows, or with rows of other files."""
    table = lake.table(TABLE)
    return [name for name in files if not table.has(name) or _changed(table, name, files[name])]


def changed_shards(lake: Lake, files: Mapping[str, Sequence[ShardFile]]) -> list[str]:
    """Those that have rows: a file came or went, has another size, or was written after the rows were."""
    table = lake.table(TABLE)
    return [name for name in unread_shards(lake, files) if table.has(name)]


def sizes(files: Sequence[ShardFile]) -> dict[str, int]:
    """Bytes by name, as the record of the rows holds them; a file that is not written yet is left out."""
    return {file.name: file.path.stat().st_size for file in files if file.path.exists()}


def _changed(table: Table, name: str, files: Sequence[ShardFile]) -> bool:
    try:
        record = table.record(name)
    except DamagedPartition:
        return True
    written = datetime.fromisoformat(record["written"]).timestamp() + RESOLUTION
    times = [file.path.stat().st_mtime for file in files if file.path.exists()]
    newer = any(written < changed <= time.time() for changed in times)  # a time to come is that of a wrong clock
    return newer or sizes(files) != record["inputs"]
