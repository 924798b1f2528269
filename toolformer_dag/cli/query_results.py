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

from toolformer_dag.cli.terminal import escape_controls
from toolformer_dag.files import UserError
from toolformer_dag.markdown import plain, table

if TYPE_CHECKING:
    import polars as pl  # imported where rows are, so that a mistake in the settings is reported at once


@cache
def saved_queries() -> Mapping[str, str]:
    """Return the saved queries by name; the first line of each is a comment that describes it."""
    folder = files(__package__).joinpath("saved_queries")
    queries = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            queries[file.name.removesuffix(".sql")] = file.read_text("utf-8")
    return queries


def description(query: str) -> str:
    """Return what a saved query answers, from its first line."""
    return query.partition("\n")[0].removeprefix("-- ")


Format = Literal["table", "record", "csv", "json", "parquet", "md"]
"""How rows are printed. JSON has a line per row, a record a line per column."""
NO_VALUE = "–"
"""What stands for a null in a table for people."""
SHOWN_DECIMALS = 6
"""Decimals of a number in a table for people; polars shows as many."""
LINE_END = re.compile(r"[\r\n]")
ENDINGS = (".csv", ".json", ".jsonl", ".md", ".parquet")
"""Endings of files that rows are written to: a .json file is an array, a .jsonl file has a line per row."""


def choose_ending(format: Format | None, file: Path | None = None) -> str:
    """Return the file ending that decides how rows are written, such as `.csv`; empty for a table.

    Raises UserError for an ending that stands for no format.
    """
    if format is None and file is not None:
        ending = file.suffix.lower()
        if ending not in ENDINGS:
            raise UserError(f"--output {file}: the ending decides the format; end it with one of {', '.join(ENDINGS)}")
        return ending
    if format is None or format == "table":
        return ""
    return ".jsonl" if format == "json" else f".{format}"


def printed(rows: "pl.DataFrame", format: Format) -> str:
    """Return all rows as text, in any format but parquet. Raises WarehouseError as `encoded` does."""
    text = encoded(rows, choose_ending(format)).decode()
    return escape_controls(text) if format in ("md", "record") else text


def encoded(rows: "pl.DataFrame", ending: str) -> bytes:
    """Return all rows in the format of an ending. Raises WarehouseError for values that the format cannot hold.

    `ending`: as `choose_ending` returns it.
    """
    from polars.exceptions import PolarsError

    try:
        return _encode_rows(rows, ending)
    except (PolarsError, TypeError) as error:
        from toolformer_dag.lake.queries import UNSHOWN
        from toolformer_dag.lake.warehouse import WarehouseError

        reason = str(error).partition("\n")[0].rstrip(".")
        format = ending.removeprefix(".")
        raise WarehouseError(f"a column has values without a place in {format} ({reason}), {UNSHOWN}") from error


def _encode_rows(rows: "pl.DataFrame", ending: str) -> bytes:
    """Return all rows in the format of an ending. Raises what polars raises."""
    match ending:
        case "":
            return f"{drawn(rows, longest=80, width=200, typed=True)}\n".encode()
        case ".record":
            return _format_records(_flatten_columns(rows)).encode()
        case ".md":
            return _format_markdown(_flatten_columns(rows)).encode()
        case ".csv":
            return _write_to_bytes(_flatten_columns(rows).write_csv)
        case ".json":
            return _write_to_bytes(_to_json_numbers(rows).write_json)
        case ".jsonl":
            return _write_to_bytes(_to_json_numbers(rows).write_ndjson)
        case _:
            return _write_to_bytes(rows.write_parquet)


def _write_to_bytes(write: Callable[[BytesIO], Any]) -> bytes:
    """Return what a method of polars writes."""
    buffer = BytesIO()
    write(buffer)
    return buffer.getvalue()


def drawn(rows: "pl.DataFrame", longest: int = 44, width: int = 160, *, typed: bool = False) -> str:
    """Return all rows as a Markdown table, with a dash for each null and `|` escaped.

    - `longest`: characters of a cell that are shown
    - `width`: characters of a line on a terminal; elsewhere every row has one line, however long
    - `typed`: draw an SQL result instead, with the types of the columns and no Markdown
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
    with layout:  # in effect where polars turns a table into text
        if typed:
            return escape_controls(str(one_line_rows))
        with pl.Config(tbl_hide_column_data_types=True, tbl_formatting="ASCII_MARKDOWN"):
            return escape_controls(str(_to_markdown_cells(one_line_rows)))


def _replace_line_ends(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Replace line ends, which would split a row: in texts by a space, in names of columns by U+FFFD."""
    import polars as pl

    on_one_line = rows.with_columns(pl.col(pl.String).str.replace_all(LINE_END.pattern, " "))
    names = {name: LINE_END.sub("\ufffd", name) for name in rows.columns}
    stay_distinct = len(set(names.values())) == len(names)
    return on_one_line.rename(names) if stay_distinct else on_one_line


def _to_markdown_cells(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return rows as the cells of a Markdown table, with `|` escaped in texts and names."""
    import polars as pl

    return pl.DataFrame([_escape_markdown_column(column) for column in rows]).rename(plain)


def _escape_markdown_column(column: "pl.Series") -> "pl.Series":
    """Escape `|` in a column of texts; a column with nulls becomes text, with a dash for each null."""
    import polars as pl

    if column.null_count() and not column.dtype.is_nested():
        rounded = column.round(SHOWN_DECIMALS) if column.dtype.is_float() else column
        column = rounded.cast(pl.String).fill_null(NO_VALUE)
    if column.dtype == pl.String:
        column = column.str.replace_all("|", "\\|", literal=True)
    return column


def _format_records(rows: "pl.DataFrame") -> str:
    """Return a line per value below the number of its row, for rows that are wider than the terminal."""
    rows = _replace_line_ends(rows)
    width = max(map(len, rows.columns), default=0)
    parts = []
    for number, row in enumerate(rows.iter_rows(named=True), 1):
        parts.append(f"-[ row {number} ]\n{_format_record(row, width)}")
    return "".join(parts)


def _format_record(row: Mapping[str, Any], width: int) -> str:
    """Return a line per value of a row. `width`: of the column of names, in characters."""
    lines = []
    for name, value in row.items():
        text = "" if value is None else value
        lines.append(f"{name:<{width}} | {text}\n")
    return "".join(lines)


def _flatten_columns(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Turn lists and structs into JSON text, since a cell of CSV holds a single value."""
    import polars as pl

    nested = [column for column in rows if column.dtype.is_nested()]
    return rows.with_columns(pl.Series(column.name, map(_to_json, column), dtype=pl.String) for column in nested)


def _to_json_numbers(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return rows with SQL's HUGEINT (the type of a sum) and DECIMAL as other numbers: polars would write them as text.

    HUGEINT becomes Int64, or Float64 in a column with larger numbers. DECIMAL becomes Float64. Other types stay.
    """
    import polars as pl
    from polars.exceptions import InvalidOperationError

    columns = []
    for column in rows:
        try:
            columns.append(column.cast(_choose_json_type(column.dtype, integer=pl.Int64())))
        except InvalidOperationError:  # a number does not fit into Int64
            columns.append(column.cast(_choose_json_type(column.dtype, integer=pl.Float64())))
    return pl.DataFrame(columns)


def _choose_json_type(dtype: Any, integer: "pl.DataType") -> Any:
    """Return the type that a column has in JSON, also inside lists and structs.

    `integer`: the type that replaces integers of 128 bits. Decimals become Float64.
    """
    import polars as pl

    match dtype:
        case pl.Int128() | pl.UInt128():
            return integer
        case pl.Decimal():  # DuckDB's HUGEINT is a decimal without decimals
            return integer if dtype.scale == 0 else pl.Float64()
        case pl.List():
            return pl.List(_choose_json_type(dtype.inner, integer))
        case pl.Array():
            return pl.Array(_choose_json_type(dtype.inner, integer), dtype.size)
        case pl.Struct():
            return pl.Struct({field.name: _choose_json_type(field.dtype, integer) for field in dtype.fields})
        case _:
            return dtype


def _to_json(value: object) -> str | None:
    """Return a list, a struct or an array as JSON; None for a null."""
    if value is None:
        return None
    items = value.to_list() if hasattr(value, "to_list") else value  # polars hands a list over as a Series
    return json.dumps(items, ensure_ascii=False, default=str)  # dates as text


ESCAPED_BY_BACKSLASH = {char: f"\\{char}" for char in "\\`*_[]|!#"}
ESCAPED_AS_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
MARKDOWN = str.maketrans({**ESCAPED_BY_BACKSLASH, **ESCAPED_AS_HTML, "\n": " ", "\r": " "})
"""Replacements for characters that Markdown interprets, and for line ends, which would end a row."""


def _format_markdown(rows: "pl.DataFrame") -> str:
    """Return rows as a Markdown table with a line per row, in which every text looks as it is."""
    rules = ["---:" if dtype.is_numeric() else "---" for dtype in rows.dtypes]
    return table(rows.columns, rows.iter_rows(), _escape_markdown, rules)


def _escape_markdown(value: object) -> str:
    """Return a value with Markdown's special characters escaped, so that the cell shows it as it is."""
    return "" if value is None else str(value).translate(MARKDOWN)
