"""Propose searches before names and numbers that a text says for the first time, with the names before them.

The rule looks at what follows the call, so each call has `words`: only a snippet that holds the fact counts, and it has
to beat its echo, the snippet that a search for the fact alone finds.
"""

import re
from collections.abc import Iterator
from itertools import islice

from toolformer_dag.tools.passage_terms import STOP_WORDS
from toolformer_dag.tools.rules.questions import NAME_REGEX
from toolformer_dag.tools.tool import ProposedCall

VERSION = "1"
"""Raised when the rule gives other calls."""
FACT_PATTERN = re.compile(rf"\b{NAME_REGEX}|\b\d{{2,4}}s?\b")
"""A name, or a number of two to four digits, as `1936` or `1930s`."""
DAY_NAMES = "monday tuesday wednesday thursday friday saturday sunday"
MONTH_NAMES = "january february march april may june july august september october november december"
COMMON_WORDS = STOP_WORDS | set(
    f"{DAY_NAMES} {MONTH_NAMES} however although according during several many one two some first since while despite "
    "also new other both most later early each".split()
)
"""Words with a capital letter that are no names, such as those that begin a sentence; in lower case."""
WORD_PATTERN = re.compile(r"[A-Za-z]{3,}")
MAX_CHARACTERS_BETWEEN = 200
"""The most characters between a name and a fact."""
MIN_CHARACTERS_BEFORE_FACT = 40
"""The least characters before the first fact."""
MAX_CALLS_PER_TEXT = 3
"""The most calls of a text."""
MAX_QUERY_WORDS_BETWEEN = 4
"""The most words of a query besides the name."""


def propose_searches(text: str) -> Iterator[ProposedCall]:
    """Propose searches in a text, each before a fact: a name or number that the text says for the first time.

    In "The mathematician Ada Lovelace was the daughter of Lord Byron." the query before `Lord Byron` is `Ada Lovelace
    daughter`: the nearest name, and the last words between the two.

    Yields:
        At most MAX_CALLS_PER_TEXT calls, in the order of the text.
    """
    yield from islice(_iter_searches(text), MAX_CALLS_PER_TEXT)


def _iter_searches(text: str) -> Iterator[ProposedCall]:
    """Propose a search before each new fact (a name or number) of a text, about the nearest name before it."""
    previous_name_match: re.Match[str] | None = None
    for fact_match in FACT_PATTERN.finditer(text):
        fact = fact_match[0]
        if fact.lower() in COMMON_WORDS:  # such as a capital word that begins a sentence
            continue

        if previous_name_match is not None and _is_new_fact(text, fact_match):
            yield from _propose_search(text, previous_name_match, fact_match)

        is_name = fact[0].isalpha()  # and not a number
        if is_name:
            previous_name_match = fact_match


def _propose_search(text: str, name_match: re.Match[str], fact_match: re.Match[str]) -> Iterator[ProposedCall]:
    """Propose the search that finds a fact, from a name before it.

    In "Ada Lovelace was the daughter of Lord Byron" the name is `Ada Lovelace` and the fact `Lord Byron`.

    Args:
        text: The text.
        name_match: The match of the name in the text.
        fact_match: The match of the fact in the text.

    Yields:
        The call before the fact, or nothing if name and fact are not near each other on one line.
    """
    text_between = text[name_match.end() : fact_match.start()]
    if len(text_between) < MAX_CHARACTERS_BETWEEN and "\n" not in text_between:
        query = _build_query(name_match[0], text_between)
        yield ProposedCall(fact_match.start(), query, words=fact_match[0])


def _build_query(name: str, text_between: str) -> str:
    """Build a query from a name and the last words between it and a fact, without stop words such as `the`."""
    words = [word for word in WORD_PATTERN.findall(text_between) if word.lower() not in STOP_WORDS]
    last_words = words[-MAX_QUERY_WORDS_BETWEEN:]
    return " ".join([name, *last_words])


def _is_new_fact(text: str, fact_match: re.Match[str]) -> bool:
    """Return whether a name or number is new to a text, and does not begin a sentence.

    Args:
        text: The text.
        fact_match: The match of the name or number in the text.
    """
    text_before = text[: fact_match.start()]
    if len(text_before) < MIN_CHARACTERS_BEFORE_FACT:
        return False

    last_character = text_before.rstrip('"“( ')[-1:]  # empty if there is none
    begins_sentence = last_character in ("", ".", "!", "?", ":", "\n")
    is_repeated = fact_match[0].lower() in text_before.lower()
    return not begins_sentence and not is_repeated
