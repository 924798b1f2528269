"""Read a shard that is a file: Parquet, or plain or compressed content whose form a `Container` reads."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from typing import cast

from toolformer_dag.settings.setting_types import printable
from toolformer_dag.texts.columns import Batch, documents_of
from toolformer_dag.texts.compression import HEAD_BYTES, blocks, kind_in_words, kind_of
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.guarded_batches import guarded
from toolformer_dag.texts.readers import parquet_shards, web_archives
from toolformer_dag.texts.readers.json_lines import json_batches
from toolformer_dag.texts.readers.parquet_shards import parquet_batches, whole_parquet
from toolformer_dag.texts.readers.web_archives import web_archive_batches
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

READ_BYTES = 1 << 18
"""Bytes that are read of a file at a time."""
PARQUET = ".parquet"
"""How names of Parquet files end."""
NAMED = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip"}
"""How names of compressed files end."""


@dataclass(frozen=True, slots=True)
class Container:
    """A form of content, after it is decompressed."""

    read: Callable[[Iterable[bytes], FormatChoice], Iterator[Batch]]
    """Reads its records as raw columns: (content in blocks, format) -> batches."""
    endings: tuple[str, ...] = ()
    """How names of such files end; in a folder, files with other endings are not read."""
    magic: bytes = b""
    """The bytes that such content has at byte `magic_at`; none for a form that any content may have."""
    magic_at: int = 0


CONTAINERS = (
    Container(web_archive_batches, magic=web_archives.MAGIC),
    Container(json_batches, endings=(".jsonl", ".ndjson", ".json")),
)
"""The first that fits reads the content. JSON lines have no magic: they are the last. Parquet is none of them: it is
read from the file itself, which is not compressed as a whole."""
ENDINGS = tuple(ending for container in CONTAINERS for ending in container.endings)
"""How names of files end that a container reads."""


def shard_batches(path: Path | str, choice: FormatChoice | None = None) -> Iterator[Batch]:
    """Yield the documents of a shard (columns.DOCUMENTS), in the order of the file, with the lines that hold none.

    - The file is read in one pass. Memory: a block of 16 MB in a few forms, and 100 bytes per document for its digest.
    - Reasons of rejected lines: those of `json_batches`, `raw_batch` and `documents_of`.

    Raises ShardFault, after the documents before the fault, where nothing of the shard may be used: it is damaged
    (`blocks`, `whole_parquet`, `parquet_batches`), in no known form (unknown_format, missing_field, web_archive,
    unsupported_compression, not_gzip, not_zstd, not_parquet), nothing that its library reads (unreadable_data), or
    empty (empty_shard). Raises ShardError where the file is missing or unreadable.
    """
    path = Path(path)
    choice = choice or FormatChoice()
    try:
        with BufferedReader(cast(RawIOBase, path.open("rb", buffering=0)), READ_BYTES) as stream:
            head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
            if head.startswith(parquet_shards.MAGIC):
                raw_batches = parquet_batches(whole_parquet(path, stream), choice)
            else:
                content = blocks(stream, compression(head, path.suffix))
                raw_batches = _container_batches(content, choice)
            yield from guarded(documents_of(raw_batches))
    except OSError as error:
        raise ShardError(
            f"shard {printable(path)} cannot be read ({error.strerror or error}); correct its path, or the disk"
        ) from error


def _container_batches(content: Iterator[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Read decompressed content by the first of CONTAINERS whose magic it has."""
    first_block = next(content, b"")
    whole_content = chain([first_block], content)
    container = next(
        container for container in CONTAINERS if first_block.startswith(container.magic, container.magic_at)
    )
    return container.read(whole_content, choice)


def compression(head: bytes, suffix: str) -> str | None:
    """Return how a file is compressed, by its first bytes: "gzip", "zstd", or None for a file that is not.

    Raises ShardFault for another compression, and where the file's name (its suffix) says otherwise.
    """
    kind = kind_of(head)
    if kind not in (None, "gzip", "zstd"):
        detail = f"the file is {kind}; unpack it or compress it with gzip or zstd"
        raise ShardFault("unsupported_compression", detail)
    if head and kind is None and suffix in NAMED:
        raise ShardFault(f"not_{NAMED[suffix]}", f"the file is named {suffix} but {_in_words(head)}")
    if head and suffix == PARQUET:
        raise ShardFault("not_parquet", f"the file is named .parquet but {_in_words(head)}")
    return kind


def _in_words(head: bytes) -> str:
    """Say what a file is by its first bytes, or which these are."""
    kind = kind_in_words(head)
    return f"is {kind}" if kind else f"begins with {head[:4]!r}"
