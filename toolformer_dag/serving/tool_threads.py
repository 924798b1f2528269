"""Run the calls of a tool in threads, while decoding goes on."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from toolformer_dag.decoding.open_calls import run_tool_calls
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import Tool, ToolCall, ToolResult


class QueuedCall(NamedTuple):
    """A call that waits for a thread, with the arguments of `ToolThreads.submit_call`."""

    tool_call: ToolCall
    is_wanted: Callable[[], bool]
    on_result: Callable[[ToolResult], None]


class ToolThreads:
    """Threads that run a tool's calls in the order in which they came, up to `limits.concurrency` at once.

    A call that hangs blocks its thread until the tool's time limit. A thread ends when no call waits.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        """Prepare to run calls. Threads are only started once there are calls."""
        self._runner = Runner(tool, limits)
        self._max_threads = limits.concurrency
        self._running_thread_count = 0  # `_lock` is held to change this and the queue
        self._queued_calls: deque[QueuedCall] = deque()
        self._lock = threading.Lock()

    def submit_call(
        self, tool_call: ToolCall, *, is_wanted: Callable[[], bool], on_result: Callable[[ToolResult], None]
    ) -> None:
        """Queue a call to be run in one of the threads, and return at once.

        Args:
            tool_call: The input of the call, and its context.
            is_wanted: Called in that thread just before the call is run. If it returns False, the call is not
                run, and `on_result` is not called.
            on_result: Called in that thread with the result.
        """
        with self._lock:
            self._queued_calls.append(QueuedCall(tool_call, is_wanted, on_result))

            # If all threads run already, one of them takes the call when it has finished another.
            if self._running_thread_count < self._max_threads:
                self._running_thread_count += 1
                threading.Thread(target=self._run_calls, daemon=True).start()

    def _run_calls(self) -> None:
        """Run queued calls until none is left. This is the body of each thread."""
        queued_call = self._take_next_call()
        while queued_call is not None:
            if queued_call.is_wanted():
                [result] = run_tool_calls(self._runner, [queued_call.tool_call])
                queued_call.on_result(result)
            queued_call = self._take_next_call()

    def _take_next_call(self) -> QueuedCall | None:
        """Take the next call from the queue. Return None if it is empty, and count this thread as ended."""
        with self._lock:
            if self._queued_calls:
                return self._queued_calls.popleft()
            self._running_thread_count -= 1
            return None
