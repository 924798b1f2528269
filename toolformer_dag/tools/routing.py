"""Which of many tools a text is for: the few whose description or example it fits best, by BM25."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tantivy

from toolformer_dag.identity import fingerprint
from toolformer_dag.texts.calls import take_out
from toolformer_dag.tools.passage_terms import build_any_term_query, get_analyzer, with_word_spaces
from toolformer_dag.tools.tool import Tool

_NUMBER = re.compile(r"\d+")
_EXAMPLE = re.compile(r"^Input: (.*)$", re.MULTILINE)
"""The Input of an example in a prompt."""
HEAP_BYTES = 15_000_000
"""The memory of the index writer: the least that tantivy takes."""
LAST_WORDS = 64
"""The last words of a text, which decide the tools that are offered after it."""
Offer = Callable[[str, frozenset[str]], frozenset[str]]
"""(text so far, names of tools that may be called) -> the names that are offered after the text."""


def list_describing_texts(tool: Tool) -> list[str]:
    """Return the texts that tell what a tool is for: its name with its description, and each Input of its prompt."""
    # Without the schema of its arguments: a change there would route the texts of all tools anew.
    name = tool.key.replace("_", " ")
    return [f"{name} {tool.about}", *_EXAMPLE.findall(tool.prompt)]


def compute_ranking_identity(tools: Sequence[Tool]) -> str:
    """Return what determines how `tools` are ranked, for fingerprints."""
    descriptions = {}
    for tool in tools:
        descriptions[tool.key] = [with_word_spaces(text) for text in list_describing_texts(tool)]
    return fingerprint(descriptions)


def _parse_terms(text: str) -> list[str]:
    """Return the distinct words of a text and pairs of neighbours, such as `new_york`; every number becomes 0."""
    with_zeros = _NUMBER.sub("0", text)
    words = get_analyzer().analyze(with_word_spaces(with_zeros))
    pairs = [f"{first}_{second}" for first, second in pairwise(words)]
    distinct_terms = dict.fromkeys([*words, *pairs])
    return list(distinct_terms)


class Router:
    """Ranks tools by how well a text fits them, with an index in memory of the texts that describe each tool."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._keys: list[str] = []  # for each text of the index, the key of the tool that it describes
        texts: list[str] = []
        for tool in tools:
            descriptions = list_describing_texts(tool)
            texts += descriptions
            self._keys += [tool.key] * len(descriptions)
        self._schema = _schema()
        self._index = tantivy.Index(self._schema)
        _write_texts(self._index, texts)
        self._searcher = self._index.searcher()

    def top(self, text: str, most: int) -> dict[str, float]:
        """Find the tools that fit a text best.

        Args:
            most: The largest number of tools.

        Returns:
            The BM25 score of each tool by its key, the best first. Tools with equal scores are in the order of their
            keys. A tool that shares no word with the text is left out.
        """
        query = build_any_term_query(self._schema, "terms", _parse_terms(text))
        if query is None:
            return {}

        scores = self._find_best_scores(query, most)  # may be of more tools, with equal scores
        ranked = sorted(scores.items(), key=_get_sort_key)
        return dict(ranked[:most])

    def _find_best_scores(self, query: tantivy.Query, most: int) -> dict[str, float]:
        """Find the best scores of `most` tools, and of further tools with the same score as the last of these."""
        scores: dict[str, float] = {}
        results = self._searcher.search(query, limit=len(self._keys))

        for score, address in results.hits:  # the best comes first
            has_enough = len(scores) >= most
            if has_enough and score < min(scores.values()):  # below the last of the tools so far
                break

            key = self._keys[self._read_text_number(address)]  # of the tool that the text describes
            scores.setdefault(key, float(score))  # a tool has several texts; the best of them comes first

        return scores

    def _read_text_number(self, address: tantivy.DocAddress) -> int:
        """Return the number of a text in the index."""
        number: int = self._searcher.doc(address)["number"][0]
        return number


def _schema() -> tantivy.Schema:
    """Return the fields of the index: the terms of a text, and its number among all texts."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("terms", tokenizer_name="whitespace")
    builder.add_unsigned_field("number", stored=True)
    return builder.build()


def _write_texts(index: tantivy.Index, texts: Sequence[str]) -> None:
    """Write texts into an empty index, numbered from 0."""
    writer = index.writer(HEAP_BYTES, 1)
    for number, text in enumerate(texts):
        writer.add_document(_build_document(text, number))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()


def _build_document(text: str, number: int) -> tantivy.Document:
    """Return the entry of a text in the index."""
    document = tantivy.Document()
    document.add_text("terms", " ".join(_parse_terms(text)))
    document.add_unsigned("number", number)
    return document


def _get_sort_key(key_and_score: tuple[str, float]) -> tuple[float, str]:
    """Return the sort key that puts higher scores first, and equal ones in order of keys."""
    key, score = key_and_score
    return -score, key


def offer(tools: Mapping[str, Tool], most: int) -> Offer | None:
    """Build a function that chooses which tools may be called after a text.

    It takes a text and the allowed names, and returns the names that best fit the last LAST_WORDS words.

    Args:
        tools: All tools, by their names in texts.
        most: How many tools are chosen. 0 means that there is no limit.

    Returns:
        The function, or None if no choice is needed.
    """
    if not _needs_choice(tool_count=len(tools), most=most):
        return None

    router = Router(list(tools.values()))  # ranks all tools by how well they fit a text
    names_by_key = {tool.key: name for name, tool in tools.items()}
    return _Choice(router, names_by_key, most)  # is called as a function


@dataclass(frozen=True, slots=True)
class _Choice:
    """Chooses the `most` tools that fit a text best."""

    router: Router  # ranks all tools
    names_by_key: Mapping[str, str]  # the tools' names in texts, by their keys
    most: int

    def __call__(self, text: str, allowed: frozenset[str]) -> frozenset[str]:
        """Return at most `most` of the allowed names; fewer where fewer tools share a word with the end of the text."""
        if len(allowed) <= self.most:
            return allowed
        allowed_names = [name for name in self._rank_names(text) if name in allowed]
        return frozenset(allowed_names[: self.most])

    def _rank_names(self, text: str) -> list[str]:
        """Return the names of all tools that share a word with the last LAST_WORDS words of a text, the best first."""
        words = take_out(text, self.names_by_key.values()).split()
        last_words = " ".join(words[-LAST_WORDS:])
        scores = self.router.top(last_words, most=len(self.names_by_key))
        return [self.names_by_key[key] for key in scores]


def _needs_choice(*, tool_count: int, most: int) -> bool:
    """Return whether fewer tools than there are can be offered."""
    return 0 < most < tool_count


def build_offer_identity(tools: Sequence[Tool], most: int) -> dict[str, Any]:
    """Return what determines which tools `offer` offers, for fingerprints; an empty dict if it offers all."""
    if not _needs_choice(tool_count=len(tools), most=most):
        return {}
    return {"offered": [most, compute_ranking_identity(tools)]}
