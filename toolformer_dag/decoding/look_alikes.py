"""Tell what reads like a call, or like the end of one, and is none."""

import re
from collections import Counter
from collections.abc import Collection
from functools import cache

OPENED_BY = {")": "(", "]": "[", "}": "{", ">": "<"}


OPENING = re.compile(r"(?:[(\[{<]\s*)+")
BEGUN = re.compile(rf"{OPENING.pattern}[^\s()\[\]]*$")
"""What may become a look-alike."""


@cache
def look_alike(names: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for one of `names` with `(` after opening brackets; nothing matches for no names."""
    listed = "|".join(map(re.escape, sorted(names)))
    return re.compile(rf"{OPENING.pattern}(?:{listed})\(" if names else r"(?!)")


def closes_nothing(before: str, text: str) -> bool:
    """Return whether `text` after `before` has a closing bracket of a kind of which none is open."""
    still_open = Counter[str]()
    for at, sign in enumerate(before + text):
        opening = OPENED_BY.get(sign)
        if opening is None:
            still_open[sign] += 1
        elif still_open[opening]:
            still_open[opening] -= 1
        elif at >= len(before):
            return True
    return False
