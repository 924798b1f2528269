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
from toolformer_dag.identity import compute_file_content_hash, fingerprint, has_settled_times

PARQUET_MAGIC_BYTES = b"PAR1"
"""The last four bytes of every Parquet file."""
DAMAGED_REASON = "is damaged: its content is not what was written"
"""The reason for a file whose content does not have the recorded hash."""
TARGET_FILE_BYTES = 64 * 2**20
"""About how much memory the rows of one Parquet file take; a published part is written in files of this size."""


class UnreadableFile(Exception):
    """A Parquet file that is missing, truncated or damaged. The message is the reason."""


ROW_STORE_METADATA_KEY = "toolformer_dag.rows"
"""The key of a file's metadata that holds the row store it was written for."""


def encode_rows(frame: pl.DataFrame, row_store_name: str | None = None) -> bytes:
    """Return the content of a Parquet file with the rows of a frame.

    Args:
        frame: The rows.
        row_store_name: The row store that the file belongs to, for its metadata. None for a file of a table.
    """
    if frame.is_empty():
        return _encode_empty_frame(tuple(frame.schema.items()), row_store_name)
    return _encode_frame(frame, row_store_name)


@lru_cache(maxsize=256)
def _encode_empty_frame(columns: tuple[tuple[str, pl.DataType], ...], row_store_name: str | None) -> bytes:
    """Return the content of a Parquet file without rows.

    The results are cached, because many tables have parts without rows, such as shards without a call of a rare tool.
    """
    return _encode_frame(pl.DataFrame(schema=dict(columns)), row_store_name)


def _encode_frame(frame: pl.DataFrame, row_store_name: str | None) -> bytes:
    """Return the content of a Parquet file, compressed with zstd and written in memory."""
    buffer = BytesIO()
    metadata = {} if row_store_name is None else {ROW_STORE_METADATA_KEY: row_store_name}
    frame.write_parquet(buffer, compression="zstd", compression_level=1, metadata=metadata)
    return buffer.getvalue()


def check_size_and_footer(path: Path | str, size_bytes: int) -> None:
    """Check that a file has a certain size and ends as a Parquet file does.

    Only the last bytes are read, so damage before them goes unnoticed.

    Raises:
        UnreadableFile: The file is missing, or has another size or another end.
        ReadError: The file cannot be opened.
    """
    try:
        last_bytes = _read_last_bytes(path, size_bytes)
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        _require_size(path, size_bytes)  # if the size is wrong, raises UnreadableFile, which says more
        raise ReadError(Path(path), error) from error

    if last_bytes != PARQUET_MAGIC_BYTES:
        _require_size(path, size_bytes)  # if the size is wrong, raises UnreadableFile with the two sizes
        raise UnreadableFile("has no Parquet footer")


def _read_last_bytes(path: Path | str, size_bytes: int) -> bytes:
    """Return the last four bytes of a file, which are "PAR1" in a whole Parquet file.

    Args:
        path: The path of the file.
        size_bytes: The size that the file should have. From a longer file five bytes are returned, and from a shorter
            one fewer than four, so that a wrong size shows in a comparison with "PAR1".
    """
    magic_length = len(PARQUET_MAGIC_BYTES)
    offset = max(size_bytes - magic_length, 0)

    # Every step does this with every part. System calls are faster than opening a Python file object.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.pread(descriptor, magic_length + 1, offset)
    finally:
        os.close(descriptor)


def _require_size(path: Path | str, size_bytes: int) -> os.stat_result:
    """Check the size of a file.

    Returns:
        The status of the file, as `os.stat` returns it.

    Raises:
        UnreadableFile: The file is missing, or has another size.
        ReadError: The status cannot be read.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - called for every file, each step
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(Path(path), error) from error

    if status.st_size != size_bytes:
        raise UnreadableFile(f"has {status.st_size} bytes, not the {size_bytes} that were written")
    return status


def find_damage(
    path: Path | str, size_bytes: int, expected_hash: str, changed_since_ns: int = 0, row_store_name: str | None = None
) -> str | None:
    """Check whether a file still has the content that was written.

    Args:
        path: The path of the file.
        size_bytes: Its size in bytes.
        expected_hash: The hash of its content.
        changed_since_ns: A time in nanoseconds since 1970. If the file has not changed since then, only its size is
            compared.
        row_store_name: The row store that the file must have been written for.

    Returns:
        What is wrong with the file, or None if nothing is.

    Raises:
        ReadError: The file cannot be read.
    """
    try:
        status = _require_size(path, size_bytes)
        has_changed = status.st_ctime_ns >= changed_since_ns  # the last change of the file or its metadata
        if not has_changed:
            return None

        # The last bytes are checked first, so that a truncated file need not be read whole.
        check_size_and_footer(path, size_bytes)
        if compute_file_content_hash(Path(path)) != expected_hash:
            return DAMAGED_REASON
        _require_row_store(Path(path), row_store_name)
    except UnreadableFile as error:
        return str(error)
    return None


class _FileState(NamedTuple):
    """The state of a file when its hash was compared. Any change of the file changes one of these fields.

    Attributes:
        path: The path of the file.
        modified_ns: When the content was modified, in nanoseconds since 1970.
        changed_ns: When the content or the metadata was changed, in nanoseconds since 1970.
        inode: The number that the file system gives the file.
    """

    path: str
    modified_ns: int
    changed_ns: int
    inode: int


_verified_states: set[_FileState] = set()
"""The files whose hash this process has compared."""


def _build_file_state(path: Path, status: os.stat_result) -> _FileState:
    """Return the state of a file, by its status from `os.stat`."""
    return _FileState(
        path=str(path),
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def _require_row_store(path: Path, row_store_name: str | None) -> None:
    """Check that a file was written for a certain row store: a folder of computed rows that are looked up by a key.

    This finds files that were moved from one store to another. Files of earlier releases do not say for which store
    they were written, and pass.

    Args:
        path: The path of the Parquet file.
        row_store_name: The name of the row store. None for a file that need not belong to one.

    Raises:
        UnreadableFile: The file was written for another row store.
    """
    if row_store_name is None:
        return

    stored_name = pl.read_parquet_metadata(path).get(ROW_STORE_METADATA_KEY)
    if stored_name not in (None, row_store_name):
        raise UnreadableFile(f"was written for {stored_name}")


def verify_file(path: Path, size_bytes: int, expected_hash: str, row_store_name: str | None = None) -> None:
    """Check the size and the content of a file, once per process and again after a change of the file.

    Args:
        path: The path of the file.
        size_bytes: Its size in bytes.
        expected_hash: The hash of its content.
        row_store_name: The row store that the file must have been written for.

    Raises:
        UnreadableFile: The file is missing or damaged, or was written for another row store.
        ReadError: The file cannot be read.
    """
    status = _require_size(path, size_bytes)
    state = _build_file_state(path, status)
    if state in _verified_states:
        return

    # The last bytes are checked first, so that a truncated file need not be read whole.
    check_size_and_footer(path, size_bytes)
    _require_content(path, expected_hash, row_store_name)

    # Remember the state, so that a later call need not read the file again. A file that was written a moment ago is
    # left out, because it may change again within the same tick of the clock, which its times would not show.
    if has_settled_times(status):
        _verified_states.add(state)


def _require_content(path: Path, expected_hash: str, row_store_name: str | None) -> None:
    """Read a file, and check its hash and the row store (a folder of computed rows) for which it was written.

    Raises:
        UnreadableFile: The file is missing or damaged, or was written for another row store.
        ReadError: The file cannot be read.
    """
    try:
        if compute_file_content_hash(path) != expected_hash:
            raise UnreadableFile(DAMAGED_REASON)
        _require_row_store(path, row_store_name)
    except FileNotFoundError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error


def pieces(frames: Iterable[pl.DataFrame], min_piece_bytes: int = TARGET_FILE_BYTES) -> Iterator[pl.DataFrame]:
    """Combine consecutive frames into pieces that take at least `min_piece_bytes` bytes of memory each.

    Frames are never split, and the last piece may be smaller. If there is a frame at all, there is a piece,
    even without rows.
    """
    waiting: list[pl.DataFrame] = []  # frames of the next piece
    waiting_bytes = 0.0

    for frame in frames:
        waiting.append(frame)
        waiting_bytes += frame.estimated_size()

        if waiting_bytes >= min_piece_bytes:
            yield pl.concat(waiting)
            waiting = []
            waiting_bytes = 0.0

    if len(waiting) == 1:
        yield waiting[0]
    elif waiting:
        yield pl.concat(waiting)


class ContentHash:
    """Hashes rows, in order, to 16 hexadecimal characters: the data version of a part.

    Names and types of columns count too. Volatile columns, which measure a run, such as seconds, do not count.

    Each column has a few hash streams (XXH3): one for which rows are null, one for the lengths of texts and lists, and
    one for the values. A stream is named by its column and by what it holds, such as "input lengths".

    Example:
        content_hash = ContentHash(volatile_columns=["seconds"])
        for frame in frames:
            content_hash.update(frame)
        data_version = content_hash.hexdigest()
    """

    def __init__(self, volatile_columns: Collection[str] = ()) -> None:
        self._volatile_columns = tuple(volatile_columns)
        self._streams_by_name: dict[str, xxh3_128] = {}
        self._schema_text = ""  # the schema of the first frame, as text; "" before

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

        columns = frame.drop(self._volatile_columns, strict=False).to_dict()
        for name, series in columns.items():
            array = series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
            self._add_values(name, array)

    def hexdigest(self) -> str:
        """Return the hash of all rows so far."""
        hashes = {name: stream.hexdigest() for name, stream in self._streams_by_name.items()}
        return fingerprint([self._schema_text, hashes])

    def _set_schema(self, schema: pl.Schema) -> None:
        """Remember the schema of the rows.

        Raises:
            ValueError: The schema differs from that of earlier rows.
        """
        schema_text = _format_schema(tuple(schema.items()), self._volatile_columns)
        if self._schema_text and schema_text != self._schema_text:
            raise ValueError(f"a part has one schema: {self._schema_text} and then {schema_text}")
        self._schema_text = schema_text

    def _add_values(self, stream_prefix: str, values: pa.Array) -> None:
        """Add the values of a column, or values nested in it, to the hash.

        Which values are null goes into one stream, and the others into streams of their own: those of a column `tokens`
        are "tokens nulls" and "tokens values".

        Args:
            stream_prefix: The beginning of the names of the hash streams, such as the name of the column.
            values: The values, as an Arrow array.

        Raises:
            TypeError: The values are of a type that no table has.
        """
        arrow_type = values.type
        self._add_bytes(f"{stream_prefix} nulls", np.asarray(values.is_null()))

        if _is_text_type(arrow_type):
            self._add_texts(stream_prefix, values)
        elif pa.types.is_large_list(arrow_type):
            self._add_lists(stream_prefix, values)
        elif pa.types.is_struct(arrow_type):
            self._add_structs(stream_prefix, values)
        elif pa.types.is_primitive(arrow_type):
            self._add_bytes(f"{stream_prefix} values", _convert_to_numbers(values))
        else:
            raise TypeError(f"{stream_prefix}: no table holds {arrow_type}")

    def _add_texts(self, stream_prefix: str, texts: pa.Array) -> None:
        """Add the lengths of texts (0 for null), and their bytes."""
        if texts.null_count:  # the memory of a null may hold bytes of former values, which must not count
            texts = pc.fill_null(texts, pa.scalar(b"", texts.type))
        self._add_bytes(f"{stream_prefix} lengths", pc.binary_length(texts).to_numpy())
        self._add_text_bytes(f"{stream_prefix} text", texts)

    def _add_lists(self, stream_prefix: str, lists: pa.Array) -> None:
        """Add the lengths of lists (0 for null), and their items."""
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        self._add_bytes(f"{stream_prefix} lengths", lengths.to_numpy())
        self._add_values(f"{stream_prefix} items", lists.flatten())

    def _add_structs(self, stream_prefix: str, structs: pa.Array) -> None:
        """Add the values of each field of structs."""
        for field, field_values in zip(structs.type, structs.flatten(), strict=True):
            self._add_values(f"{stream_prefix} {field.name}", field_values)

    def _add_text_bytes(self, stream_name: str, texts: pa.Array) -> None:
        """Add the bytes of all texts of an Arrow array to a stream, without copying them."""
        _, offsets_buffer, text_buffer = texts.buffers()  # the first buffer says which texts are null
        if text_buffer is None:  # there is no text
            return

        # `text_buffer` has all texts one after the other. Text i goes from byte `text_offsets[i]` to
        # `text_offsets[i + 1]`. If the array is a slice of a longer one, its first text is number `texts.offset`.
        text_offsets = np.frombuffer(offsets_buffer, np.int64)
        start = text_offsets[texts.offset]
        end = text_offsets[texts.offset + len(texts)]
        self._add_bytes(stream_name, memoryview(text_buffer)[start:end])

    def _add_bytes(self, stream_name: str, values: NDArray[Any] | memoryview) -> None:
        """Add the bytes of an array, or of a view of memory, to the hash stream of that name, such as "input lengths".

        A stream is one of the hashes of a column. It is made when the first bytes for it come.
        """
        if isinstance(values, memoryview):
            content = values
        else:
            content = np.ascontiguousarray(values).data

        if stream_name not in self._streams_by_name:
            self._streams_by_name[stream_name] = xxh3_128()
        self._streams_by_name[stream_name].update(content)


def _is_text_type(arrow_type: pa.DataType) -> bool:
    """Return whether the values of an Arrow type are texts or bytes."""
    return bool(pa.types.is_large_string(arrow_type) or pa.types.is_large_binary(arrow_type))


def _convert_to_numbers(values: pa.Array) -> NDArray[Any]:
    """Turn an Arrow array of numbers, days or times into numbers.

    Days and times become integers. Null becomes 0, because the memory of a null may hold anything.
    """
    numbers = values
    if pa.types.is_temporal(values.type):
        integer_type = INTEGER_TYPES_BY_BITS[values.type.bit_width]
        numbers = values.view(integer_type)

    if numbers.null_count:
        zero = pa.scalar(0).cast(numbers.type)
        numbers = numbers.fill_null(zero)

    array: NDArray[Any] = numbers.to_numpy(zero_copy_only=False)
    return array


@lru_cache(maxsize=256)
def _format_schema(columns: tuple[tuple[str, pl.DataType], ...], volatile_columns: tuple[str, ...]) -> str:
    """Return the names and types of all columns as text. Volatile columns (measurements) are left out."""
    names_and_types = [(name, str(dtype)) for name, dtype in columns if name not in volatile_columns]
    return str(names_and_types)


INTEGER_TYPES_BY_BITS = {32: pa.int32(), 64: pa.int64()}
"""The integer type with as many bits as a type of days or times."""
