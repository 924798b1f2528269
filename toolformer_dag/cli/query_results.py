"""Saved queries, and rows written as a table, CSV, JSON, Markdown or Parquet."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolformer_dag.cli.terminal import escape_control_characters
from toolformer_dag.files import UserError
from toolformer_dag.markdown import format_markdown_table, format_plain_cell

if TYPE_CHECKING:
    import polars as pl  # imported where rows are, so that a mistake in the settings is reported at once


@cache
def load_saved_queries() -> Mapping[str, str]:
    """Return the SQL of the saved queries by name; the first line of each is a comment that describes it."""
    folder = files(__package__).joinpath("saved_queries")
    query_by_name = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            query_by_name[file.name.removesuffix(".sql")] = file.read_text("utf-8")
    return query_by_name


def get_query_description(query_text: str) -> str:
    """Return the description of a saved query: its first line, without the dashes of an SQL comment."""
    return query_text.partition("\n")[0].removeprefix("-- ")


RowFormat = Literal["table", "record", "csv", "json", "parquet", "md"]
"""How rows are printed. JSON has a line per row, a record a line per column."""
NULL_MARK = "–"
"""What stands for a null in a table for people."""
MAX_SHOWN_DECIMALS = 6
"""Decimals of a number in a table for people; polars shows as many."""
LINE_END_PATTERN = re.compile(r"[\r\n]")
FILE_ENDINGS = (".csv", ".json", ".jsonl", ".md", ".parquet")
"""Endings of files that rows are written to: a .json file is an array, a .jsonl file has a line per row."""


def choose_file_ending(row_format: RowFormat | None, output_file: Path | None = None) -> str:
    """Return the file ending that decides how rows are written, such as ".csv". Empty for a table.

    Args:
        row_format: The format that the user chose. None to take the ending of the output file.
        output_file: The file that the rows are written to. None for the standard output.

    Raises:
        UserError: No format was chosen, and the ending of the file stands for none.
    """
    if row_format is None and output_file is not None:
        return _get_known_file_ending(output_file)
    if row_format is None or row_format == "table":
        return ""
    if row_format == "json":  # the format has a line per row, and only a file named .json without it is one list
        return ".jsonl"
    return f".{row_format}"


def _get_known_file_ending(output_file: Path) -> str:
    """Return the ending of a file in lower case.

    Raises:
        UserError: The ending is not one of FILE_ENDINGS.
    """
    file_ending = output_file.suffix.lower()
    if file_ending not in FILE_ENDINGS:
        raise UserError(
            f"--output {output_file}: the ending decides the format; end it with one of {', '.join(FILE_ENDINGS)}"
        )
    return file_ending


def format_rows_as_text(rows: "pl.DataFrame", row_format: RowFormat) -> str:
    """Return all rows as text, in any format but parquet.

    Raises:
        WarehouseError: A column has values that the format cannot hold.
    """
    file_ending = choose_file_ending(row_format)
    text = encode_rows(rows, file_ending).decode()
    # "table" has escaped its cells already, and "csv" and "json" are for programs and keep every character.
    return escape_control_characters(text) if row_format in ("md", "record") else text


def encode_rows(rows: "pl.DataFrame", file_ending: str) -> bytes:
    """Return all rows as the bytes of a file.

    Args:
        rows: The rows.
        file_ending: The ending that decides the format, as `choose_file_ending` returns it.

    Raises:
        WarehouseError: A column has values that the format cannot hold.
    """
    from polars.exceptions import PolarsError

    try:
        return _encode_rows_by_ending(rows, file_ending)
    except (PolarsError, TypeError) as error:
        from toolformer_dag.lake.queries import UNREADABLE_REMEDY
        from toolformer_dag.lake.warehouse import WarehouseError

        reason = str(error).partition("\n")[0].rstrip(".")
        format_name = file_ending.removeprefix(".")
        raise WarehouseError(
            f"a column has values without a place in {format_name} ({reason}), {UNREADABLE_REMEDY}"
        ) from error


def _encode_rows_by_ending(rows: "pl.DataFrame", file_ending: str) -> bytes:
    """Return all rows as the bytes of a file whose ending decides the format.

    Raises:
        PolarsError: A column has values that polars cannot write in this format.
        TypeError: As above, for some types of values.
    """
    match file_ending:
        case "":
            return f"{format_rows_as_table(rows, longest=80, width=200, shows_types=True)}\n".encode()
        case ".record":
            return _format_records(_flatten_nested_columns(rows)).encode()
        case ".md":
            return _format_rows_as_markdown(_flatten_nested_columns(rows)).encode()
        case ".csv":
            return _write_to_bytes(_flatten_nested_columns(rows).write_csv)
        case ".json":
            return _write_to_bytes(_cast_numbers_for_json(rows).write_json)
        case ".jsonl":
            return _write_to_bytes(_cast_numbers_for_json(rows).write_ndjson)
        case _:
            return _write_to_bytes(rows.write_parquet)


def _write_to_bytes(write_rows: Callable[[BytesIO], Any]) -> bytes:
    """Return what a method of polars writes, which takes the file to write to."""
    buffer = BytesIO()
    write_rows(buffer)
    return buffer.getvalue()


def format_rows_as_table(
    rows: "pl.DataFrame", longest: int = 44, width: int = 160, *, shows_types: bool = False
) -> str:
    """Format all rows as a Markdown table, with a dash for each null and with `|` escaped.

    Args:
        rows: The rows.
        longest: How many characters of a cell are shown.
        width: How many characters a line has at most on a terminal. Elsewhere each row is one line, however long.
        shows_types: Whether to draw an SQL result instead, with the types of the columns and without Markdown.
    """
    import polars as pl

    unlimited = -1
    layout = pl.Config(
        tbl_rows=unlimited,
        tbl_cols=unlimited,
        fmt_str_lengths=longest,
        tbl_width_chars=width if sys.stdout.isatty() else unlimited,
        tbl_hide_dataframe_shape=True,
    )

    one_line_rows = _replace_line_ends(rows)
    with layout:  # `str` of a table uses the layout inside the block
        if shows_types:
            return escape_control_characters(str(one_line_rows))

        with pl.Config(tbl_hide_column_data_types=True, tbl_formatting="ASCII_MARKDOWN"):
            markdown = str(_to_markdown_cells(one_line_rows))
            return escape_control_characters(markdown)


def _replace_line_ends(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Replace line ends, which would split a row: in texts by a space, in the names of columns by U+FFFD.

    The names stay as they are if two of them would become equal.
    """
    import polars as pl

    one_line_rows = rows.with_columns(pl.col(pl.String).str.replace_all(LINE_END_PATTERN.pattern, " "))

    new_name_by_name = {name: LINE_END_PATTERN.sub("\ufffd", name) for name in rows.columns}
    has_distinct_names = len(set(new_name_by_name.values())) == len(new_name_by_name)
    return one_line_rows.rename(new_name_by_name) if has_distinct_names else one_line_rows


def _to_markdown_cells(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return rows as the cells of a Markdown table, with `|` escaped in texts and in the names of columns."""
    import polars as pl

    escaped_columns = [_escape_markdown_column(column) for column in rows]
    return pl.DataFrame(escaped_columns).rename(format_plain_cell)


def _escape_markdown_column(column: "pl.Series") -> "pl.Series":
    r"""Return a column as a Markdown table can show it: `a\|b` for the text `a|b`, and a dash for each null.

    A column with nulls becomes text, except lists and structs.
    """
    import polars as pl

    if column.null_count() and not column.dtype.is_nested():
        # As texts, numbers would have all their decimals, so they are rounded as polars would show them.
        rounded = column.round(MAX_SHOWN_DECIMALS) if column.dtype.is_float() else column
        column = rounded.cast(pl.String).fill_null(NULL_MARK)

    if column.dtype == pl.String:
        column = column.str.replace_all("|", "\\|", literal=True)
    return column


def _format_records(rows: "pl.DataFrame") -> str:
    """Format rows that are wider than the terminal: each as its number, with a line per value below it."""
    one_line_rows = _replace_line_ends(rows)
    name_width = max(map(len, one_line_rows.columns), default=0)

    records = []
    for row_number, row in enumerate(one_line_rows.iter_rows(named=True), 1):
        records.append(f"-[ row {row_number} ]\n{_format_record(row, name_width)}")
    return "".join(records)


def _format_record(row: Mapping[str, Any], name_width: int) -> str:
    """Format a row with a line per value, such as `tool | calculator`.

    Args:
        row: The values by the name of their column.
        name_width: How many characters the names take.
    """
    lines = []
    for name, value in row.items():
        text = "" if value is None else value
        lines.append(f"{name:<{name_width}} | {text}\n")
    return "".join(lines)


def _flatten_nested_columns(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Turn lists and structs into JSON text, since a cell of CSV or Markdown holds a single value."""
    import polars as pl

    json_columns = []
    for column in rows:
        if column.dtype.is_nested():
            json_columns.append(pl.Series(column.name, map(_encode_json_cell, column), dtype=pl.String))
    return rows.with_columns(json_columns)


def _cast_numbers_for_json(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return rows in which polars writes every number as a number of JSON.

    It would write SQL's HUGEINT (the type of a sum) and DECIMAL as text. A HUGEINT, or a DECIMAL without decimals,
    becomes Int64, or Float64 in a column with larger numbers. Any other DECIMAL becomes Float64. Other types stay.
    """
    import polars as pl
    from polars.exceptions import InvalidOperationError

    columns = []
    for column in rows:
        try:
            json_type = _choose_json_type(column.dtype, wide_integer_type=pl.Int64())
            columns.append(column.cast(json_type))
        except InvalidOperationError:  # a number does not fit into Int64
            json_type = _choose_json_type(column.dtype, wide_integer_type=pl.Float64())
            columns.append(column.cast(json_type))
    return pl.DataFrame(columns)


def _choose_json_type(dtype: Any, wide_integer_type: "pl.DataType") -> Any:
    """Return the type that a column of some type gets for JSON. Types inside lists and structs are replaced too.

    Args:
        dtype: The type of the column in polars.
        wide_integer_type: The type that replaces integers of 128 bits and decimals of scale 0. Other decimals
            become Float64.
    """
    import polars as pl

    match dtype:
        case pl.Int128() | pl.UInt128():
            return wide_integer_type
        case pl.Decimal():  # DuckDB's HUGEINT is a decimal without decimals
            return wide_integer_type if dtype.scale == 0 else pl.Float64()
        case pl.List():
            return pl.List(_choose_json_type(dtype.inner, wide_integer_type))
        case pl.Array():
            return pl.Array(_choose_json_type(dtype.inner, wide_integer_type), dtype.size)
        case pl.Struct():
            return pl.Struct({field.name: _choose_json_type(field.dtype, wide_integer_type) for field in dtype.fields})
        case _:
            return dtype


def _encode_json_cell(value: object) -> str | None:
    """Return a list, a struct or an array as JSON text, or None for a null. Dates become text."""
    if value is None:
        return None
    items = value.to_list() if hasattr(value, "to_list") else value  # polars hands a list over as a Series
    return json.dumps(items, ensure_ascii=False, default=str)  # dates as text


ESCAPED_BY_BACKSLASH = {char: f"\\{char}" for char in "\\`*_[]|!#"}
ESCAPED_AS_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
MARKDOWN_ESCAPES = str.maketrans({**ESCAPED_BY_BACKSLASH, **ESCAPED_AS_HTML, "\n": " ", "\r": " "})
"""Replacements for characters that Markdown interprets, and for line ends, which would end a row."""


def _format_rows_as_markdown(rows: "pl.DataFrame") -> str:
    """Format rows as a Markdown table with a line per row, in which every text is shown as it is."""
    rules = ["---:" if dtype.is_numeric() else "---" for dtype in rows.dtypes]
    return format_markdown_table(rows.columns, rows.iter_rows(), _escape_markdown_cell, rules)


def _escape_markdown_cell(value: object) -> str:
    """Return a value with Markdown's special characters escaped, so that the cell shows it as it is."""
    return "" if value is None else str(value).translate(MARKDOWN_ESCAPES)
