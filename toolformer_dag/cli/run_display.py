"""The progress of a run: a live line per running step on a terminal, and a line for every asset when it has ended.

In a pipe or a log, a running step prints a line every PRINT_INTERVAL_SECONDS instead.
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

PRINT_INTERVAL_SECONDS = 30.0
"""How often a running step prints a line where no terminal shows it live."""


@dataclass(slots=True)
class _Progress:
    """Shows the steps of a run on a console.

    Attributes:
        console: Where they are shown.
        describe_ended_step: Returns a line to print after a step has ended, or None for nothing.
        running_steps: The running steps by name.
        printed_seconds_by_step: For each step, how many seconds it had run when a line was last printed for it.
    """

    console: Console
    describe_ended_step: Callable[[Step], str | None]
    running_steps: dict[str, Step] = field(default_factory=dict)
    printed_seconds_by_step: dict[str, float] = field(default_factory=dict)

    def render_running_steps(self) -> Text:
        """Return the live display: a line per running step, with its progress."""
        lines = []
        for step in list(self.running_steps.values()):  # a copy, since another thread adds and removes steps
            line = f"{step.name}  {step.progress_text}"
            lines.append(line.rstrip())
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def show_step(self, step: Step) -> None:
        """Show the progress of a running step, or print how a step has ended, with a remark if there is one."""
        self._print_if_waiting(step)

        is_running = step.outcome is None
        if is_running:
            self.running_steps[step.name] = step  # the live display shows it from here
            self._print_progress_if_due(step)
            return

        self.running_steps.pop(step.name, None)
        self._print_line(f"{step.name}: {step.outcome}")
        remark = self.describe_ended_step(step)
        if remark:
            self._print_line(remark)

    def _print_if_waiting(self, step: Step) -> None:
        """Print a line when a step begins to wait for another run, which computes the same rows."""
        previous_step = self.running_steps.get(step.name)  # the step as it was shown last
        waited_before = previous_step is not None and previous_step.waits
        if step.waits and not waited_before:
            self._print_line(
                f"{step.name} waits for another run over this lake ({step.waits}); no row is computed twice"
            )

    def _print_progress_if_due(self, step: Step) -> None:
        """Print a line for a running step every PRINT_INTERVAL_SECONDS, unless a terminal shows the step live."""
        silent_seconds = step.elapsed_seconds - self.printed_seconds_by_step.get(step.name, 0.0)
        if not self.console.is_terminal and silent_seconds >= PRINT_INTERVAL_SECONDS:
            self.printed_seconds_by_step[step.name] = step.elapsed_seconds
            self._print_line(f"{step.name}: {step.progress_text or 'goes on'}")

    def _print_line(self, line: str) -> None:
        """Print a line as it is: rich neither interprets markup in it nor breaks it."""
        self.console.print(Text(line), soft_wrap=True)


@contextmanager
def show_steps(
    describe_ended_step: Callable[[Step], str | None] = lambda step: None,
) -> Iterator[Callable[[Step], None]]:
    """Show the progress of steps on standard error while the block runs.

    Args:
        describe_ended_step: Returns a line to print after a step has ended, or None for nothing.

    Yields:
        A function that takes a step whenever it has made progress or has ended, and shows it.
    """
    if not sys.stderr.isatty():
        yield _Progress(Console(stderr=True), describe_ended_step).show_step
        return

    # Dagster captures what steps write to descriptor 2 (standard error), so the display has a copy of it.
    copied_descriptor = os.dup(sys.stderr.fileno())
    with os.fdopen(copied_descriptor, "w", encoding=sys.stderr.encoding) as terminal:
        progress = _Progress(Console(file=terminal), describe_ended_step)
        with _build_live_display(progress):
            yield progress.show_step


def _build_live_display(progress: _Progress) -> Live:
    """Return rich's live display of the running steps, which it draws anew a few times a second."""
    return Live(
        get_renderable=progress.render_running_steps,
        console=progress.console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
