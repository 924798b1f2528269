"""Records, of JSON lines or of tables, -> raw columns: one record after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any

import polars as pl

from toolformer_dag.texts.columns import RAW, Batch, Rejection
from toolformer_dag.texts.compression import ShardFault
from toolformer_dag.texts.formats import MISSING, FormatChoice, FormatError, Layout, layout_of, shown, value_at

FIELDS = tuple(name for name in RAW if name != "line")


class Refused(ValueError):
    """A record that is no document. Arguments: reason, detail."""


class Records:
    """The records of one shard as raw columns. `layout` is known after `look`.

    `absent`: what a path that leads nowhere counts as: null in a table, whose columns are always there.
    """

    def __init__(self, choice: FormatChoice, absent: Any = MISSING) -> None:
        self.layout: Layout | None = None
        self._choice, self._absent = choice, absent

    def look(self, first: Sequence[Mapping[str, Any]]) -> Layout:
        """Find the fields by the first records. Raises ShardFault: unknown_format, missing_field."""
        try:
            self.layout = layout_of(self._choice, first)
        except FormatError as error:
            raise ShardFault(error.reason, str(error)) from error
        return self.layout

    def batch(
        self, numbered: Iterable[tuple[int, Any]], parse: Callable[[Any], Mapping[str, Any]] | None = None
    ) -> Batch:
        """Return rows as raw columns. Refused: what `parse` refuses, missing_field, wrong_type, not_utf8."""
        rows, rejections = [], []
        ignored: dict[str, None] = {}
        for number, raw in numbered:
            try:
                rows.append((number, *self._values(parse(raw) if parse else raw, ignored)))
            except Refused as refused:
                rejections.append(Rejection(number, *refused.args))
        columns = dict(zip(RAW, zip(*rows, strict=True), strict=True)) if rows else None
        return Batch(pl.DataFrame(columns, schema=RAW), tuple(rejections), tuple(ignored))

    def _values(self, record: Mapping[Any, Any], ignored: dict[str, None]) -> Iterator[str | None]:
        assert self.layout is not None
        layout, found = self.layout, {field: self._value(record, field) for field in FIELDS}
        if missing := [field for field in layout.required if found[field] is MISSING]:
            lacking = ", ".join(map(layout.paths, missing))
            raise Refused("missing_field", f"{lacking}; the record has {shown(record)}")
        return (value if type(value) is str else _text(field, value, layout, ignored) for field, value in found.items())

    def _value(self, record: Mapping[Any, Any], field: str) -> Any:
        """Return the first value that is not null, else null where one is there, else MISSING."""
        assert self.layout is not None
        found = self._absent
        for way in self.layout.places[field]:
            value = record.get(way[0], MISSING) if len(way) == 1 else value_at(record, way)
            if value is not MISSING and value is not None:
                return value
            found = value if found is MISSING else found
        return found


def _text(field: str, value: Any, layout: Layout, ignored: dict[str, None]) -> str | None:
    """Return a value as text, null where an optional field has none. Raises Refused."""
    needed = field in layout.required
    if value is MISSING or (value is None and not needed):
        return None
    if isinstance(value, bytes):
        value, reason = _decoded(value), "not_utf8"
    else:
        value, reason = _plain(field, value, field in layout.strict), "wrong_type"
    if not isinstance(value, _Told):
        text: str | None = value
        return text
    wrong = f"{layout.paths(field)}: expected text, found {value}"
    if needed or (field in layout.strict and reason == "wrong_type"):
        raise Refused(reason, wrong)
    ignored[wrong] = None
    return None


class _Told(str):
    """What was found in the place of text."""


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _Told("bytes that are not UTF-8")


def _plain(field: str, value: Any, strict: bool) -> str | None:
    if type(value) is int and (field == "id" or not strict):
        return str(value)
    if field == "date":
        return value.isoformat() if isinstance(value, date) else None
    return _Told("null" if value is None else type(value).__name__)
