"""Read the calls that stand between a pair of marks, in whatever form a model writes them there.

The forms are tried in turn: JSON, `<function=...>`, `<invoke name="...">`, GLM's keys and values, JSON line by line.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import Marks, enclosed, enclosed_bodies
from toolformer_dag.conversations.plain_values import parsed
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundCall, listed_call

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
"""Opening marks that name a tool, with the tool and the name of its only argument."""


class BodyCall(NamedTuple):
    """A call between marks, and the path to it in what stands there; () where it is the whole of that."""

    found: FoundCall
    path: Path


def calls_in(body: str, opening: str) -> list[BodyCall]:
    """Return the calls that stand between a pair of marks; an empty list where they cannot be read.

    body: what stands there. opening: the mark before it. One call that cannot be read makes the whole unreadable.
    """
    if opening in ONE_WORD_TOOLS:
        return _one_word_call(body, opening)
    opened = parsed(body.strip())
    if opened is not None:
        return _json_calls(opened)
    for read in (_tagged_functions, _tagged_invocations, _glm_call, _json_lines):
        calls = read(body)
        if calls:
            return calls
    return []


def _one_word_call(body: str, opening: str) -> list[BodyCall]:
    """Read `Oslo weather` between `<search>` marks as a call of the tool search with that query."""
    words = body.strip()
    if not words:
        return []
    tool, argument = ONE_WORD_TOOLS[opening]
    return [BodyCall(FoundCall(tool, {argument: words}, None), ())]


def _json_calls(opened: object) -> list[BodyCall]:
    """Read a call, or a list of calls, from opened JSON; none where one of them is no call."""
    items = opened if isinstance(opened, list) else [opened]
    calls = []
    for index, item in enumerate(items):
        found = listed_call(item)
        if found is None:
            return []
        calls.append(BodyCall(found, (None, index)))  # None: open the JSON
    return calls


def _tagged_functions(body: str) -> list[BodyCall]:
    """Read every `<function=...>...</function>` that can be read."""
    return list(_tagged_calls(body, FUNCTION, function_call))


def _tagged_invocations(body: str) -> list[BodyCall]:
    """Read every `<invoke name="...">...</invoke>` that can be read."""
    return list(_tagged_calls(body, INVOKE, _invoke_call))


def _tagged_calls(body: str, marks: Marks, read: Callable[[str], FoundCall | None]) -> Iterator[BodyCall]:
    """Yield the calls between such marks. read: returns the call of what stands between them, or None."""
    for pair in enclosed(body, marks):
        found = read(pair.body(body))
        if found is not None:
            yield BodyCall(found, (pair.span,))


def function_call(body: str) -> FoundCall | None:
    """Read `search><parameter=query>Oslo</parameter>`, or `search>{"query": "Oslo"}`; None for anything else.

    body: what stands between the marks FUNCTION.
    """
    tool, closed, rest = body.partition(">")
    if not closed or not tool.strip():
        return None
    opened = parsed(rest.strip())
    if isinstance(opened, dict):
        return FoundCall(tool.strip(), opened, None)
    return FoundCall(tool.strip(), _named_values(rest, PARAMETER, ">"), None)


def _invoke_call(body: str) -> FoundCall | None:
    """Read `search"><parameter name="query">Oslo</parameter>`; None for anything else.

    body: what stands between the marks INVOKE.
    """
    tool, closed, rest = body.partition('">')
    if not closed or not tool.strip():
        return None
    return FoundCall(tool.strip(), _named_values(rest, INVOKE_PARAMETER, '">'), None)


def _named_values(text: str, marks: Marks, separator: str) -> dict[str, Any]:
    """Return the arguments between marks: {"query": "Oslo"} for `<parameter=query>Oslo</parameter>`.

    separator: what stands between the name and the value, as ">".
    """
    values: dict[str, Any] = {}
    for parameter in enclosed_bodies(text, marks):
        name, _, value = parameter.partition(separator)
        values[name.strip()] = value.strip("\n")
    return values


def _glm_call(body: str) -> list[BodyCall]:
    """Read `search<arg_key>query</arg_key><arg_value>Oslo</arg_value>`, as GLM writes a call."""
    tool, has_arguments, _ = body.partition(GLM_KEY.opening)
    if not has_arguments or not tool.strip():
        return []
    keys = [key.strip() for key in enclosed_bodies(body, GLM_KEY)]
    values = enclosed_bodies(body, GLM_VALUE)
    if len(keys) != len(values):
        return []
    arguments = dict(zip(keys, values, strict=True))
    return [BodyCall(FoundCall(tool.strip(), arguments, None), ())]


def _json_lines(body: str) -> list[BodyCall]:
    """Read a call in JSON per line; none where a line holds something else."""
    calls = []
    position = 0
    for line in body.splitlines(keepends=True):
        end = position + len(line)
        if line.strip():
            found = listed_call(parsed(line.strip()))
            if found is None:
                return []
            calls.append(BodyCall(found, ((position, end),)))
        position = end
    return calls
