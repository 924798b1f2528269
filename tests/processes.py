"""The processes that a process has started, as the system knows them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def started_by_a_killed(arguments: list[str], ready: Callable[[], bool]) -> list[int]:
    """Kill `toolformer-dag ARGUMENTS` once it is ready, and wait until all that it had started have ended."""
    command = [sys.executable, "-m", "toolformer_dag.cli", *arguments]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while parent.poll() is None and not ready():
        time.sleep(0.01)
    workers = _children(parent.pid)
    parent.kill()
    parent.wait()
    wait_until_ended(workers)
    return workers


def wait_until_ended(processes: list[int]) -> None:
    """Return when none of these processes works any more."""
    while any(map(at_work, processes)):
        time.sleep(0.01)


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def at_work(process: int) -> bool:
    """Return whether a process exists and has not ended."""
    return Path(f"/proc/{process}").exists() and "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()


def processes_with(text: str) -> list[int]:
    """Return the other processes at work in whose command line or folder `text` stands."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [one for one in found if one != os.getpid() and text in _told(one) and at_work(one)]


def _told(process: int) -> str:
    place = Path(f"/proc/{process}")
    try:
        return (place / "cmdline").read_text(errors="replace") + str((place / "cwd").readlink())
    except OSError:
        return ""
