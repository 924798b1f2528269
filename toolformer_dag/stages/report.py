"""What a stage tells about one run of it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` after every committed chunk."""


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """`work`: kind -> (computed, reused), such as samples; `tokens` through the model by kind, in this run alone.

    `rejections`: reason -> count; `damaged`: files that were put aside, with reasons. `seconds` of wall time.
    """

    stage: str
    tool: str | None
    partition: str | None
    rows: int
    data_version: str
    seconds: float
    tokens: Mapping[str, int] = field(default_factory=dict)
    rejections: Mapping[str, int] = field(default_factory=dict)
    work: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()

    @property
    def computed(self) -> int:
        """Rows of all kinds that were paid for in this run."""
        return sum(computed for computed, _ in self.work.values())

    @property
    def reused(self) -> int:
        """Rows of all kinds that had been paid for before."""
        return sum(reused for _, reused in self.work.values())


class Clock:
    """Wall time since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin
