"""Parquet files -> raw columns, read by batches of rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from toolformer_dag.settings.setting_types import to_printable
from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.readers.arrow_tables import FIRST_ROW_COUNT, TableRecords, list_columns_with_hidden_fields
from toolformer_dag.texts.shard_faults import ShardFault

PARQUET_MAGIC = b"PAR1"
"""The first and the last bytes of a Parquet file."""
MIN_FILE_BYTES = 12
"""Bytes of the shortest Parquet file: PARQUET_MAGIC twice, and the length of its footer."""
TARGET_BATCH_BYTES = 1 << 23
"""About the uncompressed bytes of a batch."""
MAX_BATCH_ROWS = 4096
"""Rows of a batch at most."""
READ_BUFFER_BYTES = 1 << 20
"""Bytes that are read of a column at a time."""


def require_whole_parquet(path: Path, stream: IO[bytes]) -> Path | IO[bytes]:
    """Check that the end of a Parquet file is there, and return what pyarrow can open.

    Args:
        path: The path of the file.
        stream: The opened file. Its position is moved.

    Returns:
        The path of the file, or the opened file if its path is not UTF-8.

    Raises:
        ShardFault: The end of the file is missing (truncated_parquet).
    """
    size = stream.seek(0, 2)
    stream.seek(max(0, size - len(PARQUET_MAGIC)))
    if size < MIN_FILE_BYTES or stream.read() != PARQUET_MAGIC:
        raise ShardFault("truncated_parquet", "the file has no Parquet footer: no row of it is used")

    is_utf8 = to_printable(path) == str(path)  # `to_printable` escapes what is not UTF-8
    return path if is_utf8 else stream


def iter_parquet_batches(source: Path | str | IO[bytes], format_choice: FormatChoice) -> Iterator[Batch]:
    """Read the rows of a Parquet file as batches of raw columns. Only one batch is in memory at a time.

    Raises:
        ShardFault: The file is damaged (corrupt_parquet), has no rows (empty_shard), or `TableRecords` cannot read it.
        OSError: The file cannot be read.
    """
    with open_parquet(source) as file:
        # The first rows show fields that the schema does not, such as those of texts that hold JSON.
        records = TableRecords(file.schema_arrow, format_choice, _iter_first_tables(file, format_choice))

        for batch in file.iter_batches(estimate_rows_per_batch(file), columns=records.column_names, use_threads=False):
            yield records.read_batch(pa.Table.from_batches([batch]))

        if not file.metadata.num_rows:
            raise ShardFault("empty_shard", "the shard has no rows")


@contextmanager
def open_parquet(source: Path | str | IO[bytes]) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. If it has checksums of its pages, they are verified.

    Raises:
        ShardFault: The file is damaged (corrupt_parquet). This may also show inside the `with` block.
        OSError: The file cannot be read.
    """
    try:
        with pq.ParquetFile(
            source, memory_map=False, pre_buffer=False, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True
        ) as file:
            yield file
    except (OSError, pa.ArrowException, EOFError) as error:
        is_system_error = isinstance(error, OSError) and error.errno is not None  # pyarrow's errors have no number
        if is_system_error:
            raise

        message = str(error) or repr(error)
        first_line = message.splitlines()[0]
        raise ShardFault("corrupt_parquet", f"{first_line}: no row of it is used") from error


def _iter_first_tables(parquet_file: pq.ParquetFile, format_choice: FormatChoice) -> Iterator[pa.Table]:
    """Yield the rows of a file, 100 at a time, in the columns that may have fields which the schema does not show."""
    columns = list_columns_with_hidden_fields(parquet_file.schema_arrow, format_choice)
    for batch in parquet_file.iter_batches(FIRST_ROW_COUNT, columns=columns, use_threads=False):
        yield pa.Table.from_batches([batch])


def estimate_rows_per_batch(parquet_file: pq.ParquetFile) -> int:
    """Estimate how many rows have about TARGET_BATCH_BYTES, at least 1 and at most MAX_BATCH_ROWS.

    The size of a row is taken from the row group whose rows are the largest on average.
    """
    largest_row_bytes = 1.0
    for group_index in range(parquet_file.metadata.num_row_groups):
        row_group = parquet_file.metadata.row_group(group_index)
        if row_group.num_rows:
            mean_row_bytes = row_group.total_byte_size / row_group.num_rows
            largest_row_bytes = max(largest_row_bytes, mean_row_bytes)

    row_count = int(TARGET_BATCH_BYTES / largest_row_bytes)
    return max(1, min(MAX_BATCH_ROWS, row_count))
