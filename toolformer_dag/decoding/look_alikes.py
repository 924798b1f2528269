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
    """Return whether `text`, which follows `before`, has a closing bracket of a kind of which none is open."""
    open_brackets = Counter[str]()
    for index, sign in enumerate(before + text):
        opening = OPENED_BY.get(sign)
        if opening is None:
            open_brackets[sign] += 1
        elif open_brackets[opening]:
            open_brackets[opening] -= 1
        elif index >= len(before):
            return True
    return False
