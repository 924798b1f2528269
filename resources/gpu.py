"""A GPU for each process on a machine with several."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

from toolformer_dag.storage.lock import locked

_held = ExitStack()  # never closed: the kernel gives the lock up when the process ends


@cache
def own_gpu(count: int, folder: Path) -> int | None:
    """The first of `count` GPUs that no other process has taken in `folder`, taken until this process ends.

    None where all are taken.
    """
    for number in range(count):
        taking = ExitStack()
        if taking.enter_context(locked(folder / f"gpu-{number}.lock", wait=False)):
            _held.push(taking)
            return number
        taking.close()
    return None
