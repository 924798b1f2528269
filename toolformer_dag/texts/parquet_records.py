"""Parquet and Arrow tables -> raw columns, row groups by batches."""

from collections.abc import Container, Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from polars.exceptions import PolarsError

from toolformer_dag.texts.columns import RAW, Batch, Rejection
from toolformer_dag.texts.compression import ShardFault
from toolformer_dag.texts.formats import FormatChoice, FormatError, Layout, Steps, layout_of_schema

MAGIC = b"PAR1"
BATCH_BYTES = 1 << 23
BATCH_ROWS = 4096
READ_BYTES = 1 << 20
TEXTS = (pl.String, pl.Categorical, pl.Enum, pl.Null)


class ArrowRecords:
    """The records of Arrow tables of one schema as raw columns. `layout` is known after `look`."""

    def __init__(self, choice: FormatChoice) -> None:
        self._choice = choice
        self._layout: Layout | None = None
        self._rows = 0

    @property
    def layout(self) -> Layout | None:
        """Where the columns lie."""
        return self._layout

    def look(self, schema: pa.Schema) -> Layout:
        """Find the columns. Raises ShardFault: unknown_format, missing_field."""
        try:
            self._layout = layout_of_schema(self._choice, schema)
        except FormatError as error:
            raise ShardFault(error.reason, str(error)) from error
        return self._layout

    def batch(self, table: pa.Table) -> Batch:
        """Return the next rows as raw columns. Refused: wrong_type (null where text is needed), not_utf8.

        Raises ShardFault wrong_type where a column can hold no text, unless the field is optional: it is null then.
        """
        layout = self._layout or self.look(table.schema)
        lines = pl.int_range(self._rows + 1, self._rows + 1 + table.num_rows, eager=True)
        self._rows += table.num_rows
        ignored: dict[str, None] = {}
        columns = {field: _column(table, layout, field, ignored) for field in RAW if field != "line"}
        frame = pl.DataFrame({"line": lines, **{field: found for field, (found, _) in columns.items()}})
        refused = pl.zeros(table.num_rows, pl.Boolean, eager=True)
        rejections: list[Rejection] = []
        for field in layout.required:
            found, invalid = columns[field]
            for rows, reason, why in (
                (invalid, "not_utf8", "the text is not UTF-8"),
                (found.is_null() & ~invalid, "wrong_type", "expected text, found null"),
            ):
                detail = f"{layout.paths(field)}: {why}"
                rejections += [Rejection(line, reason, detail) for line in lines.filter(rows & ~refused)]
                refused = refused | rows
        return Batch(frame.filter(~refused) if rejections else frame, tuple(rejections), tuple(ignored))


def parquet_batches(path: Path | str, records: ArrowRecords) -> Iterator[Batch]:
    """Yield the rows of a Parquet file. Memory: pages and a batch, whatever the size of file and row groups.

    Raises ShardFault: corrupt_parquet, truncated_parquet, empty_shard, and those of ArrowRecords; OSError where the
    file cannot be read. Checksums of pages are verified where the writer made them; most make none.
    """
    try:
        with pq.ParquetFile(
            path, memory_map=False, pre_buffer=False, buffer_size=READ_BYTES, page_checksum_verification=True
        ) as file:
            layout = records.look(file.schema_arrow)
            columns = sorted({_name(way) for ways in layout.places.values() for way in ways})
            for batch in file.iter_batches(_rows(file.metadata), columns=columns, use_threads=False):
                yield records.batch(pa.Table.from_batches([batch]))
            if not file.metadata.num_rows:
                raise ShardFault("empty_shard", "the shard has no rows")
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damaged(error) from error
    except (pa.ArrowException, PolarsError, EOFError) as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> ShardFault:
    return ShardFault(
        "corrupt_parquet", f"{str(error).splitlines()[0] if str(error) else error!r}: no row of it is used"
    )


def _rows(metadata: pq.FileMetaData) -> int:
    """Return how many rows take about BATCH_BYTES; in the largest row group, for all."""
    sizes = [
        (metadata.row_group(i).total_byte_size, metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)
    ]
    each = max((size / rows for size, rows in sizes if rows), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(each, 1.0))))


def _name(way: Steps) -> str:
    """Name a column as pyarrow selects it: fields of structs apart, lists whole."""
    names: list[str] = []
    for step in way:
        if isinstance(step, int):
            break
        names.append(step)
    return ".".join(names)


def _column(table: pa.Table, layout: Layout, field: str, ignored: dict[str, None]) -> tuple[pl.Series, pl.Series]:
    """Return the text of a field, null where there is none, and which rows are not UTF-8."""
    ways = layout.places[field]
    found = pl.repeat(None, table.num_rows, dtype=pl.String, eager=True)
    invalid = pl.zeros(table.num_rows, pl.Boolean, eager=True)
    for way in ways:
        text, wrong = _text(_values(table, way), way, field, layout.strict, ignored)
        found = text if way == ways[0] else pl.select(pl.coalesce(pl.lit(found), pl.lit(text))).to_series()
        invalid = invalid | wrong
    invalid &= found.is_null()
    if field not in layout.required and invalid.any():
        ignored[f"{layout.paths(field)}: expected text, found bytes that are not UTF-8"] = None
    return found, invalid


def _values(table: pa.Table, way: Steps) -> pl.Series:
    """Return what lies at the end of a way. It is followed in Arrow: Polars takes no struct with text not UTF-8."""
    column = table.column(str(way[0])).combine_chunks()
    for step in way[1:]:
        column = _field(column, step) if isinstance(step, str) else _item(column, step)
    return pl.Series(pl.from_arrow(_checked(column)))


def _field(structs: pa.StructArray, name: str) -> pa.Array:
    return pc.struct_field(structs, [structs.type.get_field_index(name)])


def _item(lists: pa.ListArray, number: int) -> pa.Array:
    """Return one item of each list, null where it is too short; Arrow's own function raises then."""
    starts = lists.offsets[:-1]
    places = pc.if_else(pc.greater(pc.list_value_length(lists), number), pc.add(starts, number), None)
    return lists.values.take(places)


def _checked(column: pa.Array) -> pa.Array:
    """Return text as bytes where some of it is not UTF-8, which writers may leave in a column of text."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return column.cast(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    return column


def _text(
    values: pl.Series, way: Steps, field: str, strict: Container[str], ignored: dict[str, None]
) -> tuple[pl.Series, pl.Series]:
    none = pl.zeros(len(values), pl.Boolean, eager=True)
    if values.dtype in TEXTS:
        return values.cast(pl.String), none
    if values.dtype == pl.Binary:
        try:
            return values.cast(pl.String), none
        except PolarsError:
            text = pl.Series([_decoded(value) for value in values], dtype=pl.String)
            return text, text.is_null() & values.is_not_null()
    if values.dtype.is_integer() and (field == "id" or field not in strict):
        return values.cast(pl.String), none
    if field == "date":
        return (
            values.dt.strftime("%Y-%m-%d")
            if values.dtype in (pl.Date, pl.Datetime)
            else values.cast(pl.String, strict=False)
        ), none
    wrong = f"{'.'.join(map(str, way))}: expected text, the column holds {values.dtype}"
    if field in strict:
        raise ShardFault("wrong_type", wrong)
    if values.null_count() < len(values):
        ignored[wrong] = None
    return pl.repeat(None, len(values), dtype=pl.String, eager=True), none


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
