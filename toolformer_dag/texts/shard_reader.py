"""Reading a shard of any form: JSON lines, plain or compressed, and Parquet."""

from collections.abc import Iterable, Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, cast

from toolformer_dag.files import UserError
from toolformer_dag.texts.columns import Batch, DocumentsOfShard, Rejection
from toolformer_dag.texts.compression import ShardFault, blocks, kind_of
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.formats import FormatChoice, Layout
from toolformer_dag.texts.json_lines import json_batches
from toolformer_dag.texts.tables import MAGIC, parquet_batches

READ_BYTES = 1 << 18
NAMED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


class ShardError(UserError):
    """A shard that cannot be opened or read; another time it may."""


class DocumentReader:
    """One pass over a shard. `format`: the name of its form, known after the first batch."""

    def __init__(self, choice: FormatChoice | None) -> None:
        self.format: str | None = None
        self._choice = choice or FormatChoice()

    def _documents(self, raw: Iterable[tuple[Layout, Batch]]) -> Iterator[Batch]:
        documents: DocumentsOfShard | None = None
        for layout, batch in raw:
            self.format = layout.format
            documents = documents or DocumentsOfShard(layout.own_date)
            yield documents.of(batch)


class ShardReader(DocumentReader):
    """One pass over a shard file."""

    def __init__(self, path: Path | str, choice: FormatChoice | None = None) -> None:
        super().__init__(choice)
        self._path = Path(path)

    def batches(self) -> Iterator[Batch]:
        """Yield documents (columns.DOCUMENTS) in the order of the file, with the lines that hold none.

        - Reasons: those of `json_batches`, `raw_batch` and DocumentsOfShard.
        - Memory: a block of 16 MB in a few forms, and 100 bytes per document for its digest.

        Raises ShardFault, after the documents before the fault, where nothing of the shard may be used: damaged
        (`blocks`, `parquet_batches`), in no known form (unknown_format, missing_field, web_archive,
        unsupported_compression, not_gzip, not_zstd, not_parquet), or empty (empty_shard). Raises ShardError where the
        file is missing or unreadable.
        """
        try:
            with BufferedReader(cast(RawIOBase, self._path.open("rb", buffering=0)), READ_BYTES) as stream:
                head = stream.peek(len(MAGIC) + 2)[:6]
                if head.startswith(MAGIC):
                    raw = parquet_batches(_whole(self._path, stream), self._choice)
                else:
                    raw = json_batches(blocks(stream, self._compression(head)), self._choice)
                yield from self._documents(raw)
        except OSError as error:
            raise ShardError(
                f"shard {self._path} cannot be read ({error.strerror or error}); correct its path, or the disk"
            ) from error

    def _compression(self, head: bytes) -> str | None:
        """Return gzip, zstd or None. Raises ShardFault for another one, and where the file's name says otherwise."""
        kind, suffix = kind_of(head), self._path.suffix
        if kind not in (None, "gzip", "zstd"):
            detail = f"the file is {kind}; unpack it or compress it with gzip or zstd"
            raise ShardFault("unsupported_compression", detail)
        if head and kind is None and suffix in NAMED:
            raise ShardFault(f"not_{NAMED[suffix]}", f"the file is named {suffix} but begins with {head[:2]!r}")
        if head and suffix == ".parquet":
            raise ShardFault("not_parquet", f"the file is named .parquet but begins with {head[:4]!r}")
        return kind


def read_documents(path: Path | str, shard: str, choice: FormatChoice | None = None) -> Iterator[Document | Rejection]:
    """Yield a shard's documents one by one, and what holds none; for tools that look at single files.

    A fault of the whole file is a last Rejection of line 0: what came before it may not be used. Raises ShardError.
    """
    try:
        for batch in ShardReader(path, choice).batches():
            yield from batch.rejections
            yield from (Document(shard, **row) for row in batch.frame.iter_rows(named=True))
    except ShardFault as fault:
        yield Rejection(0, fault.reason, str(fault))


def _whole(path: Path, stream: IO[bytes]) -> Path:
    """Return the path of a Parquet file that has an end. Raises ShardFault truncated_parquet."""
    size = stream.seek(0, 2)
    stream.seek(max(0, size - len(MAGIC)))
    if size < 12 or stream.read() != MAGIC:
        raise ShardFault("truncated_parquet", "the file has no Parquet footer: no row of it is used")
    return path
