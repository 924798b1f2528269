"""The processes that a process has started, as the system knows them."""

import os
import time

import psutil


def wait_until_ended(processes: list[int]) -> None:
    """Return when none of these processes works any more."""
    while any(map(at_work, processes)):
        time.sleep(0.01)


def at_work(process: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_with(text: str) -> list[int]:
    """Return the other processes at work in whose command line or folder `text` stands."""
    told = {
        one.pid: f"{' '.join(one.info['cmdline'] or ())} {one.info['cwd']}"
        for one in psutil.process_iter(["cmdline", "cwd"])
    }
    return [pid for pid, words in told.items() if pid != os.getpid() and text in words and at_work(pid)]
