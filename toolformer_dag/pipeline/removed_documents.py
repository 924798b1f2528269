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
    BY_SHARD_FIELD,
    DIGEST,
    SHARD,
    ByPart,
    ByShard,
    Column,
    InputsFinder,
    PartRows,
    RejectionCounts,
    Stage,
    TableOutput,
    build_versions_finder,
    count_rejected_rows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError, find_irregular_kind, find_silently_changed_file
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.queries import open_memory_database, quote_sql, read_sql_file, run_sql
from toolformer_dag.lake.table import WHOLE_TABLE_PART
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.compression import read_utf8_text
from toolformer_dag.texts.segments import compute_text_digest
from toolformer_dag.texts.shared_passages import MATCHING_VERSION, SharedPassages

SCREENED_TABLE_NAME = "ccnet/screened_documents"
TABLE_NAME = "ccnet/removed_documents"
REMOVED_DOCUMENTS_SQL = read_sql_file(__package__, "removed_documents.sql")
SCREENING_BATCH_SIZE = 2_000
"""Documents that are compared with the benchmarks at once."""
REMOVED_BATCH_SIZE = 100_000
"""Removed documents that memory holds at once."""

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BENCHMARK_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv", ".xml", ".txt", ".tokens")
"""Suffixes of the benchmark files in a folder."""
ANSWER_FIELDS = re.compile("answer|alias|target|label|url|id$", re.IGNORECASE)
"""Fields of JSON that hold no question: a page with an answer of eight words would be removed."""
MARKUP_TAG = re.compile(r"<[^<>]+>")


def collect_screening_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what screened_documents depends on apart from the documents: the content of the benchmark files."""
    files = [[file.name, file_hash(file)] for file in list_benchmark_files(plan)]
    return {"matching": MATCHING_VERSION, "benchmarks": files}


def list_benchmark_files(plan: Plan) -> list[Path]:
    """Return the benchmark files of the setting `corpus.decontaminate`, sorted, files in its folders included.

    Raises:
        UserError: A path is no regular file, or a folder without such files.
    """
    benchmark_paths: set[Path] = set()
    for path in plan.settings.corpus.decontaminate:
        files_at_path = _list_files_at_path(path)
        if not files_at_path:
            raise UserError(
                f"corpus.decontaminate: {path} is no file of a benchmark, and no folder with any; correct it"
            )
        benchmark_paths.update(files_at_path)

    return sorted(benchmark_paths)


def _list_files_at_path(path: Path) -> list[Path]:
    """Return the regular file at a path, or the files of BENCHMARK_SUFFIXES below a folder.

    The list is empty if there is no such file.
    """
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in BENCHMARK_SUFFIXES and file.is_file())

    is_regular_file = path.exists() and not find_irregular_kind(path)
    return [path] if is_regular_file else []


def build_screened_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Hash the documents of a shard, and find passages of the benchmark files in them.

    Raises:
        UserError: A benchmark file is damaged or cannot be read.
    """
    benchmark_paths = list_benchmark_files(worker.plan)
    hashed_files = tuple(_HashedFile(path, file_hash(path)) for path in benchmark_paths)
    benchmark_texts = _read_benchmark_texts(hashed_files)
    return PartRows(_iter_screened_documents(worker.plan, shard, benchmark_texts))


def _iter_screened_documents(plan: Plan, shard: str, benchmark_texts: "_BenchmarkTexts") -> Iterator[pl.DataFrame]:
    """Yield frames with a row per document of a shard, which says with which benchmark file it shares a passage.

    Yields:
        Frames with the columns shard, digest, text_digest (the hash of the text) and benchmark (the name of the file,
        null for none).
    """
    for documents in raw_shards.iter_documents(plan, shard):
        for batch in documents.iter_slices(SCREENING_BATCH_SIZE):
            texts = batch["text"].to_list()
            digests = [compute_text_digest(text) for text in texts]
            yield batch.select(
                "shard",
                "digest",
                text_digest=pl.Series(digests, dtype=pl.String),
                benchmark=pl.Series(benchmark_texts.find_file_names(texts), dtype=pl.String),
            )


class _HashedFile(NamedTuple):
    """A benchmark file with the hash of its content.

    Attributes:
        content_hash: May come from a cache, so the file may have changed since.
    """

    path: Path
    content_hash: str


class _BenchmarkTexts:
    """The texts of benchmark files, indexed by their passages (13 words in a row), which stay in memory."""

    def __init__(self, benchmark_paths: Sequence[Path]) -> None:
        """Read the questions in the files, and index them, so that documents that share a passage can be found.

        Raises:
            UserError: A file cannot be read.
        """
        texts: list[str] = []
        self._file_name_by_text_index: list[str] = []  # for each text, the name of its file

        for path in benchmark_paths:
            for text in read_question_texts(path):
                texts.append(text)
                self._file_name_by_text_index.append(path.name)

        self._shared_passages = SharedPassages(texts)

    def find_file_names(self, document_texts: list[str]) -> list[str | None]:
        """Return for each document the name of the first benchmark file with which it shares a passage.

        Args:
            document_texts: The texts of the documents.

        Returns:
            A name per document, in the same order. None for a document that shares no passage.
        """
        file_name_by_document: dict[int, str] = {}

        # Pairs of the index of a document and the index of a benchmark text.
        matches = self._shared_passages.find_shared_pairs(document_texts)
        for document_index, text_index in matches.iter_rows():
            file_name_by_document.setdefault(document_index, self._file_name_by_text_index[text_index])

        return [file_name_by_document.get(document_index) for document_index in range(len(document_texts))]


@lru_cache(maxsize=1)  # every shard is compared with the same files
def _read_benchmark_texts(hashed_files: tuple[_HashedFile, ...]) -> _BenchmarkTexts:
    """Read the benchmark files.

    Args:
        hashed_files: The files. Their hashes are part of the key under which the result is cached.

    Raises:
        UserError: A file cannot be read, or its content is not what was hashed.
    """
    paths = [file.path for file in hashed_files]

    damaged_path = find_silently_changed_file(paths)
    if damaged_path is not None:
        raise UserError(f"corpus.decontaminate: {damaged_path} is damaged: it is not what it was when it was hashed")

    return _BenchmarkTexts(paths)


def read_question_texts(benchmark_path: Path) -> list[str]:
    """Return the questions of a benchmark file, with which a document must not share a passage.

    In JSON or JSON lines, the questions are the strings, except those in ANSWER_FIELDS. In any other text file, they
    are the lines, in which spaces replace markup tags.

    Raises:
        UserError: The file cannot be read, or should be JSON by its name and first character and is not.
    """
    content = _read_benchmark_file(benchmark_path)

    json_questions = _parse_json_questions(content)
    if json_questions is not None:
        return json_questions

    has_json_name = benchmark_path.suffix in JSON_SUFFIXES
    begins_like_json = content.lstrip().startswith(("{", "["))
    if has_json_name and begins_like_json:
        raise UserError(
            f"corpus.decontaminate: {benchmark_path} is no readable JSON or JSON lines; correct it, or get it anew"
        )

    return [MARKUP_TAG.sub(" ", line) for line in _split_into_lines(content)]


def _parse_json_questions(content: str) -> list[str] | None:
    """Return the strings of a JSON value or of JSON lines, without answers. None if the content is neither."""
    questions = _parse_question_strings([content])
    if questions is None:
        questions = _parse_question_strings(_split_into_lines(content))
    return questions


def _split_into_lines(content: str) -> list[str]:
    """Return the lines of a text that are not blank."""
    return [line for line in content.split("\n") if line.strip()]


def _read_benchmark_file(benchmark_path: Path) -> str:
    """Read a benchmark file as text.

    Raises:
        UserError: The file cannot be opened, or is no text in UTF-8.
    """
    try:
        return read_utf8_text(benchmark_path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"corpus.decontaminate: {benchmark_path} cannot be read as text ({error}); name text files"
        ) from error


def _parse_question_strings(json_texts: Sequence[str]) -> list[str] | None:
    """Return the strings in JSON values, without answers.

    Returns:
        The strings of all values, in order. None if a text is no JSON, or nested too deeply to read.
    """
    question_strings: list[str] = []
    try:
        for json_text in json_texts:
            question_strings += _iter_question_strings(json.loads(json_text))
    except (ValueError, RecursionError):
        return None
    return question_strings


def _iter_question_strings(json_value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, however deep, except in fields that hold no question (ANSWER_FIELDS)."""
    if isinstance(json_value, str):
        # Leaves out halves of characters (lone surrogates), which no document has.
        yield json_value.encode("utf-8", "ignore").decode()
    elif isinstance(json_value, list):
        for item in json_value:
            yield from _iter_question_strings(item)
    elif isinstance(json_value, dict):
        for key, item in json_value.items():
            if not ANSWER_FIELDS.search(key):
                yield from _iter_question_strings(item)


SCREENED_STAGE = Stage(
    name="screened_documents",
    description="The hash of each document's text, and the benchmark file of which it holds 13 words in a row.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "text_digest": Column(pl.String(), "hash of the document's text"),
        "benchmark": Column(pl.String(), "file of `corpus.decontaminate` that shares a passage with it; null for none"),
    },
    key_columns=("shard", "digest"),
    collect_settings=collect_screening_settings,
    reads=(raw_shards.TABLE_NAME,),
    group="ccnet",
    row_maker=ByShard(build_screened_rows),
)


DOCUMENT_TABLES = (raw_shards.TABLE_NAME, TABLE_NAME)
"""The tables that `iter_kept_documents` reads."""


def inputs(output: TableOutput) -> InputsFinder:
    """Return a function from a shard to the versions of its documents and of its removed documents."""
    lake = output.plan.lake
    documents_table = lake.get_table(raw_shards.TABLE_NAME)
    removed_documents_table = lake.get_table(TABLE_NAME)
    return build_versions_finder({"raw_shards": documents_table}, all_shards_table=removed_documents_table)


def iter_kept_documents(plan: Plan, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard that are not removed, in their order, in batches.

    Yields:
        Frames with the columns of `raw_shards.iter_documents`.

    Raises:
        MissingPart: The shard was not read yet, or removed documents were not looked for.
        DamagedPart: The stored rows of one of the tables cannot be read.
    """
    removed_documents = plan.lake.get_table(TABLE_NAME).scan_parts([WHOLE_TABLE_PART])
    removed_digests = removed_documents.filter(pl.col("shard") == shard).select("digest").collect()

    for batch in raw_shards.iter_documents(plan, shard):
        yield batch.join(removed_digests, on="digest", how="anti", maintain_order="left")


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what the rows depend on apart from the screened documents: whether copies go, and the SQL text."""
    return {
        **select_determining_settings(plan.settings.corpus, "deduplicate"),
        "sql": fingerprint(REMOVED_DOCUMENTS_SQL),
    }


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Return the documents of all shards that are removed: copies of others, and texts of benchmarks.

    Each removed document also counts as a rejection of its shard. `rejection_counts` and `record_fields` are filled
    while the frames are read.
    """
    removal = _DocumentRemoval(output)
    return PartRows(
        removal.iter_frames(),
        rejection_counts=removal.rejected,
        record_fields={BY_SHARD_FIELD: removal.fingerprint_by_shard},
    )


class _DocumentRemoval:
    """The choice of the removed documents of all shards: `iter_frames` yields them, and fills the attributes meanwhile.

    Attributes:
        rejected: How many documents are removed, by (shard, reason). Complete after the last frame.
        fingerprint_by_shard: A hash of the removed digests of each shard, by which other stages see whose documents
            changed. Complete after the last frame.
    """

    def __init__(self, output: TableOutput) -> None:
        self.rejected: RejectionCounts = Counter()
        self.fingerprint_by_shard: dict[str, str] = {}
        self._output = output

    def iter_frames(self) -> Iterator[pl.DataFrame]:
        """Yield rows for the removed documents, sorted by shard and digest.

        Meanwhile they are counted in `rejected`, and hashed into `fingerprint_by_shard`.
        """
        schema = self._output.stage.schema
        plan = self._output.plan

        screened_files = plan.lake.get_table(SCREENED_TABLE_NAME).list_all_files()
        if not screened_files:
            return

        for removed_rows in _iter_removed_documents(screened_files, plan.settings.corpus.deduplicate):
            self._count_removed_documents(removed_rows)
            yield removed_rows.select(schema.names()).cast(schema)

    def _count_removed_documents(self, removed_rows: pl.DataFrame) -> None:
        """Count a batch of removed documents, and add their digests to the fingerprints of their shards."""
        self.rejected.update(count_rejected_rows(removed_rows))

        for (shard,), rows_of_shard in removed_rows.group_by("shard", maintain_order=True):
            shard_name = str(shard)
            digests = rows_of_shard["digest"].to_list()

            # A shard may go on in the next batch: its new fingerprint covers the last one and the new digests.
            earlier_fingerprint = self.fingerprint_by_shard.get(shard_name)
            self.fingerprint_by_shard[shard_name] = fingerprint([earlier_fingerprint, digests])


def _iter_removed_documents(screened_files: Sequence[str], deduplicate: bool) -> Iterator[pl.DataFrame]:
    """Yield the documents that are copies of others or hold a passage of a benchmark, sorted by shard and digest.

    Args:
        screened_files: The Parquet files of the screened documents.
        deduplicate: Whether copies are removed.
    """
    # DuckDB compares and sorts on disk, so memory does not grow with the corpus.
    with TemporaryDirectory() as spill_folder, open_memory_database() as connection:
        connection.execute(f"SET temp_directory = {quote_sql(spill_folder)}")

        # The SQL creates the table `removed`.
        run_sql(connection, REMOVED_DOCUMENTS_SQL, {"files": screened_files, "deduplicate": deduplicate})

        removed_rows = connection.sql("FROM removed ORDER BY shard, digest")
        for batch in removed_rows.to_arrow_reader(REMOVED_BATCH_SIZE):
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
    key_columns=("shard", "digest"),
    collect_settings=settings,
    reads=(SCREENED_TABLE_NAME,),
    group="ccnet",
    is_sharded=False,
    kinds=frozenset({"duckdb", "sql"}),
    row_maker=ByPart(rows),
)
