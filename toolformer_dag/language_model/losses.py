"""What is asked and answered when a call is judged (paper, section 2, "Filtering API Calls")."""

import math
from dataclasses import dataclass

WINDOW_WEIGHTS = (1 / 3, 4 / 15, 1 / 5, 2 / 15, 1 / 15)
"""w_0..w_4 = max(0, 1 - 0.2 t), normalised over all t (paper, section 4.1); every later weight is zero."""


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A call to `tool` (its name in the text) with `input` and `result`, before token x_i of `text`, i = `position`."""

    text: str
    position: int
    tool: str
    input: str
    result: str


@dataclass(frozen=True, slots=True)
class CallLosses:
    """L_i(empty), L_i(e(c)), L_i(e(c, r)) in nats.

    With `upper_bound`, L_i(e(c)) was not computed (NaN), because the call is hopeless already: `delta` is then
    L_i(empty) - L+, below zero, and the true one is at most that. With `reason` "does_not_fit" all three are NaN.
    """

    loss_empty: float
    loss_call: float
    loss_result: float
    upper_bound: bool = False
    reason: str | None = None

    @property
    def loss_minus(self) -> float:
        """L- = min(L_i(empty), L_i(e(c)))."""
        return self.loss_empty if self.upper_bound else min(self.loss_empty, self.loss_call)

    @property
    def loss_plus(self) -> float:
        """L+ = L_i(e(c, r))."""
        return self.loss_result

    @property
    def delta(self) -> float:
        """L- - L+: by how much the result helps. The call is kept where this is at least tau_f."""
        return self.loss_minus - self.loss_plus


UNFIT = CallLosses(math.nan, math.nan, math.nan, reason="does_not_fit")
"""For a call whose e(c, r) and text do not fit the context together."""
