"""removed_documents: equal texts but one, and texts that share a passage with a benchmark; and what is left of a shard.

Both are optional (`corpus.deduplicate`, `corpus.decontaminate`), and without them the graph lacks these tables. Copies
that differ in a character are not found: tools made for near-duplicates run before (docs/howto/corpora.md).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import in_memory, quoted, run_sql, sql_text
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.pipeline import raw_shards, screened_documents
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stage import (
    DIGEST,
    SHARD,
    Column,
    InputsOf,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
    counted,
)
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.setting_types import determining

NAME = "ccnet/removed_documents"
SQL = sql_text(__package__, "removed_documents.sql")
BY_SHARD = "by_shard"
"""The field of the record that holds a fingerprint of each shard's removals."""
BATCH_ROWS = 100_000


def chosen(plan: Plan) -> bool:
    """Return whether the settings ask for documents to be removed."""
    return bool(plan.settings.corpus.deduplicate or plan.settings.corpus.decontaminate)


def reads(plan: Plan) -> tuple[str, ...]:
    """Return this table's name where documents are removed: for the `plan_reads` of stages that read `documents`."""
    return (NAME,) if chosen(plan) else ()


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the version of a shard's documents, and of what is removed of it, if anything is."""
    plan = output.plan
    raw, removed = plan.lake.table(raw_shards.NAME), plan.lake.table(NAME)
    pointer = removed.whole_pointer(WHOLE) if chosen(plan) else None
    by_shard: Mapping[str, str] = pointer.record[BY_SHARD] if pointer else {}

    def of(shard: str) -> Mapping[str, Any]:
        found = {"raw_shards": raw.part_version(shard)}
        return found | ({"removed_documents": by_shard[shard]} if shard in by_shard else {})

    return of


def documents(plan: Plan, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard that stay, as `raw_shards.documents` does. Raises MissingPart."""
    batches = raw_shards.documents(plan, shard)
    if not chosen(plan):
        yield from batches
        return
    gone = plan.lake.table(NAME).scan([WHOLE]).filter(pl.col("shard") == shard).select("digest").collect()
    for batch in batches:
        yield batch.join(gone, on="digest", how="anti", maintain_order="left")


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the screened documents."""
    return {**determining(plan.settings.corpus, "deduplicate"), "sql": fingerprint(SQL)}


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Choose over all shards, out of core; each removal is a row and counts as a rejection of its shard."""
    rejected: Rejected = Counter()
    by_shard: dict[str, str] = {}
    return PartRows(_frames(output, rejected, by_shard), rejected, facts={BY_SHARD: by_shard})


def _frames(output: TableOutput, rejected: Rejected, by_shard: dict[str, str]) -> Iterator[pl.DataFrame]:
    plan, schema = output.plan, output.stage.schema
    yield schema.to_frame()
    table = plan.lake.table(screened_documents.NAME)
    files = table.all_files()
    if not files:
        return
    with TemporaryDirectory() as scratch, in_memory() as connection:
        connection.execute(f"SET temp_directory = {quoted(scratch)}")
        run_sql(connection, SQL, {"files": files, "deduplicate": plan.settings.corpus.deduplicate})
        for frame in _batches(connection):
            rejected.update(counted(frame))
            for (shard,), some in frame.group_by("shard", maintain_order=True):
                by_shard[str(shard)] = fingerprint([by_shard.get(str(shard)), some["digest"].to_list()])
            yield frame.select(schema.names()).cast(schema)


def _batches(connection: duckdb.DuckDBPyConnection) -> Iterator[pl.DataFrame]:
    """Yield the removed documents by shard and digest."""
    for batch in connection.sql("FROM removed ORDER BY shard, digest").to_arrow_reader(BATCH_ROWS):
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        yield frame


STAGE = Stage(
    name="removed_documents",
    description="Documents that are left out before texts are chosen: equal texts but one, and texts of benchmarks.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "reason": Column(pl.String(), "duplicate_text or in_benchmark"),
        "benchmark": Column(pl.String(), "benchmark file that shares 13 words in a row with it"),
        "kept_shard": Column(pl.String(), "shard of the copy that stays"),
        "kept_digest": Column(pl.String(), "digest of the copy that stays"),
    },
    key=("shard", "digest"),
    settings=settings,
    reads=(screened_documents.NAME,),
    group="ccnet",
    sharded=False,
    kinds=frozenset({"duckdb", "sql"}),
    rows=rows,
)
