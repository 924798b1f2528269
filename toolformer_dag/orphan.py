"""A process that another one started ends with it."""

import os
import threading
from multiprocessing import parent_process


def end_with_parent() -> None:
    """From now on this process ends at once when its parent is gone, however that ended; nothing without a parent.

    For workers whose work is safe at any instant: nobody is left to wait for the rest.
    """
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
