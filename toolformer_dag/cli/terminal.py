"""Options that several commands share, and the progress of a run in the terminal."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from assets.running import watched_by
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import rooted
from toolformer_dag.settings.settings_file import load_settings

Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file; default: $TOOLFORMER_CONFIG, else ./toolformer.toml.")
]
Profile = Annotated[str | None, typer.Option("--profile", help="A profile: embedded, gpt2, gptj, or one of your own.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One setting: tools.calculator.tau_f=0.8.")]
Shards = Annotated[list[str] | None, typer.Option("--shards", help="CCNet shards, a path or a quoted glob.")]
ModelName = Annotated[str | None, typer.Option("--model", help="A folder, an id of the hub, or `embedded`.")]


def settings_of(
    config: Path | None, profile: str | None, pairs: list[str] | None, shards: list[str] | None = None
) -> Settings:
    """Settings as the command line asks for them; shard patterns count from the current folder."""
    patterns = [rooted(pattern, Path.cwd()) for pattern in shards or ()]
    return load_settings(config, profile=profile, overrides=pairs or (), shards=patterns)


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters with which text of the web could steer the terminal, or turn its direction."""


def harmless(table: str) -> str:
    """Return a table for the terminal; every control character but line ends is shown as `\ufffd`."""
    return CONTROL.sub("\ufffd", table)


@contextmanager
def shown() -> Iterator[None]:
    """Show the progress of every run inside the block."""
    console = Console(stderr=True)
    columns = (TextColumn("  {task.description:<42}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)
            if done >= total and not console.is_terminal:
                console.print(f"  {name}: {done}", highlight=False)

        with watched_by(advance):
            yield
