"""The processes that a process has started, as the system knows them."""

from pathlib import Path


def children(process: int) -> list[int]:
    """Their numbers."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def at_work(process: int) -> bool:
    """Whether it is there and no mere entry of one that has ended."""
    return Path(f"/proc/{process}").exists() and "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
