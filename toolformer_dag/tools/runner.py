"""Running calls: time limits, retries, a rate, several at once; every result is checked and cleaned."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from toolformer_dag.errors import UserError
from toolformer_dag.texts.calls import clean_result
from toolformer_dag.tools.tool import LOST, RetryableError, Tool, ToolCall, ToolDown, ToolResult


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Seconds are wall-clock. None of it enters a fingerprint but `max_result_characters`.

    timeout_s: what one call may take; a batch of n may take n times that.
    retries, backoff_s: how often a batch that raised RetryableError is tried again, and the first pause; it doubles.
    rate_per_s: calls begun per second over the whole lane of this process; None: unbounded.
    concurrency: batches that run at once.
    max_result_characters: where a result is cut.
    """

    timeout_s: float = 30.0
    retries: int = 2
    backoff_s: float = 0.5
    rate_per_s: float | None = None
    concurrency: int = 1
    max_result_characters: int = 400


class Rate:
    """Spreads calls evenly over time; `per_s` None lets everything through. Counts the calls of this process alone."""

    def __init__(self, per_s: float | None) -> None:
        self._gap = 1 / per_s if per_s else 0.0
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, calls: int) -> None:
        """Sleep until `calls` more calls may begin."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + calls * self._gap
        if begin > now:
            time.sleep(begin - now)


def check_results(tool: Tool, batch: Sequence[ToolCall], results: object) -> list[ToolResult]:
    """The results, when they are one ToolResult with texts per call; else ToolDown: such a tool is written wrongly."""
    if not (isinstance(results, Sequence) and len(results) == len(batch) and all(map(_is_result, results))):
        raise ToolDown(
            f"[tools.{tool.key}]: {type(tool).__name__}.run returned {results!r:.200} for {len(batch)} calls; it must "
            "return a list of one ToolResult per call, in order, whose result is a str or None"
        )
    return list(results)


def _is_result(value: object) -> bool:
    return isinstance(value, ToolResult) and isinstance(value.reason if value.result is None else value.result, str)


def timed(results: Sequence[ToolResult], seconds: float) -> list[ToolResult]:
    """Every result that does not tell its own time gets an equal share of the batch's `seconds`."""
    share = seconds / len(results)
    return [result if result.seconds else replace(result, seconds=share) for result in results]


def finished(result: ToolResult, max_characters: int) -> ToolResult:
    """The result cleaned for e(c, r); reason `empty_result` where nothing is left of it."""
    if result.result is None:
        return result
    cleaned = clean_result(result.result, max_characters)
    return replace(result, result=cleaned) if cleaned else replace(result, result=None, reason="empty_result")


T = TypeVar("T")


class TimedOut(Exception):
    """The work did not end in time; its thread was left behind."""


class TimedWorker(Generic[T]):
    """Runs functions one after the other in one daemon thread, so that what a backend keeps per thread stays warm.

    Work that exceeds its limit is left behind in its thread and a fresh thread takes over: Python cannot end a thread.
    Not covered: what the work left behind still holds (memory, locks, the interpreter's lock in native code). It ends
    with the process, which it does not keep alive.
    """

    def __init__(self) -> None:
        self._jobs = self._start()

    def outcome(self, function: Callable[[], T], seconds: float) -> Future[T]:
        """A finished future with what `function` returned or raised; TimedOut after `seconds`."""
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
        """Let the thread end once it is idle."""
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
        except BaseException as error:  # noqa: BLE001 - foreign code: whatever it raises is the caller's to judge
            future.set_exception(error)


_log = logging.getLogger(__name__)


class Attempts:
    """Runs batches in one worker; a batch either has results or a short reason why it failed as a whole."""

    def __init__(self, tool: Tool, limits: ToolLimits, rate: Rate, worker: TimedWorker[list[ToolResult]]) -> None:
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


FAILURES_IN_A_ROW = 10  # as many calls lost one after the other are no accident: the tool is down

CallBatch = Sequence[ToolCall]
IdleWorkers = SimpleQueue[TimedWorker[list[ToolResult]]]


def run_calls(tool: Tool, calls: CallBatch, limits: ToolLimits) -> list[ToolResult]:
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

    def run(self, calls: CallBatch) -> list[ToolResult]:
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

    def _run_distinct(self, calls: CallBatch) -> list[ToolResult]:
        size, at_once = self._tool.batch_size, self._limits.concurrency
        batches = [calls[at : at + size] for at in range(0, len(calls), size)]
        with _idle_workers(at_once) as workers:
            run = partial(self._run_batch, workers)
            if at_once == 1:  # in this thread, which an interrupt then reaches at once
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
def _idle_workers(number: int) -> Iterator[IdleWorkers]:
    workers: IdleWorkers = SimpleQueue()
    for _ in range(number):
        workers.put(TimedWorker())
    try:
        yield workers
    finally:
        while not workers.empty():
            workers.get().close()
