"""Which of many tools a text is for: the few whose descriptions it fits best, by BM25."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import tantivy

from toolformer_dag.identity import fingerprint
from toolformer_dag.texts.calls import take_out
from toolformer_dag.texts.segments import CUTS
from toolformer_dag.tools.passage_search import analyzer, query_terms
from toolformer_dag.tools.tool import Tool

_NUMBER = re.compile(r"\d+")
_SENTENCE_ENDS = re.compile("|".join(cut.pattern for cut in CUTS[:2]))  # of paragraphs too
HEAP_BYTES = 15_000_000
"""The least that tantivy takes."""
NEAR = 64
"""Words before a call that decide which tools are offered there: as many as a query has terms."""
Offer = Callable[[str, frozenset[str]], frozenset[str]]
"""(text so far, names of tools that may be called) -> those of them that are offered behind the text."""


def told(tool: Tool) -> str:
    """Return what texts are compared with: the name, the description and the examples of a tool.

    Its schema is not: a change there would route the texts of all lanes anew, and examples name arguments. All numbers
    are alike.
    """
    return _NUMBER.sub("0", "\n".join([tool.key.replace("_", " "), tool.about, tool.prompt.partition("Input:")[2]]))


class Router:
    """Ranks tools by a text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("told", tokenizer_name="words")
        builder.add_unsigned_field("number", stored=True)
        self._keys = [tool.key for tool in tools]
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer("words", analyzer())
        writer = self._index.writer(HEAP_BYTES, 1)
        for number, tool in enumerate(tools):
            document = tantivy.Document()
            document.add_text("told", told(tool))
            document.add_unsigned("number", number)
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()

    def top(self, text: str, most: int) -> dict[str, float]:
        """Return the scores of at most `most` tools that share words with the text, the best first, by key."""
        words = query_terms(_NUMBER.sub("0", text))
        terms = [tantivy.Query.term_query(self._schema, "told", word, "freq") for word in words]
        query = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        hits = self._searcher.search(query, len(self._keys)).hits if terms else []
        return _best({self._keys[self._searcher.doc(at)["number"][0]]: float(score) for score, at in hits}, most)

    def fitting(self, text: str, most: int) -> dict[str, float]:
        """Return the scores of the tools that fit a sentence of the text best; of more than `most` the best ones.

        Sentence by sentence, since a text is about several things: one that fits a tool is not outweighed by the rest.
        """
        found: dict[str, float] = {}
        for sentence in _SENTENCE_ENDS.split(text):
            for key, score in self.top(sentence, 1).items():
                found[key] = max(score, found.get(key, 0.0))
        return _best(found, most)


def _best(scores: Mapping[str, float], most: int) -> dict[str, float]:
    return dict(sorted(scores.items(), key=lambda one: (-one[1], one[0]))[:most])


def offer(tools: Mapping[str, Tool], most: int) -> Offer | None:
    """Return what offers, of the tools that may be called, at most `most`: those that the last words fit best.

    `tools`: by their names in the text. Calls in the text count for nothing. Where no tool shares a word with it, none
    is offered. None where all tools are.
    """
    if not 0 < most < len(tools):
        return None
    names, router = {tool.key: name for name, tool in tools.items()}, Router(list(tools.values()))

    def offered(text: str, callable: frozenset[str]) -> frozenset[str]:
        if len(callable) <= most:
            return callable
        near = " ".join(take_out(text, names.values()).split()[-NEAR:])
        ranked = (names[key] for key in router.top(near, len(names)))
        return frozenset(islice((name for name in ranked if name in callable), most))

    return offered


def offer_identity(tools: Sequence[Tool], most: int) -> dict[str, Any]:
    """Return what determines which tools `offer` offers; nothing where it offers all."""
    return {"offered": [most, fingerprint({tool.key: told(tool) for tool in tools})]} if 0 < most < len(tools) else {}
