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
from typing import Any

import dagster as dg

from toolformer_dag.assets.metadata import ROWS, TOKENS, UNCHANGED
from toolformer_dag.computing.change_log import KeptCalls, add_changes
from toolformer_dag.computing.spending import Spent, StepCost, add_cost
from toolformer_dag.computing.worker import Ahead
from toolformer_dag.files import UserError, WriteError, file_name, locked, write_whole
from toolformer_dag.lake.record import FieldChange
from toolformer_dag.lake.table import Lake
from toolformer_dag.resources.live_runs import run_folder

LOG_EVERY_SECONDS, WRITE_EVERY_SECONDS, TELL_EVERY_SECONDS = 15.0, 0.3, 1.0
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
    """An asset that is being made. `done` of `total` units; a total of 0 is unknown.

    `tokens`, `calls`: what was spent so far; `expected`: some tokens that it takes in all, 0 where none are expected;
    `measured`: whether `expected` rests on chunks that are done, or on the plan alone; `waits`: for which process of
    another run it waited; `outcome`: what came of it, once it has ended.
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

        Before the first of them are done nobody knows how long the rest takes, since the model was loaded meanwhile
        and its tokens are those of the plan: `9,800 of some 25,000 tokens, 5,120 tokens/s, measuring the time left`.
        """
        seconds, tokens, parts = max(self.seconds, 1e-3), self.tokens, []
        if not self.done and 0 < tokens < self.expected:
            parts.append(f"{tokens:,} of some {self.expected:,.0f} tokens")
        elif self.total:
            parts.append(f"{self.done:,} of {self.total:,} {self.unit}")
        elif self.done:
            parts.append(f"{self.done:,} {self.unit}")
        if tokens:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        by_tokens = self.expected > tokens
        done, total = (tokens, self.expected) if by_tokens else (self.done, self.total)
        if by_tokens and tokens and not self.measured:
            parts.append("measuring the time left")
        elif 0 < done < total:
            left = seconds / done * (total - done)
            parts.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(parts)

    def end(self, metadata: Mapping[str, Any]) -> None:
        """Say what came of it: `443 rows in 12.1 s, 5,010 tokens/s`, or `unchanged`."""
        shown = {name: getattr(value, "value", value) for name, value in metadata.items()}
        rows, tokens, seconds = shown.get(ROWS), shown.get(TOKENS, 0), max(self.seconds, 1e-3)
        summary = f"{'done' if rows is None else f'{rows:,} rows'} in {seconds:,.1f} s"
        rate = f", {tokens / seconds:,.0f} tokens/s" if tokens else ""
        self.outcome = f"{summary}{rate}" if not shown.get(UNCHANGED) else "unchanged"


class Running(Step):
    """A step of this process, written down for whoever watches the run; `file`: None where nobody does."""

    file: Path | None = None
    spent: Callable[[], Spent] = Spent
    ahead: Callable[[], Ahead] = Ahead
    passed: tuple[float, int] = (0.0, 0)
    """Tokens that chunks which are done were estimated to take, and those that had been spent by then."""

    def wait(self, holder: str) -> None:
        """Tell for which process of another run over the lake this step waits."""
        self.waits = holder
        self.write()

    def write(self) -> None:
        """Tell how the step gets on, within a chunk too."""
        spent, ahead = self.spent(), self.ahead()
        self.tokens, self.calls = spent.tokens, spent.calls
        self.total = self.total or ahead.units
        if self.unit == "calls":
            self.done = max(self.done, min(self.calls, self.total))
        if ahead.tokens_done != self.passed[0]:
            self.passed = ahead.tokens_done, self.tokens
        estimated, taken = self.passed
        self.measured = estimated > 0
        self.expected = taken + (ahead.tokens - estimated) * (taken / estimated if estimated else 1)
        if self.file is not None:
            with suppress(WriteError):  # the disk is full: the figures of before stay
                write_whole(self.file, json.dumps(asdict(self)).encode())


_current: ContextVar[Running] = ContextVar("current")


@contextmanager
def step(context: dg.AssetExecutionContext, name: str) -> Iterator[Running]:
    """Write down the step that runs inside the block, and its end."""
    made = Running(name)
    if not context.instance.is_ephemeral:
        made.file = run_folder(context.instance, context.run) / f"{file_name(name)}.json"
    token, ended = _current.set(made), threading.Event()
    made.write()

    def tell() -> None:
        while not ended.wait(TELL_EVERY_SECONDS):
            made.write()

    try:
        with ThreadPoolExecutor(1) as beside:
            beside.submit(tell)
            try:
                yield made
            finally:
                ended.set()
    except Exception as error:
        made.outcome = f"failed: {str(error).partition(chr(10))[0]}"
        raise
    finally:
        _current.reset(token)
        made.write()


def progress(
    context: dg.AssetExecutionContext,
    unit: str = "",
    spent: Callable[[], Spent] = Spent,
    ahead: Callable[[], Ahead] = Ahead,
) -> Callable[[int, int], None]:
    """Return what a stage calls with the units done and the units there are; 0 where nobody knows how many.

    `spent`: what went through the model and the tools in this process so far; a step without it tells its cost at the
    end (`note_cost`). `ahead`: what the units take, as planned. The log of the run gets a line every LOG_EVERY_SECONDS.
    """
    made, before = _current.get(), spent()
    made.unit, made.spent, made.ahead = unit, lambda: spent() - before, ahead
    logged, written = time.monotonic(), 0.0

    def advance(done: int, total: int) -> None:
        nonlocal logged, written
        made.done, made.total = done, total
        if (now := time.monotonic()) - written > WRITE_EVERY_SECONDS:
            written = now
            made.write()
        if now - logged > LOG_EVERY_SECONDS:
            logged = now
            context.log.info(made.under_way)

    return advance


def runs_alone(context: dg.AssetExecutionContext) -> bool:
    """Return whether this process runs a single step of a run."""
    return context.job_def.executor_def.name == dg.multiprocess_executor.name


def note_cost(context: dg.AssetExecutionContext, lake: Lake, cost: StepCost) -> None:
    """Add a row to the lake's table of costs, and tell the run what the step spent.

    Over an object store the row is written beside the next step, and a warning in the log says where that failed. A
    folder raises WriteError.
    """
    _current.get().spent = lambda: Spent(cost.tokens, cost.calls)
    asset = context.asset_key.to_user_string()
    lost = f"the cost of {asset} is not in `costs`"
    _write_log(context, lake, lost, partial(add_cost, lake, context.run.run_id, asset, cost))


def note_changes(
    context: dg.AssetExecutionContext, lake: Lake, settings: Sequence[FieldChange], kept: KeptCalls | None
) -> None:
    """Add to the lake's table of changes which settings a step found changed, and the calls kept before and after it.

    Written as the costs are.
    """
    asset = context.asset_key.to_user_string()
    lost = f"what {asset} changed is not in `changes`"
    _write_log(context, lake, lost, partial(add_changes, lake, context.run.run_id, asset, settings, kept))


def _write_log(context: dg.AssetExecutionContext, lake: Lake, lost: str, write: Callable[[], None]) -> None:
    """Write rows of a log; over an object store beside the next step, where a warning says what was lost and why."""

    def warn_of_store() -> None:
        with _warned(context, lost) if lake.storage.first_wins else nullcontext():
            write()

    lake.storage.write_beside(warn_of_store)
    if runs_alone(context):  # the next step will not wait for it
        lake.storage.wait_for_writes()


def note_failure(context: dg.AssetExecutionContext, lake: Lake, failed: Running) -> None:
    """Add what a step cost that failed or was interrupted; a warning in the log where that cannot be written."""
    failed.write()  # what was spent since it was last written
    with _warned(context, f"the cost of {failed.name} is not in `costs`"):
        note_cost(context, lake, StepCost(failed.seconds, failed.tokens, failed.calls, failed=True))


@contextmanager
def _warned(context: dg.AssetExecutionContext, lost: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:  # the disk or the store may be what failed
        context.log.warning(f"{lost}: {error}")


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
    unchanged = getattr(metadata.get(UNCHANGED), "value", metadata.get(UNCHANGED))
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
