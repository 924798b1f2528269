"""A running step: its progress for whoever watches and for the log, its cost, the tags of its run."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg

from toolformer_dag.assets.metadata import ROW_COUNT_LABEL, TOKENS_LABEL, UNCHANGED_LABEL
from toolformer_dag.computing.change_log import KeptCounts, add_changes
from toolformer_dag.computing.spending import Spent, StepCost, add_cost
from toolformer_dag.computing.worker import WorkAhead
from toolformer_dag.files import UserError, WriteError, encode_file_name, hold_file_lock, write_file_atomically
from toolformer_dag.lake.record import FieldChange
from toolformer_dag.lake.table import Lake
from toolformer_dag.resources.live_runs import get_run_folder

LOG_EVERY_SECONDS = 15.0
"""How often a running step writes its progress to the log of the run."""
WRITE_EVERY_SECONDS = 0.3
"""How often at most a step writes its progress down when its stage reports units."""
BACKGROUND_WRITE_SECONDS = 1.0
"""How often it writes its progress down while its stage reports nothing."""
CHANGED_TAG = "toolformer/changed"
"""The tag of a run that says which settings changed: `calculator.tau_f 0.5 -> 0.8`."""
COMPUTED_TAG = "toolformer/computed"
"""The tag of a run that names the assets whose rows or files it computed: `calculator/filtered_calls; training/...`."""
SKIPPED_TAG = "toolformer/skipped"
"""The tag of a run with the number of its assets for which there was nothing to compute."""
ENTRY_SEPARATOR = "; "
"""Separates the entries of a tag."""


@dataclass
class Step:
    """The progress of a step of a run: of an asset that is being made.

    Attributes:
        name: The name of the asset.
        unit: What `done` and `total` count, such as "texts".
        done: How many units are done.
        total: How many units there are. 0 if unknown.
        tokens: How many tokens went through the model so far.
        calls: How many calls of tools were made so far.
        waits: The process of another run for which the step waited last. Empty if it did not wait.
        outcome: How the step ended. None while it runs.
        began: When it began, by the machine's monotonic clock.
        expected: An estimate of all tokens that the step takes. 0 if there is none.
        measured: Whether the estimate rests on finished chunks of work, not on the plan alone.
    """

    name: str
    unit: str = ""
    done: int = 0
    total: int = 0
    tokens: int = 0
    calls: int = 0
    waits: str = ""
    outcome: str | None = None
    began: float = field(default_factory=time.monotonic)
    expected: float = 0.0
    measured: bool = False

    @property
    def elapsed_seconds(self) -> float:
        """The seconds since the step began."""
        return time.monotonic() - self.began

    @property
    def progress_text(self) -> str:
        """The progress as text: `312 of 800 texts, 5,120 tokens/s, 0:01:12 left`. Unknown figures are left out.

        Before the first unit is done it counts tokens: `9,800 of some 25,000 tokens, 5,120 tokens/s, ...`.
        """
        seconds = max(self.elapsed_seconds, 1e-3)  # never 0, since it divides
        work_done = self._format_work_done()
        rate = f"{self.tokens / seconds:,.0f} tokens/s" if self.tokens else ""
        time_left = self._format_time_left(seconds)

        known_parts = [part for part in (work_done, rate, time_left) if part]
        return ", ".join(known_parts)

    def _format_work_done(self) -> str:
        """Return how much is done: `312 of 800 texts`. Before the first unit is done, it counts tokens.

        The text is empty if nothing is known.
        """
        if not self.done and 0 < self.tokens < self.expected:
            return f"{self.tokens:,} of some {self.expected:,.0f} tokens"
        if self.total:
            return f"{self.done:,} of {self.total:,} {self.unit}"
        return f"{self.done:,} {self.unit}" if self.done else ""

    def _format_time_left(self, elapsed_seconds: float) -> str:
        """Return how much longer the step takes, such as "0:01:12 left". Empty if it is unknown.

        While the first chunk of the work is being computed, the text is "measuring the time left". Much of the time so
        far was spent on loading the model, so it says little about the pace.

        Args:
            elapsed_seconds: The time since the step began.
        """
        is_within_first_chunk = self.tokens and not self.measured
        if self.expected > self.tokens and is_within_first_chunk:
            return "measuring the time left"

        share_done = self._compute_share_done()
        if not 0 < share_done < 1:
            return ""

        total_seconds = elapsed_seconds / share_done
        seconds_left = total_seconds * (1 - share_done)
        return f"{timedelta(seconds=round(seconds_left))} left"

    def _compute_share_done(self) -> float:
        """Return the share of the work that is done, from 0 to 1: of the tokens if possible, else of the units.

        The share is 0 if nothing is known.
        """
        if self.expected > self.tokens:
            return self.tokens / self.expected
        if self.total:
            return self.done / self.total
        return 0.0

    def set_outcome(self, metadata: Mapping[str, Any]) -> None:
        """Set the outcome of the step, such as `443 rows in 12.1 s, 5,010 tokens/s`, or `unchanged`.

        Args:
            metadata: The metadata of the materialization, as Dagster's values or plain ones.
        """
        # One of Dagster's values holds the plain one in its attribute `value`.
        values = {label: getattr(value, "value", value) for label, value in metadata.items()}
        if values.get(UNCHANGED_LABEL):
            self.outcome = "unchanged"
        else:
            self.outcome = self._format_result(values.get(ROW_COUNT_LABEL), values.get(TOKENS_LABEL, 0))

    def _format_result(self, rows: int | None, tokens: int) -> str:
        """Return `443 rows in 12.1 s, 5,010 tokens/s`, or, for a step without rows, `done in 12.1 s`.

        Args:
            rows: How many rows the asset has. None for an asset that is no table.
            tokens: How many tokens went through the model. Without any, no rate is named.
        """
        seconds = max(self.elapsed_seconds, 1e-3)
        result = "done" if rows is None else f"{rows:,} rows"
        rate = f", {tokens / seconds:,.0f} tokens/s" if tokens else ""
        return f"{result} in {seconds:,.1f} s{rate}"


class _FinishedChunks(NamedTuple):
    """The tokens of those chunks of a step's work that are finished.

    Attributes:
        estimated_tokens: How many the plan had estimated for them.
        spent_tokens: How many they took.
    """

    estimated_tokens: float = 0.0
    spent_tokens: int = 0


class Running(Step):
    """A step that runs in this process.

    Attributes:
        progress_file: Where `write_progress` writes the progress. None if nobody watches.
        get_spent: Returns what the step has spent so far.
        get_work_ahead: Returns what the work of the step takes, as the plan estimates it.
    """

    progress_file: Path | None = None
    get_spent: Callable[[], Spent] = Spent
    get_work_ahead: Callable[[], WorkAhead] = WorkAhead
    _finished_chunks: _FinishedChunks = _FinishedChunks()

    def record_wait(self, holder: str) -> None:
        """Write down that the step waits for a process of another run over the same lake.

        Args:
            holder: The process, for people.
        """
        self.waits = holder
        self.write_progress()

    def write_progress(self) -> None:
        """Update the figures and write them to the progress file. On a full disk the file stays as it was."""
        self._update_figures(self.get_spent(), self.get_work_ahead())
        if self.progress_file is not None:
            with suppress(WriteError):
                write_file_atomically(self.progress_file, json.dumps(asdict(self)).encode())

    def _update_figures(self, spent: Spent, work_ahead: WorkAhead) -> None:
        """Set the figures of the step.

        These are the `tokens` and `calls` that it has spent, `total` and `done` in its unit, `expected` (an estimate of
        all its tokens) and `measured` (whether that estimate rests on finished chunks of work).

        Args:
            spent: What the step has spent so far.
            work_ahead: What its work takes, as the plan estimates it.
        """
        self.tokens = spent.tokens
        self.calls = spent.calls
        self.total = self.total or work_ahead.total_units
        # Elsewhere `done` only grows when a chunk is finished. Calls are counted one by one, so it follows them.
        if self.unit == "calls":
            self.done = max(self.done, min(self.calls, self.total))
        self.expected = self._estimate_total_tokens(work_ahead)
        self.measured = self._finished_chunks.estimated_tokens > 0

    def _estimate_total_tokens(self, work_ahead: WorkAhead) -> float:
        """Estimate how many tokens the step takes in total. Its work is divided into chunks.

        Example:
            The plan estimates 100 tokens in all, 20 of them for the finished chunks. If these took 30, the others are
            scaled by 30 / 20, and the result is 30 + 80 * 1.5 = 150.

        Args:
            work_ahead: The plan's estimates for all chunks and for the finished ones.
        """
        # `tokens` counts those of the chunk that is being computed, too. So it tells what the finished chunks took only
        # at the moment when another one has ended, and that value is kept in `_finished_chunks`.
        has_new_chunk = work_ahead.done_tokens != self._finished_chunks.estimated_tokens
        if has_new_chunk:
            self._finished_chunks = _FinishedChunks(estimated_tokens=work_ahead.done_tokens, spent_tokens=self.tokens)

        finished = self._finished_chunks
        scale = finished.spent_tokens / finished.estimated_tokens if finished.estimated_tokens else 1.0

        unfinished_estimate = (work_ahead.total_tokens - finished.estimated_tokens) * scale
        return finished.spent_tokens + unfinished_estimate


_current_step: ContextVar[Running] = ContextVar("current")
"""The step that runs in this thread."""


@contextmanager
def track_step(context: dg.AssetExecutionContext, asset_name: str) -> Iterator[Running]:
    """Write the progress of a step to a file while the block runs, for everyone who watches the run.

    If the block raises an Exception, the outcome of the step becomes `failed: REASON`. Otherwise the block has to set
    it (`Running.set_outcome`). It stays None if the block is interrupted, as by KeyboardInterrupt.

    Args:
        context: The context of the step.
        asset_name: The asset that the step makes.

    Yields:
        The running step.
    """
    running_step = Running(asset_name)
    running_step.progress_file = _find_progress_file(context, asset_name)

    # From here on, `build_progress_reporter` and `record_cost` find the step.
    reset_token = _current_step.set(running_step)
    running_step.write_progress()

    try:
        with _write_progress_regularly(running_step):
            yield running_step
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        running_step.outcome = f"failed: {first_line}"
        raise
    finally:
        _current_step.reset(reset_token)
        running_step.write_progress()


def _find_progress_file(context: dg.AssetExecutionContext, asset_name: str) -> Path | None:
    """Return the file for the progress of a step, or None if the Dagster instance keeps nothing on disk."""
    if context.instance.is_ephemeral:
        return None
    run_folder = get_run_folder(context.instance, context.run)
    return run_folder / f"{encode_file_name(asset_name)}.json"


@contextmanager
def _write_progress_regularly(running_step: Running) -> Iterator[None]:
    """Write the progress of a step to its file every BACKGROUND_WRITE_SECONDS while the block runs.

    Another thread does this. It ignores a failed write, such as on a full disk. Any other error ends the thread, not
    the step, and Python prints it.
    """
    block_ended = threading.Event()

    def write_until_the_end() -> None:
        while not block_ended.wait(BACKGROUND_WRITE_SECONDS):
            running_step.write_progress()

    # The thread is a daemon, for which the process does not wait: Ctrl-C may come before the `try` below.
    writing_thread = threading.Thread(target=write_until_the_end, daemon=True)
    writing_thread.start()
    try:
        yield
    finally:
        block_ended.set()
        writing_thread.join()


class _ProgressReporter:
    """Takes the number of units that a stage has done, and writes it now and then to the step's file and to the log."""

    def __init__(self, context: dg.AssetExecutionContext, running_step: Running) -> None:
        self._context = context
        self._running_step = running_step
        self._last_log_time = time.monotonic()
        self._last_write_time = 0.0

    def report_progress(self, done_units: int, total_units: int) -> None:
        """Record how far the step is, and write it where people watch.

        The step's file is written at most every WRITE_EVERY_SECONDS, the run's log at most every LOG_EVERY_SECONDS.

        Args:
            done_units: The number of finished units.
            total_units: The number of all units, or 0 if it is unknown.
        """
        self._running_step.done = done_units
        self._running_step.total = total_units

        now = time.monotonic()
        if now - self._last_write_time > WRITE_EVERY_SECONDS:
            self._last_write_time = now
            self._running_step.write_progress()

        if now - self._last_log_time > LOG_EVERY_SECONDS:
            self._last_log_time = now
            self._context.log.info(self._running_step.progress_text)


def build_progress_reporter(
    context: dg.AssetExecutionContext,
    progress_unit: str = "",
    get_spent: Callable[[], Spent] = Spent,
    get_work_ahead: Callable[[], WorkAhead] = WorkAhead,
) -> Callable[[int, int], None]:
    """Return a function `advance(done, total)` that reports the progress of the running step.

    From now on, the step gets its figures from `get_spent` and `get_work_ahead` whenever it is written to its file.

    Args:
        context: The context of the step.
        progress_unit: What is counted, such as "texts".
        get_spent: Returns the tokens and calls that this process has spent so far.
        get_work_ahead: Returns the plan's estimate of what the units take.
    """
    running_step = _current_step.get()  # set by `track_step`
    # This process may have run other steps before, whose spending is not this step's.
    spent_before_step = get_spent()

    running_step.unit = progress_unit
    running_step.get_spent = lambda: get_spent() - spent_before_step
    running_step.get_work_ahead = get_work_ahead

    return _ProgressReporter(context, running_step).report_progress


def is_single_step_process(context: dg.AssetExecutionContext) -> bool:
    """Return whether this process runs a single step of a run, as Dagster's multiprocess executor starts them."""
    return context.job_def.executor_def.name == dg.multiprocess_executor.name


def record_cost(context: dg.AssetExecutionContext, lake: Lake, step_cost: StepCost) -> None:
    """Add the cost of a step to the lake's table of costs, and to the progress of the running step.

    Raises:
        WriteError: The row cannot be written to a lake in a folder. On an object store this is only a warning in the
            log.
    """
    total_spent = Spent(step_cost.tokens, step_cost.calls)
    running_step = _current_step.get()
    running_step.get_spent = lambda: total_spent  # called whenever the step's progress is written

    asset_name = context.asset_key.to_user_string()
    warning = f"the cost of {asset_name} is not in `costs`"
    write_row = partial(add_cost, lake, context.run.run_id, asset_name, step_cost)
    _write_log_rows(context, lake, warning, write_row)


def record_changes(
    context: dg.AssetExecutionContext,
    lake: Lake,
    setting_changes: Sequence[FieldChange],
    kept_counts: KeptCounts | None,
) -> None:
    """Add a row to the lake's table of changes: the changed settings, and how many calls were kept before and after.

    Args:
        context: The context of the step.
        lake: The lake.
        setting_changes: The settings that changed.
        kept_counts: The numbers of kept calls. None for an asset that keeps no calls.

    Raises:
        WriteError: The row cannot be written to a lake in a folder. On an object store this is only a warning in the
            log.
    """
    asset_name = context.asset_key.to_user_string()
    warning = f"what {asset_name} changed is not in `changes`"
    write_row = partial(add_changes, lake, context.run.run_id, asset_name, setting_changes, kept_counts)
    _write_log_rows(context, lake, warning, write_row)


def _write_log_rows(
    context: dg.AssetExecutionContext, lake: Lake, warning_text: str, write_rows: Callable[[], None]
) -> None:
    """Write rows to a table of the lake that records what runs did, such as `costs`.

    In a folder they are written at once, and an error is raised. On an object store they are written in the
    background, and an error becomes a warning in the run's log.

    Args:
        context: The context of the step.
        lake: The lake.
        warning_text: The text of the warning, which is followed by the error.
        write_rows: Writes the rows.

    Raises:
        WriteError: The rows cannot be written to a lake in a folder.
    """
    # Only in an object store does the first of two writers win; in a folder it is the last one.
    is_object_store = lake.storage.first_wins

    def write_or_warn() -> None:
        if is_object_store:
            with _turn_error_into_warning(context, warning_text):
                write_rows()
        else:
            write_rows()

    lake.storage.write_beside(write_or_warn)  # at once in a folder, and in the background on an object store

    if is_single_step_process(context):  # the next step runs in another process, which does not wait for the write
        lake.storage.wait_for_background_write()


def record_failure(context: dg.AssetExecutionContext, lake: Lake, failed_step: Running) -> None:
    """Add the cost of a failed or interrupted step to the lake's table of costs.

    If the row cannot be written, a warning is logged, and the step's own error remains the one that people see.
    """
    failed_step.write_progress()  # brings its figures up to date
    step_cost = StepCost(failed_step.elapsed_seconds, failed_step.tokens, failed_step.calls, failed=True)
    with _turn_error_into_warning(context, f"the cost of {failed_step.name} is not in `costs`"):
        record_cost(context, lake, step_cost)


@contextmanager
def _turn_error_into_warning(context: dg.AssetExecutionContext, warning_text: str) -> Iterator[None]:
    """Turn a UserError of the block into a warning in the run's log: `warning_text`, then the error."""
    try:
        yield
    except UserError as error:  # the disk or the store may be what failed
        context.log.warning(f"{warning_text}: {error}")


def tag_run_with_changes(context: dg.AssetExecutionContext, setting_changes: Sequence[str]) -> None:
    """Add changed settings of an asset to the tag of the run that names them.

    Args:
        context: The context of the step.
        setting_changes: The changes, such as "tau_f 0.5 -> 0.8". In the tag, the asset's group stands before each:
            "calculator.tau_f 0.5 -> 0.8".
    """
    group = context.asset_key.path[0]
    entries = [f"{group}.{change}" for change in setting_changes]
    if entries:
        _update_run_tag(context, CHANGED_TAG, partial(_add_entries_to_tag, entries=entries))


def tag_run_with_outcome(context: dg.AssetExecutionContext, asset_name: str, metadata: Mapping[str, Any]) -> None:
    """Add an asset to the run's tag of computed assets, or count it in the tag of skipped ones.

    Args:
        context: The context of the step.
        asset_name: The name of the asset.
        metadata: The metadata of its materialization. No tag changes if it does not say whether the asset is unchanged.
    """
    value = metadata.get(UNCHANGED_LABEL)
    is_unchanged = getattr(value, "value", value)  # one of Dagster's values, or a plain one
    if is_unchanged is False:
        _update_run_tag(context, COMPUTED_TAG, partial(_add_entries_to_tag, entries=[asset_name]))
    elif is_unchanged is True:
        _update_run_tag(context, SKIPPED_TAG, _increment_tag)


def _add_entries_to_tag(tag_value: str | None, entries: Sequence[str]) -> str:
    """Add entries to the value of a tag, each only once: "a; b" and the entries b and c give "a; b; c".

    Args:
        tag_value: The present value. None if there is no tag yet.
        entries: The entries.
    """
    present_entries = tag_value.split(ENTRY_SEPARATOR) if tag_value else []
    distinct_entries = dict.fromkeys([*present_entries, *entries])
    return ENTRY_SEPARATOR.join(distinct_entries)


def _increment_tag(tag_value: str | None) -> str:
    """Return the value of a counting tag plus one. Without a tag (None), the count begins at one."""
    return str(int(tag_value or 0) + 1)


def _update_run_tag(
    context: dg.AssetExecutionContext, tag_name: str, compute_value: Callable[[str | None], str]
) -> None:
    """Replace the value of a tag of the run.

    Args:
        context: The context of the step.
        tag_name: The name of the tag.
        compute_value: Returns the new value for the present one, which is None if there is no tag yet.
    """
    # Concurrent steps change the same tags: without the lock, one change could be lost.
    with hold_file_lock(Path(context.instance.root_directory) / "run_tags.lock"):
        run = context.instance.get_run_by_id(context.run.run_id)
        if run is not None:
            new_value = compute_value(run.tags.get(tag_name))
            context.instance.add_run_tags(run.run_id, {tag_name: new_value})
