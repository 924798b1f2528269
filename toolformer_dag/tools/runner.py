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
from toolformer_dag.tools.tool import (
    LOST_REASON_PREFIX,
    RetryableError,
    Tool,
    ToolCall,
    ToolDown,
    ToolResult,
    describe_exception,
    wrap_tool_errors,
)

_log = logging.getLogger(__name__)
MAX_PAUSE_SECONDS = 3600.0
"""The most seconds between two tries, however often the pause was doubled."""
MAX_PAUSE_DOUBLINGS = 64
"""How often a pause is doubled at most, so that its length stays a finite number."""
MAX_REASON_CHARACTERS = 100
"""The most characters of the reason why a call has no result."""
MAX_WARNING_CHARACTERS = 500
"""The most characters of a backend's message in a warning."""
MAX_CONSECUTIVE_LOST_CALLS = 10
"""After this many lost calls in a row, the tool counts as down."""

CallBatch = Sequence[ToolCall]


def check_results(
    tool: Tool, batch: CallBatch, returned_results: object, max_result_characters: int, batch_seconds: float
) -> list[ToolResult]:
    """Check and clean what a tool's `run` returned for a batch of calls.

    The tool may be a user's, so nothing that it returns is taken on trust.

    Args:
        tool: The tool, for messages.
        batch: The calls.
        returned_results: What `run` returned.
        max_result_characters: Longer results are cut.
        batch_seconds: How long the batch took. Each call gets an equal share, unless its result has its own time.

    Returns:
        A result per call, in order.

    Raises:
        ToolDown: `returned_results` is not a list or tuple with one entry per call.
    """
    if not isinstance(returned_results, list | tuple):
        raise _build_return_error(tool, batch, f"a {type(returned_results).__name__}")

    if len(returned_results) != len(batch):
        raise _build_return_error(tool, batch, f"{len(returned_results)} results")

    seconds_per_call = batch_seconds / max(len(batch), 1)

    checked_results = []
    for result in returned_results:
        checked_results.append(build_plain_result(tool.key, result, max_result_characters, seconds_per_call))
    return checked_results


def _build_return_error(tool: Tool, batch: CallBatch, returned_description: str) -> ToolDown:
    """Build the error for a tool whose `run` returned anything but a result per call.

    Args:
        tool: The tool.
        batch: The calls that `run` got.
        returned_description: What it returned, in words: "a dict" or "3 results".
    """
    return ToolDown(
        f"[tools.{tool.key}]: {type(tool).__name__}.run returned {returned_description} for {len(batch)} calls; "
        "it must return a list of one ToolResult per call, in order"
    )


def build_plain_result(tool_key: str, returned_value: object, max_result_characters: int, seconds: float) -> ToolResult:
    """Convert what a tool returned for one call to a ToolResult with the declared types.

    Anything but a ToolResult becomes a lost call with the reason `lost:not_a_result`.

    Args:
        tool_key: The tool's key, for warnings.
        returned_value: What the tool returned.
        max_result_characters: A longer result is cut.
        seconds: How long the call took. It is used if the result does not say so itself.
    """
    if not isinstance(returned_value, ToolResult):
        type_name = type(returned_value).__name__
        _warn_once(tool_key, f"run returned a {type_name} in place of a ToolResult; the call counts as lost")
        return ToolResult(None, f"{LOST_REASON_PREFIX}not_a_result", seconds)

    cost = _parse_cost(tool_key, returned_value.cost)
    reported_seconds = parse_amount(returned_value.seconds)  # 0 or None if the tool does not say
    cleaned_result = _clean_tool_result(returned_value, max_result_characters)
    return replace(cleaned_result, seconds=reported_seconds or seconds, cost=cost)


def _clean_tool_result(tool_result: ToolResult, max_result_characters: int) -> ToolResult:
    """Clean the text of a result and cut it to `max_result_characters`, or clean the reason why there is no text.

    A clean text has one line and can be written into a call: `[Weather(city="Rome") -> 18 degrees]`. If the tool gives
    no usable text, the reason becomes `not_a_text` or `empty_result`; if it gives no usable reason, `no_reason`.
    """
    if tool_result.result is None:
        reason_text = _convert_to_text(tool_result.reason) or ""
        reason = clean_result(reason_text, MAX_REASON_CHARACTERS)
        return ToolResult(None, reason or "no_reason")

    text = _convert_to_text(tool_result.result)
    if text is None:
        return ToolResult(None, "not_a_text")

    cleaned_text = clean_result(text, max_result_characters)
    if not cleaned_text:
        return ToolResult(None, "empty_result")
    return ToolResult(cleaned_text)


def _parse_cost(tool_key: str, cost: object) -> float | None:
    """Return a cost as a number.

    Args:
        tool_key: The tool's key, for the warning.
        cost: What the tool reports as the cost of a call.

    Returns:
        The number. None if the tool reports no cost, or (with a warning) if `cost` is no amount of money.
    """
    amount = parse_amount(cost)
    if amount is None and cost is not None:
        _warn_once(tool_key, f"a cost of type {type(cost).__name__} is no amount of money; it is left out")
    return amount


def parse_amount(value: Any) -> float | None:
    """Read an amount in any usual form: 0.0004, Decimal("0.0004"), "0.0004" or "$0.0004".

    Returns:
        The amount, or None for anything that is not a finite number of at least 0.
    """
    if value is None or isinstance(value, bool):
        return None

    try:
        if isinstance(value, str):
            value = value.strip().removeprefix("$")
        amount = float(value)
    except Exception:  # noqa: BLE001 - objects of a user's backend may raise anything
        return None

    is_valid = 0 <= amount < math.inf  # False for NaN too
    return amount if is_valid else None


def _convert_to_text(value: object) -> str | None:
    """Convert a text or a finite number to text.

    Returns:
        The text, or None for anything else.
    """
    if isinstance(value, str):
        return str.__str__(value)  # without what a subclass may have overridden

    if isinstance(value, bool) or not isinstance(value, int | float):  # Python takes True and False for numbers
        return None

    try:
        return str(value) if math.isfinite(value) else None
    except (OverflowError, ValueError):  # an integer of thousands of digits
        return None


@cache
def _warn_once(tool_key: str, message: str) -> None:
    """Log a warning about a tool, but the same warning only once per process."""
    _log.warning("%s: %s", tool_key, message)


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
        self._jobs = _start_thread()  # the queue of the current thread

    def run_with_timeout(self, function: Callable[[], object], timeout_s: float) -> object:
        """Run a function in the thread of this worker, and wait for it.

        Args:
            function: The function, which is called without arguments.
            timeout_s: The time limit in seconds.

        Returns:
            What the function returned, or the exception that it raised (returned as a value).

        Raises:
            TimeoutError: The time is up. The function goes on in its old thread, and a new thread takes the next one.
        """
        future: Future[object] = Future()
        self._jobs.put(Job(function, future))

        try:
            error = future.exception(timeout_s)  # waits until the function has returned or raised
        except TimeoutError:
            # Python cannot end a thread: it is told to end after this function, and a new one takes its place.
            self.close()
            self._jobs = _start_thread()
            raise

        if error is not None:
            return error
        return future.result()

    def close(self) -> None:
        """Let the thread end as soon as it has done its jobs."""
        self._jobs.put(None)


def _start_thread() -> JobQueue:
    """Start a daemon thread and return the queue from which it takes jobs."""
    jobs: JobQueue = SimpleQueue()
    threading.Thread(target=_run_jobs, args=(jobs,), daemon=True).start()
    return jobs


def _run_jobs(jobs: JobQueue) -> None:
    """Do the jobs in a queue one after the other, until None comes in place of a job."""
    for job in iter(jobs.get, None):
        try:
            job.future.set_result(job.function())  # the result gets no name, which would keep it during the next job
        except BaseException as error:  # noqa: BLE001 - the caller decides about any exception of user code
            job.future.set_exception(error)


class BatchQueue:
    """The batches of calls that no thread has begun yet, in order, shared by the threads of a run.

    Each thread iterates over it and so takes one batch after the other, until none is left or `clear` was called.
    """

    def __init__(self, batches: Iterable[CallBatch]) -> None:
        self._batches = deque(batches)

    def __iter__(self) -> Iterator[CallBatch]:
        """Take one batch after the other from the queue, until it is empty; safe for several threads at once."""
        while True:
            try:
                batch = self._batches.popleft()
            except IndexError:  # the queue is empty
                return
            yield batch

    def clear(self) -> None:
        """Drop all batches that are left, so that no thread begins another."""
        self._batches.clear()


def _split_into_batches(calls: CallBatch, batch_size: int) -> list[CallBatch]:
    """Return consecutive batches of at most `batch_size` calls."""
    return [calls[start : start + batch_size] for start in range(0, len(calls), batch_size)]


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """Why a batch of calls has no results: `timeout`, `unavailable` (a RetryableError), or the name of an exception."""

    reason: str


def run_calls(
    tool: Tool, calls: CallBatch, limits: ToolLimits, results_by_call: dict[ToolCall, ToolResult] | None = None
) -> list[ToolResult]:
    """Run a list of calls to a tool under its limits, such as a time limit per call.

    Args:
        tool: The tool.
        calls: The calls. Equal ones are only run once.
        limits: The limits of the tool's section in toolformer.toml.
        results_by_call: If given, gets the result of each call as soon as it comes.

    Returns:
        A result per call, in order.

    Raises:
        ToolDown: The tool cannot be used (see `Runner.run_calls`).
    """
    return Runner(tool, limits).run_calls(calls, results_by_call)


class Runner:
    """Runs calls of a tool under its limits. Keep one Runner per tool: it counts rate and failures across runs.

    A batch that fails as a whole is run again call by call, so that a bad input loses a single call. The reason of a
    lost call (`ToolResult.lost`) is `lost:timeout`, `lost:unavailable` (no retry succeeded) or `lost:<exception>`.

    Attributes:
        finished_call_count: How many calls were answered or lost so far. Equal calls of a run count once.
    """

    # With a concurrency above 1, `run_calls` starts that many threads. They share a BatchQueue, the results and, under
    # the lock `_count_lock`, the counts and the time of the next call.

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self._tool = tool
        self._limits = limits
        self.finished_call_count = 0
        self._count_lock = threading.Lock()
        self._consecutive_lost_count = 0
        self._next_start_time = time.monotonic()  # before this time the rate limit allows no further call
        self._is_prepared = False

    def run_calls(
        self, calls: CallBatch, results_by_call: dict[ToolCall, ToolResult] | None = None
    ) -> list[ToolResult]:
        """Run calls of the tool, and equal calls only once.

        Args:
            calls: The calls.
            results_by_call: If given, gets the result of each call as soon as it comes, so that the caller has those
                that came before an error.

        Returns:
            A result per call, in order, cleaned so that it can be written into a text.

        Raises:
            ToolDown: The tool raised this or another UserError, returned something of the wrong form, or lost
                MAX_CONSECUTIVE_LOST_CALLS calls in a row.
        """
        if results_by_call is None:
            results_by_call = {}
        if calls:
            self._prepare_once()

        distinct_calls = dict.fromkeys(calls)

        # Calls that cannot be parsed get their results in the first step, and all others in the second.
        parsed_calls = self._parse_call_arguments(distinct_calls, results_by_call)
        self._run_in_batches(parsed_calls, results_by_call)

        return [results_by_call[call] for call in calls]

    def _run_in_batches(self, calls: CallBatch, results_by_call: dict[ToolCall, ToolResult]) -> None:
        """Run calls in batches, in several threads if the limits allow this.

        Args:
            calls: The calls, with their arguments.
            results_by_call: Gets the result of each call.

        Raises:
            ToolDown: The tool cannot be used.
        """
        batches = _split_into_batches(calls, self._tool.batch_size)
        queue = BatchQueue(batches)

        thread_count = min(self._limits.concurrency, len(batches))
        if thread_count <= 1:
            self._run_batches(queue, results_by_call)  # in this thread, so that an interrupt takes effect immediately
        else:
            self._run_in_threads(thread_count, queue, results_by_call)

    def _prepare_once(self) -> None:
        """Prepare the tool before its first call: let it load what it needs, without a time limit.

        Raises:
            ToolDown: The tool cannot be prepared.
        """
        if self._is_prepared:
            return
        with wrap_tool_errors(self._tool, "prepare"):
            self._tool.prepare(lambda done_count: None)  # without a report of progress
        self._is_prepared = True

    def _parse_call_arguments(
        self, calls: Iterable[ToolCall], results_by_call: dict[ToolCall, ToolResult]
    ) -> list[ToolCall]:
        """Parse the named arguments of each call, such as city and days in `[Weather(city="Rome", days=3)]`.

        Args:
            calls: The calls, whose arguments are still text.
            results_by_call: Gets a result without a text, only with a reason, for each call that cannot be parsed.

        Returns:
            The other calls, with their arguments.

        Raises:
            ToolDown: Parsing raised something else than BadArguments.
        """
        parsed_calls = []
        for call in calls:
            try:
                # Any exception but BadArguments becomes ToolDown.
                with wrap_tool_errors(self._tool, "Arguments"):
                    arguments = self._tool.parse_call_input(call.input)
            except BadArguments as error:
                result = ToolResult(None, error.reason)
                results_by_call[call] = result
                self._count_result(result)
            else:
                parsed_calls.append(replace(call, arguments=arguments))
        return parsed_calls

    def _run_in_threads(
        self, thread_count: int, batch_queue: BatchQueue, results_by_call: dict[ToolCall, ToolResult]
    ) -> None:
        """Run the batches of a queue in several threads, and wait until all have ended.

        Args:
            thread_count: How many threads to start.
            batch_queue: The batches, which the threads share.
            results_by_call: Gets the result of each call.

        Raises:
            Exception: The error of a thread; of several errors, the one of the thread that was started first.
        """
        with ThreadPoolExecutor(thread_count) as pool:
            try:
                futures = []
                for _ in range(thread_count):
                    futures.append(pool.submit(self._run_batches, batch_queue, results_by_call))
                for future in futures:
                    future.result()  # waits for the thread, and raises its error
            finally:
                batch_queue.clear()  # after an error or an interrupt no thread begins another batch

    def _run_batches(self, batch_queue: BatchQueue, results_by_call: dict[ToolCall, ToolResult]) -> None:
        """Run batches from a queue until none is left, and put their results into `results_by_call`.

        Several threads may do this at once, with the same queue.

        Raises:
            ToolDown: The tool cannot be used. The queue is empty then, so that no other thread begins a batch.
        """
        worker = TimedWorker()

        try:
            for batch in batch_queue:
                for call, result in self._iter_batch_results(batch, worker):
                    results_by_call[call] = result
                    self._count_result(result)
        finally:
            batch_queue.clear()  # after an error no thread takes another batch
            worker.close()

    def _iter_batch_results(self, batch: CallBatch, worker: TimedWorker) -> Iterator[tuple[ToolCall, ToolResult]]:
        """Run a batch. If it fails as a whole, run each of its calls alone.

        Args:
            batch: The calls.
            worker: The worker whose thread runs them.

        Yields:
            Each call with its result. If a call fails alone, its result has a reason `lost:...`.

        Raises:
            ToolDown: The tool cannot be used.
        """
        start_time = time.monotonic()
        outcome = self._run_batch_with_retries(batch, worker)

        if not isinstance(outcome, BatchFailure):
            yield from zip(batch, outcome, strict=True)
        elif len(batch) > 1:
            for call in batch:
                yield from self._iter_batch_results([call], worker)
        else:
            seconds = time.monotonic() - start_time  # with all retries
            lost_result = ToolResult(None, f"{LOST_REASON_PREFIX}{outcome.reason}", seconds)
            yield batch[0], lost_result

    def _run_batch_with_retries(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | BatchFailure:
        """Run a batch. As long as the tool raises RetryableError, wait and try again, as often as the limits allow.

        Args:
            batch: The calls.
            worker: The worker whose thread runs them.

        Returns:
            A result per call, or the reason why the last try failed.

        Raises:
            ToolDown: The tool cannot be used.
        """
        outcome = self._run_batch_once(batch, worker)

        for retry_index in range(self._limits.retries):
            may_succeed_later = outcome == BatchFailure("unavailable")  # the tool raised RetryableError
            if not may_succeed_later:
                break
            time.sleep(self._compute_pause_seconds(retry_index))
            outcome = self._run_batch_once(batch, worker)

        return outcome

    def _compute_pause_seconds(self, retry_index: int) -> float:
        """Return how many seconds to wait before a retry: twice as many each time, up to MAX_PAUSE_SECONDS.

        Args:
            retry_index: The number of the retry, from 0. Before that one the pause is the setting `backoff_s`.
        """
        doubling_count = min(retry_index, MAX_PAUSE_DOUBLINGS)
        seconds: float = self._limits.backoff_s * 2.0**doubling_count
        return min(seconds, MAX_PAUSE_SECONDS)

    def _run_batch_once(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | BatchFailure:
        """Run a batch once, after connecting to the tool and waiting for the rate limit.

        Args:
            batch: The calls.
            worker: The worker whose thread runs them.

        Returns:
            A result per call, or the reason why the batch failed.

        Raises:
            ToolDown: The tool cannot be used.
        """
        try:
            self._tool.connect()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
            return self._log_batch_failure(batch, error)

        self._wait_for_rate_limit(len(batch))
        return self._run_batch_in_time(batch, worker)

    def _run_batch_in_time(self, batch: CallBatch, worker: TimedWorker) -> list[ToolResult] | BatchFailure:
        """Run a batch in the worker's thread, within the time limit.

        Args:
            batch: The calls.
            worker: The worker whose thread runs them.

        Returns:
            A result per call, checked and cleaned, or the reason why the batch failed.

        Raises:
            ToolDown: The tool raised a UserError, or returned anything but one result per call.
        """
        timeout_s = self._limits.timeout_s * len(batch)
        start_time = time.monotonic()

        try:
            results_or_error = worker.run_with_timeout(lambda: self._tool.run(batch), timeout_s)
        except TimeoutError:
            self._tool.timed_out()  # lets the tool release what hangs, such as a connection
            self._warn_of_lost_batch(batch, f"no answer in {timeout_s:g} s")
            return BatchFailure("timeout")

        if isinstance(results_or_error, BaseException):  # what the tool raised, returned by the worker
            return self._log_batch_failure(batch, results_or_error)

        seconds = time.monotonic() - start_time
        return check_results(self._tool, batch, results_or_error, self._limits.max_result_characters, seconds)

    def _wait_for_rate_limit(self, call_count: int) -> None:
        """Wait until the rate limit allows some further calls.

        The calls of this process are spread evenly over time: at 2 calls per second, 4 calls reserve 2 seconds.

        Args:
            call_count: The number of calls that are to start.
        """
        calls_per_second = self._limits.rate_per_s or math.inf

        # Each thread reserves its time, and then waits for it without the lock.
        with self._count_lock:
            start_time = max(time.monotonic(), self._next_start_time)
            self._next_start_time = start_time + call_count / calls_per_second

        seconds_to_wait = start_time - time.monotonic()
        time.sleep(max(0.0, seconds_to_wait))

    def _log_batch_failure(self, batch: CallBatch, error: BaseException) -> BatchFailure:
        """Log an exception that was raised for a batch.

        Args:
            batch: The calls.
            error: The exception.

        Returns:
            The failure, with a short reason.

        Raises:
            ToolDown: The exception is a UserError, whose message tells the user what to do.
        """
        if isinstance(error, UserError):
            with wrap_tool_errors(self._tool, "run"):  # turns it into ToolDown
                raise error

        self._warn_of_lost_batch(batch, describe_exception(error))
        reason = "unavailable" if isinstance(error, RetryableError) else type(error).__name__
        return BatchFailure(reason)

    def _warn_of_lost_batch(self, batch: CallBatch, detail: str) -> None:
        """Log a warning that a batch got no results, with the input of its first call; `detail` says why."""
        message = clean_result(detail, MAX_WARNING_CHARACTERS)
        _log.warning("%s: %d calls from %.80r on: %s", self._tool.key, len(batch), batch[0].input, message)

    def _count_result(self, result: ToolResult) -> None:
        """Count a finished call, and stop the run if too many calls in a row were lost.

        A lost call failed by accident, such as a broken connection.

        Args:
            result: The result of the call.

        Raises:
            ToolDown: It is the last of MAX_CONSECUTIVE_LOST_CALLS lost calls in a row.
        """
        # Batches that run at once end in any order, so the number in a row may be a few off.
        with self._count_lock:
            self.finished_call_count += 1
            if result.lost:
                self._consecutive_lost_count += 1
            else:
                self._consecutive_lost_count = 0
            is_down = self._consecutive_lost_count >= MAX_CONSECUTIVE_LOST_CALLS

        if is_down:
            last_reason = str(result.reason).removeprefix(LOST_REASON_PREFIX)
            raise ToolDown(
                f"[tools.{self._tool.key}]: {MAX_CONSECUTIVE_LOST_CALLS} calls in a row got no answer, "
                f"the last with: {last_reason}; "
                "see the log for details, fix the backend or raise the section's limits, and run again"
            )
