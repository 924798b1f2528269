"""raw_shards: documents of CCNet shards, and the lines that are none."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from toolformer_dag.stages.publish import Output
from toolformer_dag.stages.rejections import Rejected
from toolformer_dag.stages.report import Clock, Progress, StageReport, silent
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.record import record
from toolformer_dag.texts.ccnet import Rejection, read_shard
from toolformer_dag.texts.document import Document

_log = logging.getLogger(__name__)
STAGE = "raw_shards"
GROUP = "ccnet"
REJECTED = "rejected_lines"
BATCH = 1000
LINES_KEPT = 1000
"""Rejected lines that are described, per partition; all are counted."""


def settings(shards: Mapping[str, Path]) -> dict[str, Any]:
    """What determines the rows beside the files' content."""
    return {"shards": sorted(shards)}


def inputs(shards: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """Size and time of change of every file, by shard name; a file that is not written yet is left out."""
    found = {name: path.stat() for name, path in sorted(shards.items()) if path.is_file()}
    return {name: {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns} for name, status in found.items()}


def raw_shards(lake: Lake, partition: str, shards: Mapping[str, Path], *, progress: Progress = silent) -> StageReport:
    """Reads the files of a partition, by shard name, one line at a time, and publishes documents and rejected lines.

    Memory: a batch of 1,000 documents and about 64 MB. A malformed line is counted and described, and the rest of its
    shard goes through; a shard without a document is warned of. Raises ShardError for a file that cannot be read at
    all; then nothing is published.
    """
    clock, reading = Clock(), _Reading(shards, progress)
    read = inputs(shards)  # before a line is read: a file that changes meanwhile is read again
    output = Output(lake, STAGE, GROUP, partition)
    report = output.publish(reading.frames(), settings(shards), read, reading.rejected, clock)
    described = pl.DataFrame(reading.lines, schema=columns(REJECTED), orient="row")
    lake.table(f"{GROUP}/{REJECTED}").publish(partition, [described], record(settings(shards), read))
    return report


class _Reading:
    """One pass over the files; `rejected` and `lines` are complete when `frames` is used up."""

    def __init__(self, shards: Mapping[str, Path], progress: Progress) -> None:
        self.rejected: Rejected = Counter()
        self.lines: list[dict[str, Any]] = []
        self._shards = sorted(shards.items())
        self._progress = progress

    def frames(self) -> Iterator[pl.DataFrame]:
        yield columns(STAGE).to_frame()
        for number, (shard, path) in enumerate(self._shards, start=1):
            batch: list[Document] = []
            for document in self._documents(shard, path):
                batch.append(document)
                if len(batch) == BATCH:
                    yield _frame(batch)
                    batch = []
            yield _frame(batch)
            self._progress(number, len(self._shards))

    def _documents(self, shard: str, path: Path) -> Iterator[Document]:
        found = 0
        for item in read_shard(path, shard):
            if isinstance(item, Rejection):
                self.rejected[shard, item.reason] += 1
                if len(self.lines) < LINES_KEPT:
                    self.lines.append(asdict(item))
            else:
                found += 1
                yield item
        if not found:
            reasons = ", ".join(f"{reason} {count}" for (of, reason), count in self.rejected.items() if of == shard)
            _log.warning("%s holds no document: %s", path, reasons)


def _frame(documents: list[Document]) -> pl.DataFrame:
    return pl.DataFrame([asdict(document) for document in documents], schema=columns(STAGE))
