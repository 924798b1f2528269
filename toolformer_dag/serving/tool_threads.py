"""Run the calls of a tool in threads, while decoding goes on."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from toolformer_dag.decoding.open_calls import tool_results
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import Tool, ToolCall, ToolResult


class QueuedCall(NamedTuple):
    """A call that waits for a thread, with the arguments of `ToolThreads.submit`."""

    call: ToolCall
    is_wanted: Callable[[], bool]
    on_result: Callable[[ToolResult], None]


class ToolThreads:
    """Threads that run a tool's calls in the order in which they came, up to `limits.concurrency` at once.

    A call that hangs blocks its thread until the tool's time limit. A thread ends when no call waits.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._runner = Runner(tool, limits)
        self._most_threads = limits.concurrency
        self._running_threads = 0
        self._queue: deque[QueuedCall] = deque()
        self._lock = threading.Lock()

    def submit(self, call: ToolCall, *, is_wanted: Callable[[], bool], on_result: Callable[[ToolResult], None]) -> None:
        """Queue a call to be run in one of the threads.

        Args:
            is_wanted: Called in that thread just before the call is run. If it returns False, the call is not
                run, and `on_result` is not called.
            on_result: Called in that thread with the result.
        """
        with self._lock:
            self._queue.append(QueuedCall(call, is_wanted, on_result))
            if self._running_threads < self._most_threads:
                self._running_threads += 1
                threading.Thread(target=self._run_calls, daemon=True).start()

    def _run_calls(self) -> None:
        """Run queued calls until none is left, as the body of a thread."""
        queued = self._take_next_call()
        while queued is not None:
            if queued.is_wanted():
                [result] = tool_results(self._runner, [queued.call])
                queued.on_result(result)
            queued = self._take_next_call()

    def _take_next_call(self) -> QueuedCall | None:
        """Take the next call from the queue. Return None if it is empty, and count this thread as ended."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._running_threads -= 1
            return None
