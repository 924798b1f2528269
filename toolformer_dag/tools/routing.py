"""Which of many tools a text is for: the few whose description or example it fits best, by BM25."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import tantivy

from toolformer_dag.identity import fingerprint
from toolformer_dag.texts.calls import take_out
from toolformer_dag.tools.passage_search import analyzer, spaced
from toolformer_dag.tools.tool import Tool

_NUMBER = re.compile(r"\d+")
_EXAMPLE = re.compile(r"^Input: (.*)$", re.MULTILINE)
HEAP_BYTES = 15_000_000
"""The least that tantivy takes."""
NEAR = 64
"""Words before a call that decide which tools are offered there."""
Offer = Callable[[str, frozenset[str]], frozenset[str]]
"""(text so far, names of tools that may be called) -> those of them that are offered after the text."""


def described_by(tool: Tool) -> list[str]:
    """Return what texts are compared with, one by one: a tool's name with its description, and its examples.

    Its schema is not: a change there would route the texts of all lanes anew.
    """
    return [f"{tool.key.replace('_', ' ')} {tool.about}", *_EXAMPLE.findall(tool.prompt)]


def ranking_identity(tools: Sequence[Tool]) -> str:
    """Return what determines how `tools` are ranked."""
    return fingerprint({tool.key: list(map(spaced, described_by(tool))) for tool in tools})


def _terms(text: str) -> list[str]:
    """Return the distinct words and pairs of neighbours; all numbers are alike."""
    words = analyzer().analyze(spaced(_NUMBER.sub("0", text)))
    return list(dict.fromkeys([*words, *map("_".join, pairwise(words))]))


class Router:
    """Ranks tools by a text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("terms", tokenizer_name="whitespace")
        builder.add_unsigned_field("number", stored=True)
        documents = [(tool.key, text) for tool in tools for text in described_by(tool)]
        self._keys = [key for key, _ in documents]
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema)
        writer = self._index.writer(HEAP_BYTES, 1)
        for number, (_, text) in enumerate(documents):
            document = tantivy.Document()
            document.add_text("terms", " ".join(_terms(text)))
            document.add_unsigned("number", number)
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()

    def top(self, text: str, most: int) -> dict[str, float]:
        """Return the scores of at most `most` tools that share words with the text, the best first, by key.

        A tool's score is that of the best of the texts that it is `described_by`.
        """
        terms = [tantivy.Query.term_query(self._schema, "terms", term, "freq") for term in _terms(text)]
        query = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        scores: dict[str, float] = {}
        for score, at in self._searcher.search(query, len(self._keys)).hits if terms else []:  # the best comes first
            if len(scores) >= most and score < min(scores.values()):
                break
            scores.setdefault(self._keys[self._searcher.doc(at)["number"][0]], float(score))
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
    return {"offered": [most, ranking_identity(tools)]} if 0 < most < len(tools) else {}
