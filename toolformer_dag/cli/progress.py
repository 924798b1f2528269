"""The progress display of a run in the terminal: a bar per stage, or a line where nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from toolformer_dag.progress import watched_by

if TYPE_CHECKING:
    from resources.batches import Batch


FEW = 8  # assets that are named one by one


@contextmanager
def shown() -> Iterator[Callable[["Batch"], None]]:
    """Shows the stages of every run inside the block; yields what announces a batch of assets."""
    console = Console(stderr=True)
    columns = (TextColumn("  {task.description:<42}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)
            if done >= total and not console.is_terminal:
                console.print(f"  {stage}: {done}", highlight=False)

        def announce(batch: "Batch") -> None:
            where = batch.partition or "all shards"
            count = len(batch.assets)
            names = (
                ", ".join(asset.key.to_user_string() for asset in batch.assets) if count <= FEW else f"{count} assets"
            )
            console.print(f"{where}: {names}", highlight=False, soft_wrap=True)

        with watched_by(advance):
            yield announce
