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
CALL_PLACES_VERSION = 1
"""Raised when the same text and tokens would give other places; samples and losses are not computed again then."""


class CallPlace(NamedTuple):
    """A place of a text at which a call may stand.

    In `is 215` with the tokens `is`, ` `, `215`, the place before the number is CallPlace(char_offset=2,
    sampling_token_index=1, position=2): the call is written before the space, sampled before the token ` `, and judged
    from the token `215`.
    """

    char_offset: int
    """The character before which the call is written. The white space before x_i stands after the call."""
    sampling_token_index: int
    """The index of the token before which calls are sampled: the first that begins in this white space, else x_i."""
    position: int
    """The index i of x_i, the first token after the call that is not only white space. The loss is taken from it on."""


def find_call_place_at_token(text: str, token_offsets: TokenOffsets, token_index: int) -> CallPlace | None:
    """Find the place of a call that is sampled before a token.

    Example:
        The text `is 215` has the tokens `is`, ` ` and `215` at the offsets [0, 2, 3]. For token 1 the place is
        CallPlace(char_offset=2, sampling_token_index=1, position=2): the call is written before the space, and its
        loss is computed from the token `215` on.

    Args:
        text: The text.
        token_offsets: For each token, the offset in the text at which it begins. Shape: (tokens,).
        token_index: The index of the token.

    Returns:
        The place. None if only white space follows, or if an earlier token has the same place (as for token 2
        in the example).
    """
    token_start = int(token_offsets[token_index])
    space = _find_white_space_around(text, token_start)  # may be empty

    only_space_follows = space.end == len(text)
    if only_space_follows:
        return None

    earlier_token_has_place = token_index > 0 and token_offsets[token_index - 1] >= space.start
    if earlier_token_has_place:
        return None

    # The loss is computed from the token that holds the first character after the white space.
    first_visible_token = _find_token_index_at_character(token_offsets, space.end)
    return CallPlace(char_offset=space.start, sampling_token_index=token_index, position=first_visible_token)


class _WhiteSpace(NamedTuple):
    """White space of a text, from the character `start` to the one before `end`. It may be empty."""

    start: int
    end: int


def _find_white_space_around(text: str, char_offset: int) -> _WhiteSpace:
    """Find the white space that contains a character, or that ends right before it. It may be empty."""
    end = len(text) - len(text[char_offset:].lstrip())
    start = len(text[:end].rstrip())
    return _WhiteSpace(start, end)


def _find_token_index_at_character(token_offsets: TokenOffsets, char_offset: int) -> int:
    """Find the index of the token that holds a character, or of the first one if several begin at the same offset."""
    tokens_until_character = int(np.searchsorted(token_offsets, char_offset, side="right"))
    token_start = int(token_offsets[tokens_until_character - 1])
    return _find_first_token_index_from(token_offsets, token_start)


def _find_first_token_index_from(token_offsets: TokenOffsets, char_offset: int) -> int:
    """Find the index of the first token that begins at an offset or after it. Without one, it is the token count."""
    return int(np.searchsorted(token_offsets, char_offset, side="left"))


def find_call_place_at_offset(text: str, token_offsets: TokenOffsets, char_offset: int) -> CallPlace | None:
    """Find the place of a call that somebody puts before a character of a text.

    White space around the character makes no difference: in `is 215` the offsets 2 and 3 give the same place.

    Args:
        text: The text.
        token_offsets: For each token, the offset in the text at which it begins. Shape: (tokens,).
        char_offset: The offset of the character.

    Returns:
        The place. None if `char_offset` is outside the text, or if no token begins there (for example inside a word),
        or if only white space follows.
    """
    if not 0 <= char_offset < len(text):
        return None

    space = _find_white_space_around(text, char_offset)

    token_index = _find_first_token_index_from(token_offsets, space.start)
    if token_index == len(token_offsets):
        return None
    if token_offsets[token_index] > space.end:  # no token begins in the white space or right after it
        return None

    return find_call_place_at_token(text, token_offsets, token_index)


def find_sampling_token_index(text: str, token_offsets: TokenOffsets, position: int) -> int:
    """Find the token before which a call is sampled, given the token from which its loss is computed.

    These differ if the white space between them is a token of its own: for position 2 of `is`, ` `, `215`
    the answer is 1.

    Args:
        text: The text.
        token_offsets: For each token, the offset in the text at which it begins. Shape: (tokens,).
        position: The index of the token from which the loss is computed.
    """
    token_start = int(token_offsets[position])
    place = find_call_place_at_offset(text, token_offsets, token_start)
    if place is None:
        return position
    return place.sampling_token_index


def zero_disallowed_probabilities(
    text: str, token_offsets: TokenOffsets, call_probabilities: NDArray[np.float32], tau_s: float
) -> NDArray[np.float32]:
    """Set the probability of a call to 0 before tokens where no call may be written.

    Args:
        text: The text.
        token_offsets: For each token, the offset in the text at which it begins. Shape: (tokens,).
        call_probabilities: For each token, the probability p_i of a call before it. Shape: (tokens,).
        tau_s: Calls are sampled only where the probability is above this. Other tokens are not checked.

    Returns:
        A changed copy of the probabilities.
    """
    allowed_probabilities = call_probabilities.copy()
    likely_token_indices = np.flatnonzero(call_probabilities > tau_s).tolist()

    for token_index in likely_token_indices:
        # There is no place if only white space follows, or if an earlier token has the same place.
        place = find_call_place_at_token(text, token_offsets, token_index)
        if place is None:
            allowed_probabilities[token_index] = 0
    return allowed_probabilities
