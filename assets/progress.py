"""Progress of a stage for whoever watches: the terminal's bars, and a line in the run's log now and then."""

import time
from collections.abc import Callable

import dagster as dg

from toolformer_dag.progress import progress_of

LOG_EVERY_SECONDS = 15.0


def progress(context: dg.AssetExecutionContext) -> Callable[[int, int], None]:
    """What a stage calls with the units done and the units there are."""
    name = "/".join(context.asset_key.path) + (f" {context.partition_key}" if context.has_partition_key else "")
    show = progress_of(name)
    logged = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal logged
        show(done, total)
        if time.monotonic() - logged > LOG_EVERY_SECONDS:
            logged = time.monotonic()
            context.log.info(f"{done:,} of {total:,}")

    return advance
