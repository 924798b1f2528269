"""Inputs of a stage that do not fit each other."""

from toolformer_dag.errors import UserError
from toolformer_dag.storage.partition import behind


class StaleInput(UserError):
    """An input was published anew since another one was made from it."""

    def __init__(self, stage: str, partition: str, what: str, asset: str) -> None:
        where, which = behind(", partition", partition), behind(" for", partition)
        super().__init__(
            f"{stage}{where}: {what}; materialize {asset}{which} first, or all with `toolformer-dag stale --run`"
        )
