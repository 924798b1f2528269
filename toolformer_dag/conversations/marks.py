"""Calls and results that stand in text, between marks, in conversations that have no fields for them.

Every scan goes forward with `str.find`, so that it is linear in the text whatever stands there.
"""

import ast
import json
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import LONGEST_LITERAL, parsed
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundCall, listed_call

Span = tuple[int, int]
"""The first character of a stretch of text, and the one after its last."""
THINKING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
)
CALL_TAGS = (
    ("<tool_call>", "</tool_call>"),
    ("<tool_calls>", "</tool_calls>"),
    ("<function_call>", "</function_call>"),
    ("<function_calls>", "</function_calls>"),
    ("<functioncall>", "</functioncall>"),
    ("<search>", "</search>"),
    ("[TOOL_CALLS]", "[/TOOL_CALLS]"),
    ("<|python_tag|>", "<|eom_id|>"),
)
"""What stands before and after a call in text; the second one may be missing at the end of a message."""
FUNCTION = ("<function=", "</function>")
"""Marks of a call whose tool stands in the mark: `<function=search><parameter=query>...</parameter></function>`."""
PARAMETER = ("<parameter=", "</parameter>")
INVOKE = ('<invoke name="', "</invoke>")
"""Marks of such a call with its parameters in `<parameter name="city">Oslo</parameter>`."""
INVOKE_PARAMETER = ('<parameter name="', "</parameter>")
GLM_KEY = ("<arg_key>", "</arg_key>")
GLM_VALUE = ("<arg_value>", "</arg_value>")
"""Marks of the names and the values of arguments, which follow the tool, as GLM writes them."""
OTHER_CALL_MARKS = (
    "<minimax:tool_call>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    " to=functions.",
    "\nAction Input:",
)
"""What stands before calls that are not read, such as those of MiniMax, DeepSeek, Kimi, harmony and ReAct; the calls
are named."""
ONE_WORD_TOOLS = {"<search>": ("search", "query")}
"""Marks that name a tool, with the tool and its only argument."""
RESULT_TAGS = (
    ("<tool_response>", "</tool_response>"),
    ("<function_response>", "</function_response>"),
    ("<function_results>", "</function_results>"),
    ("<tool_result>", "</tool_result>"),
    ("<information>", "</information>"),
    ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
RESULT_BEGINNINGS = ("FUNCTION RESPONSE:", "OBSERVATION:", "Observation:", "TOOL RESPONSE:")
"""How a message begins that is a result from there to its end."""
EMPTY_RESULTS = ("Your command ran successfully and did not produce any output.",)
"""Messages that stand for an empty result: SWE-agent's."""
NAMED_RESULT = "EXECUTION RESULT of ["
"""How such a message of OpenHands begins; the tool and "]:" follow."""
END_OF_TEXT = "<|endoftext|>"
DECODER = json.JSONDecoder()


class MarkedCall(NamedTuple):
    """A call in text: its fields, and the stretch of text with its marks.

    `inside`: the way from there to the call, where it stands between its marks with others.
    """

    found: FoundCall
    span: Span
    inside: Path = ()


class MarkedResult(NamedTuple):
    """A result in text: what the tool answered, the tool where the mark names it, and the stretch with its marks."""

    text: str
    tool: str | None
    span: Span


class Marked(NamedTuple):
    """What stands between marks in a text, in the order of the text.

    `unread`: texts between marks of a call that hold none.
    """

    calls: list[MarkedCall]
    unread: list[str]


def thinking_spans(text: str) -> list[Span]:
    """Return the stretches of thinking in a text, marks included.

    Thinking that is closed but not opened begins with the text, since some templates open it in the prompt.
    """
    spans = list[Span]()
    for begin, close in THINKING:
        position = 0
        first_close = text.find(close)
        first_begin = text.find(begin)
        if first_close >= 0 and not 0 <= first_begin < first_close:
            spans.append((0, first_close + len(close)))
            position = first_close + len(close)
        while (start := text.find(begin, position)) >= 0:
            end = text.find(close, start)
            if end < 0:
                if not text[:start].strip():  # cut off while it thought
                    spans.append((start, len(text)))
                break
            position = end + len(close)
            spans.append((start, position))
    return sorted(spans)


def without_spans(text: str, spans: Sequence[Span]) -> str:
    """Return a text without some of its stretches, which may touch or overlap."""
    kept = []
    position = 0
    for start, end in sorted(spans):
        kept.append(text[position:start])
        position = max(position, end)
    kept.append(text[position:])
    return "".join(kept)


def visible(text: str) -> str:
    """Return a text without its thinking; unchanged where it has none."""
    spans = thinking_spans(text)
    return without_spans(text, spans).strip() if spans else text


def marked_calls(text: str, has_one_word_tools: bool = False) -> Marked:
    """Return the calls that stand in a text outside of its thinking.

    `has_one_word_tools`: whether `<search>` and its like are calls; elsewhere they are words.
    """
    thoughts = thinking_spans(text)
    marked = Marked([], [])
    for begin, close in CALL_TAGS:
        if begin in ONE_WORD_TOOLS and not has_one_word_tools:
            continue
        for start, body_end, end in _around_json(text, begin, close):
            if _is_within(start, thoughts):
                continue
            body = text[start + len(begin) : body_end]
            calls = calls_in(body, begin)
            if not calls:
                marked.unread.append(text[start:end])
            for found, inside in calls:
                to_body: Path = ((len(begin), body_end - start), *inside)
                marked.calls.append(MarkedCall(found, (start, end), to_body if len(calls) > 1 else ()))
    taken = sorted({call.span for call in marked.calls})
    for start, body_end, end in _between(text, *FUNCTION):
        if _is_within(start, thoughts) or _is_within(start, taken):
            continue
        found_function = _function_call(text[start + len(FUNCTION[0]) : body_end])
        if found_function is None:
            marked.unread.append(text[start:end])
        else:
            marked.calls.append(MarkedCall(found_function, (start, end)))
    if not marked.calls and not marked.unread:
        marked.calls.extend(_python_calls(text, thoughts))
    if not marked.calls and not marked.unread:
        shown = without_spans(text, thoughts)
        first = min((shown.find(mark) for mark in OTHER_CALL_MARKS if mark in shown), default=-1)
        if first >= 0:
            marked.unread.append(shown[first:].strip())
    marked.calls.sort(key=lambda call: call.span)
    return marked


def has_call_marks(text: str) -> bool:
    """Return whether marks of a call stand in a text, outside of its thinking."""
    shown = visible(text)
    return any(begin in shown for begin, _ in (*CALL_TAGS, FUNCTION) if begin not in ONE_WORD_TOOLS)


def marked_results(text: str) -> list[MarkedResult]:
    """Return the results that stand in a text between tags; tags within a result are a part of it."""
    results = list[MarkedResult]()
    for begin, close in RESULT_TAGS:
        for start, body_end, end in _outermost(text, begin, close):
            body = text[start + len(begin) : body_end].strip()
            results.append(MarkedResult(body, _named_tool(body), (start, end)))
    outer = list[MarkedResult]()
    for result in sorted(results, key=lambda result: result.span):
        if not outer or result.span[0] >= outer[-1].span[1]:
            outer.append(result)
    return outer


def are_whole(results: Sequence[MarkedResult], text: str) -> bool:
    """Return whether a text is results between tags, and nothing else."""
    return bool(results) and not without_spans(text, [result.span for result in results]).strip()


def whole_result(text: str) -> MarkedResult | None:
    """Return the result that a text is from its beginning to its end; None where it does not begin as one."""
    stripped = text.lstrip()
    whole = (0, len(text))
    if stripped.rstrip() in EMPTY_RESULTS:
        return MarkedResult(stripped.rstrip(), None, whole)
    for beginning in RESULT_BEGINNINGS:
        if stripped.startswith(beginning):
            body = stripped.removeprefix(beginning).removesuffix(END_OF_TEXT).strip()
            return MarkedResult(body, None, whole)
    if stripped.startswith(NAMED_RESULT):
        tool, closed, body = stripped.removeprefix(NAMED_RESULT).partition("]:")
        if closed:
            return MarkedResult(body.strip(), tool, whole)
    return None


def calls_in(body: str, begin: str) -> list[tuple[FoundCall, Path]]:
    """Return the calls between a pair of marks, each with the way to it in `body`; none where they cannot be read.

    JSON of a call, of a list of calls, several of these after another, `<function=...>`, or the words of a tool that
    the mark names.
    """
    if begin in ONE_WORD_TOOLS:
        tool, argument = ONE_WORD_TOOLS[begin]
        return [(FoundCall(tool, {argument: body.strip()}, None), ())] if body.strip() else []
    opened = parsed(body.strip())
    if opened is not None:
        calls = [listed_call(item) for item in (opened if isinstance(opened, list) else [opened])]
        return [(call, (None, index)) for index, call in enumerate(calls) if call is not None] if all(calls) else []
    found = list[tuple[FoundCall, Path]]()
    for start, body_end, end in _between(body, *FUNCTION):
        call = _function_call(body[start + len(FUNCTION[0]) : body_end])
        if call is not None:
            found.append((call, ((start, end),)))
    if found:
        return found
    for start, body_end, end in _between(body, *INVOKE):
        call = _invoked(body[start + len(INVOKE[0]) : body_end])
        if call is not None:
            found.append((call, ((start, end),)))
    if found:
        return found
    call = _call_of_glm(body)
    return [(call, ())] if call is not None else _json_lines(body)


def _invoked(body: str) -> FoundCall | None:
    """Read what stands after `<invoke name="`: the tool, then parameters between marks of their own."""
    tool, closed, rest = body.partition('">')
    if not closed or not tool.strip():
        return None
    arguments: dict[str, Any] = {}
    for start, body_end, _ in _between(rest, *INVOKE_PARAMETER):
        name, _, value = rest[start + len(INVOKE_PARAMETER[0]) : body_end].partition('">')
        arguments[name.strip()] = value.strip("\n")
    return FoundCall(tool.strip(), arguments, None)


def _call_of_glm(body: str) -> FoundCall | None:
    """Read a tool, and the names and values of its arguments between marks; None where there are none."""
    tool, marked, _ = body.partition(GLM_KEY[0])
    if not marked or not tool.strip():
        return None
    keys = [body[start + len(GLM_KEY[0]) : end].strip() for start, end, _ in _between(body, *GLM_KEY)]
    values = [body[start + len(GLM_VALUE[0]) : end] for start, end, _ in _between(body, *GLM_VALUE)]
    if len(keys) != len(values):
        return None
    return FoundCall(tool.strip(), dict(zip(keys, values, strict=True)), None)


def _json_lines(body: str) -> list[tuple[FoundCall, Path]]:
    """Return the calls of a text with one per line; none where a line holds something else."""
    found = list[tuple[FoundCall, Path]]()
    position = 0
    for line in body.splitlines(keepends=True):
        end = position + len(line)
        if line.strip():
            call = listed_call(parsed(line.strip()))
            if call is None:
                return []
            found.append((call, ((position, end),)))
        position = end
    return found


def _between(text: str, begin: str, close: str) -> Iterator[tuple[int, int, int]]:
    """Yield where the opening mark begins, where what it encloses ends, and where the closing mark ends.

    Of opening marks in a row the last one counts, since the others are only spoken of. A mark that is not closed
    encloses what follows up to the end of the text.
    """
    position = 0
    while (start := text.find(begin, position)) >= 0:
        end = text.find(close, start)
        if end < 0:
            body_end = text.find(END_OF_TEXT, start)
            body_end = len(text) if body_end < 0 else body_end
            yield start, body_end, min(len(text), body_end + len(END_OF_TEXT))
            return
        position = end + len(close)
        yield text.rfind(begin, start, end), end, position


def _outermost(text: str, begin: str, close: str) -> Iterator[tuple[int, int, int]]:
    """Yield where a mark begins, where what it encloses ends, and where its closing mark ends, of marks in no other.

    Where marks are not closed one by one, as `_between` yields.
    """
    found = list[tuple[int, int, int]]()
    depth = 0
    first = 0
    opening = text.find(begin)
    closing = text.find(close)
    while closing >= 0 and depth >= 0:
        if 0 <= opening < closing:
            first = opening if depth == 0 else first
            depth += 1
            opening = text.find(begin, opening + len(begin))
            continue
        depth -= 1
        if depth == 0:
            found.append((first, closing, closing + len(close)))
        closing = text.find(close, closing + len(close))
    is_balanced = depth == 0 and opening < 0
    yield from found if is_balanced else _between(text, begin, close)


def _around_json(text: str, begin: str, close: str) -> Iterator[tuple[int, int, int]]:
    """Yield what `_between` yields, but with the closing mark behind the JSON of a call, which may quote marks."""
    position = 0
    for start, body_end, end in _between(text, begin, close):
        json_start = _first_visible(text, start + len(begin), body_end)
        if start < position:  # a mark that the JSON before quotes
            continue
        if text[json_start : json_start + 1] in ("{", "["):
            json_end = _json_end(text, json_start)
            closed = text.find(close, json_end) if json_end > body_end else -1
            if closed >= 0 and not text[json_end:closed].strip():
                body_end = closed
                end = closed + len(close)
        position = end
        yield start, body_end, end


def _first_visible(text: str, start: int, end: int) -> int:
    """Return where the first character stands that is no white space; `end` where there is none."""
    return end - len(text[start:end].lstrip())


def _json_end(text: str, start: int) -> int:
    """Return where the JSON ends that begins there; -1 where it is none."""
    try:
        _, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return -1
    return end


def _function_call(body: str) -> FoundCall | None:
    """Read what stands after `<function=`: the tool, then parameters between marks of their own, or JSON."""
    tool, closed, rest = body.partition(">")
    if not closed or not tool.strip():
        return None
    opened = parsed(rest.strip())
    if isinstance(opened, dict):
        return FoundCall(tool.strip(), opened, None)
    arguments: dict[str, Any] = {}
    for start, body_end, _ in _between(rest, *PARAMETER):
        name, _, value = rest[start + len(PARAMETER[0]) : body_end].partition(">")
        arguments[name.strip()] = value.strip("\n")
    return FoundCall(tool.strip(), arguments, None)


def _python_calls(text: str, thoughts: Sequence[Span]) -> list[MarkedCall]:
    """Return the calls of a text that is a list of them in brackets, as Python writes calls, and nothing else.

    ToolACE's `[Weather(city="Oslo"), Air Quality(city="Oslo")]`: names may have spaces, arguments are named literals.
    The stretch of a call ends with the comma behind it; a comma behind the last call is passed over.
    """
    after_thoughts = thoughts[-1][1] if thoughts else 0
    expression = text[after_thoughts:].strip()
    if not (expression.startswith("[") and expression.endswith("]") and len(expression) <= LONGEST_LITERAL):
        return []
    offset = text.index(expression, after_thoughts)
    calls = list[MarkedCall]()
    position = 1
    while expression[position:-1].strip():
        opening = expression.find("(", position)
        closing = _closing_bracket(expression, opening)
        if opening < 0 or closing < 0:
            return []
        arguments = _named_literals(expression[opening : closing + 1])
        tool = expression[position:opening].strip()
        if arguments is None or not tool or expression[closing + 1] not in ",]":
            return []
        begin = offset + position
        position = closing + 1 + (expression[closing + 1] == ",")
        calls.append(MarkedCall(FoundCall(tool, arguments, None), (begin, offset + position)))
    if len(calls) == 1:  # it goes with its brackets
        return [calls[0]._replace(span=(after_thoughts, len(text)))]
    return calls


def _closing_bracket(expression: str, opening: int) -> int:
    """Return where the bracket that opens there is closed, outside of quoted text; -1 where it is not."""
    depth = 0
    quote = ""
    position = opening
    while 0 <= position < len(expression):
        character = expression[position]
        if character == "\\":
            position += 1
        elif quote:
            quote = "" if character == quote else quote
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


def _named_literals(brackets: str) -> dict[str, Any] | None:
    """Return the arguments between brackets, as `(city="Oslo", days=3)`; None where one is unnamed or no literal."""
    tree: ast.expr | None = None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(f"f{brackets}", mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args:
        return None
    arguments: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            return None
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError):
            return None
    return arguments


def _named_tool(body: str) -> str | None:
    """Return the tool that a result in JSON names, as Hermes has it."""
    fields = parsed(body) if body.startswith("{") else None
    name = fields.get("name") if isinstance(fields, dict) else None
    return name if isinstance(name, str) else None


def _is_within(position: int, spans: Sequence[Span]) -> bool:
    """Return whether a position lies in one of the stretches, which are sorted and do not overlap."""
    index = bisect(spans, (position, sys.maxsize)) - 1
    return index >= 0 and position < spans[index][1]
