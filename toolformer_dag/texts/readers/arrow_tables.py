"""Arrow tables -> raw columns: what the readers of Parquet files and of data sets of the Hub have in common."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson
import polars as pl
import pyarrow as pa

from toolformer_dag.texts.columns import Batch, Column, build_raw_batch
from toolformer_dag.texts.formats import (
    CORPUS_FORMATS,
    FormatChoice,
    Layout,
    PathSteps,
    UnreachableValue,
    choose_layout,
    format_dotted_path,
    get_value_at_path,
    get_values_at_path,
)
from toolformer_dag.texts.shard_faults import ShardFault

FIRST_ROW_COUNT = 100
"""Rows that show which fields lie in maps, and in texts that hold JSON."""
MAX_LIST_ITEMS = 100
"""Items of a list that a path may name: `lang.0` to `lang.99`."""
TEXT_TYPE_CHECKS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
"""Functions that say whether a column's type is text."""
TEXT_HOLDING_TYPE_CHECKS = (
    *TEXT_TYPE_CHECKS,
    pa.types.is_null,
    pa.types.is_dictionary,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)
"""Functions that say whether a column of a type may hold text."""
LIST_TYPE_CHECKS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
"""Functions that say whether a column's type is a list."""
TypeTree = Any
"""The types of a table in the form of a row: {"text": string, "meta": {"url": string}, "lang": [string, ...]}.

A pa.DataType, a dict for the columns of a table or the fields of a struct, or a list for a list."""


def iter_table_rows(table: pa.Table | pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of an Arrow table as dicts with values of JSON. A time becomes text, and NaN becomes None."""
    frame = pl.DataFrame(pl.from_arrow(table))
    for row in frame.iter_rows(named=True):
        row_json = orjson.dumps(row, default=str)
        yield orjson.loads(row_json)


class TableRecords:
    """Reads documents from the tables of a file, which all have the same schema.

    `read_batch` takes these tables one after another.

    Attributes:
        layout: For each field of a document (text, url, ...), the paths at which a row may have it. A path is a tuple
            of steps: ("metadata", "url") for row["metadata"]["url"].
        column_names: The columns that have to be read of the file, as pyarrow names them: ["metadata.url", "text"].
    """

    layout: Layout
    column_names: list[str]

    def __init__(self, schema: pa.Schema, format_choice: FormatChoice, first_tables: Iterable[pa.Table]) -> None:
        """Find out which columns hold the fields of a document.

        Args:
            schema: The schema of the tables.
            format_choice: What the settings say about the format.
            first_tables: The tables with the first rows. At most one of them is read.

        Raises:
            ShardFault: No format fits (unknown_format), a field is missing (missing_field), or the column of a
                required field cannot hold text (wrong_type).
        """
        # The schema in the form of a row, {"meta": {"url": string}}, so that paths can be followed in it as in rows.
        type_tree = _build_type_tree(schema)
        # The first rows show the keys of maps and of texts that hold JSON, which the schema does not show.
        columns_with_hidden_fields = list_columns_with_hidden_fields(schema, format_choice)
        first_rows = _read_first_rows(first_tables, columns_with_hidden_fields)

        self.layout = choose_layout(format_choice, [type_tree, *first_rows])
        self._paths_by_field = _select_paths_in_schema(self.layout, type_tree)  # {"url": [("meta", "url")]}
        _check_columns_can_hold_text(type_tree, self._paths_by_field, self.layout.strict_fields)

        # For the path ("meta", "url"), the column "meta.url" is read of the file. In a table it is under "meta".
        all_paths = list(chain.from_iterable(self._paths_by_field.values()))
        self.column_names = sorted({_choose_column_to_read(path, type_tree) for path in all_paths})
        self._top_column_names = sorted({str(path[0]) for path in all_paths})
        self._rows_so_far = 0  # the number of rows that were read by `read_batch`

    def read_batch(self, table: pa.Table) -> Batch:
        """Read the fields of documents from the next table, as a batch of raw columns.

        Rows are numbered from 1 through all tables.
        """
        frame = _to_frame(table.select(self._top_column_names))

        first_row_number = self._rows_so_far + 1
        row_numbers = range(first_row_number, first_row_number + len(frame))
        self._rows_so_far += len(frame)

        # For each field, a column per path. The batch takes the first value of a row that is not null.
        columns_by_field = {}
        for field, paths in self._paths_by_field.items():  # {"url": [("meta", "url"), ("url",)]}
            columns_by_field[field] = [_read_values_at_path(frame, path) for path in paths]

        return build_raw_batch(self.layout, row_numbers, columns_by_field)


def _select_paths_in_schema(layout: Layout, type_tree: TypeTree) -> dict[str, list[PathSteps]]:
    """Select, for each field of a document, those paths of a layout that exist in a schema.

    Args:
        layout: The paths at which a field may be.
        type_tree: The types of the schema in the form of a row, such as {"meta": {"url": string}}.

    Returns:
        The paths by field: {"url": [("meta", "url")]}.
    """
    paths_by_field = {}
    for field, paths in layout.paths_by_field.items():
        existing_paths = [path for path in paths if get_value_at_path(type_tree, path) is not None]
        paths_by_field[field] = existing_paths
    return paths_by_field


def _read_first_rows(tables: Iterable[pa.Table], column_names: list[str]) -> list[dict[str, Any]]:
    """Read the first FIRST_ROW_COUNT rows of the first table as dicts.

    Args:
        tables: The tables, of which only the first is read.
        column_names: The columns to read.

    Returns:
        The rows, or an empty list if there are no columns or no tables.
    """
    if not column_names:
        return []

    first_table = next(iter(tables), None)
    if first_table is None:
        return []

    first_rows = first_table.select(column_names)[:FIRST_ROW_COUNT]
    frame = _to_frame(first_rows)

    columns = [_to_python_list(column) for column in frame]
    rows = zip(*columns, strict=True)
    return [dict(zip(frame.columns, row, strict=True)) for row in rows]


def _to_frame(table: pa.Table) -> pl.DataFrame:
    """Convert an Arrow table to a polars frame. If any text is not valid UTF-8, all texts become bytes."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        schema = pa.schema([_with_bytes_for_text_in_field(field) for field in table.schema])
        table = table.cast(schema)

    return pl.DataFrame(pl.from_arrow(table))


def list_columns_with_hidden_fields(schema: pa.Schema, format_choice: FormatChoice) -> list[str]:
    """List the columns that may hold fields which the schema does not show: maps, and texts that hold JSON.

    Returns:
        Only columns with which a dotted path of a format or of the settings begins, such as "metadata" for
        `metadata.url`.
    """
    first_keys = set()
    for path in _iter_dotted_paths(format_choice):
        first_key, dot, _ = path.partition(".")
        if dot:  # the path has further keys
            first_keys.add(first_key)

    columns = [column for column in schema if column.name in first_keys]
    return [column.name for column in columns if _can_hide_fields(column.type)]


def _iter_dotted_paths(format_choice: FormatChoice) -> Iterator[str]:
    """Yield the dotted paths of the settings and of all formats."""
    for _, path in format_choice.chosen_paths:
        yield path
    for corpus_format in CORPUS_FORMATS:
        for paths in corpus_format.paths_by_field.values():
            yield from paths


def _can_hide_fields(arrow_type: pa.DataType) -> bool:
    """Check whether values of a type may have fields that the type does not name, as maps and texts with JSON do."""
    if isinstance(arrow_type, pa.StructType):
        return any(_can_hide_fields(field.type) for field in arrow_type)
    return isinstance(arrow_type, pa.MapType) or _can_hold_text(arrow_type)


def _can_hold_text(arrow_type: pa.DataType) -> bool:
    """Check whether a column of a type may hold text."""
    return any(holds_text(arrow_type) for holds_text in TEXT_HOLDING_TYPE_CHECKS)


def _is_list_type(arrow_type: pa.DataType) -> bool:
    """Check whether a type is a list, of any kind."""
    return any(is_list(arrow_type) for is_list in LIST_TYPE_CHECKS)


def _build_type_tree(schema_or_type: pa.Schema | pa.DataType) -> TypeTree:
    """Convert a schema or a type to the form of a row, with types in place of the values.

    Returns:
        {"text": string, "meta": {"url": string}, "lang": [string, string, ...]}. A list has MAX_LIST_ITEMS
        items, so that a path such as `lang.0` leads to their type.
    """
    if isinstance(schema_or_type, pa.Schema | pa.StructType):
        return {field.name: _build_type_tree(field.type) for field in schema_or_type}
    if _is_list_type(schema_or_type):
        item_type = _build_type_tree(schema_or_type.value_type)
        return [item_type] * MAX_LIST_ITEMS
    return schema_or_type


def _read_values_at_path(frame: pl.DataFrame, path: PathSteps) -> Column:
    """Read what each row has at the end of a path: row["meta"]["url"] for ("meta", "url").

    Returns:
        A polars series if the values are text and can be reached through columns, structs and lists alone, or
        else a list. A row that has nothing there gets null.
    """
    column_name, *steps = path
    values = frame[str(column_name)]

    for step_index, step in enumerate(steps):
        values_below = _get_values_below(values, step)
        if values_below is None:
            # Polars cannot step into maps, or into texts that hold JSON. They are read row by row.
            remaining_steps = tuple(steps[step_index:])
            return get_values_at_path(_to_python_list(values), remaining_steps)
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
    """Convert a series to a list.

    A value that Python cannot hold, such as a day in the year 10000, is replaced by the type of the series.
    """
    try:
        return values.to_list()
    except (ValueError, OverflowError):
        # One such value makes polars refuse the whole series, so it is halved until that value stands alone.
        middle = len(values) // 2
        if middle == 0:
            return [values.dtype]

        first_half = _to_python_list(values[:middle])
        second_half = _to_python_list(values[middle:])
        return [*first_half, *second_half]


def _with_bytes_for_text(arrow_type: pa.DataType) -> pa.DataType:
    """Replace text by bytes in a type, at any depth: list<string> becomes list<binary>.

    So text that is not valid UTF-8 can be converted, too.
    """
    if isinstance(arrow_type, pa.StructType):
        return pa.struct([_with_bytes_for_text_in_field(field) for field in arrow_type])
    if _is_list_type(arrow_type):
        return pa.list_(_with_bytes_for_text_in_field(arrow_type.value_field))
    if pa.types.is_map(arrow_type):  # keys stay text, because values are looked up by them
        return pa.map_(arrow_type.key_type, _with_bytes_for_text(arrow_type.item_type))
    if pa.types.is_dictionary(arrow_type):
        return _with_bytes_for_text(arrow_type.value_type)

    is_text = any(is_text_type(arrow_type) for is_text_type in TEXT_TYPE_CHECKS)
    return pa.binary() if is_text else arrow_type


def _with_bytes_for_text_in_field(field: pa.Field) -> pa.Field:
    """Return a field of a schema, a struct or a list with bytes in place of text."""
    return field.with_type(_with_bytes_for_text(field.type))


def _check_columns_can_hold_text(
    type_tree: TypeTree, paths_by_field: Mapping[str, Sequence[PathSteps]], strict_fields: Collection[str]
) -> None:
    """Check that fields which must hold text are read from columns that can hold it.

    Args:
        type_tree: The types of the schema in the form of a row, such as {"meta": {"url": string}}.
        paths_by_field: For each field of a document, where its values are: {"url": [("meta", "url")]}
        strict_fields: The fields that must hold text.

    Raises:
        ShardFault: A column cannot hold text (wrong_type).
    """
    for field, paths in paths_by_field.items():
        if field not in strict_fields:
            continue
        for path in paths:
            column_type = get_value_at_path(type_tree, path)
            if not _can_read_field_from_column(field, column_type):
                content = column_type if isinstance(column_type, pa.DataType) else "structs or lists"
                raise ShardFault("wrong_type", f"{format_dotted_path(path)}: expected text, the column holds {content}")


def _can_read_field_from_column(field: str, column_type: pa.DataType | TypeTree | UnreachableValue) -> bool:
    """Check whether a field of a document, such as "text" or "id", can be read from a column.

    Text is right for every field, whole numbers for an id, and anything for a date.

    Args:
        field: The name of the field.
        column_type: The type of the column. It is a dict for a struct, a list for a list, and an UnreachableValue
            for something inside a map or inside a text that holds JSON.
    """
    if isinstance(column_type, UnreachableValue) or field == "date":  # each value is checked when it is read
        return True
    if not isinstance(column_type, pa.DataType):
        return False

    is_whole_number_id = field == "id" and pa.types.is_integer(column_type)
    return is_whole_number_id or _can_hold_text(column_type)


def _choose_column_to_read(path: PathSteps, type_tree: TypeTree) -> str:
    """Find the name of the column that pyarrow has to read for a path: "meta.url" for ("meta", "url").

    Lists, maps and texts can only be read as a whole, so for ("lang", 0) it is "lang".

    Args:
        path: The keys and list indices that lead to a value in a row.
        type_tree: The types of the schema in the form of a row: {"meta": {"url": string}, "lang": [string, ...]}
    """
    names: list[str] = []
    types_below = type_tree  # the types below the steps so far

    for step in path:
        if not isinstance(types_below, dict):  # not a struct, so that pyarrow cannot read a part of it
            break
        names.append(str(step))
        types_below = types_below[step]

    return ".".join(names)
