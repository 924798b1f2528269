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
_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|(?P<open>\\?\Z))|[()\[\]]', re.DOTALL)
"""Matches a whole string of JSON, a string that does not end (with the group "open"), or a bracket outside of them."""
_QUOTE_OR_BRACKET = re.compile(r'["()\[\]]')


def input_end(text: str, start: int = 0) -> int | None:
    """Return the offset from which the closing marker of a call may be searched.

    - With named arguments: after their `)`, or at a `]` without its `[`; None if `text` ends before that.
      12 for 'W(city="a]") -> b', None for 'W(city="a]'.
    - Otherwise: `start`, where the call's name begins.
    """
    opening = NAMED.match(text, start)
    if opening is None:
        return start
    open_brackets = 0
    for sign in _SIGNS.finditer(text, opening.end()):
        if sign["open"] is not None:  # a string that does not end
            return None
        match sign[0]:
            case "[":  # of a list: W(days=[
                open_brackets += 1
            case "]" if open_brackets:  # W(days=[1]
                open_brackets -= 1
            case "]":  # W(days=1]
                return sign.start()
            case ")" if not open_brackets:  # W(days=1)
                return sign.end()
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
    """Return `input_end(text, start)` for many calls in one text: start -> end.

    It takes linear time. A loop over `input_end` could read the same long string once per call.
    """
    ends: dict[int, int | None] = dict(zip(starts, starts, strict=True))
    openings = [NAMED.match(text, start) for start in starts]
    with_named_arguments = [opening for opening in openings if opening is not None]
    brackets = _deciding_brackets(text, [opening.end() for opening in with_named_arguments])
    for opening in with_named_arguments:
        start = opening.start()
        ends[start] = _end_of_arguments(brackets[opening.end()], start)
    return ends


class _Bracket(NamedTuple):
    """The deciding bracket after an offset of a text: it decides where arguments that begin at this offset end.

    It is the first bracket after the offset that stands in no string and belongs to no list such as `[1, 2]`.
    """

    sign: str  # "]", "(" or ")"; "" for the end of the text
    position: int  # its offset in the text
    open_brackets: int = 0  # how many "[" before it are not closed
    behind: "_Bracket | None" = None  # for a "]", the deciding bracket after it


def _end_of_arguments(bracket: _Bracket, start: int) -> int | None:
    """Return where the arguments of a call end, by their deciding bracket; None if they do not end.

    Returns `start`, where the call's name begins, if the brackets show that these are no named arguments.
    """
    match bracket.sign:
        case "":
            return None
        case "]":
            return bracket.position
        case ")" if not bracket.open_brackets:
            return bracket.position + 1
    return start


def _deciding_brackets(text: str, offsets: Collection[int]) -> dict[int, _Bracket]:
    """Return the deciding bracket (`_Bracket`) after each offset; the offsets stand in no string.

    The text is read once, backwards.
    """
    if not offsets:
        return {}
    waiting = sorted(offsets)  # the offsets before the current position
    brackets: dict[int, _Bracket] = {}
    scan = _BackwardScan(text)
    positions = [match.start() for match in _QUOTE_OR_BRACKET.finditer(text)]
    for position in reversed(positions):
        while waiting and waiting[-1] > position:
            brackets[waiting.pop()] = scan.if_outside
        if not waiting:
            break
        scan.step_before(position)
    for offset in waiting:
        brackets[offset] = scan.if_outside
    return brackets


class _BackwardScan:
    """Reads the quotes and brackets of a text from its end to its beginning (`step_before`).

    Whether a position stands in a string shows only further to the front, so both answers are kept:

    - if_outside: the deciding bracket after the current position if it stands outside of strings
    - if_inside: the same if it stands inside a string
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.if_outside = _Bracket("", len(text))
        self.if_inside = self.if_outside

    def step_before(self, position: int) -> None:
        """Move to the offset of a quote or bracket, the last one before the current position."""
        sign = self._text[position]
        match sign:
            case '"':
                self._step_before_quote(position)
            case "[":
                self.if_outside = _before_opening_bracket(self.if_outside)
            case "]":
                self.if_outside = _Bracket(sign, position, behind=self.if_outside)
            case _:
                self.if_outside = _Bracket(sign, position)

    def _step_before_quote(self, position: int) -> None:
        """Move before a quote: outside it begins a string; inside it ends the string unless it is escaped."""
        outside_after_quote = self.if_outside
        self.if_outside = self.if_inside
        if not _is_escaped(self._text, position):
            self.if_inside = outside_after_quote


def _before_opening_bracket(following: _Bracket) -> _Bracket:
    """Return the deciding bracket for the offset before a "[". following: the one for the offset after it."""
    if following.behind is not None:  # a "]", which closes the "["
        return following.behind
    return following._replace(open_brackets=following.open_brackets + 1)


def _is_escaped(text: str, quote: int) -> bool:
    """Return whether the quote at this offset, inside a string, follows an odd number of backslashes."""
    first_backslash = quote
    while first_backslash and text[first_backslash - 1] == "\\":
        first_backslash -= 1
    return (quote - first_backslash) % 2 == 1
