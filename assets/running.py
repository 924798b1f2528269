"""A step while it runs: its progress for the terminal and the log, its end when the run is cancelled, its tags."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg

from assets.metadata import ROWS, TOKENS, UNCHANGED
from toolformer_dag.files import UserError, locked
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.spending import Spent, StepCost, add_cost, read_spent

LOG_EVERY_SECONDS, LOOK_EVERY_SECONDS = 15.0, 1.0
CHANGED = "toolformer/changed"
"""The tag of a run that says which settings changed: `calculator.tau_f 0.5 -> 0.8`."""
CANCELLED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)


@dataclass
class Step:
    """An asset that is being made. `done` of `total` units; a total of 0 is unknown.

    `outcome`: what came of it, once it has ended; `ran`: whether it made something, and did not find it made.
    """

    name: str
    unit: str = ""
    ledger: Path | None = None
    done: int = 0
    total: int = 0
    outcome: str | None = None
    ran: bool = False
    _began: float = field(default_factory=time.monotonic)
    _before: Spent = field(default_factory=Spent)

    def measure(self, unit: str, ledger: Path | None) -> None:
        """Count in `unit` from now on, and the tokens that a run writes into its ledger."""
        self.unit, self.ledger = unit, ledger
        self._before = self._spent()

    @property
    def seconds(self) -> float:
        """Return the seconds since the step began."""
        return time.monotonic() - self._began

    @property
    def tokens(self) -> int:
        """Return the tokens that went through the model so far, in all processes."""
        return self._spent().tokens - self._before.tokens

    @property
    def cost(self) -> StepCost:
        """Return what the step cost so far."""
        spent = self._spent()
        return StepCost(self.seconds, spent.tokens - self._before.tokens, spent.calls - self._before.calls)

    @property
    def under_way(self) -> str:
        """Return `312 of 800 texts, 5,120 tokens/s, 0:01:12 left`; what is not known is left out."""
        seconds, told = max(self.seconds, 1e-3), []
        if self.total:
            told.append(f"{self.done:,} of {self.total:,} {self.unit}")
        elif self.done:
            told.append(f"{self.done:,} {self.unit}")
        if tokens := self.tokens:
            told.append(f"{tokens / seconds:,.0f} tokens/s")
        if 0 < self.done < self.total:
            left = seconds / self.done * (self.total - self.done)
            told.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(told)

    def end(self, metadata: Mapping[str, Any]) -> None:
        """Say what came of it: `443 rows in 12.1 s, 5,010 tokens/s`, or `unchanged`."""
        shown = {name: getattr(value, "value", value) for name, value in metadata.items()}
        self.ran = not shown.get(UNCHANGED, False)
        rows, tokens, seconds = shown.get(ROWS), shown.get(TOKENS, 0), max(self.seconds, 1e-3)
        told = f"{'done' if rows is None else f'{rows:,} rows'} in {seconds:,.1f} s"
        rate = f", {tokens / seconds:,.0f} tokens/s" if tokens else ""
        self.outcome = f"{told}{rate}" if self.ran else "unchanged"

    def _spent(self) -> Spent:
        return read_spent(self.ledger) if self.ledger is not None else Spent()


Sink = Callable[[Step], None]
"""Called whenever a step got on, and once when it has ended."""


def _silent(step: Step) -> None:
    """Nobody is watching."""


_sink: ContextVar[Sink] = ContextVar("sink", default=_silent)
_current: ContextVar[Step] = ContextVar("current")


@contextmanager
def watched_by(sink: Sink) -> Iterator[None]:
    """Send the progress of every step to `sink` inside the block."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


def current_sink() -> Sink:
    """Return the sink of the `watched_by` around this."""
    return _sink.get()


@contextmanager
def step(name: str) -> Iterator[Step]:
    """Tell the watcher of a step that runs inside the block, and of its end."""
    made, show = Step(name), _sink.get()
    token = _current.set(made)
    try:
        yield made
    except Exception as error:
        made.outcome = f"failed: {str(error).partition(chr(10))[0]}"
        raise
    finally:
        _current.reset(token)
        if made.outcome is not None:  # none where the run was interrupted
            show(made)


def progress(
    context: dg.AssetExecutionContext, unit: str = "", ledger: Path | None = None
) -> Callable[[int, int], None]:
    """Return what a stage calls with the units done and the units there are; 0 where nobody knows how many.

    `ledger`: of the run, which says how many tokens went through the model. The log of the run gets a line every
    LOG_EVERY_SECONDS. Raises KeyboardInterrupt when the run was cancelled, whoever started it: a run of the command
    line gets no signal from the UI.
    """
    made, show = _current.get(), _sink.get()
    made.measure(unit, ledger)
    logged = looked = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal logged, looked
        made.done, made.total = done, total
        show(made)
        now = time.monotonic()
        if now - looked > LOOK_EVERY_SECONDS:
            looked = now
            _end_if_cancelled(context)
        if now - logged > LOG_EVERY_SECONDS:
            logged = now
            context.log.info(made.under_way)

    return advance


def _end_if_cancelled(context: dg.AssetExecutionContext) -> None:
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is not None and run.status in CANCELLED:
        raise KeyboardInterrupt


def note_cost(context: dg.AssetExecutionContext, lake: Lake, cost: StepCost) -> None:
    """Add a row to the lake's table of costs. Raises WriteError."""
    add_cost(lake, context.run.run_id, context.asset_key.to_user_string(), cost)


def note_failure(context: dg.AssetExecutionContext, lake: Lake, failed: Step) -> None:
    """Add what a step cost that failed or was interrupted; a warning in the log where that cannot be written."""
    try:
        note_cost(context, lake, replace(failed.cost, failed=True))
    except UserError as error:  # the disk may be what failed
        context.log.warning(f"the cost of this step is not in `costs`: {error}")


def tag_changes(context: dg.AssetExecutionContext, changed: Sequence[str]) -> None:
    """Add settings that changed to the run's tag `toolformer/changed`."""
    group = context.asset_key.path[0]
    told = [f"{group}.{change}" for change in changed]
    if not told:
        return
    with locked(Path(context.instance.root_directory) / "run_tags.lock"):  # steps at once add theirs too
        run = context.instance.get_run_by_id(context.run.run_id)
        if run is not None:
            before = run.tags[CHANGED].split("; ") if CHANGED in run.tags else []
            context.instance.add_run_tags(run.run_id, {CHANGED: "; ".join(dict.fromkeys([*before, *told]))})
