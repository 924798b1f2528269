"""Read lists of calls in Python's notation, such as `[Weather(city="Oslo"), Time(zone="UTC")]` in ToolACE.

Names of tools may contain spaces there, so Python's own parser reads the arguments only.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import Span
from toolformer_dag.conversations.plain_values import LONGEST_LITERAL
from toolformer_dag.conversations.shapes import FoundCall

SEPARATORS = (",", "]")
"""Characters that may follow a call in such a list."""
QUOTES = "'\""
OPENING_BRACKETS = "([{"
CLOSING_BRACKETS = ")]}"


class PythonCall(NamedTuple):
    """A call of a list, and its span in the text, with the comma behind it."""

    fields: FoundCall
    span: Span

    def moved_by(self, offset: int) -> "PythonCall":
        """Return the call with its span moved by this many characters."""
        start, end = self.span
        return self._replace(span=(start + offset, end + offset))


class NotPython(ValueError):
    """A text that is no list of calls in Python's notation."""


def python_calls(text: str) -> list[PythonCall]:
    """Parse a text that is a list of calls in Python's notation, such as `[a(x=1), b(y=2)]`.

    The arguments have to be named literals.

    Returns:
        The calls, or an empty list if the text is anything else. The span of a single call is the whole text.
    """
    expression = text.strip()
    if not _may_be_list(expression):
        return []

    offset = text.index(expression)
    try:
        calls = [call.moved_by(offset) for call in _iter_calls(expression)]
    except NotPython:
        return []

    if len(calls) == 1:
        return [calls[0]._replace(span=(0, len(text)))]
    return calls


def _may_be_list(expression: str) -> bool:
    """Return whether an expression stands in square brackets and is short enough to be read."""
    is_in_brackets = expression.startswith("[") and expression.endswith("]")
    return is_in_brackets and len(expression) <= LONGEST_LITERAL


def _iter_calls(expression: str) -> Iterator[PythonCall]:
    """Parse the calls of a list such as `[a(x=1), b(y=2)]`. A comma may follow the last one.

    Yields:
        The calls. The span of each contains the comma behind it, so that the next call begins where it ends.

    Raises:
        NotPython: The text is no such list.
    """
    start = 1  # behind the opening bracket
    while expression[start:-1].strip():  # something is left before the closing bracket
        call = _parse_next_call(expression, start)
        yield call
        _, call_end = call.span
        start = call_end


def _parse_next_call(expression: str, start: int) -> PythonCall:
    """Parse the first call from an offset on.

    Returns:
        The call. Its span contains the comma behind it.

    Raises:
        NotPython: No call stands there, an argument is no named literal, or the call is not followed by a comma or by
            the last bracket.
    """
    opening = expression.find("(", start)
    if opening < 0:
        raise NotPython
    arguments_end = _find_brackets_end(expression, opening)
    tool = expression[start:opening].strip()
    if not tool:
        raise NotPython

    separator_end = _find_separator_end(expression, arguments_end)
    arguments = _parse_named_literals(expression[opening:arguments_end])
    return PythonCall(FoundCall(tool, arguments, id=None), span=(start, separator_end))


def _find_separator_end(expression: str, position: int) -> int:
    """Find the offset behind the comma that follows a call.

    Args:
        expression: The list of calls.
        position: The offset behind the call.

    Returns:
        The offset behind the comma, or `position` itself if the last bracket stands there.

    Raises:
        NotPython: Neither a comma nor the bracket stands there.
    """
    separator = expression[position : position + 1]
    if separator not in SEPARATORS:
        raise NotPython
    return position + 1 if separator == "," else position


def _find_brackets_end(expression: str, opening: int) -> int:
    """Return the offset behind the bracket that closes the one at `opening`. Raises NotPython where none does."""
    depth = 0
    for position in _iter_bracket_positions(expression, opening):
        depth += 1 if expression[position] in OPENING_BRACKETS else -1
        if depth == 0:
            return position + 1
    raise NotPython


def _iter_bracket_positions(expression: str, start: int) -> Iterator[int]:
    """Find the brackets in an expression, except those in quoted text.

    Yields:
        The offsets of brackets of any kind, from `start` on.
    """
    open_quote = ""  # the quotation mark of the text in which the position is; "" outside of texts
    position = start
    while position < len(expression):
        character = expression[position]
        if character == "\\":
            position += 1  # the next character is escaped
        elif open_quote:
            if character == open_quote:
                open_quote = ""
        elif character in QUOTES:
            open_quote = character
        elif character in OPENING_BRACKETS or character in CLOSING_BRACKETS:
            yield position
        position += 1


def _parse_named_literals(brackets: str) -> dict[str, Any]:
    """Parse the arguments of a call.

    Args:
        brackets: The arguments in brackets, such as `(city="Oslo", days=3)`.

    Returns:
        The values by the names of the arguments, such as {"city": "Oslo", "days": 3}.

    Raises:
        NotPython: An argument has no name or is no literal.
    """
    call = _parse_call(brackets)
    if call.args:
        raise NotPython

    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # **others
            raise NotPython
        arguments[keyword.arg] = _parse_literal(keyword.value)
    return arguments


def _parse_call(brackets: str) -> ast.Call:
    """Return the syntax tree of a call with the arguments in these brackets. Raises NotPython."""
    tree: ast.expr | None = None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(f"f{brackets}", mode="eval").body  # a call needs a function: f
    if not isinstance(tree, ast.Call):
        raise NotPython
    return tree


def _parse_literal(expression: ast.expr) -> Any:
    """Return the value of a literal. Raises NotPython for any other expression."""
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPython from error
