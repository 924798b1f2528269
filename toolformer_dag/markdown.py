"""Tables in Markdown: of cards, assets, the command line and the docs."""

from collections.abc import Callable, Iterable, Sequence


def plain(value: object) -> str:
    """Return a value as the text of a table's cell: bars are escaped, so that they do not end the cell."""
    return str(value).replace("|", "\\|")


def rounded(value: object) -> str:
    """Return a value as the text of a table's cell: floats with three decimals, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}"
    return plain(value)


def table(
    titles: Iterable[str],
    rows: Iterable[Iterable[object]],
    cell: Callable[[object], str] = plain,
    rules: Sequence[str] = (),
) -> str:
    """Return a Markdown table, which ends with a line break.

    titles: the texts of the first line, one per column.
    rows: the values of each row, in the order of the titles.
    cell: writes titles and values as text, such as `plain` or `rounded`.
    rules: the alignment of each column, such as "---" or "--:"; without them all are aligned to the left.
    """
    head = [cell(title) for title in titles]
    lines: list[Sequence[str]] = [head, rules or ["---"] * len(head)]
    for row in rows:
        lines.append([cell(value) for value in row])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
