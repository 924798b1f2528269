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
    """Find the first tool name in a text that has `(` after it and opening brackets before it.

    Such text looks like a tool call.

    Example:
        look_alike_start("Then [<QA(", ["QA"])  # 5, the index of "["
        look_alike_start("Then QA(", ["QA"])  # None, because no bracket is before the name

    Returns:
        The index of the first of these brackets, or None if there is no such name.
    """
    name_pattern = _build_name_pattern(frozenset(names))

    match = name_pattern.search(text)
    while match is not None:
        name_start = match.start()
        brackets_length = _count_bracket_characters_before(text, name_start)
        if brackets_length > 0:
            return name_start - brackets_length
        match = name_pattern.search(text, name_start + 1)
    return None


def find_begun_look_alike(text: str) -> int:
    """Find where the end of a text begins that may become a tool name after a bracket, such as "<QA(".

    Example:
        find_begun_look_alike("Then [ Q")  # 5, because "[ Q" may become "[ QA("
        find_begun_look_alike("Then <Q")  # 5
        find_begun_look_alike("Then Q")  # 6, because no bracket is before the name

    Returns:
        The index of the first bracket. The length of the text if its end cannot become that.
    """
    # Backwards, "Then [ Q" begins with the name "Q" and the brackets " [".
    match = BEGUN_BACKWARDS.match(text[::-1])
    assert match is not None  # the pattern matches the empty text too

    if match["brackets"]:
        return len(text) - match.end()

    # The pattern takes `<` and `{` for characters of a name: in "Then <Q" the name is "<Q".
    name_start = len(text) - match.end("name")
    opening_bracket = OPENING.search(text, name_start)
    if opening_bracket is None:
        return len(text)
    return opening_bracket.start()


@cache
def _build_name_pattern(names: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of `names` followed by `(`; without names it matches nothing."""
    if not names:
        return re.compile(r"(?!)")
    any_name = "|".join(re.escape(name) for name in sorted(names))
    return re.compile(rf"(?:{any_name})\(")


def _count_bracket_characters_before(text: str, end: int) -> int:
    """Count the opening brackets directly before an index, with the white space between and after them.

    Example:
        _count_bracket_characters_before("Then [ (QA", 8)  # 3, the length of "[ (", which ends at index 8
    """
    first_bracket = end
    position = end

    # Go back over brackets and white space.
    while position > 0 and (text[position - 1].isspace() or OPENING.match(text[position - 1])):
        position -= 1
        if not text[position].isspace():
            first_bracket = position
    return end - first_bracket


def closes_unopened_bracket(before: str, text: str) -> bool:
    """Return whether a text closes a bracket that is not open, neither in it nor in the text before it.

    Each kind of bracket is counted on its own.

    Example:
        closes_unopened_bracket("(a [b", ")")  # False
        closes_unopened_bracket("(a", "]")  # True

    Args:
        before: The text before, in which such brackets do not matter.
        text: The text that follows.
    """
    # How many brackets are open, by opening bracket. Other characters are counted too, but never looked up.
    open_count = Counter[str]()

    for index, character in enumerate(before + text):
        opening_bracket = OPENED_BY.get(character)  # None if the character closes nothing
        if opening_bracket is None:
            open_count[character] += 1
        elif open_count[opening_bracket] > 0:
            open_count[opening_bracket] -= 1
        elif index >= len(before):
            return True
    return False
