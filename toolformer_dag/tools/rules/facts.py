"""Propose searches before names and numbers that a text says for the first time, with the names before them.

The rule looks at what follows the call, so each call has `words`: only a snippet that holds the fact counts, and it has
to beat its echo, the snippet that a search for the fact alone finds.
"""

import re
from collections.abc import Iterator
from itertools import islice

from toolformer_dag.tools.passage_terms import STOP_WORDS
from toolformer_dag.tools.rules.questions import NAME
from toolformer_dag.tools.tool import ProposedCall

VERSION = "1"
"""Raised when the rule gives other calls."""
FACT = re.compile(rf"\b{NAME}|\b\d{{2,4}}s?\b")
"""A name, or a number of two to four digits, as `1936` or `1930s`."""
DAYS = "monday tuesday wednesday thursday friday saturday sunday"
MONTHS = "january february march april may june july august september october november december"
COMMON = STOP_WORDS | set(
    f"{DAYS} {MONTHS} however although according during several many one two some first since while despite also new "
    "other both most later early each".split()
)
"""Words with a capital letter that are no names, such as those that begin a sentence; in lower case."""
WORD = re.compile(r"[A-Za-z]{3,}")
MOST_CHARACTERS_BETWEEN = 200
"""The most characters between a name and a fact."""
CHARACTERS_BEFORE_FACT = 40
"""The least characters before the first fact."""
MOST_PER_TEXT = 3
"""The most calls of a text."""
MOST_WORDS_BETWEEN = 4
"""The most words of a query besides the name."""


def propose_searches(text: str) -> Iterator[ProposedCall]:
    """Yield at most MOST_PER_TEXT searches, each before a fact: a name or number that the text says for the first time.

    In "The mathematician Ada Lovelace was the daughter of Lord Byron." the query before `Lord Byron` is `Ada Lovelace
    daughter`: the nearest name, and the last words between the two.
    """
    yield from islice(_iter_searches(text), MOST_PER_TEXT)


def _iter_searches(text: str) -> Iterator[ProposedCall]:
    """Propose a search before each new fact (a name or number) of a text, about the nearest name before it."""
    previous_name: re.Match[str] | None = None
    for fact in FACT.finditer(text):
        if fact[0].lower() in COMMON:
            continue

        if previous_name is not None and _is_new(text, fact):
            yield from _propose_search(text, previous_name, fact)

        is_name = fact[0][0].isalpha()
        if is_name:
            previous_name = fact


def _propose_search(text: str, name: re.Match[str], fact: re.Match[str]) -> Iterator[ProposedCall]:
    """Yield the search for a fact about a name before it, if both are near each other on one line."""
    between = text[name.end() : fact.start()]
    if len(between) < MOST_CHARACTERS_BETWEEN and "\n" not in between:
        query = _build_query(name[0], between)
        yield ProposedCall(fact.start(), query, words=fact[0])


def _build_query(name: str, between: str) -> str:
    """Return the query from a name and the text between it and the fact."""
    words = [word for word in WORD.findall(between) if word.lower() not in STOP_WORDS]
    return " ".join([name, *words[-MOST_WORDS_BETWEEN:]])


def _is_new(text: str, fact: re.Match[str]) -> bool:
    """Return whether a name or number is new, and neither begins the text nor a sentence."""
    before = text[: fact.start()]
    last_character = before.rstrip('"“( ')[-1:]
    begins_sentence = last_character in ("", ".", "!", "?", ":", "\n")
    is_repeated = fact[0].lower() in before.lower()
    return len(before) >= CHARACTERS_BEFORE_FACT and not begins_sentence and not is_repeated
