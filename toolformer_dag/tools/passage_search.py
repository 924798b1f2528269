"""Search passages by BM25, and the options of tools that do so."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tantivy
from pydantic import AfterValidator, ValidationInfo

from toolformer_dag.settings.setting_types import under
from toolformer_dag.tools.options import OptionPath, ToolOptions, root_of
from toolformer_dag.tools.passage_index import (
    IndexingProgress,
    compute_source_digest,
    ensure_index,
    index_folder,
    index_version,
)
from toolformer_dag.tools.passage_terms import build_any_term_query, get_analyzer, parse_query_terms
from toolformer_dag.tools.passages import EMBEDDED, Passage

TIE_MARGIN = 8
"""How many hits beyond the limit are searched for at first: some may have the same score as the last within it."""
SCORE_DIGITS = 4
"""Decimals to which scores are rounded before they are compared: further ones depend on how the index was built."""


class Hit(NamedTuple):
    """A passage that a search has found: its score by BM25, and its address in the index."""

    score: float
    address: Any


class ScoredPassage(NamedTuple):
    """A passage with its score by BM25."""

    score: float
    passage: Passage


class PassageSearch:
    """A searcher of an index folder; safe for several threads and processes."""

    def __init__(self, folder: Path) -> None:
        index = tantivy.Index.open(str(folder))
        index.register_tokenizer("words", get_analyzer())
        self._schema = index.schema
        self._searcher = index.searcher()

    def search(self, query: str, limit: int) -> list[ScoredPassage]:
        """Return at most `limit` passages that share a word with the query, by their score in BM25, best first.

        Passages with equal scores are in the order of their file, whatever the order in the index.
        """
        words_query = build_any_term_query(self._schema, "words", parse_query_terms(query))
        if words_query is None:  # a query without words
            return []
        hits = self._find_best_with_ties(words_query, limit)
        best_hits = self._sort_hits(hits)[:limit]
        return [self._read_passage(hit) for hit in best_hits]

    def _find_best_with_ties(self, query: tantivy.Query, limit: int) -> list[Hit]:
        """Return the best `limit` hits and all others with the same score as the last of them, the best first.

        Some hits with lower scores may follow.
        """
        requested = limit + TIE_MARGIN
        while True:
            results = self._searcher.search(query, requested, count=False)
            hits = [Hit(*hit) for hit in results.hits]
            if len(hits) < requested:  # there are no others
                return hits
            score_at_limit = _round_score(hits[limit - 1])
            lowest_score = _round_score(hits[-1])
            if lowest_score < score_at_limit:  # no further hit has the score at the limit
                return hits
            requested *= 4

    def _sort_hits(self, hits: Sequence[Hit]) -> list[Hit]:
        """Return hits by their score, the best first, and those with equal scores in the order of their file."""
        addresses = [hit.address for hit in hits]
        source_numbers = self._searcher.fast_field_values("number", addresses)
        ranked = sorted(zip(hits, source_numbers, strict=True), key=_get_sort_key)
        return [hit for hit, _ in ranked]

    def _read_passage(self, hit: Hit) -> ScoredPassage:
        """Read the passage of a hit from the index."""
        packed = bytes(self._searcher.doc(hit.address)["passage"][0])
        return ScoredPassage(hit.score, Passage.unpacked(packed))


def _round_score(hit: Hit) -> float:
    return round(hit.score, SCORE_DIGITS)


def _get_sort_key(numbered_hit: tuple[Hit, Any]) -> tuple[float, Any]:
    """Return the sort key that puts higher scores first, and equal ones in the order of the source."""
    hit, source_number = numbered_hit
    return -_round_score(hit), source_number


def _resolve_passages_under_root(source: str, info: ValidationInfo) -> str:
    """Return the path of a passages file, which is relative to toolformer.toml; `embedded` stays."""
    return source if source == EMBEDDED else str(under(root_of(info), source))


class RetrievalOptions(ToolOptions):
    """Options of a tool that answers from passages.

    - passages: `embedded`, or a file of JSON lines (KILT's knowledge source, or `id`, `title`, `section`, `text`).
    - index_folder: the folder of indexes, by default `indexes` in the user's cache. It does not affect results.
    """

    passages: Annotated[str, AfterValidator(_resolve_passages_under_root)] = EMBEDDED
    index_folder: OptionPath | None = None

    def folder(self) -> Path:
        """Return the folder of the index, built or not. Raises PassageError."""
        return index_folder(self.passages, self.index_folder)

    def open_search(self, progress: IndexingProgress | None = None) -> PassageSearch:
        """Open the index; build it where it is missing. Raises PassageError."""
        return PassageSearch(ensure_index(self.passages, self.index_folder, progress))

    def build_retrieval_identity(self) -> Mapping[str, object]:
        """Return the hash of the passages and the search method, without paths. Raises PassageError."""
        version = index_version(self.passages)
        return {"retriever": "bm25", "passages": compute_source_digest(self.passages), "index_version": version}
