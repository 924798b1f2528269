"""Running the calls of one tool: each distinct call once, under limits, every outcome a result or a named reason."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from toolformer_dag.errors import UserError
from toolformer_dag.tools.attempt import Attempts
from toolformer_dag.tools.limits import ToolLimits
from toolformer_dag.tools.outcome import finished
from toolformer_dag.tools.rate import Rate
from toolformer_dag.tools.tool import LOST, Tool, ToolCall, ToolDown, ToolResult
from toolformer_dag.tools.worker import Worker

FAILURES_IN_A_ROW = 10  # as many calls lost one after the other are no accident: the tool is down

Batch = Sequence[ToolCall]
Workers = SimpleQueue[Worker[list[ToolResult]]]


def run_calls(tool: Tool, calls: Batch, limits: ToolLimits) -> list[ToolResult]:
    """`Runner(tool, limits).run(calls)`, for a single list of calls."""
    return Runner(tool, limits).run(calls)


class Runner:
    """A tool under its limits. Rate and failures are counted from one `run` to the next: keep one Runner per tool.

    A batch that fails as a whole is run again call by call, so that one bad input loses one call. A lost call has a
    reason that begins with `lost:` (`ToolResult.lost`): `lost:timeout`, `lost:unavailable` (the retries are used up),
    else `lost:<exception>`.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._tool = tool
        self._limits = limits
        self._rate = Rate(limits.rate_per_s)
        self._lost_in_a_row = 0
        self._prepared = False

    def run(self, calls: Batch) -> list[ToolResult]:
        """One result per call, in order, cleaned for e(c, r); equal calls share one run.

        The tool is prepared before its first call, outside the time limits. Raises ToolDown when the tool says so,
        breaks its interface, or loses FAILURES_IN_A_ROW calls in a row; the results of that list are then given up.
        With a concurrency above 1, batches that have begun are waited for, at most to their time limit.
        """
        if calls and not self._prepared:
            self._prepare()
        distinct = list(dict.fromkeys(calls))
        found = dict(zip(distinct, self._run_distinct(distinct), strict=True))
        return [found[call] for call in calls]

    def _prepare(self) -> None:
        try:
            self._tool.prepare(lambda done: None)
        except UserError:
            raise
        except Exception as error:  # a user's tool may raise anything
            raise ToolDown(
                f"[tools.{self._tool.key}]: cannot be prepared, {type(error).__name__}: {error}; mend it and run again"
            ) from error
        self._prepared = True

    def _run_distinct(self, calls: Batch) -> list[ToolResult]:
        size, at_once = self._tool.batch_size, self._limits.concurrency
        batches = [calls[at : at + size] for at in range(0, len(calls), size)]
        with _idle_workers(at_once) as workers:
            run = partial(self._run_batch, workers)
            if at_once == 1:  # in this thread, which an interrupt then reaches at once
                return [result for batch in batches for result in run(batch)]
            with ThreadPoolExecutor(at_once) as pool:
                return [result for results in pool.map(run, batches) for result in results]

    def _run_batch(self, workers: Workers, batch: Batch) -> list[ToolResult]:
        worker = workers.get()
        try:
            return list(self._results(batch, Attempts(self._tool, self._limits, self._rate, worker)))
        finally:
            workers.put(worker)

    def _results(self, batch: Batch, attempts: Attempts) -> Iterator[ToolResult]:
        began = time.monotonic()
        outcome = attempts.run(batch)
        if not isinstance(outcome, str):
            self._lost_in_a_row = 0
            yield from (finished(result, self._limits.max_result_characters) for result in outcome)
        elif len(batch) > 1:
            for call in batch:
                yield from self._results([call], attempts)
        else:
            yield self._lose(outcome, time.monotonic() - began)

    def _lose(self, why: str, seconds: float) -> ToolResult:
        self._lost_in_a_row += 1  # where batches run at once, a race may miscount by a few
        if self._lost_in_a_row >= FAILURES_IN_A_ROW:
            raise ToolDown(
                f"[tools.{self._tool.key}]: {FAILURES_IN_A_ROW} calls in a row got no answer, the last one: {why}; see "
                "the log for details, mend the backend or raise the section's limits, and run again"
            )
        return ToolResult(None, LOST + why, seconds)


@contextmanager
def _idle_workers(number: int) -> Iterator[Workers]:
    workers: Workers = SimpleQueue()
    for _ in range(number):
        workers.put(Worker())
    try:
        yield workers
    finally:
        while not workers.empty():
            workers.get().close()
