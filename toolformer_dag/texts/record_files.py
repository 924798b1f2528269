"""The records of a file: what stands in each line, in each row, or in each item of a JSON list.

For records whose form is read later, such as conversations. Documents are read by `shard_reader`, which knows their
columns; both open a file in the same way: by its first bytes, decompressed in blocks, one pass.
"""

from collections.abc import Iterable, Iterator
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from toolformer_dag.files import require_regular
from toolformer_dag.settings.setting_types import printable
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.compression import HEAD_BYTES, blocks, kind_in_words
from toolformer_dag.texts.exact_json import exact_value
from toolformer_dag.texts.guarded_batches import guarded
from toolformer_dag.texts.readers import parquet_shards
from toolformer_dag.texts.readers.arrow_tables import table_rows
from toolformer_dag.texts.readers.json_lines import line_batches
from toolformer_dag.texts.readers.parquet_shards import opened_parquet, rows_per_batch, whole_parquet
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.texts.shard_reader import ENDINGS, NAMED, PARQUET, READ_BYTES, compression

LONGEST_LINE = 1 << 26
"""The most bytes of a line, 64 MB: a conversation holds whole files that its tools have read."""
LARGEST_DOCUMENT = 1 << 28
"""The most bytes of a file that is one JSON document, 256 MB: it is parsed as a whole. JSON lines have no limit."""
RECORD_ENDINGS = (*(f"{ending}{packed}" for ending in ENDINGS for packed in ("", *NAMED)), PARQUET)
"""How names of files with records end."""


class NumberedRecord(NamedTuple):
    """A record of a file.

    - `number`: its line or row, or its place in a JSON list, from 1
    - `value`: what stands there: parsed JSON, or a row of a table as JSON has it
    """

    number: int
    value: Any


def file_records(path: Path) -> Iterator[NumberedRecord | Rejection]:
    """Yield the records of a file in their order, and in place of a line that is not JSON why it is not.

    The file is Parquet, JSON lines, or one JSON document: a list of records, or a record; plain, or compressed with
    gzip or zstd. Blank lines are passed over. Reasons of lines: not_json, not_utf8, line_too_long.

    Memory: a block of 16 MB and a line; of a JSON document all of it.

    Raises ShardFault, after the records before the fault, where nothing of the file may be used: it is damaged, in no
    form that is read (not_json_lines), or too large a document (document_too_large). Raises ShardError where it is
    missing or unreadable, which may be otherwise another time.
    """
    try:
        require_regular(path)
        with BufferedReader(cast(RawIOBase, path.open("rb", buffering=0)), READ_BYTES) as stream:
            head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
            if head.startswith(parquet_shards.MAGIC):
                yield from guarded(_rows(whole_parquet(path, stream)))
            else:
                yield from guarded(_values(blocks(stream, compression(head, path.suffix))))
    except OSError as error:
        raise ShardError(
            f"{printable(path)} cannot be read ({error.strerror or error}); correct its path, or the disk"
        ) from error


def _rows(source: Path | IO[bytes]) -> Iterator[NumberedRecord]:
    """Yield the rows of a Parquet file. Raises ShardFault."""
    number = 0
    with opened_parquet(source) as file:
        for batch in file.iter_batches(rows_per_batch(file), use_threads=False):
            for row in table_rows(batch):
                number += 1
                yield NumberedRecord(number, row)


def _values(content: Iterator[bytes]) -> Iterator[NumberedRecord | Rejection]:
    """Yield the records of decompressed content in blocks, which is JSON lines or one JSON document.

    Content that begins with a line which holds an object is JSON lines. Other content is read as a whole first, and as
    lines where that is not JSON.
    """
    first_block = next(content, b"")
    kind = kind_in_words(first_block[:HEAD_BYTES])
    if kind is not None:
        raise ShardFault("not_json_lines", f"the content is {kind}")
    if _begins_with_object(first_block):
        yield from _lines(chain([first_block], content))
        return
    document, rest = _held(first_block, content)
    is_whole = not rest
    try:
        value = exact_value(document) if is_whole else None
    except ValueError:
        is_whole = False
    if is_whole:
        records = value if isinstance(value, list) else [value]
        for number, record in enumerate(records, 1):
            yield NumberedRecord(number, record)
    elif rest and document.lstrip().startswith(b"["):
        raise ShardFault(
            "document_too_large",
            f"a JSON list of more than {LARGEST_DOCUMENT:,} bytes; write a record per line, as `jq -c '.[]'` does",
        )
    else:
        yield from _lines(chain([document], rest, content))


def _begins_with_object(block: bytes) -> bool:
    """Return whether the first line of a block that is not blank holds a JSON object."""
    first_line, _, _ = block.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    try:
        return first_line.startswith(b"{") and isinstance(exact_value(first_line), dict)
    except ValueError:
        return False


def _held(first_block: bytes, content: Iterator[bytes]) -> tuple[bytes, list[bytes]]:
    """Return the content up to LARGEST_DOCUMENT bytes, and the block that goes beyond it, if there is one."""
    held = [first_block]
    total_bytes = len(first_block)
    for block in content:
        total_bytes += len(block)
        if total_bytes > LARGEST_DOCUMENT:
            return b"".join(held), [block]
        held.append(block)
    return b"".join(held), []


def _lines(content: Iterable[bytes]) -> Iterator[NumberedRecord | Rejection]:
    """Yield what stands in each line that is not blank, or why it is no record."""
    number = 0
    for lines in line_batches(content, LONGEST_LINE):
        for line in lines:
            number += 1
            if len(line) >= LONGEST_LINE:
                yield Rejection(number, "line_too_long", f"{LONGEST_LINE:,} bytes or more")
            elif line.strip():
                yield _line_record(number, line)


def _line_record(number: int, line: bytes) -> NumberedRecord | Rejection:
    """Return the record of a line, or why it holds none."""
    try:
        return NumberedRecord(number, exact_value(line))
    except UnicodeDecodeError as error:
        return Rejection(number, "not_utf8", str(error))
    except ValueError as error:
        return Rejection(number, "not_json", str(error))
