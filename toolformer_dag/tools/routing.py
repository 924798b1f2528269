"""Which of many tools a text is for: the few whose description or example it fits best, by BM25."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tantivy

from toolformer_dag.identity import fingerprint
from toolformer_dag.texts.calls import remove_calls
from toolformer_dag.tools.passage_terms import build_any_term_query, get_word_analyzer, insert_word_spaces
from toolformer_dag.tools.tool import Tool

_NUMBER_PATTERN = re.compile(r"\d+")
_EXAMPLE_INPUT_PATTERN = re.compile(r"^Input: (.*)$", re.MULTILINE)
"""The Input of an example in a prompt."""
WRITER_HEAP_BYTES = 15_000_000
"""The memory of the index writer: the least that tantivy takes."""
MAX_LAST_WORDS = 64
"""The last words of a text, which decide the tools that are offered after it."""
Offer = Callable[[str, frozenset[str]], frozenset[str]]
"""(text so far, names of tools that may be called) -> the names that are offered after the text."""


def list_tool_descriptions(tool: Tool) -> list[str]:
    """Return the texts that tell what a tool is for: its name with its description, and each Input of its prompt."""
    # The schema of its arguments is left out, because a change there would route the texts of all tools anew.
    name = tool.key.replace("_", " ")
    example_inputs = _EXAMPLE_INPUT_PATTERN.findall(tool.prompt)
    return [f"{name} {tool.summary}", *example_inputs]


def compute_ranking_identity(tools: Sequence[Tool]) -> str:
    """Return a hash of everything that determines how tools are ranked: the texts that describe them."""
    descriptions_by_key = {}
    for tool in tools:
        descriptions_by_key[tool.key] = [insert_word_spaces(text) for text in list_tool_descriptions(tool)]
    return fingerprint(descriptions_by_key)


def _extract_terms(text: str) -> list[str]:
    """Return the distinct words of a text, and its pairs of neighboring words, such as `new_york`.

    Every number becomes 0, because it says little about the tool that a text is for.
    """
    text_with_zeros = _NUMBER_PATTERN.sub("0", text)
    words = get_word_analyzer().analyze(insert_word_spaces(text_with_zeros))
    pairs = [f"{first}_{second}" for first, second in pairwise(words)]
    distinct_terms = dict.fromkeys([*words, *pairs])
    return list(distinct_terms)


class Router:
    """Ranks tools by how well a text fits them, with an index in memory of the texts that describe each tool."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        # For each text of the index, by its number, the key of the tool that it describes.
        self._tool_key_by_text_number: list[str] = []
        texts: list[str] = []
        for tool in tools:
            descriptions = list_tool_descriptions(tool)
            texts += descriptions
            self._tool_key_by_text_number += [tool.key] * len(descriptions)

        self._schema = _build_index_schema()
        self._index = tantivy.Index(self._schema)
        _write_texts_to_index(self._index, texts)
        self._searcher = self._index.searcher()

    def rank_tools(self, text: str, max_tools: int) -> dict[str, float]:
        """Find the tools that fit a text best.

        The score of a tool is that of the text about it that is most similar to `text`, by BM25, the usual measure of
        search engines.

        Args:
            text: The text.
            max_tools: The largest number of tools.

        Returns:
            The BM25 score of each tool by its key, the best first. Tools with equal scores are in the order of their
            keys. A tool that shares no word with the text is left out.
        """
        query = build_any_term_query(self._schema, "terms", _extract_terms(text))
        if query is None:  # a text without words
            return {}

        score_by_key = self._find_best_scores(query, max_tools)  # may be of more tools, with equal scores
        ranked_items = sorted(score_by_key.items(), key=_get_sort_key)
        return dict(ranked_items[:max_tools])

    def _find_best_scores(self, query: tantivy.Query, max_tools: int) -> dict[str, float]:
        """Find the best scores of `max_tools` tools, and of further tools with the same score as the last of these.

        Returns:
            The score of each tool by its key.
        """
        score_by_key: dict[str, float] = {}
        text_count = len(self._tool_key_by_text_number)
        results = self._searcher.search(query, limit=text_count)

        for score, address in results.hits:  # the best comes first
            has_enough_tools = len(score_by_key) >= max_tools
            if has_enough_tools and score < min(score_by_key.values()):  # below the last of the tools so far
                break

            text_number = self._read_text_number(address)
            key = self._tool_key_by_text_number[text_number]
            # A tool has several texts; the best of them comes first, and counts.
            score_by_key.setdefault(key, float(score))

        return score_by_key

    def _read_text_number(self, address: tantivy.DocAddress) -> int:
        """Return the number of a text in the index, by its address there."""
        stored_fields = self._searcher.doc(address)
        number: int = stored_fields["number"][0]
        return number


def _build_index_schema() -> tantivy.Schema:
    """Return the fields of the index: the terms of a text, and its number among all texts."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("terms", tokenizer_name="whitespace")
    builder.add_unsigned_field("number", stored=True)
    return builder.build()


def _write_texts_to_index(index: tantivy.Index, texts: Sequence[str]) -> None:
    """Write texts into an empty index, numbered from 0."""
    writer = index.writer(WRITER_HEAP_BYTES, 1)
    for number, text in enumerate(texts):
        writer.add_document(_build_document(text, number))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()


def _build_document(text: str, number: int) -> tantivy.Document:
    """Return the entry of a text in the index: its terms and its number."""
    document = tantivy.Document()
    document.add_text("terms", " ".join(_extract_terms(text)))
    document.add_unsigned("number", number)
    return document


def _get_sort_key(key_and_score: tuple[str, float]) -> tuple[float, str]:
    """Return the sort key that puts higher scores first, and equal ones in order of keys."""
    key, score = key_and_score
    return -score, key


def build_tool_offer(tools: Mapping[str, Tool], max_tools: int) -> Offer | None:
    """Build a function that chooses which tools may be called after a text.

    It takes a text and the allowed names, and returns the names of the tools that best fit the last MAX_LAST_WORDS
    words of the text.

    Args:
        tools: All tools, by their names in texts.
        max_tools: How many tools are chosen at most. 0 means that there is no limit.

    Returns:
        The function, or None if no choice is needed, because there are no more tools than are chosen.
    """
    if not _needs_choice(tool_count=len(tools), max_tools=max_tools):
        return None

    router = Router(list(tools.values()))  # ranks all tools by how well they fit a text
    names_by_key = {tool.key: name for name, tool in tools.items()}
    return _Choice(router, names_by_key, max_tools)  # is called as a function


@dataclass(frozen=True, slots=True)
class _Choice:
    """Chooses the tools that fit a text best.

    Attributes:
        router: Ranks all tools.
        names_by_key: The names of the tools in texts, by their keys.
        max_tools: How many tools are chosen at most.
    """

    router: Router
    names_by_key: Mapping[str, str]
    max_tools: int

    def __call__(self, text: str, allowed: frozenset[str]) -> frozenset[str]:
        """Choose the tools that may be called after a text.

        Args:
            text: The text so far.
            allowed: The names of the tools that may be chosen.

        Returns:
            The names of at most `max_tools` tools; of fewer if fewer tools share a word with the end of the text.
        """
        if len(allowed) <= self.max_tools:
            return allowed
        allowed_names = [name for name in self._rank_tool_names(text) if name in allowed]
        return frozenset(allowed_names[: self.max_tools])

    def _rank_tool_names(self, text: str) -> list[str]:
        """Return the names of all tools that share a word with the end of a text, the best first.

        The end is the last MAX_LAST_WORDS words, without calls.
        """
        words = remove_calls(text, self.names_by_key.values()).split()
        last_words = " ".join(words[-MAX_LAST_WORDS:])
        ranked_keys = self.router.rank_tools(last_words, max_tools=len(self.names_by_key))
        return [self.names_by_key[key] for key in ranked_keys]


def _needs_choice(*, tool_count: int, max_tools: int) -> bool:
    """Return whether there are more tools than may be offered; a `max_tools` of 0 sets no limit."""
    return 0 < max_tools < tool_count


def build_offer_identity(tools: Sequence[Tool], max_tools: int) -> dict[str, Any]:
    """Return what determines which tools `build_tool_offer` offers, for fingerprints, or {} if it offers all."""
    if not _needs_choice(tool_count=len(tools), max_tools=max_tools):
        return {}
    return {"offered": [max_tools, compute_ranking_identity(tools)]}
