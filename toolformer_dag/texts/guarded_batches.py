"""Reading the batches of a shard so that no library's error stops the other shards."""

from collections.abc import Iterator
from typing import TypeVar

import polars as pl

from toolformer_dag.texts.shard_faults import ShardError, ShardFault

T = TypeVar("T")


def guard_from_library_errors(batches: Iterator[T]) -> Iterator[T]:
    """Yield the items of a reader; raise errors of libraries as ShardFault unreadable_data.

    ShardFault, ShardError and OSError are raised unchanged. MemoryError and ImportError become ShardError, since the
    shard can be read with more memory, or once the missing package is installed.
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
