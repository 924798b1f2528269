"""Count the work of a stage that stores computed rows: rows to compute and to reuse, and tokens of the model."""

from collections import Counter
from typing import TYPE_CHECKING

from toolformer_dag.computing.stage import Work

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine


def count_planned_work(kind: str, *, total: int, missing: int) -> Work:
    """Return how many of `total` rows are to be computed, and how many are reused.

    kind: what the rows are, such as "losses". missing: the number of rows that are not stored yet.
    """
    return Work(computed=Counter({kind: missing}), reused=Counter({kind: total - missing}))


class EngineMeter:
    """Counts the tokens that an engine runs after the meter was made."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._tokens_before = Counter(engine.counts.as_dict())

    def work(self, **computed: int) -> Work:
        """Return the tokens that were run so far, the backend that ran them, and the computed rows by kind."""
        return Work(
            tokens=Counter(self._engine.counts.as_dict()) - self._tokens_before,
            computed=Counter(computed),
            backends=frozenset({self._engine.backend.identity}),
        )
