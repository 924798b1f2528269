"""Run calls with time limits, retries, a rate and concurrency; check and clean their results."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import ToolLimits
from toolformer_dag.texts.calls import clean_result
from toolformer_dag.tools.tool import LOST, RetryableError, Tool, ToolCall, ToolDown, ToolResult


class Rate:
    """Spreads the calls of this process evenly over time; `per_s` None means no limit."""

    def __init__(self, per_s: float | None) -> None:
        self._gap = 1 / per_s if per_s else 0.0
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, calls: int) -> None:
        """Sleep until `calls` more calls may start."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + calls * self._gap
        if begin > now:
            time.sleep(begin - now)


def check_results(tool: Tool, batch: Sequence[ToolCall], results: object) -> list[ToolResult]:
    """Return the results of `Tool.run`. Raises ToolDown unless they are a list with a ToolResult per call."""
    if not (isinstance(results, Sequence) and len(results) == len(batch) and all(map(_is_result, results))):
        raise ToolDown(
            f"[tools.{tool.key}]: {type(tool).__name__}.run returned {results!r:.200} for {len(batch)} calls; it must "
            "return a list of one ToolResult per call, in order, whose result is a str or None"
        )
    return list(results)


def _is_result(value: object) -> bool:
    return isinstance(value, ToolResult) and isinstance(value.reason if value.result is None else value.result, str)


def share_seconds(results: Sequence[ToolResult], seconds: float) -> list[ToolResult]:
    """Give every result without a time of its own an equal share of the batch's `seconds`."""
    share = seconds / len(results)
    return [result if result.seconds else replace(result, seconds=share) for result in results]


def cleaned_result(result: ToolResult, max_characters: int) -> ToolResult:
    """Clean a result for e(c, r); the reason is `empty_result` where nothing is left."""
    if result.result is None:
        return result
    cleaned = clean_result(result.result, max_characters)
    return replace(result, result=cleaned) if cleaned else replace(result, result=None, reason="empty_result")


T = TypeVar("T")


class TimedOut(Exception):
    """The work did not end in time; its thread keeps running."""


class TimedWorker(Generic[T]):
    """Runs functions in a daemon thread, so that a backend keeps its per-thread state.

    Python cannot end a thread. When work exceeds its limit, its thread keeps running and a new thread takes over. The
    old thread ends with the process at the latest. Not covered: the resources that it still holds (memory, locks, the
    interpreter's lock in native code).
    """

    def __init__(self) -> None:
        self._jobs = self._start()

    def outcome(self, function: Callable[[], T], seconds: float) -> Future[T]:
        """Run `function` and return a completed future with its result or exception. Raises TimedOut."""
        future: Future[T] = Future()
        self._jobs.put((function, future))
        try:
            future.exception(timeout=seconds)
        except TimeoutError:
            self.close()
            self._jobs = self._start()
            raise TimedOut from None
        return future

    def close(self) -> None:
        """End the thread once it is idle."""
        self._jobs.put(None)

    @staticmethod
    def _start() -> "SimpleQueue[tuple[Callable[[], T], Future[T]] | None]":
        jobs: SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), daemon=True).start()
        return jobs


def _serve(jobs: "SimpleQueue[tuple[Callable[[], T], Future[T]] | None]") -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller decides about any exception of user code
            future.set_exception(error)


_log = logging.getLogger(__name__)


class Attempts:
    """Runs batches in a worker; a batch returns results or the reason why it failed as a whole."""

    def __init__(self, tool: Tool, limits: ToolLimits, rate: Rate, worker: TimedWorker[list[ToolResult]]) -> None:
        self._tool, self._limits, self._rate, self._worker = tool, limits, rate, worker

    def run(self, batch: Sequence[ToolCall]) -> list[ToolResult] | str:
        """Return the results with their seconds, or `timeout`, `unavailable` or the name of an exception.

        Only a RetryableError leads to a retry. Raises ToolDown.
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
            return self._raised(batch, error)
        self._rate.wait(len(batch))
        began = time.monotonic()
        try:
            done = self._worker.outcome(lambda: self._tool.run(batch), self._limits.timeout_s * len(batch))
        except TimedOut:
            self._tool.timed_out()
            return self._failed(batch, "timeout", f"no answer in {self._limits.timeout_s * len(batch):g} s")
        seconds = time.monotonic() - began
        if (raised := done.exception()) is not None:
            return self._raised(batch, raised)
        return share_seconds(check_results(self._tool, batch, done.result()), seconds)

    def _raised(self, batch: Sequence[ToolCall], error: BaseException) -> str:
        if isinstance(error, ToolDown):
            raise error
        reason = "unavailable" if isinstance(error, RetryableError) else type(error).__name__
        return self._failed(batch, reason, repr(error))

    def _failed(self, batch: Sequence[ToolCall], reason: str, detail: str) -> str:
        _log.warning("%s: %d calls from %.80r on: %s", self._tool.key, len(batch), batch[0].input, detail[:500])
        return reason


FAILURES_IN_A_ROW = 10  # after this many lost calls in a row, the tool counts as down

CallBatch = Sequence[ToolCall]
IdleWorkers = SimpleQueue[TimedWorker[list[ToolResult]]]


def run_calls(tool: Tool, calls: CallBatch, limits: ToolLimits) -> list[ToolResult]:
    """Run a single list of calls as `Runner(tool, limits).run(calls)` does."""
    return Runner(tool, limits).run(calls)


class Runner:
    """Runs calls of a tool under its limits; keep a Runner per tool, because rate and failures are counted across runs.

    A batch that fails as a whole is run again call by call, so that a bad input loses a single call. The reason of a
    lost call (`ToolResult.lost`) is `lost:timeout`, `lost:unavailable` (no retry succeeded) or `lost:<exception>`.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._tool = tool
        self._limits = limits
        self._rate = Rate(limits.rate_per_s)
        self._lost_in_a_row = 0
        self._prepared = False

    def run(self, calls: CallBatch) -> list[ToolResult]:
        """Return a result per call, in order, cleaned for e(c, r); equal calls are run once.

        The tool is prepared before its first call, outside the time limits. Raises ToolDown when the tool raises it,
        violates its interface, or loses FAILURES_IN_A_ROW calls in a row; all results of `calls` are then discarded.
        With a concurrency above 1, running batches are first waited for, at most to their time limit.
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
                f"[tools.{self._tool.key}]: cannot be prepared, {type(error).__name__}: {error}; fix it and run again"
            ) from error
        self._prepared = True

    def _run_distinct(self, calls: CallBatch) -> list[ToolResult]:
        size, at_once = self._tool.batch_size, self._limits.concurrency
        batches = [calls[at : at + size] for at in range(0, len(calls), size)]
        with _idle_workers(at_once) as workers:
            run = partial(self._run_batch, workers)
            if at_once == 1:  # in this thread, so that an interrupt takes effect immediately
                return [result for batch in batches for result in run(batch)]
            with ThreadPoolExecutor(at_once) as pool:
                return [result for results in pool.map(run, batches) for result in results]

    def _run_batch(self, workers: IdleWorkers, batch: CallBatch) -> list[ToolResult]:
        worker = workers.get()
        try:
            return list(self._results(batch, Attempts(self._tool, self._limits, self._rate, worker)))
        finally:
            workers.put(worker)

    def _results(self, batch: CallBatch, attempts: Attempts) -> Iterator[ToolResult]:
        began = time.monotonic()
        outcome = attempts.run(batch)
        if not isinstance(outcome, str):
            self._lost_in_a_row = 0
            yield from (cleaned_result(result, self._limits.max_result_characters) for result in outcome)
        elif len(batch) > 1:
            for call in batch:
                yield from self._results([call], attempts)
        else:
            yield self._lost_call(outcome, time.monotonic() - began)

    def _lost_call(self, why: str, seconds: float) -> ToolResult:
        self._lost_in_a_row += 1  # concurrent batches may miscount by a few
        if self._lost_in_a_row >= FAILURES_IN_A_ROW:
            raise ToolDown(
                f"[tools.{self._tool.key}]: {FAILURES_IN_A_ROW} calls in a row got no answer, the last with: {why}; "
                "see the log for details, fix the backend or raise the section's limits, and run again"
            )
        return ToolResult(None, LOST + why, seconds)


@contextmanager
def _idle_workers(number: int) -> Iterator[IdleWorkers]:
    workers: IdleWorkers = SimpleQueue()
    for _ in range(number):
        workers.put(TimedWorker())
    try:
        yield workers
    finally:
        while not workers.empty():
            workers.get().close()
