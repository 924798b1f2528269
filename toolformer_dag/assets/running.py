"""A step while it runs: its progress for whoever watches and for the log, its cost, its tags."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
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
"""How often the log of a run gets a line about a step that goes on."""
WRITE_EVERY_SECONDS = 0.3
"""How often at most a step writes down how it gets on, when its stage says so."""
TELL_EVERY_SECONDS = 1.0
"""How often it does so while its stage says nothing."""
CHANGED = "toolformer/changed"
"""The tag of a run that says which settings changed: `calculator.tau_f 0.5 -> 0.8`."""
COMPUTED = "toolformer/computed"
"""The tag of a run that names the assets whose rows or files it computed: `calculator/filtered_calls; training/...`."""
SKIPPED = "toolformer/skipped"
"""The tag of a run with the number of its assets for which there was nothing to compute."""
BETWEEN = "; "
"""What stands between the entries of a tag."""


@dataclass
class Step:
    """How a step of a run gets on: an asset that is being made.

    - `name`: of the asset
    - `unit`: what `done` and `total` count, such as "texts"; a total of 0 is unknown
    - `tokens`, `calls`: what was spent so far
    - `waits`: the process of another run for which it waited last; empty where it did not wait
    - `outcome`: what came of it; None while it runs
    - `began`: when it began, by the machine's monotonic clock
    - `expected`: an estimate of the tokens that it takes in all; 0 where there is none
    - `measured`: whether that rests on chunks that are done, or on the plan alone
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
        """Return the seconds since the step began; the clock is the machine's."""
        return time.monotonic() - self.began

    @property
    def under_way(self) -> str:
        """Return `312 of 800 texts, 5,120 tokens/s, 0:01:12 left`; what is not known is left out.

        Before the first unit is done, tokens are shown beside those that are expected:
        `9,800 of some 25,000 tokens, 5,120 tokens/s, measuring the time left`.
        """
        seconds = max(self.seconds, 1e-3)
        parts = []
        if not self.done and 0 < self.tokens < self.expected:
            parts.append(f"{self.tokens:,} of some {self.expected:,.0f} tokens")
        elif self.total:
            parts.append(f"{self.done:,} of {self.total:,} {self.unit}")
        elif self.done:
            parts.append(f"{self.done:,} {self.unit}")
        if self.tokens:
            parts.append(f"{self.tokens / seconds:,.0f} tokens/s")
        time_left = self._time_left(seconds)
        if time_left is not None:
            parts.append(time_left)
        return ", ".join(parts)

    def _time_left(self, seconds: float) -> str | None:
        """Return how long the rest takes if it goes on as in the `seconds` so far; None where nobody can tell.

        It is told by the share of the expected tokens that are done, where these are known, else by the share of units:
        texts differ in length.
        """
        if self.expected > self.tokens:
            if self.tokens and not self.measured:  # the expected tokens are a plan, and loading the model took time
                return "measuring the time left"
            share_done = self.tokens / self.expected
        elif self.total:
            share_done = self.done / self.total
        else:
            return None
        if not 0 < share_done < 1:
            return None
        seconds_left = seconds / share_done * (1 - share_done)
        return f"{timedelta(seconds=round(seconds_left))} left"

    def end(self, metadata: Mapping[str, Any]) -> None:
        """Set the outcome: `443 rows in 12.1 s, 5,010 tokens/s`, or `unchanged`.

        `metadata`: that of the materialization, as Dagster's values or plain ones.
        """
        shown = {name: getattr(value, "value", value) for name, value in metadata.items()}
        if shown.get(UNCHANGED):
            self.outcome = "unchanged"
            return
        seconds = max(self.seconds, 1e-3)
        rows = shown.get(ROWS)
        result = "done" if rows is None else f"{rows:,} rows"
        tokens = shown.get(TOKENS, 0)
        rate = f", {tokens / seconds:,.0f} tokens/s" if tokens else ""
        self.outcome = f"{result} in {seconds:,.1f} s{rate}"


class _Passed(NamedTuple):
    """The chunks of a step that are done: the tokens that they were estimated to take, and what they took."""

    estimated: float = 0.0
    spent: int = 0


class Running(Step):
    """A step of this process. `write` brings its figures up to date and writes them down for whoever watches the run.

    - `file`: where; None where nobody watches
    - `spent`: asks what it has spent so far
    - `ahead`: asks what its units take, as planned
    """

    file: Path | None = None
    spent: Callable[[], Spent] = Spent
    ahead: Callable[[], Ahead] = Ahead
    _passed: _Passed = _Passed()

    def wait(self, holder: str) -> None:
        """Tell for which process of another run over the lake this step waits."""
        self.waits = holder
        self.write()

    def write(self) -> None:
        """Tell how the step gets on, within a chunk too. While the disk is full the figures of before stay."""
        spent = self.spent()
        ahead = self.ahead()
        self.tokens = spent.tokens
        self.calls = spent.calls
        self.total = self.total or ahead.units
        if self.unit == "calls":  # calls are told one by one, where the stage counts whole chunks
            self.done = max(self.done, min(self.calls, self.total))
        self.expected = self._expected_tokens(ahead)
        self.measured = self._passed.estimated > 0
        if self.file is not None:
            with suppress(WriteError):
                write_whole(self.file, json.dumps(asdict(self)).encode())

    def _expected_tokens(self, ahead: Ahead) -> float:
        """Return the tokens that the step takes in all: those spent, and the estimate for the rest.

        The estimate is corrected by how far off it was for the chunks that are done.
        """
        if ahead.tokens_done != self._passed.estimated:  # a chunk ended since it was asked last
            self._passed = _Passed(ahead.tokens_done, self.tokens)
        passed = self._passed
        correction = passed.spent / passed.estimated if passed.estimated else 1.0
        return passed.spent + (ahead.tokens - passed.estimated) * correction


_current: ContextVar[Running] = ContextVar("current")
"""The step that runs in this thread."""


@contextmanager
def step(context: dg.AssetExecutionContext, name: str) -> Iterator[Running]:
    """Write down the step that runs inside the block, and its end: `failed: REASON` where the block raises."""
    running = Running(name)
    if not context.instance.is_ephemeral:
        running.file = run_folder(context.instance, context.run) / f"{file_name(name)}.json"
    token = _current.set(running)
    running.write()
    try:
        with _written_now_and_then(running):
            yield running
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        running.outcome = f"failed: {first_line}"
        raise
    finally:
        _current.reset(token)
        running.write()


@contextmanager
def _written_now_and_then(running: Running) -> Iterator[None]:
    """Write a step down every TELL_EVERY_SECONDS inside the block, by a thread of its own."""
    ended = threading.Event()

    def write_until_the_end() -> None:
        while not ended.wait(TELL_EVERY_SECONDS):
            running.write()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(write_until_the_end)
        try:
            yield
        finally:
            ended.set()


class _Progress:
    """Passes on what a stage says of its units: to whoever watches the run, and to the run's log now and then."""

    def __init__(self, context: dg.AssetExecutionContext, running: Running) -> None:
        self._context = context
        self._running = running
        self._logged_at = time.monotonic()
        self._written_at = 0.0

    def advance(self, done: int, total: int) -> None:
        """Take the units that are done, and how many there are; 0 where nobody knows."""
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
    """Return a function that the running step calls as `advance(done, total)`; total is 0 where nobody knows it.

    - `unit`: what both count, such as "texts"
    - `spent`: returns what went through the model and the tools in this process so far; a step without it tells its
      cost at the end (`note_cost`)
    - `ahead`: returns what the units will take, as planned

    What is shown of the running step, the value of the context variable `_current`, is changed accordingly.

    The log of the run gets a line every LOG_EVERY_SECONDS.
    """
    running = _current.get()
    spent_before = spent()
    running.unit = unit
    running.spent = lambda: spent() - spent_before
    running.ahead = ahead
    return _Progress(context, running).advance


def runs_alone(context: dg.AssetExecutionContext) -> bool:
    """Return whether this process runs a single step of a run."""
    return context.job_def.executor_def.name == dg.multiprocess_executor.name


def note_cost(context: dg.AssetExecutionContext, lake: Lake, cost: StepCost) -> None:
    """Add a row to the lake's table of costs, and show what the running step spent.

    Over an object store the row is written while the next step runs, and a warning in the log says where that failed.
    Over a folder raises WriteError.
    """
    total = Spent(cost.tokens, cost.calls)
    _current.get().spent = lambda: total
    asset = context.asset_key.to_user_string()
    warning = f"the cost of {asset} is not in `costs`"
    _write_log(context, lake, warning, partial(add_cost, lake, context.run.run_id, asset, cost))


def note_changes(
    context: dg.AssetExecutionContext, lake: Lake, settings: Sequence[FieldChange], kept: KeptCounts | None
) -> None:
    """Add to the lake's table of changes which settings a step found changed, and the calls kept before and after it.

    Where the rows cannot be written, the same holds as in `note_cost`.
    """
    asset = context.asset_key.to_user_string()
    warning = f"what {asset} changed is not in `changes`"
    _write_log(context, lake, warning, partial(add_changes, lake, context.run.run_id, asset, settings, kept))


def _write_log(context: dg.AssetExecutionContext, lake: Lake, warning: str, write: Callable[[], None]) -> None:
    """Call `write`, which adds rows to a log of the lake, such as costs.

    Over a folder it is called at once, and what it raises is raised. Over an object store it is called while the next
    step runs, and its error becomes a warning in the run's log. warning: what that says is missing.
    """
    is_object_store = lake.storage.first_wins

    def write_or_warn() -> None:
        with _warned(context, warning) if is_object_store else nullcontext():
            write()

    lake.storage.write_beside(write_or_warn)
    if runs_alone(context):  # the next step runs in another process, which does not wait for it
        lake.storage.wait_for_writes()


def note_failure(context: dg.AssetExecutionContext, lake: Lake, failed: Running) -> None:
    """Add what a step cost that failed or was interrupted; a warning in the log where that cannot be written."""
    failed.write()  # what was spent since it was last written
    with _warned(context, f"the cost of {failed.name} is not in `costs`"):
        note_cost(context, lake, StepCost(failed.seconds, failed.tokens, failed.calls, failed=True))


@contextmanager
def _warned(context: dg.AssetExecutionContext, warning: str) -> Iterator[None]:
    """Turn a UserError inside the block into a warning in the run's log, behind the words of `warning`."""
    try:
        yield
    except UserError as error:  # the disk or the store may be what failed
        context.log.warning(f"{warning}: {error}")


def tag_changes(context: dg.AssetExecutionContext, changed: Sequence[str]) -> None:
    """Add settings that changed to the run's tag `toolformer/changed`."""
    group = context.asset_key.path[0]
    changes = [f"{group}.{change}" for change in changed]
    if changes:
        _change_tag(context, CHANGED, partial(_with_entries, entries=changes))


def tag_outcome(context: dg.AssetExecutionContext, name: str, metadata: Mapping[str, Any]) -> None:
    """Add an asset to the run's tag of what was computed, or count it in the tag of what was skipped.

    `metadata`: that of its materialization. An asset that does not say whether anything changed is in neither tag.
    """
    value = metadata.get(UNCHANGED)
    unchanged = getattr(value, "value", value)  # Dagster's value, or a plain one
    if unchanged is False:
        _change_tag(context, COMPUTED, partial(_with_entries, entries=[name]))
    elif unchanged is True:
        _change_tag(context, SKIPPED, _with_one_more)


def _with_entries(value: str | None, entries: Sequence[str]) -> str:
    """Return the value of a tag with these entries, each once."""
    before = value.split(BETWEEN) if value else []
    return BETWEEN.join(dict.fromkeys([*before, *entries]))


def _with_one_more(value: str | None) -> str:
    """Return the value of a tag that counts, one higher."""
    return str(int(value or 0) + 1)


def _change_tag(context: dg.AssetExecutionContext, tag: str, changed: Callable[[str | None], str]) -> None:
    """Replace a tag of the run. `changed`: returns its new value, given the one so far or None."""
    with locked(Path(context.instance.root_directory) / "run_tags.lock"):  # steps at once change theirs too
        run = context.instance.get_run_by_id(context.run.run_id)
        if run is not None:
            context.instance.add_run_tags(run.run_id, {tag: changed(run.tags.get(tag))})
