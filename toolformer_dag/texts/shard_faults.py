"""The errors of reading a shard: its content is at fault, or it cannot be read this time. Imports no polars."""

from toolformer_dag.files import UserError


class ShardFault(Exception):
    """A shard whose content is damaged or in no known form: nothing of it may be used. `reason` is short and stable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ShardError(UserError):
    """A shard that cannot be opened or read now; another time it may."""
