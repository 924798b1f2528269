"""Read the records of a file: its lines of JSON, its rows, or the items of its JSON list.

Records may have any form, such as conversations. `shard_reader` reads documents, which have fixed columns. Both
recognize a file by its first bytes, and decompress it in blocks, in one pass.
"""

from collections.abc import Iterable, Iterator
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from toolformer_dag.files import require_regular_file
from toolformer_dag.settings.setting_types import to_printable
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.compression import HEAD_BYTES, describe_unreadable_file, iter_decompressed_blocks
from toolformer_dag.texts.exact_json import parse_exact_json
from toolformer_dag.texts.guarded_batches import guard_from_library_errors
from toolformer_dag.texts.readers import json_lines, parquet_shards
from toolformer_dag.texts.readers.arrow_tables import iter_table_rows
from toolformer_dag.texts.readers.json_lines import iter_line_batches
from toolformer_dag.texts.readers.parquet_shards import estimate_rows_per_batch, open_parquet, require_whole_parquet
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.texts.shard_reader import (
    PARQUET_ENDING,
    READ_BUFFER_BYTES,
    add_compression_endings,
    find_readable_compression,
)

MAX_LINE_BYTES = 1 << 26
"""The most bytes of a line, 64 MB: a conversation may contain whole files that its tools have read."""
MAX_DOCUMENT_BYTES = 1 << 28
"""The most bytes of a file that is a single JSON document, 256 MB, because it is parsed as a whole."""
RECORD_ENDINGS = (*add_compression_endings(json_lines.JSON_FILE_ENDINGS), PARQUET_ENDING)
"""How names of files with records end: JSON, compressed or not, and Parquet. A corpus may have other containers too."""


class NumberedRecord(NamedTuple):
    """A record of a file.

    Attributes:
        number: The number of its line or row, or its number in a JSON list, from 1.
        value: The parsed JSON. For a row of a table, a dict with values of JSON.
    """

    number: int
    value: Any


def iter_file_records(path: Path) -> Iterator[NumberedRecord | Rejection]:
    """Read the records of a file in their order.

    The file is Parquet, JSON lines, or a single JSON document (a list of records, or one record). It may be compressed
    with gzip or zstd. Blank lines are skipped. The memory needed is a block of 16 MB and a line, or the whole file
    if it is a single JSON document.

    Yields:
        The records. In place of a line that is not a record, a Rejection (not_json, not_utf8 or line_too_long).

    Raises:
        ShardFault: Nothing of the file may be used, although earlier records were yielded:
            - it is damaged, or a library fails while it is read (unreadable_data)
            - it has none of these forms (not_json_lines)
            - it is a JSON list of more than MAX_DOCUMENT_BYTES (document_too_large)
        ShardError: The file is missing, or cannot be read at the moment.
    """
    try:
        require_regular_file(path)
        with BufferedReader(cast(RawIOBase, path.open("rb", buffering=0)), READ_BUFFER_BYTES) as stream:
            records = _iter_stream_records(path, stream)
            yield from guard_from_library_errors(records)  # errors of libraries become ShardFault
    except OSError as error:
        reason = error.strerror or error
        raise ShardError(f"{to_printable(path)} cannot be read ({reason}); correct its path, or the disk") from error


def _iter_stream_records(path: Path, stream: "BufferedReader[RawIOBase]") -> Iterator[NumberedRecord | Rejection]:
    """Read the records of an opened file. Its first bytes show whether it is Parquet or JSON.

    Args:
        path: The path of the file.
        stream: The file, at its beginning.

    Raises:
        ShardFault: The file cannot be used.
    """
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    if head.startswith(parquet_shards.PARQUET_MAGIC):
        yield from _iter_parquet_records(require_whole_parquet(path, stream))
    else:
        compression = find_readable_compression(head, path.suffix)
        blocks = iter_decompressed_blocks(stream, compression)
        yield from _iter_json_records(blocks)


def _iter_parquet_records(source: Path | IO[bytes]) -> Iterator[NumberedRecord]:
    """Read the rows of a Parquet file, numbered from 1.

    Raises:
        ShardFault: The file is damaged.
    """
    row_number = 0
    with open_parquet(source) as file:
        for batch in file.iter_batches(estimate_rows_per_batch(file), use_threads=False):
            for row in iter_table_rows(batch):
                row_number += 1
                yield NumberedRecord(row_number, row)


def _iter_json_records(blocks: Iterator[bytes]) -> Iterator[NumberedRecord | Rejection]:
    """Read the records of a file that holds JSON lines or a single JSON document.

    Args:
        blocks: The file in decompressed blocks.

    Raises:
        ShardFault: The file has another form (not_json_lines), or is a JSON list that is too large
            (document_too_large).
    """
    first_block = next(blocks, b"")

    description = describe_unreadable_file(first_block[:HEAD_BYTES])
    if description is not None:
        raise ShardFault("not_json_lines", f"the content is {description}")

    if _has_object_in_first_line(first_block):
        return _iter_line_records(chain([first_block], blocks))
    return _iter_document_or_line_records(first_block, blocks)


def _iter_document_or_line_records(
    first_block: bytes, remaining_blocks: Iterator[bytes]
) -> Iterator[NumberedRecord | Rejection]:
    """Read the records of a file that is parsed as a whole if it is not too large, and else line by line.

    Args:
        first_block: The first block of the file.
        remaining_blocks: The blocks after it.

    Raises:
        ShardFault: The file is a JSON list of more than MAX_DOCUMENT_BYTES (document_too_large).
    """
    # `beginning` has at most MAX_DOCUMENT_BYTES, and `next_block` is the block after it.
    beginning, next_block = _read_beginning(first_block, remaining_blocks)

    if next_block is None:  # `beginning` is the whole content
        return _iter_document_records(beginning)
    if beginning.lstrip().startswith(b"["):
        raise ShardFault(
            "document_too_large",
            f"a JSON list of more than {MAX_DOCUMENT_BYTES:,} bytes; write a record per line, as `jq -c '.[]'` does",
        )
    return _iter_line_records(chain([beginning, next_block], remaining_blocks))


def _iter_document_records(content: bytes) -> Iterator[NumberedRecord | Rejection]:
    """Read the items of a JSON list, or any other JSON value as the only record.

    Content that is not one JSON value is read as JSON lines.
    """
    try:
        document = parse_exact_json(content)
    except ValueError:
        yield from _iter_line_records([content])
        return

    records = document if isinstance(document, list) else [document]
    for number, record in enumerate(records, 1):
        yield NumberedRecord(number, record)


def _has_object_in_first_line(block: bytes) -> bool:
    """Check whether the first line of a block holds a JSON object. Blank lines and a byte order mark are skipped."""
    first_line, _, _ = block.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    if not first_line.startswith(b"{"):
        return False

    try:
        value = parse_exact_json(first_line)
    except ValueError:
        return False
    return isinstance(value, dict)


class _LoadedContent(NamedTuple):
    """The beginning of a file in memory, up to MAX_DOCUMENT_BYTES."""

    beginning: bytes
    next_block: bytes | None  # the block after it, which was read too; None if `beginning` is the whole content


def _read_beginning(first_block: bytes, remaining_blocks: Iterator[bytes]) -> _LoadedContent:
    """Read blocks of a file until it ends, or until MAX_DOCUMENT_BYTES would be exceeded.

    Args:
        first_block: The first block, which was read before.
        remaining_blocks: The blocks after it.
    """
    loaded_blocks = [first_block]
    total_bytes = len(first_block)

    for block in remaining_blocks:
        total_bytes += len(block)
        if total_bytes > MAX_DOCUMENT_BYTES:
            return _LoadedContent(b"".join(loaded_blocks), next_block=block)
        loaded_blocks.append(block)

    return _LoadedContent(b"".join(loaded_blocks), next_block=None)


def _iter_line_records(blocks: Iterable[bytes]) -> Iterator[NumberedRecord | Rejection]:
    """Read the record in each line, or find out why it holds none. Blank lines are skipped.

    Yields:
        A record with its line number, or a Rejection with the reason.
    """
    all_lines = chain.from_iterable(iter_line_batches(blocks, MAX_LINE_BYTES))
    for line_number, line in enumerate(all_lines, 1):
        if len(line) >= MAX_LINE_BYTES:
            yield Rejection(line_number, "line_too_long", f"{MAX_LINE_BYTES:,} bytes or more")
        elif line.strip():
            yield _parse_line_record(line_number, line)


def _parse_line_record(line_number: int, line: bytes) -> NumberedRecord | Rejection:
    """Parse a line of JSON.

    Args:
        line_number: The number of the line in the file, from 1.
        line: The line.

    Returns:
        Its record, or a Rejection if it is not UTF-8 (not_utf8) or not JSON (not_json).
    """
    try:
        return NumberedRecord(line_number, parse_exact_json(line))
    except UnicodeDecodeError as error:
        return Rejection(line_number, "not_utf8", str(error))
    except ValueError as error:
        return Rejection(line_number, "not_json", str(error))
