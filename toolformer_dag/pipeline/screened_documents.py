"""screened_documents: the hash of every document's text, and the benchmark file of which it holds a passage."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from toolformer_dag.files import UserError, irregular
from toolformer_dag.identity import file_hash
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stage import DIGEST, SHARD, Column, PartRows, Stage, TableOutput
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.texts.shared_passages import MATCHING, SharedPassages

NAME = "ccnet/screened_documents"
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".xml", ".txt", ".tokens")
"""Files that are read of a folder."""
NOT_ASKED = re.compile("answer|alias|target|label|url|id$", re.IGNORECASE)
"""Fields of JSON that hold no question: a page with an answer of eight words would be removed."""
TAG = re.compile(r"<[^<>]+>")
BATCH = 2_000


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the documents: the benchmark files' names and content."""
    return {"matching": MATCHING, "benchmarks": [[file.name, file_hash(file)] for file in benchmark_files(plan)]}


def benchmark_files(plan: Plan) -> list[Path]:
    """Return the files of `corpus.decontaminate`; of a folder, those of SUFFIXES. Raises UserError."""
    found: list[Path] = []
    for path in plan.settings.corpus.decontaminate:
        inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        files = inside if path.is_dir() else [path]
        if not files or not path.exists() or irregular(files[0]):
            raise UserError(
                f"corpus.decontaminate: {path} is no file of a benchmark, and no folder with any; correct it"
            )
        found += files
    return sorted(set(found))


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Hash the documents of a shard and look for passages of the benchmark files in them. Memory: those passages."""
    files = benchmark_files(worker.plan)
    return PartRows(_frames(worker.plan, shard, _passages(tuple((file, file_hash(file)) for file in files)), output))


def _frames(plan: Plan, shard: str, known: "_Known", output: TableOutput) -> Iterator[pl.DataFrame]:
    passages, names = known
    yield output.stage.schema.to_frame()
    for documents in plan.lake.table(raw_shards.NAME).batches(shard):
        for at in range(0, documents.height, BATCH):
            some = documents[at : at + BATCH]
            texts = some["text"].to_list()
            found = {place: names[text] for place, text in reversed(passages.found_in(texts).rows())}
            yield some.select(
                "shard",
                "digest",
                text_digest=pl.Series([text_digest(text) for text in texts], dtype=pl.String),
                benchmark=pl.Series([found.get(place) for place in range(len(texts))], dtype=pl.String),
            )


_Known = tuple[SharedPassages, list[str]]
"""The passages of the benchmark files, and the name of each text's file."""


@lru_cache(maxsize=1)
def _passages(files: tuple[tuple[Path, str], ...]) -> _Known:
    texts = [(text, file.name) for file, _ in files for text in asked_texts(file)]
    return SharedPassages([text for text, _ in texts]), [name for _, name in texts]


def asked_texts(file: Path) -> list[str]:
    """Return the texts of a benchmark file: strings of JSON or JSON lines but for answers, else lines without tags.

    Raises UserError for a file that is no text in UTF-8.
    """
    try:
        content = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"corpus.decontaminate: {file} cannot be read as text ({error}); name text files") from error
    lines = [line for line in content.split("\n") if line.strip()]
    try:
        return list(_strings(json.loads(content)))
    except (ValueError, RecursionError):
        pass
    try:
        return [text for line in lines for text in _strings(json.loads(line))]
    except (ValueError, RecursionError):
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


STAGE = Stage(
    name="screened_documents",
    description="The hash of each document's text, and the benchmark file of which it holds 13 words in a row.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "text_digest": Column(pl.String(), "hash of the document's text"),
        "benchmark": Column(pl.String(), "file of `corpus.decontaminate` that shares a passage with it; null for none"),
    },
    key=("shard", "digest"),
    settings=settings,
    reads=(raw_shards.NAME,),
    group="ccnet",
    shard_rows=rows,
)
