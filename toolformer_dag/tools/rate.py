"""A rate limit that several threads share."""

import threading
import time


class Rate:
    """Spreads calls evenly over time; `per_s` None lets everything through. Counts the calls of this process alone."""

    def __init__(self, per_s: float | None) -> None:
        self._gap = 1 / per_s if per_s else 0.0
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, calls: int) -> None:
        """Sleep until `calls` more calls may begin."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + calls * self._gap
        if begin > now:
            time.sleep(begin - now)
