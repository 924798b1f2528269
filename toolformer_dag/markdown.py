"""Write tables in Markdown, for model cards, assets, the command line and the docs."""

from collections.abc import Callable, Iterable, Sequence


def format_plain_cell(value: object) -> str:
    """Return a value as the text of a table's cell. Bars are escaped, because they would end the cell."""
    return str(value).replace("|", "\\|")


def format_rounded_cell(value: object) -> str:
    """Return a value as the text of a table's cell: floats with three decimals, and nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}"
    return format_plain_cell(value)


def format_markdown_table(
    titles: Iterable[str],
    rows: Iterable[Iterable[object]],
    format_cell: Callable[[object], str] = format_plain_cell,
    column_alignments: Sequence[str] = (),
) -> str:
    """Return a Markdown table, which ends with a line break.

    Args:
        titles: The texts of the first line, one per column.
        rows: The values of each row, in the order of the titles.
        format_cell: Writes titles and values as text, such as `format_plain_cell` or `format_rounded_cell`.
        column_alignments: The alignment of each column: "---" for left, "--:" for right. By default, all columns are
            aligned to the left.

    Example:
        The titles "tool" and "calls" with the row ["QA", 3] give

            | tool | calls |
            | --- | --- |
            | QA | 3 |
    """
    title_cells = [format_cell(title) for title in titles]
    alignment_cells = column_alignments or ["---"] * len(title_cells)

    lines: list[Sequence[str]] = [title_cells, alignment_cells]
    for row in rows:
        lines.append([format_cell(value) for value in row])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
