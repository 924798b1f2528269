"""What a step holds of the lake in memory: the manifests of its tables, the names of its rows' files, asked for once.

What others change meanwhile is seen by the next step. What the step publishes itself is seen at once, is written in
batches, and by the process that leads the step alone: workers tell it what they have made (`News`).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

Answer = TypeVar("Answer")
News = tuple[str, ...] | tuple[str, str, bytes | None, bytes | None]
"""What a worker has made: (row store, file), or a part: (table, part, its line before, its line now)."""
UPLOADS_AT_ONCE = 8


@dataclass
class Session:
    """`held`: by place. `batching`: parts are published in batches. `news`: of a worker, for the leading process."""

    held: dict[str, Any] = field(default_factory=dict)
    batching: bool = False
    news: list[News] | None = None
    _uploads: list[Future[None]] = field(default_factory=list)
    _ordered: list[Future[None]] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(UPLOADS_AT_ONCE))
    _queue: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def once(self, place: str, ask: Callable[[], Answer]) -> Answer:
        """Return what is held, asking for it the first time."""
        if place not in self.held:
            self.held[place] = ask()
        answer: Answer = self.held[place]
        return answer

    def later(self, write: Callable[[], None], in_order: bool = False) -> None:
        """Write beside what goes on; at most a few files wait in memory. Raises what an earlier one raised.

        `in_order`: after those that were given so before it, of which at most two wait: a kill costs those alone.
        """
        pool, waiting, most = self._pool, self._uploads, 2 * UPLOADS_AT_ONCE
        if in_order:
            pool, waiting, most = self._queue, self._ordered, 2
        waiting.append(pool.submit(write))
        if len(waiting) > most:
            waiting[0].result()
            del waiting[0]

    def settle(self, in_order: bool = False) -> None:
        """Wait for what is written beside, or for what is so in order. Raises what it raised, each time.

        A manifest must not name such a file.
        """
        queues = [self._ordered] if in_order else [self._uploads, self._ordered]
        wait([upload for waiting in queues for upload in waiting])
        for waiting in queues:
            for upload in waiting:
                upload.result()
            waiting.clear()

    def take_news(self) -> tuple[News, ...]:
        """Return what a worker has made since it was asked last."""
        news, self.news = tuple(self.news or ()), []
        return news


_current: ContextVar[Session | None] = ContextVar("session", default=None)


def current() -> Session | None:
    """Return the session around this, if there is one."""
    return _current.get()


@contextmanager
def session(kept: Session | None = None) -> Iterator[Session]:
    """Hold what is read of the lake inside the block; one within another shares it, but for one that was `kept`."""
    made = kept or current() or Session()
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)
