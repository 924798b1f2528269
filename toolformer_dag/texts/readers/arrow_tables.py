"""Arrow tables -> raw columns: what the readers of Parquet files and of data sets of the Hub have in common."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import orjson
import polars as pl
import pyarrow as pa

from toolformer_dag.texts.columns import Batch, Column, raw_batch
from toolformer_dag.texts.formats import FORMATS, FormatChoice, Steps, Unread, dotted, layout_of, values_at
from toolformer_dag.texts.shard_faults import ShardFault

FIRST_ROWS = 100
"""Rows that show which fields lie in maps, and in texts that hold JSON."""
ITEMS = 100
"""A path may name one of so many first items of a list."""
IS_PLAIN_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
"""Ask whether a column's type is text."""
IS_TEXT = (
    *IS_PLAIN_TEXT,
    pa.types.is_null,
    pa.types.is_dictionary,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)
"""Ask whether a column's type may hold text."""


def table_rows(table: pa.Table | pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of an Arrow table as JSON has them: a time is its text, NaN is null."""
    for row in pl.DataFrame(pl.from_arrow(table)).iter_rows(named=True):
        yield orjson.loads(orjson.dumps(row, default=str))


class TableRecords:
    """The records of Arrow tables that have one schema.

    `batch` takes the tables in their order and numbers their rows on, from 1.
    """

    def __init__(self, schema: pa.Schema, choice: FormatChoice, first: Iterable[pa.Table]) -> None:
        """Find the columns of each field.

        first: the first rows, at least of the columns `hiding_columns`; only the first table is looked at.

        Raises ShardFault: unknown_format, missing_field, wrong_type (a column holds no text).
        """
        schema_record = _as_record(schema)
        self.layout = layout_of(choice, [schema_record, *_first_rows(first, hiding_columns(schema, choice))])
        self._ways: dict[str, list[Steps]] = {}
        """By field, the ways of the layout that the schema has."""
        for field, ways in self.layout.places.items():
            self._ways[field] = [way for way in ways if values_at([schema_record], way)[0] is not None]
            if field in self.layout.strict:
                for way in self._ways[field]:
                    _check_text(field, way, values_at([schema_record], way)[0])

        all_ways = list(chain.from_iterable(self._ways.values()))
        self.columns = sorted({_column(way, schema_record) for way in all_ways})
        """What has to be read of a file, as pyarrow names it: `metadata.url`."""
        self._table_columns = sorted({str(way[0]) for way in all_ways})
        self._rows = 0  # of the tables so far

    def batch(self, table: pa.Table) -> Batch:
        """Return the rows of the next table as raw columns."""
        frame = _frame(table.select(self._table_columns))
        first_row = self._rows + 1
        self._rows += len(frame)
        columns = {}
        for field, ways in self._ways.items():
            columns[field] = [_values(frame, way) for way in ways]
        return raw_batch(self.layout, range(first_row, first_row + len(frame)), columns)


def _first_rows(tables: Iterable[pa.Table], columns: list[str]) -> list[dict[str, Any]]:
    """Return the first FIRST_ROWS rows of the first table as records of these columns; none without columns."""
    if not columns:
        return []
    for table in tables:
        frame = _frame(table.select(columns)[:FIRST_ROWS])
        values = [_listed(column) for column in frame]
        return [dict(zip(frame.columns, row, strict=True)) for row in zip(*values, strict=True)]
    return []


def _frame(table: pa.Table) -> pl.DataFrame:
    """Return an Arrow table as a frame. Where a text in it is not UTF-8, all texts are bytes."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        fields = [field.with_type(_with_bytes(field.type)) for field in table.schema]
        table = table.cast(pa.schema(fields))
    return pl.DataFrame(pl.from_arrow(table))


def hiding_columns(schema: pa.Schema, choice: FormatChoice) -> list[str]:
    """Return the columns in which a field may lie although the schema does not show it: maps, and texts with JSON.

    Only columns count at which a dotted path of a format, or of the settings, begins.
    """
    paths = [path for _, path in choice.fields]
    for corpus_format in FORMATS:
        for format_paths in corpus_format.fields.values():
            paths += format_paths
    heads = {path.partition(".")[0] for path in paths if "." in path}
    return [field.name for field in schema if field.name in heads and _hides_fields(field.type)]


def _hides_fields(kind: pa.DataType) -> bool:
    """Return whether values of a type may have fields that the type does not name."""
    if isinstance(kind, pa.StructType):
        return any(_hides_fields(field.type) for field in kind)
    return isinstance(kind, pa.MapType) or _may_hold_text(kind)


def _may_hold_text(kind: pa.DataType) -> bool:
    return any(is_text(kind) for is_text in IS_TEXT)


def _is_list(kind: pa.DataType) -> bool:
    return any(is_list(kind) for is_list in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _as_record(kind: Any) -> Any:
    """Return a schema or a type as a record, in which paths are looked up: with types in place of values.

    Fields are by name, and a list has ITEMS items.
    """
    if isinstance(kind, pa.Schema | pa.StructType):
        return {field.name: _as_record(field.type) for field in kind}
    if _is_list(kind):
        return [_as_record(kind.value_type)] * ITEMS
    return kind


def _values(frame: pl.DataFrame, way: Steps) -> Column:
    """Return what lies at the end of a way in each row of a frame: a series of text, or values of any type."""
    column, *steps = way
    values = frame[str(column)]
    for number, step in enumerate(steps):
        if isinstance(step, str) and isinstance(values.dtype, pl.Struct):
            values = values.struct.field(step)
        elif isinstance(step, int) and isinstance(values.dtype, pl.List):
            values = values.list.get(step, null_on_oob=True)
        else:  # a map, a text that holds JSON, or something through which the way does not lead
            return values_at(_listed(values), tuple(steps[number:]))
    return values if values.dtype == pl.String else _listed(values)


def _listed(values: pl.Series) -> list[Any]:
    """Return the values of a series, with the type in place of one that Python cannot hold (a day in the year 10000).

    One such value makes polars refuse the whole series, so halves are tried until it stands alone.
    """
    try:
        return values.to_list()
    except (ValueError, OverflowError):
        half = len(values) // 2
        if half == 0:
            return [values.dtype]
        return [*_listed(values[:half]), *_listed(values[half:])]


def _with_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in place of text at any depth, but not in the keys of maps: values are found by them."""
    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _with_bytes(kind.item_type))
    if _is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_bytes(kind.value_type)))
    if pa.types.is_dictionary(kind):
        return _with_bytes(kind.value_type)
    is_plain_text = any(is_text(kind) for is_text in IS_PLAIN_TEXT)
    return pa.binary() if is_plain_text else kind


def _check_text(field: str, way: Steps, kind: Any) -> None:
    """Raise ShardFault wrong_type where a field's column can hold no text.

    kind: what `_as_record` has at the end of the way. Whole numbers may be ids, and anything may be a date. Where the
    schema does not show what lies there (Unread), the values decide later.
    """
    if isinstance(kind, Unread) or field == "date":
        return
    is_type = isinstance(kind, pa.DataType)  # else a struct or a list
    if is_type and _may_hold_text(kind):
        return
    if is_type and field == "id" and pa.types.is_integer(kind):
        return
    holds = kind if is_type else "structs or lists"
    raise ShardFault("wrong_type", f"{dotted(way)}: expected text, the column holds {holds}")


def _column(way: Steps, record: Any) -> str:
    """Return the name by which pyarrow reads what a way needs: fields of structs alone, lists and maps whole.

    record: the schema, as `_as_record` returns it.
    """
    names: list[str] = []
    for step in way:
        if not isinstance(record, dict):
            break
        names.append(str(step))
        record = record[step]
    return ".".join(names)
