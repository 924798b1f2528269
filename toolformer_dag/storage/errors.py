"""What can go wrong with the lake. Every message names the file, the reason and the remedy."""

from upath import UPath

from toolformer_dag.errors import UserError


class StorageError(UserError):
    """Base of everything that storage raises."""


class WriteError(StorageError):
    """Nothing was changed: what had been committed before is still there."""

    def __init__(self, path: UPath, error: OSError) -> None:
        super().__init__(
            f"cannot write {path}: {error.strerror or error}; free space or correct the rights and run again, "
            "what was committed before stays"
        )


class MissingPartition(StorageError):
    """A partition that nobody has published yet."""

    def __init__(self, table: str, partition: str) -> None:
        super().__init__(f"{table} has no partition {partition!r}; materialize {table} for {partition!r} first")


class DamagedPartition(StorageError):
    """A published partition whose files are gone, cut short or unreadable."""

    def __init__(self, table: str, partition: str, file: str, reason: str) -> None:
        super().__init__(
            f"{table}, partition {partition!r}: {file} {reason}; materialize {table} for {partition!r} again, "
            "rows that were paid for are reused"
        )
