"""The progress of a run: a live line per step on a terminal, and a line for every asset when it has ended.

Elsewhere, as in a pipe or a log, a step that goes on has a line every SAY_EVERY_SECONDS.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from toolformer_dag.assets.running import Step

SAY_EVERY_SECONDS = 30.0
"""How often a step that goes on has a line where no terminal shows it live."""


@dataclass(slots=True)
class _Progress:
    """What is shown of the steps of a run.

    - `console`: where
    - `after_step`: returns what to print after a step that has ended; None for nothing
    - `now`: the steps under way, by name
    - `said`: at which of its seconds a line was last printed of a step, by name
    """

    console: Console
    after_step: Callable[[Step], str | None]
    now: dict[str, Step] = field(default_factory=dict)
    said: dict[str, float] = field(default_factory=dict)

    def lines(self) -> Text:
        """Return a line per step under way."""
        steps = [f"{step.name}  {step.under_way}".rstrip() for step in list(self.now.values())]
        return Text("\n".join(steps), no_wrap=True, overflow="ellipsis")

    def watch(self, step: Step) -> None:
        """Show how a step gets on, or its end."""
        before = self.now.get(step.name)
        if step.waits and (before is None or not before.waits):
            self._say(f"{step.name} waits for another run over this lake ({step.waits}); no row is computed twice")
        if step.outcome is None:
            self.now[step.name] = step
            self._say_that_it_goes_on(step)
            return
        self.now.pop(step.name, None)
        self._say(f"{step.name}: {step.outcome}")
        remark = self.after_step(step)
        if remark:
            self._say(remark)

    def _say_that_it_goes_on(self, step: Step) -> None:
        """Print a line of a step under way, where no terminal shows it live, every SAY_EVERY_SECONDS."""
        silent_seconds = step.seconds - self.said.get(step.name, 0.0)
        if not self.console.is_terminal and silent_seconds >= SAY_EVERY_SECONDS:
            self.said[step.name] = step.seconds
            self._say(f"{step.name}: {step.under_way or 'goes on'}")

    def _say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


@contextmanager
def shown(after_step: Callable[[Step], str | None] = lambda step: None) -> Iterator[Callable[[Step], None]]:
    """Yield what shows the progress of runs inside the block on the standard error.

    `after_step`: what to print after a step that has ended.
    """
    with ExitStack() as stack:
        if not sys.stderr.isatty():
            yield _Progress(Console(stderr=True), after_step).watch
            return
        # under a descriptor of its own, since Dagster keeps what steps write to 2
        terminal = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding)
        progress = _Progress(Console(file=stack.enter_context(terminal)), after_step)
        live = Live(
            get_renderable=progress.lines,
            console=progress.console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        stack.enter_context(live)
        yield progress.watch
