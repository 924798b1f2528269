"""A lock between processes on one machine, given up by the kernel when its holder dies."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Holds the lock file `path` while the block runs; yields False at once if it is held and `wait` is false.

    `shared` holders have it together, and keep it from those who want it alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
