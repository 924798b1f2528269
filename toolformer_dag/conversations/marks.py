"""Find calls and results between marks in texts, for conversations without fields for calls."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from toolformer_dag.conversations.call_bodies import (
    FUNCTION_MARKS,
    TOOL_AND_ARGUMENT_BY_TAG,
    parse_calls_between_marks,
    parse_function_call,
)
from toolformer_dag.conversations.mark_scanner import (
    END_OF_TEXT,
    Enclosed,
    Marks,
    TextSpan,
    find_outermost_pairs,
    is_within_spans,
    iter_mark_pairs,
    iter_mark_pairs_around_json,
    remove_spans,
)
from toolformer_dag.conversations.plain_values import try_parse_json
from toolformer_dag.conversations.python_calls import parse_python_calls
from toolformer_dag.conversations.record_paths import RecordPath
from toolformer_dag.conversations.shapes import FoundCall
from toolformer_dag.conversations.thoughts import find_thinking_spans, remove_thoughts

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
UNREADABLE_CALL_MARKS = (
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
RESULT_PREFIXES = ("FUNCTION RESPONSE:", "OBSERVATION:", "Observation:", "TOOL RESPONSE:")
"""The first words of messages that are a result as a whole."""
EMPTY_RESULT_TEXTS = ("Your command ran successfully and did not produce any output.",)
"""Messages that stand for an empty result in SWE-agent."""
NAMED_RESULT_MARKS = Marks("EXECUTION RESULT of [", "]:")
"""Marks around the tool's name at the beginning of a result of OpenHands."""


class MarkedCall(NamedTuple):
    """A call in a text.

    Attributes:
        found_call: The tool, the arguments and the id.
        span: The start and end of the span of text with its marks, by character offsets.
        path_in_span: The path from that span to the call, which is () for the only call between its marks.
    """

    found_call: FoundCall
    span: TextSpan
    path_in_span: RecordPath = ()


class MarkedResult(NamedTuple):
    """A result in a text.

    Attributes:
        text: What the tool answered.
        tool: The tool's name, or None if the result does not name it.
        span: The span of the text with its marks.
    """

    text: str
    tool: str | None
    span: TextSpan


class MarkedCalls(NamedTuple):
    """The calls of a text.

    Attributes:
        calls: The calls.
        unreadable_texts: The pieces of the text that have marks of a call and cannot be read.
    """

    calls: list[MarkedCall]
    unreadable_texts: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether no marks of calls were found in the text."""
        return not self.calls and not self.unreadable_texts

    def add_calls(self, marked_text: str, calls: Sequence[MarkedCall]) -> None:
        """Add the calls between a pair of marks.

        Args:
            marked_text: The text with its marks. It is added to the unreadable texts if there are no calls.
            calls: The calls in it.
        """
        self.calls.extend(calls)
        if not calls:
            self.unreadable_texts.append(marked_text)


def find_marked_calls(text: str, search_tags_are_calls: bool = False) -> MarkedCalls:
    """Find the calls that are written in a text, outside of its thinking.

    Args:
        text: The text.
        search_tags_are_calls: Whether tags such as `<search>Oslo weather</search>` are calls. If not, they are words.

    Returns:
        The calls in the order of the text, and the spans that look like calls but cannot be read.
    """
    thought_spans = find_thinking_spans(text)
    marked_calls = _find_tagged_calls(text, thought_spans, search_tags_are_calls)
    _add_function_calls(marked_calls, text, thought_spans)

    if marked_calls.is_empty:  # no tags: the text may be `[weather(city="Oslo")]`
        marked_calls.calls.extend(_iter_listed_python_calls(text, thought_spans))
    if marked_calls.is_empty:  # there may be marks of models whose calls are not read
        visible_text = remove_spans(text, thought_spans)
        marked_calls.unreadable_texts.extend(_iter_unreadable_calls(visible_text))

    marked_calls.calls.sort(key=lambda call: call.span)
    return marked_calls


def _find_tagged_calls(text: str, thought_spans: Sequence[TextSpan], search_tags_are_calls: bool) -> MarkedCalls:
    """Find the calls between CALL_TAGS, such as `<tool_call>` and `</tool_call>`.

    Args:
        text: The text.
        thought_spans: The spans of thinking, in which calls do not count.
        search_tags_are_calls: Whether `<search>` is a tag too.

    Returns:
        The calls, and the texts between tags in which no call could be read.
    """
    marked_calls = MarkedCalls(calls=[], unreadable_texts=[])
    for marks in CALL_TAGS:
        tag_names_tool = marks.opening in TOOL_AND_ARGUMENT_BY_TAG  # <search>Oslo weather</search>
        if tag_names_tool and not search_tags_are_calls:
            continue

        for pair in iter_mark_pairs_around_json(text, marks):
            if is_within_spans(pair.start, thought_spans):
                continue
            calls = _parse_calls_of_pair(text, pair, marks.opening)
            marked_calls.add_calls(pair.get_text_with_marks(text), calls)
    return marked_calls


def _add_function_calls(marked_calls: MarkedCalls, text: str, thought_spans: Sequence[TextSpan]) -> None:
    """Add the calls between FUNCTION_MARKS, such as `<function=search>...</function>`.

    Marks inside another call or inside thinking do not count.

    Args:
        marked_calls: The calls found so far, to which these are added.
        text: The text.
        thought_spans: The spans of thinking in it.
    """
    call_spans = sorted({call.span for call in marked_calls.calls})
    for pair in iter_mark_pairs(text, FUNCTION_MARKS):
        is_in_thought = is_within_spans(pair.start, thought_spans)
        if is_in_thought or is_within_spans(pair.start, call_spans):
            continue

        found_call = parse_function_call(pair.get_body(text))
        calls = [] if found_call is None else [MarkedCall(found_call, pair.span)]
        marked_calls.add_calls(pair.get_text_with_marks(text), calls)


def _parse_calls_of_pair(text: str, pair: Enclosed, opening_mark: str) -> list[MarkedCall]:
    """Parse the calls between a pair of marks.

    Returns:
        The calls, or an empty list if they cannot be read. If there are several, each has a path inside the pair: in
        `<tool_call>[{...}, {...}]</tool_call>` the second call has ((11, 25), None, 1), which means the characters
        between the marks, opened as JSON (None), item 1.
    """
    body_calls = parse_calls_between_marks(pair.get_body(text), opening_mark)
    if len(body_calls) == 1:  # the pair as a whole is the call
        return [MarkedCall(body_calls[0].found_call, pair.span)]

    marked_calls = []
    for call in body_calls:
        path_in_span = (pair.body_span_in_pair, *call.path_in_body)
        marked_calls.append(MarkedCall(call.found_call, pair.span, path_in_span))
    return marked_calls


def _iter_listed_python_calls(text: str, thought_spans: Sequence[TextSpan]) -> Iterator[MarkedCall]:
    """Yield the calls of a text that is a list of calls in Python's notation, such as `[weather(city="Oslo")]`.

    Args:
        text: The text, which may begin with thinking.
        thought_spans: The spans of thinking in it, in order.
    """
    answer_start = thought_spans[-1][1] if thought_spans else 0
    for call in parse_python_calls(text[answer_start:]):
        moved_call = call.shift_span(answer_start)
        yield MarkedCall(moved_call.found_call, moved_call.span)


def _iter_unreadable_calls(text: str) -> Iterator[str]:
    """Yield the end of a text, from the first of UNREADABLE_CALL_MARKS on, if it has such a mark."""
    mark_positions = [text.find(mark) for mark in UNREADABLE_CALL_MARKS if mark in text]
    if mark_positions:
        yield text[min(mark_positions) :].strip()


def has_call_marks(text: str) -> bool:
    """Return whether marks of a call stand in a text, outside of its thinking.

    Marks that name a tool, such as `<search>`, do not count, since they may be words.
    """
    visible_text = remove_thoughts(text)
    opening_marks = [marks.opening for marks in (*CALL_TAGS, FUNCTION_MARKS)]
    return any(mark in visible_text for mark in opening_marks if mark not in TOOL_AND_ARGUMENT_BY_TAG)


def find_marked_results(text: str) -> list[MarkedResult]:
    """Find the results between tags in a text. A result inside another one is part of its text."""
    results = list[MarkedResult]()
    for marks in RESULT_TAGS:
        for pair in find_outermost_pairs(text, marks):
            results.append(_parse_result_of_pair(text, pair))
    return _select_outer_results(results)


def _select_outer_results(results: Iterable[MarkedResult]) -> list[MarkedResult]:
    """Keep the results that do not begin inside another one, in the order of the text."""
    outer_results = list[MarkedResult]()
    last_end = 0
    for result in sorted(results, key=lambda result: result.span):
        start, end = result.span
        if start >= last_end:
            outer_results.append(result)
            last_end = end
    return outer_results


def _parse_result_of_pair(text: str, pair: Enclosed) -> MarkedResult:
    """Return the text between a pair of marks as a result."""
    result_text = pair.get_body(text).strip()
    return MarkedResult(result_text, _find_tool_in_json(result_text), pair.span)


def _find_tool_in_json(result_text: str) -> str | None:
    """Find the tool that a result in JSON names, as in Hermes: `{"name": "search", "content": ...}`.

    Returns:
        The tool's name, or None if the text is no such JSON.
    """
    if not result_text.startswith("{"):
        return None
    fields = try_parse_json(result_text)
    tool = fields.get("name") if isinstance(fields, dict) else None
    return tool if isinstance(tool, str) else None


def are_results_whole_text(results: Sequence[MarkedResult], text: str) -> bool:
    """Return whether a text holds these results with their tags, and nothing else but white space."""
    if not results:
        return False
    spans = [result.span for result in results]
    return not remove_spans(text, spans).strip()


def find_untagged_result(text: str) -> MarkedResult | None:
    """Read a whole text as a result if its first words say that it is one.

    - `Observation: 17 degrees` begins with one of RESULT_PREFIXES
    - `EXECUTION RESULT of [search]: 17 degrees` names the tool too (NAMED_RESULT_MARKS)
    - a sentence of EMPTY_RESULT_TEXTS stands for an empty result

    Returns:
        The result, or None if the text is not one.
    """
    words = text.strip()
    whole_span = (0, len(text))
    if words.startswith(NAMED_RESULT_MARKS.opening):
        words_behind_mark = words.removeprefix(NAMED_RESULT_MARKS.opening)
        return _parse_named_result(words_behind_mark, whole_span)

    result_text = _find_unnamed_result_text(words)
    if result_text is None:
        return None
    return MarkedResult(result_text, tool=None, span=whole_span)


def _find_unnamed_result_text(words: str) -> str | None:
    """Return the result in words such as `Observation: 17 degrees`, or None if they are no result."""
    if words in EMPTY_RESULT_TEXTS:
        return words
    for prefix in RESULT_PREFIXES:
        if words.startswith(prefix):
            return words.removeprefix(prefix).removesuffix(END_OF_TEXT).strip()
    return None


def _parse_named_result(words: str, span: TextSpan) -> MarkedResult | None:
    """Parse a result after the opening mark, such as `search]: 17 degrees`.

    Args:
        words: The words behind the opening mark.
        span: The span of the whole text, with the mark.

    Returns:
        The result of the tool `search`, or None if the closing mark `]:` is missing.
    """
    tool, closing_mark, result_text = words.partition(NAMED_RESULT_MARKS.closing)
    return MarkedResult(result_text.strip(), tool, span) if closing_mark else None
