"""BM25 search over an index on disk (Robertson et al. 1995; tantivy's k1 = 1.2, b = 0.75)."""

import math
from dataclasses import dataclass
from pathlib import Path

import tantivy

from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.retrieval.terms import analyzer, query_terms

TIE_MARGIN = 8
SCORE_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Hit:
    score: float
    passage: Passage


class PassageSearch:
    """A reader of one index folder; several threads and processes may search at once."""

    def __init__(self, folder: Path) -> None:
        index = tantivy.Index.open(str(folder))
        index.register_tokenizer("words", analyzer())
        self._schema = index.schema
        self._searcher = index.searcher()

    def search(self, query: str, limit: int) -> list[Hit]:
        """At most `limit` passages that share a term with the query, best first.

        The query is a bag of terms, never query language. Equal scores stand in the order of the source, as far as
        `TIE_MARGIN` passages beyond the limit reach, so that an index built in other pieces answers alike.
        """
        terms = query_terms(query)
        if not terms:
            return []
        found = self._searcher.search(self._query(terms), limit + TIE_MARGIN, count=False).hits
        numbers = self._searcher.fast_field_values("number", [address for _, address in found])
        ranked = sorted(zip(found, numbers, strict=True), key=lambda hit: (-round(hit[0][0], SCORE_DIGITS), hit[1]))
        return [Hit(score, self._passage(address)) for (score, address), _ in ranked[:limit]]

    def rarity(self, word: str) -> float:
        """BM25's idf of a word; of several terms in it, the rarest counts."""
        count = self._searcher.num_docs
        found = [self._searcher.doc_freq("words", term) for term in analyzer().analyze(word)]
        return math.log(1 + (count - min(found) + 0.5) / (min(found) + 0.5)) if found else 0.0

    def _query(self, terms: list[str]) -> tantivy.Query:
        should = tantivy.Occur.Should
        return tantivy.Query.boolean_query(
            [(should, tantivy.Query.term_query(self._schema, "words", term, "freq")) for term in terms]
        )

    def _passage(self, address: tantivy.DocAddress) -> Passage:
        return Passage.unpacked(bytes(self._searcher.doc(address)["passage"][0]))
