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

from toolformer_dag.assets.metadata import ROWS, TOKENS, UNCHANGED
from toolformer_dag.computing.change_log import KeptCounts, add_changes
from toolformer_dag.computing.spending import Spent, StepCost, add_cost
from toolformer_dag.computing.worker import Ahead
from toolformer_dag.files import UserError, WriteError, file_name, locked, write_whole
from toolformer_dag.lake.record import FieldChange
from toolformer_dag.lake.table import Lake
from toolformer_dag.resources.live_runs import run_folder

LOG_EVERY_SECONDS = 15.0
"""How often a running step writes its progress to the log of the run."""
WRITE_EVERY_SECONDS = 0.3
"""How often at most a step writes its progress down when its stage reports units."""
TELL_EVERY_SECONDS = 1.0
"""How often it writes its progress down while its stage reports nothing."""
CHANGED = "toolformer/changed"
"""The tag of a run that says which settings changed: `calculator.tau_f 0.5 -> 0.8`."""
COMPUTED = "toolformer/computed"
"""The tag of a run that names the assets whose rows or files it computed: `calculator/filtered_calls; training/...`."""
SKIPPED = "toolformer/skipped"
"""The tag of a run with the number of its assets for which there was nothing to compute."""
BETWEEN = "; "
"""Separates the entries of a tag."""


@dataclass
class Step:
    """The progress of a step of a run: an asset that is being made.

    - `name`: the asset's name
    - `unit`: what `done` and `total` count, such as "texts"
    - `total`: 0 if unknown
    - `tokens`, `calls`: spent so far
    - `waits`: the process of another run for which the step waited last; empty if it did not wait
    - `outcome`: how the step ended; None while it runs
    - `began`: when it began, by the machine's monotonic clock
    - `expected`: an estimate of all tokens that the step takes; 0 if there is none
    - `measured`: whether the estimate rests on finished chunks, not on the plan alone
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
    def seconds(self) -> float:
        """The seconds since the step began."""
        return time.monotonic() - self.began

    @property
    def under_way(self) -> str:
        """The progress as text: `312 of 800 texts, 5,120 tokens/s, 0:01:12 left`; unknown figures are left out.

        Before the first unit is done it counts tokens: `9,800 of some 25,000 tokens, 5,120 tokens/s, ...`.
        """
        seconds = max(self.seconds, 1e-3)
        rate = f"{self.tokens / seconds:,.0f} tokens/s" if self.tokens else ""
        parts = [self._format_work_done(), rate, self._format_time_left(seconds)]
        return ", ".join(part for part in parts if part)

    def _format_work_done(self) -> str:
        """Return `312 of 800 texts`; of tokens before the first unit is done, empty if nothing is known."""
        if not self.done and 0 < self.tokens < self.expected:
            return f"{self.tokens:,} of some {self.expected:,.0f} tokens"
        if self.total:
            return f"{self.done:,} of {self.total:,} {self.unit}"
        return f"{self.done:,} {self.unit}" if self.done else ""

    def _format_time_left(self, seconds: float) -> str:
        """Format how long the rest of the step takes, such as "0:01:12 left". Empty if it is unknown.

        While the first chunk is being computed, the text is "measuring the time left": much of the time so far was
        spent on loading the model, so it says little about the pace.

        Args:
            seconds: The time since the step began.
        """
        is_within_first_chunk = self.tokens and not self.measured
        if self.expected > self.tokens and is_within_first_chunk:
            return "measuring the time left"

        share_done = self._compute_share_done()
        if not 0 < share_done < 1:
            return ""

        seconds_left = seconds / share_done * (1 - share_done)
        return f"{timedelta(seconds=round(seconds_left))} left"

    def _compute_share_done(self) -> float:
        """Return the share of the work that is done, by tokens if possible, else by units; 0 if unknown."""
        if self.expected > self.tokens:
            return self.tokens / self.expected
        return self.done / self.total if self.total else 0.0

    def end(self, metadata: Mapping[str, Any]) -> None:
        """Set the outcome of the step, such as `443 rows in 12.1 s, 5,010 tokens/s`, or `unchanged`.

        Args:
            metadata: The metadata of the materialization, as Dagster's values or plain ones.
        """
        values = {name: getattr(value, "value", value) for name, value in metadata.items()}
        if values.get(UNCHANGED):
            self.outcome = "unchanged"
        else:
            self.outcome = self._format_result(values.get(ROWS), values.get(TOKENS, 0))

    def _format_result(self, rows: int | None, tokens: int) -> str:
        """Return `443 rows in 12.1 s, 5,010 tokens/s`, of a step without rows `done in 12.1 s`."""
        seconds = max(self.seconds, 1e-3)
        result = "done" if rows is None else f"{rows:,} rows"
        rate = f", {tokens / seconds:,.0f} tokens/s" if tokens else ""
        return f"{result} in {seconds:,.1f} s{rate}"


class _FinishedChunks(NamedTuple):
    """Tokens of a step's finished chunks: what the plan estimated for them, and what they took."""

    estimated: float = 0.0
    spent: int = 0


class Running(Step):
    """A step of this process.

    - `file`: where `write` writes the progress; None if nobody watches
    - `spent`: returns what the step has spent so far
    - `ahead`: returns what its units take by the plan
    """

    file: Path | None = None
    spent: Callable[[], Spent] = Spent
    ahead: Callable[[], Ahead] = Ahead
    _finished: _FinishedChunks = _FinishedChunks()

    def wait(self, holder: str) -> None:
        """Write down that the step waits for a process of another run over the lake."""
        self.waits = holder
        self.write()

    def write(self) -> None:
        """Update the figures and write them to the file; a full disk keeps the file as it was."""
        self._update(self.spent(), self.ahead())
        if self.file is not None:
            with suppress(WriteError):
                write_whole(self.file, json.dumps(asdict(self)).encode())

    def _update(self, spent: Spent, ahead: Ahead) -> None:
        """Set the figures to what was spent so far and what the plan expects."""
        self.tokens = spent.tokens
        self.calls = spent.calls
        self.total = self.total or ahead.units
        if self.unit == "calls":  # the stage reports whole chunks, but single calls are known
            self.done = max(self.done, min(self.calls, self.total))
        self.expected = self._estimate_tokens(ahead)
        self.measured = self._finished.estimated > 0

    def _estimate_tokens(self, ahead: Ahead) -> float:
        """Estimate how many tokens the step takes in total.

        For finished chunks the true number is used. For the rest it is the plan's estimate, scaled by how far the
        plan was off for the finished chunks.

        Args:
            ahead: The plan's estimates for all chunks and for the finished ones.
        """
        another_chunk_has_ended = ahead.tokens_done != self._finished.estimated
        if another_chunk_has_ended:
            self._finished = _FinishedChunks(estimated=ahead.tokens_done, spent=self.tokens)

        finished = self._finished
        scale = finished.spent / finished.estimated if finished.estimated else 1.0

        estimate_for_rest = (ahead.tokens - finished.estimated) * scale
        return finished.spent + estimate_for_rest


_current: ContextVar[Running] = ContextVar("current")
"""The step that runs in this thread."""


@contextmanager
def step(context: dg.AssetExecutionContext, name: str) -> Iterator[Running]:
    """Write the progress of a step to a file while the block runs, for everyone who watches the run.

    If the block raises an error, the outcome of the step becomes `failed: REASON`. Otherwise the block has to set
    it (`Step.end`).

    Yields:
        The running step.
    """
    running = Running(name)
    running.file = _find_progress_file(context, name)

    token = _current.set(running)  # here `progress` and `note_cost` find the step
    running.write()

    try:
        with _write_progress_regularly(running):
            yield running
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        running.outcome = f"failed: {first_line}"
        raise
    finally:
        _current.reset(token)
        running.write()


def _find_progress_file(context: dg.AssetExecutionContext, name: str) -> Path | None:
    """Return the file for the progress of a step; None for an instance that keeps nothing on disk."""
    if context.instance.is_ephemeral:
        return None
    return run_folder(context.instance, context.run) / f"{file_name(name)}.json"


@contextmanager
def _write_progress_regularly(running: Running) -> Iterator[None]:
    """Write the progress of a step to its file every TELL_EVERY_SECONDS while the block runs, in another thread.

    A failed write, such as on a full disk, is ignored. Python prints any other error; it ends the thread, not the step.
    """
    ended = threading.Event()

    def write_until_the_end() -> None:
        while not ended.wait(TELL_EVERY_SECONDS):
            running.write()

    # Ctrl-C may interrupt this function before its `try`: the process would wait for a thread that is no daemon.
    writing = threading.Thread(target=write_until_the_end, daemon=True)
    writing.start()
    try:
        yield
    finally:
        ended.set()
        writing.join()


class _Progress:
    """Takes the units that a stage has done, and writes them now and then to the step's file and to the run's log."""

    def __init__(self, context: dg.AssetExecutionContext, running: Running) -> None:
        self._context = context
        self._running = running
        self._logged_at = time.monotonic()
        self._written_at = 0.0

    def advance(self, done: int, total: int) -> None:
        """Record the progress of the step.

        The step's file is written at most every WRITE_EVERY_SECONDS, the log at most every LOG_EVERY_SECONDS.

        Args:
            done: The number of finished units.
            total: The number of all units, or 0 if it is unknown.
        """
        self._running.done = done
        self._running.total = total

        now = time.monotonic()
        if now - self._written_at > WRITE_EVERY_SECONDS:
            self._written_at = now
            self._running.write()

        if now - self._logged_at > LOG_EVERY_SECONDS:
            self._logged_at = now
            self._context.log.info(self._running.under_way)


def progress(
    context: dg.AssetExecutionContext,
    unit: str = "",
    spent: Callable[[], Spent] = Spent,
    ahead: Callable[[], Ahead] = Ahead,
) -> Callable[[int, int], None]:
    """Return a function `advance(done, total)` that reports the progress of the running step.

    From now on, the step gets its figures from `spent` and `ahead` whenever it is written to its file.

    Args:
        unit: What is counted, such as "texts".
        spent: Returns the tokens and calls that this process has spent so far.
        ahead: Returns the plan's estimate of what the units take.
    """
    running = _current.get()  # the record of the step that runs in this thread, set by `step`
    spent_before_step = spent()

    running.unit = unit
    running.spent = lambda: spent() - spent_before_step
    running.ahead = ahead

    return _Progress(context, running).advance


def runs_alone(context: dg.AssetExecutionContext) -> bool:
    """Return whether this process runs a single step of a run."""
    return context.job_def.executor_def.name == dg.multiprocess_executor.name


def note_cost(context: dg.AssetExecutionContext, lake: Lake, cost: StepCost) -> None:
    """Add the cost of a step to the lake's table of costs, and to the progress of the running step.

    Raises:
        WriteError: The row cannot be written to a lake in a folder. On an object store this is only a warning
            in the log.
    """
    spent_in_all = Spent(cost.tokens, cost.calls)
    running = _current.get()
    running.spent = lambda: spent_in_all  # it is asked whenever the step's progress is written

    asset = context.asset_key.to_user_string()
    warning = f"the cost of {asset} is not in `costs`"
    write = partial(add_cost, lake, context.run.run_id, asset, cost)
    _write_log(context, lake, warning, write)


def note_changes(
    context: dg.AssetExecutionContext, lake: Lake, settings: Sequence[FieldChange], kept: KeptCounts | None
) -> None:
    """Add a row to the lake's table of changes: the changed settings, and the calls kept before and after.

    Raises:
        WriteError: The row cannot be written to a lake in a folder. On an object store this is only a warning
            in the log.
    """
    asset = context.asset_key.to_user_string()
    warning = f"what {asset} changed is not in `changes`"
    write = partial(add_changes, lake, context.run.run_id, asset, settings, kept)
    _write_log(context, lake, warning, write)


def _write_log(context: dg.AssetExecutionContext, lake: Lake, warning: str, write: Callable[[], None]) -> None:
    """Write rows to a table of the lake that logs runs.

    In a folder they are written at once, and an error is raised. On an object store they are written in the
    background, and an error becomes a warning in the run's log.

    Args:
        warning: The text of the warning, which is followed by the error.
        write: Writes the rows.
    """
    is_object_store = lake.storage.first_wins  # in a folder the last of two writers wins

    def write_or_warn() -> None:
        if is_object_store:
            with _turn_error_into_warning(context, warning):
                write()
        else:
            write()

    lake.storage.write_beside(write_or_warn)

    if runs_alone(context):  # the next step runs in another process, which does not wait for the write
        lake.storage.wait_for_writes()


def note_failure(context: dg.AssetExecutionContext, lake: Lake, failed: Running) -> None:
    """Add the cost of a failed or interrupted step to the lake's table of costs; log a warning if that fails."""
    failed.write()  # update what was spent
    with _turn_error_into_warning(context, f"the cost of {failed.name} is not in `costs`"):
        note_cost(context, lake, StepCost(failed.seconds, failed.tokens, failed.calls, failed=True))


@contextmanager
def _turn_error_into_warning(context: dg.AssetExecutionContext, warning: str) -> Iterator[None]:
    """Turn a UserError of the block into a warning in the run's log: `warning`, then the error."""
    try:
        yield
    except UserError as error:  # the disk or the store may be what failed
        context.log.warning(f"{warning}: {error}")


def tag_changes(context: dg.AssetExecutionContext, changed: Sequence[str]) -> None:
    """Add changed settings to the run's tag CHANGED."""
    group = context.asset_key.path[0]
    changes = [f"{group}.{change}" for change in changed]
    if changes:
        _change_tag(context, CHANGED, partial(_with_entries, entries=changes))


def tag_outcome(context: dg.AssetExecutionContext, name: str, metadata: Mapping[str, Any]) -> None:
    """Add an asset to the run's tag COMPUTED, or count it in the tag SKIPPED.

    Args:
        name: The name of the asset.
        metadata: The metadata of its materialization. Without the entry UNCHANGED, no tag changes.
    """
    value = metadata.get(UNCHANGED)
    unchanged = getattr(value, "value", value)  # Dagster's value, or a plain one
    if unchanged is False:
        _change_tag(context, COMPUTED, partial(_with_entries, entries=[name]))
    elif unchanged is True:
        _change_tag(context, SKIPPED, _with_one_more)


def _with_entries(value: str | None, entries: Sequence[str]) -> str:
    """Return a tag's value with these entries added, each once. value: None if there is no tag yet."""
    before = value.split(BETWEEN) if value else []
    return BETWEEN.join(dict.fromkeys([*before, *entries]))


def _with_one_more(value: str | None) -> str:
    """Return the value of a counting tag plus one. value: None if there is no tag yet."""
    return str(int(value or 0) + 1)


def _change_tag(context: dg.AssetExecutionContext, tag: str, changed: Callable[[str | None], str]) -> None:
    """Replace a tag of the run. changed: returns the new value for the present one or None."""
    with locked(Path(context.instance.root_directory) / "run_tags.lock"):  # concurrent steps change tags too
        run = context.instance.get_run_by_id(context.run.run_id)
        if run is not None:
            context.instance.add_run_tags(run.run_id, {tag: changed(run.tags.get(tag))})
