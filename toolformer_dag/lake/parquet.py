"""Parquet files of the lake: encoding, checking, reading, and the hash of the rows they hold."""

import os
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from xxhash import xxh3_128

from toolformer_dag.files import ReadError
from toolformer_dag.identity import fingerprint, settled, stream_hash

MAGIC = b"PAR1"
DAMAGED = "is damaged: its content is not what was written"
FILE_BYTES = 64 * 2**20
"""About how much memory the rows of one Parquet file take; a published part is written in files of this size."""


class UnreadableFile(Exception):
    """A Parquet file that is missing, truncated or damaged. The message is the reason."""


OWNER = "toolformer_dag.rows"
"""The key of a file's metadata that holds the row store it was written for."""


def encode(frame: pl.DataFrame, owner: str | None = None) -> bytes:
    """Return the bytes of a Parquet file, which says whose rows it holds."""
    return _encoded(frame, owner) if frame.height else _encoded_empty(tuple(frame.schema.items()), owner)


@lru_cache(maxsize=256)
def _encoded_empty(columns: tuple[tuple[str, pl.DataType], ...], owner: str | None) -> bytes:
    """Encode a file without rows, once per schema: most shards of a lane whose calls are rare have none."""
    return _encoded(pl.DataFrame(schema=dict(columns)), owner)


def _encoded(frame: pl.DataFrame, owner: str | None) -> bytes:
    buffer = BytesIO()
    metadata = {} if owner is None else {OWNER: owner}
    frame.write_parquet(buffer, compression="zstd", compression_level=1, metadata=metadata)
    return buffer.getvalue()


def check(path: Path | str, size: int) -> None:
    """Raise UnreadableFile unless `path` has `size` bytes and ends as a Parquet file does. Reads 4 bytes.

    Raises ReadError where the file cannot be looked at, which says nothing of its content. Flipped bits are not
    noticed: see `verify`.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a stream would cost more than the look
        try:
            tail = os.pread(opened, len(MAGIC) + 1, max(size - len(MAGIC), 0))  # a byte more tells of another size
        finally:
            os.close(opened)
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        _sized(path, size)
        raise ReadError(Path(path), error) from error
    if tail != MAGIC:
        _sized(path, size)
        raise UnreadableFile("has no Parquet footer")


def _sized(path: Path | str, size: int) -> os.stat_result:
    """Return the state of a file. Raises UnreadableFile where it has not `size` bytes, ReadError."""
    try:
        status = os.stat(path)  # noqa: PTH116 - asked of every file, each step
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(Path(path), error) from error
    if status.st_size != size:
        raise UnreadableFile(f"has {status.st_size} bytes, not the {size} that were written")
    return status


def damage(path: Path | str, size: int, digest: str, since: int = 0, owner: str | None = None) -> str | None:
    """Return what is wrong with a file; None where its content has the hash `digest`. Raises ReadError.

    A file that did not change `since` then, in nanoseconds since 1970, is not read. `owner`: see `verify`.
    """
    try:
        if _sized(path, size).st_ctime_ns < since:
            return None
        check(path, size)
        if stream_hash(Path(path)) != digest:
            return DAMAGED
        _require_owner(Path(path), owner)
    except UnreadableFile as error:
        return str(error)
    return None


_verified: set[tuple[str, int, int, int]] = set()


def _require_owner(path: Path, owner: str | None) -> None:
    """Raise UnreadableFile for a file of another row store; earlier releases did not say of which it is."""
    written_for = None if owner is None else pl.read_parquet_metadata(path).get(OWNER)
    if written_for not in (None, owner):
        raise UnreadableFile(f"was written for {written_for}")


def verify(path: Path, size: int, digest: str, owner: str | None = None) -> None:
    """Raise UnreadableFile unless the file's content has the hash `digest`; each file is read once per process.

    `owner`: the row store in whose folder it lies; of rows that were computed with something else none may be used.

    A file that was written just now is read once more. For readers that open a file by its path, as DuckDB does.
    Raises ReadError.
    """
    status = _sized(path, size)
    known = (str(path), status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    if known in _verified:
        return
    check(path, size)
    try:
        if stream_hash(path) != digest:
            raise UnreadableFile(DAMAGED)
        _require_owner(path, owner)
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error
    if settled(status):
        _verified.add(known)


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
        yield pl.concat(waiting) if len(waiting) > 1 else waiting[0]


class ContentHash:
    """Hash rows in order to 16 hexadecimal characters; column names and types count, `volatile` columns do not.

    Volatile columns measure a run, such as seconds, and would make equal results look different. Columns are hashed
    apart, each by XXH3 over what is null, the lengths, and the values one after the other.
    """

    def __init__(self, volatile: Collection[str] = ()) -> None:
        self._volatile = tuple(volatile)
        self._streams: dict[str, xxh3_128] = {}
        self._schema = ""

    def update(self, frame: pl.DataFrame) -> None:
        """Add rows; how they are spread over calls makes no difference.

        Raises ValueError for another schema, TypeError for a type that no table has.
        """
        schema = _described(tuple(frame.schema.items()), self._volatile)
        if self._schema and schema != self._schema:
            raise ValueError(f"a part has one schema: {self._schema} and then {schema}")
        self._schema = schema
        for name, series in frame.drop(self._volatile, strict=False).to_dict().items() if frame.height else ():
            self._feed(name, series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest()))

    def hexdigest(self) -> str:
        """Return the hash of all rows so far."""
        hashes = {path: stream.hexdigest() for path, stream in self._streams.items()}
        return fingerprint([self._schema, hashes])

    def _feed(self, path: str, values: pa.Array) -> None:
        kind = values.type
        self._add(f"{path} nulls", np.asarray(values.is_null()))
        if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
            self._add(f"{path} lengths", pc.fill_null(pc.binary_length(values), 0).to_numpy())
            ends = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
            text = values.buffers()[2]
            if text is not None:
                self._add(f"{path} text", memoryview(text)[ends[0] : ends[-1]])
        elif pa.types.is_large_list(kind):
            self._add(f"{path} lengths", pc.fill_null(pc.list_value_length(values), 0).to_numpy())
            self._feed(f"{path} items", values.flatten())
        elif pa.types.is_struct(kind):
            for field, part in zip(kind, values.flatten(), strict=True):
                self._feed(f"{path} {field.name}", part)
        elif pa.types.is_primitive(kind):
            plain = values.view(INTEGERS[kind.bit_width]) if pa.types.is_temporal(kind) else values
            filled = plain.fill_null(pa.scalar(0).cast(plain.type)) if plain.null_count else plain
            self._add(f"{path} values", filled.to_numpy(zero_copy_only=False))
        else:
            raise TypeError(f"{path}: no table holds {kind}")

    def _add(self, stream: str, values: NDArray[Any] | memoryview) -> None:
        content = values if isinstance(values, memoryview) else np.ascontiguousarray(values).data
        self._streams.setdefault(stream, xxh3_128()).update(content)


@lru_cache(maxsize=256)
def _described(columns: tuple[tuple[str, pl.DataType], ...], volatile: tuple[str, ...]) -> str:
    return str([(name, str(dtype)) for name, dtype in columns if name not in volatile])


INTEGERS = {32: pa.int32(), 64: pa.int64()}
"""The integers in which days and times are counted, by bits."""
