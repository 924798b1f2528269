"""Read the calls that a model has written between a pair of marks such as `<tool_call>` and `</tool_call>`.

These forms are tried in turn: JSON, `<function=...>`, `<invoke name="...">`, GLM's keys and values, a JSON per line.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import Marks, iter_mark_pairs, list_texts_between_marks
from toolformer_dag.conversations.plain_values import try_parse_json
from toolformer_dag.conversations.record_paths import RecordPath
from toolformer_dag.conversations.shapes import FoundCall, parse_listed_call

FUNCTION_MARKS = Marks("<function=", "</function>")
"""`<function=search><parameter=query>Oslo</parameter></function>`, as Qwen3-Coder and Llama write calls."""
PARAMETER_MARKS = Marks("<parameter=", "</parameter>")
INVOKE_MARKS = Marks('<invoke name="', "</invoke>")
"""`<invoke name="search"><parameter name="query">Oslo</parameter></invoke>`"""
INVOKE_PARAMETER_MARKS = Marks('<parameter name="', "</parameter>")
GLM_KEY_MARKS = Marks("<arg_key>", "</arg_key>")
"""`search<arg_key>query</arg_key><arg_value>Oslo</arg_value>`"""
GLM_VALUE_MARKS = Marks("<arg_value>", "</arg_value>")
TOOL_AND_ARGUMENT_BY_TAG = {"<search>": ("search", "query")}
"""The tool and the name of its only argument, by the opening mark that stands for the tool."""


class BodyCall(NamedTuple):
    """A call that a model has written between a pair of marks.

    Attributes:
        path_in_body: The path to the call in the text between the marks, which is () if it is the whole text.
    """

    found_call: FoundCall
    path_in_body: RecordPath


def parse_calls_between_marks(body: str, opening_mark: str) -> list[BodyCall]:
    """Parse the calls in a text between marks such as `<tool_call>` and `</tool_call>`.

    Args:
        body: The text between the marks.
        opening_mark: The mark before the text. Marks such as `<search>` name the tool themselves.

    Returns:
        The calls, or an empty list if they cannot be read.
    """
    if opening_mark in TOOL_AND_ARGUMENT_BY_TAG:  # `<search>`: the text is the query
        return _parse_search_call(body, opening_mark)

    json_value = try_parse_json(body.strip())  # None for a text that is no JSON
    if json_value is not None:
        return _parse_json_calls(json_value)

    parsers = (
        _parse_function_calls,  # <function=search>...</function>
        _parse_invoke_calls,  # <invoke name="search">...</invoke>
        _parse_glm_calls,  # search<arg_key>query</arg_key><arg_value>Oslo</arg_value>
        _parse_json_line_calls,  # {"name": "search", ...} in each line
    )
    for parse_calls in parsers:
        calls = parse_calls(body)
        if calls:
            return calls
    return []


def _parse_search_call(body: str, opening_mark: str) -> list[BodyCall]:
    """Parse the call that `<search>Oslo weather</search>` stands for: the tool `search` with that query.

    Args:
        body: The text between the marks, which is the query.
        opening_mark: The mark before it, which stands for the tool.

    Returns:
        A list with the call, or an empty list if the query is blank.
    """
    query = body.strip()
    if not query:
        return []

    tool, argument_name = TOOL_AND_ARGUMENT_BY_TAG[opening_mark]
    call = FoundCall(tool, {argument_name: query}, id=None)
    return [BodyCall(call, path_in_body=())]


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
        calls.append(BodyCall(call, path_in_body=(None, index)))
    return calls


def _parse_function_calls(body: str) -> list[BodyCall]:
    """List the calls such as `<function=search>...</function>` in a text, except those that cannot be read."""
    return list(_iter_tagged_calls(body, FUNCTION_MARKS, parse_function_call))


def _parse_invoke_calls(body: str) -> list[BodyCall]:
    """List the calls such as `<invoke name="search">...</invoke>` in a text, except those that cannot be read."""
    return list(_iter_tagged_calls(body, INVOKE_MARKS, _parse_invoke_call))


def _iter_tagged_calls(body: str, marks: Marks, parse_body: Callable[[str], FoundCall | None]) -> Iterator[BodyCall]:
    """Parse the calls between pairs of marks.

    Args:
        body: The text.
        marks: The marks around each call.
        parse_body: Parses the text between two marks. It returns None if that is no call.

    Yields:
        The calls that could be parsed.
    """
    for pair in iter_mark_pairs(body, marks):
        call = parse_body(pair.get_body(body))
        if call is not None:
            yield BodyCall(call, path_in_body=(pair.span,))


def parse_function_call(body: str) -> FoundCall | None:
    """Parse a call such as `search><parameter=query>Oslo</parameter>` or `search>{"query": "Oslo"}`.

    Args:
        body: The text between the marks FUNCTION_MARKS.

    Returns:
        The call, or None if the text does not begin with the name of a tool and ">".
    """
    tool, bracket, argument_text = body.partition(">")
    if not bracket or not tool.strip():
        return None

    arguments = try_parse_json(argument_text.strip())
    if not isinstance(arguments, dict):
        arguments = _parse_tagged_arguments(argument_text, PARAMETER_MARKS, name_separator=">")
    return FoundCall(tool.strip(), arguments, id=None)


def _parse_invoke_call(body: str) -> FoundCall | None:
    """Parse a call such as `search"><parameter name="query">Oslo</parameter>`.

    Args:
        body: The text between the marks INVOKE_MARKS.

    Returns:
        The call, or None if the text does not begin with the name of a tool and `">`.
    """
    tool, separator, argument_text = body.partition('">')
    if not separator or not tool.strip():
        return None

    arguments = _parse_tagged_arguments(argument_text, INVOKE_PARAMETER_MARKS, name_separator='">')
    return FoundCall(tool.strip(), arguments, id=None)


def _parse_tagged_arguments(text: str, argument_marks: Marks, name_separator: str) -> dict[str, Any]:
    """Parse arguments that are written between marks, such as `<parameter=query>Oslo</parameter>`.

    Args:
        text: The text with the arguments.
        argument_marks: The marks around each argument.
        name_separator: The text between the name and the value of an argument, such as ">".

    Returns:
        The values by the names, such as {"query": "Oslo"}.
    """
    values_by_name: dict[str, Any] = {}
    for name_and_value in list_texts_between_marks(text, argument_marks):
        name, _, value = name_and_value.partition(name_separator)
        values_by_name[name.strip()] = value.strip("\n")
    return values_by_name


def _parse_glm_calls(body: str) -> list[BodyCall]:
    """Parse a call of GLM: `search<arg_key>query</arg_key><arg_value>Oslo</arg_value>`.

    Returns:
        A list with the call, or an empty list for any other text.
    """
    tool, first_key_mark, _ = body.partition(GLM_KEY_MARKS.opening)
    if not first_key_mark or not tool.strip():
        return []

    arguments = _parse_glm_arguments(body)
    if arguments is None:
        return []

    call = FoundCall(tool.strip(), arguments, id=None)
    return [BodyCall(call, path_in_body=())]


def _parse_glm_arguments(body: str) -> dict[str, Any] | None:
    """Parse the arguments of a call of GLM: `<arg_key>query</arg_key><arg_value>Oslo</arg_value>`.

    Returns:
        The values by their keys, such as {"query": "Oslo"}, or None if there are not as many values as keys.
    """
    keys = [key.strip() for key in list_texts_between_marks(body, GLM_KEY_MARKS)]
    values = list_texts_between_marks(body, GLM_VALUE_MARKS)
    if len(keys) != len(values):
        return None
    return dict(zip(keys, values, strict=True))


def _parse_json_line_calls(body: str) -> list[BodyCall]:
    """Parse a text with one call in JSON per line.

    Returns:
        The calls, each with the path to its line, or an empty list if a line that is not blank holds no call.
    """
    calls = []
    line_end = 0
    for line in body.splitlines(keepends=True):
        line_start = line_end
        line_end = line_start + len(line)
        if not line.strip():
            continue

        call = parse_listed_call(try_parse_json(line.strip()))
        if call is None:
            return []
        line_span = (line_start, line_end)
        calls.append(BodyCall(call, path_in_body=(line_span,)))
    return calls
