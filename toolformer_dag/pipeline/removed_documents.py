"""removed_documents: documents that an earlier shard has; equal texts but one, and texts of benchmarks, where asked.

So a document counts once, before anything is computed for it, and no later stage compares shards. A shard is screened
by itself (screened_documents), then all shards are compared. Copies that differ in a character are not found: tools
made for near-duplicates run before (docs/howto/own-corpus.md).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import (
    BY_SHARD,
    DIGEST,
    SHARD,
    ByPart,
    ByShard,
    Column,
    InputsOf,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
    counted,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError, changed_unseen, irregular
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.queries import in_memory, quoted, run_sql, sql_text
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.compression import text_of
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.texts.shared_passages import MATCHING, SharedPassages

SCREENED_NAME, NAME = "ccnet/screened_documents", "ccnet/removed_documents"
SQL = sql_text(__package__, "removed_documents.sql")
SCREENED_AT_ONCE, REMOVED_AT_ONCE = 2_000, 100_000
"""Documents."""

JSON = (".json", ".jsonl", ".ndjson")
SUFFIXES = (*JSON, ".csv", ".tsv", ".xml", ".txt", ".tokens")
"""Benchmark files that are read of a folder."""
NOT_ASKED = re.compile("answer|alias|target|label|url|id$", re.IGNORECASE)
"""Fields of JSON that hold no question: a page with an answer of eight words would be removed."""
TAG = re.compile(r"<[^<>]+>")


def screening(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the documents: the benchmark files' names and content."""
    return {"matching": MATCHING, "benchmarks": [[file.name, file_hash(file)] for file in benchmark_files(plan)]}


def benchmark_files(plan: Plan) -> list[Path]:
    """Return the files of `corpus.decontaminate`; of a folder, those of SUFFIXES. Raises UserError."""
    listed: list[Path] = []
    for path in plan.settings.corpus.decontaminate:
        inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        files = inside if path.is_dir() else [path]
        if not files or not path.exists() or irregular(files[0]):
            raise UserError(
                f"corpus.decontaminate: {path} is no file of a benchmark, and no folder with any; correct it"
            )
        listed += files
    return sorted(set(listed))


def screened_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Hash the documents of a shard and look for passages of the benchmark files in them. Memory: those passages."""
    passages, names = _passages(tuple((file, file_hash(file)) for file in benchmark_files(worker.plan)))

    def frames() -> Iterator[pl.DataFrame]:
        for documents in raw_shards.documents(worker.plan, shard):
            for batch in documents.iter_slices(SCREENED_AT_ONCE):
                benchmarks = {
                    place: names[text] for place, text in reversed(passages.found_in(batch["text"].to_list()).rows())
                }
                yield batch.select(
                    "shard",
                    "digest",
                    text_digest=pl.Series(map(text_digest, batch["text"]), dtype=pl.String),
                    benchmark=pl.Series([benchmarks.get(place) for place in range(batch.height)], dtype=pl.String),
                )

    return PartRows(frames())


@lru_cache(maxsize=1)
def _passages(files: tuple[tuple[Path, str], ...]) -> tuple[SharedPassages, list[str]]:
    """The passages of the benchmark files, and the name of each text's file."""
    if damaged := changed_unseen(file for file, _ in files):
        raise UserError(f"corpus.decontaminate: {damaged} is damaged: it is not what it was when it was hashed")
    texts = [(text, file.name) for file, _ in files for text in asked_texts(file)]
    return SharedPassages([text for text, _ in texts]), [name for _, name in texts]


def asked_texts(file: Path) -> list[str]:
    """Return the texts of a benchmark file: strings of JSON or JSON lines but for answers, else lines without tags.

    Raises UserError for a file that is no text in UTF-8, and for one of JSON that cannot be read as such.
    """
    try:
        content = text_of(file)
    except (OSError, ValueError) as error:
        raise UserError(f"corpus.decontaminate: {file} cannot be read as text ({error}); name text files") from error
    lines = [line for line in content.split("\n") if line.strip()]
    for records in ([content], lines):
        with suppress(ValueError, RecursionError):
            return [text for record in records for text in _strings(json.loads(record))]
    if file.suffix in JSON and content.lstrip().startswith(("{", "[")):
        raise UserError(f"corpus.decontaminate: {file} is no readable JSON or JSON lines; correct it, or get it anew")
    return [TAG.sub(" ", line) for line in lines]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.encode("utf-8", "ignore").decode()  # half a character is in no document
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not NOT_ASKED.search(key):
                yield from _strings(item)


SCREENED = Stage(
    name="screened_documents",
    description="The hash of each document's text, and the benchmark file of which it holds 13 words in a row.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "text_digest": Column(pl.String(), "hash of the document's text"),
        "benchmark": Column(pl.String(), "file of `corpus.decontaminate` that shares a passage with it; null for none"),
    },
    key=("shard", "digest"),
    settings=screening,
    reads=(raw_shards.NAME,),
    group="ccnet",
    make=ByShard(screened_rows),
)


READS = (raw_shards.NAME, NAME)
"""The tables that `documents` reads."""


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the version of a shard's documents, and of what is removed of it, if anything is."""
    table = output.plan.lake.table
    return versions({"raw_shards": table(raw_shards.NAME)}, table(NAME))


def documents(plan: Plan, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard that stay, as `raw_shards.documents` does. Raises MissingPart."""
    gone = plan.lake.table(NAME).scan([WHOLE]).filter(pl.col("shard") == shard).select("digest").collect()
    for batch in raw_shards.documents(plan, shard):
        yield batch.join(gone, on="digest", how="anti", maintain_order="left")


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the screened documents."""
    return {**determining(plan.settings.corpus, "deduplicate"), "sql": fingerprint(SQL)}


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Choose over all shards, out of core; each removal is a row and counts as a rejection of its shard."""
    plan, schema = output.plan, output.stage.schema
    rejected: Rejected = Counter()
    by_shard: dict[str, str] = {}

    def frames() -> Iterator[pl.DataFrame]:
        files = plan.lake.table(SCREENED_NAME).all_files()
        if not files:
            return
        with TemporaryDirectory() as spilled, in_memory() as connection:
            connection.execute(f"SET temp_directory = {quoted(spilled)}")
            run_sql(connection, SQL, {"files": files, "deduplicate": plan.settings.corpus.deduplicate})
            batches = connection.sql("FROM removed ORDER BY shard, digest").to_arrow_reader(REMOVED_AT_ONCE)
            for frame in map(pl.DataFrame, batches):
                rejected.update(counted(frame))
                for (shard,), of_shard in frame.group_by("shard", maintain_order=True):
                    by_shard[str(shard)] = fingerprint([by_shard.get(str(shard)), of_shard["digest"].to_list()])
                yield frame.select(schema.names()).cast(schema)

    return PartRows(frames(), rejected, facts={BY_SHARD: by_shard})


STAGE = Stage(
    name="removed_documents",
    description="Documents that are left out before texts are chosen: copies of others, and texts of benchmarks.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "reason": Column(pl.String(), "duplicate_document (an earlier shard has it), duplicate_text or in_benchmark"),
        "benchmark": Column(pl.String(), "benchmark file that shares 13 words in a row with it"),
        "kept_shard": Column(pl.String(), "shard of the copy that stays"),
        "kept_digest": Column(pl.String(), "digest of the copy that stays"),
    },
    key=("shard", "digest"),
    settings=settings,
    reads=(SCREENED_NAME,),
    group="ccnet",
    sharded=False,
    kinds=frozenset({"duckdb", "sql"}),
    make=ByPart(rows),
)
