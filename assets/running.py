"""A step while it runs: its progress for the terminal and the log, its end when the run is cancelled, its tags."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import dagster as dg

LOG_EVERY_SECONDS, LOOK_EVERY_SECONDS = 15.0, 1.0
CHANGED = "toolformer/changed"
"""The tag of a run that says which settings changed: `calculator.tau_f 0.5 -> 0.8`."""
CANCELLED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
Sink = Callable[[str, int, int], None]
"""Called with the asset's name, the units done and the units there are."""


def _silent(name: str, done: int, total: int) -> None:
    """Nobody is watching."""


_sink: ContextVar[Sink] = ContextVar("sink", default=_silent)


@contextmanager
def watched_by(sink: Sink) -> Iterator[None]:
    """Send the progress of every step to `sink` inside the block."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


def progress(context: dg.AssetExecutionContext) -> Callable[[int, int], None]:
    """Return what a stage calls with the units done and the units there are.

    It raises KeyboardInterrupt when the run was cancelled, whoever started it: a run of the command line gets no signal
    from the UI.
    """
    name, show = context.asset_key.to_user_string(), _sink.get()
    logged = looked = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal logged, looked
        show(name, done, total)
        now = time.monotonic()
        if now - looked > LOOK_EVERY_SECONDS:
            looked = now
            _end_if_cancelled(context)
        if now - logged > LOG_EVERY_SECONDS:
            logged = now
            context.log.info(f"{done:,} of {total:,}")

    return advance


def _end_if_cancelled(context: dg.AssetExecutionContext) -> None:
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is not None and run.status in CANCELLED:
        raise KeyboardInterrupt


def tag_changes(context: dg.AssetExecutionContext, changed: Sequence[str]) -> None:
    """Add settings that changed to the run's tag `toolformer/changed`."""
    group = context.asset_key.path[0]
    told = [f"{group}.{change}" for change in changed]
    run = context.instance.get_run_by_id(context.run.run_id) if told else None
    if run is not None:
        before = run.tags[CHANGED].split("; ") if CHANGED in run.tags else []
        context.instance.add_run_tags(run.run_id, {CHANGED: "; ".join(dict.fromkeys([*before, *told]))})
