"""Find calls and results that stand in texts, between marks, in conversations that have no fields for them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from toolformer_dag.conversations.call_bodies import FUNCTION, ONE_WORD_TOOLS, calls_in, function_call
from toolformer_dag.conversations.mark_scanner import (
    END_OF_TEXT,
    Enclosed,
    Marks,
    Span,
    enclosed,
    enclosed_json,
    is_within,
    outermost,
    without_spans,
)
from toolformer_dag.conversations.plain_values import parsed
from toolformer_dag.conversations.python_calls import python_calls
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundCall

THINKING = (
    Marks("<think>", "</think>"),
    Marks("<thinking>", "</thinking>"),
    Marks("<thought>", "</thought>"),
    Marks("[THINK]", "[/THINK]"),
)
"""What stands before and after thinking."""
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
"""What stands before and after calls; the second one may be missing at the end of a message."""
OTHER_CALL_MARKS = (
    "<minimax:tool_call>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    " to=functions.",
    "\nAction Input:",
)
"""What stands before calls that are not read, such as those of MiniMax, DeepSeek, Kimi, harmony and ReAct; the calls
are reported as unreadable."""
RESULT_TAGS = (
    Marks("<tool_response>", "</tool_response>"),
    Marks("<function_response>", "</function_response>"),
    Marks("<function_results>", "</function_results>"),
    Marks("<tool_result>", "</tool_result>"),
    Marks("<information>", "</information>"),
    Marks("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
"""What stands before and after a result."""
RESULT_BEGINNINGS = ("FUNCTION RESPONSE:", "OBSERVATION:", "Observation:", "TOOL RESPONSE:")
"""How a message begins that is a result from there to its end."""
EMPTY_RESULTS = ("Your command ran successfully and did not produce any output.",)
"""Messages that stand for an empty result: SWE-agent's."""
NAMED_RESULT = Marks("EXECUTION RESULT of [", "]:")
"""What stands before and after the tool's name at the beginning of a result of OpenHands."""


class MarkedCall(NamedTuple):
    """A call in a text.

    - `found`: its fields
    - `span`: the stretch of the text with its marks
    - `inside`: the path from that stretch to the call, where it stands between its marks with other calls
    """

    found: FoundCall
    span: Span
    inside: Path = ()


class MarkedResult(NamedTuple):
    """A result in a text: what the tool answered, the tool where the mark names it, and the stretch with its marks."""

    text: str
    tool: str | None
    span: Span


class Marked(NamedTuple):
    """The calls of a text, in its order, and the texts that have marks of a call and cannot be read."""

    calls: list[MarkedCall]
    unread: list[str]


def thinking_spans(text: str) -> list[Span]:
    """Return the stretches of thinking in a text, marks included.

    Thinking that is closed but not opened begins with the text, since some templates open it in the prompt. Thinking
    that is opened but not closed counts only where nothing stands before it: the model was cut off while it thought.
    """
    spans = list[Span]()
    for marks in THINKING:
        spans += _thinking_between(text, marks)
    return sorted(spans)


def _thinking_between(text: str, marks: Marks) -> Iterator[Span]:
    """Yield the stretches of thinking between one pair of marks; see `thinking_spans`."""
    opening, closing = marks
    position = 0
    first_opening = text.find(opening)
    first_closing = text.find(closing)
    opens_before_closing = 0 <= first_opening < first_closing
    if first_closing >= 0 and not opens_before_closing:  # opened in the prompt
        position = first_closing + len(closing)
        yield 0, position
    while True:
        start = text.find(opening, position)
        if start < 0:
            return
        end = text.find(closing, start)
        if end < 0:
            if not text[:start].strip():  # cut off while it thought
                yield start, len(text)
            return
        position = end + len(closing)
        yield start, position


def visible(text: str) -> str:
    """Return a text without its thinking; unchanged where it has none."""
    spans = thinking_spans(text)
    return without_spans(text, spans).strip() if spans else text


def marked_calls(text: str, has_one_word_tools: bool = False) -> Marked:
    """Return the calls that stand in a text outside of its thinking.

    has_one_word_tools: whether `<search>` and its like are calls; elsewhere they are words.
    """
    thoughts = thinking_spans(text)
    marked = Marked([], [])
    for marks in CALL_TAGS:
        if has_one_word_tools or marks.opening not in ONE_WORD_TOOLS:
            _add_tagged_calls(marked, text, marks, thoughts)
    _add_functions(marked, text, thoughts)
    if not marked.calls and not marked.unread:
        marked.calls.extend(_listed_python_calls(text, thoughts))
    if not marked.calls and not marked.unread:
        marked.unread.extend(_other_marks(without_spans(text, thoughts)))
    marked.calls.sort(key=lambda call: call.span)
    return marked


def _add_tagged_calls(marked: Marked, text: str, marks: Marks, thoughts: Sequence[Span]) -> None:
    """Add the calls that stand between such marks to `marked.calls`, and what cannot be read there to `marked.unread`.

    thoughts: stretches of thinking, in which no call counts. Where several calls stand between one pair of marks, each
    gets the path from the marks to itself (`MarkedCall.inside`), so that one of them can be left out alone.
    """
    for pair in enclosed_json(text, marks):
        if is_within(pair.start, thoughts):
            continue
        calls = calls_in(pair.body(text), marks.opening)
        if not calls:
            marked.unread.append(text[pair.start : pair.end])
        body_in_span = (pair.body_start - pair.start, pair.body_end - pair.start)
        for call in calls:
            inside = (body_in_span, *call.path) if len(calls) > 1 else ()
            marked.calls.append(MarkedCall(call.found, pair.span, inside))


def _add_functions(marked: Marked, text: str, thoughts: Sequence[Span]) -> None:
    """Add the calls between the marks FUNCTION that stand in no other marks of a call."""
    other_calls = sorted({call.span for call in marked.calls})
    for pair in enclosed(text, FUNCTION):
        if is_within(pair.start, thoughts) or is_within(pair.start, other_calls):
            continue
        found = function_call(pair.body(text))
        if found is None:
            marked.unread.append(text[pair.start : pair.end])
        else:
            marked.calls.append(MarkedCall(found, pair.span))


def _listed_python_calls(text: str, thoughts: Sequence[Span]) -> Iterator[MarkedCall]:
    """Yield the calls of a text that is, behind its thinking, a list of calls as Python writes them."""
    answer_start = thoughts[-1][1] if thoughts else 0
    for found, (start, end) in python_calls(text[answer_start:]):
        yield MarkedCall(found, (answer_start + start, answer_start + end))


def _other_marks(text: str) -> Iterator[str]:
    """Yield the text from the first mark of a call on that is not read (OTHER_CALL_MARKS); nothing without one."""
    places = [text.find(mark) for mark in OTHER_CALL_MARKS if mark in text]
    if places:
        yield text[min(places) :].strip()


def has_call_marks(text: str) -> bool:
    """Return whether marks of a call stand in a text, outside of its thinking."""
    shown = visible(text)
    openings = [marks.opening for marks in (*CALL_TAGS, FUNCTION)]
    return any(opening in shown for opening in openings if opening not in ONE_WORD_TOOLS)


def marked_results(text: str) -> list[MarkedResult]:
    """Return the results that stand in a text between tags. What stands within another result is a part of it."""
    results = list[MarkedResult]()
    for marks in RESULT_TAGS:
        results += [_result_between(text, pair) for pair in outermost(text, marks)]
    outer = list[MarkedResult]()
    end = 0  # of the last result that was taken
    for result in sorted(results, key=lambda result: result.span):
        result_start, result_end = result.span
        if result_start >= end:
            outer.append(result)
            end = result_end
    return outer


def _result_between(text: str, pair: Enclosed) -> MarkedResult:
    """Return what stands between a pair of marks as a result."""
    body = pair.body(text).strip()
    return MarkedResult(body, _named_tool(body), pair.span)


def _named_tool(body: str) -> str | None:
    """Return the tool that a result in JSON names, as Hermes has it: `{"name": "search", "content": ...}`."""
    fields = parsed(body) if body.startswith("{") else None
    name = fields.get("name") if isinstance(fields, dict) else None
    return name if isinstance(name, str) else None


def consists_of(results: Sequence[MarkedResult], text: str) -> bool:
    """Return whether a text is these results between their tags, and nothing else."""
    return bool(results) and not without_spans(text, [result.span for result in results]).strip()


def untagged_result(text: str) -> MarkedResult | None:
    """Return a text that is a result from its beginning to its end as that result; None where it does not begin as one.

    - `Observation: 17 degrees` (RESULT_BEGINNINGS)
    - `EXECUTION RESULT of [search]: 17 degrees` (NAMED_RESULT)
    - a sentence that says that nothing came (EMPTY_RESULTS)
    """
    words = text.strip()
    whole = (0, len(text))
    if words in EMPTY_RESULTS:
        return MarkedResult(words, None, whole)
    for beginning in RESULT_BEGINNINGS:
        if words.startswith(beginning):
            body = words.removeprefix(beginning).removesuffix(END_OF_TEXT)
            return MarkedResult(body.strip(), None, whole)
    if words.startswith(NAMED_RESULT.opening):
        tool, closed, body = words.removeprefix(NAMED_RESULT.opening).partition(NAMED_RESULT.closing)
        if closed:
            return MarkedResult(body.strip(), tool, whole)
    return None
