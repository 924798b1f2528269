"""Read the documents of a shard, a file of a corpus: Parquet, or JSON lines, plain or compressed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from typing import cast

from toolformer_dag.settings.setting_types import to_printable
from toolformer_dag.texts.columns import Batch, iter_document_batches
from toolformer_dag.texts.compression import HEAD_BYTES, blocks, describe_kind, find_compression
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.guarded_batches import guard_from_library_errors
from toolformer_dag.texts.readers import json_lines, parquet_shards, web_archives
from toolformer_dag.texts.readers.json_lines import iter_json_batches
from toolformer_dag.texts.readers.parquet_shards import iter_parquet_batches, require_whole_parquet
from toolformer_dag.texts.readers.web_archives import refuse_web_archive
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

READ_BYTES = 1 << 18
"""Bytes that are read of a file at a time."""
PARQUET = ".parquet"
"""The ending of a Parquet file's name."""
COMPRESSION_BY_ENDING = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip"}
"""The ending of a compressed file's name -> its compression."""


@dataclass(frozen=True, slots=True)
class Container:
    """A form that the content of a file may have after it is decompressed, such as JSON lines."""

    read: Callable[[Iterable[bytes], FormatChoice], Iterator[Batch]]
    """Reads the records as batches of raw columns, from content in blocks and the format that the settings name."""
    endings: tuple[str, ...] = ()
    """The endings of names of files in this form, before that of a compression. Files of a folder with other endings
    are not read."""
    magic: bytes = b""
    """The bytes by which this form is recognized. They stand at byte `magic_at`. b"" fits any content."""
    magic_at: int = 0
    format: str = ""
    """The name of the format of its records where the form itself says which keys they have, as a web archive does;
    `corpus.format` and `corpus.fields` do not count for it. "" where the settings or the records say it."""


CONTAINERS = (
    Container(refuse_web_archive, magic=web_archives.MAGIC, format=web_archives.FORMAT),
    Container(iter_json_batches, endings=json_lines.ENDINGS),
)
"""The first one whose magic fits reads the content. JSON lines have no magic, so they are last. Parquet is not among
them, because it is read from the file itself and is not compressed as a whole."""
ENDINGS = tuple(ending for container in CONTAINERS for ending in container.endings)
"""The endings of names of files that a container reads, before that of a compression."""


def with_compressions(endings: Iterable[str]) -> tuple[str, ...]:
    """Return endings of file names, each plain and compressed: ".json", ".json.zst", ".json.zstd", ".json.gz"."""
    return tuple(ending + compressed for ending in endings for compressed in ("", *COMPRESSION_BY_ENDING))


def iter_shard_batches(path: Path | str, choice: FormatChoice | None = None) -> Iterator[Batch]:
    """Read the documents of a shard in batches (columns.DOCUMENTS), with the rejections of lines without a document.

    The memory needed is a few blocks of 16 MB, and 100 bytes per document for its digest.

    Args:
        path: The file.
        choice: The format that the settings name. It is recognized if this is None.

    Raises:
        ShardFault: Nothing of the shard may be used, although earlier documents were yielded:
            - it is damaged (see `blocks`, `require_whole_parquet` and `iter_parquet_batches`)
            - its form is not known: unknown_format, missing_field, not_json_lines, web_archive, unsupported_compression
            - it is not what its name says: not_gzip, not_zstd, not_parquet
            - a library fails while it is read: unreadable_data
            - it is empty: empty_shard
        ShardError: The file is missing or cannot be read.
    """
    path = Path(path)
    choice = choice or FormatChoice()

    try:
        with BufferedReader(cast(RawIOBase, path.open("rb", buffering=0)), READ_BYTES) as stream:
            raw_batches = _iter_raw_batches(path, stream, choice)  # the fields of each record as text
            documents = iter_document_batches(raw_batches)  # without blank and repeated texts
            yield from guard_from_library_errors(documents)
    except OSError as error:
        reason = error.strerror or error
        raise ShardError(
            f"shard {to_printable(path)} cannot be read ({reason}); correct its path, or the disk"
        ) from error


def _iter_raw_batches(path: Path, stream: "BufferedReader[RawIOBase]", choice: FormatChoice) -> Iterator[Batch]:
    """Return the records of an opened shard as batches of raw columns (columns.RAW). Raises ShardFault."""
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    if head.startswith(parquet_shards.MAGIC):
        return iter_parquet_batches(require_whole_parquet(path, stream), choice)
    content = blocks(stream, compression(head, path.suffix))
    return _iter_container_batches(content, choice)


def _iter_container_batches(content: Iterator[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Read decompressed content with the first container whose magic bytes it has."""
    first_block = next(content, b"")
    whole_content = chain([first_block], content)

    fitting = [container for container in CONTAINERS if first_block.startswith(container.magic, container.magic_at)]
    container = fitting[0]

    if container.format:
        choice = FormatChoice(container.format)

    return container.read(whole_content, choice)


def compression(head: bytes, suffix: str) -> str | None:
    """Find out how a file is compressed that is not Parquet.

    Args:
        head: The first bytes of the file.
        suffix: The ending of its name, such as ".gz".

    Returns:
        "gzip", "zstd", or None for a file that is not compressed.

    Raises:
        ShardFault: The compression cannot be read (unsupported_compression), or only the name says that the
            file is compressed or Parquet (not_gzip, not_zstd, not_parquet).
    """
    kind = find_compression(head)
    if kind not in (None, "gzip", "zstd"):
        detail = f"the file is {kind}; unpack it or compress it with gzip or zstd"
        raise ShardFault("unsupported_compression", detail)

    if not head:  # an empty file
        return None

    if kind is None and suffix in COMPRESSION_BY_ENDING:
        raise ShardFault(
            f"not_{COMPRESSION_BY_ENDING[suffix]}", f"the file is named {suffix} but {_describe_head(head)}"
        )

    if suffix == PARQUET:  # compressed or not: a Parquet file is never compressed as a whole
        raise ShardFault("not_parquet", f"the file is named .parquet but {_describe_head(head)}")

    return kind


def _describe_head(head: bytes) -> str:
    """Return what a file is by its first bytes: "is HTML or XML", or else "begins with b'abcd'"."""
    kind = describe_kind(head)
    return f"is {kind}" if kind else f"begins with {head[:4]!r}"
