"""The progress of a run: a live line per step on a terminal, and a line for every asset when it has ended."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.text import Text

from assets.running import Step

REFRESHED_PER_SECOND = 4


def _nothing(name: str) -> None:
    """Nobody asked for the names of what ran."""


@contextmanager
def shown(ran: Callable[[str], None] | None = None) -> Iterator[Callable[[Step], None]]:
    """Yield what shows the progress of runs inside the block on the standard error.

    `ran` is called with the name of each asset as soon as it was made; where its output goes to the same terminal,
    nothing else is printed of an asset that has ended.
    """
    with _console() as console, _watched(console, ran) as watch:
        yield watch


@contextmanager
def _console() -> Iterator[Console]:
    """Open the standard error; a terminal under a descriptor of its own, since Dagster keeps what steps write to 2."""
    if not sys.stderr.isatty():
        yield Console(stderr=True)
        return
    with open(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding) as terminal:  # noqa: PTH123
        yield Console(file=terminal)


@contextmanager
def _watched(console: Console, ran: Callable[[str], None] | None) -> Iterator[Callable[[Step], None]]:
    with_lines = ran is None or not sys.stdout.isatty()
    now: dict[str, Step] = {}
    names: set[str] = set()

    def lines() -> Text:
        told = [f"{step.name}  {step.under_way}".rstrip() for step in list(now.values())]
        return Text("\n".join(told), no_wrap=True, overflow="ellipsis")

    def watch(step: Step) -> None:
        if step.outcome is None:
            now[step.name] = step
            if console.is_terminal:
                live.refresh()
            return
        now.pop(step.name, None)
        if with_lines:
            console.print(Text(f"{step.name}: {step.outcome}"), soft_wrap=True)
        if step.ran and ran is not None and step.name not in names:  # once, though damage may make it run again
            names.add(step.name)
            ran(step.name)

    live = Live(
        get_renderable=lines,
        console=console,
        refresh_per_second=REFRESHED_PER_SECOND,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    with live if console.is_terminal else nullcontext():
        yield watch
