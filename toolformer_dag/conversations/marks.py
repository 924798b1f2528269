"""Find calls and results between marks in texts, for conversations without fields for calls."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from toolformer_dag.conversations.call_bodies import FUNCTION, ONE_WORD_TOOLS, function_call, parse_call_body
from toolformer_dag.conversations.mark_scanner import (
    END_OF_TEXT,
    Enclosed,
    Marks,
    Span,
    is_within,
    iter_json_pairs,
    iter_mark_pairs,
    outermost,
    without_spans,
)
from toolformer_dag.conversations.plain_values import parse_json
from toolformer_dag.conversations.python_calls import python_calls
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundCall
from toolformer_dag.conversations.thoughts import find_thinking_spans, without_thoughts

CALL_TAGS = (
    Marks("<tool_call>", "</tool_call>"),
    Marks("<tool_calls>", "</tool_calls>"),
    Marks("<function_call>", "</function_call>"),
    Marks("<function_calls>", "</function_calls>"),
    Marks("<functioncall>", "</functioncall>"),
    Marks("<search>", "</search>"),
    Marks("[TOOL_CALLS]", "[/TOOL_CALLS]"),
    Marks("<|python_tag|>", "<|eom_id|>"),
)
"""Marks around calls; the closing one may be missing at the end of a message."""
OTHER_CALL_MARKS = (
    "<minimax:tool_call>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    " to=functions.",
    "\nAction Input:",
)
"""Marks before calls of MiniMax, DeepSeek, Kimi, harmony and ReAct, which are reported as unreadable."""
RESULT_TAGS = (
    Marks("<tool_response>", "</tool_response>"),
    Marks("<function_response>", "</function_response>"),
    Marks("<function_results>", "</function_results>"),
    Marks("<tool_result>", "</tool_result>"),
    Marks("<information>", "</information>"),
    Marks("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
"""Marks around results."""
RESULT_BEGINNINGS = ("FUNCTION RESPONSE:", "OBSERVATION:", "Observation:", "TOOL RESPONSE:")
"""The first words of messages that are a result as a whole."""
EMPTY_RESULTS = ("Your command ran successfully and did not produce any output.",)
"""Messages that stand for an empty result in SWE-agent."""
NAMED_RESULT = Marks("EXECUTION RESULT of [", "]:")
"""Marks around the tool's name at the beginning of a result of OpenHands."""


class MarkedCall(NamedTuple):
    """A call in a text.

    - `fields`: its tool, arguments and id
    - `span`: the start and end of the stretch of text with its marks, by character offsets
    - `inside`: the path from that stretch to the call; () where it is the only call between its marks
    """

    fields: FoundCall
    span: Span
    inside: Path = ()


class MarkedResult(NamedTuple):
    """A result in a text.

    - `text`: what the tool answered
    - `tool`: the tool's name, where the result names it
    - `span`: the stretch of the text with its marks
    """

    text: str
    tool: str | None
    span: Span


class Marked(NamedTuple):
    """The calls of a text.

    - `calls`: the calls in the order of the text
    - `unread`: the stretches that have marks of a call and cannot be read
    """

    calls: list[MarkedCall]
    unread: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether no marks of calls stand in the text."""
        return not self.calls and not self.unread

    def add(self, stretch: str, calls: Sequence[MarkedCall]) -> None:
        """Add the calls of a stretch between marks, or the stretch as unread where it has none."""
        self.calls.extend(calls)
        if not calls:
            self.unread.append(stretch)


def find_marked_calls(text: str, has_one_word_tools: bool = False) -> Marked:
    """Find the calls that are written in a text, outside of its thinking.

    Args:
        text: The text.
        has_one_word_tools: Whether tags such as `<search>Oslo weather</search>` are calls. If not, they are words.

    Returns:
        The calls in the order of the text, and the stretches that look like calls but cannot be read.
    """
    thoughts = find_thinking_spans(text)
    marked = _find_tagged_calls(text, thoughts, has_one_word_tools)
    _add_functions(marked, text, thoughts)

    if marked.is_empty:  # no tags: the text may be `[weather(city="Oslo")]`
        marked.calls.extend(_iter_listed_python_calls(text, thoughts))
    if marked.is_empty:  # marks of models whose calls are not read
        marked.unread.extend(_iter_other_marks(without_spans(text, thoughts)))

    marked.calls.sort(key=lambda call: call.span)
    return marked


def _find_tagged_calls(text: str, thoughts: Sequence[Span], has_one_word_tools: bool) -> Marked:
    """Find the calls between CALL_TAGS, such as `<tool_call>` and `</tool_call>`.

    Args:
        text: The text.
        thoughts: The stretches of thinking, in which calls do not count.
        has_one_word_tools: Whether `<search>` is a tag too.

    Returns:
        The calls, and as unread the stretches between tags in which no call could be read.
    """
    marked = Marked(calls=[], unread=[])
    for marks in CALL_TAGS:
        is_one_word_tool = marks.opening in ONE_WORD_TOOLS  # the tag names the tool: <search>Oslo weather</search>
        if is_one_word_tool and not has_one_word_tools:
            continue
        for pair in iter_json_pairs(text, marks):
            if not is_within(pair.start, thoughts):
                calls = _parse_calls_of_pair(text, pair, marks.opening)
                marked.add(pair.whole(text), calls)
    return marked


def _add_functions(marked: Marked, text: str, thoughts: Sequence[Span]) -> None:
    """Add the calls between FUNCTION marks, such as `<function=search>...</function>`.

    Marks inside another call or inside thinking do not count.

    Args:
        marked: The calls found so far, to which these are added.
        text: The text.
        thoughts: The stretches of thinking in it.
    """
    other_calls = sorted({call.span for call in marked.calls})
    for pair in iter_mark_pairs(text, FUNCTION):
        if is_within(pair.start, thoughts) or is_within(pair.start, other_calls):
            continue

        call = function_call(pair.body(text))
        calls = [] if call is None else [MarkedCall(call, pair.span)]
        marked.add(pair.whole(text), calls)


def _parse_calls_of_pair(text: str, pair: Enclosed, opening: str) -> list[MarkedCall]:
    """Parse the calls between a pair of marks.

    Returns:
        The calls, or an empty list if they cannot be read. If there are several, each has a path inside the pair: in
        `<tool_call>[{...}, {...}]</tool_call>` the second call has ((11, 25), None, 1), which means the characters
        between the marks, opened as JSON (None), item 1.
    """
    calls = parse_call_body(pair.body(text), opening)
    if len(calls) == 1:  # the pair as a whole is the call
        return [MarkedCall(calls[0].fields, pair.span)]
    return [MarkedCall(call.fields, pair.span, inside=(pair.body_span_in_pair, *call.path)) for call in calls]


def _iter_listed_python_calls(text: str, thoughts: Sequence[Span]) -> Iterator[MarkedCall]:
    """Yield the calls of a text that is, behind its thinking, a list of calls in Python's notation."""
    answer_start = thoughts[-1][1] if thoughts else 0
    for call, (start, end) in python_calls(text[answer_start:]):
        yield MarkedCall(call, (answer_start + start, answer_start + end))


def _iter_other_marks(text: str) -> Iterator[str]:
    """Yield the rest of a text from the first of OTHER_CALL_MARKS on; nothing without one."""
    positions = [text.find(mark) for mark in OTHER_CALL_MARKS if mark in text]
    if positions:
        yield text[min(positions) :].strip()


def has_call_marks(text: str) -> bool:
    """Return whether marks of a call stand in a text, outside of its thinking."""
    visible_text = without_thoughts(text)
    openings = [marks.opening for marks in (*CALL_TAGS, FUNCTION)]
    return any(opening in visible_text for opening in openings if opening not in ONE_WORD_TOOLS)


def find_marked_results(text: str) -> list[MarkedResult]:
    """Find the results between tags in a text. A result inside another one is part of its text."""
    results = list[MarkedResult]()
    for marks in RESULT_TAGS:
        for pair in outermost(text, marks):
            results.append(_parse_result_between(text, pair))
    return _select_outer_results(results)


def _select_outer_results(results: Iterable[MarkedResult]) -> list[MarkedResult]:
    """Keep the results that do not begin inside another one, in the order of the text."""
    outer_results = list[MarkedResult]()
    end_of_last = 0
    for result in sorted(results, key=lambda result: result.span):
        start, end = result.span
        if start >= end_of_last:
            outer_results.append(result)
            end_of_last = end
    return outer_results


def _parse_result_between(text: str, pair: Enclosed) -> MarkedResult:
    """Return the text between a pair of marks as a result."""
    body = pair.body(text).strip()
    return MarkedResult(body, _find_named_tool(body), pair.span)


def _find_named_tool(body: str) -> str | None:
    """Return the tool that a result in JSON names, as in Hermes: `{"name": "search", "content": ...}`."""
    fields = parse_json(body) if body.startswith("{") else None
    name = fields.get("name") if isinstance(fields, dict) else None
    return name if isinstance(name, str) else None


def consists_of(results: Sequence[MarkedResult], text: str) -> bool:
    """Return whether a text holds these results with their tags, and nothing else."""
    spans = [result.span for result in results]
    return bool(results) and not without_spans(text, spans).strip()


def find_untagged_result(text: str) -> MarkedResult | None:
    """Read a whole text as a result if its first words say that it is one.

    - `Observation: 17 degrees` begins with one of RESULT_BEGINNINGS
    - `EXECUTION RESULT of [search]: 17 degrees` names the tool too (NAMED_RESULT)
    - a sentence of EMPTY_RESULTS stands for an empty result

    Returns:
        The result, or None if the text is not one.
    """
    words = text.strip()
    span = (0, len(text))
    if words.startswith(NAMED_RESULT.opening):
        return _parse_named_result(words.removeprefix(NAMED_RESULT.opening), span)

    result_text = _find_unnamed_result(words)
    return None if result_text is None else MarkedResult(result_text, tool=None, span=span)


def _find_unnamed_result(words: str) -> str | None:
    """Return the result in words such as `Observation: 17 degrees`; None where they are no result."""
    if words in EMPTY_RESULTS:
        return words
    for beginning in RESULT_BEGINNINGS:
        if words.startswith(beginning):
            return words.removeprefix(beginning).removesuffix(END_OF_TEXT).strip()
    return None


def _parse_named_result(words: str, span: Span) -> MarkedResult | None:
    """Return the result of `search]: 17 degrees`; None where the name of the tool is not closed."""
    tool, closed, body = words.partition(NAMED_RESULT.closing)
    return MarkedResult(body.strip(), tool, span) if closed else None
