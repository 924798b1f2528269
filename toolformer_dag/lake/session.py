"""The session of a step: what the step has read of the lake and remembers, and what it still has to write.

A session is ambient: `with session():` opens one for everything that runs inside the block, and `get_current_session()`
finds it. Tables and row stores (computed rows) behave differently inside one:

- A manifest, and the names of a row store's files, are read once. What others change is seen by the next step; what the
  step publishes itself is seen at once. Without a session they are read at every call.
- Where `batching`, a publication waits in the held manifest and is written with others, and files are written in the
  background. Else both are written at once.
- In a worker process, where `news` is a list, a publication is told to the process that leads the step; that one writes
  the manifest.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Answer = TypeVar("Answer")
UPLOADS_AT_ONCE = 8
"""Files that a session writes in the background at once, where their order does not matter."""


class NewRowFile(NamedTuple):
    """A file of computed rows that a worker has written: its row store and its name."""

    store: str
    file: str


class NewPart(NamedTuple):
    """A part that a worker has made or withdrawn: its line in the manifest before and now; None where there is none."""

    table: str
    part: str
    line_before: bytes | None
    line: bytes | None


News = NewRowFile | NewPart
"""What a worker tells the process that leads its step."""


class BackgroundWrites:
    """Writes that go on in threads while the step computes; at most `most_waiting` are open at a time.

    An error of a write is raised by the next call of `add` that waits for it, or by `wait`.
    """

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._most_waiting = most_waiting
        self._open: list[Future[None]] = []  # the oldest first

    def add(self, write: Callable[[], None]) -> None:
        """Begin a write; wait for the oldest where too many are open."""
        self._open.append(self._pool.submit(write))
        if len(self._open) > self._most_waiting:
            self._open[0].result()
            del self._open[0]

    def finish(self) -> None:
        """Wait until all writes have ended, failed ones too. Raises nothing."""
        wait(list(self._open))

    def raise_errors(self) -> None:
        """Forget the writes that `finish` has waited for. Raises what the first of them raised, at each call again."""
        for write in self._open:
            write.result()
        self._open.clear()


@dataclass
class LakeSession:
    """What a step holds of the lake.

    - `held`: manifests, listings and names of files, by the place they were read from
    - `batching`: whether parts are published in batches (`Lake.batch`), and files written in the background
    - `news`: in a worker process, what it has made since `take_news`; None in the process that leads the step
    """

    held: dict[str, Any] = field(default_factory=dict)
    batching: bool = False
    news: list[News] | None = None
    _writes: BackgroundWrites = field(default_factory=lambda: BackgroundWrites(UPLOADS_AT_ONCE, 2 * UPLOADS_AT_ONCE))
    _ordered_writes: BackgroundWrites = field(default_factory=lambda: BackgroundWrites(1, 2))

    def once(self, place: str, ask: Callable[[], Answer]) -> Answer:
        """Return what is held for `place`; the first time, hold what `ask` returns."""
        if place not in self.held:
            self.held[place] = ask()
        answer: Answer = self.held[place]
        return answer

    def later(self, write: Callable[[], None], in_order: bool = False) -> None:
        """Write a file in the background.

        Args:
            write: Writes the file.
            in_order: Write one file at a time, in the order of the calls. At most two wait, so that a kill
                loses only those. Otherwise several files are written at once.

        Raises:
            Exception: Anything that an earlier write raised.
        """
        writes = self._ordered_writes if in_order else self._writes
        writes.add(write)

    def settle(self, in_order: bool = False) -> None:
        """Wait until background writes have ended.

        Args:
            in_order: Only wait for writes that `later` was given with `in_order`.

        Raises:
            Exception: The error of a write that failed. It is kept, so that each further call raises it again.
        """
        awaited = [self._ordered_writes] if in_order else [self._writes, self._ordered_writes]
        for writes in awaited:
            writes.finish()
        for writes in awaited:
            # Only after all writes have ended, so that none goes on when this raises.
            writes.raise_errors()

    def take_news(self) -> tuple[News, ...]:
        """Return what a worker has made since the last call."""
        news = tuple(self.news or ())
        self.news = []
        return news


_current: ContextVar[LakeSession | None] = ContextVar("session", default=None)


def get_current_session() -> LakeSession | None:
    """Return the session of the block around the caller, if there is one."""
    return _current.get()


@contextmanager
def session(kept: LakeSession | None = None) -> Iterator[LakeSession]:
    """Open a session for the `with` block, or share the one that is open already.

    The session remembers what is read of the lake.

    Args:
        kept: A session to go on with, instead of the open one or a new one.
    """
    entered = kept or get_current_session() or LakeSession()
    token = _current.set(entered)
    try:
        yield entered
    finally:
        _current.reset(token)
