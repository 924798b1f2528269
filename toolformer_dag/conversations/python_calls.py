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


class PythonCall(NamedTuple):
    """A call of a list, and its span in the text, with the comma behind it."""

    fields: FoundCall
    span: Span


class NotPython(ValueError):
    """A text that is no list of calls in Python's notation."""


def python_calls(text: str) -> list[PythonCall]:
    """Return the calls of a text such as `[a(x=1), b(y=2)]`; an empty list for a text that holds anything else.

    Arguments are named literals. The span of a single call is the whole text.
    """
    expression = text.strip()
    is_in_brackets = expression.startswith("[") and expression.endswith("]")
    if not is_in_brackets or len(expression) > LONGEST_LITERAL:
        return []
    try:
        calls = list(_calls_of(expression, offset=text.index(expression)))
    except NotPython:
        return []
    if len(calls) == 1:
        return [calls[0]._replace(span=(0, len(text)))]
    return calls


def _calls_of(expression: str, offset: int) -> Iterator[PythonCall]:
    """Yield the calls of `[a(x=1), b(y=2)]`; a comma may follow the last. Raises NotPython.

    offset: where the expression begins in the text, for the spans.
    """
    start = 1  # behind the opening bracket
    while expression[start:-1].strip():
        found = _next_call(expression, start)
        _, end = found.span
        yield found._replace(span=(offset + start, offset + end))
        start = end


def _next_call(expression: str, start: int) -> PythonCall:
    """Return the first call from `start` on, with the comma after it in its span.

    Raises NotPython where there is none, or where an argument is no named literal.
    """
    opening = expression.find("(", start)
    closing = _closing_bracket(expression, opening)
    if opening < 0 or closing < 0:
        raise NotPython
    tool = expression[start:opening].strip()
    separator = expression[closing + 1 : closing + 2]
    if not tool or separator not in SEPARATORS:
        raise NotPython
    arguments = _named_literals(expression[opening : closing + 1])
    end = closing + 1 + (separator == ",")
    return PythonCall(FoundCall(tool, arguments, id=None), span=(start, end))


def _closing_bracket(expression: str, opening: int) -> int:
    """Return the position where the bracket at `opening` is closed, outside of quotes; -1 where it is not."""
    depth = 0
    quote = ""  # the quotation mark that is open
    position = opening
    while 0 <= position < len(expression):
        character = expression[position]
        if character == "\\":
            position += 1  # the next character is escaped
        elif quote:
            if character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return -1


def _named_literals(brackets: str) -> dict[str, Any]:
    """Return arguments in brackets by name: {"city": "Oslo", "days": 3} for `(city="Oslo", days=3)`.

    Raises NotPython where an argument has no name or is no literal.
    """
    call = _parsed_call(brackets)
    if call.args:
        raise NotPython
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # **others
            raise NotPython
        arguments[keyword.arg] = _literal(keyword.value)
    return arguments


def _parsed_call(brackets: str) -> ast.Call:
    """Return the syntax tree of a call with the arguments in these brackets. Raises NotPython."""
    tree: ast.expr | None = None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(f"f{brackets}", mode="eval").body  # a call needs a function: f
    if not isinstance(tree, ast.Call):
        raise NotPython
    return tree


def _literal(expression: ast.expr) -> Any:
    """Return the value of a literal. Raises NotPython for any other expression."""
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPython from error
