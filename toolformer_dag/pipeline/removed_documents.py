"""removed_documents: find duplicate documents and, if the settings say so, equal texts and texts of benchmarks.

Each shard is screened by itself (screened_documents), then all shards are compared, so that no later stage has to.
Copies that differ in a character are not found: use tools for near-duplicates before (docs/howto/own-corpus.md).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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
    count_by_reason,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError, find_changed_unseen, irregular
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.queries import open_in_memory, quote_sql, read_sql_file, run_sql
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.compression import text_of
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.texts.shared_passages import MATCHING, SharedPassages

SCREENED_NAME = "ccnet/screened_documents"
NAME = "ccnet/removed_documents"
SQL = read_sql_file(__package__, "removed_documents.sql")
SCREENED_AT_ONCE = 2_000
"""Documents that are compared with the benchmarks at once."""
REMOVED_AT_ONCE = 100_000
"""Removed documents that memory holds at once."""

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BENCHMARK_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv", ".xml", ".txt", ".tokens")
"""Suffixes of the benchmark files in a folder."""
ANSWER_FIELDS = re.compile("answer|alias|target|label|url|id$", re.IGNORECASE)
"""Fields of JSON that hold no question: a page with an answer of eight words would be removed."""
MARKUP_TAG = re.compile(r"<[^<>]+>")


def screening(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what screened_documents depends on, apart from the documents: the content of the benchmark files."""
    files = [[file.name, file_hash(file)] for file in benchmark_files(plan)]
    return {"matching": MATCHING, "benchmarks": files}


def benchmark_files(plan: Plan) -> list[Path]:
    """Return the benchmark files of the setting `corpus.decontaminate`, sorted, files in its folders included.

    Raises UserError for a path that is no regular file, and for a folder without such files.
    """
    benchmarks: set[Path] = set()
    for path in plan.settings.corpus.decontaminate:
        files = _list_files(path)
        if not files:
            raise UserError(
                f"corpus.decontaminate: {path} is no file of a benchmark, and no folder with any; correct it"
            )
        benchmarks.update(files)
    return sorted(benchmarks)


def _list_files(path: Path) -> list[Path]:
    """Return the regular file at a path, or the files of BENCHMARK_SUFFIXES below a folder; empty if there is none."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in BENCHMARK_SUFFIXES and file.is_file())
    is_regular = path.exists() and not irregular(path)
    return [path] if is_regular else []


def screened_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Hash the documents of a shard, and find passages of the benchmark files in them.

    Raises UserError if a benchmark file is damaged or cannot be read.
    """
    hashed_files = tuple(_HashedFile(file, file_hash(file)) for file in benchmark_files(worker.plan))
    return PartRows(_screen_documents(worker.plan, shard, _read_benchmark_texts(hashed_files)))


def _screen_documents(plan: Plan, shard: str, benchmarks: "_BenchmarkTexts") -> Iterator[pl.DataFrame]:
    """Yield a row per document of a shard: the hash of its text, and the benchmark file with a passage of it."""
    for documents in raw_shards.documents(plan, shard):
        for batch in documents.iter_slices(SCREENED_AT_ONCE):
            texts = batch["text"].to_list()
            digests = [text_digest(text) for text in texts]
            yield batch.select(
                "shard",
                "digest",
                text_digest=pl.Series(digests, dtype=pl.String),
                benchmark=pl.Series(benchmarks.files_of(texts), dtype=pl.String),
            )


class _HashedFile(NamedTuple):
    """A benchmark file with the hash of its content, which may be cached."""

    path: Path
    content_hash: str


class _BenchmarkTexts:
    """The texts of benchmark files, indexed by their passages (13 words in a row). Memory: the passages."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the files. Raises UserError for a file that cannot be read."""
        texts: list[str] = []
        self._file_names: list[str] = []  # for each text, the name of its file
        for file in files:
            for text in question_texts(file):
                texts.append(text)
                self._file_names.append(file.name)
        self._passages = SharedPassages(texts)

    def files_of(self, documents: list[str]) -> list[str | None]:
        """Return for each document the name of the first benchmark file with which it shares a passage, else None."""
        file_of_document: dict[int, str] = {}
        matches = self._passages.find_pairs_in(documents)  # (index of a document, index of a benchmark text)
        for document, benchmark_text in matches.iter_rows():
            file_of_document.setdefault(document, self._file_names[benchmark_text])
        return [file_of_document.get(document) for document in range(len(documents))]


@lru_cache(maxsize=1)  # every shard is compared with the same files
def _read_benchmark_texts(files: tuple[_HashedFile, ...]) -> _BenchmarkTexts:
    """Read the benchmark files. Raises UserError for a file whose content has another hash."""
    paths = [file.path for file in files]
    damaged = find_changed_unseen(paths)
    if damaged is not None:
        raise UserError(f"corpus.decontaminate: {damaged} is damaged: it is not what it was when it was hashed")
    return _BenchmarkTexts(paths)


def question_texts(file: Path) -> list[str]:
    """Return the questions of a benchmark file, with which a document must not share a passage.

    Of JSON or JSON lines they are the strings, except in ANSWER_FIELDS; of any other text file its lines, in which
    spaces replace markup tags.

    Raises UserError for a file that cannot be read, or that should be JSON by its name and first character and is not.
    """
    content = _read_content(file)
    questions = _parse_json_questions(content)  # None if the content is neither JSON nor JSON lines
    if questions is not None:
        return questions
    if file.suffix in JSON_SUFFIXES and content.lstrip().startswith(("{", "[")):
        raise UserError(f"corpus.decontaminate: {file} is no readable JSON or JSON lines; correct it, or get it anew")
    return [MARKUP_TAG.sub(" ", line) for line in _split_lines(content)]


def _parse_json_questions(content: str) -> list[str] | None:
    """Return the strings of a JSON value or of JSON lines, without answers; None if the content is neither."""
    questions = _parse_question_strings([content])
    if questions is None:
        questions = _parse_question_strings(_split_lines(content))
    return questions


def _split_lines(content: str) -> list[str]:
    """Return the lines of a text that are not blank."""
    return [line for line in content.split("\n") if line.strip()]


def _read_content(file: Path) -> str:
    """Read a benchmark file. Raises UserError if it is no text in UTF-8."""
    try:
        return text_of(file)
    except (OSError, ValueError) as error:
        raise UserError(f"corpus.decontaminate: {file} cannot be read as text ({error}); name text files") from error


def _parse_question_strings(records: Sequence[str]) -> list[str] | None:
    """Return the strings of JSON values, without answers; None if a record is no JSON, or nested too deeply to read."""
    strings: list[str] = []
    try:
        for record in records:
            strings += _iter_strings(json.loads(record))
    except (ValueError, RecursionError):
        return None
    return strings


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, however deep, except in fields that hold no question (ANSWER_FIELDS)."""
    if isinstance(value, str):
        yield value.encode("utf-8", "ignore").decode()  # half a character is in no document
    elif isinstance(value, list):
        for item in value:
            yield from _iter_strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not ANSWER_FIELDS.search(key):
                yield from _iter_strings(item)


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
    """Return a function from a shard to the versions of its documents and of its removed documents."""
    lake = output.plan.lake
    return versions({"raw_shards": lake.table(raw_shards.NAME)}, over_all=lake.table(NAME))


def documents(plan: Plan, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard that are not removed, in their order, with the columns of `raw_shards.documents`.

    Raises MissingPart, DamagedPart.
    """
    removed_documents = plan.lake.table(NAME).scan([WHOLE])
    removed = removed_documents.filter(pl.col("shard") == shard).select("digest").collect()
    for batch in raw_shards.documents(plan, shard):
        yield batch.join(removed, on="digest", how="anti", maintain_order="left")


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what the rows depend on, apart from the screened documents: a setting and the SQL text."""
    return {**determining(plan.settings.corpus, "deduplicate"), "sql": fingerprint(SQL)}


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Return the documents of all shards that are removed: copies of others, and texts of benchmarks.

    Each is also a rejection of its shard.
    """
    removal = _Removal(output)
    return PartRows(removal.frames(), rejected=removal.rejected, facts={BY_SHARD: removal.by_shard})


class _Removal:
    """Chooses the documents that are removed, over all shards: `frames` yields them and fills two more results.

    - `rejected`: removed documents, by (shard, reason)
    - `by_shard`: a hash of the removed digests of each shard, by which other stages see whose documents changed

    Both are complete after the last frame.
    """

    def __init__(self, output: TableOutput) -> None:
        self.rejected: Rejected = Counter()
        self.by_shard: dict[str, str] = {}
        self._output = output

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yield rows for the removed documents, sorted by shard and digest; count them in `rejected` and `by_shard`."""
        schema = self._output.stage.schema
        files = self._output.plan.lake.table(SCREENED_NAME).list_all_files()
        if not files:
            return
        for frame in _query_removed_documents(files, self._output.plan.settings.corpus.deduplicate):
            self._count_removed(frame)
            yield frame.select(schema.names()).cast(schema)

    def _count_removed(self, removed: pl.DataFrame) -> None:
        """Count a batch of removed documents in `rejected`, and add their digests to the hashes in `by_shard`."""
        self.rejected.update(count_by_reason(removed))
        for (shard,), rows_of_shard in removed.group_by("shard", maintain_order=True):
            name = str(shard)
            digests = rows_of_shard["digest"].to_list()
            self.by_shard[name] = fingerprint([self.by_shard.get(name), digests])


def _query_removed_documents(files: Sequence[str], deduplicate: bool) -> Iterator[pl.DataFrame]:
    """Yield the documents that are copies of others or hold a passage of a benchmark, sorted by shard and digest.

    files: the Parquet files of the screened documents. deduplicate: whether copies are removed.
    """
    # DuckDB compares and sorts on disk, so memory does not grow with the corpus.
    with TemporaryDirectory() as spilled, open_in_memory() as connection:
        connection.execute(f"SET temp_directory = {quote_sql(spilled)}")
        run_sql(connection, SQL, {"files": files, "deduplicate": deduplicate})  # creates `removed`
        for batch in connection.sql("FROM removed ORDER BY shard, digest").to_arrow_reader(REMOVED_AT_ONCE):
            yield pl.DataFrame(batch)


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
