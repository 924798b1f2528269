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
from toolformer_dag.texts.readers.arrow_tables import FIRST_ROWS, TableRecords, list_columns_with_hidden_fields
from toolformer_dag.texts.shard_faults import ShardFault

MAGIC = b"PAR1"
"""The first and the last bytes of a Parquet file."""
SHORTEST_FILE_BYTES = 12
"""Bytes of the shortest Parquet file: MAGIC twice, and the length of its footer."""
BATCH_BYTES = 1 << 23
"""About the uncompressed bytes of a batch."""
BATCH_ROWS = 4096
"""Rows of a batch at most."""
READ_BYTES = 1 << 20
"""Bytes that are read of a column at a time."""


def require_whole_parquet(path: Path, stream: IO[bytes]) -> Path | IO[bytes]:
    """Check that the end of a Parquet file is there, and return what pyarrow can open.

    Returns:
        The path of the file, or the opened file if its path is not UTF-8.

    Raises:
        ShardFault: The end of the file is missing (truncated_parquet).
    """
    size = stream.seek(0, 2)
    stream.seek(max(0, size - len(MAGIC)))
    if size < SHORTEST_FILE_BYTES or stream.read() != MAGIC:
        raise ShardFault("truncated_parquet", "the file has no Parquet footer: no row of it is used")

    is_utf8 = to_printable(path) == str(path)  # `to_printable` escapes what is not UTF-8
    return path if is_utf8 else stream


def iter_parquet_batches(source: Path | str | IO[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Read the rows of a Parquet file as batches of raw columns. Only one batch is in memory at a time.

    Raises:
        ShardFault: The file is damaged (corrupt_parquet), has no rows (empty_shard), or `TableRecords` cannot read it.
        OSError: The file cannot be read.
    """
    with open_parquet(source) as file:
        # The first rows show fields that the schema does not, such as those of texts that hold JSON.
        records = TableRecords(file.schema_arrow, choice, _iter_first_tables(file, choice))

        for batch in file.iter_batches(estimate_rows_per_batch(file), columns=records.columns, use_threads=False):
            yield records.batch(pa.Table.from_batches([batch]))

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
            source, memory_map=False, pre_buffer=False, buffer_size=READ_BYTES, page_checksum_verification=True
        ) as file:
            yield file
    except (OSError, pa.ArrowException, EOFError) as error:
        is_system_error = isinstance(error, OSError) and error.errno is not None  # pyarrow's errors have no number
        if is_system_error:
            raise

        message = str(error) or repr(error)
        first_line = message.splitlines()[0]
        raise ShardFault("corrupt_parquet", f"{first_line}: no row of it is used") from error


def _iter_first_tables(file: pq.ParquetFile, choice: FormatChoice) -> Iterator[pa.Table]:
    """Yield the file's rows from the beginning, in the columns whose content the schema does not show."""
    columns = list_columns_with_hidden_fields(file.schema_arrow, choice)
    for batch in file.iter_batches(FIRST_ROWS, columns=columns, use_threads=False):
        yield pa.Table.from_batches([batch])


def estimate_rows_per_batch(file: pq.ParquetFile) -> int:
    """Estimate how many rows have about BATCH_BYTES, from 1 to BATCH_ROWS.

    The size of a row is its mean in the row group with the largest rows.
    """
    largest_row = 1.0  # bytes

    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if group.num_rows:
            largest_row = max(largest_row, group.total_byte_size / group.num_rows)

    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / largest_row)))
