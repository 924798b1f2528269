"""How far a stage is: a sink for the context that runs it, because a stage does not know who is watching."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Sink = Callable[[str, int, int], None]
"""Called with the stage's name, the units done and the units there are."""


def _silent(stage: str, done: int, total: int) -> None:
    """Nobody is watching."""


_sink: ContextVar[Sink] = ContextVar("sink", default=_silent)


@contextmanager
def watched_by(sink: Sink) -> Iterator[None]:
    """Sends every stage's progress to `sink` inside the block."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


def progress_of(stage: str) -> Callable[[int, int], None]:
    """What a stage calls after each chunk, with the units done and the units there are."""
    sink = _sink.get()
    return lambda done, total: sink(stage, done, total)
