"""Reading the batches of a shard so that no library's error stops the other shards."""

from collections.abc import Iterator
from typing import TypeVar

import polars as pl

from toolformer_dag.texts.shard_faults import ShardError, ShardFault

T = TypeVar("T")


def guard_from_library_errors(batches: Iterator[T]) -> Iterator[T]:
    """Yield the items of a reader, and raise any error of a library as an error of the shard.

    So no library's error stops the reading of the other shards.

    Raises:
        ShardFault: A library failed (unreadable_data), or the reader raised a ShardFault.
        ShardError: The memory does not suffice, a package is missing, or the reader raised a ShardError.
        OSError: The reader raised it.
    """
    try:
        yield from batches
    except (ShardFault, ShardError, OSError):
        raise
    except MemoryError as error:
        raise ShardError("the memory does not suffice to read it; free some, or split the file") from error
    except ImportError as error:
        raise ShardError(f"{error}; install the package that reads it") from error
    except (Exception, pl.exceptions.PanicException) as error:
        message = " ".join(str(error).split())[:300]
        raise ShardFault("unreadable_data", f"{type(error).__name__}: {message}: no row of it is used") from error
