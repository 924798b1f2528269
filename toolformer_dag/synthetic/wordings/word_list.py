"""Word lists written as prose, so that the data stays readable."""


def spaced(text: str) -> tuple[str, ...]:
    """Words set apart by spaces."""
    return tuple(text.split())


def listed(text: str) -> tuple[str, ...]:
    """Phrases set apart by semicolons."""
    return tuple(text.split(";"))
