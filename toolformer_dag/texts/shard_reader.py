"""Read the documents of a shard, a file of a corpus: Parquet, or JSON lines, plain or compressed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from typing import cast

from toolformer_dag.settings.setting_types import to_printable
from toolformer_dag.texts.columns import Batch, iter_document_batches
from toolformer_dag.texts.compression import (
    HEAD_BYTES,
    describe_unreadable_file,
    find_compression,
    iter_decompressed_blocks,
)
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.guarded_batches import guard_from_library_errors
from toolformer_dag.texts.readers import json_lines, parquet_shards, web_archives
from toolformer_dag.texts.readers.json_lines import iter_json_batches
from toolformer_dag.texts.readers.parquet_shards import iter_parquet_batches, require_whole_parquet
from toolformer_dag.texts.readers.web_archives import refuse_web_archive
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

READ_BUFFER_BYTES = 1 << 18
"""Bytes that are read of a file at a time."""
PARQUET_ENDING = ".parquet"
"""The ending of a Parquet file's name."""
COMPRESSION_BY_ENDING = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip"}
"""The ending of a compressed file's name -> its compression."""


@dataclass(frozen=True, slots=True)
class Container:
    """A form that the content of a file may have after it is decompressed, such as JSON lines."""

    iter_batches: Callable[[Iterable[bytes], FormatChoice], Iterator[Batch]]
    """Reads the records as batches of raw columns, from content in blocks and the format that the settings name."""
    endings: tuple[str, ...] = ()
    """The endings of names of files in this form, before that of a compression. Files of a folder with other endings
    are not read."""
    magic_bytes: bytes = b""
    """The bytes by which this form is recognized. They stand at byte `magic_offset`. b"" fits any content."""
    magic_offset: int = 0
    format_name: str = ""
    """The name of the format of its records where the form itself says which keys they have, as a web archive does;
    `corpus.format` and `corpus.fields` do not count for it. "" where the settings or the records say it."""


CONTAINERS = (
    Container(refuse_web_archive, magic_bytes=web_archives.WARC_MAGIC, format_name=web_archives.WARC_FORMAT_NAME),
    Container(iter_json_batches, endings=json_lines.JSON_FILE_ENDINGS),
)
"""The first one whose magic fits reads the content. JSON lines have no magic, so they are last. Parquet is not among
them, because it is read from the file itself and is not compressed as a whole."""
CONTAINER_ENDINGS = tuple(ending for container in CONTAINERS for ending in container.endings)
"""The endings of names of files that a container reads, before that of a compression."""


def add_compression_endings(file_endings: Iterable[str]) -> tuple[str, ...]:
    """Add the endings of compressed files to endings of file names.

    Example:
        (".json",) becomes (".json", ".json.zst", ".json.zstd", ".json.gz").
    """
    endings = []
    for file_ending in file_endings:
        endings.append(file_ending)
        endings += [file_ending + compression_ending for compression_ending in COMPRESSION_BY_ENDING]
    return tuple(endings)


def iter_shard_batches(path: Path | str, format_choice: FormatChoice | None = None) -> Iterator[Batch]:
    """Read the documents of a shard in batches (DOCUMENT_COLUMNS), with the rejections of lines without a document.

    The memory needed is a few blocks of 16 MB, and 100 bytes per document for its digest.

    Args:
        path: The file.
        format_choice: The format that the settings name. It is recognized if this is None.

    Raises:
        ShardFault: Nothing of the shard may be used, although earlier documents were yielded:
            - it is damaged (see `iter_decompressed_blocks`, `require_whole_parquet` and
              `iter_parquet_batches`)
            - its form is not known: unknown_format, missing_field, not_json_lines, web_archive, unsupported_compression
            - it is not what its name says: not_gzip, not_zstd, not_parquet
            - a library fails while it is read: unreadable_data
            - it is empty: empty_shard
        ShardError: The file is missing or cannot be read.
    """
    path = Path(path)
    format_choice = format_choice or FormatChoice()

    try:
        with BufferedReader(cast(RawIOBase, path.open("rb", buffering=0)), READ_BUFFER_BYTES) as stream:
            raw_batches = _iter_raw_batches(path, stream, format_choice)  # the fields of each record as text
            documents = iter_document_batches(raw_batches)  # without blank and repeated texts
            yield from guard_from_library_errors(documents)
    except OSError as error:
        reason = error.strerror or error
        raise ShardError(
            f"shard {to_printable(path)} cannot be read ({reason}); correct its path, or the disk"
        ) from error


def _iter_raw_batches(path: Path, stream: "BufferedReader[RawIOBase]", format_choice: FormatChoice) -> Iterator[Batch]:
    """Read the records of an opened shard as batches of raw columns (RAW_COLUMNS).

    Args:
        path: The path of the file.
        stream: The file, at its beginning.
        format_choice: What the settings say about the format.

    Raises:
        ShardFault: The shard is damaged, or its form is not known. This may also show while the batches are read.
    """
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    if head.startswith(parquet_shards.PARQUET_MAGIC):
        source = require_whole_parquet(path, stream)
        return iter_parquet_batches(source, format_choice)

    compression = find_readable_compression(head, path.suffix)
    blocks = iter_decompressed_blocks(stream, compression)
    return _iter_container_batches(blocks, format_choice)


def _iter_container_batches(blocks: Iterator[bytes], format_choice: FormatChoice) -> Iterator[Batch]:
    """Read decompressed content, in the form (container) that its first bytes show, as batches of raw columns.

    Args:
        blocks: The content in blocks.
        format_choice: What the settings say about the format. It is ignored if the form itself has a format.
    """
    first_block = next(blocks, b"")
    all_blocks = chain([first_block], blocks)

    container = _find_container(first_block)
    if container.format_name:
        format_choice = FormatChoice(container.format_name)
    return container.iter_batches(all_blocks, format_choice)


def _find_container(first_block: bytes) -> Container:
    """Find the first of CONTAINERS whose magic bytes a content has. The last one fits any content."""
    fitting_containers = []
    for container in CONTAINERS:
        if first_block.startswith(container.magic_bytes, container.magic_offset):
            fitting_containers.append(container)
    return fitting_containers[0]


def find_readable_compression(first_bytes: bytes, suffix: str) -> str | None:
    """Find out how a file is compressed that is not Parquet.

    Args:
        first_bytes: The first bytes of the file.
        suffix: The ending of its name, such as ".gz".

    Returns:
        "gzip", "zstd", or None for a file that is not compressed.

    Raises:
        ShardFault: The compression cannot be read (unsupported_compression), or only the name says that the
            file is compressed or Parquet (not_gzip, not_zstd, not_parquet).
    """
    compression = find_compression(first_bytes)
    if compression not in (None, "gzip", "zstd"):
        detail = f"the file is {compression}; unpack it or compress it with gzip or zstd"
        raise ShardFault("unsupported_compression", detail)

    is_empty = not first_bytes
    if is_empty:
        return None

    if compression is None and suffix in COMPRESSION_BY_ENDING:
        reason = f"not_{COMPRESSION_BY_ENDING[suffix]}"
        raise ShardFault(reason, f"the file is named {suffix} but {_describe_first_bytes(first_bytes)}")

    # This holds for compressed files too, because a Parquet file is never compressed as a whole.
    if suffix == PARQUET_ENDING:
        raise ShardFault("not_parquet", f"the file is named .parquet but {_describe_first_bytes(first_bytes)}")

    return compression


def _describe_first_bytes(first_bytes: bytes) -> str:
    """Describe a file by its first bytes: "is HTML or XML", or "begins with b'abcd'" if they do not show what it is."""
    description = describe_unreadable_file(first_bytes)
    return f"is {description}" if description else f"begins with {first_bytes[:4]!r}"
