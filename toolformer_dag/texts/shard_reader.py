"""Read a shard that is a file: Parquet, or plain or compressed content whose form a `Container` reads."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from typing import IO, cast

import polars as pl

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import printable
from toolformer_dag.texts.columns import Batch, documents_of
from toolformer_dag.texts.compression import HEAD_BYTES, ShardFault, blocks, kind_in_words, kind_of
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.json_lines import json_batches
from toolformer_dag.texts.tables import MAGIC, parquet_batches

READ_BYTES = 1 << 18
PARQUET = ".parquet"
NAMED = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip"}
"""How names of compressed files end."""


class ShardError(UserError):
    """A shard that cannot be opened or read; another time it may."""


def shard_batches(path: Path | str, choice: FormatChoice | None = None) -> Iterator[Batch]:
    """Yield documents (columns.DOCUMENTS) in the order of the file, with the lines that hold none, in one pass.

    - Reasons: those of `json_batches`, `raw_batch` and `documents_of`.
    - Memory: a block of 16 MB in a few forms, and 100 bytes per document for its digest.

    Raises ShardFault, after the documents before the fault, where nothing of the shard may be used: damaged (`blocks`,
    `parquet_batches`), in no known form (unknown_format, missing_field, web_archive, unsupported_compression, not_gzip,
    not_zstd, not_parquet), nothing that its library reads (unreadable_data), or empty (empty_shard). Raises ShardError
    where the file is missing or unreadable.
    """
    path, choice = Path(path), choice or FormatChoice()
    try:
        with BufferedReader(cast(RawIOBase, path.open("rb", buffering=0)), READ_BYTES) as stream:
            head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
            if head.startswith(MAGIC):
                raw = parquet_batches(_whole(path, stream), choice)
            else:
                raw = _unpacked(blocks(stream, _compression(head, path.suffix)), choice)
            yield from guarded(documents_of(raw))
    except OSError as error:
        raise ShardError(
            f"shard {printable(path)} cannot be read ({error.strerror or error}); correct its path, or the disk"
        ) from error


def refuse_web_archive(content: Iterable[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Refuse a web archive: its records are pages with their headers, of which no reader takes the text yet."""
    raise ShardFault("web_archive", "the shard is a WARC or WET file; convert it to JSON lines first (docs: Corpora)")


@dataclass(frozen=True, slots=True)
class Container:
    """A form of unpacked content, which has `magic` at byte `at`.

    `read`: (content in blocks, format) -> its records as raw columns. `endings`: how names of such files end; in a
    folder, files with other endings are not read.
    """

    read: Callable[[Iterable[bytes], FormatChoice], Iterator[Batch]]
    endings: tuple[str, ...] = ()
    magic: bytes = b""
    at: int = 0


CONTAINERS = (Container(refuse_web_archive, magic=b"WARC/"), Container(json_batches, (".jsonl", ".ndjson", ".json")))
"""The first that fits reads the content: JSON lines have no magic."""
ENDINGS = tuple(ending for one in CONTAINERS for ending in one.endings)


def _unpacked(content: Iterator[bytes], choice: FormatChoice) -> Iterator[Batch]:
    first = next(content, b"")
    reader = next(one.read for one in CONTAINERS if first.startswith(one.magic, one.at))
    return reader(chain([first], content), choice)


def guarded(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Make a fault of the file of whatever the libraries that read it raise: no file stops another."""
    try:
        yield from batches
    except (ShardFault, ShardError, OSError):
        raise
    except MemoryError as error:
        raise ShardError("the memory does not suffice to read it; free some, or split the file") from error
    except (Exception, pl.exceptions.PanicException) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ShardFault("unreadable_data", f"{reason}: no row of it is used") from error


def _compression(head: bytes, suffix: str) -> str | None:
    """Return gzip, zstd or None. Raises ShardFault for another one, and where the file's name says otherwise."""
    kind = kind_of(head)
    if kind not in (None, "gzip", "zstd"):
        detail = f"the file is {kind}; unpack it or compress it with gzip or zstd"
        raise ShardFault("unsupported_compression", detail)
    if head and kind is None and suffix in NAMED:
        raise ShardFault(f"not_{NAMED[suffix]}", f"the file is named {suffix} but {_is(head)}")
    if head and suffix == PARQUET:
        raise ShardFault("not_parquet", f"the file is named .parquet but {_is(head)}")
    return kind


def _is(head: bytes) -> str:
    kind = kind_in_words(head)
    return f"is {kind}" if kind else f"begins with {head[:4]!r}"


def _whole(path: Path, stream: IO[bytes]) -> Path | IO[bytes]:
    """Return what pyarrow opens of a Parquet file that has an end: its path, or its stream where the path is not UTF-8.

    Raises ShardFault truncated_parquet.
    """
    size = stream.seek(0, 2)
    stream.seek(max(0, size - len(MAGIC)))
    if size < 12 or stream.read() != MAGIC:
        raise ShardFault("truncated_parquet", "the file has no Parquet footer: no row of it is used")
    return path if printable(path) == str(path) else stream
