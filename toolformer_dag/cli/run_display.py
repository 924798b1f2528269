"""The progress of a run: a live line per step on a terminal, and a line for every asset when it has ended.

Elsewhere, as in a pipe or a log, a step that goes on has a line every SAY_EVERY_SECONDS.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from toolformer_dag.assets.running import Step

SAY_EVERY_SECONDS = 30.0


@contextmanager
def shown(told: Callable[[Step], str | None] = lambda step: None) -> Iterator[Callable[[Step], None]]:
    """Yield what shows the progress of runs inside the block on the standard error.

    `told`: what to print behind a step that has ended.
    """
    now: dict[str, Step] = {}
    said: dict[str, float] = {}

    def lines() -> Text:
        told = [f"{step.name}  {step.under_way}".rstrip() for step in list(now.values())]
        return Text("\n".join(told), no_wrap=True, overflow="ellipsis")

    def watch(step: Step) -> None:
        if step.waits and (step.name not in now or not now[step.name].waits):
            waits = f"{step.name} waits for another run over this lake ({step.waits}); no row is computed twice"
            console.print(Text(waits), soft_wrap=True)
        if step.outcome is None:
            now[step.name] = step
            if not console.is_terminal and step.seconds - said.get(step.name, 0.0) >= SAY_EVERY_SECONDS:
                said[step.name] = step.seconds
                console.print(Text(f"{step.name}: {step.under_way or 'goes on'}"), soft_wrap=True)
            return
        now.pop(step.name, None)
        for line in filter(None, (f"{step.name}: {step.outcome}", told(step))):
            console.print(Text(line), soft_wrap=True)

    with ExitStack() as stack:
        if not sys.stderr.isatty():
            console = Console(stderr=True)
        else:  # under a descriptor of its own, since Dagster keeps what steps write to 2
            terminal = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding)
            console = Console(file=stack.enter_context(terminal))
            live = Live(
                get_renderable=lines,
                console=console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            stack.enter_context(live)
        yield watch
