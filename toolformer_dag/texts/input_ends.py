"""Find where the inputs of calls end: at the first "]", or by the quotes and brackets of named arguments.

Named arguments are JSON values, `city="Rome", days=3`, whose strings may hold "]", "->" and ")". In any other input
quotes mean nothing.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

TOOL_NAME_PATTERN = r"[^\s\[\]()]+"
"""The name of a tool, as a pattern: no white space, no brackets."""
NAMED_CALL_PATTERN = re.compile(rf"\s*{TOOL_NAME_PATTERN}\((?=\s*[^\W\d]\w*\s*=)")
"""Matches "Weather(" where `city=` or another name and "=" follow: the beginning of a call with named arguments."""
NAMED_CALL_IN_TEXT_PATTERN = re.compile(rf"(?<![^\s\[\]()]){TOOL_NAME_PATTERN}+\((?=\s*[^\W\d]\w*\s*=)")
"""The same for a search in a text, in linear time: it tries a name only from its first character."""
_STRING_OR_BRACKET_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|(?P<open>\\?\Z))|[()\[\]]', re.DOTALL)
"""Matches a whole string of JSON, a string that does not end (with the group "open"), or a bracket outside of them."""
_QUOTE_OR_BRACKET_PATTERN = re.compile(r'["()\[\]]')


def find_input_end(text: str, name_start: int = 0) -> int | None:
    """Find the offset from which the closing marker of a call is to be searched.

    Args:
        text: The text that contains the call.
        name_start: The offset at which the call's name begins.

    Returns:
        `name_start` for an input without named arguments, such as "QA(Who?)". With named arguments:

        - the offset after their ")", which is 12 for 'W(city="a]") -> b'
        - the offset of a "]" that closes no list, where the call breaks off: 8 for "W(days=1] b"
        - `name_start` if another bracket shows that they are not JSON, as in "W(days=f(1))"
        - None if the text ends before any such bracket, as in 'W(city="a]'
    """
    opening = NAMED_CALL_PATTERN.match(text, name_start)
    if opening is None:  # no named arguments
        return name_start

    open_lists = 0
    for string_or_bracket in _STRING_OR_BRACKET_PATTERN.finditer(text, opening.end()):
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
                return name_start
    return None


def find_text_after_input(searched_text: str, text: str, name_start: int = 0) -> int:
    """Find the first `searched_text`, such as "]" or "->", after the input of a call.

    In 'W(to="a -> b") -> c' the first "->" is part of the input, so the result is 15, the offset of the second.

    Args:
        searched_text: The text to search for.
        text: The text that contains the call.
        name_start: The offset at which the call's name begins.

    Returns:
        The offset of `searched_text`, or -1 if it does not occur or the input does not end.
    """
    input_end = find_input_end(text, name_start)
    if input_end is None:
        return -1
    return text.find(searched_text, input_end)


def find_input_ends(text: str, name_starts: Collection[int]) -> dict[int, int | None]:
    """Find, for each call in a text, the offset from which its closing marker is to be searched.

    This is `find_input_end` for many calls, in linear time. A loop over `find_input_end` could read a long string once
    per call.

    Example:
        find_input_ends('[W(city="a]")] [QA(Who?)]', [1, 16])  # {1: 13, 16: 16}: after the ")" of W, at the name QA

    Args:
        text: The text that contains the calls.
        name_starts: The offsets at which the names of the calls begin.

    Returns:
        An offset for each of `name_starts`, or None if the named arguments of this call do not end.
    """
    # For inputs without named arguments, the search begins at the name.
    ends: dict[int, int | None] = {name_start: name_start for name_start in name_starts}

    matches = [NAMED_CALL_PATTERN.match(text, name_start) for name_start in name_starts]
    named_calls = [match for match in matches if match is not None]
    argument_starts = [match.end() for match in named_calls]

    brackets_by_offset = _find_deciding_brackets(text, argument_starts)
    for match in named_calls:
        name_start = match.start()
        deciding_bracket = brackets_by_offset[match.end()]
        ends[name_start] = _find_arguments_end(deciding_bracket, name_start)
    return ends


class _Bracket(NamedTuple):
    """The deciding bracket after an offset of a text: it decides where arguments that begin at this offset end.

    It is the first bracket after the offset that stands in no string and belongs to no list such as `[1, 2]`.
    """

    symbol: str  # "]", "(" or ")"; "" for the end of the text
    position: int  # its offset in the text
    open_brackets: int = 0  # how many "[" before it are not closed
    bracket_after: "_Bracket | None" = None  # for a "]", the deciding bracket after it


def _find_arguments_end(deciding_bracket: _Bracket, name_start: int) -> int | None:
    """Find out where the named arguments of a call end.

    Args:
        deciding_bracket: The first bracket after the beginning of the arguments that is not in a string or part of a
            list such as `[1, 2]`. Its `open_brackets` are the "[" between the beginning and it that are not closed.
            A "]" has none, because it would close them.
        name_start: The offset at which the call's name begins.

    Returns:
        The offset after the end. None if the arguments do not end, and `name_start` if the bracket shows that these
        are no named arguments.
    """
    match deciding_bracket.symbol:
        case "":  # W(days=1, where the text ends
            return None
        case "]":  # W(days=1], where the call breaks off
            return deciding_bracket.position
        case ")" if not deciding_bracket.open_brackets:  # W(days=1)
            return deciding_bracket.position + 1
    return name_start  # W(days=f(1) or W(days=[1), which is no JSON


def _find_deciding_brackets(text: str, offsets: Collection[int]) -> dict[int, _Bracket]:
    """Find, for each offset, the bracket that decides where arguments that begin there end.

    This is the first bracket after the offset that is not in a string or part of a list. For offset 0 of
    'city="(]", days=[1, 2])' it is the ")" at the end. The text is read only once, backwards.

    Args:
        text: The text.
        offsets: Offsets in the text, none of them inside a string.

    Returns:
        The bracket for each offset.
    """
    if not offsets:
        return {}

    remaining_offsets = sorted(offsets)
    brackets: dict[int, _Bracket] = {}
    scan = _BackwardScan(text)  # its position moves from the end of the text to the front

    positions = [match.start() for match in _QUOTE_OR_BRACKET_PATTERN.finditer(text)]
    for position in reversed(positions):
        # The scan stands before the next quote or bracket to the right. Nothing counts between this position and that
        # one, so the scan's deciding bracket is that of all offsets in between, which are outside of strings.
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

    Whether the current position is inside a string shows only further to the front. So both answers are kept.

    Attributes:
        bracket_if_outside: The deciding bracket after the current position, if this is outside of strings.
        bracket_if_inside: The same, if the current position is inside a string.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.bracket_if_outside = _Bracket("", len(text))
        self.bracket_if_inside = self.bracket_if_outside

    def step_before(self, position: int) -> None:
        """Move before the quote or bracket at `position`, and update the deciding bracket.

        The deciding bracket is the first bracket after the current position that is neither in a string nor part of a
        list such as `[1, 2]`. It is `bracket_if_outside` or `bracket_if_inside`, depending on whether the position is
        inside a string, which is not known yet. In a string brackets are mere text, so a bracket changes only
        `bracket_if_outside`.

        On the way back through `[1, 2])`, the deciding bracket outside of strings is:

        - before ")": this ")"
        - before "]": this "]", whose `bracket_after` is the ")"
        - before "[": the ")" again, because the list is skipped

        In `[1)` it is the ")" before "[" too, now with 1 as `open_brackets`: one "[" before it is not closed.

        Args:
            position: The offset of the next quote or bracket towards the beginning of the text.
        """
        symbol = self._text[position]
        next_bracket = self.bracket_if_outside  # the deciding bracket right after this quote or bracket

        match symbol:
            case '"':
                self._step_before_quote(position)
            case "[" if next_bracket.bracket_after is not None:
                # The next bracket is the "]" that closes this list, so the list is skipped.
                self.bracket_if_outside = next_bracket.bracket_after
            case "[":
                self.bracket_if_outside = next_bracket._replace(open_brackets=next_bracket.open_brackets + 1)
            case "]":
                # This bracket decides, unless a "[" before it makes it the end of a list. Then the next one decides.
                self.bracket_if_outside = _Bracket(symbol, position, bracket_after=next_bracket)
            case _:  # "(" or ")"
                self.bracket_if_outside = _Bracket(symbol, position)

    def _step_before_quote(self, position: int) -> None:
        """Move before a quote, where a string begins or ends, and update both brackets.

        A quote has the inside of a string on one side only: if the position before it is outside, the one after it is
        inside, and the other way round. So `bracket_if_outside` and `bracket_if_inside` are swapped. Only an escaped
        quote does not end a string: after it the position is inside in both cases.

        On the way back through `")")`, whose first ")" is in a string, the last ")" is:

        - before itself: `bracket_if_outside`
        - before the second quote: `bracket_if_inside`, and still so before the first ")", which is then the other one
        - before the first quote: `bracket_if_outside` again, so it decides, and not the ")" in the string
        """
        bracket_outside_after_quote = self.bracket_if_outside
        self.bracket_if_outside = self.bracket_if_inside
        if not _is_quote_escaped(self._text, position):
            self.bracket_if_inside = bracket_outside_after_quote


def _is_quote_escaped(text: str, quote_offset: int) -> bool:
    """Check whether a quote inside a string is escaped, which is so after an odd number of backslashes."""
    first_backslash = quote_offset
    while first_backslash and text[first_backslash - 1] == "\\":
        first_backslash -= 1

    backslash_count = quote_offset - first_backslash
    return backslash_count % 2 == 1
