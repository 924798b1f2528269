"""Build BM25 indexes of passages, named by content hash, and search them."""

import functools
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any
from unicodedata import normalize

import regex
import tantivy
from pydantic import AfterValidator, ValidationInfo

from toolformer_dag.files import (
    FILES,
    changed_unseen,
    damaged_beside,
    hashes_beside,
    locked,
    sealed,
    sync,
    write_whole,
)
from toolformer_dag.identity import cache_folder, file_hash
from toolformer_dag.settings.setting_types import under
from toolformer_dag.tools.options import OptionPath, ToolOptions
from toolformer_dag.tools.passages import EMBEDDED, WITHOUT_SPACES, Passage, PassageError, read_passages

_log = logging.getLogger(__name__)


def source_digest(source: str) -> str:
    """Return the content hash of a file, whatever its name, or of the embedded passages. Raises PassageError."""
    if source == EMBEDDED:
        return _embedded_digest()
    try:
        return file_hash(Path(source))
    except OSError as error:
        raise PassageError(f"{source}: {error.strerror}. Set `passages` to a file or `{EMBEDDED}`.") from error


@functools.cache
def _embedded_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for passage in read_passages(EMBEDDED):
        digest.update(passage.packed() + b"\n")
    return digest.hexdigest()


MAX_TERM_BYTES = 40
MAX_QUERY_TERMS = 64

_STOP_WORDS = """
a about after again all also am an and any are as at be been before being but by can could did do does for from had has
have he her his how i if in into is it its me my no not of on or our out s she so some such t than that the their them
then there these they this to too up us was we were what when where which while who whom whose why will with would you
your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


@functools.cache
def analyzer() -> tantivy.TextAnalyzer:
    """Return an analyzer: runs of letters and digits up to 40 bytes, lower case, accents folded."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    short = builder.filter(tantivy.Filter.remove_long(MAX_TERM_BYTES))
    return short.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.ascii_fold()).build()


_RUN = regex.compile(f"{WITHOUT_SPACES}+")


def spaced(text: str) -> str:
    """Return a text as it is analyzed: accents composed (NFC), scripts without spaces as pairs of letters, and letters.

    So a word of such a script is found inside a sentence. Other scripts are left as they are.
    """
    return text if text.isascii() else _RUN.sub(_pairs, normalize("NFC", text))


def _pairs(run: regex.Match[str]) -> str:
    letters = [character for character in run[0] if character.isalnum()]  # the analyzer splits at most marks
    return " ".join(["", *map("".join, pairwise(letters)), *letters, ""])


def query_terms(query: str) -> list[str]:
    """Return at most 64 distinct terms in order, without stop words unless there is nothing else.

    Stop words are indexed but not searched: they take most of the time and hardly change the ranking.
    """
    terms = list(dict.fromkeys(analyzer().analyze(spaced(query))))
    return ([term for term in terms if term not in STOP_WORDS] or terms)[:MAX_QUERY_TERMS]


INDEX_VERSION = 2
"""Raise this when the same passages are indexed in another way; part of folder names and identities."""
HEAP_BYTES = 200_000_000
WRITER_THREADS = 2

MANIFEST = "manifest.json"
"""The file of a finished index that holds the hashes of all others, sealed."""
IndexingProgress = Callable[[int], None]


def index_version(source: str) -> int:
    """Return the version of how passages are indexed. The embedded ones are ASCII, of which version 1 made the same."""
    return 1 if source == EMBEDDED else INDEX_VERSION


def index_folder(source: str, root: Path | None = None) -> Path:
    """Return the folder of the passages' index under `root`; it may not exist.

    The default is `indexes` in $TOOLFORMER_CACHE, else in toolformer-dag in the user's cache.
    """
    return (root or cache_folder() / "indexes") / f"{source_digest(source)}-v{index_version(source)}"


def ensure_index(
    source: str, root: Path | None = None, progress: IndexingProgress | None = None, commit_every: int = 250_000
) -> Path:
    """Return the folder of the index of `source`; build the index where it is missing or damaged.

    - Memory is bounded by the writer's 200 MB.
    - Every `commit_every` passages are committed and survive a kill.
    - `progress` gets the number of passages indexed so far.
    - The folder appears only when complete; a single process builds it, others wait.
    - Its files are read and compared with their hashes whenever it is opened. A damaged index is renamed to `.damaged`,
      in the place of an older one, and built again.

    Raises PassageError.
    """
    folder = index_folder(source, root)
    set_aside_damaged_index(folder, again=True)
    if not folder.is_dir():
        with _building(folder):
            if not folder.is_dir():
                if source != EMBEDDED and changed_unseen([Path(source)]):
                    raise PassageError(f"{source} is damaged: it is not what it was when it was hashed; copy it again.")
                partial = folder.with_suffix(".building")
                write_index(read_passages(source), partial, progress or (lambda done: None), commit_every)
                for lock in partial.glob(".tantivy-*.lock"):
                    lock.unlink()
                write_whole(partial / MANIFEST, sealed(str(folder), {FILES: hashes_beside(partial / MANIFEST)}))
                partial.replace(folder)
                sync(folder.parent)
    return folder


def set_aside_damaged_index(folder: Path, again: bool = False) -> list[Path]:
    """Set an index aside where files of it are damaged, and return these; an index that was not built is left alone.

    Files that did not change since they were hashed are read with `again` alone.
    """
    if not folder.is_dir() or not damaged_beside(folder / MANIFEST, again):
        return []
    with _building(folder):
        damaged = damaged_beside(folder / MANIFEST, again) if folder.is_dir() else []  # another process may be faster
        if damaged:
            names = ", ".join(map(str, damaged))
            _log.warning("%s: not what was written; %s is set aside, the passages are indexed again", names, folder)
            aside = folder.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.replace(aside)
    return damaged


@contextmanager
def _building(folder: Path) -> Iterator[None]:
    """Lock the index; wait for another process that builds it."""
    try:
        with locked(folder.with_suffix(".lock")):
            yield
    except OSError as error:
        raise PassageError(f"{folder.parent}: {error}. Set `index_folder` to another folder.") from error


def schema() -> tantivy.Schema:
    """Return the index schema: words with frequencies, the stored passage, and its number, which breaks ties."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="words", index_option="freq")
    builder.add_unsigned_field("number", fast=True)
    builder.add_bytes_field("passage", stored=True)
    return builder.build()


def write_index(passages: Iterable[Passage], folder: Path, progress: IndexingProgress, commit_every: int) -> None:
    """Index the passages that the folder does not hold yet; they must come in the same order every time."""
    folder.mkdir(parents=True, exist_ok=True)
    index = tantivy.Index(schema(), path=str(folder))
    index.register_tokenizer("words", analyzer())
    done = index.searcher().num_docs
    progress(done)
    writer = index.writer(heap_size=HEAP_BYTES, num_threads=WRITER_THREADS)
    for number, passage in enumerate(islice(passages, done, None), done):
        document = tantivy.Document()
        document.add_text("words", spaced(passage.searched()))
        document.add_unsigned("number", number)  # Document(number=0) would make it signed, which kills the writer
        document.add_bytes("passage", passage.packed())
        writer.add_document(document)
        if (number + 1) % commit_every == 0:
            writer.commit()
            progress(number + 1)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    progress(index.searcher().num_docs)


TIE_MARGIN = 8
"""Passages that are asked for beyond the limit at first, because some may score as the last within it."""
SCORE_DIGITS = 4


class PassageSearch:
    """A searcher of an index folder; safe for several threads and processes."""

    def __init__(self, folder: Path) -> None:
        index = tantivy.Index.open(str(folder))
        index.register_tokenizer("words", analyzer())
        self._schema = index.schema
        self._searcher = index.searcher()

    def search(self, query: str, limit: int) -> list[tuple[float, Passage]]:
        """Return (score, passage) of at most `limit` passages that share a term with the query, best first.

        The query is a bag of terms, never query language. Ties are in the order of the source, so that results do not
        depend on how the index was built.
        """
        terms = query_terms(query)
        if not terms:
            return []
        any_term = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "words", term, "freq")) for term in terms]
        )
        hits = self._with_ties(any_term, limit)
        numbers = self._searcher.fast_field_values("number", [address for _, address in hits])
        ranked = sorted(zip(hits, numbers, strict=True), key=lambda hit: (-round(hit[0][0], SCORE_DIGITS), hit[1]))
        packed = [(score, bytes(self._searcher.doc(address)["passage"][0])) for (score, address), _ in ranked[:limit]]
        return [(score, Passage.unpacked(passage)) for score, passage in packed]

    def _with_ties(self, query: tantivy.Query, limit: int) -> list[tuple[float, Any]]:
        """Return (score, address) of the best `limit` passages and of all that score as the last of them."""
        wanted = limit + TIE_MARGIN
        while True:
            hits: list[tuple[float, Any]] = self._searcher.search(query, wanted, count=False).hits
            scores = [round(score, SCORE_DIGITS) for score, _ in hits]
            if len(hits) < wanted or scores[-1] < scores[limit - 1]:
                return hits
            wanted *= 4


def _passages_under_root(source: str, info: ValidationInfo) -> str:
    root: Path = (info.context or {}).get("root", Path())
    return source if source == EMBEDDED else str(under(root, source))


class RetrievalOptions(ToolOptions):
    """Options of a tool that answers from passages.

    - passages: `embedded`, or a file of JSON lines (KILT's knowledge source, or `id`, `title`, `section`, `text`).
    - index_folder: the folder of indexes, by default `indexes` in the user's cache. It does not affect results.
    """

    passages: Annotated[str, AfterValidator(_passages_under_root)] = EMBEDDED
    index_folder: OptionPath | None = None

    def folder(self) -> Path:
        """Return the folder of the index, built or not. Raises PassageError."""
        return index_folder(self.passages, self.index_folder)

    def open_search(self, progress: IndexingProgress | None = None) -> PassageSearch:
        """Open the index; build it where it is missing. Raises PassageError."""
        return PassageSearch(ensure_index(self.passages, self.index_folder, progress))

    def retrieval_identity(self) -> Mapping[str, object]:
        """Return the hash of the passages and the search method, without paths. Raises PassageError."""
        version = index_version(self.passages)
        return {"retriever": "bm25", "passages": source_digest(self.passages), "index_version": version}
