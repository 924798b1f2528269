"""Find where the inputs of calls end: at the first "]", or where quotes and brackets of named arguments tell it.

Named arguments are JSON values, `city="Rome", days=3`, whose strings may hold "]", "->" and ")". In any other input
quotes mean nothing.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

NAME = r"[^\s\[\]()]+"
"""The name of a tool, as a pattern: no white space, no brackets."""
NAMED = re.compile(rf"\s*{NAME}\((?=\s*[^\W\d]\w*\s*=)")
"""The beginning of a call with named arguments: `Weather(city=`, without the first argument."""
NAMED_IN_TEXT = re.compile(rf"(?<![^\s\[\]()]){NAME}+\((?=\s*[^\W\d]\w*\s*=)")
"""The same anywhere in a text: a name is tried from its first character alone."""
_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|(?P<open>\\?\Z))|[()\[\]]', re.DOTALL)
"""Strings of JSON, also one without its end, and brackets: what tells where named arguments end."""
_QUOTE_OR_BRACKET = re.compile(r'["()\[\]]')


def input_end(text: str, start: int = 0) -> int | None:
    """Return the character from which the end of a call may be searched, where quotes and brackets tell.

    start: where the name of the call begins.

    - Named arguments: after their `)`, or at a `]` that nothing opened; None where `text` ends before that. Strings
      among them may hold any sign. For `W(city="a]") -> b` it is the character after `)`.
    - Any other input: `start`, because quotes mean nothing there, and the first `]` closes the call.
    """
    opening = NAMED.match(text, start)
    if opening is None:
        return start
    open_brackets = 0
    for sign in _SIGNS.finditer(text, opening.end()):
        if sign["open"] is not None:  # a string without its end
            return None
        match sign[0]:
            case "[":
                open_brackets += 1
            case "]" if open_brackets:
                open_brackets -= 1
            case "]":
                return sign.start()
            case ")" if not open_brackets:
                return sign.end()
            case "(" | ")":  # in no string: these are no arguments in JSON
                return start
    return None


def find_behind_input(sign: str, text: str, start: int = 0) -> int:
    """Return the character at which `sign`, such as "]" or "->", first stands after a call's input; -1 without one.

    start: where the name of the call begins. Signs in the strings of named arguments are passed over.
    """
    end = input_end(text, start)
    return -1 if end is None else text.find(sign, end)


def input_ends(text: str, starts: Collection[int]) -> dict[int, int | None]:
    """Return `input_end` of many calls in one text, by where their names begin.

    It takes linear time. `input_end`, asked once per call, may read the same long string once per call.
    """
    ends: dict[int, int | None] = {}
    starts_by_arguments: dict[int, int] = {}  # where the name begins, by where the arguments begin
    for start in starts:
        opening = NAMED.match(text, start)
        if opening is None:
            ends[start] = start
        else:
            starts_by_arguments[opening.end()] = start
    if not starts_by_arguments:
        return ends
    for arguments, next_sign in _signs_behind(text, starts_by_arguments).items():
        start = starts_by_arguments[arguments]
        ends[start] = _end_of_arguments(next_sign, start)
    return ends


class _Sign(NamedTuple):
    """The first bracket behind a place of a text that neither stands in a string nor closes what was opened there.

    - sign: "]", "(", ")"; "" for the end of the text, also one in a string
    - position: the character at which it stands
    - open_brackets: "[" before it that are not closed
    - behind: of a "]" the first such bracket behind it; of the others None
    """

    sign: str
    position: int
    open_brackets: int = 0
    behind: "_Sign | None" = None


def _end_of_arguments(next_sign: _Sign, start: int) -> int | None:
    """Return what `input_end` returns. next_sign: behind the beginning of the arguments; start: of the name."""
    match next_sign.sign:
        case "":
            return None
        case "]":
            return next_sign.position
        case ")" if not next_sign.open_brackets:
            return next_sign.position + 1
    return start


def _signs_behind(text: str, places: Collection[int]) -> dict[int, _Sign]:
    """Return the first decisive bracket behind each of these places, which stand in no string.

    The text is read backwards: what follows a place in a string, and in none, is known before the place is read.
    """
    signs = [match.start() for match in _QUOTE_OR_BRACKET.finditer(text)]
    waiting = sorted(places)
    behind: dict[int, _Sign] = {}
    in_no_string = _Sign("", len(text))
    in_string = in_no_string
    for position in reversed(signs):
        while waiting and waiting[-1] > position:
            behind[waiting.pop()] = in_no_string
        if not waiting:
            break
        sign = text[position]
        if sign == '"':  # begins a string, or ends it where it is not escaped
            behind_quote = in_no_string
            in_no_string = in_string
            in_string = in_string if _is_escaped(text, position) else behind_quote
        elif sign == "[":
            in_no_string = _opened_before(in_no_string)
        elif sign == "]":
            in_no_string = _Sign(sign, position, behind=in_no_string)
        else:
            in_no_string = _Sign(sign, position)
    for place in waiting:
        behind[place] = in_no_string
    return behind


def _opened_before(next_sign: _Sign) -> _Sign:
    """Return the first decisive bracket behind a "[", after which `next_sign` is the first."""
    if next_sign.behind is not None:  # a "]", which closes the "["
        return next_sign.behind
    return next_sign._replace(open_brackets=next_sign.open_brackets + 1)


def _is_escaped(text: str, quote: int) -> bool:
    """Return whether the quote at this character, inside a string, follows an odd number of backslashes."""
    first = quote
    while first and text[first - 1] == "\\":
        first -= 1
    return (quote - first) % 2 == 1
