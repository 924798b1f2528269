"""Run the calls of a tool beside decoding."""

import threading
from collections import deque
from collections.abc import Callable

from toolformer_dag.decoding.generation import tool_results
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import Tool, ToolCall, ToolResult

OnResult = Callable[[ToolResult], None]


class ToolThreads:
    """Threads that run a tool's calls in order, one each, as many at once as its `concurrency` allows.

    A call that hangs holds its thread up to the tool's time limit. Threads end when nothing waits, or with the process.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._runner, self._most, self._running = Runner(tool, limits), limits.concurrency, 0
        self._waiting: deque[tuple[ToolCall, Callable[[], bool], OnResult]] = deque()
        self._lock = threading.Lock()

    def ask(self, call: ToolCall, wanted: Callable[[], bool], on_result: OnResult) -> None:
        """Pass the call's result to `on_result`, in another thread. A call that is no longer `wanted` is not run."""
        with self._lock:
            self._waiting.append((call, wanted, on_result))
            if self._running < self._most:
                self._running += 1
                threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (asked := self._next()) is not None:
            call, wanted, on_result = asked
            if wanted():
                on_result(tool_results(self._runner, [call])[0])

    def _next(self) -> tuple[ToolCall, Callable[[], bool], OnResult] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._running -= 1
            return None
