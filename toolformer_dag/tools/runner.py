"""Run calls with time limits, retries, a rate and concurrency; check and clean their results."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.calls import clean_result
from toolformer_dag.tools.tool import LOST, RetryableError, Tool, ToolCall, ToolDown, ToolResult, blamed, described

_log = logging.getLogger(__name__)
LONGEST_PAUSE = 3600.0
"""Seconds between two tries at most, however often the pause was doubled."""


REASON_CHARACTERS = 100
NOT_A_RESULT = "not_a_result"


def check_results(tool: Tool, batch: Sequence[ToolCall], results: object) -> list[ToolResult]:
    """Return the results of `Tool.run` with plain fields (see `plain_result`).

    Anything else in the list is a lost call, `lost:not_a_result`. Raises ToolDown unless there is one entry per call.
    """
    if not isinstance(results, list | tuple) or len(results) != len(batch):
        told = f"{len(results)} results" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
        raise ToolDown(
            f"[tools.{tool.key}]: {type(tool).__name__}.run returned {told} for {len(batch)} calls; it must return a "
            "list of one ToolResult per call, in order"
        )
    return [plain_result(tool.key, result) for result in results]


def plain_result(key: str, value: object) -> ToolResult:
    """Return a result whose fields a table can hold, whatever a backend sent.

    - result: a number becomes text; anything else that is not text has the reason `not_a_text`.
    - reason: one short line, `no_reason` where nothing of it is left.
    - cost and seconds: see `amount`; what is no amount is left out, with a warning per tool and type.
    """
    if not isinstance(value, ToolResult):
        _warn_once(key, f"run returned a {type(value).__name__} in place of a ToolResult; the call counts as lost")
        return ToolResult(None, LOST + NOT_A_RESULT)
    cost, seconds = amount(value.cost), amount(value.seconds) or 0.0
    if cost is None and value.cost is not None:
        _warn_once(key, f"a cost of type {type(value.cost).__name__} is no amount of money; it is left out")
    if value.result is None:
        reason = clean_result(_text(value.reason) or "", REASON_CHARACTERS)
        return ToolResult(None, reason or "no_reason", seconds, cost)
    text = _text(value.result)
    return ToolResult(text, "not_a_text" if text is None else None, seconds, cost)


def amount(value: Any) -> float | None:
    """Read an amount, finite and not negative: 0.0004, Decimal("0.0004"), "0.0004", "$0.0004"; None for the rest."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value.strip().removeprefix("$") if isinstance(value, str) else value)
    except Exception:  # noqa: BLE001 - objects of a user's backend may raise anything
        return None
    return number if 0 <= number < math.inf else None


def _text(value: object) -> str | None:
    """Return a text or a finite number as text; None for anything else."""
    if isinstance(value, str):
        return str.__str__(value)  # without what a subclass may have overridden
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return str(value) if math.isfinite(value) else None
    except (OverflowError, ValueError):  # an integer of thousands of digits
        return None


@cache
def _warn_once(key: str, message: str) -> None:
    _log.warning("%s: %s", key, message)


def cleaned_result(result: ToolResult, max_characters: int, seconds: float) -> ToolResult:
    """Clean a result for e(c, r); the reason is `empty_result` where nothing is left. `seconds`: if it tells none."""
    result = replace(result, seconds=result.seconds or seconds)
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

    def result(self, function: Callable[[], T], seconds: float) -> T:
        """Run `function` and return its result. Raises TimedOut, and what the function raises."""
        future: Future[T] = Future()
        self._jobs.put((function, future))
        if not wait([future], seconds).done:
            self.close()
            self._jobs = self._start()
            raise TimedOut
        return future.result()

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


FAILURES_IN_A_ROW = 10  # after this many lost calls in a row, the tool counts as down

CallBatch = Sequence[ToolCall]
Worker = TimedWorker[list[ToolResult]]
IdleWorkers = SimpleQueue[Worker]


def run_calls(tool: Tool, calls: CallBatch, limits: ToolLimits) -> list[ToolResult]:
    """Run a single list of calls as `Runner(tool, limits).run(calls)` does."""
    return Runner(tool, limits).run(calls)


class Runner:
    """Runs calls of a tool under its limits; keep a Runner per tool, because rate and failures are counted across runs.

    A batch that fails as a whole is run again call by call, so that a bad input loses a single call. The reason of a
    lost call (`ToolResult.lost`) is `lost:timeout`, `lost:unavailable` (no retry succeeded) or `lost:<exception>`.
    `finished`: calls that were answered or lost so far, equal ones counted once.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._tool = tool
        self._limits = limits
        self._free_at = time.monotonic()
        self.finished = 0
        self._counting = threading.Lock()
        self._lost_in_a_row = 0
        self._prepared = False

    def run(self, calls: CallBatch, found: dict[ToolCall, ToolResult] | None = None) -> list[ToolResult]:
        """Return a result per call, in order, cleaned for e(c, r); equal calls are run once.

        The tool is prepared before its first call, outside the time limits. Raises ToolDown when the tool raises it,
        violates its interface, or loses FAILURES_IN_A_ROW calls in a row. `found` gets each answer as it comes, so that
        a caller keeps the answers before an error. With a concurrency above 1, running batches are first waited for, at
        most to their time limit.
        """
        answers = {} if found is None else found
        if calls and not self._prepared:
            with blamed(self._tool, "prepare"):
                self._tool.prepare(lambda done: None)
            self._prepared = True
        self._run_distinct(list(dict.fromkeys(calls)), answers)
        return [answers[call] for call in calls]

    def _run_distinct(self, calls: CallBatch, found: dict[ToolCall, ToolResult]) -> None:
        size = self._tool.batch_size
        batches = [calls[at : at + size] for at in range(0, len(calls), size)]
        at_once = min(self._limits.concurrency, len(batches))
        with _idle_workers(at_once) as workers:
            run = partial(self._run_batch, workers, found)
            if at_once <= 1:  # in this thread, so that an interrupt takes effect immediately
                for batch in batches:
                    run(batch)
                return
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(run, batches))  # raises what a batch raised

    def _run_batch(self, workers: IdleWorkers, found: dict[ToolCall, ToolResult], batch: CallBatch) -> None:
        worker = workers.get()
        try:
            for call, result in self._results(batch, worker):
                found[call] = result
                self._count(result)
        finally:
            workers.put(worker)

    def _results(self, batch: CallBatch, worker: Worker) -> Iterator[tuple[ToolCall, ToolResult]]:
        began = time.monotonic()
        outcome = self._outcome(batch, worker)
        if not isinstance(outcome, str):
            yield from zip(batch, outcome, strict=True)
        elif len(batch) > 1:
            for call in batch:
                yield from self._results([call], worker)
        else:
            yield batch[0], ToolResult(None, LOST + outcome, time.monotonic() - began)

    def _outcome(self, batch: CallBatch, worker: Worker) -> list[ToolResult] | str:
        """Return the results with their seconds, or `timeout`, `unavailable` or the name of an exception.

        Only a RetryableError leads to a retry. Raises ToolDown.
        """
        for retry in range(self._limits.retries + 1):
            if retry:
                time.sleep(min(self._limits.backoff_s * 2.0 ** min(retry - 1, 64), LONGEST_PAUSE))
            outcome = self._once(batch, worker)
            if outcome != "unavailable":
                break
        return outcome

    def _once(self, batch: CallBatch, worker: Worker) -> list[ToolResult] | str:
        limit = self._limits.timeout_s * len(batch)
        try:
            self._tool.connect()
            self._wait(len(batch))
            began = time.monotonic()
            results = worker.result(lambda: self._tool.run(batch), limit)
        except TimedOut:
            self._tool.timed_out()
            return self._failed(batch, "timeout", f"no answer in {limit:g} s")
        except (ToolDown, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - a user's tool may raise anything, a panic of Rust too
            reason = "unavailable" if isinstance(error, RetryableError) else type(error).__name__
            return self._failed(batch, reason, described(error))
        share = (time.monotonic() - began) / len(batch)
        checked = check_results(self._tool, batch, results)
        return [cleaned_result(result, self._limits.max_result_characters, share) for result in checked]

    def _wait(self, calls: int) -> None:
        """Sleep until `calls` more calls may start: those of this process are spread evenly over time."""
        with self._counting:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + calls / (self._limits.rate_per_s or math.inf)
        time.sleep(max(0.0, begin - time.monotonic()))

    def _failed(self, batch: CallBatch, reason: str, detail: str) -> str:
        first = batch[0].input
        _log.warning("%s: %d calls from %.80r on: %s", self._tool.key, len(batch), first, clean_result(detail, 500))
        return reason

    def _count(self, result: ToolResult) -> None:
        """Count lost calls in a row, which concurrent batches may miscount by a few. Raises ToolDown."""
        with self._counting:
            self.finished += 1
        self._lost_in_a_row = self._lost_in_a_row + 1 if result.lost else 0
        if self._lost_in_a_row >= FAILURES_IN_A_ROW:
            why = str(result.reason).removeprefix(LOST)
            raise ToolDown(
                f"[tools.{self._tool.key}]: {FAILURES_IN_A_ROW} calls in a row got no answer, the last with: {why}; "
                "see the log for details, fix the backend or raise the section's limits, and run again"
            )


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
