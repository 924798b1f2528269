"""Parquet and Arrow tables -> raw columns, row groups by batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.compression import ShardFault
from toolformer_dag.texts.formats import MISSING, FormatChoice, Steps, value_at
from toolformer_dag.texts.records import Records

MAGIC = b"PAR1"
BATCH_BYTES = 1 << 23
BATCH_ROWS = 4096
READ_BYTES = 1 << 20
ITEMS = 100
"""A path may name one of so many first items of a list."""
TEXT = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null, pa.types.is_dictionary),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
)


class TableRecords(Records):
    """The records of Arrow tables of one schema."""

    def __init__(self, choice: FormatChoice) -> None:
        super().__init__(choice, absent=None)
        self._rows = 0

    def look_at(self, schema: pa.Schema) -> list[str]:
        """Find the columns that are read. Raises ShardFault, also where one can hold no text: wrong_type."""
        record = _as_record(schema)
        layout = self.look([record])
        ways = [(field, way) for field in layout.places for way in layout.places[field]]
        there = [(field, way) for field, way in ways if value_at(record, way) is not MISSING]
        for field, way in there:
            kind = value_at(record, way)
            if field in layout.strict - {"date"} and not _holds_text(kind, field):
                holds = kind if isinstance(kind, pa.DataType) else "structs or lists"
                raise ShardFault("wrong_type", f"{'.'.join(map(str, way))}: expected text, the column holds {holds}")
        return sorted({_column(way) for _, way in there})

    def rows(self, table: pa.Table) -> Batch:
        """Return the next rows as raw columns."""
        try:
            found = table.to_pylist()
        except UnicodeDecodeError:
            kinds = [field.with_type(_as_bytes(field.type)) for field in table.schema]
            found = table.cast(pa.schema(kinds)).to_pylist()
        first = self._rows + 1
        self._rows += len(found)
        return self.batch(enumerate(found, first))


def parquet_batches(path: Path | str, records: TableRecords) -> Iterator[Batch]:
    """Yield the rows of a Parquet file. Memory: pages and a batch, whatever the size of file and row groups.

    Raises ShardFault: corrupt_parquet, truncated_parquet, empty_shard, and those of TableRecords; OSError where the
    file cannot be read. Checksums of pages are verified where the writer made them; most make none.
    """
    try:
        with pq.ParquetFile(
            path, memory_map=False, pre_buffer=False, buffer_size=READ_BYTES, page_checksum_verification=True
        ) as file:
            columns = records.look_at(file.schema_arrow)
            for batch in file.iter_batches(_batch_rows(file.metadata), columns=columns, use_threads=False):
                yield records.rows(pa.Table.from_batches([batch]))
            if not file.metadata.num_rows:
                raise ShardFault("empty_shard", "the shard has no rows")
    except (OSError, pa.ArrowException, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        told = str(error).splitlines()[0] if str(error) else repr(error)
        raise ShardFault("corrupt_parquet", f"{told}: no row of it is used") from error


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Return how many rows take about BATCH_BYTES; in the largest row group, for all."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    each = max((group.total_byte_size / group.num_rows for group in groups if group.num_rows), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(each, 1.0))))


def _as_record(kind: Any) -> Any:
    """Return a schema or type as a record: fields by name, items of a list, and at the ends the types."""
    if isinstance(kind, pa.Schema | pa.StructType):
        return {field.name: _as_record(field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_as_record(kind.value_type)] * ITEMS
    return kind


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in the place of text, which writers may leave with bytes that are not UTF-8."""
    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return pa.binary() if any(is_text(kind) for is_text in TEXT[:3]) else kind


def _holds_text(kind: Any, field: str) -> bool:
    if isinstance(kind, dict | list):
        return False
    return any(is_text(kind) for is_text in TEXT) or (field == "id" and pa.types.is_integer(kind))


def _column(way: Steps) -> str:
    """Name a column as pyarrow selects it: fields of structs apart, lists whole."""
    names = list(way)
    return ".".join(map(str, names[: next((at for at, step in enumerate(names) if isinstance(step, int)), len(names))]))
