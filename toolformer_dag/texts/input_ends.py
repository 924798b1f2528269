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

    For a call with named arguments, it is after their `)`, or at a `]` without its `[`: 12 for 'W(city="a]") -> b'. If
    `text` ends before that, as in 'W(city="a]', it is None.

    For any other call it is `start`, where its name begins: quotes mean nothing there, and the first `]` closes it.
    """
    opening = NAMED.match(text, start)
    if opening is None:
        return start
    open_brackets = 0
    for sign in _SIGNS.finditer(text, opening.end()):
        is_open_string = sign["open"] is not None
        if is_open_string:
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

    start: where the name of the call begins. A sign in a string of named arguments does not count.
    """
    end = input_end(text, start)
    return -1 if end is None else text.find(sign, end)


def input_ends(text: str, starts: Collection[int]) -> dict[int, int | None]:
    """Return `input_end(text, start)` for many calls in one text: start -> end.

    It takes linear time. A loop over `input_end` could read the same long string once per call.
    """
    ends: dict[int, int | None] = {}
    start_by_arguments: dict[int, int] = {}  # where the arguments begin -> where the call's name begins
    for start in starts:
        opening = NAMED.match(text, start)
        if opening is None:
            ends[start] = start
        else:
            start_by_arguments[opening.end()] = start
    if not start_by_arguments:
        return ends
    for arguments_start, next_sign in _deciding_signs(text, start_by_arguments).items():
        start = start_by_arguments[arguments_start]
        ends[start] = _end_of_arguments(next_sign, start)
    return ends


class _Sign(NamedTuple):
    """The deciding bracket after an offset of a text: it decides where arguments that begin at this offset end.

    It is the first bracket that stands in no string and belongs to no list such as `[1, 2]` after the offset.

    - sign: "]", "(" or ")"; "" for the end of the text
    - position: the offset at which it stands
    - open_brackets: how many "[" before it are not closed
    - behind: the deciding bracket after it, for a "]"; else None
    """

    sign: str
    position: int
    open_brackets: int = 0
    behind: "_Sign | None" = None


def _end_of_arguments(next_sign: _Sign, start: int) -> int | None:
    """Return where the arguments of a call end, by the deciding bracket after their beginning.

    - None: the text ends first, so the call is not finished
    - the position of a "]", or the one after the ")" that closes the arguments
    - `start`, where the name of the call begins: these are no named arguments, since other brackets stand in them

    next_sign: the deciding bracket.
    """
    match next_sign.sign:
        case "":
            return None
        case "]":
            return next_sign.position
        case ")" if not next_sign.open_brackets:
            return next_sign.position + 1
    return start


def _deciding_signs(text: str, offsets: Collection[int]) -> dict[int, _Sign]:
    """Return the deciding bracket (`_Sign`) after each of these offsets, which stand in no string: offset -> bracket.

    The text is read backwards. At each position two answers are known: the deciding bracket after it if the position
    stands outside of strings, and if it stands inside a string. Which one is true shows only further to the front.
    """
    positions = [match.start() for match in _QUOTE_OR_BRACKET.finditer(text)]
    waiting = sorted(offsets)  # the offsets before the current position
    deciding: dict[int, _Sign] = {}
    if_outside = _Sign("", len(text))
    if_inside = if_outside
    for position in reversed(positions):
        while waiting and waiting[-1] > position:
            deciding[waiting.pop()] = if_outside
        if not waiting:
            break
        sign = text[position]
        if sign == '"':
            # From outside, the quote begins a string. From inside, it ends the string unless it is escaped.
            outside_after_quote = if_outside
            if_outside = if_inside
            if_inside = if_inside if _is_escaped(text, position) else outside_after_quote
        elif sign == "[":
            if_outside = _before_bracket(if_outside)
        elif sign == "]":
            if_outside = _Sign(sign, position, behind=if_outside)
        else:
            if_outside = _Sign(sign, position)
    for offset in waiting:
        deciding[offset] = if_outside
    return deciding


def _before_bracket(next_sign: _Sign) -> _Sign:
    """Return the deciding bracket for the offset before a "[". next_sign: the one for the offset after it."""
    if next_sign.behind is not None:  # a "]", which closes the "["
        return next_sign.behind
    return next_sign._replace(open_brackets=next_sign.open_brackets + 1)


def _is_escaped(text: str, quote: int) -> bool:
    """Return whether the quote at this offset, inside a string, follows an odd number of backslashes."""
    first_backslash = quote
    while first_backslash and text[first_backslash - 1] == "\\":
        first_backslash -= 1
    return (quote - first_backslash) % 2 == 1
