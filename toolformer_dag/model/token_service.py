"""What `ServiceBackend` asks of an engine beside transformers: token ids in; tokens and log p out. Imports no torch.

An engine is a module whose `load_service` returns a `TokenService`. Its package, options and objects stay there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MOST_LIKELY = 64
"""The most tokens whose log p `TokenRequest.likeliest` asks for."""

Scores = dict[int, float]
"""log p in nats by token, of the model itself: neither temperature nor a restriction of the next token changes it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """A request to continue `prompt` by at most `most` tokens, at least one.

    Which token is next: the likeliest, unless one of these decides it:

    - `forced`: the tokens to write, as many as `most`, whatever their log p.
    - `uniforms`: random numbers in [0, 1), one per token; a token is the first whose cumulative probability, under
      `temperature` and `top_p`, exceeds its number.
    - `grammar`: an llguidance grammar, to which all that is written keeps.
    - `forbidden`: tokens that may not be written.

    Where it ends: after a token of `ends`, which is part of the answer. EOS ends nothing unless it is among them.

    Which numbers of the model the answer has:

    - `likeliest`: log p of so many of the likeliest tokens, and of the written one, at each written place.
    - `scored`: log p of these tokens, and of the written one, at each written place. Where tokens are forced, the
      written one has log p in any case.
    - `reads_prompt`: log p of each token of the prompt.
    """

    prompt: Sequence[int]
    most: int = 1
    ends: Sequence[int] = ()
    forced: Sequence[int] = ()
    uniforms: NDArray[np.float64] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    grammar: str | None = None
    forbidden: Collection[int] = ()
    likeliest: int = 0
    scored: Sequence[int] = ()
    reads_prompt: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokenAnswer:
    """The answer to a `TokenRequest`.

    - `tokens`: the written tokens.
    - `scores`: the requested log p at each of them, before it is written; empty where none were requested.
    - `prompt`: log p of each token of the prompt, NaN for the first; empty where they were not requested.
    - `ran`: how many tokens went through the model for it, without those whose keys the engine had cached.
    """

    tokens: list[int]
    ran: int
    scores: Sequence[Scores] = ()
    prompt: Sequence[float] = ()


class TokenService(Protocol):
    """An engine that continues token ids.

    - `library`: its name and version, such as `vllm 0.32.0`.
    - `dtype`: the data type that it computes in.
    - `vocabulary`: the number of its tokens.
    """

    library: str
    dtype: str
    vocabulary: int

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order, with as many in flight as the engine has room for. Raises ModelError."""
