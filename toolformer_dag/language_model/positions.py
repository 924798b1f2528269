"""Which positions of a text are worth a call (paper, section 2)."""

import numpy as np
from numpy.typing import NDArray


def select_positions(probabilities: NDArray[np.floating], tau_s: float, k: int) -> list[int]:
    """I = {i : p_i > tau_s}, at most the `k` most probable of them, ascending. Of equals the earlier is taken."""
    above = np.flatnonzero(probabilities > tau_s)
    likeliest = above[np.argsort(-probabilities[above], kind="stable")[:k]]
    return sorted(likeliest.tolist())
