"""Run calls with time limits, retries, a rate and concurrency; check and clean their results."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

from toolformer_dag.files import UserError
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.arguments import BadArguments
from toolformer_dag.texts.calls import clean_result
from toolformer_dag.tools.tool import LOST, RetryableError, Tool, ToolCall, ToolDown, ToolResult, blame_tool, described

_log = logging.getLogger(__name__)
LONGEST_PAUSE = 3600.0
"""The most seconds between two tries, however often the pause was doubled."""
MOST_DOUBLINGS = 64
"""How often a pause is doubled at most, so that its length stays a finite number."""
REASON_CHARACTERS = 100
"""The most characters of the reason why a call has no result."""
WARNING_CHARACTERS = 500
"""The most characters of a backend's message in a warning."""
FAILURES_IN_A_ROW = 10
"""After this many lost calls in a row, the tool counts as down."""

CallBatch = Sequence[ToolCall]


def check_results(
    tool: Tool, batch: CallBatch, results: object, max_characters: int, seconds: float
) -> list[ToolResult]:
    """Check and clean what a tool's `run` returned for a batch of calls.

    Args:
        batch: The calls.
        results: What `run` returned.
        max_characters: Longer results are cut.
        seconds: How long the batch took. Each call gets an equal share, unless its result has its own time.

    Returns:
        A result per call.

    Raises:
        ToolDown: `results` is not a list or tuple with one entry per call.
    """
    if not isinstance(results, list | tuple):
        raise _build_return_error(tool, batch, f"a {type(results).__name__}")

    if len(results) != len(batch):
        raise _build_return_error(tool, batch, f"{len(results)} results")

    seconds_per_call = seconds / max(len(batch), 1)
    return [to_plain_result(tool.key, result, max_characters, seconds_per_call) for result in results]


def _build_return_error(tool: Tool, batch: CallBatch, returned: str) -> ToolDown:
    """Return the error for a tool whose `run` returned something else than a result per call. returned: in words."""
    return ToolDown(
        f"[tools.{tool.key}]: {type(tool).__name__}.run returned {returned} for {len(batch)} calls; it must return a "
        "list of one ToolResult per call, in order"
    )


def to_plain_result(key: str, value: object, max_characters: int, seconds: float) -> ToolResult:
    """Convert what a tool returned for one call to a ToolResult with the declared types.

    Anything but a ToolResult becomes a lost call with the reason `lost:not_a_result`.

    Args:
        key: The tool's key, for warnings.
        value: What the tool returned.
        max_characters: A longer result is cut.
        seconds: How long the call took. It is used if the result does not say so itself.
    """
    if not isinstance(value, ToolResult):
        _warn_once(key, f"run returned a {type(value).__name__} in place of a ToolResult; the call counts as lost")
        return ToolResult(None, f"{LOST}not_a_result", seconds)

    cost = _parse_cost(key, value.cost)
    seconds = amount(value.seconds) or seconds
    return replace(_clean_tool_result(value, max_characters), seconds=seconds, cost=cost)


def _clean_tool_result(value: ToolResult, max_characters: int) -> ToolResult:
    """Clean the text of a result and cut it to `max_characters`, or clean the reason why there is no text.

    If the tool gives no usable text, the reason becomes `not_a_text`, `empty_result` or `no_reason`.
    """
    if value.result is None:
        reason = clean_result(_to_text(value.reason) or "", REASON_CHARACTERS)
        return ToolResult(None, reason or "no_reason")

    text = _to_text(value.result)
    if text is None:
        return ToolResult(None, "not_a_text")

    cleaned_text = clean_result(text, max_characters)
    return ToolResult(cleaned_text) if cleaned_text else ToolResult(None, "empty_result")


def _parse_cost(key: str, cost: object) -> float | None:
    """Return a cost as a number; None, with a warning about the tool `key`, if it is no amount of money."""
    number = amount(cost)
    if number is None and cost is not None:
        _warn_once(key, f"a cost of type {type(cost).__name__} is no amount of money; it is left out")
    return number


def amount(value: Any) -> float | None:
    """Read an amount in any usual form: 0.0004, Decimal("0.0004"), "0.0004" or "$0.0004".

    Returns:
        The amount, or None for anything that is not a finite number of at least 0.
    """
    if value is None or isinstance(value, bool):
        return None

    try:
        if isinstance(value, str):
            value = value.strip().removeprefix("$")
        number = float(value)
    except Exception:  # noqa: BLE001 - objects of a user's backend may raise anything
        return None

    return number if 0 <= number < math.inf else None


def _to_text(value: object) -> str | None:
    """Convert a text or a finite number to text.

    Returns:
        The text, or None for anything else.
    """
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
    """Log a warning of the tool `key`, the same one once per process."""
    _log.warning("%s: %s", key, message)


class Job(NamedTuple):
    """A function for a worker thread to call, and the future that gets what it returns or raises."""

    function: Callable[[], object]
    future: Future[object]


JobQueue = SimpleQueue[Job | None]
"""The jobs of a worker thread; None ends it."""


class TimedWorker:
    """Runs functions one after the other in a daemon thread, so that a backend keeps its per-thread state.

    When a function exceeds its limit, its thread keeps running, because Python cannot end it, and a new thread takes
    over. Not covered: the resources that the old thread still holds (memory, locks).
    """

    def __init__(self) -> None:
        self._jobs = _start_thread()

    def outcome(self, function: Callable[[], object], seconds: float) -> object:
        """Run a function in the thread of this worker.

        Args:
            function: The function, without arguments.
            seconds: The time limit.

        Returns:
            What the function returned, or the exception that it raised (returned as a value).

        Raises:
            TimeoutError: The time is up. The function goes on in its old thread, and a new thread takes the next one.
        """
        future: Future[object] = Future()
        self._jobs.put(Job(function, future))

        try:
            error = future.exception(seconds)  # waits for the function to end
        except TimeoutError:
            # Python cannot end a thread: it is told to end after this function, and a new one takes its place.
            self.close()
            self._jobs = _start_thread()
            raise
        return future.result() if error is None else error

    def close(self) -> None:
        """End the thread once it is idle."""
        self._jobs.put(None)


def _start_thread() -> JobQueue:
    """Start a daemon thread and return the queue from which it takes jobs."""
    jobs: JobQueue = SimpleQueue()
    threading.Thread(target=_run_jobs, args=(jobs,), daemon=True).start()
    return jobs


def _run_jobs(jobs: JobQueue) -> None:
    """Do jobs until None comes."""
    for job in iter(jobs.get, None):
        try:
            job.future.set_result(job.function())
        except BaseException as error:  # noqa: BLE001 - the caller decides about any exception of user code
            job.future.set_exception(error)


class BatchQueue:
    """The batches of a run that no thread has begun yet, in order; shared by the threads of the run.

    Each thread iterates over it and so takes one batch after the other, until none is left or `stop` was called.
    """

    def __init__(self, batches: Iterable[CallBatch]) -> None:
        self._batches = deque(batches)

    def __iter__(self) -> Iterator[CallBatch]:
        while True:
            try:
                batch = self._batches.popleft()  # safe for several threads
            except IndexError:
                return
            yield batch

    def stop(self) -> None:
        """Drop all batches that are left, so that no thread begins another."""
        self._batches.clear()


def _batches(calls: CallBatch, size: int) -> list[CallBatch]:
    """Return consecutive batches of at most `size` calls."""
    return [calls[start : start + size] for start in range(0, len(calls), size)]


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """Why a batch has no results: `timeout`, `unavailable` (a RetryableError), or the type of another exception."""

    reason: str


def run_calls(
    tool: Tool, calls: CallBatch, limits: ToolLimits, answers: dict[ToolCall, ToolResult] | None = None
) -> list[ToolResult]:
    """Run a list of calls to a tool under its limits.

    Args:
        answers: If given, gets each answer as soon as it comes.

    Returns:
        A result per call, in order.

    Raises:
        ToolDown: The tool cannot be used (see `Runner.run`).
    """
    return Runner(tool, limits).run(calls, answers)


class Runner:
    """Runs calls of a tool under its limits. Keep one Runner per tool: it counts rate and failures across runs.

    A batch that fails as a whole is run again call by call, so that a bad input loses a single call. The reason of a
    lost call (`ToolResult.lost`) is `lost:timeout`, `lost:unavailable` (no retry succeeded) or `lost:<exception>`.

    finished: calls that were answered or lost so far, equal ones counted once.
    """

    # With a concurrency above 1, `run` starts that many threads. They share a BatchQueue, the answers and, under the
    # lock `_counting`, the counts and the time of the next call.

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._tool = tool
        self._limits = limits
        self.finished = 0
        self._counting = threading.Lock()
        self._lost_in_a_row = 0
        self._next_start = time.monotonic()  # before which the rate allows no further call
        self._is_prepared = False

    def run(self, calls: CallBatch, answers: dict[ToolCall, ToolResult] | None = None) -> list[ToolResult]:
        """Run calls of the tool, and equal calls only once.

        Args:
            answers: If given, gets each answer as soon as it comes. So the caller has those that came before an error.

        Returns:
            A result per call, in order, cleaned so that it can be written into a text.

        Raises:
            ToolDown: The tool raised this or another UserError, returned something of the wrong form, or lost
                FAILURES_IN_A_ROW calls in a row.
        """
        if answers is None:
            answers = {}
        if calls:
            self._prepare_once()

        distinct_calls = dict.fromkeys(calls)
        # Each call gets its answer in `answers` from one of these two: the first answers those that cannot be parsed.
        parsed_calls = self._with_arguments(distinct_calls, answers)
        self._run_in_batches(parsed_calls, answers)

        return [answers[call] for call in calls]

    def _run_in_batches(self, calls: CallBatch, answers: dict[ToolCall, ToolResult]) -> None:
        """Run calls in batches, in several threads if the limits allow this, and put their results into `answers`."""
        batches = _batches(calls, self._tool.batch_size)
        queue = BatchQueue(batches)

        thread_count = min(self._limits.concurrency, len(batches))
        if thread_count <= 1:
            self._run_batches(queue, answers)  # in this thread, so that an interrupt takes effect immediately
        else:
            self._run_in_threads(thread_count, queue, answers)

    def _prepare_once(self) -> None:
        """Prepare the tool before its first call. Raises ToolDown."""
        if self._is_prepared:
            return
        with blame_tool(self._tool, "prepare"):
            self._tool.prepare(lambda done: None)
        self._is_prepared = True

    def _with_arguments(self, calls: Iterable[ToolCall], answers: dict[ToolCall, ToolResult]) -> list[ToolCall]:
        """Parse the named arguments of each call.

        A call that cannot be parsed is answered with a reason in `answers`, and left out of what is returned.

        Returns:
            The other calls, with their arguments.

        Raises:
            ToolDown: Parsing raised something else than BadArguments.
        """
        parsed_calls = []
        for call in calls:
            try:
                with blame_tool(self._tool, "Arguments"):  # turns any exception but BadArguments into ToolDown
                    arguments = self._tool.read(call.input)
            except BadArguments as error:
                answer = ToolResult(None, error.reason)
                answers[call] = answer
                self._count_result(answer)
            else:
                parsed_calls.append(replace(call, arguments=arguments))
        return parsed_calls

    def _run_in_threads(self, thread_count: int, queue: BatchQueue, answers: dict[ToolCall, ToolResult]) -> None:
        """Run the batches of a queue in several threads, and wait until all have ended.

        Raises:
            Exception: The first error of a thread.
        """
        with ThreadPoolExecutor(thread_count) as pool:
            try:
                threads = [pool.submit(self._run_batches, queue, answers) for _ in range(thread_count)]
                for thread in threads:
                    thread.result()
            finally:
                queue.stop()

    def _run_batches(self, queue: BatchQueue, answers: dict[ToolCall, ToolResult]) -> None:
        """Run batches from a queue until none is left, and put their results into `answers`.

        Several threads do this at once.
        """
        worker = TimedWorker()

        try:
            for batch in queue:
                for call, result in self._iter_results(batch, worker):
                    answers[call] = result
                    self._count_result(result)
        finally:
            queue.stop()  # after an error no thread takes another batch
            worker.close()

    def _iter_results(self, batch: CallBatch, worker: TimedWorker) -> Iterator[tuple[ToolCall, ToolResult]]:
        """Run a batch. If it fails as a whole, run each of its calls alone.

        Yields:
            Each call with its result. If a call fails alone, its result has a reason `lost:...`.
        """
        start_time = time.monotonic()
        outcome = self._run_with_retries(batch, worker)

        if not isinstance(outcome, BatchFailure):
            yield from zip(batch, outcome, strict=True)
        elif len(batch) > 1:
            for call in batch:
                yield from self._iter_results([call], worker)
        else:
            seconds = time.monotonic() - start_time  # with all retries
            lost_result = ToolResult(None, f"{LOST}{outcome.reason}", seconds)
            yield batch[0], lost_result

    def _run_with_retries(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | BatchFailure:
        """Run a batch. As long as the tool raises RetryableError, wait and try again, as often as the limits allow.

        Returns:
            A result per call, or the reason why the last try failed.

        Raises:
            ToolDown: The tool cannot be used.
        """
        outcome = self._run_once(batch, worker)

        for retry in range(self._limits.retries):
            if outcome != BatchFailure("unavailable"):
                break
            time.sleep(self._compute_pause(retry))
            outcome = self._run_once(batch, worker)

        return outcome

    def _compute_pause(self, retry: int) -> float:
        """Return the seconds before a retry, which is numbered from 0: they double each time, up to LONGEST_PAUSE."""
        doublings = min(retry, MOST_DOUBLINGS)
        seconds: float = self._limits.backoff_s * 2.0**doublings
        return min(seconds, LONGEST_PAUSE)

    def _run_once(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | BatchFailure:
        """Run a batch once, after connecting to the tool and waiting for the rate limit.

        Returns:
            A result per call, or the reason why the batch failed.

        Raises:
            ToolDown: The tool cannot be used.
        """
        try:
            self._tool.connect()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
            return self._log_failure(batch, error)

        self._wait_for_rate(len(batch))
        return self._run_in_time(batch, worker)

    def _run_in_time(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | BatchFailure:
        """Run a batch in the worker's thread, within the time limit.

        Returns:
            A result per call, checked and cleaned, or the reason why the batch failed.

        Raises:
            ToolDown: The tool raised a UserError, or returned anything but one result per call.
        """
        most_seconds = self._limits.timeout_s * len(batch)
        start_time = time.monotonic()

        try:
            results_or_error = worker.outcome(lambda: self._tool.run(batch), most_seconds)
        except TimeoutError:
            self._tool.timed_out()  # lets the tool release what hangs, such as a connection
            self._warn_of_lost(batch, f"no answer in {most_seconds:g} s")
            return BatchFailure("timeout")

        if isinstance(results_or_error, BaseException):  # what the tool raised, returned by the worker
            return self._log_failure(batch, results_or_error)

        seconds = time.monotonic() - start_time
        return check_results(self._tool, batch, results_or_error, self._limits.max_result_characters, seconds)

    def _wait_for_rate(self, call_count: int) -> None:
        """Wait until the rate limit allows some further calls. Calls of this process are spread evenly over time.

        Args:
            call_count: The number of calls that are to start.
        """
        rate = self._limits.rate_per_s or math.inf
        with self._counting:
            start_time = max(time.monotonic(), self._next_start)
            self._next_start = start_time + call_count / rate

        time.sleep(max(0.0, start_time - time.monotonic()))

    def _log_failure(self, batch: CallBatch, error: BaseException) -> BatchFailure:
        """Log an exception that was raised for a batch.

        Returns:
            The failure, with a short reason.

        Raises:
            ToolDown: The exception is a UserError.
        """
        if isinstance(error, UserError):
            with blame_tool(self._tool, "run"):
                raise error

        self._warn_of_lost(batch, described(error))
        reason = "unavailable" if isinstance(error, RetryableError) else type(error).__name__
        return BatchFailure(reason)

    def _warn_of_lost(self, batch: CallBatch, detail: str) -> None:
        message = clean_result(detail, WARNING_CHARACTERS)
        _log.warning("%s: %d calls from %.80r on: %s", self._tool.key, len(batch), batch[0].input, message)

    def _count_result(self, result: ToolResult) -> None:
        """Count a finished call.

        Raises:
            ToolDown: It is the last of FAILURES_IN_A_ROW lost calls in a row.
        """
        # Batches that run at once end in any order, so the number in a row may be a few off.
        with self._counting:
            self.finished += 1
            self._lost_in_a_row = self._lost_in_a_row + 1 if result.lost else 0
            is_down = self._lost_in_a_row >= FAILURES_IN_A_ROW

        if is_down:
            why = str(result.reason).removeprefix(LOST)
            raise ToolDown(
                f"[tools.{self._tool.key}]: {FAILURES_IN_A_ROW} calls in a row got no answer, the last with: {why}; "
                "see the log for details, fix the backend or raise the section's limits, and run again"
            )
