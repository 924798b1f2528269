"""Rows as people read them: a row has a line, whatever its texts hold."""

import polars as pl
import pytest

from toolformer_dag.cli.query_results import RowFormat, format_rows_as_table, format_rows_as_text

ROWS = pl.DataFrame({"tool\nname": ["a\nb|c\r\nd", None], "calls": [1, 2]})


@pytest.mark.parametrize("typed", [False, True])
def test_a_line_end_in_a_text_or_a_name_splits_no_row(typed: bool) -> None:
    plain = ROWS.with_columns(pl.Series("tool\nname", ["a", None])).rename({"tool\nname": "tool"})
    assert len(format_rows_as_table(ROWS, shows_types=typed).splitlines()) == len(
        format_rows_as_table(plain, shows_types=typed).splitlines()
    )


def test_names_that_would_be_the_same_on_one_line_stay() -> None:
    assert "1" in format_rows_as_table(pl.DataFrame({"a\nb": [1], "a\rb": [2]}))


@pytest.mark.parametrize(("format", "lines"), [("record", 6), ("md", 4)])
def test_each_value_or_row_has_a_line(format: RowFormat, lines: int) -> None:
    assert len(format_rows_as_text(ROWS, format).splitlines()) == lines
