"""Count the work of a stage that stores computed rows: rows to compute and to reuse, and tokens of the model."""

from collections import Counter
from typing import TYPE_CHECKING

from toolformer_dag.computing.stage import Work

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine


def count_planned_work(row_kind: str, *, total_count: int, missing_count: int) -> Work:
    """Return how many rows are to be computed, and how many are reused.

    Args:
        row_kind: The kind of the rows, such as "losses".
        total_count: How many rows are needed.
        missing_count: How many of them are not stored yet.
    """
    return Work(
        computed_rows_by_kind=Counter({row_kind: missing_count}),
        reused_rows_by_kind=Counter({row_kind: total_count - missing_count}),
    )


class EngineMeter:
    """A counter of the tokens that an engine (a loaded model) runs after the meter was made."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._tokens_at_start = Counter(engine.token_counts.as_dict())

    def measure_work(self, **computed_counts: int) -> Work:
        """Return the work since the meter was made: the tokens that were run, their backend, and the computed rows.

        Args:
            computed_counts: How many rows were computed, by their kind, such as `losses=12`.
        """
        return Work(
            tokens_by_kind=Counter(self._engine.token_counts.as_dict()) - self._tokens_at_start,
            computed_rows_by_kind=Counter(computed_counts),
            backend_identities=frozenset({self._engine.backend.identity}),
        )
