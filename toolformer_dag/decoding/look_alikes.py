"""Find what reads like a tool call, or like the end of one, but is none: "<QA(" or a bracket that nothing opened."""

import re
from collections import Counter
from collections.abc import Collection
from functools import cache

OPENING_BRACKET_BY_CLOSING = {
    ")": "(",
    "]": "[",
    "}": "{",
    ">": "<",
}
"""The opening bracket of each closing one."""
OPENING_BRACKET = re.compile(r"[(\[{<]")
REVERSED_LOOK_ALIKE_START = re.compile(r"(?P<name>[^\s()\[\]]*+)(?P<brackets>(?:\s*+[(\[{<])*+)")
"""What may become a look-alike at the end of a text, in a text read backwards: part of a name, then brackets."""


def find_look_alike_start(text: str, tool_names: Collection[str]) -> int | None:
    """Find the first tool name in a text that has `(` after it and opening brackets before it.

    Such text looks like a tool call.

    Example:
        find_look_alike_start("Then [<QA(", ["QA"])  # 5, the index of "["
        find_look_alike_start("Then QA(", ["QA"])  # None, because no bracket is before the name

    Returns:
        The index of the first of these brackets, or None if there is no such name.
    """
    name_pattern = _build_name_pattern(frozenset(tool_names))

    match = name_pattern.search(text)
    while match is not None:
        name_start = match.start()
        brackets_length = _count_bracket_characters_before(text, name_start)
        if brackets_length > 0:
            return name_start - brackets_length
        match = name_pattern.search(text, name_start + 1)
    return None


def find_partial_look_alike(text: str) -> int:
    """Find the beginning of a look-alike at the end of a text, such as "[ Q" of "[ QA(".

    A look-alike is a tool name with `(` after it and opening brackets before it.

    Example:
        find_partial_look_alike("Then [ Q")  # 5, because "[ Q" may become "[ QA("
        find_partial_look_alike("Then <Q")  # 5
        find_partial_look_alike("Then Q")  # 6, because no bracket is before the name

    Returns:
        The index of its first bracket, or the length of the text if it does not end with such a beginning.
    """
    # Read backwards, "Then [ Q" is "Q [ nehT": first what may be a part of a tool name, here "Q", in the group `name`,
    # then the opening brackets with the white space before the name and between them, here " [", in `brackets`.
    match = REVERSED_LOOK_ALIKE_START.match(text[::-1])
    assert match is not None  # the pattern matches the empty text too

    if match["brackets"]:
        return len(text) - match.end()

    name_start = len(text) - match.end("name")
    return _find_bracket_in_name(text, name_start)


def _find_bracket_in_name(text: str, name_start: int) -> int:
    """Find the first opening bracket that REVERSED_LOOK_ALIKE_START took for a character of the name.

    It does so with `<` and `{`: in "Then <Q" the name is "<Q".

    Args:
        text: The text, which ends with the name.
        name_start: The index of the first character of the name.

    Returns:
        The index of the bracket, or the length of the text without one.
    """
    opening_bracket = OPENING_BRACKET.search(text, name_start)
    return len(text) if opening_bracket is None else opening_bracket.start()


@cache
def _build_name_pattern(tool_names: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of `tool_names` followed by `(`. Without names it matches nothing."""
    if not tool_names:
        return re.compile(r"(?!)")
    any_name = "|".join(re.escape(name) for name in sorted(tool_names))
    return re.compile(rf"(?:{any_name})\(")


def _count_bracket_characters_before(text: str, end: int) -> int:
    """Count the opening brackets directly before an index, with the white space between and after them.

    Example:
        _count_bracket_characters_before("Then [ (QA", 8)  # 3, the length of "[ (", which ends at index 8
    """
    first_bracket = end
    position = end

    # Go back over brackets and white space.
    while position > 0 and (text[position - 1].isspace() or OPENING_BRACKET.match(text[position - 1])):
        position -= 1
        if not text[position].isspace():
            first_bracket = position
    return end - first_bracket


def closes_unopened_bracket(text_before: str, added_text: str) -> bool:
    """Return whether a text closes a bracket that is not open, neither in it nor in the text before it.

    Each kind of bracket is counted on its own.

    Example:
        closes_unopened_bracket("(a [b", ")")  # False
        closes_unopened_bracket("(a", "]")  # True

    Args:
        text_before: The text before, in which such brackets do not matter.
        added_text: The text that follows.
    """
    # How many brackets are open, by opening bracket. Other characters are counted too, but never looked up.
    open_count = Counter[str]()

    for index, character in enumerate(text_before + added_text):
        opening_bracket = OPENING_BRACKET_BY_CLOSING.get(character)  # None if the character closes nothing
        if opening_bracket is None:
            open_count[character] += 1
        elif open_count[opening_bracket] > 0:
            open_count[opening_bracket] -= 1
        elif index >= len(text_before):
            return True
    return False
