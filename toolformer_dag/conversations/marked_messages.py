"""Read calls and results from the marks in the texts of a conversation that has no fields for them.

Calls count in texts of the assistant, outside of its thinking. Results count in messages of tools, in texts of the
assistant behind a call, and in other messages while a call waits for its result.
"""

from collections.abc import Sequence
from dataclasses import replace

from toolformer_dag.conversations.mark_scanner import TextSpan, remove_spans
from toolformer_dag.conversations.marks import (
    MarkedCall,
    MarkedResult,
    are_results_whole_text,
    find_marked_calls,
    find_marked_results,
    find_untagged_result,
    has_call_marks,
)
from toolformer_dag.conversations.raw_messages import Fault, LocatedCall, LocatedResult, RawMessage, Words
from toolformer_dag.conversations.record_paths import RecordPath
from toolformer_dag.conversations.shapes import FoundResult

MAX_DETAIL_CHARACTERS = 80
"""Characters of a text in the detail of a fault."""
CHARACTERS_BETWEEN_CALLS = "[], \n"
"""Characters between calls in Python's notation of a list, which are no words."""
SEARCH_RESULT_MARK = "<information>"
"""The mark of a search result; `<search>` is a call in conversations that contain it."""


def extract_marked_calls(messages: Sequence[RawMessage], faults: list[Fault]) -> list[RawMessage]:
    """Move calls and results that stand between marks in the texts of a conversation to fields.

    Such a text is `<tool_call>{"name": "search", "arguments": {}}</tool_call>`. How much is searched depends on the
    fields that the messages have already:
    - if calls and results have fields, no text is searched
    - if only calls have fields, texts are searched for results
    - else texts are searched for calls and results

    Args:
        messages: The messages of the conversation.
        faults: Calls between marks that cannot be read (unreadable_call) are appended to it, and marks of calls in a
            conversation whose calls have fields (marks_beside_fields).

    Returns:
        The messages. A message of the assistant with words behind a result is cut into several.
    """
    has_call_fields = any(message.calls for message in messages)
    has_result_fields = any(message.results for message in messages)
    if has_call_fields:
        faults += _list_faults_for_marks(messages)

    if has_call_fields and has_result_fields:
        return list(messages)
    return _extract_from_texts(messages, reads_calls=not has_call_fields, faults=faults)


def _extract_from_texts(messages: Sequence[RawMessage], *, reads_calls: bool, faults: list[Fault]) -> list[RawMessage]:
    """Move the results in the texts of a conversation to fields, and the calls too if `reads_calls` is true.

    Args:
        messages: The messages of the conversation.
        reads_calls: Whether texts of the assistant are searched for calls.
        faults: Calls that cannot be read are appended to it.
    """
    # In such conversations `<search>Oslo weather</search>` is a call. In others it is only words.
    has_search_results = any(SEARCH_RESULT_MARK in message.text for message in messages)
    reader = _MarkReader(reads_calls=reads_calls, search_tags_are_calls=has_search_results, faults=faults)

    read_messages = list[RawMessage]()
    for message in messages:
        read_messages += reader.extract_calls_and_results(message)
    return read_messages


def _list_faults_for_marks(messages: Sequence[RawMessage]) -> list[Fault]:
    """List a fault for each message of the assistant with marks of a call in its text, such as `<tool_call>`."""
    faults = list[Fault]()
    for message in messages:
        if message.role == "assistant" and has_call_marks(message.text):
            detail = f"message {message.index}: {message.text[:MAX_DETAIL_CHARACTERS]}"
            faults.append(("marks_beside_fields", detail))
    return faults


class _MarkReader:
    """Reads the calls and results in the texts of a conversation, message by message.

    Its state is the number of calls that still wait for their result.
    """

    def __init__(self, *, reads_calls: bool, search_tags_are_calls: bool, faults: list[Fault]) -> None:
        """Begin a conversation.

        Args:
            reads_calls: Whether texts of the assistant are searched for calls.
            search_tags_are_calls: Whether `<search>Oslo weather</search>` is a call.
            faults: Calls that cannot be read are appended to it.
        """
        self._reads_calls = reads_calls
        self._search_tags_are_calls = search_tags_are_calls
        self._faults = faults
        self._waiting_call_count = 0
        """The calls so far whose result has not come yet."""

    def extract_calls_and_results(self, message: RawMessage) -> list[RawMessage]:
        """Move the calls and results that a message has in its texts, between marks, to its fields.

        Also updates how many calls wait for a result: only while some do are results sought in messages of any role.

        Returns:
            The message, or several if the assistant says more after a result.
        """
        messages = self._extract_by_role(message)
        for read_message in messages:
            # Negative if the message brings results of earlier calls.
            waiting_count_change = len(read_message.calls) - len(read_message.results)
            self._waiting_call_count = max(0, self._waiting_call_count + waiting_count_change)
        return messages

    def _extract_by_role(self, message: RawMessage) -> list[RawMessage]:
        """Move the calls and results in the texts of a message to fields, in the way that fits its role."""
        if message.role == "assistant" and self._reads_calls:
            return self._split_assistant_message(message)
        if message.role == "tool":
            return [_split_results_of_tool_message(message)]
        if self._waiting_call_count > 0:  # the message may bring a result, whatever its role
            return [_move_results_out_of_words(message)]
        return [message]

    def _split_assistant_message(self, message: RawMessage) -> list[RawMessage]:
        """Move the calls and results in the texts of the assistant to fields.

        Returns:
            The message, cut after its results. "Look: CALL RESULT Warm." becomes "Look:" with the call and its result,
            and a second message "Warm.".
        """
        cutter = _MessageCutter(message)
        for words in message.words:
            marked_calls = find_marked_calls(words.text, self._search_tags_are_calls)
            self._report_unreadable_calls(marked_calls.unreadable_texts, message.index)

            # Without a path (words joined from several values), a call in them could have no path either.
            if words.path is None or not marked_calls.calls:
                cutter.add_words(words)
                continue

            calls_and_results = _list_calls_and_results(words.text, marked_calls.calls)
            cutter.add_text(words.text, words.path, calls_and_results)
        return cutter.messages

    def _report_unreadable_calls(self, unreadable_texts: Sequence[str], message_index: int) -> None:
        """Add a fault for each piece of a message with marks of a call that cannot be read."""
        for text in unreadable_texts:
            self._faults.append(("unreadable_call", f"message {message_index}: {text[:MAX_DETAIL_CHARACTERS]}"))


def _list_calls_and_results(text: str, calls: Sequence[MarkedCall]) -> list[MarkedCall | MarkedResult]:
    """List the calls of a text and the results behind the first call, in the order of the text.

    Args:
        text: The text.
        calls: The calls in it, at least one, in the order of the text.
    """
    first_call_span = calls[0].span
    results = [result for result in find_marked_results(text) if result.span > first_call_span]
    return sorted([*calls, *results], key=lambda call_or_result: call_or_result.span)


class _MessageCutter:
    """Cuts a message of the assistant into messages that each have words, then calls, then results.

    The text `Look: CALL1 RESULT1 Warm. CALL2 RESULT2` becomes two messages: "Look:" with call 1 and its result, and
    "Warm." with call 2 and its result.

    Attributes:
        messages: The messages so far. Everything is added to the last one.
    """

    def __init__(self, message: RawMessage) -> None:
        """Begin with the message itself, without its words and calls."""
        self.messages = [replace(message, words=[], calls=[], results=list(message.results))]

    def add_words(self, words: Words) -> None:
        """Add words to the last message."""
        self.messages[-1].words.append(words)

    def add_text(self, text: str, text_path: RecordPath, marked_parts: Sequence[MarkedCall | MarkedResult]) -> None:
        """Add a text of the assistant to `messages`, divided into words, calls and results.

        Args:
            text: The text.
            text_path: The path to the text in the record.
            marked_parts: The calls and results in the text, in its order.
        """
        added_end = 0  # everything before this offset is added
        for marked_part in marked_parts:
            # Several calls between one pair of marks have the same span. For the second one, `start` lies before
            # `added_end`, and no words are added.
            start, end = marked_part.span
            self._add_words_of_span(text, text_path, (added_end, start))

            if isinstance(marked_part, MarkedCall):
                self._add_call(marked_part, text_path)
            else:
                self.messages[-1].results.append(_locate_result(marked_part, text_path))
            added_end = max(added_end, end)

        self._add_last_words(text, text_path, added_end)

    def _add_words_of_span(self, text: str, text_path: RecordPath, span: TextSpan) -> None:
        """Add the words that stand before a call or a result.

        If the last message has results, the words begin a new message.

        Args:
            text: The text of the assistant.
            text_path: The path to the text in the record.
            span: The start and end of the words in the text.
        """
        start, end = span
        span_text = text[start:end]
        if not span_text.strip(CHARACTERS_BETWEEN_CALLS):
            return

        self._begin_message_after_results(self.messages[-1].path)
        words_path = (*text_path, _strip_span(text, span))
        self.add_words(Words(span_text.strip(), words_path))

    def _add_call(self, call: MarkedCall, text_path: RecordPath) -> None:
        """Add a call. If the last message has results, the call begins a new message."""
        self._begin_message_after_results(self.messages[-1].path)
        call_path = (*text_path, call.span, *call.path_in_span)
        self.messages[-1].calls.append(LocatedCall(call.found_call, (call_path,)))

    def _add_last_words(self, text: str, text_path: RecordPath, start: int) -> None:
        """Add the words from `start` to the end of a text.

        If the last message has results, the words begin a new message.
        """
        last_words = text[start:]
        if not last_words.strip(CHARACTERS_BETWEEN_CALLS):
            return

        span = (start, len(text))
        self._begin_message_after_results((*text_path, span))
        words_path = (*text_path, _strip_span(text, span))
        self.add_words(Words(last_words.strip(), words_path))

    def _begin_message_after_results(self, path: RecordPath) -> None:
        """Begin another message with the same index if the last one has results.

        Args:
            path: The path of the new message.
        """
        last_message = self.messages[-1]
        if last_message.results:
            self.messages.append(RawMessage(last_message.index, "assistant", path))


def _strip_span(text: str, span: TextSpan) -> TextSpan:
    """Shorten a span of a text by the white space at its beginning and its end: (0, 5) in "  Hi " becomes (2, 4)."""
    start, end = span
    span_text = text[start:end]
    leading_space_count = len(span_text) - len(span_text.lstrip())
    return start + leading_space_count, start + len(span_text.rstrip())


def _split_results_of_tool_message(message: RawMessage) -> RawMessage:
    """Copy a message of a tool, splitting its results at the marks in their texts."""
    results = list[LocatedResult]()
    for result in message.results:
        results += _split_result_by_marks(result)
    return replace(message, results=results)


def _split_result_by_marks(result: LocatedResult) -> list[LocatedResult]:
    """Split the text of a result at the tags in it.

    Returns:
        - for `<tool_response>17</tool_response><tool_response>4</tool_response>`: two results, "17" and "4"
        - for `<tool_response>17</tool_response>` or `Observation: 17`: the result "17"
        - for any other text, also one with words beside tags: the result itself
    """
    text = result.found_result.content
    if not isinstance(text, str):
        return [result]

    tagged_results = find_marked_results(text)
    text_path = _find_result_text_path(result)  # None if the text is no field of the message
    if are_results_whole_text(tagged_results, text) and text_path is not None:
        return _split_result_by_tags(result, tagged_results, text_path)

    untagged_result = find_untagged_result(text)
    if untagged_result is None:
        return [result]
    return [_replace_content(result, untagged_result.text)]


def _split_result_by_tags(
    result: LocatedResult, tagged_results: Sequence[MarkedResult], text_path: RecordPath
) -> list[LocatedResult]:
    """Turn the results between the tags of a result's text into results of their own.

    Example:
        `<tool_response>17</tool_response><tool_response>4</tool_response>` becomes the results "17" and "4".

    Args:
        result: The result whose text consists of tagged results. A single one keeps its id and path.
        tagged_results: The results between the tags, at least one.
        text_path: The path to the text.
    """
    if len(tagged_results) > 1:
        return [_locate_result(tagged_result, text_path) for tagged_result in tagged_results]

    [tagged_result] = tagged_results
    return [_replace_content(result, tagged_result.text, tool=tagged_result.tool)]


def _replace_content(result: LocatedResult, content: str, tool: str | None = None) -> LocatedResult:
    """Copy a result with another content, and with another tool if one is given."""
    old_result = result.found_result
    new_result = replace(old_result, content=content, tool=tool or old_result.tool)
    return result._replace(found_result=new_result)


def _find_result_text_path(result: LocatedResult) -> RecordPath | None:
    """Find where in the record the text of a result stands.

    Example:
        For the message `{"role": "tool", "content": "17"}` at the path ("messages", 2), the path is
        ("messages", 2, "content").

    Returns:
        The path, or None if the text is not a field of the object that holds the result.
    """
    result_object = result.found_result.status_fields  # the message or a part of it, None for a text alone
    if not isinstance(result_object, dict):
        return None

    for key in ("content", "value", "text"):
        # `is` finds the field that the content was taken from unchanged.
        if result_object.get(key) is result.found_result.content:
            return (*result.path, key)
    return None


def _move_results_out_of_words(message: RawMessage) -> RawMessage:
    """Move the results in the texts of a message from its words to its results.

    For example, the words `<tool_response>17</tool_response> Go on.` become the result "17" and the words "Go on.".
    """
    divided_message = replace(message, words=[], results=list(message.results))
    for words in message.words:
        results = _list_results_in_text(words.text)
        if words.path is None or not results:  # without a path (joined words), a result could have none either
            divided_message.words.append(words)
            continue

        divided_message.results += [_locate_result(result, words.path) for result in results]
        divided_message.words += _list_words_beside_results(words.text, results)
    return divided_message


def _list_words_beside_results(text: str, results: Sequence[MarkedResult]) -> list[Words]:
    """List the words of a text beside its results, joined and without a path.

    Returns:
        A list with the words, or an empty list if there are none.
    """
    result_spans = [result.span for result in results]
    remaining_text = remove_spans(text, result_spans).strip()
    return [Words(remaining_text, path=None)] if remaining_text else []


def _list_results_in_text(text: str) -> list[MarkedResult]:
    """List the results between tags in a text.

    Without tags, the whole text is one result if its first words say so, as in `Observation: 17`.
    """
    tagged_results = find_marked_results(text)
    if tagged_results:
        return tagged_results

    untagged_result = find_untagged_result(text)
    return [] if untagged_result is None else [untagged_result]


def _locate_result(marked_result: MarkedResult, text_path: RecordPath) -> LocatedResult:
    """Add the path in the record to a result that was found in a text.

    Args:
        marked_result: The result.
        text_path: The path to the text in the record.
    """
    found_result = FoundResult(content=marked_result.text, tool=marked_result.tool)
    return LocatedResult(found_result, (*text_path, marked_result.span))
