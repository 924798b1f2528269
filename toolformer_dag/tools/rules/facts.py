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
NEAR = 200
"""The most characters between a name and a fact."""
BEGIN = 40
"""The least characters before the first fact."""
PER_TEXT = 3
"""The most calls of a text."""
WORDS_BETWEEN = 4
"""The most words of a query besides the name."""


def propose_searches(text: str) -> Iterator[ProposedCall]:
    """Yield at most PER_TEXT searches, each before a fact: a name or number that the text says for the first time.

    The query is the nearest name before the fact and the last words between the two: in "The mathematician Ada Lovelace
    was the daughter of Lord Byron.", before `Lord Byron`, it is `Ada Lovelace daughter`.
    """
    yield from islice(_searches(text), PER_TEXT)


def _searches(text: str) -> Iterator[ProposedCall]:
    """Yield a search before each new fact (a name or number) of a text.

    The nearest name before the fact is what the search is about. It has to be on the same line, within NEAR characters.
    """
    name: re.Match[str] | None = None  # the last name before the fact
    for fact in FACT.finditer(text):
        if fact[0].lower() in COMMON:
            continue
        if name is not None and _is_new(text, fact):
            between = text[name.end() : fact.start()]
            if _is_near(between):
                yield ProposedCall(fact.start(), _query(name[0], between), words=fact[0])
        is_name = fact[0][0].isalpha()
        if is_name:
            name = fact


def _is_near(between: str) -> bool:
    """Return whether a name and a fact with this text between them are near each other, on the same line."""
    return len(between) < NEAR and "\n" not in between


def _query(name: str, between: str) -> str:
    """Return the query from a name and the text between it and the fact."""
    words = [word for word in WORD.findall(between) if word.lower() not in STOP_WORDS]
    return " ".join([name, *words[-WORDS_BETWEEN:]])


def _is_new(text: str, fact: re.Match[str]) -> bool:
    """Return whether a text says a name or number for the first time, after words that tell what it is about.

    False in the first BEGIN characters and at the beginning of a sentence, where nothing tells that.
    """
    before = text[: fact.start()]
    last_character = before.rstrip('"“( ')[-1:]
    begins_sentence = last_character in ("", ".", "!", "?", ":", "\n")
    is_repeated = fact[0].lower() in before.lower()
    return len(before) >= BEGIN and not begins_sentence and not is_repeated
