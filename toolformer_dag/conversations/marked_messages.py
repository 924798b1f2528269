"""Read calls and results from the marks in the texts of a conversation that has no fields for them.

Calls count in texts of the assistant, outside of its thinking. Results count in messages of tools, in texts of the
assistant behind a call, and in other messages while a call waits for its result.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from toolformer_dag.conversations.mark_scanner import Span, without_spans
from toolformer_dag.conversations.marks import (
    MarkedCall,
    MarkedResult,
    consists_of,
    find_marked_calls,
    find_marked_results,
    find_untagged_result,
    has_call_marks,
)
from toolformer_dag.conversations.raw_messages import CallAt, Fault, RawMessage, ResultAt, Words
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundResult

SHOWN = 80
"""Characters of a text in the detail of a fault."""
BETWEEN_CALLS = "[], \n"
"""Characters between calls in Python's notation of a list, which are no words."""
SEARCH_RESULT = "<information>"
"""The mark of a search result; `<search>` is a call in conversations that contain it."""


def with_marked_calls(messages: Sequence[RawMessage], faults: list[Fault]) -> list[RawMessage]:
    """Move calls and results that stand between marks in the texts of a conversation to fields.

    How much is searched depends on the fields that the messages have already:
    - if calls and results have fields, no text is searched
    - if only calls have fields, texts are searched for results
    - else texts are searched for calls and results

    Args:
        messages: The messages of the conversation.
        faults: Calls between marks that cannot be read (unreadable_call) are appended to it, and marks of calls in a
            conversation whose calls have fields (marks_beside_fields).
    """
    has_call_fields = any(message.calls for message in messages)
    has_result_fields = any(message.results for message in messages)
    if has_call_fields:
        faults += _list_marks_beside_fields(messages)

    if has_call_fields and has_result_fields:
        return list(messages)
    return _search_texts(messages, reads_calls=not has_call_fields, faults=faults)


def _search_texts(messages: Sequence[RawMessage], *, reads_calls: bool, faults: list[Fault]) -> list[RawMessage]:
    """Return the messages with the results in their texts, and with the calls if `reads_calls`."""
    has_searches = any(SEARCH_RESULT in message.text for message in messages)
    reader = _MarkReader(reads_calls=reads_calls, has_searches=has_searches, faults=faults)
    return list(chain.from_iterable(map(reader.read, messages)))


def _list_marks_beside_fields(messages: Sequence[RawMessage]) -> list[Fault]:
    """Return a fault for each message of the assistant with marks of a call in its text."""
    faults = list[Fault]()
    for message in messages:
        if message.role == "assistant" and has_call_marks(message.text):
            faults.append(("marks_beside_fields", f"message {message.number}: {message.text[:SHOWN]}"))
    return faults


class _MarkReader:
    """Reads the calls and results in the texts of a conversation, message by message.

    Its state is the number of calls that still wait for their result.
    """

    def __init__(self, *, reads_calls: bool, has_searches: bool, faults: list[Fault]) -> None:
        """Begin a conversation.

        reads_calls: whether texts of the assistant are searched for calls. has_searches: whether `<search>` is a call.
        """
        self._reads_calls = reads_calls
        self._has_searches = has_searches
        self._faults = faults
        self._waiting_calls = 0

    def read(self, message: RawMessage) -> list[RawMessage]:
        """Move the calls and results in the texts of a message to fields.

        Returns:
            The message, or several if the assistant says more after a result.
        """
        parts = self._read_by_role(message)
        for part in parts:
            balance = len(part.calls) - len(part.results)
            self._waiting_calls = max(0, self._waiting_calls + balance)
        return parts

    def _read_by_role(self, message: RawMessage) -> list[RawMessage]:
        """Do what `read` says, in the way that fits the role of the message."""
        if message.role == "assistant" and self._reads_calls:
            return self._read_assistant_message(message)
        if message.role == "tool":
            return [_read_tool_message(message)]
        if self._waiting_calls > 0:  # the message may bring a result, whatever its role
            return [_read_user_message(message)]
        return [message]

    def _read_assistant_message(self, message: RawMessage) -> list[RawMessage]:
        """Move the calls and results in the texts of the assistant to fields.

        Returns:
            The message, cut after its results. "Look: CALL RESULT Warm." becomes "Look:" with the call and its result,
            and a second message "Warm.".
        """
        cutter = _MessageCutter(message)
        for words in message.words:
            marked = find_marked_calls(words.text, self._has_searches)
            self._report_unread(marked.unread, message.number)

            # Without a path (words joined from several values), a call in them could have no path either.
            if words.path is None or not marked.calls:
                cutter.add_words(words)
            else:
                calls_and_results = _with_results(words.text, marked.calls)
                cutter.add_text(words.text, words.path, calls_and_results)
        return cutter.messages

    def _report_unread(self, stretches: Sequence[str], message_number: int) -> None:
        """Add a fault for each stretch of a message with marks of a call that cannot be read."""
        for stretch in stretches:
            self._faults.append(("unreadable_call", f"message {message_number}: {stretch[:SHOWN]}"))


def _with_results(text: str, calls: Sequence[MarkedCall]) -> list[MarkedCall | MarkedResult]:
    """Return the calls of a text and the results behind the first of them, in the order of the text."""
    results = [result for result in find_marked_results(text) if result.span > calls[0].span]
    return sorted([*calls, *results], key=lambda marked: marked.span)


class _MessageCutter:
    """Cuts a message of the assistant into messages that each have words, then calls, then results.

    The text `Look: CALL1 RESULT1 Warm. CALL2 RESULT2` becomes two messages: "Look:" with call 1 and its result, and
    "Warm." with call 2 and its result. `messages` holds the messages so far; everything is added to the last one.
    """

    def __init__(self, message: RawMessage) -> None:
        """Begin with the message itself, without its words and calls."""
        self.messages = [replace(message, words=[], calls=[], results=list(message.results))]

    def add_words(self, words: Words) -> None:
        """Add words to the last message."""
        self.messages[-1].words.append(words)

    def add_text(self, text: str, path: Path, marked_parts: Sequence[MarkedCall | MarkedResult]) -> None:
        """Add a text of the assistant to `messages`, divided into words, calls and results.

        Args:
            text: The text.
            path: The path to the text in the record.
            marked_parts: The calls and results in the text, in its order.
        """
        added_end = 0  # everything before it is added
        for marked in marked_parts:
            start, end = marked.span  # several calls between one pair of marks have the same span
            self._add_words_between(text, path, (added_end, start))
            if isinstance(marked, MarkedCall):
                self._add_call(marked, path)
            else:
                self.messages[-1].results.append(_to_result_at(marked, path))
            added_end = max(added_end, end)

        self._add_last_words(text, path, added_end)

    def _add_words_between(self, text: str, path: Path, span: Span) -> None:
        """Add the words that stand before a call or a result.

        If the last message has results, the words begin a new message.
        """
        start, end = span
        between = text[start:end]
        if not between.strip(BETWEEN_CALLS):
            return

        self._end_results(self.messages[-1].path)
        self.add_words(Words(between.strip(), (*path, _strip_span(text, span))))

    def _add_call(self, call: MarkedCall, path: Path) -> None:
        """Add a call. Behind a result it begins a new message."""
        self._end_results(self.messages[-1].path)
        call_path = (*path, call.span, *call.inside)
        self.messages[-1].calls.append(CallAt(call.fields, (call_path,)))

    def _add_last_words(self, text: str, path: Path, start: int) -> None:
        """Add the words from `start` to the end of a text.

        If the last message has results, the words begin a new message.
        """
        rest = text[start:]
        if not rest.strip(BETWEEN_CALLS):
            return

        span = (start, len(text))
        self._end_results((*path, span))
        self.add_words(Words(rest.strip(), (*path, _strip_span(text, span))))

    def _end_results(self, path: Path) -> None:
        """Begin another message with the same number if the last one has results. path: of the new message."""
        last = self.messages[-1]
        if last.results:
            self.messages.append(RawMessage(last.number, "assistant", path))


def _strip_span(text: str, span: Span) -> Span:
    """Return a stretch of a text without the white space at its beginning and its end."""
    start, end = span
    stretch = text[start:end]
    return start + len(stretch) - len(stretch.lstrip()), start + len(stretch.rstrip())


def _read_tool_message(message: RawMessage) -> RawMessage:
    """Return a message of a tool, with its results as the marks in their texts divide them."""
    results = list[ResultAt]()
    for result in message.results:
        results += _split_by_marks(result)
    return replace(message, results=results)


def _split_by_marks(result: ResultAt) -> list[ResultAt]:
    """Split the text of a result at the tags in it.

    Returns:
        - for `<tool_response>17</tool_response><tool_response>4</tool_response>`: two results, "17" and "4"
        - for `<tool_response>17</tool_response>` or `Observation: 17`: the result "17"
        - for any other text, also one with words beside tags: the result itself
    """
    text = result.fields.content
    if not isinstance(text, str):
        return [result]

    tagged_results = find_marked_results(text)
    text_path = _find_text_path(result)  # None where the text is no field of the message
    if consists_of(tagged_results, text) and text_path is not None:
        return _split_by_tags(result, tagged_results, text_path)

    untagged = find_untagged_result(text)
    return [result] if untagged is None else [_with_content(result, untagged.text)]


def _split_by_tags(result: ResultAt, tagged: Sequence[MarkedResult], text_path: Path) -> list[ResultAt]:
    """Return the results between the tags of a result's text; a single one keeps the id and path of the result."""
    if len(tagged) > 1:
        return [_to_result_at(part, text_path) for part in tagged]
    return [_with_content(result, tagged[0].text, tool=tagged[0].tool)]


def _with_content(result: ResultAt, content: str, tool: str | None = None) -> ResultAt:
    """Return a result with another content, and with another tool if one is given."""
    fields = replace(result.fields, content=content, tool=tool or result.fields.tool)
    return result._replace(fields=fields)


def _find_text_path(result: ResultAt) -> Path | None:
    """Find the path to the text of a tool's message.

    Returns:
        The path, or None if the text is not a field of the message.
    """
    message = result.fields.status_fields
    for key in ("content", "value", "text"):
        if isinstance(message, dict) and message.get(key) is result.fields.content:
            return (*result.path, key)
    return None


def _read_user_message(message: RawMessage) -> RawMessage:
    """Move the results in the texts of a message from its words to its results.

    For example, the words `<tool_response>17</tool_response> Go on.` become the result "17" and the words "Go on.".
    """
    divided = replace(message, words=[], results=list(message.results))
    for words in message.words:
        results = _list_results_in_text(words.text)
        if words.path is None or not results:  # without a path (joined words), a result could have none either
            divided.words.append(words)
            continue

        divided.results += [_to_result_at(result, words.path) for result in results]
        divided.words += _list_words_left(words.text, results)
    return divided


def _list_words_left(text: str, results: Sequence[MarkedResult]) -> list[Words]:
    """Return the words of a text beside its results, without a path; an empty list where there are none."""
    rest = without_spans(text, [result.span for result in results]).strip()
    return [Words(rest, None)] if rest else []


def _list_results_in_text(text: str) -> list[MarkedResult]:
    """List the results between tags in a text.

    Without tags, the whole text is one result if its first words say so, as in `Observation: 17`.
    """
    tagged = find_marked_results(text)
    if tagged:
        return tagged
    untagged = find_untagged_result(text)
    return [] if untagged is None else [untagged]


def _to_result_at(marked: MarkedResult, path: Path) -> ResultAt:
    """Return a result of a text as a result of the record. path: of the text."""
    fields = FoundResult(content=marked.text, tool=marked.tool)
    return ResultAt(fields, (*path, marked.span))
