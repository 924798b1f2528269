"""The files of a row store: what their names say, and where in them a key can lie.

A chunk holds the rows of one commit, in the order in which they were computed, and is read as a whole. A run holds the
rows of many: sorted by the hash of the first key column, in row groups of about 64 KiB, with a checksum per page and
one of the footer. So a few keys are read from a run at the cost of a few row groups, however many rows it has.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from polars.exceptions import PolarsError
from xxhash import xxh3_64_intdigest

from toolformer_dag.files import ReadError
from toolformer_dag.identity import content_hash
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile

CHUNK, RUN = "chunk", "run"
MERGED = "merged"
"""What earlier releases called joined chunks: they are read and merged as chunks."""
NAME = re.compile(rf"([0-9a-f]{{16}})-({CHUNK}|{MERGED}|{RUN}[1-9][0-9]*)-([0-9a-f]{{32}})-([0-9]+)\.parquet")
HASH = "__hash"
"""The column by which a run is sorted."""
HASHES = 2**64
BLOCK_BYTES = 2**16
"""About how much memory the rows of a row group of a run take."""
BLOCKS_READ = 256
"""Row groups that are decoded at a time."""
FOOTER_HASH = 32
"""Characters of the hash that stands before the footer of a run, where Parquet readers do not look."""
FOOTER_END = 8
"""Bytes of the length of the footer and of the magic number, behind it."""


@dataclass(frozen=True, slots=True, order=True)
class RowFile:
    """A file whose name says its age, kind, content and size, so that no index has to be kept. Files sort by age.

    `written` in nanoseconds since 1970, `hash` of the content, `bytes` of the file. Files of one run are equally old.
    """

    written: int
    kind: str
    hash: str
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.written:016x}-{self.kind}-{self.hash}-{self.bytes}.parquet"

    @property
    def level(self) -> int:
        """How often its rows were merged: 0 for a chunk."""
        return int(self.kind.removeprefix(RUN)) if self.kind.startswith(RUN) else 0


def new_row_file(kind: str, content: bytes, written: int | None = None) -> RowFile:
    """Return the name of a file with this content; `written` defaults to now."""
    return RowFile(time.time_ns() if written is None else written, kind, content_hash(content), len(content))


def parse_row_file(name: str) -> RowFile | None:
    """Read `RowFile.name`; None for any other file."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    written, kind, digest, size = match.groups()
    return RowFile(int(written, 16), kind, digest, int(size))


Hashes = NDArray[np.uint64]


def hashes(values: pl.Series) -> Hashes:
    """Hash values to 64 bits, the same on every machine and in every version."""
    return np.array([xxh3_64_intdigest(str(value).encode()) for value in values], np.uint64)


def hashed(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Add the column HASH of `column`."""
    distinct = rows[column].unique()
    found = pl.DataFrame({column: distinct, HASH: pl.Series(hashes(distinct), dtype=pl.UInt64)})
    return rows.join(found, on=column, how="left", maintain_order="left")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the rows of a file lie: block i holds hashes from first[i] to last[i], in ascending order.

    Of a chunk every hash is a block of its own; they tell whether it has a row, not where.
    """

    first: Hashes
    last: Hashes

    def holding(self, wanted: Hashes) -> list[int]:
        """Return the blocks that may hold one of `wanted` (sorted)."""
        begin = np.searchsorted(wanted, self.first, "left")
        end = np.searchsorted(wanted, self.last, "right")
        return [int(number) for number in np.flatnonzero(end > begin)]

    def between(self, begin: int, end: int) -> list[int]:
        """Return the blocks that may hold a hash in [begin, end)."""
        last = np.uint64(end - 1)
        return [int(number) for number in np.flatnonzero((self.last >= np.uint64(begin)) & (self.first <= last))]


def blocks_of(file: RowFile, path: Path, column: str) -> Blocks:
    """Read where the rows of a file lie: of a run its footer, of a chunk the key column. Raises as `read_blocks`."""
    if file.level == 0:
        found = np.unique(hashes(parquet.read(path, file.bytes, file.hash, [column])[column].unique()))
        return Blocks(found, found)
    metadata = _opened(file, path).metadata
    place = metadata.schema.names.index(HASH)
    groups = [metadata.row_group(number).column(place).statistics for number in range(metadata.num_row_groups)]
    return Blocks(np.array([one.min for one in groups], np.uint64), np.array([one.max for one in groups], np.uint64))


def read_blocks(file: RowFile, path: Path, blocks: Sequence[int], columns: Sequence[str]) -> pl.DataFrame:
    """Return these columns of the rows of `blocks`, of a chunk all rows.

    Raises UnreadableFile for a file that is gone, truncated or damaged where it was read, ReadError.
    """
    if file.level == 0:
        return parquet.read(path, file.bytes, file.hash, columns)
    opened = _opened(file, path)
    try:
        read = opened.read_row_groups(list(blocks), columns=list(columns))
        return pl.DataFrame(pl.from_arrow(read)).select(columns)
    except (OSError, pa.ArrowException, PolarsError) as error:
        raise _failure(path, error) from error


def encode_run(rows: pl.DataFrame) -> bytes:
    """Return the bytes of a file of a run. `rows`: with the column HASH, sorted by it."""
    buffer = BytesIO()
    table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
    height = max(1, BLOCK_BYTES * rows.height // max(1, rows.estimated_size()))
    pq.write_table(
        table,
        buffer,
        row_group_size=height,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
        write_statistics=[HASH],
        store_schema=False,
    )
    content = buffer.getvalue()
    place = len(content) - FOOTER_END - _footer_length(content)
    return content[:place] + content_hash(content[place:]).encode() + content[place:]


def _opened(file: RowFile, path: Path) -> pq.ParquetFile:
    parquet.check(path, file.bytes)
    try:
        _check_footer(path, file.bytes)
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise _failure(path, error) from error


def _check_footer(path: Path, size: int) -> None:
    """Raise UnreadableFile for a damaged footer: it would end the process, or send a reader to other rows."""
    with path.open("rb") as stream:
        stream.seek(size - FOOTER_END)
        end = FOOTER_END + _footer_length(stream.read())
        if end + FOOTER_HASH <= size:
            stream.seek(size - end - FOOTER_HASH)
            if stream.read(FOOTER_HASH) == content_hash(stream.read()).encode():
                return
    raise UnreadableFile(parquet.DAMAGED)


def _footer_length(end: bytes) -> int:
    """The length that the last bytes of a Parquet file tell."""
    return int.from_bytes(end[-FOOTER_END:][:4], "little")


def _failure(path: Path, error: Exception) -> Exception:
    """An error of the disk says nothing of the content."""
    if isinstance(error, FileNotFoundError) or not (isinstance(error, OSError) and error.errno):
        return UnreadableFile(f"cannot be read: {error}")
    return ReadError(path, error)
