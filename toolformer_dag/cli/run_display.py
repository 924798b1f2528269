"""The progress of a run: a live line per running step on a terminal, and a line for every asset when it has ended.

In a pipe or a log, a running step prints a line every PRINT_EVERY_SECONDS instead.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from toolformer_dag.assets.running import Step

PRINT_EVERY_SECONDS = 30.0
"""How often a running step prints a line where no terminal shows it live."""


@dataclass(slots=True)
class _Progress:
    """Shows the steps of a run on a console.

    - `after_step`: returns what to print after a step has ended; None for nothing
    - `running`: the running steps, by name
    - `printed_at`: by name of a step, its running time in seconds when a line was last printed of it
    """

    console: Console
    after_step: Callable[[Step], str | None]
    running: dict[str, Step] = field(default_factory=dict)
    printed_at: dict[str, float] = field(default_factory=dict)

    def lines(self) -> Text:
        """Return the live display: a line per running step."""
        steps = [f"{step.name}  {step.under_way}".rstrip() for step in list(self.running.values())]
        return Text("\n".join(steps), no_wrap=True, overflow="ellipsis")

    def watch(self, step: Step) -> None:
        """Show the progress of a running step, or how it ended, with what `after_step` returns then to be printed."""
        self._print_if_it_waits(step)  # for another run
        is_running = step.outcome is None
        if is_running:
            self.running[step.name] = step  # the steps in the live display
            self._print_progress(step)  # now and then, where there is no live display
            return
        self.running.pop(step.name, None)
        self._print(f"{step.name}: {step.outcome}")
        remark = self.after_step(step)
        if remark:
            self._print(remark)

    def _print_if_it_waits(self, step: Step) -> None:
        """Print a line when a step begins to wait for another run."""
        before = self.running.get(step.name)
        waited_before = before is not None and before.waits
        if step.waits and not waited_before:
            self._print(f"{step.name} waits for another run over this lake ({step.waits}); no row is computed twice")

    def _print_progress(self, step: Step) -> None:
        """Print a line of a running step every PRINT_EVERY_SECONDS, unless a terminal shows it live."""
        silent_seconds = step.seconds - self.printed_at.get(step.name, 0.0)
        if not self.console.is_terminal and silent_seconds >= PRINT_EVERY_SECONDS:
            self.printed_at[step.name] = step.seconds
            self._print(f"{step.name}: {step.under_way or 'goes on'}")

    def _print(self, line: str) -> None:
        """Print a line as it is, without markup or line breaks of rich."""
        self.console.print(Text(line), soft_wrap=True)


@contextmanager
def shown(after_step: Callable[[Step], str | None] = lambda step: None) -> Iterator[Callable[[Step], None]]:
    """Yield a function that shows the progress of steps on standard error, until the block ends.

    `after_step`: returns what to print after a step has ended.
    """
    if not sys.stderr.isatty():
        yield _Progress(Console(stderr=True), after_step).watch
        return
    # on a descriptor of its own, since Dagster captures what steps write to descriptor 2
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding) as terminal:
        progress = _Progress(Console(file=terminal), after_step)
        with _build_live_display(progress):
            yield progress.watch


def _build_live_display(progress: _Progress) -> Live:
    """Return the lines of the running steps, which are drawn anew while they change."""
    return Live(
        get_renderable=progress.lines,
        console=progress.console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
