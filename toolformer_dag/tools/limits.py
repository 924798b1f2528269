"""How a tool's backend is treated while its calls run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Seconds are wall-clock. None of it enters a fingerprint but `max_result_characters`.

    timeout_s: what one call may take; a batch of n may take n times that.
    retries, backoff_s: how often a batch that raised RetryableError is tried again, and the first pause; it doubles.
    rate_per_s: calls begun per second over the whole lane of this process; None: unbounded.
    concurrency: batches that run at once.
    max_result_characters: where a result is cut.
    """

    timeout_s: float = 30.0
    retries: int = 2
    backoff_s: float = 0.5
    rate_per_s: float | None = None
    concurrency: int = 1
    max_result_characters: int = 400
