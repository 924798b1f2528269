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
    """Return the offset from which the closing marker of a call may be searched.

    Without named arguments, as in "QA(Who?)", this is `start`, where the call's name begins. With named arguments:

    - after their ")": 12 for 'W(city="a]") -> b'
    - at a "]" that closes no list, where the call breaks off: 8 for "W(days=1] b"
    - `start` at any other bracket, which JSON does not have there: "W(days=f(1))"
    - None if `text` ends before such a bracket: 'W(city="a]'
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
    """Return the offset of the first `sign`, such as "]" or "->", after a call's input; -1 without one.

    start: where the call's name begins.
    """
    end = input_end(text, start)
    return -1 if end is None else text.find(sign, end)


def input_ends(text: str, starts: Collection[int]) -> dict[int, int | None]:
    """Return from where the closing marker of each call in a text may be searched: start of a call's name -> offset.

    An offset is None if named arguments do not end. All calls take linear time together; a loop over `input_end`, which
    returns the same for one call, could read a long string once per call.
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
    """Return where the named arguments of a call end; None if they do not end.

    bracket: the first bracket of the arguments that stands in no string and belongs to no list such as `[1, 2]`.
    start: where the call's name begins; returned if the bracket shows that these are no named arguments.
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
    """Return for each offset the bracket that decides where arguments which begin there end: offset -> bracket.

    This is the first bracket after the offset that stands in no string and belongs to no list: the ")" of
    'city="(]", days=[1, 2])' for offset 0. The offsets stand in no string. The text is read once, backwards.
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
        """Move before the quote or bracket at `position`, the next one to the front; update the deciding bracket.

        The deciding bracket is the first one after a position that belongs to no list such as `[1, 2]`. Inside a string
        brackets are text, so that only `bracket_if_outside` changes at a bracket.
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
