"""The errors of reading a shard: its content is at fault, or it cannot be read this time. Imports no polars."""

from toolformer_dag.files import UserError


class ShardFault(Exception):
    """The content of a shard is damaged or in no known form, so that nothing of it may be used.

    Attributes:
        reason: The kind of fault, such as "empty_shard". It is short and the same for equal faults, for counting.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ShardError(UserError):
    """A shard cannot be opened or read at the moment. It may be readable at another time."""
