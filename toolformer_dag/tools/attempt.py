"""One batch against one tool: rate, time limit and retries."""

import logging
import time
from collections.abc import Sequence

from toolformer_dag.tools.limits import ToolLimits
from toolformer_dag.tools.outcome import check_results, timed
from toolformer_dag.tools.rate import Rate
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown, ToolResult
from toolformer_dag.tools.worker import TimedOut, Worker

_log = logging.getLogger(__name__)


class Attempts:
    """Runs batches in one worker; a batch either has results or a short reason why it failed as a whole."""

    def __init__(self, tool: Tool, limits: ToolLimits, rate: Rate, worker: Worker[list[ToolResult]]) -> None:
        self._tool, self._limits, self._rate, self._worker = tool, limits, rate, worker

    def run(self, batch: Sequence[ToolCall]) -> list[ToolResult] | str:
        """The results with the seconds of each, or `timeout`, `unavailable` or the name of an exception.

        Only a RetryableError is tried again. Raises ToolDown.
        """
        for retry in range(self._limits.retries + 1):
            if retry:
                time.sleep(self._limits.backoff_s * 2 ** (retry - 1))
            outcome = self._once(batch)
            if outcome != "unavailable":
                break
        return outcome

    def _once(self, batch: Sequence[ToolCall]) -> list[ToolResult] | str:
        try:
            self._tool.connect()
        except Exception as error:  # noqa: BLE001 - a user's tool may raise anything
            return self._accident(batch, error)
        self._rate.wait(len(batch))
        began = time.monotonic()
        try:
            done = self._worker.outcome(lambda: self._tool.run(batch), self._limits.timeout_s * len(batch))
        except TimedOut:
            self._tool.timed_out()
            return self._failed(batch, "timeout", f"no answer in {self._limits.timeout_s * len(batch):g} s")
        seconds = time.monotonic() - began
        if (raised := done.exception()) is not None:
            return self._accident(batch, raised)
        return timed(check_results(self._tool, batch, done.result()), seconds)

    def _accident(self, batch: Sequence[ToolCall], error: BaseException) -> str:
        if isinstance(error, ToolDown):
            raise error
        reason = "unavailable" if isinstance(error, RetryableError) else type(error).__name__
        return self._failed(batch, reason, repr(error))

    def _failed(self, batch: Sequence[ToolCall], reason: str, detail: str) -> str:
        _log.warning("%s: %d calls from %.80r on: %s", self._tool.key, len(batch), batch[0].input, detail[:500])
        return reason
