"""What `ServiceBackend` asks of an engine beside transformers: token ids in; tokens and log p out. Imports no torch.

An engine is a file whose `load_service` returns a `TokenService`; its package, its options and its objects stay there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MOST_LIKELY = 64
"""The most tokens whose log p `TokenRequest.likeliest` asks for."""

Scores = dict[int, float]
"""log p by token, of the model itself: neither temperature nor a restriction of the next token changes it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """Continue `prompt` by at most `most` tokens, at least one; EOS ends nothing unless it is in `ends`.

    The next token is the likeliest, unless one of these decides it:

    - `walk`: as many tokens as `most`, which are written whatever their log p, which the answer has.
    - `stream`: uniform numbers; token t is the first whose cumulative probability, under `temperature` and `top_p`,
      exceeds number t.
    - `grammar`: llguidance's, of all that is written; `forbidden`: tokens that may not be written.

    `ends`: tokens that end the answer, as its last. What is asked of the model's numbers:

    - `likeliest`, `scored`: log p at each written place of so many of the likeliest tokens, or of these, and of the
      written one.
    - `reads_prompt`: log p of each token of the prompt.
    """

    prompt: Sequence[int]
    most: int = 1
    ends: Sequence[int] = ()
    walk: Sequence[int] = ()
    stream: NDArray[np.float64] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    grammar: str | None = None
    forbidden: Collection[int] = ()
    likeliest: int = 0
    scored: Sequence[int] = ()
    reads_prompt: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokenAnswer:
    """Say what was written after a prompt.

    - `tokens`: the written tokens; `scores`: at each of them what was asked, empty where nothing was.
    - `prompt`: log p of each token of the prompt, NaN for the first; empty where it was not asked.
    - `ran`: how many tokens went through the model for it; those whose keys the engine had did not.
    """

    tokens: list[int]
    ran: int
    scores: Sequence[Scores] = ()
    prompt: Sequence[float] = ()


class TokenService(Protocol):
    """An engine that continues token ids.

    - `library`: its name and version, as in `vllm 0.32.0`; `dtype`: the data type that it computes in.
    - `vocabulary`: how many tokens it tells apart.
    """

    library: str
    dtype: str
    vocabulary: int

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order, with as many in flight as the engine has room for. Raises ModelError."""
