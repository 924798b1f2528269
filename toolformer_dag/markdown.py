"""Tables in Markdown: of cards, assets, the command line and the docs."""

from collections.abc import Callable, Iterable, Sequence


def plain(value: object) -> str:
    """Return a value as a cell holds it: no bar of its own ends the cell."""
    return str(value).replace("|", "\\|")


def rounded(value: object) -> str:
    """Return a number with three decimals where it has some, nothing for None, and else the plain value."""
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else plain(value)


def table(
    titles: Iterable[str],
    rows: Iterable[Iterable[object]],
    cell: Callable[[object], str] = plain,
    rules: Sequence[str] = (),
) -> str:
    """Return a table. `cell` writes titles and values; `rules` align the columns, all to the left where left out."""
    head = list(map(cell, titles))
    lines = (head, rules or ["---"] * len(head), *(map(cell, row) for row in rows))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
