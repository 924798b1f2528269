"""A random stream for every sample: what is drawn depends on what it is a sample of, never on what runs beside it."""

from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray


def uniforms(seed: int, digest: str, position: int, sample: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for sample j at position i of the text `digest`; a longer draw begins with a shorter.

    Bits of SHAKE-128 over the four names, 53 of every 64: the same with every version of numpy and torch.
    """
    stream = shake_128(f"{seed}\0{digest}\0{position}\0{sample}".encode()).digest(8 * count)
    return (np.frombuffer(stream, "<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53
