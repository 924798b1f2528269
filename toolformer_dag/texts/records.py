"""Records, of JSON lines or of a table, -> raw columns: a column at a time, a cell only where one is odd."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

import polars as pl

from toolformer_dag.texts.columns import RAW, Batch, Rejection
from toolformer_dag.texts.formats import MISSING, Layout, shown, values_at

FIELDS = tuple(name for name in RAW if name != "line")
Column = Sequence[Any] | pl.Series
"""Any values, or a series of text."""


def raw_batch(
    layout: Layout,
    lines: Sequence[int],
    columns: Mapping[str, Sequence[Column]],
    records: Sequence[Mapping[str, Any]] = (),
    rejections: Iterable[Rejection] = (),
) -> Batch:
    """Return records as raw columns. Refused: missing_field, wrong_type, not_utf8.

    `columns`: by field the values at each of its ways, of which the first that is not null counts. `records`: where a
    field can be missing; null in a table is null. `rejections`: those of lines that hold no record.
    """
    refused: dict[int, Rejection] = {}
    ignored: dict[str, None] = {}
    texts: dict[str, Column] = {"line": lines}
    for field in FIELDS:
        column = _first_of(columns[field], len(lines))
        plain = {str} if field in layout.required else {str, type(None)}
        texts[field], faults = (column, []) if _kinds(column) <= plain else _texts(field, column, layout)
        for at, reason, found in faults:
            wrong = f"{layout.paths(field)}: expected text, found {found}"
            if layout.may_lack(field, reason):
                ignored[wrong] = None
            else:
                lacking = _lacking(layout, records[at]) if records else ""
                told = ("missing_field", lacking) if lacking else (reason, wrong)
                refused.setdefault(lines[at], Rejection(lines[at], *told))
    frame = pl.DataFrame(texts, schema=RAW)
    kept = frame.filter(~pl.col("line").is_in(list(refused))) if refused else frame
    return Batch(kept, (*rejections, *refused.values()), tuple(ignored))


def _first_of(columns: Sequence[Column], rows: int) -> Column:
    if len(columns) == 1:
        return columns[0]
    found: Column = [None] * rows
    for column in columns:
        found = [value if value is not None else other for value, other in zip(found, column, strict=True)]
    return found


def _kinds(column: Column) -> set[type]:
    if isinstance(column, pl.Series):
        return {str, type(None)} if column.has_nulls() else {str}
    return set(map(type, column))


def _texts(field: str, column: Column, layout: Layout) -> tuple[list[str | None], list[tuple[int, str, str]]]:
    """Return each cell as text, null where it is none; and where, why not and what was found instead."""
    texts: list[str | None] = []
    faults: list[tuple[int, str, str]] = []
    for at, value in enumerate(column):
        text = _text(field, value, field in layout.strict)
        texts.append(text)
        if text is None and (value is not None or field in layout.required):
            bad = isinstance(value, bytes)
            found = "null" if value is None else "bytes that are not UTF-8" if bad else type(value).__name__
            faults.append((at, "not_utf8" if bad else "wrong_type", found))
    return texts, faults


def _text(field: str, value: Any, strict: bool) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    if type(value) is str or (type(value) is int and (field == "id" or not strict)):
        return str(value)
    if field == "date":  # whatever else stands there is no date, and no fault
        return value.isoformat() if isinstance(value, date) else ""
    return None


def _lacking(layout: Layout, record: Mapping[str, Any]) -> str:
    """Say which required fields a record has not even as null, and which it has; "" where it has all."""
    missing = [
        field
        for field in layout.required
        if all(values_at([record], way, MISSING)[0] is MISSING for way in layout.places[field])
    ]
    return f"{', '.join(map(layout.paths, missing))}; the record has {shown(record)}" if missing else ""
