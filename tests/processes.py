"""The processes that a process has started, as the system knows them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil


def started_by_a_killed(
    arguments: list[str], ready: Callable[[], bool], module: str = "toolformer_dag.cli"
) -> list[int]:
    """Kill `python -m MODULE ARGUMENTS` once it is ready, and wait until all that it had started have ended."""
    command = [sys.executable, "-m", module, *arguments]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while parent.poll() is None and not ready():
        time.sleep(0.01)
    workers = [child.pid for child in psutil.Process(parent.pid).children()]
    parent.kill()
    parent.wait()
    wait_until_ended(workers)
    return workers


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
