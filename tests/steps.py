"""How many lines of Python a function runs: what tells linear time from quadratic time without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(function: Callable[[], Any]) -> int:
    """Return how many lines of Python a function runs."""
    count = 0

    def count_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return count_line

    before = sys.gettrace()
    sys.settrace(count_line)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
