"""What the warehouse is built from: the published partitions of the tables that it copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.stages.rejections import decode
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
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
SOURCES = {"source": pl.String, "partition": pl.String, "version": pl.String}


@dataclass(frozen=True, slots=True)
class Source:
    """A partition of a stage's table."""

    stage: str
    table: Table
    partition: str


def sources(lake: Lake, lanes: Sequence[str], partitions: Sequence[str]) -> list[Source]:
    """What is published, of what was asked for."""
    tables = [("raw_shards", "ccnet"), *((stage, lane) for lane in lanes for stage in LANE_STAGES)]
    found = [(stage, lake.table(f"{group}/{stage}")) for stage, group in (*tables, ("augmented_corpus", "training"))]
    return [
        Source(stage, table, partition)
        for stage, table in found
        for partition in ([WHOLE] if stage in UNPARTITIONED else partitions)
        if table.has(partition)
    ]


def versions(found: Sequence[Source]) -> pl.DataFrame:
    """(source, partition, version) of each. Raises MissingPartition, DamagedPartition."""
    rows = [(source.table.name, source.partition, version(source.table, source.partition)) for source in found]
    return pl.DataFrame(rows, schema=SOURCES, orient="row")


def version(table: Table, partition: str) -> str:
    """Another one when rows, rejections or the applied tau_f change. Raises MissingPartition, DamagedPartition."""
    pointer = table.pointer(partition)
    tau_f = pointer.record.get("settings", {}).get("tau_f")
    return fingerprint({"rows": pointer.data_version, "rejections": decode(pointer.record), "tau_f": tau_f})
