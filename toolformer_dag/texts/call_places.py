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


def find_place_of_token(text: str, token_offsets: TokenOffsets, token: int) -> CallPlace | None:
    """Find the place of a call that is sampled before a token.

    Example:
        The text `is 215` has the tokens `is`, ` ` and `215` at the offsets [0, 2, 3]. For token 1 the place is
        CallPlace(offset=2, token=1, position=2): the call is written before the space, and its loss is computed
        from the token `215` on.

    Args:
        token_offsets: For each token, the offset in the text at which it begins.
        token: The index of the token.

    Returns:
        The place. None if only white space follows, or if an earlier token has the same place (as for token 2
        in the example).
    """
    space = _find_white_space_around(text, int(token_offsets[token]))  # empty if none is around the token's beginning
    if space.end == len(text):
        return None

    earlier_token_has_place = token > 0 and token_offsets[token - 1] >= space.start
    if earlier_token_has_place:
        return None

    first_visible_token = _find_token_holding(
        token_offsets, space.end
    )  # holds the first character after the white space
    return CallPlace(offset=space.start, token=token, position=first_visible_token)


class _WhiteSpace(NamedTuple):
    """White space of a text, from the character `start` to the one before `end`. It may be empty."""

    start: int
    end: int


def _find_white_space_around(text: str, character: int) -> _WhiteSpace:
    """Return the white space that contains a character, or ends right before it."""
    end = len(text) - len(text[character:].lstrip())
    start = len(text[:end].rstrip())
    return _WhiteSpace(start, end)


def _find_token_holding(token_offsets: TokenOffsets, character: int) -> int:
    """Return the index of the token that holds a character, the first one if several begin where it begins."""
    tokens_until_character = int(np.searchsorted(token_offsets, character, side="right"))
    token_start = int(token_offsets[tokens_until_character - 1])
    return _find_first_token_from(token_offsets, token_start)


def _find_first_token_from(token_offsets: TokenOffsets, character: int) -> int:
    """Return the index of the first token that begins at a character or after it."""
    return int(np.searchsorted(token_offsets, character, side="left"))


def place_at(text: str, token_offsets: TokenOffsets, offset: int) -> CallPlace | None:
    """Find the place of a call that somebody puts before the character at `offset`.

    White space around `offset` makes no difference: in `is 215` the offsets 2 and 3 give the same place.

    Returns:
        The place. None if `offset` is outside the text, or if no token begins there (for example inside a word),
        or if only white space follows.
    """
    if not 0 <= offset < len(text):
        return None

    space = _find_white_space_around(text, offset)

    token_index = _find_first_token_from(token_offsets, space.start)
    if token_index == len(token_offsets):
        return None
    if token_offsets[token_index] > space.end:  # no token begins in the white space or right after it
        return None

    return find_place_of_token(text, token_offsets, token_index)


def find_sampling_token(text: str, token_offsets: TokenOffsets, position: int) -> int:
    """Find the token before which a call is sampled, given the token from which its loss is computed.

    These differ if the white space between them is a token of its own: for position 2 of `is`, ` `, `215`
    the answer is 1.
    """
    place = place_at(text, token_offsets, int(token_offsets[position]))
    return position if place is None else place.token


def without_other_tokens(
    text: str, token_offsets: TokenOffsets, probabilities: NDArray[np.float32], tau_s: float
) -> NDArray[np.float32]:
    """Set the probability of a call to 0 before tokens where no call may be written.

    Args:
        token_offsets: For each token, the offset in the text at which it begins.
        probabilities: For each token, the probability p_i of a call before it.
        tau_s: Calls are sampled only where the probability is above this. Other tokens are not checked.

    Returns:
        A changed copy of the probabilities.
    """
    allowed = probabilities.copy()
    for token_index in np.flatnonzero(probabilities > tau_s).tolist():
        # None: only white space follows, or the place is that of an earlier token in the same white space.
        if find_place_of_token(text, token_offsets, token_index) is None:
            allowed[token_index] = 0
    return allowed
