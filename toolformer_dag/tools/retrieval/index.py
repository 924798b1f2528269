"""The index on disk: built beside its place, resumable, named after the content of its passages."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import tantivy

from toolformer_dag.storage.lock import locked
from toolformer_dag.tools.retrieval.identity import cache_root, source_digest
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.retrieval.source import PassageError, read_passages
from toolformer_dag.tools.retrieval.terms import analyzer

INDEX_VERSION = 1
"""Raised whenever the same passages are indexed in another way; part of the folder's name and of identities."""
HEAP_BYTES = 200_000_000
WRITER_THREADS = 2

Progress = Callable[[int], None]


def index_folder(source: str, root: Path | None = None) -> Path:
    """Where the index of these passages lies (`root`: default the cache), whether it exists or not."""
    return (root or cache_root() / "indexes") / f"{source_digest(source)}-v{INDEX_VERSION}"


def ensure_index(
    source: str, root: Path | None = None, progress: Progress | None = None, commit_every: int = 250_000
) -> Path:
    """The folder of the index of `source`, built where it is missing.

    Memory is bounded by the writer's 200 MB, whatever the source. What is committed every `commit_every` passages
    survives a kill and is not indexed again; `progress` is told the number of passages indexed so far. The folder
    appears whole or not at all, and of several processes one builds. Raises PassageError.
    """
    folder = index_folder(source, root)
    if not folder.is_dir():
        with _building(folder):
            if not folder.is_dir():
                partial = folder.with_suffix(".building")
                write_index(read_passages(source), partial, progress or (lambda done: None), commit_every)
                partial.replace(folder)
    return folder


@contextmanager
def _building(folder: Path) -> Iterator[None]:
    """Waits for another process that builds the same index."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder.with_suffix(".lock")))
        except OSError as error:
            raise PassageError(f"{folder.parent}: {error.strerror}. Name another folder as `index_folder`.") from error
        yield


def schema() -> tantivy.Schema:
    """Words with frequencies, the passage as it is, and its number, by which equal scores are ordered."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="words", index_option="freq")
    builder.add_unsigned_field("number", fast=True)
    builder.add_bytes_field("passage", stored=True)
    return builder.build()


def write_index(passages: Iterable[Passage], folder: Path, progress: Progress, commit_every: int) -> None:
    """Indexes what the folder does not hold yet; the passages come in the same order every time."""
    folder.mkdir(parents=True, exist_ok=True)
    index = tantivy.Index(schema(), path=str(folder))
    index.register_tokenizer("words", analyzer())
    done = index.searcher().num_docs
    progress(done)
    writer = index.writer(heap_size=HEAP_BYTES, num_threads=WRITER_THREADS)
    for number, passage in enumerate(islice(passages, done, None), done):
        writer.add_document(_document(number, passage))
        if (number + 1) % commit_every == 0:
            writer.commit()
            progress(number + 1)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    progress(index.searcher().num_docs)


def _document(number: int, passage: Passage) -> tantivy.Document:
    document = tantivy.Document()
    document.add_text("words", passage.searched())
    document.add_unsigned("number", number)  # Document(number=0) would make it signed, which kills the writer
    document.add_bytes("passage", passage.packed())
    return document
