"""The errors of reading a shard: its content is at fault, or it cannot be read this time."""

from collections.abc import Iterator
from typing import TypeVar

import polars as pl

from toolformer_dag.files import UserError

T = TypeVar("T")


class ShardFault(Exception):
    """A shard whose content is damaged or in no known form: nothing of it may be used. `reason` is short and stable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ShardError(UserError):
    """A shard that cannot be opened or read now; another time it may."""


def guarded(batches: Iterator[T]) -> Iterator[T]:
    """Yield what a reader yields; raise ShardFault unreadable_data for any error that a library raises meanwhile.

    So no shard stops the others. ShardFault, ShardError and OSError are passed on; too little memory is a ShardError.
    """
    try:
        yield from batches
    except (ShardFault, ShardError, OSError):
        raise
    except MemoryError as error:
        raise ShardError("the memory does not suffice to read it; free some, or split the file") from error
    except (Exception, pl.exceptions.PanicException) as error:
        message = " ".join(str(error).split())[:300]
        raise ShardFault("unreadable_data", f"{type(error).__name__}: {message}: no row of it is used") from error
