"""Read lists of calls in Python's notation, such as `[Weather(city="Oslo"), Time(zone="UTC")]` in ToolACE.

Names of tools may contain spaces there, so Python's own parser reads the arguments only.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import TextSpan
from toolformer_dag.conversations.plain_values import MAX_LITERAL_LENGTH
from toolformer_dag.conversations.shapes import FoundCall

CALL_SEPARATORS = (",", "]")
"""Characters that may follow a call in such a list."""
QUOTES = "'\""
OPENING_BRACKETS = "([{"
CLOSING_BRACKETS = ")]}"


class PythonCall(NamedTuple):
    """A call of a list in Python's notation.

    Attributes:
        span: The start and end of the call in the text, with the comma behind it.
    """

    found_call: FoundCall
    span: TextSpan

    def shift_span(self, offset: int) -> "PythonCall":
        """Return the call with its span moved by this many characters."""
        start, end = self.span
        return self._replace(span=(start + offset, end + offset))


class NotPythonCalls(ValueError):
    """A text that is no list of calls in Python's notation."""


def parse_python_calls(text: str) -> list[PythonCall]:
    """Parse a text that is a list of calls in Python's notation, such as `[a(x=1), b(y=2)]`.

    The arguments have to be named literals.

    Returns:
        The calls, or an empty list if the text is anything else. The span of a single call is the whole text.
    """
    expression = text.strip()
    if not _may_be_call_list(expression):
        return []

    expression_start = text.index(expression)
    try:
        calls = [call.shift_span(expression_start) for call in _iter_python_calls(expression)]
    except NotPythonCalls:
        return []

    if len(calls) == 1:
        whole_span = (0, len(text))
        return [calls[0]._replace(span=whole_span)]
    return calls


def _may_be_call_list(expression: str) -> bool:
    """Return whether an expression stands in square brackets and is short enough to be read."""
    is_in_brackets = expression.startswith("[") and expression.endswith("]")
    return is_in_brackets and len(expression) <= MAX_LITERAL_LENGTH


def _iter_python_calls(expression: str) -> Iterator[PythonCall]:
    """Parse the calls of a list such as `[a(x=1), b(y=2)]`. A comma may follow the last one.

    Yields:
        The calls. The span of each contains the comma behind it, so that the next call begins where it ends.

    Raises:
        NotPythonCalls: The text is no such list.
    """
    call_start = 1  # behind the opening bracket of the list
    while expression[call_start:-1].strip():  # something is left before the closing bracket
        call = _parse_next_call(expression, call_start)
        yield call
        _, call_end = call.span
        call_start = call_end


def _parse_next_call(expression: str, start: int) -> PythonCall:
    """Parse the first call of a list such as `[a(x=1), b(y=2)]` from an offset on.

    Args:
        expression: The list of calls.
        start: The offset at which the call begins.

    Returns:
        The call. Its span contains the comma behind it.

    Raises:
        NotPythonCalls: No call stands there, an argument is no named literal, or the call is not followed by a comma or
            by the last bracket.
    """
    arguments_start = expression.find("(", start)
    if arguments_start < 0:
        raise NotPythonCalls
    arguments_end = _find_closing_bracket_end(expression, arguments_start)

    tool = expression[start:arguments_start].strip()
    if not tool:
        raise NotPythonCalls

    separator_end = _find_separator_end(expression, arguments_end)
    arguments = _parse_keyword_arguments(expression[arguments_start:arguments_end])
    found_call = FoundCall(tool, arguments, id=None)
    return PythonCall(found_call, span=(start, separator_end))


def _find_separator_end(expression: str, call_end: int) -> int:
    """Find the offset behind the comma that follows a call.

    Args:
        expression: The list of calls.
        call_end: The offset behind the call.

    Returns:
        The offset behind the comma, or `call_end` itself if the last bracket stands there.

    Raises:
        NotPythonCalls: Neither a comma nor the bracket stands there.
    """
    separator = expression[call_end : call_end + 1]
    if separator not in CALL_SEPARATORS:
        raise NotPythonCalls
    return call_end + 1 if separator == "," else call_end


def _find_closing_bracket_end(expression: str, opening_position: int) -> int:
    """Find the end of an expression in brackets.

    Args:
        expression: The text with the brackets.
        opening_position: The offset of the opening bracket.

    Returns:
        The offset behind the bracket that closes it.

    Raises:
        NotPythonCalls: The bracket is not closed.
    """
    depth = 0  # how many brackets are open
    for position in _iter_bracket_positions(expression, opening_position):
        is_opening = expression[position] in OPENING_BRACKETS
        depth += 1 if is_opening else -1
        if depth == 0:
            return position + 1
    raise NotPythonCalls


def _iter_bracket_positions(expression: str, start: int) -> Iterator[int]:
    """Find the brackets in an expression, except those in quoted text.

    Yields:
        The offsets of opening and closing brackets of any kind, from `start` on.
    """
    open_quote = ""  # the quotation mark that began the quoted text at this position, or "" outside of quoted text
    position = start
    while position < len(expression):
        character = expression[position]
        if character == "\\":
            position += 1  # the next character is escaped, so it is skipped
        elif open_quote:
            if character == open_quote:
                open_quote = ""
        elif character in QUOTES:
            open_quote = character
        elif character in OPENING_BRACKETS or character in CLOSING_BRACKETS:
            yield position
        position += 1


def _parse_keyword_arguments(bracketed_arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call.

    Args:
        bracketed_arguments: The arguments in brackets, such as `(city="Oslo", days=3)`.

    Returns:
        The values by the names of the arguments, such as {"city": "Oslo", "days": 3}.

    Raises:
        NotPythonCalls: An argument has no name or is no literal, or the text is not Python.
    """
    call = _parse_call_syntax(bracketed_arguments)
    if call.args:  # arguments without names
        raise NotPythonCalls

    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # such as **options
            raise NotPythonCalls
        arguments[keyword.arg] = _parse_literal(keyword.value)
    return arguments


def _parse_call_syntax(bracketed_arguments: str) -> ast.Call:
    """Parse a call with the arguments in these brackets, such as `(city="Oslo")`, to its syntax tree.

    Raises:
        NotPythonCalls: Python cannot parse the text, or it is no call.
    """
    expression: ast.expr | None = None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        # Python parses a call only with the name of a function before the brackets: any name will do.
        expression = ast.parse(f"f{bracketed_arguments}", mode="eval").body

    if not isinstance(expression, ast.Call):
        raise NotPythonCalls
    return expression


def _parse_literal(expression: ast.expr) -> Any:
    """Return the value of a literal, such as 3 or ["a"].

    Raises:
        NotPythonCalls: The expression is anything but a literal.
    """
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPythonCalls from error
