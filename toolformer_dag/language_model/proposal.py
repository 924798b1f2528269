"""What is asked and answered when calls are proposed for a text (paper, section 2, "Sampling API Calls")."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class ProposalRequest:
    """A text x with n tokens. `digest` seeds its random streams.

    `probabilities` (n) and `stored`, pairs of (position, sample), are what has been paid for before: they are not
    computed again.
    """

    text: str
    digest: str
    probabilities: NDArray[np.float32] | None = None
    stored: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class SampledCall:
    """Sample `sample` at position i = `position` (0-based, before token x_i).

    `body` is the text between " [" and "]"; it is None with the reason "no_end" where no "]" came in time.
    """

    position: int
    sample: int
    body: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """`probabilities` (n) holds p_i, `offsets` (n) the character at which x_i begins.

    p_i is 0 where x_i begins inside a character: no call can stand there. `samples` leaves out what was stored.
    `reason` is "does_not_fit" where prompt, text twice and call exceed the context, "not_finite" where some p_i is no
    number (a dtype that overflows), or "empty"; then all else is empty.
    """

    probabilities: NDArray[np.float32]
    offsets: NDArray[np.int32]
    samples: tuple[SampledCall, ...]
    reason: str | None = None


def refused(reason: str) -> Proposal:
    """A proposal with nothing but a reason."""
    return Proposal(np.zeros(0, np.float32), np.zeros(0, np.int32), (), reason)
