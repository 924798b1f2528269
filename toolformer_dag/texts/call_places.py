"""Find the places of a text at which a call may stand: the call is written before white space, not after it.

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
"""For each token of a text the character at which it begins, ascending: [0, 2, 3] for the tokens `is`, ` `, `215`.

Several tokens may begin at one character, as those of a character of several bytes; the first of them counts."""
VERSION = 1
"""Raised when the same text and tokens would give other places; samples and losses are not computed again then."""


class CallPlace(NamedTuple):
    """A place of a text at which a call may stand.

    In `is 215` with the tokens `is`, ` `, `215`, the place before the number is CallPlace(offset=2, token=1,
    position=2): the call is written before the space, sampled before the token ` `, and judged from the token `215`.
    """

    offset: int
    """The character before which the call is written. The white space before x_i stands after the call."""
    token: int
    """The index of the token before which calls are sampled: the first that begins in this white space, else x_i."""
    position: int
    """The index i of x_i, the first token after the call that is not only white space. The loss is taken from it on."""


def place_of_token(text: str, token_offsets: TokenOffsets, token: int) -> CallPlace | None:
    """Return the place of a call that is sampled before a token of the text; `token` is its index.

    For `is 215` with the offsets [0, 2, 3], token 1 gives CallPlace(offset=2, token=1, position=2).

    Returns None if no call is sampled before this token: only white space follows, or the place belongs to an earlier
    token, which begins in the same white space or at the same character (token 2 in the example).
    """
    start = int(token_offsets[token])
    first_visible = len(text) - len(text[start:].lstrip())  # the first character from `start` on that is not blank
    offset = len(text[:first_visible].rstrip())
    earlier_token_has_place = token > 0 and token_offsets[token - 1] >= offset
    if earlier_token_has_place or first_visible == len(text):
        return None
    position = _token_with(token_offsets, first_visible)
    return CallPlace(offset, token, position)


def _token_with(token_offsets: TokenOffsets, character: int) -> int:
    """Return the index of the token that holds a character, the first one if several begin where it begins."""
    last_token = int(np.searchsorted(token_offsets, character, side="right")) - 1  # that begins at or before it
    return int(np.searchsorted(token_offsets, int(token_offsets[last_token]), side="left"))


def place_at(text: str, token_offsets: TokenOffsets, offset: int) -> CallPlace | None:
    """Return the place of a call that somebody puts before the character `offset`.

    White space around `offset` does not matter: in `is 215` the offsets 2 and 3 give the same place.

    Returns None if `offset` is outside the text, or if no token begins there, as inside of a word.
    """
    if not 0 <= offset < len(text):
        return None
    space_end = len(text) - len(text[offset:].lstrip())
    space_start = len(text[:space_end].rstrip())  # equals `space_end` without white space
    # The first token that begins in the white space, or right after it.
    token = int(np.searchsorted(token_offsets, space_start, side="left"))
    if token == len(token_offsets) or token_offsets[token] > space_end:
        return None
    return place_of_token(text, token_offsets, token)


def sampling_token(text: str, token_offsets: TokenOffsets, position: int) -> int:
    """Return the index of the token before which calls are sampled whose loss begins at the token x_i; i is `position`.

    It differs from i if the white space before x_i is a token of its own: 1 for position 2 of `is`, ` `, `215`.
    """
    place = place_at(text, token_offsets, int(token_offsets[position]))
    return position if place is None else place.token


def without_other_tokens(
    text: str, token_offsets: TokenOffsets, probabilities: NDArray[np.float32], tau_s: float
) -> NDArray[np.float32]:
    """Return the probabilities p_i of a call before each token [n], with 0 where no call may be sampled.

    Only those above tau_s are looked at, because no call is sampled at the others anyway.
    """
    allowed = probabilities.copy()
    for token in np.flatnonzero(probabilities > tau_s).tolist():
        if place_of_token(text, token_offsets, token) is None:
            allowed[token] = 0
    return allowed
