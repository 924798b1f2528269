"""Arrow tables -> raw columns: what the readers of Parquet files and of data sets of the Hub have in common."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson
import polars as pl
import pyarrow as pa

from toolformer_dag.texts.columns import Batch, Column, raw_batch
from toolformer_dag.texts.formats import (
    FORMATS,
    FormatChoice,
    Layout,
    Steps,
    Unread,
    dotted,
    layout_of,
    value_at,
    values_at,
)
from toolformer_dag.texts.shard_faults import ShardFault

FIRST_ROWS = 100
"""Rows that show which fields lie in maps, and in texts that hold JSON."""
ITEMS = 100
"""Items of a list that a path may name: `lang.0` to `lang.99`."""
IS_PLAIN_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
"""Functions that say whether a column's type is text."""
IS_TEXT = (
    *IS_PLAIN_TEXT,
    pa.types.is_null,
    pa.types.is_dictionary,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)
"""Functions that say whether a column of a type may hold text."""


def table_rows(table: pa.Table | pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of an Arrow table as JSON has them: a time is its text, NaN is null."""
    for row in pl.DataFrame(pl.from_arrow(table)).iter_rows(named=True):
        yield orjson.loads(orjson.dumps(row, default=str))


class TableRecords:
    """Reads documents from the tables of a file that have one schema; `batch` takes these tables in their order.

    layout: for each field of a document (text, url, ...), the paths at which a row may have it. A path is a tuple of
        steps: ("metadata", "url") for row["metadata"]["url"].
    columns: what has to be read of the file, as pyarrow names it: ["metadata.url", "text"].
    """

    layout: Layout
    columns: list[str]

    def __init__(self, schema: pa.Schema, choice: FormatChoice, first: Iterable[pa.Table]) -> None:
        """Choose the columns in which each field of a document is looked for.

        choice: the corpus's format, from the settings.
        first: tables with the first rows, at least of the columns `hiding_columns`. Only the first table is read.

        Raises ShardFault: unknown_format, missing_field, wrong_type (a column of a required field holds no text).
        """
        types = _types_as_row(schema)  # so that paths are followed in it as in a row
        rows = _first_rows(first, hiding_columns(schema, choice))
        self.layout = layout_of(choice, [types, *rows])
        self._paths_by_field = _paths_in_schema(self.layout, types)
        _check_texts(types, self._paths_by_field, self.layout.strict)

        all_paths = list(chain.from_iterable(self._paths_by_field.values()))
        self.columns = sorted({_column(path, types) for path in all_paths})
        self._table_columns = sorted({str(path[0]) for path in all_paths})  # the columns of a table that have them
        self._row_count = 0  # rows of the tables so far

    def batch(self, table: pa.Table) -> Batch:
        """Return the rows of the next table as a batch of raw columns; rows are numbered from 1 through all tables."""
        frame = _frame(table.select(self._table_columns))
        first_row = self._row_count + 1
        self._row_count += len(frame)
        columns = {}
        for field, paths in self._paths_by_field.items():
            columns[field] = [_values(frame, path) for path in paths]
        return raw_batch(self.layout, range(first_row, first_row + len(frame)), columns)


def _paths_in_schema(layout: Layout, types: Any) -> dict[str, list[Steps]]:
    """Return for each field the paths of a layout that the schema has, in order. types: see `_types_as_row`."""
    paths_by_field = {}
    for field, paths in layout.steps.items():
        paths_by_field[field] = [path for path in paths if value_at(types, path) is not None]
    return paths_by_field


def _first_rows(tables: Iterable[pa.Table], columns: list[str]) -> list[dict[str, Any]]:
    """Return the first FIRST_ROWS rows of the first table as dicts of these columns: [{"meta": {...}}, ...].

    Returns no rows if there are no columns or no tables.
    """
    if not columns:
        return []
    for table in tables:
        frame = _frame(table.select(columns)[:FIRST_ROWS])
        values = [_listed(column) for column in frame]
        return [dict(zip(frame.columns, row, strict=True)) for row in zip(*values, strict=True)]
    return []


def _frame(table: pa.Table) -> pl.DataFrame:
    """Return an Arrow table as a polars frame. If a text in it is not UTF-8, all texts are cast to bytes."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        fields = [field.with_type(_with_bytes(field.type)) for field in table.schema]
        table = table.cast(pa.schema(fields))
    return pl.DataFrame(pl.from_arrow(table))


def hiding_columns(schema: pa.Schema, choice: FormatChoice) -> list[str]:
    """Return the columns that may hold fields which the schema does not show: maps, and texts with JSON in them.

    As ["metadata"] where the column `metadata` is text, such as '{"url": "..."}', because the formats have the path
    `metadata.url`. A column counts only if a dotted path of a format, or of the settings, begins with its name.
    """
    paths = [path for _, path in choice.fields]  # the settings' pairs of a field and its path
    for corpus_format in FORMATS:
        for format_paths in corpus_format.fields.values():
            paths += format_paths
    first_steps = {path.partition(".")[0] for path in paths if "." in path}
    return [column.name for column in schema if column.name in first_steps and _hides_fields(column.type)]


def _hides_fields(kind: pa.DataType) -> bool:
    """Return whether values of a type may have fields that the type does not name: maps, and texts that hold JSON."""
    if isinstance(kind, pa.StructType):
        return any(_hides_fields(field.type) for field in kind)
    return isinstance(kind, pa.MapType) or _may_hold_text(kind)


def _may_hold_text(kind: pa.DataType) -> bool:
    return any(is_text(kind) for is_text in IS_TEXT)


def _is_list(kind: pa.DataType) -> bool:
    return any(is_list(kind) for is_list in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _types_as_row(kind: Any) -> Any:
    """Return a schema or a type in the form of a row, with types in place of values.

    {"text": string, "meta": {"url": string}, "lang": [string, string, ...]} for two columns, a struct and a list. A
    list has ITEMS items, so that a path such as `lang.0` leads to their type.
    """
    if isinstance(kind, pa.Schema | pa.StructType):
        return {field.name: _types_as_row(field.type) for field in kind}
    if _is_list(kind):
        return [_types_as_row(kind.value_type)] * ITEMS
    return kind


def _values(frame: pl.DataFrame, path: Steps) -> Column:
    """Return what each row of a frame has at the end of a path: a series of text, or else a list of any values.

    As row["meta"]["url"] of each row for ("meta", "url"). Null where a row has nothing there.
    """
    column, *steps = path
    values = frame[str(column)]
    for number, step in enumerate(steps):
        if isinstance(step, str) and isinstance(values.dtype, pl.Struct):
            values = values.struct.field(step)
        elif isinstance(step, int) and isinstance(values.dtype, pl.List):
            values = values.list.get(step, null_on_oob=True)
        else:  # polars has no columns below a map or a text with JSON: the rest is looked up row by row
            remaining_steps = tuple(steps[number:])
            return values_at(_listed(values), remaining_steps)
    return values if values.dtype == pl.String else _listed(values)


def _listed(values: pl.Series) -> list[Any]:
    """Return a series as a Python list. A value that Python cannot hold (a day in the year 10000) becomes its type.

    A single one makes polars refuse the whole series, so the series is halved until that value stands alone.
    """
    try:
        return values.to_list()
    except (ValueError, OverflowError):
        half = len(values) // 2
        if half == 0:
            return [values.dtype]
        return [*_listed(values[:half]), *_listed(values[half:])]


def _with_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in place of text at any depth: list<binary> for list<string>.

    The keys of maps stay text, because values are looked up by them.
    """
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


def _check_texts(types: Any, paths_by_field: Mapping[str, Sequence[Steps]], strict: Collection[str]) -> None:
    """Raise ShardFault wrong_type if a field in `strict` has a path to a type that does not fit it (`_fits`).

    types: the schema's types, see `_types_as_row`.
    """
    for field, paths in paths_by_field.items():
        for path in paths:
            kind = value_at(types, path)
            if field in strict and not _fits(field, kind):
                holds = kind if isinstance(kind, pa.DataType) else "structs or lists"
                raise ShardFault("wrong_type", f"{dotted(path)}: expected text, the column holds {holds}")


def _fits(field: str, kind: Any) -> bool:
    """Return whether a field of a document may be read from a column: its type is text, a whole number for an id.

    kind: a type, a dict (a struct), a list, or Unread where the schema does not show what a map or a text with JSON
    holds there. With Unread the values decide later. A date may have any type.
    """
    if isinstance(kind, Unread) or field == "date":
        return True
    if not isinstance(kind, pa.DataType):
        return False
    return _may_hold_text(kind) or (field == "id" and pa.types.is_integer(kind))


def _column(path: Steps, types: Any) -> str:
    """Return the name of the column that pyarrow has to read for a path: "meta.url" for ("meta", "url").

    A single field of a struct can be read; a list, a map or a text is read whole: "lang" for ("lang", 0).

    types: the schema's types, see `_types_as_row`.
    """
    names: list[str] = []
    kind = types
    for step in path:
        if not isinstance(kind, dict):  # no struct
            break
        names.append(str(step))
        kind = kind[step]
    return ".".join(names)
