"""Inputs stand in calls as the model wrote them, mostly in quotes: `QA("Where was Joe Biden born?")`."""

QUOTES = (('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"), ("«", "»"))


def unquote(text: str) -> str:
    """The text without surrounding white space and without one pair of quotes around all of it."""
    stripped = text.strip()
    for opening, closing in QUOTES:
        if len(stripped) >= 2 and stripped.startswith(opening) and stripped.endswith(closing):
            return stripped[1:-1].strip()
    return stripped
