"""What can go wrong with the lake. Every message names the file, the reason and the remedy."""

from upath import UPath

from toolformer_dag.errors import UserError
from toolformer_dag.storage.partition import behind


class StorageError(UserError):
    """Base of everything that storage raises."""


class WriteError(StorageError):
    """Nothing was changed: what had been committed before is still there."""

    def __init__(self, path: UPath, error: OSError) -> None:
        super().__init__(
            f"cannot write {path}: {error.strerror or error}; free space or correct the rights and run again, "
            "what was committed before stays"
        )


class ReadError(StorageError):
    """A file that is there and could not be read this time: it stays where it is."""

    def __init__(self, path: UPath, error: OSError) -> None:
        super().__init__(
            f"cannot read {path}: {error.strerror or error}; correct the rights or the disk and run again, "
            "the file was left as it is"
        )


class NotPlain(StorageError):
    """An identity or a record with a value that cannot be written down."""

    def __init__(self, owner: str, reason: str) -> None:
        super().__init__(
            f"{owner}: {reason}; what its rows are made from is written as JSON: turn the value into text, a number, "
            "a list or a mapping, in identity() where it is a tool's"
        )


class MissingPartition(StorageError):
    """A partition that nobody has published yet."""

    def __init__(self, table: str, partition: str) -> None:
        lacks = behind("has no partition", partition) or "was not made yet"
        super().__init__(f"{table} {lacks}; materialize {table}{behind(' for', partition)} first")


class DamagedPartition(StorageError):
    """A published partition whose files are gone, cut short or unreadable."""

    def __init__(self, table: str, partition: str, file: str, reason: str) -> None:
        where, which = behind(", partition", partition), behind(" for", partition)
        super().__init__(
            f"{table}{where}: {file} {reason}; materialize {table}{which} again, rows that were paid for are reused"
        )
