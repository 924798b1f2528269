"""Part files: Parquet with its footer at the end, so that a file cut short can be told."""

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO

import polars as pl
from polars.exceptions import PanicException, PolarsError
from upath import UPath

from toolformer_dag.storage.errors import ReadError

MAGIC = b"PAR1"
PART_BYTES = 64 * 2**20
"""About how much memory the rows of one part file take; a published partition is written in parts of this size."""


class UnreadablePart(Exception):
    """A part file that is gone, cut short or damaged. The message is the reason."""


def encode(frame: pl.DataFrame) -> bytes:
    """The bytes of a part file."""
    buffer = BytesIO()
    frame.write_parquet(buffer, compression="zstd", compression_level=1)
    return buffer.getvalue()


def check(path: UPath, size: int) -> None:
    """Raises UnreadablePart unless `path` has `size` bytes and ends as a Parquet file does. Reads 4 bytes.

    Raises ReadError where the file cannot be looked at, which says nothing of what is in it.
    """
    try:
        found = path.stat().st_size
        if found != size:
            raise UnreadablePart(f"has {found} bytes, not the {size} that were written")
        with path.open("rb") as stream:
            stream.seek(-len(MAGIC), 2)
            tail = stream.read()
    except FileNotFoundError as error:
        raise UnreadablePart(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error
    if tail != MAGIC:
        raise UnreadablePart("has no Parquet footer")


def read(path: UPath, size: int, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """The rows of a part file, all columns or those named. Raises UnreadablePart, ReadError."""
    check(path, size)
    content = BytesIO(_content(path))  # apart from decoding: polars has OSError for damage, too
    try:
        return pl.read_parquet(content, columns=list(columns) if columns is not None else None)
    except (OSError, PolarsError, PanicException) as error:
        raise UnreadablePart(f"cannot be read: {error}") from error


def _content(path: UPath) -> bytes:
    try:
        return bytes(path.read_bytes())
    except FileNotFoundError as error:
        raise UnreadablePart(error.strerror or str(error)) from error
    except OSError as error:
        raise ReadError(path, error) from error


def pieces(frames: Iterable[pl.DataFrame], size: int = PART_BYTES) -> Iterator[pl.DataFrame]:
    """The same rows in frames of about `size` bytes, at least one; memory holds one of them."""
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
