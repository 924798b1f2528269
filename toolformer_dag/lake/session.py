"""The session of a step: what the step has read of the lake and remembers, and what it still has to write.

A session is ambient: `with enter_session():` opens one for everything that runs inside the block, and
`get_current_session()` finds it. Tables and row stores (computed rows) behave differently inside one:

- A manifest, and the names of a row store's files, are read once. What others change is seen by the next step; what the
  step publishes itself is seen at once. Without a session they are read at every call.
- If `is_batching`, a publication waits in the remembered manifest and is written with others, and files are written in
  the background. Otherwise both are written at once.
- In a worker process, where `unsent_news` is a list, a publication is reported to the process that leads the step, and
  that process writes the manifest.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Answer = TypeVar("Answer")
MAX_CONCURRENT_UPLOADS = 8
"""Files that a session writes in the background at once, where their order does not matter."""


class NewRowFile(NamedTuple):
    """A file of computed rows that a worker process has written.

    Attributes:
        store_name: The path of its row store in the lake.
        file_name: The name of the file.
    """

    store_name: str
    file_name: str


class NewPart(NamedTuple):
    """A part of a table that a worker process has published or withdrawn.

    Attributes:
        table_name: The name of the table.
        part_name: The name of the part.
        old_line: The former line of the part in the manifest (the list of parts), or None if it had none.
        new_line: The new line, or None if the part was withdrawn.
    """

    table_name: str
    part_name: str
    old_line: bytes | None
    new_line: bytes | None


News = NewRowFile | NewPart
"""What a worker tells the process that leads its step."""


class BackgroundWrites:
    """Writes that run in threads while the step computes.

    The error of a write is raised by the next call of `start_write` that waits for it, or by `raise_errors`.
    """

    def __init__(self, thread_count: int, max_open_writes: int) -> None:
        """Prepare the threads.

        Args:
            thread_count: The number of writes that run at once.
            max_open_writes: The number of writes that may be running or waiting. More make `start_write` wait.
        """
        self._pool = ThreadPoolExecutor(thread_count)
        self._max_open_writes = max_open_writes
        self._open_writes: list[Future[None]] = []  # the oldest first

    def start_write(self, write: Callable[[], None]) -> None:
        """Start a write in the background. If too many are open, wait for the oldest one.

        Raises:
            Exception: The error of the oldest write, if it failed.
        """
        self._open_writes.append(self._pool.submit(write))
        if len(self._open_writes) > self._max_open_writes:
            self._open_writes[0].result()
            del self._open_writes[0]

    def wait_for_all(self) -> None:
        """Wait until all writes have ended, including failed ones, without raising their errors."""
        wait(list(self._open_writes))

    def raise_errors(self) -> None:
        """Raise the error of the first write that failed, or forget all writes if none did.

        `wait_for_all` has to be called before. After an error, each further call raises it again.

        Raises:
            Exception: The error of the first write that failed.
        """
        for open_write in self._open_writes:
            open_write.result()
        self._open_writes.clear()


@dataclass
class LakeSession:
    """What a step remembers of the lake, and what it still has to write.

    Attributes:
        cache_by_place: Manifests, listings and names of files, by the place that they were read from.
        is_batching: Whether parts are published in batches (`Lake.batch_publications`), and files written in the
            background.
        unsent_news: In a worker process, what it has made since the last `take_news`. None in the process that leads
            the step.
    """

    cache_by_place: dict[str, Any] = field(default_factory=dict)
    is_batching: bool = False
    unsent_news: list[News] | None = None
    _unordered_writes: BackgroundWrites = field(
        default_factory=lambda: BackgroundWrites(MAX_CONCURRENT_UPLOADS, 2 * MAX_CONCURRENT_UPLOADS)
    )
    _ordered_writes: BackgroundWrites = field(default_factory=lambda: BackgroundWrites(1, 2))

    def get_or_compute(self, place: str, compute_answer: Callable[[], Answer]) -> Answer:
        """Return the value that the session remembers under a key.

        Args:
            place: The key, mostly the place that the value is read from, such as the location of a folder.
            compute_answer: Computes the value. It is only called if nothing is remembered yet.
        """
        if place not in self.cache_by_place:
            self.cache_by_place[place] = compute_answer()
        answer: Answer = self.cache_by_place[place]
        return answer

    def write_in_background(self, write: Callable[[], None], in_order: bool = False) -> None:
        """Write a file in the background.

        Args:
            write: Writes the file.
            in_order: Write one file at a time, in the order of the calls. At most two wait, so that a kill
                loses only those. Otherwise several files are written at once.

        Raises:
            Exception: Anything that an earlier write raised.
        """
        writes = self._ordered_writes if in_order else self._unordered_writes
        writes.start_write(write)

    def settle(self, in_order: bool = False) -> None:
        """Wait until background writes have ended.

        Args:
            in_order: Only wait for writes that were started with `in_order`.

        Raises:
            Exception: The error of a write that failed. It is kept, so that each further call raises it again.
        """
        awaited_writes = [self._ordered_writes]
        if not in_order:
            awaited_writes = [self._unordered_writes, self._ordered_writes]

        # First wait for all writes, so that none goes on when an error is raised.
        for background_writes in awaited_writes:
            background_writes.wait_for_all()
        for background_writes in awaited_writes:
            background_writes.raise_errors()

    def take_news(self) -> tuple[News, ...]:
        """Return what a worker process has made since the last call, to be sent to the process that leads the step."""
        news = tuple(self.unsent_news or ())
        self.unsent_news = []
        return news


_current_session: ContextVar[LakeSession | None] = ContextVar("session", default=None)


def get_current_session() -> LakeSession | None:
    """Return the session of the `with` block around the caller, or None outside of one."""
    return _current_session.get()


@contextmanager
def enter_session(reused_session: LakeSession | None = None) -> Iterator[LakeSession]:
    """Open a session for the `with` block, or share the one that is open already.

    The session remembers what the block reads of the lake, such as the list of a table's parts, so that it is read only
    once. What other processes change meanwhile is then seen only by a read that bypasses the session.

    Args:
        reused_session: A session to go on with, instead of the open one or a new one.

    Yields:
        The session.
    """
    entered_session = reused_session or get_current_session() or LakeSession()
    reset_token = _current_session.set(entered_session)
    try:
        yield entered_session
    finally:
        _current_session.reset(reset_token)
