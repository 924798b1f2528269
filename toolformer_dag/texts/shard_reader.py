"""Reading a shard of any form: a file of JSON lines, plain or compressed, or of Parquet, or a data file of the hub.

Data sets of the Hugging Face Hub, or folders of them, are streamed by `datasets`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import polars as pl
import pyarrow as pa

from toolformer_dag.files import UserError
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.texts.columns import Batch, documents_of
from toolformer_dag.texts.compression import HEAD_BYTES, ShardFault, blocks, kind_in_words, kind_of
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.json_lines import json_batches
from toolformer_dag.texts.tables import MAGIC, TableRecords, parquet_batches

READ_BYTES = 1 << 18
NAMED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


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
            yield from _guarded(documents_of(raw))
    except OSError as error:
        raise ShardError(
            f"shard {path} cannot be read ({error.strerror or error}); correct its path, or the disk"
        ) from error


def refuse_web_archive(content: Iterable[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Refuse a web archive: its records are pages with their headers, of which no reader takes the text yet."""
    raise ShardFault("web_archive", "the shard is a WARC or WET file; convert it to JSON lines first (docs: Corpora)")


Reader = Callable[[Iterable[bytes], FormatChoice], Iterator[Batch]]
"""(unpacked content in blocks, format) -> its records as raw columns."""
CONTAINERS: dict[tuple[int, bytes], Reader] = {(0, b"WARC/"): refuse_web_archive}
"""What reads content by (offset, bytes that stand there); JSON lines have none of their own."""


def _unpacked(content: Iterator[bytes], choice: FormatChoice) -> Iterator[Batch]:
    first = next(content, b"")
    known = (one for (at, magic), one in CONTAINERS.items() if first.startswith(magic, at))
    reader = next(known, json_batches)
    return reader(chain([first], content), choice)


def _guarded(batches: Iterator[Batch]) -> Iterator[Batch]:
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
    if head and suffix == ".parquet":
        raise ShardFault("not_parquet", f"the file is named .parquet but {_is(head)}")
    return kind


def _is(head: bytes) -> str:
    kind = kind_in_words(head)
    return f"is {kind}" if kind else f"begins with {head[:4]!r}"


def _whole(path: Path, stream: IO[bytes]) -> Path:
    """Return the path of a Parquet file that has an end. Raises ShardFault truncated_parquet."""
    size = stream.seek(0, 2)
    stream.seek(max(0, size - len(MAGIC)))
    if size < 12 or stream.read() != MAGIC:
        raise ShardFault("truncated_parquet", "the file has no Parquet footer: no row of it is used")
    return path


ROWS = 1000
"""Rows per batch."""


class HubError(ShardError):
    """A data set that cannot be found, reached or understood. The message names it, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a data set at a fixed revision. `files`: its data files by their path in the data set.

    `revision`: the commit, or of a `local` folder the fingerprint of its data files. `named`: whether `files` are
    paths; the shards of other data sets, such as archives, only have numbers.
    """

    hub: str
    configuration: str | None
    split: str
    revision: str
    local: bool
    named: bool
    files: tuple[str, ...]


def resolve(hub: str, configuration: str | None, split: str, revision: str | None) -> HubSplit:
    """Ask the hub (with the user's own token, which `huggingface_hub` reads), or look at a local folder.

    Without a `revision` it is that of the main branch now. No code of a data set is run. Raises HubError.
    """
    local = Path(hub).is_dir()
    commit = None if local else _commit(hub, revision)
    builder, stream = _opened(hub, configuration, split, commit)
    urls = [str(url) for url in (builder.config.data_files or {}).get(split, ())]
    named = len(urls) == stream.num_shards
    if named:
        files = tuple(_path(url, hub, local) for url in urls)
    else:
        files = tuple(f"{split}-{number:05}-of-{stream.num_shards:05}" for number in range(stream.num_shards))
    if commit is None:
        paths = {_path(url, hub, local): file_hash(Path(url.partition("::")[2] or url)) for url in urls}
        commit = fingerprint(paths)
    return HubSplit(hub, configuration, split, commit, local, named, files)


def hub_batches(split: HubSplit, number: int, choice: FormatChoice) -> Iterator[Batch]:
    """Yield documents of a data file and what was refused, as `shard_batches` does; rows are numbered within the file.

    Raises ShardFault for data that `datasets` cannot read (unreadable_data), which stops no other data file, and
    ShardError where the hub cannot be reached. One malformed JSON line makes its whole data file unreadable, and so
    does a field that the first data file lacks, or that is null there.
    """
    return _guarded(documents_of(_raw(split, number, choice)))


def _raw(split: HubSplit, number: int, choice: FormatChoice) -> Iterator[Batch]:
    records: TableRecords | None = None
    for table in _tables(split, number):
        records = records or TableRecords(table.schema, choice, [table])
        yield records.batch(table)
    if records is None:
        raise ShardFault("empty_shard", "the data file has no rows")


def _tables(split: HubSplit, number: int) -> Iterator[pa.Table]:
    from datasets.exceptions import DatasetsError

    try:
        _, stream = _opened(split.hub, split.configuration, split.split, None if split.local else split.revision)
        part = stream.shard(num_shards=stream.num_shards, index=number).with_format("arrow")
        yield from part.iter(batch_size=ROWS)
    except (DatasetsError, pa.ArrowException, ValueError, TypeError, KeyError, EOFError) as error:
        remedy = "download the data set and name its files in corpus.shards"
        raise ShardFault("unreadable_data", f"datasets: {' '.join(str(error).split())}; {remedy}") from error
    except OSError as error:
        raise ShardError(f"{split.hub} cannot be read ({error}); try again, or correct corpus.hub") from error


def _opened(hub: str, configuration: str | None, split: str, revision: str | None) -> tuple[Any, Any]:
    """Return the builder of a data set and the stream of a split. Raises HubError."""
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetsError

    try:
        builder = load_dataset_builder(hub, name=configuration, revision=revision)
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise HubError(
            f"corpus.hub: {hub} cannot be opened ({_first_line(error)}); correct corpus.hub, corpus.configuration or "
            "corpus.revision, or log in with `hf auth login`"
        ) from error
    try:
        return builder, builder.as_streaming_dataset(split=split)
    except (DatasetsError, ValueError, OSError) as error:
        known = ", ".join(map(str, builder.config.data_files or ())) or "none"
        raise HubError(f"corpus.split: {hub} has no split {split!r}; it has {known}") from error


def _commit(hub: str, revision: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(hub, revision=revision).sha)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubError(
            f"corpus.hub: {hub} is no folder, and the hub does not give it ({_first_line(error)}); correct corpus.hub "
            "or corpus.revision, log in with `hf auth login`, or try again with a connection"
        ) from error


def _path(url: str, hub: str, local: bool) -> str:
    """Return the path of a data file within its data set."""
    plain = url.partition("::")[2] or url
    if local:
        return Path(plain).resolve().relative_to(Path(hub).resolve()).as_posix()
    _, _, path = plain.partition("@")
    return path.partition("/")[2] or plain


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().splitlines()[0]
