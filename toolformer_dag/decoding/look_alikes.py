"""Find what reads like a call, or like the end of a call, but is not one."""

import re
from collections import Counter
from collections.abc import Collection
from functools import cache

OPENED_BY = {
    ")": "(",
    "]": "[",
    "}": "{",
    ">": "<",
}
"""The opening bracket of each closing one."""
OPENING = re.compile(r"[(\[{<]")
BEGUN_BACKWARDS = re.compile(r"(?P<name>[^\s()\[\]]*+)(?P<brackets>(?:\s*+[(\[{<])*+)")
"""The end of a text that may become a look-alike, read from its end: what a name may begin with, and brackets."""


def look_alike_start(text: str, names: Collection[str]) -> int | None:
    """Return where the first of `names` with `(` after opening brackets begins, with its brackets; None without one."""
    named = _named(frozenset(names))
    match = named.search(text)
    while match:
        brackets = _brackets_before(text, match.start())
        if brackets:
            return match.start() - brackets
        match = named.search(text, match.start() + 1)
    return None


def begun_start(text: str) -> int:
    """Return where the end of a text begins that may become a look-alike; else the length of the text."""
    match = BEGUN_BACKWARDS.match(text[::-1])
    assert match is not None  # it may be empty
    if match["brackets"]:
        return len(text) - match.end()
    name_start = len(text) - match.end("name")
    opening = OPENING.search(text, name_start)  # `{` or `<`, which may stand in a name too
    return len(text) if opening is None else opening.start()


@cache
def _named(names: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern for one of `names` with `(`; without names it matches nothing."""
    if not names:
        return re.compile(r"(?!)")
    any_name = "|".join(re.escape(name) for name in sorted(names))
    return re.compile(rf"(?:{any_name})\(")


def _brackets_before(text: str, end: int) -> int:
    """Return how many characters opening brackets take right before `end`, with the white space behind each."""
    start = end
    position = end
    while position > 0 and (text[position - 1].isspace() or OPENING.match(text[position - 1])):
        position -= 1
        if not text[position].isspace():
            start = position
    return end - start


def closes_nothing(before: str, text: str) -> bool:
    """Return whether `text`, which follows `before`, closes a bracket that neither of them opened.

    Each kind of bracket is counted by itself: `closes_nothing("(a [b", ")")` is False, `closes_nothing("(a", "]")` is
    True. Such a bracket in `before` alone does not count.
    """
    open_count = Counter[str]()  # by opening bracket; other characters are counted too, and never read
    for index, character in enumerate(before + text):
        opening = OPENED_BY.get(character)
        if opening is None:
            open_count[character] += 1
        elif open_count[opening]:
            open_count[opening] -= 1
        elif index >= len(before):
            return True
    return False
