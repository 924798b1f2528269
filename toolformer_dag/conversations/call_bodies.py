"""Read the calls that a model has written between a pair of marks such as `<tool_call>` and `</tool_call>`.

These forms are tried in turn: JSON, `<function=...>`, `<invoke name="...">`, GLM's keys and values, a JSON per line.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import Marks, iter_mark_pairs, list_enclosed_bodies
from toolformer_dag.conversations.plain_values import parse_json
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundCall, parse_listed_call

FUNCTION = Marks("<function=", "</function>")
"""`<function=search><parameter=query>Oslo</parameter></function>`, as Qwen3-Coder and Llama write calls."""
PARAMETER = Marks("<parameter=", "</parameter>")
INVOKE = Marks('<invoke name="', "</invoke>")
"""`<invoke name="search"><parameter name="query">Oslo</parameter></invoke>`"""
INVOKE_PARAMETER = Marks('<parameter name="', "</parameter>")
GLM_KEY = Marks("<arg_key>", "</arg_key>")
"""`search<arg_key>query</arg_key><arg_value>Oslo</arg_value>`"""
GLM_VALUE = Marks("<arg_value>", "</arg_value>")
ONE_WORD_TOOLS = {"<search>": ("search", "query")}
"""The tool and the name of its only argument, by the opening mark that stands for the tool."""


class BodyCall(NamedTuple):
    """A call between marks, and the path to it in the text there; () where it is the whole text."""

    fields: FoundCall
    path: Path


def parse_call_body(body: str, opening: str) -> list[BodyCall]:
    """Parse the calls in a text between marks such as `<tool_call>` and `</tool_call>`.

    Args:
        body: The text between the marks.
        opening: The mark before the text. Marks such as `<search>` name the tool themselves.

    Returns:
        The calls, or an empty list if they cannot be read.
    """
    if opening in ONE_WORD_TOOLS:  # `<search>`: the text is the query
        return _parse_one_word_call(body, opening)

    json_value = parse_json(body.strip())  # None for a text that is no JSON
    if json_value is not None:
        return _parse_json_calls(json_value)

    readers = (
        _parse_function_tags,  # <function=search>...</function>
        _parse_invoke_tags,  # <invoke name="search">...</invoke>
        _parse_glm_call,  # search<arg_key>query</arg_key><arg_value>Oslo</arg_value>
        _parse_json_lines,  # {"name": "search", ...} in each line
    )
    for read in readers:
        calls = read(body)
        if calls:
            return calls
    return []


def _parse_one_word_call(body: str, opening: str) -> list[BodyCall]:
    """Return the call that `Oslo weather` between `<search>` marks stands for: search with that query."""
    words = body.strip()
    if not words:
        return []
    tool, argument = ONE_WORD_TOOLS[opening]
    call = FoundCall(tool, {argument: words}, id=None)
    return [BodyCall(call, path=())]


def _parse_json_calls(json_value: object) -> list[BodyCall]:
    """Parse a call, or a list of calls, from the value that JSON holds.

    Returns:
        The calls, or an empty list if an item is no call. Each has a path, such as (None, 1) for the second call of a
        list, where None opens the JSON. A single call has an index too, but its path is not used.
    """
    items = json_value if isinstance(json_value, list) else [json_value]
    calls = []
    for index, item in enumerate(items):
        call = parse_listed_call(item)
        if call is None:
            return []
        calls.append(BodyCall(call, path=(None, index)))
    return calls


def _parse_function_tags(body: str) -> list[BodyCall]:
    """Return every readable `<function=...>...</function>`."""
    return list(_iter_tagged_calls(body, FUNCTION, function_call))


def _parse_invoke_tags(body: str) -> list[BodyCall]:
    """Return every readable `<invoke name="...">...</invoke>`."""
    return list(_iter_tagged_calls(body, INVOKE, _parse_invoke_body))


def _iter_tagged_calls(body: str, marks: Marks, read: Callable[[str], FoundCall | None]) -> Iterator[BodyCall]:
    """Parse the calls between pairs of marks.

    Args:
        body: The text.
        marks: The marks around each call.
        read: Parses the text between two marks. It returns None if that is no call.

    Yields:
        The calls that could be parsed.
    """
    for pair in iter_mark_pairs(body, marks):
        call = read(pair.body(body))
        if call is not None:
            yield BodyCall(call, path=(pair.span,))


def function_call(body: str) -> FoundCall | None:
    """Parse a call such as `search><parameter=query>Oslo</parameter>` or `search>{"query": "Oslo"}`.

    Args:
        body: The text between the marks FUNCTION.

    Returns:
        The call, or None if the text does not begin with the name of a tool and ">".
    """
    tool, closed, rest = body.partition(">")
    if not closed or not tool.strip():
        return None

    arguments = parse_json(rest.strip())
    if not isinstance(arguments, dict):
        arguments = _parse_tagged_arguments(rest, PARAMETER, separator=">")
    return FoundCall(tool.strip(), arguments, id=None)


def _parse_invoke_body(body: str) -> FoundCall | None:
    """Parse a call such as `search"><parameter name="query">Oslo</parameter>`.

    Args:
        body: The text between the marks INVOKE.

    Returns:
        The call, or None if the text does not begin with the name of a tool and `">`.
    """
    tool, closed, rest = body.partition('">')
    if not closed or not tool.strip():
        return None
    arguments = _parse_tagged_arguments(rest, INVOKE_PARAMETER, separator='">')
    return FoundCall(tool.strip(), arguments, id=None)


def _parse_tagged_arguments(text: str, marks: Marks, separator: str) -> dict[str, Any]:
    """Parse arguments that are written between marks, such as `<parameter=query>Oslo</parameter>`.

    Args:
        text: The text with the arguments.
        marks: The marks around each argument.
        separator: The text between the name and the value of an argument, such as ">".

    Returns:
        The values by the names, such as {"query": "Oslo"}.
    """
    values: dict[str, Any] = {}
    for parameter in list_enclosed_bodies(text, marks):
        name, _, value = parameter.partition(separator)
        values[name.strip()] = value.strip("\n")
    return values


def _parse_glm_call(body: str) -> list[BodyCall]:
    """Parse a call of GLM: `search<arg_key>query</arg_key><arg_value>Oslo</arg_value>`.

    Returns:
        A list with the call, or an empty list for any other text.
    """
    tool, has_arguments, _ = body.partition(GLM_KEY.opening)
    if not has_arguments or not tool.strip():
        return []

    arguments = _parse_glm_arguments(body)
    if arguments is None:
        return []

    call = FoundCall(tool.strip(), arguments, id=None)
    return [BodyCall(call, path=())]


def _parse_glm_arguments(body: str) -> dict[str, Any] | None:
    """Return the arguments of a call of GLM; None where keys and values do not match."""
    keys = [key.strip() for key in list_enclosed_bodies(body, GLM_KEY)]
    values = list_enclosed_bodies(body, GLM_VALUE)
    return dict(zip(keys, values, strict=True)) if len(keys) == len(values) else None


def _parse_json_lines(body: str) -> list[BodyCall]:
    """Parse a text with one call in JSON per line.

    Returns:
        The calls, or an empty list if a line that is not blank holds no call.
    """
    calls = []
    line_start = 0
    for line in body.splitlines(keepends=True):
        line_end = line_start + len(line)
        if line.strip():
            call = parse_listed_call(parse_json(line.strip()))
            if call is None:
                return []
            calls.append(BodyCall(call, path=((line_start, line_end),)))

        line_start = line_end
    return calls
