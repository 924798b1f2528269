"""Say where in a text a call may stand: written before white space, judged from the first token after it.

The paper, its prompts and C* write `is [Calculator(115 + 100) -> 215] 215`: one space before the call, and the space of
the word that follows after it. Most tokenizers have one token for a word and the space before it, so that a call before
this token has this form. Others keep the space apart (`is`, ` `, `215`) or cut digits one by one (`is`, ` `, `2`, `1`,
`5`): a call before the number's own token would read `is  [Calculator(115 + 100) -> 215]215`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenOffsets = Sequence[int] | NDArray[np.integer]
"""The character of a text at which each of its tokens begins, ascending. Of several tokens that begin at one character
the first one stands for all."""
VERSION = 1
"""Raised when the same text and tokens would give other places; no sample and no loss is computed again."""


class CallPlace(NamedTuple):
    """A place of a text at which a call may stand.

    In `is 215` with the tokens `is`, ` `, `215` the place before the number is CallPlace(2, 1, 2).
    """

    offset: int
    """The character before which the call is written: white space before x_i stands after the call."""
    token: int
    """The index of the token before which a call is sampled: the first one that begins in this white space, or x_i."""
    position: int
    """The index i of x_i, with which the window of the loss begins: the first token that is not only white space."""


def place_of_token(text: str, token_offsets: TokenOffsets, token: int) -> CallPlace | None:
    """Return the place of a call that is sampled before a token of the text; `token` is its index.

    None where no call may be sampled: an earlier token begins in the same white space, or with the same character, and
    has this place; or no visible character follows.
    """
    start = int(token_offsets[token])
    first_visible = len(text) - len(text[start:].lstrip())
    offset = len(text[:first_visible].rstrip())
    earlier_token_has_place = token > 0 and token_offsets[token - 1] >= offset
    if earlier_token_has_place or first_visible == len(text):
        return None
    # x_i is the token that holds the first visible character: the last one that begins at it or before it.
    begins = int(token_offsets[int(np.searchsorted(token_offsets, first_visible, side="right")) - 1])
    position = int(np.searchsorted(token_offsets, begins, side="left"))
    return CallPlace(offset, token, position)


def place_at(text: str, token_offsets: TokenOffsets, offset: int) -> CallPlace | None:
    """Return the place of a call that somebody puts before character `offset`; None where no token begins there.

    White space around `offset` is passed over: in `is 215` the characters 2 and 3 mean the same place.
    """
    if not 0 <= offset < len(text):
        return None
    first_visible = len(text) - len(text[offset:].lstrip())
    written_at = len(text[:first_visible].rstrip())
    token = int(np.searchsorted(token_offsets, written_at, side="left"))
    if token == len(token_offsets) or token_offsets[token] > first_visible:
        return None
    return place_of_token(text, token_offsets, token)


def sampling_token(text: str, token_offsets: TokenOffsets, position: int) -> int:
    """Return the index of the token before which calls at the place of x_i are sampled; i is `position`."""
    place = place_at(text, token_offsets, int(token_offsets[position]))
    return position if place is None else place.token


def without_other_tokens(
    text: str, token_offsets: TokenOffsets, probabilities: NDArray[np.float32], tau_s: float
) -> NDArray[np.float32]:
    """Return p_i [n] with 0 in place of those above tau_s before whose token no call may be sampled."""
    allowed = probabilities.copy()
    for token in np.flatnonzero(probabilities > tau_s).tolist():
        if place_of_token(text, token_offsets, token) is None:
            allowed[token] = 0
    return allowed
