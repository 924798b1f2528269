"""Find what reads like a tool call, or like the end of one, but is none: "<QA(" or a bracket that nothing opened."""

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
"""What may become a look-alike at the end of a text, in a text read backwards: part of a name, then brackets."""


def look_alike_start(text: str, names: Collection[str]) -> int | None:
    """Return the index at which the first look-alike of a call begins, None without one.

    A look-alike is one of `names` with `(` after it and opening brackets before it. Its first bracket counts:

        look_alike_start("Then [<QA(", ["QA"])  # 5
        look_alike_start("Then QA(", ["QA"])  # None
    """
    name_pattern = _build_name_pattern(frozenset(names))
    name = name_pattern.search(text)
    while name is not None:
        bracket_length = _measure_brackets_before(text, name.start())
        if bracket_length:
            return name.start() - bracket_length
        name = name_pattern.search(text, name.start() + 1)
    return None


def find_begun_look_alike(text: str) -> int:
    """Return the index from which the end of a text may become a look-alike of a call; the text's length if none may.

    A look-alike is a tool's name between brackets, such as "<QA(":

        begun_start("Then [ Q")  # 5: "[ Q" may become "[ QA("
        begun_start("Then <Q")  # 5
        begun_start("Then Q")  # 6, the length: no bracket is before the name
    """
    ending = BEGUN_BACKWARDS.match(text[::-1])  # of "Then [ Q" backwards: the name "Q", the brackets " ["
    assert ending is not None  # the pattern matches the empty text too
    if ending["brackets"]:
        return len(text) - ending.end()
    # The pattern takes `<` and `{` for characters of a name: the name of "Then <Q" is "<Q".
    name_start = len(text) - ending.end("name")
    opening_bracket = OPENING.search(text, name_start)
    return len(text) if opening_bracket is None else opening_bracket.start()


@cache
def _build_name_pattern(names: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of `names` followed by `(`; without names it matches nothing."""
    if not names:
        return re.compile(r"(?!)")
    any_name = "|".join(re.escape(name) for name in sorted(names))
    return re.compile(rf"(?:{any_name})\(")


def _measure_brackets_before(text: str, end: int) -> int:
    """Return the length of the opening brackets and white space that end at `end`, from the first bracket on.

    3 for "Then [ (" and its end: "[ (" without the space before it. 0 if there is no bracket.
    """
    first_bracket = end
    position = end
    while position > 0 and (text[position - 1].isspace() or OPENING.match(text[position - 1])):
        position -= 1
        if not text[position].isspace():
            first_bracket = position
    return end - first_bracket


def closes_unopened_bracket(before: str, text: str) -> bool:
    """Return whether `text`, which follows `before`, closes a bracket that is not open; each kind counts apart:

    closes_unopened_bracket("(a [b", ")")  # False
    closes_unopened_bracket("(a", "]")  # True
    """
    open_count = Counter[str]()  # by opening bracket; other characters are counted too, but never read
    for index, character in enumerate(before + text):
        opening = OPENED_BY.get(character)
        if opening is None:
            open_count[character] += 1
        elif open_count[opening]:
            open_count[opening] -= 1
        elif index >= len(before):
            return True
    return False
