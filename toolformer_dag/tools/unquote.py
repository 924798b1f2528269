"""Inputs stand in calls as the model wrote them, mostly in quotes: `QA("Where was Joe Biden born?")`."""

import re

QUOTES = (('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"), ("«", "»"))


def unquote(text: str) -> str:
    """The text without surrounding white space and without one pair of quotes around all of it.

    Of `"Hamlet" or "Macbeth"` nothing is taken; of `"He said "hi" to me"` the outer pair.
    """
    stripped = text.strip()
    for (opening, closing), apart in zip(QUOTES, _APART, strict=True):
        if len(stripped) >= 2 and stripped.startswith(opening) and stripped.endswith(closing):
            inside = stripped[1:-1]
            return stripped if apart.fullmatch(inside) else inside.strip()
    return stripped


def _apart(opening: str, closing: str) -> re.Pattern[str]:
    """The inside of two quotations, `Hamlet" or "Macbeth`: its first quote closes, its last opens."""
    unquoted = rf"(?:[^{opening}{closing}]|(?<=\w)[{opening}{closing}](?=\w))*+"
    return re.compile(rf"{unquoted}(?<=\S){closing}(?!\w)(?:.*(?<!\w))?{opening}(?=\S){unquoted}", re.DOTALL)


_APART = [_apart(*pair) for pair in QUOTES]
