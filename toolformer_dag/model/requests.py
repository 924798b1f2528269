"""The engine's requests and answers: proposals, losses. Imports no torch."""

import math
from dataclasses import dataclass, field
from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray


def generate_uniforms(seed: int, digest: str, position: int, sample_number: int, count: int) -> NDArray[np.float64]:
    """Generate the random numbers by which the tokens of a sample are drawn.

    They are computed with SHAKE-128 from the other arguments, so no version of numpy or torch changes them. A larger
    `count` extends the same sequence.

    Args:
        seed: The seed of the settings.
        digest: The hash of the text.
        position: The position in the text at which the call is sampled.
        sample_number: The number of the sample at this position.
        count: How many numbers to generate.

    Returns:
        Uniform numbers in [0, 1), float64, [count].
    """
    key = f"{seed}\0{digest}\0{position}\0{sample_number}".encode()
    random_bytes = shake_128(key).digest(8 * count)

    # A float64 holds integers of 53 bits, so the lowest 11 bits of each 64 are dropped.
    integers = np.frombuffer(random_bytes, "<u8") >> np.uint64(11)
    return integers.astype(np.float64) * 2.0**-53  # from integers below 2**53 to [0, 1)


def select_positions(probabilities: NDArray[np.floating], tau_s: float, k: int) -> list[int]:
    """Select the most probable positions of a text for calls.

    Args:
        probabilities: p_i, the probability that a call begins at position i, [n].
        tau_s: The threshold, which p_i must exceed.
        k: The maximum number of positions.

    Returns:
        At most `k` positions, ascending. Of equally probable positions, the earlier one is preferred.
    """
    candidates = np.flatnonzero(probabilities > tau_s)  # positions, ascending

    # A stable sort keeps equally probable positions in order.
    most_probable_first = np.argsort(-probabilities[candidates], kind="stable")  # indices into `candidates`
    selected = candidates[most_probable_first[:k]]
    return sorted(selected.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class ProposalRequest:
    """A text x of n tokens in which positions are chosen and calls sampled.

    Attributes:
        text: The text x.
        digest: The hash of the text, which seeds the random numbers of its samples.
        probabilities: Stored p_i, which are not computed again, [n], or None if they are to be computed.
        stored_samples: The position and the number of each sample that is stored and not drawn again.
        earlier_calls: For the next call of a chain, the text of the calls with results that stand at the place of token
            x_i, i = `earlier_calls_position`. The only place for a call is then after these, and n is 1.
    """

    text: str
    digest: str
    probabilities: NDArray[np.float32] | None = None
    stored_samples: frozenset[tuple[int, int]] = frozenset()
    earlier_calls: str = ""
    earlier_calls_position: int = 0


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A call that the model wrote at a position of a text.

    Attributes:
        position: The index i of the token x_i before which the call stands, from 0.
        sample_number: The number of the sample at this position, from 0.
        body: The text between " [" and "]", or None if there was no "]" within `max_call_tokens`.
        reason: "no_end" if `body` is None, else None.
    """

    position: int
    sample_number: int
    body: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Probabilities and new samples of a text.

    Attributes:
        probabilities: p_i, [n]. It is 0 if x_i begins inside a character, because no call can stand there.
        offsets: The character at which x_i begins, [n].
        samples: The new samples, without those in `ProposalRequest.stored_samples`.
        reason: Why the other fields are empty: "does_not_fit" (prompt, the text twice and a call exceed the context),
            "not_finite" (some p_i overflows the dtype) or "empty".
    """

    probabilities: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    offsets: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    samples: tuple[SampledCall, ...] = ()
    reason: str | None = None


WINDOW_WEIGHTS = (1 / 3, 4 / 15, 1 / 5, 2 / 15, 1 / 15)
"""w_0..w_4 = max(0, 1 - 0.2 t), normalized over all t (paper, section 4.1). Every later weight is zero."""


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A call with its result whose losses are wanted.

    Attributes:
        text: The text around the call.
        position: The index i of the token x_i of `text` before which the call stands.
        tool: The tool's name as it stands in the text.
        input: The tool's input in the call.
        result: The tool's result for this input.
        earlier_calls: In a chain, the text of the earlier calls with results at the same place; else "".
    """

    text: str
    position: int
    tool: str
    input: str
    result: str
    earlier_calls: str = ""


@dataclass(frozen=True, slots=True)
class NeedRequest:
    """A call of a chain, and two beginnings of the chain, to find out which makes the call likelier.

    The beginnings and the call are texts in the paper's form, such as " [Calculator(2+3) -> 5]".

    Attributes:
        text: The text around the chain.
        position: The index i of the token x_i of `text` before which the chain stands.
        earlier_calls: One beginning of the chain: calls with results.
        other_earlier_calls: The other beginning.
        call: The call, without a result.
    """

    text: str
    position: int
    earlier_calls: str
    other_earlier_calls: str
    call: str


@dataclass(frozen=True, slots=True)
class CallLosses:
    """The losses of a call, in nats: L_i(empty), L_i(e(c)) and L_i(e(c, r)) (paper, section 2).

    Attributes:
        loss_empty: L_i(empty), the loss without a call.
        loss_call: L_i(e(c)), the loss after the call without its result. None where it cannot matter, because
            L_i(empty) - L_i(e(c, r)), the largest possible delta, is below a floor.
        loss_result: L_i(e(c, r)), the loss after the call with its result.
        reason: "does_not_fit" where the call and its text exceed the context, and all losses are NaN; else None.
    """

    loss_empty: float
    loss_call: float | None
    loss_result: float
    reason: str | None = None

    @property
    def loss_minus(self) -> float:
        """Return L- = min(L_i(empty), L_i(e(c))). Without L_i(e(c)), it is L_i(empty), which is an upper bound."""
        if self.loss_call is None:
            return self.loss_empty
        return min(self.loss_empty, self.loss_call)

    @property
    def loss_plus(self) -> float:
        """Return L+ = L_i(e(c, r))."""
        return self.loss_result

    @property
    def delta(self) -> float:
        """Return L- - L+, which is as exact as L-. The call is kept if this is at least tau_f."""
        return self.loss_minus - self.loss_plus


LOSSES_BEYOND_CONTEXT = CallLosses(math.nan, math.nan, math.nan, reason="does_not_fit")
"""The losses of a call whose e(c, r) and text do not fit the context together."""
