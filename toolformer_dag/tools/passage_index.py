"""Build BM25 indexes of passages. An index is a folder that is named by the content hash of its passages."""

import functools
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import tantivy

from toolformer_dag.files import (
    FILES_FIELD,
    find_silently_changed_file,
    hash_sibling_files,
    hold_file_lock,
    list_damaged_files,
    seal_record,
    sync_to_disk,
    write_file_atomically,
)
from toolformer_dag.identity import file_hash, get_cache_folder
from toolformer_dag.tools.passage_terms import get_word_analyzer, insert_word_spaces
from toolformer_dag.tools.passages import EMBEDDED_SOURCE, Passage, PassageError, iter_passages

_log = logging.getLogger(__name__)
INDEX_VERSION = 2
"""Raise this when the same passages are indexed in another way; part of folder names and identities."""
PASSAGES_PER_COMMIT = 250_000
"""Passages after which an index that is being built is committed, so that a kill loses no more than these."""
WRITER_HEAP_BYTES = 200_000_000
"""The memory of the index writer."""
WRITER_THREADS = 2
"""The threads of the index writer."""
MANIFEST_FILE_NAME = "manifest.json"
"""The file of a finished index that holds the hashes of all others, sealed."""
IndexingProgress = Callable[[int], None]
"""Called with the number of passages indexed so far."""


def compute_source_digest(passage_source: str) -> str:
    """Hash the content of a passages file, or the passages that the package brings for `embedded`.

    Raises:
        PassageError: The file cannot be read.
    """
    if passage_source == EMBEDDED_SOURCE:
        return _compute_embedded_digest()

    try:
        return file_hash(Path(passage_source))
    except OSError as error:
        raise PassageError(
            f"{passage_source}: {error.strerror}. Set `passages` to a file or `{EMBEDDED_SOURCE}`."
        ) from error


@functools.cache
def _compute_embedded_digest() -> str:
    """Hash the passages of the synthetic world's encyclopedia."""
    digest = hashlib.blake2b(digest_size=16)
    for passage in iter_passages(EMBEDDED_SOURCE):
        digest.update(passage.to_json_bytes() + b"\n")
    return digest.hexdigest()


def get_index_version(passage_source: str) -> int:
    """Return the version of how the passages of a source are indexed: 1 for `embedded`, else INDEX_VERSION."""
    return 1 if passage_source == EMBEDDED_SOURCE else INDEX_VERSION


def compute_index_folder(passage_source: str, index_root: Path | None = None) -> Path:
    """Return the folder of the index of a source of passages, whether it is built or not.

    Its name is the hash of the passages with the version of the index, so that changed passages get another index.

    Args:
        passage_source: A passages file, or `embedded`.
        index_root: The folder for indexes. By default this is `indexes` in $TOOLFORMER_CACHE, or else in toolformer-dag
            in the user's cache.

    Raises:
        PassageError: The passages cannot be read.
    """
    folder_of_indexes = index_root or get_cache_folder() / "indexes"
    digest = compute_source_digest(passage_source)
    version = get_index_version(passage_source)
    return folder_of_indexes / f"{digest}-v{version}"


def ensure_index(
    passage_source: str,
    index_root: Path | None = None,
    report_progress: IndexingProgress | None = None,
    passages_per_commit: int = PASSAGES_PER_COMMIT,
) -> Path:
    """Build the index of a source of passages if it is missing or damaged.

    - The folder appears only when it is complete. One process builds it, and others wait.
    - If a build is killed, the next one continues after the last committed passages.
    - Every call compares all files with their hashes. A damaged index is renamed to `.damaged` and built again.

    Args:
        passage_source: A passages file, or `embedded`.
        index_root: The folder for indexes, if it is not the usual one.
        report_progress: Called with the number of passages indexed so far.
        passages_per_commit: Commit after this many passages.

    Returns:
        The folder of the index.

    Raises:
        PassageError: The passages cannot be read, or the folder cannot be written.
    """
    if report_progress is None:
        report_progress = _ignore_progress

    folder = compute_index_folder(passage_source, index_root)
    set_aside_damaged_index(folder, rehash_files=True)
    if folder.is_dir():
        return folder

    with _lock_index_build(folder):
        is_built_meanwhile = folder.is_dir()  # by the process that had the lock
        if not is_built_meanwhile:
            _build_index(passage_source, folder, report_progress, passages_per_commit)

    return folder


def _ignore_progress(passage_count: int) -> None:
    """Do nothing with the number of passages indexed so far."""


def _build_index(
    passage_source: str, folder: Path, report_progress: IndexingProgress, passages_per_commit: int
) -> None:
    """Build the index of a passages file in a temporary folder, and then rename this to `folder`.

    The caller holds the lock.

    Args:
        passage_source: A passages file, or `embedded`.
        folder: The folder of the finished index.
        report_progress: Called with the number of passages indexed so far.
        passages_per_commit: Commit after this many passages.

    Raises:
        PassageError: The passages cannot be read, or the file is damaged.
    """
    if passage_source != EMBEDDED_SOURCE and find_silently_changed_file([Path(passage_source)]):
        raise PassageError(f"{passage_source} is damaged: it is not what it was when it was hashed; copy it again.")

    unfinished_folder = folder.with_suffix(".building")
    write_index(iter_passages(passage_source), unfinished_folder, report_progress, passages_per_commit)
    _write_manifest(unfinished_folder, str(folder))

    # The index appears under its name only now that it is complete.
    unfinished_folder.replace(folder)
    sync_to_disk(folder.parent)


def _write_manifest(folder: Path, seal_name: str) -> None:
    """Write the hashes of an index's files into its folder, so that damage is noticed later.

    The locks of the index writer are removed first.

    Args:
        folder: The folder of the index.
        seal_name: Whose hashes these are, for the message of an error.
    """
    for lock_file in folder.glob(".tantivy-*.lock"):
        lock_file.unlink()

    manifest_file = folder / MANIFEST_FILE_NAME
    record = {FILES_FIELD: hash_sibling_files(manifest_file)}
    write_file_atomically(manifest_file, seal_record(seal_name, record))


def set_aside_damaged_index(folder: Path, rehash_files: bool = False) -> list[Path]:
    """Rename the folder of an index to `.damaged` if files in it are damaged.

    Args:
        folder: The folder of the index.
        rehash_files: Whether to hash every file. Otherwise files are trusted if their size and times did not change.

    Returns:
        The damaged files, or an empty list if none is damaged or there is no such folder.

    Raises:
        PassageError: The lock of the index cannot be taken.
    """
    if not _list_damaged_index_files(folder, rehash_files):
        return []

    with _lock_index_build(folder):
        # Another process may have renamed it, and built it again, before this one got the lock.
        damaged_files = _list_damaged_index_files(folder, rehash_files)
        if damaged_files:
            _move_index_aside(folder, damaged_files)

    return damaged_files


def _list_damaged_index_files(folder: Path, rehash_files: bool) -> list[Path]:
    """Return the damaged files in the folder of an index, or none if there is no such folder."""
    if not folder.is_dir():
        return []
    return list_damaged_files(folder / MANIFEST_FILE_NAME, rehash_files)


def _move_index_aside(folder: Path, damaged_files: Sequence[Path]) -> None:
    """Rename the folder of an index to `.damaged`, in place of an older one, and log which files are damaged."""
    file_names = ", ".join(map(str, damaged_files))
    _log.warning("%s: not what was written; %s is set aside, the passages are indexed again", file_names, folder)
    damaged_folder = folder.with_suffix(".damaged")
    shutil.rmtree(damaged_folder, ignore_errors=True)
    folder.replace(damaged_folder)


@contextmanager
def _lock_index_build(folder: Path) -> Iterator[None]:
    """Hold the lock under which an index is built, after waiting for another process that holds it.

    Raises:
        PassageError: The lock cannot be taken, or a file cannot be written in the `with` block.
    """
    try:
        with hold_file_lock(folder.with_suffix(".lock")):
            yield
    except OSError as error:
        raise PassageError(f"{folder.parent}: {error}. Set `index_folder` to another folder.") from error


def build_index_schema() -> tantivy.Schema:
    """Return the fields of an index: words with frequencies, the stored passage, and its number, which breaks ties."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="words", index_option="freq")
    builder.add_unsigned_field("number", fast=True)
    builder.add_bytes_field("passage", stored=True)
    return builder.build()


def write_index(
    passages: Iterable[Passage], folder: Path, report_progress: IndexingProgress, passages_per_commit: int
) -> None:
    """Write passages into the index in `folder`, which may already hold the first of them.

    The passages must come in the same order each time, because an index with n passages is continued after the first n.

    Args:
        passages: All passages.
        folder: The folder of the index.
        report_progress: Called with the number of passages indexed so far.
        passages_per_commit: Commit after this many passages.
    """
    index = _open_or_create_index(folder)
    indexed_count = index.searcher().num_docs  # by a run that was killed
    report_progress(indexed_count)

    writer = index.writer(heap_size=WRITER_HEAP_BYTES, num_threads=WRITER_THREADS)
    remaining_passages = islice(passages, indexed_count, None)
    for passage in remaining_passages:
        writer.add_document(_build_document(passage, passage_number=indexed_count))
        indexed_count += 1
        if indexed_count % passages_per_commit == 0:
            writer.commit()
            report_progress(indexed_count)
    writer.commit()

    writer.wait_merging_threads()
    index.reload()
    report_progress(index.searcher().num_docs)


def _open_or_create_index(folder: Path) -> tantivy.Index:
    """Open the index of passages in a folder, or create an empty one."""
    folder.mkdir(parents=True, exist_ok=True)
    index = tantivy.Index(build_index_schema(), path=str(folder))
    index.register_tokenizer("words", get_word_analyzer())
    return index


def _build_document(passage: Passage, passage_number: int) -> tantivy.Document:
    """Build the entry of a passage in an index.

    Args:
        passage: The passage.
        passage_number: Its position in the source, from 0.
    """
    document = tantivy.Document()
    document.add_text("words", insert_word_spaces(passage.build_searched_text()))
    document.add_unsigned("number", passage_number)  # Document(number=0) would make it signed, which kills the writer
    document.add_bytes("passage", passage.to_json_bytes())
    return document
