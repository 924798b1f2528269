"""Read a list of calls as Python writes them, such as `[Weather(city="Oslo"), Time(zone="UTC")]`.

ToolACE records calls so. Names of tools may have spaces there, which is why Python's own parser reads the arguments
alone.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import Span
from toolformer_dag.conversations.plain_values import LONGEST_LITERAL
from toolformer_dag.conversations.shapes import FoundCall

SEPARATORS = (",", "]")
"""What stands behind a call in such a list."""


class PythonCall(NamedTuple):
    """A call of a list, and the stretch of the text that it takes, with the comma behind it."""

    found: FoundCall
    span: Span


class NotPython(ValueError):
    """A text that is no list of calls as Python writes them."""


def python_calls(text: str) -> list[PythonCall]:
    """Return the calls of a text that is a list of them in brackets and nothing else; an empty list for other texts.

    Arguments are named literals. A comma behind the last call is passed over. A single call takes the whole text.
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
    """Yield the calls of `[a(x=1), b(y=2)]`. Raises NotPython.

    offset: where the expression begins in the text, from which stretches count.
    """
    position = 1  # behind the opening bracket
    while expression[position:-1].strip():
        opening = expression.find("(", position)
        closing = _closing_bracket(expression, opening)
        if opening < 0 or closing < 0:
            raise NotPython
        tool = expression[position:opening].strip()
        separator = expression[closing + 1 : closing + 2]
        if not tool or separator not in SEPARATORS:
            raise NotPython
        found = FoundCall(tool, _named_literals(expression[opening : closing + 1]), None)
        end = closing + 2 if separator == "," else closing + 1
        yield PythonCall(found, (offset + position, offset + end))
        position = end


def _closing_bracket(expression: str, opening: int) -> int:
    """Return where the bracket at `opening` is closed, outside of quoted text; -1 where it is not."""
    depth = 0
    quote = ""  # the mark of the quotation that is open
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
    """Return the arguments between brackets by name: {"city": "Oslo", "days": 3} for `(city="Oslo", days=3)`.

    Raises NotPython where one has no name or is no literal.
    """
    tree: ast.expr | None = None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(f"f{brackets}", mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args:
        raise NotPython
    arguments: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:  # **others
            raise NotPython
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError) as error:
            raise NotPython from error
    return arguments
