"""Parquet files of the lake: encoding, checking, reading, and the hash of the rows they hold."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from io import BytesIO
from pathlib import Path

import polars as pl
from polars.exceptions import PanicException, PolarsError

from toolformer_dag.files import ReadError
from toolformer_dag.identity import content_hash, stream_hash

MAGIC = b"PAR1"
DAMAGED = "is damaged: its content is not what was written"
FILE_BYTES = 64 * 2**20
"""About how much memory the rows of one Parquet file take; a published part is written in files of this size."""


class UnreadableFile(Exception):
    """A Parquet file that is missing, truncated or damaged. The message is the reason."""


def encode(frame: pl.DataFrame) -> bytes:
    """Return the bytes of a Parquet file."""
    buffer = BytesIO()
    frame.write_parquet(buffer, compression="zstd", compression_level=1)
    return buffer.getvalue()


def check(path: Path, size: int) -> None:
    """Raise UnreadableFile unless `path` has `size` bytes and ends as a Parquet file does. Reads 4 bytes.

    Raises ReadError where the file cannot be looked at, which says nothing of its content. Flipped bits are not
    noticed: see `verify`.
    """
    try:
        found = path.stat().st_size
        if found != size:
            raise UnreadableFile(f"has {found} bytes, not the {size} that were written")
        with path.open("rb") as stream:
            stream.seek(-len(MAGIC), 2)
            tail = stream.read()
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error
    if tail != MAGIC:
        raise UnreadableFile("has no Parquet footer")


def damage(path: Path, size: int, digest: str) -> str | None:
    """Read a file and return what is wrong with it; None where its content has the hash `digest`. Raises ReadError."""
    try:
        check(path, size)
        return None if stream_hash(path) == digest else DAMAGED
    except UnreadableFile as error:
        return str(error)


_verified: set[tuple[str, int, int, int]] = set()


def verify(path: Path, size: int, digest: str) -> None:
    """Raise UnreadableFile unless the file's content has the hash `digest`; each file is read once per process.

    For readers that open a file by its path, as DuckDB does. Raises ReadError.
    """
    check(path, size)
    try:
        status = path.stat()
        known = (str(path), status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        if known in _verified:
            return
        if stream_hash(path) != digest:
            raise UnreadableFile(DAMAGED)
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error
    _verified.add(known)


def read(path: Path, size: int, digest: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Return the rows of a file whose content has the hash `digest`, all columns or those named.

    Raises UnreadableFile, ReadError.
    """
    check(path, size)
    content = _content(path)
    if content_hash(content) != digest:
        raise UnreadableFile(DAMAGED)
    try:
        return pl.read_parquet(BytesIO(content), columns=list(columns) if columns is not None else None)
    except (OSError, PolarsError, PanicException) as error:
        raise UnreadableFile(f"cannot be read: {error}") from error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error


def pieces(frames: Iterable[pl.DataFrame], size: int = FILE_BYTES) -> Iterator[pl.DataFrame]:
    """Regroup `frames` into frames of about `size` bytes, at least one; memory holds one of them."""
    waiting: list[pl.DataFrame] = []
    held = 0.0
    for frame in frames:
        waiting.append(frame)
        held += frame.estimated_size()
        if held >= size:
            yield pl.concat(waiting)
            waiting, held = [], 0.0
    if waiting:
        yield pl.concat(waiting)


class ContentHash:
    """Hash rows in order to 16 hexadecimal characters; column names and types count, `volatile` columns do not.

    Volatile columns measure a run, such as seconds, and would make equal results look different.
    """

    def __init__(self, volatile: Collection[str] = ()) -> None:
        self._volatile = tuple(volatile)
        self._hash = blake2b(digest_size=8)
        self._schema = ""

    def update(self, frame: pl.DataFrame) -> None:
        """Add rows; how they are spread over calls makes no difference. Raises ValueError for another schema."""
        kept = frame.drop(self._volatile, strict=False)
        schema = str([(name, str(dtype)) for name, dtype in kept.schema.items()])
        if not self._schema:
            self._hash.update(schema.encode())
        elif schema != self._schema:
            raise ValueError(f"a part has one schema: {self._schema} and then {schema}")
        self._schema = schema
        if kept.height:
            self._hash.update(kept.write_ndjson().encode())

    def hexdigest(self) -> str:
        """Return the hash of all rows so far."""
        return self._hash.hexdigest()
