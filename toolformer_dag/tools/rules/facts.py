"""Propose searches before names and numbers that a text says for the first time, with the names before them.

The rule looks at what follows the call, so each call has `words`: only a snippet that holds the fact counts, and it has
to beat its echo, the snippet that a search for the fact alone finds.
"""

import re
from collections.abc import Iterator
from itertools import islice

from toolformer_dag.tools.passage_search import STOP_WORDS
from toolformer_dag.tools.rules.questions import NAME
from toolformer_dag.tools.tool import Proposed

VERSION = "1"
"""Raised when the rule gives other calls."""
FACT = re.compile(rf"\b{NAME}|\b\d{{2,4}}s?\b")
DAYS = "monday tuesday wednesday thursday friday saturday sunday"
MONTHS = "january february march april may june july august september october november december"
COMMON = STOP_WORDS | set(
    f"{DAYS} {MONTHS} however although according during several many one two some first since while despite also new "
    "other both most later early each".split()
)
WORD = re.compile(r"[A-Za-z]{3,}")
NEAR, BEGIN, PER_TEXT, WORDS_BETWEEN = 200, 40, 3, 4
"""Characters between name and fact at most, and before the first fact at least; calls of a text; words of a query."""


def propose_searches(text: str) -> Iterator[Proposed]:
    """Yield the first PER_TEXT searches: the nearest name before a new fact and the last words between the two."""
    yield from islice(_searches(text), PER_TEXT)


def _searches(text: str) -> Iterator[Proposed]:
    facts = [one for one in FACT.finditer(text) if one[0].lower() not in COMMON]
    for number, fact in enumerate(facts):
        name = next((one for one in reversed(facts[:number]) if one[0][0].isalpha()), None)
        if name is not None and _is_new(text, fact) and fact.start() - name.end() < NEAR:
            between = text[name.end() : fact.start()]
            if "\n" not in between:
                yield Proposed(fact.start(), _query(name[0], between), fact[0])


def _query(name: str, between: str) -> str:
    words = [one for one in WORD.findall(between) if one.lower() not in STOP_WORDS]
    return " ".join([name, *words[-WORDS_BETWEEN:]])


def _is_new(text: str, fact: re.Match[str]) -> bool:
    """Return whether a text says a fact for the first time, and not at the beginning of a sentence."""
    before = text[: fact.start()]
    lead = before.rstrip('"“( ')
    return len(before) >= BEGIN and lead[-1:] not in ("", *".!?:\n") and fact[0].lower() not in before.lower()
