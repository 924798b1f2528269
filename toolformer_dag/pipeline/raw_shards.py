"""raw_shards: the documents of the shard files, and the lines that hold none."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import polars as pl

from toolformer_dag.identity import stream_hash
from toolformer_dag.lake.record import record
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.shards import ShardFile, stamps, write_small_web
from toolformer_dag.pipeline.stage import DIGEST, SHARD, Column, PartRows, Rejected, Stage, TableOutput
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts.ccnet import LATEST_DATE, Rejection, ShardError, read_shard
from toolformer_dag.texts.document import Document

_log = logging.getLogger(__name__)
READER = 8
"""Raised when the same file would give other rows; a golden test notices where it was not."""
BATCH = 1000
LINES_KEPT = 1000
"""Rejected lines that are described, per shard; all are counted."""
UNREADABLE, CONTENT = "unreadable", "content"
NAME = "ccnet/raw_shards"
REJECTED_LINES = "ccnet/rejected_lines"
LINES = pl.Schema({"shard": pl.String(), "line": pl.Int64(), "reason": pl.String(), "detail": pl.String()})
"""`line`: from 1; 0 for the file as a whole. `detail`: what was found there."""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the files' content."""
    return {"reader": READER, "latest_date": LATEST_DATE.isoformat()}


def inputs(plan: Plan, part: str) -> Mapping[str, Any]:
    """Return size and time of change of the shard's file."""
    files = {part: plan.shards[part]} if part in plan.shards else {}
    return stamps(files).get(part, {})


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Read a shard file, a line at a time. Memory: a batch of 1,000 documents and about 64 MB.

    A malformed line is counted and described, and the rest of its shard goes through. A file that cannot be read at
    all is one rejection (`unreadable`) and stops no other; the next run tries it again. A shard without a document is
    warned of.
    """
    if not worker.plan.settings.corpus.shards:
        write_small_web(worker.plan.settings)
    file = worker.plan.shards[shard]
    reading = _Reading(file)
    return PartRows(reading.frames(output), reading.rejected, facts=_content(file), retry=lambda: reading.retry)


def _content(file: ShardFile) -> Mapping[str, Any]:
    """The hash of the shard file, with which `verify` notices a change that keeps size and time."""
    try:
        return {CONTENT: stream_hash(file.path)}
    except OSError:  # reading says so, as a rejection
        return {}


class _Reading:
    """One pass over a file; `rejected` and `retry` are complete when `frames` is used up."""

    def __init__(self, file: ShardFile) -> None:
        self.rejected: Rejected = Counter()
        self.retry: str | None = None
        self._file = file
        self._lines: list[dict[str, Any]] = []

    def frames(self, output: TableOutput) -> Iterator[pl.DataFrame]:
        schema = output.stage.schema
        yield schema.to_frame()
        batch: list[Document] = []
        for document in self._documents():
            batch.append(document)
            if len(batch) == BATCH:
                yield pl.DataFrame([asdict(one) for one in batch], schema=schema)
                batch = []
        yield pl.DataFrame([asdict(one) for one in batch], schema=schema)
        described = pl.DataFrame(self._lines, schema=LINES, orient="row")
        output.plan.lake.table(REJECTED_LINES).publish(
            self._file.name, [described], lambda: record(output.settings, output.inputs(self._file.name))
        )

    def _documents(self) -> Iterator[Document]:
        found = 0
        try:
            for item in read_shard(self._file.path, self._file.name):
                if isinstance(item, Rejection):
                    self._reject(item)
                else:
                    found += 1
                    yield item
        except ShardError as error:
            self.retry = f"{self._file.name} could not be read: {error}"
            self._reject(Rejection(self._file.name, 0, UNREADABLE, str(error)))
            _log.warning("%s", error)
        if not found and self.retry is None:
            reasons = ", ".join(f"{reason} {count}" for (_, reason), count in self.rejected.items())
            _log.warning("%s holds no document: %s", self._file.path, reasons)

    def _reject(self, item: Rejection) -> None:
        self.rejected[self._file.name, item.reason] += 1
        if len(self._lines) < LINES_KEPT:
            self._lines.append(asdict(item))


STAGE = Stage(
    name="raw_shards",
    description="Documents of CCNet shards, with the date their URL tells; a refused line is counted by reason.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "url": Column(pl.String(), "where the document was found"),
        "domain": Column(pl.String(), "domain of the URL"),
        "title": Column(pl.String(), "title of the page"),
        "date": Column(pl.Date(), "day in the URL, if it holds one"),
        "language": Column(pl.String(), "language by CCNet"),
        "text": Column(pl.String(), "the document"),
    },
    key=("shard", "digest"),
    settings=settings,
    also_reads=("ccnet/shard_list",),
    group="ccnet",
    inputs=inputs,
    beside=(REJECTED_LINES,),
    warehouse_name="documents",
    shard_rows=rows,
)
