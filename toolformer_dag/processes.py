"""A process that ends with its parent, however that ended."""

import os
import threading
import time
from contextlib import suppress
from multiprocessing import parent_process


def end_with_parent(parent: int | None = None) -> None:
    """End this process at once when its parent is gone; nothing happens without a parent.

    `parent`: the id of the process to end with, where multiprocessing did not start this one; looked for every second.
    """
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int | None) -> None:
    if parent is not None:
        with suppress(ProcessLookupError):
            while True:
                os.kill(parent, 0)
                time.sleep(1.0)
    elif started := parent_process():
        started.join()
    else:
        return
    os._exit(1)
