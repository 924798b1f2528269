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
OPENING = re.compile(r"(?:[(\[{<]\s*)+")
BEGUN = re.compile(rf"{OPENING.pattern}[^\s()\[\]]*$")
"""The end of a text that may become a look-alike."""


@cache
def look_alike(names: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for one of `names` with `(` after opening brackets; without names it matches nothing."""
    if not names:
        return re.compile(r"(?!)")
    any_name = "|".join(re.escape(name) for name in sorted(names))
    return re.compile(rf"{OPENING.pattern}(?:{any_name})\(")


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
