"""Saved queries, and rows as people read or keep them: as a table, CSV, JSON, Markdown or Parquet."""

import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolformer_dag.cli.terminal import harmless
from toolformer_dag.files import UserError
from toolformer_dag.markdown import plain, table

if TYPE_CHECKING:
    import polars as pl  # imported where rows are, so that a mistake in the settings is reported at once


@cache
def saved_queries() -> Mapping[str, str]:
    """Return the texts of the queries in saved_queries/ by name; the first line is a comment that describes them."""
    listed = sorted(files(__package__).joinpath("saved_queries").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".sql"): file.read_text("utf-8") for file in listed if file.name.endswith(".sql")}


def description(query: str) -> str:
    """Return what a saved query answers."""
    return query.partition("\n")[0].removeprefix("-- ")


Format = Literal["table", "record", "csv", "json", "parquet", "md"]
"""How rows are printed. JSON has a line per row, a record a line per column."""
NO_VALUE = "–"
"""What stands for a null in a table for people."""
SHOWN_DECIMALS = 6
"""Decimals of a number in such a table; polars shows as many."""
LINE_END = re.compile(r"[\r\n]")
ENDINGS = (".csv", ".json", ".jsonl", ".md", ".parquet")
"""Endings of files that rows are written to; a .json file is one array, a .jsonl file has a line per row."""


def ending_of(format: Format | None, file: Path | None = None) -> str:
    """Return how rows are written: in the format, else by the ending of the file, else as a table (no ending).

    Raises UserError for an ending that stands for no format.
    """
    if format is not None or file is None:
        if format is None or format == "table":
            return ""
        return ".jsonl" if format == "json" else f".{format}"
    if file.suffix.lower() not in ENDINGS:
        raise UserError(f"--output {file}: the ending decides the format; end it with one of {', '.join(ENDINGS)}")
    return file.suffix.lower()


def printed(rows: "pl.DataFrame", format: Format) -> str:
    """Return all rows as text; `format` is not parquet. Raises WarehouseError for a map whose keys are no text."""
    text = encoded(rows, ending_of(format)).decode()
    return harmless(text) if format in ("md", "record") else text


def encoded(rows: "pl.DataFrame", ending: str) -> bytes:
    """Return all rows in the format of `ending_of`. Raises WarehouseError for values without a place in it."""
    from polars.exceptions import PolarsError

    buffer = BytesIO()
    try:
        match ending:
            case "":
                buffer.write(f"{drawn(rows, 80, 200, typed=True)}\n".encode())
            case ".record":
                buffer.write(_records(_flat(rows)).encode())
            case ".csv":
                _flat(rows).write_csv(buffer)
            case ".json":
                _json_numbers(rows).write_json(buffer)
            case ".jsonl":
                _json_numbers(rows).write_ndjson(buffer)
            case ".md":
                buffer.write(_markdown(_flat(rows)).encode())
            case _:
                rows.write_parquet(buffer)
    except (PolarsError, TypeError) as error:
        from toolformer_dag.lake.queries import UNSHOWN
        from toolformer_dag.lake.warehouse import WarehouseError

        reason = str(error).partition("\n")[0].rstrip(".")
        format = ending.removeprefix(".")
        raise WarehouseError(f"a column has values without a place in {format} ({reason}), {UNSHOWN}") from error
    return buffer.getvalue()


def drawn(rows: "pl.DataFrame", longest: int = 44, width: int = 160, *, typed: bool = False) -> str:
    """Return all rows as a table in Markdown, where a null is a dash and a bar of a text is escaped.

    - `longest`: characters of a cell that are shown
    - `width`: characters of a line on a terminal; what is piped or redirected has a line per row, however long
    - `typed`: draw them as `sql` shows rows, with the types of the columns, in place of Markdown
    """
    import polars as pl

    width = width if sys.stdout.isatty() else -1
    sizes = pl.Config(tbl_rows=-1, tbl_cols=-1, fmt_str_lengths=longest, tbl_width_chars=width)
    looks: dict[str, Any] = {} if typed else {"tbl_hide_column_data_types": True, "tbl_formatting": "ASCII_MARKDOWN"}
    with sizes, pl.Config(tbl_hide_dataframe_shape=True, **looks):
        one_line = _on_one_line(rows)
        return harmless(str(one_line if typed else _markdown_cells(one_line)))


def _on_one_line(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return rows whose texts have a space for each line end, which would split the row, and names U+FFFD."""
    import polars as pl

    texts = [column for column in rows if column.dtype == pl.String]
    on_one_line = rows.with_columns(column.str.replace_all(LINE_END.pattern, " ") for column in texts)
    names = {name: LINE_END.sub("\ufffd", name) for name in rows.columns}
    are_apart = len(set(names.values())) == len(names)
    return on_one_line.rename(names) if are_apart else on_one_line


def _markdown_cells(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return rows as the cells of a Markdown table: `|` in texts is escaped, and a null is a dash.

    A column with nulls becomes text.
    """
    import polars as pl

    cells = []
    for column in rows:
        cell = column
        if column.null_count() and not column.dtype.is_nested():
            rounded = column.round(SHOWN_DECIMALS) if column.dtype.is_float() else column
            cell = rounded.cast(pl.String).fill_null(NO_VALUE)
        if cell.dtype == pl.String:
            cell = cell.str.replace_all("|", "\\|", literal=True)
        cells.append(cell)
    return pl.DataFrame(cells).rename(plain)


def _records(rows: "pl.DataFrame") -> str:
    """Return a line per value, under the number of its row: for rows that are wider than the terminal."""
    rows = _on_one_line(rows)
    width = max(map(len, rows.columns), default=0)
    lines = []
    for number, row in enumerate(rows.iter_rows(named=True), 1):
        lines.append(f"-[ row {number} ]\n")
        for name, value in row.items():
            lines.append(f"{name:<{width}} | {'' if value is None else value}\n")
    return "".join(lines)


def _flat(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return rows whose lists and structs are JSON text: a cell of CSV holds no more than one value."""
    import polars as pl

    nested = [column for column in rows if column.dtype.is_nested()]
    return rows.with_columns(pl.Series(column.name, map(_json, column), dtype=pl.String) for column in nested)


def _json_numbers(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Turn types of SQL that polars would write as text, the HUGEINT of a sum() and DECIMAL, into numbers.

    Integers over 64 bits become floating-point numbers, as the readers of JSON take them.
    """
    import polars as pl
    from polars.exceptions import InvalidOperationError

    columns = []
    for column in rows:
        try:
            columns.append(column.cast(_json_type(column.dtype, pl.Int64())))
        except InvalidOperationError:
            columns.append(column.cast(_json_type(column.dtype, pl.Float64())))
    return pl.DataFrame(columns)


def _json_type(dtype: Any, integer: "pl.DataType") -> Any:
    """Return the type that a column is cast to before it is written as JSON, as Float64 for a decimal.

    `integer`: the type that replaces integers of 128 bits, which JSON lacks, also inside lists and structs.
    """
    import polars as pl

    match dtype:
        case pl.Int128() | pl.UInt128():
            return integer
        case pl.Decimal() if dtype.scale == 0:  # DuckDB hands over the HUGEINT of a sum() as one
            return integer
        case pl.Decimal():
            return pl.Float64()
        case pl.List():
            return pl.List(_json_type(dtype.inner, integer))
        case pl.Array():
            return pl.Array(_json_type(dtype.inner, integer), dtype.size)
        case pl.Struct():
            return pl.Struct({field.name: _json_type(field.dtype, integer) for field in dtype.fields})
    return dtype


def _json(value: object) -> str | None:
    """Return a list, a struct or an array as JSON; None for a null."""
    if value is None:
        return None
    plain = value.to_list() if hasattr(value, "to_list") else value  # of a list, a Series
    return json.dumps(plain, ensure_ascii=False, default=str)  # dates as text


ESCAPED_BY_BACKSLASH = {char: f"\\{char}" for char in "\\`*_[]|!#"}
ESCAPED_AS_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
MARKDOWN = str.maketrans({**ESCAPED_BY_BACKSLASH, **ESCAPED_AS_HTML, "\n": " ", "\r": " "})
"""What stands for characters that have a meaning in Markdown, and for the ends of lines, which would end a row."""


def _markdown(rows: "pl.DataFrame") -> str:
    """Return a table with one line per row; text is shown as it is, and no cell breaks the table."""
    rules = ["---:" if dtype.is_numeric() else "---" for dtype in rows.dtypes]
    return table(rows.columns, rows.iter_rows(), _verbatim, rules)


def _verbatim(value: object) -> str:
    """Return a value for a cell of Markdown that shows it as it is."""
    return "" if value is None else str(value).translate(MARKDOWN)
