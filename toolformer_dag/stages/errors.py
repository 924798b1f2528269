"""Inputs of a stage that do not fit each other."""

from toolformer_dag.errors import UserError


class StaleInput(UserError):
    """An input was published anew since another one was made from it."""

    def __init__(self, stage: str, partition: str, what: str, remedy: str) -> None:
        super().__init__(f"{stage}, partition {partition!r}: {what}; materialize {remedy} for {partition!r} first")
