"""Parquet files of the lake: encoding, checking, reading, and the hash of the rows they hold."""

import os
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from xxhash import xxh3_128

from toolformer_dag.files import ReadError
from toolformer_dag.identity import fingerprint, is_settled, stream_hash

MAGIC = b"PAR1"
"""The last four bytes of every Parquet file."""
DAMAGED = "is damaged: its content is not what was written"
"""The reason for a file whose content does not have the recorded hash."""
FILE_BYTES = 64 * 2**20
"""About how much memory the rows of one Parquet file take; a published part is written in files of this size."""


class UnreadableFile(Exception):
    """A Parquet file that is missing, truncated or damaged. The message is the reason."""


OWNER = "toolformer_dag.rows"
"""The key of a file's metadata that holds the row store it was written for."""


def encode(frame: pl.DataFrame, owner: str | None = None) -> bytes:
    """Return the bytes of a Parquet file of `frame` (zstd). `owner`: the row store that stands in its metadata."""
    if frame.is_empty():
        return _encode_empty(tuple(frame.schema.items()), owner)
    return _encode_frame(frame, owner)


@lru_cache(maxsize=256)
def _encode_empty(columns: tuple[tuple[str, pl.DataType], ...], owner: str | None) -> bytes:
    """Return the bytes of a file without rows, cached per schema: many shards have no call of a rare tool."""
    return _encode_frame(pl.DataFrame(schema=dict(columns)), owner)


def _encode_frame(frame: pl.DataFrame, owner: str | None) -> bytes:
    """Return the bytes of a Parquet file, written in memory."""
    buffer = BytesIO()
    metadata = {} if owner is None else {OWNER: owner}
    frame.write_parquet(buffer, compression="zstd", compression_level=1, metadata=metadata)
    return buffer.getvalue()


def check(path: Path | str, size: int) -> None:
    """Check that a file has a certain size and ends as a Parquet file does.

    Only the last bytes are read, so damage before them goes unnoticed.

    Raises:
        UnreadableFile: The file is missing, or has another size or another end.
        ReadError: The file cannot be opened.
    """
    try:
        tail = _read_tail(path, size)
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        _require_size(path, size)  # raises UnreadableFile, which says more, where the file has another size
        raise ReadError(Path(path), error) from error

    if tail != MAGIC:
        _require_size(path, size)  # raises UnreadableFile with the two sizes, where they differ
        raise UnreadableFile("has no Parquet footer")


def _read_tail(path: Path | str, size: int) -> bytes:
    """Return the last four bytes of a file of `size` bytes; one byte more where the file is longer."""
    # Every step reads this of every part: system calls cost less than a Python stream.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.pread(descriptor, len(MAGIC) + 1, max(size - len(MAGIC), 0))
    finally:
        os.close(descriptor)


def _require_size(path: Path | str, size: int) -> os.stat_result:
    """Check the size of a file.

    Returns:
        What the system says of the file (`os.stat`).

    Raises:
        UnreadableFile: The file is missing, or has another size.
        ReadError: The system does not say.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - called for every file, each step
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(Path(path), error) from error
    if status.st_size != size:
        raise UnreadableFile(f"has {status.st_size} bytes, not the {size} that were written")
    return status


def damage(path: Path | str, size: int, digest: str, since: int = 0, owner: str | None = None) -> str | None:
    """Check whether a file still has the content that was written.

    Args:
        path: The path of the file.
        size: Its size in bytes.
        digest: The hash of its content.
        since: A time in nanoseconds since 1970. Only the size is compared if the file has not changed
            since then.
        owner: The row store that the file must have been written for.

    Returns:
        What is wrong with the file, or None if nothing is.

    Raises:
        ReadError: The file cannot be read.
    """
    try:
        status = _require_size(path, size)
        if status.st_ctime_ns < since:  # the time of the last change of the file or its metadata
            return None

        check(path, size)  # the last bytes: a truncated file need not be read whole
        if stream_hash(Path(path)) != digest:
            return DAMAGED
        _require_owner(Path(path), owner)
    except UnreadableFile as error:
        return str(error)
    return None


class _FileState(NamedTuple):
    """A file as it was when its hash was compared; any change of the file changes one of these fields."""

    path: str
    modified_ns: int
    changed_ns: int
    inode: int


_verified: set[_FileState] = set()
"""The files whose hash this process has compared."""


def _build_file_state(path: Path, status: os.stat_result) -> _FileState:
    """Return what a `stat` says of a file."""
    return _FileState(
        path=str(path),
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def _require_owner(path: Path, owner: str | None) -> None:
    """Check that a file was written for a certain row store.

    Files of earlier releases do not say what they were written for, and pass.

    Raises:
        UnreadableFile: The file was written for another row store.
    """
    if owner is None:
        return
    written_for = pl.read_parquet_metadata(path).get(OWNER)
    if written_for not in (None, owner):
        raise UnreadableFile(f"was written for {written_for}")


def verify(path: Path, size: int, digest: str, owner: str | None = None) -> None:
    """Check the size and the content of a file, once per process and again after a change of the file.

    Args:
        path: The path of the file.
        size: Its size in bytes.
        digest: The hash of its content.
        owner: The row store that the file must have been written for.

    Raises:
        UnreadableFile: The file is missing or damaged, or was written for another row store.
        ReadError: The file cannot be read.
    """
    status = _require_size(path, size)
    state = _build_file_state(path, status)
    if state in _verified:
        return

    # First the last bytes, before the whole file is read.
    check(path, size)
    _require_content(path, digest, owner)

    if is_settled(status):  # a file written a moment ago may change again within the same clock tick
        _verified.add(state)  # until the file changes, a later call only looks at its state


def _require_content(path: Path, digest: str, owner: str | None) -> None:
    """Read a file, and check its hash and the row store it was written for.

    Raises:
        UnreadableFile: The file is missing or damaged, or was written for another row store.
        ReadError: The file cannot be read.
    """
    try:
        if stream_hash(path) != digest:
            raise UnreadableFile(DAMAGED)
        _require_owner(path, owner)
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error


def pieces(frames: Iterable[pl.DataFrame], size: int = FILE_BYTES) -> Iterator[pl.DataFrame]:
    """Combine consecutive frames into pieces that take at least `size` bytes of memory each.

    Frames are never split, and the last piece may be smaller. If there is a frame at all, there is a piece,
    even without rows.
    """
    waiting: list[pl.DataFrame] = []  # frames of the next piece
    waiting_bytes = 0.0

    for frame in frames:
        waiting.append(frame)
        waiting_bytes += frame.estimated_size()

        if waiting_bytes >= size:
            yield pl.concat(waiting)
            waiting = []
            waiting_bytes = 0.0

    if len(waiting) == 1:
        yield waiting[0]
    elif waiting:
        yield pl.concat(waiting)


class ContentHash:
    """Hash rows in order to 16 hexadecimal characters, the data version of a part.

    Names and types of columns count. `volatile` columns, which measure a run, such as seconds, do not.

        content = ContentHash(volatile=["seconds"])
        for frame in frames:
            content.update(frame)
        data_version = content.hexdigest()

    Each column has a few XXH3 streams: which rows are null, the lengths of texts and lists, and the values. A stream is
    named by its column and by what it holds, such as "input lengths".
    """

    def __init__(self, volatile: Collection[str] = ()) -> None:
        self._volatile = tuple(volatile)
        self._streams: dict[str, xxh3_128] = {}
        self._schema = ""  # of the first frame, as text

    def update(self, frame: pl.DataFrame) -> None:
        """Add rows to the hash.

        It does not matter whether rows come in one call or in several.

        Raises:
            ValueError: The rows have another schema than before.
            TypeError: A column is of a type that no table has.
        """
        self._set_schema(frame.schema)
        if frame.is_empty():
            return

        columns = frame.drop(self._volatile, strict=False).to_dict()
        for name, series in columns.items():
            array = series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
            self._add_values(name, array)

    def hexdigest(self) -> str:
        """Return the hash of all rows so far."""
        hashes = {name: stream.hexdigest() for name, stream in self._streams.items()}
        return fingerprint([self._schema, hashes])

    def _set_schema(self, schema: pl.Schema) -> None:
        """Remember the schema of the rows. Raises ValueError for another schema than before."""
        text = _format_schema(tuple(schema.items()), self._volatile)
        if self._schema and text != self._schema:
            raise ValueError(f"a part has one schema: {self._schema} and then {text}")
        self._schema = text

    def _add_values(self, name: str, values: pa.Array) -> None:
        """Add the values of a column, or values nested in it, to the hash.

        Args:
            name: How the names of the streams begin that the values are added to.
            values: The values, as an Arrow array.

        Raises:
            TypeError: The values are of a type that no table has.
        """
        kind = values.type
        self._add_bytes(f"{name} nulls", np.asarray(values.is_null()))

        if _is_text_type(kind):
            self._add_texts(name, values)
        elif pa.types.is_large_list(kind):
            self._add_lists(name, values)
        elif pa.types.is_struct(kind):
            self._add_structs(name, values)
        elif pa.types.is_primitive(kind):
            self._add_bytes(f"{name} values", _to_numbers(values))
        else:
            raise TypeError(f"{name}: no table holds {kind}")

    def _add_texts(self, name: str, texts: pa.Array) -> None:
        """Add the lengths of texts (0 for null), and their bytes."""
        if texts.null_count:  # there may be bytes of former values in place of a null
            texts = pc.fill_null(texts, pa.scalar(b"", texts.type))
        self._add_bytes(f"{name} lengths", pc.binary_length(texts).to_numpy())
        self._add_text_bytes(f"{name} text", texts)

    def _add_lists(self, name: str, lists: pa.Array) -> None:
        """Add the lengths of lists (0 for null), and their items."""
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        self._add_bytes(f"{name} lengths", lengths.to_numpy())
        self._add_values(f"{name} items", lists.flatten())

    def _add_structs(self, name: str, structs: pa.Array) -> None:
        """Add the values of each field of structs."""
        for field, field_values in zip(structs.type, structs.flatten(), strict=True):
            self._add_values(f"{name} {field.name}", field_values)

    def _add_text_bytes(self, stream: str, values: pa.Array) -> None:
        """Add the bytes of all texts of an Arrow array to a stream, without copying them."""
        _, offsets_buffer, text_buffer = values.buffers()  # the first says which are null, and is hashed elsewhere
        if text_buffer is None:  # there is no text
            return

        # `text_buffer` has all texts end to end, text i between offsets i and i + 1. The column may be a slice of its
        # buffers, which begins at text `values.offset`.
        offsets = np.frombuffer(offsets_buffer, np.int64)
        first = offsets[values.offset]
        end = offsets[values.offset + len(values)]
        self._add_bytes(stream, memoryview(text_buffer)[first:end])

    def _add_bytes(self, stream: str, values: NDArray[Any] | memoryview) -> None:
        """Add bytes to the XXH3 stream of that name."""
        content = values if isinstance(values, memoryview) else np.ascontiguousarray(values).data
        if stream not in self._streams:
            self._streams[stream] = xxh3_128()
        self._streams[stream].update(content)


def _is_text_type(kind: pa.DataType) -> bool:
    """Return whether the values of an Arrow type are texts or bytes."""
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _to_numbers(values: pa.Array) -> NDArray[Any]:
    """Turn an Arrow array of numbers, days or times into numbers.

    Days and times become integers. Null becomes 0, because the memory of a null may hold anything.
    """
    kind = values.type
    numbers = values
    if pa.types.is_temporal(kind):
        numbers = values.view(INTEGERS[kind.bit_width])

    if numbers.null_count:
        numbers = numbers.fill_null(pa.scalar(0).cast(numbers.type))

    array: NDArray[Any] = numbers.to_numpy(zero_copy_only=False)
    return array


@lru_cache(maxsize=256)
def _format_schema(columns: tuple[tuple[str, pl.DataType], ...], volatile: tuple[str, ...]) -> str:
    """Return the names and types of all columns but the volatile ones, as text."""
    return str([(name, str(dtype)) for name, dtype in columns if name not in volatile])


INTEGERS = {32: pa.int32(), 64: pa.int64()}
"""The integers in which days and times are counted, by bits."""
