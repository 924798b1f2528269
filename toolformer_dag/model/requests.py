"""The engine's requests and answers: proposals, losses. Imports no torch."""

import math
from dataclasses import dataclass, field
from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray


def uniforms(seed: int, digest: str, position: int, sample: int, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for sample j at position i of the text `digest`; float64, [count].

    The numbers are bits of SHAKE-128 over the four keys, so they do not depend on versions of numpy or torch. A larger
    `count` extends the same sequence.
    """
    stream = shake_128(f"{seed}\0{digest}\0{position}\0{sample}".encode()).digest(8 * count)
    return (np.frombuffer(stream, "<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def select_positions(probabilities: NDArray[np.floating], tau_s: float, k: int) -> list[int]:
    """Return the `k` most probable positions of I = {i : p_i > tau_s}, ascending; ties go to the earlier."""
    above = np.flatnonzero(probabilities > tau_s)
    likeliest = above[np.argsort(-probabilities[above], kind="stable")[:k]]
    return sorted(likeliest.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class ProposalRequest:
    """A text x with n tokens; `digest` seeds its random streams.

    `probabilities` [n] and `stored`, pairs of (position, sample), are known already and are not recomputed.

    With `calls`, text of calls with results that stand at the place of token x_i, i = `behind`, the only place is after
    these: n is 1.
    """

    text: str
    digest: str
    probabilities: NDArray[np.float32] | None = None
    stored: frozenset[tuple[int, int]] = frozenset()
    calls: str = ""
    behind: int = 0


@dataclass(frozen=True, slots=True)
class SampledCall:
    """Sample `sample` at position i = `position` (0-based, before token x_i).

    `body` is the text between " [" and "]". Without "]" within the limit, it is None with the reason "no_end".
    """

    position: int
    sample: int
    body: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Probabilities and new samples of a text.

    - `probabilities` [n]: p_i; 0 where x_i begins inside a character, because no call can stand there.
    - `offsets` [n]: the character at which x_i begins.
    - `samples`: the new samples, without those in `ProposalRequest.stored`.
    - `reason`: why the other fields are empty: "does_not_fit" (prompt, the text twice and a call exceed the context),
      "not_finite" (some p_i overflows the dtype) or "empty".
    """

    probabilities: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    offsets: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    samples: tuple[SampledCall, ...] = ()
    reason: str | None = None


WINDOW_WEIGHTS = (1 / 3, 4 / 15, 1 / 5, 2 / 15, 1 / 15)
"""w_0..w_4 = max(0, 1 - 0.2 t), normalised over all t (paper, section 4.1); every later weight is zero."""


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A call before token x_i of `text`, i = `position`; `tool` is the tool's name in the text.

    `calls`: the text of the calls with results that stand before it at its place, where it is part of a chain.
    """

    text: str
    position: int
    tool: str
    input: str
    result: str
    calls: str = ""


@dataclass(frozen=True, slots=True)
class NeedRequest:
    """e(c) without a result before token x_i of `text`, after the calls `before`, or after `other`."""

    text: str
    position: int
    before: str
    other: str
    call: str


@dataclass(frozen=True, slots=True)
class CallLosses:
    """L_i(empty), L_i(e(c)) and L_i(e(c, r)) in nats; all are NaN with the reason "does_not_fit".

    `loss_call` is None where it cannot matter: the largest possible delta, L_i(empty) - L_i(e(c, r)), is below a floor.
    """

    loss_empty: float
    loss_call: float | None
    loss_result: float
    reason: str | None = None

    @property
    def loss_minus(self) -> float:
        """Return L- = min(L_i(empty), L_i(e(c))), or L_i(empty), an upper bound, where L_i(e(c)) is not known."""
        return self.loss_empty if self.loss_call is None else min(self.loss_empty, self.loss_call)

    @property
    def loss_plus(self) -> float:
        """Return L+ = L_i(e(c, r))."""
        return self.loss_result

    @property
    def delta(self) -> float:
        """Return L- - L+, as exact as L-; the call is kept where this is at least tau_f."""
        return self.loss_minus - self.loss_plus


DOES_NOT_FIT = CallLosses(math.nan, math.nan, math.nan, reason="does_not_fit")
"""The losses of a call whose e(c, r) and text do not fit the context together."""
