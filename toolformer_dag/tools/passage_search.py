"""Search passages by BM25, and the options of tools that do so."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tantivy
from pydantic import AfterValidator, ValidationInfo

from toolformer_dag.settings.setting_types import resolve_path
from toolformer_dag.tools.options import OptionPath, ToolOptions, get_settings_folder
from toolformer_dag.tools.passage_index import (
    IndexingProgress,
    compute_index_folder,
    compute_source_digest,
    ensure_index,
    get_index_version,
)
from toolformer_dag.tools.passage_terms import build_any_term_query, get_word_analyzer, parse_query_terms
from toolformer_dag.tools.passages import EMBEDDED_SOURCE, Passage

EXTRA_TIE_HITS = 8
"""How many hits beyond the limit are searched for at first: some may have the same score as the last within it."""
SCORE_DECIMALS = 4
"""Decimals to which scores are rounded before they are compared: further ones depend on how the index was built."""


class Hit(NamedTuple):
    """A passage that a search has found: its score by BM25 (the usual measure of search engines), and its address."""

    score: float
    document_address: Any


class ScoredPassage(NamedTuple):
    """A passage with its score by BM25."""

    score: float
    passage: Passage


class PassageSearch:
    """A search over the passages of an index folder. Safe for several threads and processes."""

    def __init__(self, folder: Path) -> None:
        """Open the index of passages in a folder, which must be complete."""
        index = tantivy.Index.open(str(folder))
        index.register_tokenizer("words", get_word_analyzer())
        self._schema = index.schema
        self._searcher = index.searcher()

    def find_passages(self, query: str, max_passages: int) -> list[ScoredPassage]:
        """Find the passages that fit a query best, by their BM25 score.

        Args:
            query: The query, as a user would type it.
            max_passages: The largest number of passages.

        Returns:
            The passages that share a word with the query, the best first. Passages with equal scores are in the order
            of their file, whatever the order in the index.
        """
        words_query = build_any_term_query(self._schema, "words", parse_query_terms(query))
        if words_query is None:  # a query without words
            return []

        hits = self._find_best_hits_with_ties(words_query, max_passages)
        best_hits = self._sort_hits(hits)[:max_passages]
        return [self._read_passage(hit) for hit in best_hits]

    def _find_best_hits_with_ties(self, query: tantivy.Query, max_passages: int) -> list[Hit]:
        """Find the best hits of a query, and all others with the same score as the last of them.

        A search alone returns only some of the hits with equal scores, and which ones depends on the index.

        Returns:
            The hits, the best first: the `max_passages` best ones, those with the same score as the last of these, and
            possibly some with lower scores.
        """
        hit_count = max_passages + EXTRA_TIE_HITS
        while True:
            results = self._searcher.search(query, hit_count, count=False)
            hits = [Hit(*hit) for hit in results.hits]
            if len(hits) < hit_count:  # there are no others
                return hits

            score_at_limit = _round_hit_score(hits[max_passages - 1])
            lowest_score = _round_hit_score(hits[-1])
            if lowest_score < score_at_limit:  # no further hit has the score at the limit
                return hits

            hit_count *= 4

    def _sort_hits(self, hits: Sequence[Hit]) -> list[Hit]:
        """Return hits by their score, the best first, and those with equal scores in the order of their file."""
        addresses = [hit.document_address for hit in hits]
        source_numbers = self._searcher.fast_field_values("number", addresses)  # positions of passages in their file

        ranked_pairs = sorted(zip(hits, source_numbers, strict=True), key=_get_sort_key)
        return [hit for hit, _ in ranked_pairs]

    def _read_passage(self, hit: Hit) -> ScoredPassage:
        """Read the passage of a hit from the index."""
        stored_fields = self._searcher.doc(hit.document_address)
        json_bytes = bytes(stored_fields["passage"][0])
        return ScoredPassage(hit.score, Passage.from_json_bytes(json_bytes))


def _round_hit_score(hit: Hit) -> float:
    """Return the score of a hit without the decimals that depend on how the index was built."""
    return round(hit.score, SCORE_DECIMALS)


def _get_sort_key(numbered_hit: tuple[Hit, Any]) -> tuple[float, Any]:
    """Return the sort key that puts higher scores first, and equal ones in the order of the source."""
    hit, source_number = numbered_hit
    return -_round_hit_score(hit), source_number


def _resolve_passages_under_root(passage_source: str, info: ValidationInfo) -> str:
    """Resolve the path of a passages file relative to the folder of toolformer.toml; `embedded` stays as it is."""
    if passage_source == EMBEDDED_SOURCE:
        return passage_source
    path = resolve_path(get_settings_folder(info), passage_source)
    return str(path)


class RetrievalOptions(ToolOptions):
    """Options of a tool that answers from passages, which are paragraphs of an encyclopedia.

    Attributes:
        passages: `embedded`, or a file of JSON lines (KILT's knowledge source, or `id`, `title`, `section`, `text`).
        index_folder: The folder of indexes, by default `indexes` in the user's cache. It does not affect results.
    """

    passages: Annotated[str, AfterValidator(_resolve_passages_under_root)] = EMBEDDED_SOURCE
    index_folder: OptionPath | None = None

    def get_index_folder(self) -> Path:
        """Return the folder of the index of the passages, whether it is built or not.

        Raises:
            PassageError: The passages cannot be read.
        """
        return compute_index_folder(self.passages, self.index_folder)

    def open_passage_search(self, report_progress: IndexingProgress | None = None) -> PassageSearch:
        """Open a search over the passages, and build their index first if it is missing.

        Args:
            report_progress: Called with the number of passages indexed so far.

        Raises:
            PassageError: The passages cannot be read, or the index cannot be written.
        """
        folder = ensure_index(self.passages, self.index_folder, report_progress)
        return PassageSearch(folder)

    def build_retrieval_identity(self) -> Mapping[str, object]:
        """Return what determines the results of searches, for fingerprints: the passages' hash and the search method.

        Raises:
            PassageError: The passages cannot be read.
        """
        version = get_index_version(self.passages)
        return {"retriever": "bm25", "passages": compute_source_digest(self.passages), "index_version": version}
