"""An engine that is loaded when there is something to compute, and not before."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine


class LazyEngine:
    """Calls `load` at most once and tells what went through the model since then."""

    def __init__(self, load: "Callable[[], Engine]") -> None:
        self._load = load
        self._engine: Engine | None = None
        self._before: Mapping[str, int] = {}

    def get(self) -> "Engine":
        """The engine; loads it the first time."""
        if self._engine is None:
            self._engine = self._load()
            self._before = self._engine.counts.as_dict()
        return self._engine

    def tokens(self) -> dict[str, int]:
        """Tokens by kind since the first `get`; empty where no engine was needed."""
        if self._engine is None:
            return {}
        return {kind: count - self._before[kind] for kind, count in self._engine.counts.as_dict().items()}
