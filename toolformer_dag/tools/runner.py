"""Run calls with time limits, retries, a rate and concurrency; check and clean their results."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.arguments import BadArguments
from toolformer_dag.texts.calls import clean_result
from toolformer_dag.tools.tool import LOST, RetryableError, Tool, ToolCall, ToolDown, ToolResult, blamed, described

_log = logging.getLogger(__name__)
LONGEST_PAUSE = 3600.0
"""Seconds between two tries at most, however often the pause was doubled."""
REASON_CHARACTERS = 100
FAILURES_IN_A_ROW = 10
"""After this many lost calls in a row, the tool counts as down."""

CallBatch = Sequence[ToolCall]


def check_results(
    tool: Tool, batch: CallBatch, results: object, max_characters: int, seconds: float
) -> list[ToolResult]:
    """Return the results of `Tool.run` in the form of `plain_result`; `seconds` are those of the batch.

    Raises ToolDown unless there is one entry per call.
    """
    if not isinstance(results, list | tuple) or len(results) != len(batch):
        given = f"{len(results)} results" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
        raise ToolDown(
            f"[tools.{tool.key}]: {type(tool).__name__}.run returned {given} for {len(batch)} calls; it must return a "
            "list of one ToolResult per call, in order"
        )
    return [plain_result(tool.key, result, max_characters, seconds / len(batch)) for result in results]


def plain_result(key: str, value: object, max_characters: int, seconds: float) -> ToolResult:
    """Return a result that a table and e(c, r) can hold, whatever a backend sent.

    - Anything else than a ToolResult is a lost call, `lost:not_a_result`.
    - result: a number becomes text; anything else that is not text has the reason `not_a_text`. A text is cleaned; the
      reason is `empty_result` where nothing of it is left.
    - reason: one short line, `no_reason` where nothing of it is left.
    - cost and seconds: see `amount`; what is no amount is left out, with a warning per tool and type. `seconds`: if the
      result tells none.
    """
    if not isinstance(value, ToolResult):
        _warn_once(key, f"run returned a {type(value).__name__} in place of a ToolResult; the call counts as lost")
        return ToolResult(None, f"{LOST}not_a_result", seconds)
    cost, seconds = amount(value.cost), amount(value.seconds) or seconds
    if (cost is None) != (value.cost is None):
        _warn_once(key, f"a cost of type {type(value.cost).__name__} is no amount of money; it is left out")
    if value.result is None:
        reason = clean_result(_text(value.reason) or "", REASON_CHARACTERS)
        return ToolResult(None, reason or "no_reason", seconds, cost)
    text = _text(value.result)
    if cleaned := clean_result(text or "", max_characters):
        return ToolResult(cleaned, None, seconds, cost)
    return ToolResult(None, "not_a_text" if text is None else "empty_result", seconds, cost)


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


class TimedWorker:
    """Runs functions in a daemon thread, so that a backend keeps its per-thread state.

    Python cannot end a thread. When work exceeds its limit, its thread keeps running and a new thread takes over. The
    old thread ends with the process at the latest. Not covered: the resources that it still holds (memory, locks, the
    interpreter's lock in native code).
    """

    def __init__(self) -> None:
        self._jobs = _started()

    def outcome(self, function: Callable[[], object], seconds: float) -> object:
        """Return what `function` returns or raises. Raises TimeoutError where it does neither in time."""
        future: Future[object] = Future()
        self._jobs.put((function, future))
        try:
            return future.exception(seconds) or future.result()
        except TimeoutError:
            self.close()
            self._jobs = _started()
            raise

    def close(self) -> None:
        """End the thread once it is idle."""
        self._jobs.put(None)


Jobs = SimpleQueue[tuple[Callable[[], object], Future[object]] | None]


def _started() -> Jobs:
    jobs: Jobs = SimpleQueue()
    threading.Thread(target=_serve, args=(jobs,), daemon=True).start()
    return jobs


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller decides about any exception of user code
            future.set_exception(error)


def run_calls(
    tool: Tool, calls: CallBatch, limits: ToolLimits, found: dict[ToolCall, ToolResult] | None = None
) -> list[ToolResult]:
    """Run a single list of calls as `Runner(tool, limits).run(calls, found)` does."""
    return Runner(tool, limits).run(calls, found)


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

        The tool is prepared before its first call, outside the time limits. Raises ToolDown when the tool raises it or
        another UserError, violates its interface, or loses FAILURES_IN_A_ROW calls in a row. `found` gets each answer
        as it comes, so that a caller keeps the answers before an error. With a concurrency above 1, running batches are
        first waited for, at most to their time limit.
        """
        answers = {} if found is None else found
        if calls and not self._prepared:
            with blamed(self._tool, "prepare"):
                self._tool.prepare(lambda done: None)
            self._prepared = True
        distinct, size = self._with_arguments(dict.fromkeys(calls), answers), self._tool.batch_size
        batches = [distinct[at : at + size] for at in range(0, len(distinct), size)]
        waiting = iter(batches)
        lane = partial(self._run_batches, waiting, answers)
        lanes = min(self._limits.concurrency, len(batches))
        if lanes <= 1:
            lane()  # in this thread, so that an interrupt takes effect immediately
        else:
            with ThreadPoolExecutor(lanes) as pool:
                try:
                    for running in [pool.submit(lane) for _ in range(lanes)]:
                        running.result()
                finally:
                    deque(waiting, maxlen=0)
        return [answers[call] for call in calls]

    def _with_arguments(self, calls: Iterable[ToolCall], answers: dict[ToolCall, ToolResult]) -> list[ToolCall]:
        """Return the calls with their named arguments; those that cannot be read are answered with the reason."""
        fitting = []
        for call in calls:
            try:
                with blamed(self._tool, "Arguments"):
                    fitting.append(replace(call, arguments=self._tool.read(call.input)))
            except BadArguments as error:
                answers[call] = ToolResult(None, error.reason)
                self._count(answers[call])
        return fitting

    def _run_batches(self, waiting: Iterator[CallBatch], answers: dict[ToolCall, ToolResult]) -> None:
        """Run batches until none is waiting; lanes share `waiting`, and after an error none begins another batch."""
        worker = TimedWorker()
        try:
            for batch in waiting:
                for call, result in self._results(batch, worker):
                    answers[call] = result
                    self._count(result)
        finally:
            deque(waiting, maxlen=0)
            worker.close()

    def _results(self, batch: CallBatch, worker: TimedWorker) -> Iterator[tuple[ToolCall, ToolResult]]:
        began = time.monotonic()
        outcome = self._outcome(batch, worker)
        if not isinstance(outcome, str):
            yield from zip(batch, outcome, strict=True)
        elif len(batch) > 1:
            for call in batch:
                yield from self._results([call], worker)
        else:
            yield batch[0], ToolResult(None, LOST + outcome, time.monotonic() - began)

    def _outcome(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | str:
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

    def _once(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | str:
        limit = self._limits.timeout_s * len(batch)
        try:
            self._tool.connect()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
            return self._failed(batch, error)
        self._wait(len(batch))
        began = time.monotonic()
        try:
            outcome = worker.outcome(lambda: self._tool.run(batch), limit)
        except TimeoutError:
            self._tool.timed_out()
            return self._lost(batch, "timeout", f"no answer in {limit:g} s")
        if isinstance(outcome, BaseException):
            return self._failed(batch, outcome)
        seconds = time.monotonic() - began
        return check_results(self._tool, batch, outcome, self._limits.max_result_characters, seconds)

    def _wait(self, calls: int) -> None:
        """Sleep until `calls` more calls may start: those of this process are spread evenly over time."""
        with self._counting:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + calls / (self._limits.rate_per_s or math.inf)
        time.sleep(max(0.0, begin - time.monotonic()))

    def _failed(self, batch: CallBatch, error: BaseException) -> str:
        if isinstance(error, UserError):
            with blamed(self._tool, "run"):
                raise error
        reason = "unavailable" if isinstance(error, RetryableError) else type(error).__name__
        return self._lost(batch, reason, described(error))

    def _lost(self, batch: CallBatch, reason: str, detail: str) -> str:
        first = batch[0].input
        _log.warning("%s: %d calls from %.80r on: %s", self._tool.key, len(batch), first, clean_result(detail, 500))
        return reason

    def _count(self, result: ToolResult) -> None:
        """Count lost calls in a row, which concurrent batches may miscount by a few. Raises ToolDown."""
        with self._counting:
            self.finished += 1
            self._lost_in_a_row = self._lost_in_a_row + 1 if result.lost else 0
            lost = self._lost_in_a_row
        if lost >= FAILURES_IN_A_ROW:
            why = str(result.reason).removeprefix(LOST)
            raise ToolDown(
                f"[tools.{self._tool.key}]: {FAILURES_IN_A_ROW} calls in a row got no answer, the last with: {why}; "
                "see the log for details, fix the backend or raise the section's limits, and run again"
            )
