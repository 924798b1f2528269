"""Find where the inputs of calls end: at the first "]", or by the quotes and brackets of named arguments.

Named arguments are JSON values, `city="Rome", days=3`, whose strings may hold "]", "->" and ")". In any other input
quotes mean nothing.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

NAME = r"[^\s\[\]()]+"
"""The name of a tool, as a pattern: no white space, no brackets."""
NAMED = re.compile(rf"\s*{NAME}\((?=\s*[^\W\d]\w*\s*=)")
"""Matches "Weather(" where `city=` or another name and "=" follow: the beginning of a call with named arguments."""
NAMED_IN_TEXT = re.compile(rf"(?<![^\s\[\]()]){NAME}+\((?=\s*[^\W\d]\w*\s*=)")
"""The same for a search in a text, in linear time: it tries a name only from its first character."""
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|(?P<open>\\?\Z))|[()\[\]]', re.DOTALL)
"""Matches a whole string of JSON, a string that does not end (with the group "open"), or a bracket outside of them."""
_QUOTE_OR_BRACKET = re.compile(r'["()\[\]]')


def input_end(text: str, start: int = 0) -> int | None:
    """Find the offset from which the closing marker of a call is to be searched.

    Args:
        start: The offset at which the call's name begins.

    Returns:
        `start` for an input without named arguments, such as "QA(Who?)". With named arguments:

        - the offset after their ")", which is 12 for 'W(city="a]") -> b'
        - the offset of a "]" that closes no list, where the call breaks off: 8 for "W(days=1] b"
        - `start` if another bracket shows that they are not JSON, as in "W(days=f(1))"
        - None if the text ends before any such bracket, as in 'W(city="a]'
    """
    opening = NAMED.match(text, start)
    if opening is None:  # no named arguments
        return start

    open_lists = 0
    for string_or_bracket in _STRING_OR_BRACKET.finditer(text, opening.end()):
        if string_or_bracket["open"] is not None:  # a string without its closing quote
            return None
        match string_or_bracket[0]:  # a whole string is no case: it is skipped
            case "[":  # W(days=[
                open_lists += 1
            case "]" if open_lists:  # W(days=[1]
                open_lists -= 1
            case "]":  # W(days=1]
                return string_or_bracket.start()
            case ")" if not open_lists:  # W(days=1)
                return string_or_bracket.end()
            case "(" | ")":  # W(days=f(1) or W(days=[1): this is no JSON, so these are no named arguments
                return start
    return None


def find_behind_input(sign: str, text: str, start: int = 0) -> int:
    """Find the first `sign`, such as "]" or "->", after the input of a call.

    Args:
        sign: What is searched.
        start: The offset at which the call's name begins.

    Returns:
        The offset of the sign, or -1 if it does not occur.
    """
    end = input_end(text, start)
    return -1 if end is None else text.find(sign, end)


def input_ends(text: str, starts: Collection[int]) -> dict[int, int | None]:
    """Find, for each call in a text, the offset from which its closing marker is to be searched.

    The results are the same as with `input_end` for one call after the other, but the time is linear. A loop over
    `input_end` could read a long string once per call.

    Args:
        starts: The offsets at which the names of the calls begin.

    Returns:
        An offset for each of `starts`, or None if the named arguments of this call do not end.
    """
    ends: dict[int, int | None] = {start: start for start in starts}  # for inputs without named arguments

    openings = [NAMED.match(text, start) for start in starts]
    with_named_arguments = [opening for opening in openings if opening is not None]

    brackets = _find_deciding_brackets(text, [opening.end() for opening in with_named_arguments])
    for opening in with_named_arguments:
        start = opening.start()
        deciding_bracket = brackets[opening.end()]
        ends[start] = _find_end_of_arguments(deciding_bracket, start)
    return ends


class _Bracket(NamedTuple):
    """The deciding bracket after an offset of a text: it decides where arguments that begin at this offset end.

    It is the first bracket after the offset that stands in no string and belongs to no list such as `[1, 2]`.
    """

    sign: str  # "]", "(" or ")"; "" for the end of the text
    position: int  # its offset in the text
    open_brackets: int = 0  # how many "[" before it are not closed
    behind: "_Bracket | None" = None  # for a "]", the deciding bracket after it


def _find_end_of_arguments(bracket: _Bracket, start: int) -> int | None:
    """Find out where the named arguments of a call end.

    Args:
        bracket: The first bracket after the beginning of the arguments that is not in a string or part of a
            list such as `[1, 2]`.
        start: The offset at which the call's name begins.

    Returns:
        The offset after the end. None if the arguments do not end, and `start` if the bracket shows that these
        are no named arguments.
    """
    match bracket.sign:
        case "":  # W(days=1, where the text ends
            return None
        case "]":  # W(days=1], where the call breaks off
            return bracket.position
        case ")" if not bracket.open_brackets:  # W(days=1)
            return bracket.position + 1
    return start  # W(days=f(1) or W(days=[1), which is no JSON


def _find_deciding_brackets(text: str, offsets: Collection[int]) -> dict[int, _Bracket]:
    """Find, for each offset, the bracket that decides where arguments that begin there end.

    This is the first bracket after the offset that is not in a string or part of a list. For offset 0 of
    'city="(]", days=[1, 2])' it is the ")" at the end. The text is read only once, backwards.

    Args:
        offsets: Offsets in the text, none of them inside a string.
    """
    if not offsets:
        return {}

    remaining_offsets = sorted(offsets)
    brackets: dict[int, _Bracket] = {}
    scan = _BackwardScan(text)  # knows the deciding bracket for its position, which moves to the front

    positions = [match.start() for match in _QUOTE_OR_BRACKET.finditer(text)]
    for position in reversed(positions):
        # Offsets between this quote or bracket and the one after it have the scan's present bracket.
        while remaining_offsets and remaining_offsets[-1] > position:
            brackets[remaining_offsets.pop()] = scan.bracket_if_outside
        if not remaining_offsets:
            break
        scan.step_before(position)

    for offset in remaining_offsets:  # before the first quote or bracket
        brackets[offset] = scan.bracket_if_outside
    return brackets


class _BackwardScan:
    """Reads the quotes and brackets of a text from its end to its beginning (`step_before`).

    Whether a position stands in a string shows only further to the front, so both answers are kept:

    - bracket_if_outside: the deciding bracket after the current position if it stands outside of strings
    - bracket_if_inside: the same if it stands inside a string
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.bracket_if_outside = _Bracket("", len(text))
        self.bracket_if_inside = self.bracket_if_outside

    def step_before(self, position: int) -> None:
        """Move before the quote or bracket at `position`, and update the deciding bracket.

        The deciding bracket is the first bracket after the current position that is not part of a list such as
        `[1, 2]`. Inside a string, brackets are mere text, so a bracket changes only `bracket_if_outside`.

        Args:
            position: The offset of the next quote or bracket towards the beginning of the text.
        """
        sign = self._text[position]
        following = self.bracket_if_outside  # decides right after this quote or bracket

        match sign:
            case '"':
                self._step_before_quote(position)
            case "[" if following.behind is not None:  # `following` is the "]" of this list: the list is skipped
                self.bracket_if_outside = following.behind
            case "[":
                self.bracket_if_outside = following._replace(open_brackets=following.open_brackets + 1)
            case "]":  # decides unless a "[" before it makes it the end of a list; then `behind` decides
                self.bracket_if_outside = _Bracket(sign, position, behind=following)
            case _:  # "(" or ")"
                self.bracket_if_outside = _Bracket(sign, position)

    def _step_before_quote(self, position: int) -> None:
        """Move before a quote: outside it begins a string; inside it ends the string unless it is escaped."""
        outside_after_quote = self.bracket_if_outside
        self.bracket_if_outside = self.bracket_if_inside
        if not _is_escaped(self._text, position):
            self.bracket_if_inside = outside_after_quote


def _is_escaped(text: str, quote: int) -> bool:
    """Return whether the quote at this offset, inside a string, follows an odd number of backslashes."""
    first_backslash = quote
    while first_backslash and text[first_backslash - 1] == "\\":
        first_backslash -= 1
    return (quote - first_backslash) % 2 == 1
