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
    FILES,
    find_changed_unseen,
    hash_files_beside,
    list_damaged_beside,
    locked,
    seal_record,
    sync,
    write_whole,
)
from toolformer_dag.identity import cache_folder, file_hash
from toolformer_dag.tools.passage_terms import get_analyzer, with_word_spaces
from toolformer_dag.tools.passages import EMBEDDED, Passage, PassageError, read_passages

_log = logging.getLogger(__name__)
INDEX_VERSION = 2
"""Raise this when the same passages are indexed in another way; part of folder names and identities."""
COMMIT_PASSAGES = 250_000
"""Passages after which an index that is being built is committed, so that a kill loses no more than these."""
HEAP_BYTES = 200_000_000
"""The memory of the index writer."""
WRITER_THREADS = 2
"""The threads of the index writer."""
MANIFEST = "manifest.json"
"""The file of a finished index that holds the hashes of all others, sealed."""
IndexingProgress = Callable[[int], None]
"""Called with the number of passages indexed so far."""


def compute_source_digest(source: str) -> str:
    """Hash the content of a passages file, or the passages that the package brings for `embedded`.

    Raises:
        PassageError: The file cannot be read.
    """
    if source == EMBEDDED:
        return _compute_embedded_digest()

    try:
        return file_hash(Path(source))
    except OSError as error:
        raise PassageError(f"{source}: {error.strerror}. Set `passages` to a file or `{EMBEDDED}`.") from error


@functools.cache
def _compute_embedded_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for passage in read_passages(EMBEDDED):
        digest.update(passage.packed() + b"\n")
    return digest.hexdigest()


def index_version(source: str) -> int:
    """Return the version of how the passages of `source` are indexed; it is 1 for `embedded`."""
    return 1 if source == EMBEDDED else INDEX_VERSION


def index_folder(source: str, root: Path | None = None) -> Path:
    """Return the folder of the index of `source` below `root`, built or not. Raises PassageError.

    The default root is `indexes` in $TOOLFORMER_CACHE, else in toolformer-dag in the user's cache.
    """
    indexes = root or cache_folder() / "indexes"
    return indexes / f"{compute_source_digest(source)}-v{index_version(source)}"


def ensure_index(
    source: str,
    root: Path | None = None,
    progress: IndexingProgress | None = None,
    commit_every: int = COMMIT_PASSAGES,
) -> Path:
    """Build the index of a source of passages if it is missing or damaged.

    - The folder appears only when it is complete. One process builds it, and others wait.
    - If a build is killed, the next one continues after the last committed passages.
    - Every call compares all files with their hashes. A damaged index is renamed to `.damaged` and built again.

    Args:
        source: A passages file, or `embedded`.
        root: The folder for indexes, if it is not the usual one.
        progress: Called with the number of passages indexed so far.
        commit_every: Commit after this many passages.

    Returns:
        The folder of the index.

    Raises:
        PassageError: The passages cannot be read, or the folder cannot be written.
    """
    folder = index_folder(source, root)
    set_aside_damaged_index(folder, again=True)
    if not folder.is_dir():
        with _lock_build(folder):
            built_meanwhile = folder.is_dir()  # by the process that had the lock
            if not built_meanwhile:
                _build_index(source, folder, progress or (lambda done: None), commit_every)

    return folder


def _build_index(source: str, folder: Path, progress: IndexingProgress, commit_every: int) -> None:
    """Build the index of a passages file in a temporary folder, and then rename this to `folder`.

    The caller holds the lock.

    Raises:
        PassageError: The passages cannot be read.
    """
    if source != EMBEDDED and find_changed_unseen([Path(source)]):
        raise PassageError(f"{source} is damaged: it is not what it was when it was hashed; copy it again.")

    unfinished = folder.with_suffix(".building")
    write_index(read_passages(source), unfinished, progress, commit_every)
    _write_manifest(unfinished, str(folder))

    unfinished.replace(folder)
    sync(folder.parent)


def _write_manifest(folder: Path, name: str) -> None:
    """Remove the writer's locks from the folder of an index, and write the hashes of its files; `name` seals them."""
    for lock in folder.glob(".tantivy-*.lock"):
        lock.unlink()
    manifest = folder / MANIFEST
    write_whole(manifest, seal_record(name, {FILES: hash_files_beside(manifest)}))


def set_aside_damaged_index(folder: Path, again: bool = False) -> list[Path]:
    """Rename the folder of an index to `.damaged` if files in it are damaged.

    Args:
        folder: The folder of the index.
        again: Whether to hash every file. Otherwise files are trusted if their size and times did not change.

    Returns:
        The damaged files.
    """
    if not folder.is_dir() or not list_damaged_beside(folder / MANIFEST, again):
        return []

    with _lock_build(folder):
        # Another process may have renamed it, and built it again, before this one got the lock.
        damaged_files = list_damaged_beside(folder / MANIFEST, again) if folder.is_dir() else []
        if damaged_files:
            _set_aside(folder, damaged_files)

    return damaged_files


def _set_aside(folder: Path, damaged_files: Sequence[Path]) -> None:
    """Rename the folder of an index to `.damaged`, replacing an older one, and log which files are damaged."""
    names = ", ".join(map(str, damaged_files))
    _log.warning("%s: not what was written; %s is set aside, the passages are indexed again", names, folder)
    damaged_folder = folder.with_suffix(".damaged")
    shutil.rmtree(damaged_folder, ignore_errors=True)
    folder.replace(damaged_folder)


@contextmanager
def _lock_build(folder: Path) -> Iterator[None]:
    """Hold the lock under which the index is built; wait for a process that holds it. Raises PassageError."""
    try:
        with locked(folder.with_suffix(".lock")):
            yield
    except OSError as error:
        raise PassageError(f"{folder.parent}: {error}. Set `index_folder` to another folder.") from error


def schema() -> tantivy.Schema:
    """Return the fields of an index: words with frequencies, the stored passage, and its number, which breaks ties."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="words", index_option="freq")
    builder.add_unsigned_field("number", fast=True)
    builder.add_bytes_field("passage", stored=True)
    return builder.build()


def write_index(passages: Iterable[Passage], folder: Path, progress: IndexingProgress, commit_every: int) -> None:
    """Write passages into the index in `folder`, which may already hold the first of them.

    The passages must come in the same order each time, because an index with n passages is continued after the first n.

    Args:
        passages: All passages.
        folder: The folder of the index.
        progress: Called with the number of passages indexed so far.
        commit_every: Commit after this many passages.
    """
    index = _open_index(folder)
    indexed = index.searcher().num_docs  # by a run that was killed
    progress(indexed)

    writer = index.writer(heap_size=HEAP_BYTES, num_threads=WRITER_THREADS)
    for passage in islice(passages, indexed, None):
        writer.add_document(_build_document(passage, number=indexed))
        indexed += 1
        if indexed % commit_every == 0:
            writer.commit()
            progress(indexed)
    writer.commit()

    writer.wait_merging_threads()
    index.reload()
    progress(index.searcher().num_docs)


def _open_index(folder: Path) -> tantivy.Index:
    """Open the index in a folder, or create it."""
    folder.mkdir(parents=True, exist_ok=True)
    index = tantivy.Index(schema(), path=str(folder))
    index.register_tokenizer("words", get_analyzer())
    return index


def _build_document(passage: Passage, number: int) -> tantivy.Document:
    """Return the entry of a passage in an index; `number` is its position in the source, from 0."""
    document = tantivy.Document()
    document.add_text("words", with_word_spaces(passage.searched()))
    document.add_unsigned("number", number)  # Document(number=0) would make it signed, which kills the writer
    document.add_bytes("passage", passage.packed())
    return document
