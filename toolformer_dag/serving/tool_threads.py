"""Run the calls of a tool beside decoding."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from toolformer_dag.decoding.open_calls import tool_results
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import Tool, ToolCall, ToolResult


class QueuedCall(NamedTuple):
    """A call that waits for a thread; `is_wanted` and `on_result` as in `ToolThreads.submit`."""

    call: ToolCall
    is_wanted: Callable[[], bool]
    on_result: Callable[[ToolResult], None]


class ToolThreads:
    """Threads that run a tool's calls in order, one each, as many at once as its `concurrency` allows.

    A call that hangs holds its thread up to the tool's time limit. Threads end when nothing waits, or with the process.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._runner = Runner(tool, limits)
        self._most_threads = limits.concurrency
        self._running_threads = 0
        self._queue: deque[QueuedCall] = deque()
        self._lock = threading.Lock()

    def submit(self, call: ToolCall, *, is_wanted: Callable[[], bool], on_result: Callable[[ToolResult], None]) -> None:
        """Run a call in a thread; `on_result` gets its result there.

        `is_wanted` is asked right before the call would run, in the same thread. A call that is no longer wanted is not
        run, and has no result.
        """
        with self._lock:
            self._queue.append(QueuedCall(call, is_wanted, on_result))
            if self._running_threads < self._most_threads:
                self._running_threads += 1
                threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Run queued calls until none is left."""
        queued = self._next()
        while queued is not None:
            if queued.is_wanted():
                [result] = tool_results(self._runner, [queued.call])
                queued.on_result(result)
            queued = self._next()

    def _next(self) -> QueuedCall | None:
        """Take the next call; None where there is none, and this thread is no longer counted."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._running_threads -= 1
            return None
