"""Shard files that came, went or changed since their rows were made: what Dagster cannot see."""

from collections.abc import Mapping, Sequence

from toolformer_dag.shards import ShardFile, paths_by_name
from toolformer_dag.stages import raw_shards
from toolformer_dag.storage.errors import DamagedPartition
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.table import Table

TABLE = "ccnet/raw_shards"


def unread_shards(lake: Lake, files: Mapping[str, Sequence[ShardFile]]) -> list[str]:
    """Partitions of `files` without rows, or with rows of other files."""
    table = lake.table(TABLE)
    return [name for name in files if not table.has(name) or _changed(table, name, files[name])]


def changed_shards(lake: Lake, files: Mapping[str, Sequence[ShardFile]]) -> list[str]:
    """Those that have rows: a file came or went, or has another size or time of change than when it was read."""
    table = lake.table(TABLE)
    return [name for name in unread_shards(lake, files) if table.has(name)]


def _changed(table: Table, name: str, files: Sequence[ShardFile]) -> bool:
    try:
        read = table.record(name)["inputs"]
    except DamagedPartition:
        return True
    return bool(read != raw_shards.inputs(paths_by_name(files)))
