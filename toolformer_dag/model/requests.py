"""The engine's requests and answers: proposals, losses. Imports no torch."""

import math
from dataclasses import dataclass, field
from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray


def uniforms(seed: int, digest: str, position: int, sample: int, count: int) -> NDArray[np.float64]:
    """Return the uniform numbers in [0, 1) by which the tokens of a sample are drawn; float64, [count].

    They come from SHAKE-128 of the other arguments, so no version of numpy or torch changes them. A larger `count`
    extends the same sequence. digest: the hash of the text.
    """
    key = f"{seed}\0{digest}\0{position}\0{sample}".encode()
    stream = shake_128(key).digest(8 * count)
    mantissas = np.frombuffer(stream, "<u8") >> np.uint64(11)  # 53 bits of each 64, as many as a float64 holds
    return mantissas.astype(np.float64) * 2.0**-53  # from integers below 2**53 to [0, 1)


def select_positions(probabilities: NDArray[np.floating], tau_s: float, k: int) -> list[int]:
    """Return the `k` most probable of the positions i with p_i > tau_s, ascending; ties go to the earlier."""
    above = np.flatnonzero(probabilities > tau_s)  # ascending
    descending = np.argsort(-probabilities[above], kind="stable")  # indices into `above`; stable: ties stay in order
    most_probable = above[descending[:k]]
    return sorted(most_probable.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class ProposalRequest:
    """A text x of n tokens in which positions are chosen and calls sampled.

    - `digest`: seeds the random streams of its samples.
    - `probabilities` [n]: stored p_i, which are not recomputed; None where they are to be computed.
    - `stored`: (position, sample) of the samples that are stored and not drawn again.
    - `calls`: for the next call of a chain, the text of the calls with results that stand at the place of
      token x_i, i = `behind`. The only place for a call is then after these, and n is 1.
    """

    text: str
    digest: str
    probabilities: NDArray[np.float32] | None = None
    stored: frozenset[tuple[int, int]] = frozenset()
    calls: str = ""
    behind: int = 0


@dataclass(frozen=True, slots=True)
class SampledCall:
    """Sample number `sample` (from 0) at position i = `position`, before token x_i (i from 0).

    `body` is the text between " [" and "]". Without "]" within `max_call_tokens`, it is None with the reason "no_end".
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
    """A call with its result whose losses are wanted, before token x_i of `text`, i = `position`.

    - `tool`: the tool's name as it stands in the text.
    - `calls`: in a chain, the text of the earlier calls with results at the same place; else "".
    """

    text: str
    position: int
    tool: str
    input: str
    result: str
    calls: str = ""


@dataclass(frozen=True, slots=True)
class NeedRequest:
    """A call of a chain, and two beginnings of the chain, to find out which makes it likelier.

    The call stands before token x_i of `text`, i = `position`. All three are texts in the paper's form:

    - `before`, `other`: the two beginnings, calls with results.
    - `call`: e(c), without a result.
    """

    text: str
    position: int
    before: str
    other: str
    call: str


@dataclass(frozen=True, slots=True)
class CallLosses:
    """The losses of a call, in nats: L_i(empty), L_i(e(c)) and L_i(e(c, r)) (paper, section 2).

    - `loss_call`: None where it cannot matter, because L_i(empty) - L_i(e(c, r)), the largest possible delta, is below
      a floor.
    - `reason`: "does_not_fit" where the call and its text exceed the context, and all losses are NaN; else None.
    """

    loss_empty: float
    loss_call: float | None
    loss_result: float
    reason: str | None = None

    @property
    def loss_minus(self) -> float:
        """Return L- = min(L_i(empty), L_i(e(c))); without L_i(e(c)), L_i(empty), which is an upper bound."""
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
