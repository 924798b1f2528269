"""The rows of a query: printed as a table, as CSV or JSON, or written whole to a file."""

import json
from enum import StrEnum
from io import BytesIO
from pathlib import Path

import polars as pl

from toolformer_dag.cli.terminal import harmless
from toolformer_dag.files import UserError, write_whole


class Format(StrEnum):
    """How rows are printed. JSON has a line per row."""

    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"
    md = "md"


ENDINGS = (".csv", ".json", ".jsonl", ".md", ".parquet")
"""Of files that rows are written to; a .json file is one array, a .jsonl file has a line per row."""

ENDING_OF = {Format.csv: ".csv", Format.json: ".jsonl", Format.parquet: ".parquet", Format.md: ".md"}


def printed(rows: pl.DataFrame, format: Format) -> str:
    """Return all rows as text; `format` is not parquet. Raises WarehouseError for a map whose keys are no text."""
    if format is not Format.table:
        text = encoded(rows, ENDING_OF[format]).decode()
        return harmless(text) if format is Format.md else text
    with pl.Config(tbl_rows=-1, tbl_cols=-1, fmt_str_lengths=80, tbl_hide_dataframe_shape=True, tbl_width_chars=200):
        return harmless(f"{rows}\n")


def check_ending(file: Path) -> None:
    """Raise UserError for an ending that stands for no format."""
    if file.suffix.lower() not in ENDINGS:
        raise UserError(f"--output {file}: the ending decides the format; end it with one of {', '.join(ENDINGS)}")


def write_rows(rows: pl.DataFrame, file: Path, format: Format | None = None) -> None:
    """Write all rows to `file`, in the format of its ending where none is given; a reader sees the old file or the new.

    Raises WriteError, UserError for another ending, WarehouseError for values without a place in the format.
    """
    if format is Format.table:
        write_whole(file, printed(rows, format).encode())
        return
    if format is None:
        check_ending(file)
    write_whole(file, encoded(rows, file.suffix.lower() if format is None else ENDING_OF[format]))


def encoded(rows: pl.DataFrame, ending: str) -> bytes:
    """Return all rows in the format of one of ENDINGS. Raises WarehouseError for values without a place in it."""
    buffer = BytesIO()
    try:
        match ending:
            case ".csv":
                _flat(rows).write_csv(buffer)
            case ".json":
                rows.write_json(buffer)
            case ".jsonl":
                rows.write_ndjson(buffer)
            case ".md":
                buffer.write(_markdown(_flat(rows)).encode())
            case _:
                rows.write_parquet(buffer)
    except (pl.exceptions.PolarsError, TypeError) as error:
        from toolformer_dag.lake.queries import UNSHOWN
        from toolformer_dag.lake.warehouse import WarehouseError

        reason = str(error).partition("\n")[0].rstrip(".")
        format = ending.removeprefix(".")
        raise WarehouseError(f"a column has values without a place in {format} ({reason}), {UNSHOWN}") from error
    return buffer.getvalue()


def _flat(rows: pl.DataFrame) -> pl.DataFrame:
    """Lists and structs as JSON text: a cell of CSV holds no more than one value."""
    nested = [column for column in rows if column.dtype.is_nested()]
    return rows.with_columns(pl.Series(column.name, map(_json, column), dtype=pl.String) for column in nested)


def _json(value: object) -> str | None:
    if value is None:
        return None
    plain = value.to_list() if isinstance(value, pl.Series) else value
    return json.dumps(plain, ensure_ascii=False, default=str)  # dates as text


def _markdown(rows: pl.DataFrame) -> str:
    """A table with one line per row; text is shown as it is, and no cell breaks the table."""
    head = [_cell(name) for name in rows.columns]
    rules = ["---:" if dtype.is_numeric() else "---" for dtype in rows.dtypes]
    lines = [head, rules, *([_cell(value) for value in row] for row in rows.iter_rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


MARKDOWN = str.maketrans(
    {char: f"\\{char}" for char in "\\`*_[]|!#"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": " ", "\r": " "}
)


def _cell(value: object) -> str:
    return "" if value is None else str(value).translate(MARKDOWN)
