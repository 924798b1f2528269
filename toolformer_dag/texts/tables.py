"""Parquet and Arrow tables -> raw columns, row groups by batches."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from toolformer_dag.texts.columns import Batch, Column, raw_batch
from toolformer_dag.texts.compression import ShardFault
from toolformer_dag.texts.formats import FORMATS, FormatChoice, Steps, Unread, layout_of, values_at

MAGIC = b"PAR1"
BATCH_BYTES = 1 << 23
BATCH_ROWS = 4096
READ_BYTES = 1 << 20
FIRST_ROWS = 100
"""Rows that show which fields lie in maps, and in texts that hold JSON."""
ITEMS = 100
"""A path may name one of so many first items of a list."""
TEXT = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null, pa.types.is_dictionary),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
)


class TableRecords:
    """The records of Arrow tables of one schema. `ways`: by field those that the schema has; `columns`: their names."""

    def __init__(self, schema: pa.Schema, choice: FormatChoice, first: Iterable[pa.Table]) -> None:
        """Find the columns. `first`: rows of the columns `folded`, of which the first table is looked at.

        Raises ShardFault: unknown_format, missing_field, wrong_type (a column holds no text).
        """
        record, hidden = _as_record(schema), folded(schema, choice)
        rows = next((_rows(_frame(table.select(hidden)[:FIRST_ROWS])) for table in first if hidden), [])
        self.layout = layout_of(choice, [record, *rows])
        self.ways = {
            field: [way for way in ways if values_at([record], way)[0] is not None]
            for field, ways in self.layout.places.items()
        }
        self.columns = sorted({_column(way, record) for ways in self.ways.values() for way in ways})
        self._rows = 0
        for field in filter(self.layout.strict.__contains__, self.ways):
            for way in self.ways[field]:
                _check_text(field, way, values_at([record], way)[0])

    def batch(self, table: pa.Table) -> Batch:
        """Return the next rows as raw columns."""
        frame = _frame(table.select(sorted({str(way[0]) for ways in self.ways.values() for way in ways})))
        columns = {field: [_values(frame, way) for way in ways] for field, ways in self.ways.items()}
        lines = range(self._rows + 1, self._rows + 1 + len(frame))
        self._rows += len(frame)
        return raw_batch(self.layout, lines, columns)


def _frame(table: pa.Table) -> pl.DataFrame:
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:  # text that is not UTF-8, which writers may leave
        table = table.cast(pa.schema([field.with_type(_as_bytes(field.type)) for field in table.schema]))
    return pl.DataFrame(pl.from_arrow(table))


def _rows(frame: pl.DataFrame) -> list[dict[str, Any]]:
    return [dict(zip(frame.columns, row, strict=True)) for row in zip(*map(_listed, frame), strict=True)]


def folded(schema: pa.Schema, choice: FormatChoice) -> list[str]:
    """Return the columns whose schema does not show what fields they have: a dotted path begins there all the same."""
    paths = [path for form in FORMATS for ways in form.fields.values() for path in ways]
    heads = {path.partition(".")[0] for path in [*paths, *dict(choice.fields).values()] if "." in path}
    return [field.name for field in schema if field.name in heads and _hides(field.type)]


def _hides(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.StructType):
        return any(_hides(field.type) for field in kind)
    return isinstance(kind, pa.MapType) or any(is_text(kind) for is_text in TEXT)


def parquet_batches(source: Path | str | IO[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Yield the rows of a Parquet file as raw columns.

    Memory: pages and a batch, whatever the size of file and row groups.
    Raises ShardFault: corrupt_parquet, truncated_parquet, empty_shard, and those of TableRecords; OSError where the
    file cannot be read. Checksums of pages are verified where the writer made them; most make none.
    """
    try:
        with pq.ParquetFile(
            source, memory_map=False, pre_buffer=False, buffer_size=READ_BYTES, page_checksum_verification=True
        ) as file:
            first = file.iter_batches(FIRST_ROWS, columns=folded(file.schema_arrow, choice), use_threads=False)
            records = TableRecords(file.schema_arrow, choice, (pa.Table.from_batches([batch]) for batch in first))
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            each = max((group.total_byte_size / group.num_rows for group in groups if group.num_rows), default=1.0)
            rows = max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(each, 1.0))))
            for batch in file.iter_batches(rows, columns=records.columns, use_threads=False):
                yield records.batch(pa.Table.from_batches([batch]))
            if not file.metadata.num_rows:
                raise ShardFault("empty_shard", "the shard has no rows")
    except (OSError, pa.ArrowException, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise ShardFault("corrupt_parquet", f"{reason}: no row of it is used") from error


def _as_record(kind: Any) -> Any:
    """Return a schema or type as a record: fields by name, items of a list, and at the ends the types."""
    if isinstance(kind, pa.Schema | pa.StructType):
        return {field.name: _as_record(field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_as_record(kind.value_type)] * ITEMS
    return kind


def _values(frame: pl.DataFrame, way: Steps) -> Column:
    values = frame[str(way[0])]
    for at, step in enumerate(way[1:], 1):
        if isinstance(step, str) and isinstance(values.dtype, pl.Struct):
            values = values.struct.field(step)
        elif isinstance(step, int) and isinstance(values.dtype, pl.List):
            values = values.list.get(step, null_on_oob=True)
        else:  # a map, a text that holds JSON, or what the way does not lead through
            return values_at(_listed(values), way[at:])
    return values if values.dtype == pl.String else _listed(values)


def _listed(values: pl.Series) -> list[Any]:
    """Return the values; in the place of one that Python cannot hold, as a day after the year 9999, its type."""
    try:
        return values.to_list()
    except (ValueError, OverflowError):
        half = len(values) // 2
        return [*_listed(values[:half]), *_listed(values[half:])] if half else [values.dtype]


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in the place of text."""
    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if pa.types.is_map(kind):  # not the keys, by which values are looked up
        return pa.map_(kind.key_type, _as_bytes(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_dictionary(kind):
        return _as_bytes(kind.value_type)
    return pa.binary() if any(is_text(kind) for is_text in TEXT[:3]) else kind


def _check_text(field: str, way: Steps, kind: Any) -> None:
    """Raise ShardFault where a column of this type holds no text; anything may be no date."""
    if isinstance(kind, Unread):  # the values tell
        return
    plain = isinstance(kind, pa.DataType)
    text = plain and any(is_text(kind) for is_text in TEXT)
    if not text and field != "date" and not (plain and field == "id" and pa.types.is_integer(kind)):
        holds = kind if plain else "structs or lists"
        raise ShardFault("wrong_type", f"{'.'.join(map(str, way))}: expected text, the column holds {holds}")


def _column(way: Steps, record: Any) -> str:
    """Name a column as pyarrow selects it: fields of structs apart, lists and maps whole."""
    names: list[str] = []
    for step in way:
        if not isinstance(record, dict):
            break
        names.append(str(step))
        record = record[step]
    return ".".join(names)
