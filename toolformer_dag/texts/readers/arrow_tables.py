"""Arrow tables -> raw columns: what the readers of Parquet files and of data sets of the Hub have in common."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson
import polars as pl
import pyarrow as pa

from toolformer_dag.texts.columns import Batch, Column, build_raw_batch
from toolformer_dag.texts.formats import (
    FORMATS,
    FormatChoice,
    Layout,
    Steps,
    Unread,
    choose_layout,
    format_dotted_path,
    get_values_at,
    value_at,
)
from toolformer_dag.texts.shard_faults import ShardFault

FIRST_ROWS = 100
"""Rows that show which fields lie in maps, and in texts that hold JSON."""
MOST_LIST_ITEMS = 100
"""Items of a list that a path may name: `lang.0` to `lang.99`."""
IS_TEXT_TYPE = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
"""Functions that say whether a column's type is text."""
MAY_HOLD_TEXT = (
    *IS_TEXT_TYPE,
    pa.types.is_null,
    pa.types.is_dictionary,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)
"""Functions that say whether a column of a type may hold text."""
IS_LIST_TYPE = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
"""Functions that say whether a column's type is a list."""
TypeTree = Any
"""The types of a table in the form of a row: {"text": string, "meta": {"url": string}, "lang": [string, ...]}.

A pa.DataType, a dict for the columns of a table or the fields of a struct, or a list for a list."""


def iter_table_rows(table: pa.Table | pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of an Arrow table as JSON has them: a time is its text, NaN is null."""
    frame = pl.DataFrame(pl.from_arrow(table))
    for row in frame.iter_rows(named=True):
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
        """Find out which columns hold the fields of a document.

        Args:
            schema: The schema of the tables.
            choice: What the settings say about the format.
            first: The tables with the first rows. At most one of them is read.

        Raises:
            ShardFault: No format fits (unknown_format), a field is missing (missing_field), or the column of a
                required field cannot hold text (wrong_type).
        """
        # {"meta": {"url": string}}: the schema in the form of a row, so that paths are followed in it as in the rows.
        type_tree = _build_type_tree(schema)
        rows = _read_first_rows(
            first, list_columns_with_hidden_fields(schema, choice)
        )  # show the keys of maps and of JSON texts

        self.layout = choose_layout(choice, [type_tree, *rows])
        self._paths_by_field = _select_paths_in_schema(self.layout, type_tree)  # {"url": [("meta", "url")]}
        _check_texts(type_tree, self._paths_by_field, self.layout.strict)

        # The path ("meta", "url") is read of a file as the column "meta.url", and found in a table under "meta".
        all_paths = list(chain.from_iterable(self._paths_by_field.values()))
        self.columns = sorted({_choose_column_to_read(path, type_tree) for path in all_paths})
        self._top_columns = sorted({str(path[0]) for path in all_paths})
        self._rows_so_far = 0  # of the tables that `batch` took

    def batch(self, table: pa.Table) -> Batch:
        """Read the fields of documents from the next table, as a batch of raw columns.

        Rows are numbered from 1 through all tables.
        """
        frame = _to_frame(table.select(self._top_columns))
        first_row = self._rows_so_far + 1
        self._rows_so_far += len(frame)

        row_numbers = range(first_row, first_row + len(frame))
        columns = {}
        for field, paths in self._paths_by_field.items():  # {"url": [("meta", "url"), ("url",)]}
            columns[field] = [_get_values_at_path(frame, path) for path in paths]

        return build_raw_batch(self.layout, row_numbers, columns)


def _select_paths_in_schema(layout: Layout, type_tree: TypeTree) -> dict[str, list[Steps]]:
    """Return for each field the paths of a layout that the schema has, in order."""
    paths_by_field = {}
    for field, paths in layout.steps.items():
        paths_by_field[field] = [path for path in paths if value_at(type_tree, path) is not None]
    return paths_by_field


def _read_first_rows(tables: Iterable[pa.Table], columns: list[str]) -> list[dict[str, Any]]:
    """Read the first FIRST_ROWS rows of the first table as dicts.

    Args:
        columns: The columns to read.

    Returns:
        The rows, or an empty list if there are no columns or no tables.
    """
    if not columns:
        return []

    first_table = next(iter(tables), None)
    if first_table is None:
        return []

    frame = _to_frame(first_table.select(columns)[:FIRST_ROWS])
    values_of_columns = [_to_python_list(column) for column in frame]
    rows = zip(*values_of_columns, strict=True)
    return [dict(zip(frame.columns, row, strict=True)) for row in rows]


def _to_frame(table: pa.Table) -> pl.DataFrame:
    """Convert an Arrow table to a polars frame. If any text is not valid UTF-8, all texts become bytes."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        schema = pa.schema([_with_bytes_in_field(field) for field in table.schema])
        table = table.cast(schema)

    return pl.DataFrame(pl.from_arrow(table))


def list_columns_with_hidden_fields(schema: pa.Schema, choice: FormatChoice) -> list[str]:
    """List the columns that may hold fields which the schema does not show: maps, and texts that hold JSON.

    Returns:
        Only columns with which a dotted path of a format or of the settings begins, such as "metadata" for
        `metadata.url`.
    """
    path_beginnings = set()
    for path in _iter_all_paths(choice):
        beginning, dot, _ = path.partition(".")
        if dot:
            path_beginnings.add(beginning)

    columns = [column for column in schema if column.name in path_beginnings]
    return [column.name for column in columns if _may_hide_fields(column.type)]


def _iter_all_paths(choice: FormatChoice) -> Iterator[str]:
    """Yield the dotted paths of the settings and of all formats."""
    for _, path in choice.fields:
        yield path
    for corpus_format in FORMATS:
        for paths in corpus_format.fields.values():
            yield from paths


def _may_hide_fields(kind: pa.DataType) -> bool:
    """Return whether values of a type may have fields that the type does not name: maps, and texts that hold JSON."""
    if isinstance(kind, pa.StructType):
        return any(_may_hide_fields(field.type) for field in kind)
    return isinstance(kind, pa.MapType) or _may_hold_text(kind)


def _may_hold_text(kind: pa.DataType) -> bool:
    return any(holds_text(kind) for holds_text in MAY_HOLD_TEXT)


def _is_list(kind: pa.DataType) -> bool:
    return any(is_list(kind) for is_list in IS_LIST_TYPE)


def _build_type_tree(schema_or_type: pa.Schema | pa.DataType) -> TypeTree:
    """Convert a schema or a type to the form of a row, with types in place of the values.

    Returns:
        {"text": string, "meta": {"url": string}, "lang": [string, string, ...]}. A list has MOST_LIST_ITEMS
        items, so that a path such as `lang.0` leads to their type.
    """
    if isinstance(schema_or_type, pa.Schema | pa.StructType):
        return {field.name: _build_type_tree(field.type) for field in schema_or_type}
    if _is_list(schema_or_type):
        item_type = _build_type_tree(schema_or_type.value_type)
        return [item_type] * MOST_LIST_ITEMS
    return schema_or_type


def _get_values_at_path(frame: pl.DataFrame, path: Steps) -> Column:
    """Read what each row has at the end of a path: row["meta"]["url"] for ("meta", "url").

    Returns:
        A polars series if the values are text and can be reached through columns, structs and lists alone, or
        else a list. A row that has nothing there gets null.
    """
    column, *steps = path
    values = frame[str(column)]

    for number, step in enumerate(steps):
        values_below = _get_values_below(values, step)
        if values_below is None:  # maps, or texts with JSON, which polars cannot step into: they are read row by row
            remaining_steps = tuple(steps[number:])
            return get_values_at(_to_python_list(values), remaining_steps)
        values = values_below

    return values if values.dtype == pl.String else _to_python_list(values)


def _get_values_below(values: pl.Series, step: str | int) -> pl.Series | None:
    """Read a field of structs, or an item of lists.

    Returns:
        The values, or None if polars cannot step into them (such as maps, and texts that hold JSON).
    """
    if isinstance(step, str) and isinstance(values.dtype, pl.Struct):
        return values.struct.field(step)
    if isinstance(step, int) and isinstance(values.dtype, pl.List):
        return values.list.get(step, null_on_oob=True)
    return None


def _to_python_list(values: pl.Series) -> list[Any]:
    """Convert a series to a list, with its type for values that Python cannot hold (a day in the year 10000)."""
    try:
        return values.to_list()
    except (ValueError, OverflowError):
        # One such value makes polars refuse the whole series, so it is halved until that value stands alone.
        half = len(values) // 2
        if half == 0:
            return [values.dtype]
        return [*_to_python_list(values[:half]), *_to_python_list(values[half:])]


def _with_bytes(kind: pa.DataType) -> pa.DataType:
    """Replace text by bytes in a type, at any depth: list<string> becomes list<binary>."""
    if isinstance(kind, pa.StructType):
        return pa.struct([_with_bytes_in_field(field) for field in kind])
    if _is_list(kind):
        return pa.list_(_with_bytes_in_field(kind.value_field))
    if pa.types.is_map(kind):  # keys stay text, because values are looked up by them
        return pa.map_(kind.key_type, _with_bytes(kind.item_type))
    if pa.types.is_dictionary(kind):
        return _with_bytes(kind.value_type)

    is_text = any(is_text_type(kind) for is_text_type in IS_TEXT_TYPE)
    return pa.binary() if is_text else kind


def _with_bytes_in_field(field: pa.Field) -> pa.Field:
    """Return a field of a schema, a struct or a list with bytes in place of text."""
    return field.with_type(_with_bytes(field.type))


def _check_texts(type_tree: TypeTree, paths_by_field: Mapping[str, Sequence[Steps]], strict: Collection[str]) -> None:
    """Check that fields which must hold text are read from columns that can hold it.

    Args:
        type_tree: The types of the schema in the form of a row, such as {"meta": {"url": string}}.
        paths_by_field: For each field of a document, where its values are: {"url": [("meta", "url")]}
        strict: The fields that must hold text.

    Raises:
        ShardFault: A column cannot hold text (wrong_type).
    """
    for field, paths in paths_by_field.items():
        if field not in strict:
            continue
        for path in paths:
            column_type = value_at(type_tree, path)
            if not _can_be_read_from(field, column_type):
                content = column_type if isinstance(column_type, pa.DataType) else "structs or lists"
                raise ShardFault("wrong_type", f"{format_dotted_path(path)}: expected text, the column holds {content}")


def _can_be_read_from(field: str, column_type: pa.DataType | TypeTree | Unread) -> bool:
    """Check whether a field of a document, such as "text" or "id", can be read from a column.

    Text is right for every field, whole numbers for an id, and anything for a date.

    Args:
        field: The name of the field.
        column_type: The type of the column. It is a dict for a struct, a list for a list, and Unread for
            something inside a map or inside a text that holds JSON.
    """
    if isinstance(column_type, Unread) or field == "date":  # each value is checked when it is read
        return True
    if not isinstance(column_type, pa.DataType):
        return False

    return _may_hold_text(column_type) or (field == "id" and pa.types.is_integer(column_type))


def _choose_column_to_read(path: Steps, type_tree: TypeTree) -> str:
    """Find the name of the column that pyarrow has to read for a path: "meta.url" for ("meta", "url").

    Lists, maps and texts can only be read as a whole, so for ("lang", 0) it is "lang".

    Args:
        type_tree: The types of the schema in the form of a row: {"meta": {"url": string}, "lang": [string, ...]}
    """
    names: list[str] = []
    types_below = type_tree  # what stands below the steps so far

    for step in path:
        if not isinstance(types_below, dict):  # no struct: pyarrow cannot read a part of it
            break
        names.append(str(step))
        types_below = types_below[step]

    return ".".join(names)
