"""Read the calls and results of a conversation that has no fields for calls from the marks in its texts.

Calls count in what the assistant wrote outside of its thinking, results in messages of tools, and in what a user or the
assistant's own text brings while a call waits.
"""

from collections.abc import Sequence
from dataclasses import replace

from toolformer_dag.conversations.mark_scanner import without_spans
from toolformer_dag.conversations.marks import (
    MarkedCall,
    MarkedResult,
    consists_of,
    has_call_marks,
    marked_calls,
    marked_results,
    untagged_result,
)
from toolformer_dag.conversations.raw_messages import CallAt, Fault, RawMessage, ResultAt, Words
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundResult

SHOWN = 80
"""Characters of a text in the detail of a fault."""
BETWEEN_CALLS = "[], \n"
"""What stands between calls in a list of them as Python writes it, and is no words."""
SEARCH_RESULT = "<information>"
"""Where this stands in a conversation, `<search>` is a call."""


def with_marked_calls(messages: Sequence[RawMessage], faults: list[Fault]) -> list[RawMessage]:
    """Return the messages of a conversation with the calls and results that stand in their texts.

    - where calls and results stand in fields: no text is searched
    - where calls alone stand in fields: texts are searched for results
    - else texts of the assistant are searched for calls, and texts of others for results while a call waits for one

    Appends to `faults`: marks of calls that cannot be read (unreadable_call), or that stand beside calls in fields
    (marks_beside_fields).
    """
    has_call_fields = any(message.calls for message in messages)
    has_result_fields = any(message.results for message in messages)
    if has_call_fields:
        faults += _marks_beside_fields(messages)
    if has_call_fields and has_result_fields:
        return list(messages)
    has_searches = any(SEARCH_RESULT in message.text for message in messages)
    read_messages = list[RawMessage]()
    waiting_calls = 0
    for message in messages:
        if message.role == "assistant" and not has_call_fields:
            parts = _read_assistant(message, has_searches, faults)
        elif message.role == "tool":
            parts = [_read_tool(message)]
        elif waiting_calls > 0:  # the message may bring a result, whoever speaks
            parts = [_read_user(message)]
        else:
            parts = [message]
        for part in parts:
            waiting_calls = max(0, waiting_calls + len(part.calls) - len(part.results))
        read_messages.extend(parts)
    return read_messages


def _marks_beside_fields(messages: Sequence[RawMessage]) -> list[Fault]:
    """Return a fault for each message of the assistant with marks of a call in its text."""
    faults = list[Fault]()
    for message in messages:
        if message.role == "assistant" and has_call_marks(message.text):
            faults.append(("marks_beside_fields", f"message {message.number}: {message.text[:SHOWN]}"))
    return faults


def _read_assistant(message: RawMessage, has_searches: bool, faults: list[Fault]) -> list[RawMessage]:
    """Return a message of the assistant, with the calls of its text taken out of its words.

    It becomes several messages where results stand in the text too: each ends with its results, and the next goes on.
    Appends unreadable calls to `faults`.
    """
    cutter = _MessageCutter(message)
    for words in message.words:
        marked = marked_calls(words.text, has_searches)
        for text in marked.unread:
            faults.append(("unreadable_call", f"message {message.number}: {text[:SHOWN]}"))
        if words.path is None or not marked.calls:
            cutter.add_words(words)
            continue
        first_call = marked.calls[0]
        results = [result for result in marked_results(words.text) if result.span > first_call.span]
        cutter.add_text(words.text, words.path, marked.calls, results)
    return cutter.messages


class _MessageCutter:
    """Cuts a message of the assistant into messages that each say something, call tools and get results.

    State: `messages`, the messages so far, to the last of which everything is added. As an example, the text
    `Look: CALL1 RESULT1 Warm. CALL2 RESULT2` becomes two messages: "Look:" with call 1 and its result, and "Warm." with
    call 2 and its result.
    """

    def __init__(self, message: RawMessage) -> None:
        """Begin with the message itself, without its words and calls."""
        self.messages = [replace(message, words=[], calls=[], results=list(message.results))]

    def add_words(self, words: Words) -> None:
        """Add words to the last message."""
        self.messages[-1].words.append(words)

    def add_text(self, text: str, path: Path, calls: Sequence[MarkedCall], results: Sequence[MarkedResult]) -> None:
        """Add the words, calls and results of a text, in the order of the text. path: of the text in the record."""
        position = 0
        in_order: list[MarkedCall | MarkedResult] = sorted([*calls, *results], key=lambda marked: marked.span)
        for marked in in_order:
            start, end = marked.span
            self._add_words_between(text, path, position, start)
            if isinstance(marked, MarkedCall):
                self._add_call(marked, path)
            else:
                self.messages[-1].results.append(_result_at(marked, path))
            position = max(position, end)
        self._add_last_words(text, path, position)

    def _add_words_between(self, text: str, path: Path, start: int, end: int) -> None:
        """Add the words from `start` to `end`, before a call or a result. Behind a result they begin a new message."""
        between = text[start:end]
        if not between.strip(BETWEEN_CALLS):
            return
        if self.messages[-1].results:
            self._begin_message(self.messages[-1].path)
        self.add_words(Words(between.strip(), (*path, (start, end))))

    def _add_call(self, call: MarkedCall, path: Path) -> None:
        """Add a call. Behind a result it begins a new message."""
        if self.messages[-1].results:
            self._begin_message(self.messages[-1].path)
        call_path = (*path, call.span, *call.inside)
        self.messages[-1].calls.append(CallAt(call.found, (call_path,)))

    def _add_last_words(self, text: str, path: Path, start: int) -> None:
        """Add the words from `start` to the end of the text. Behind a result they begin a new message."""
        rest = text[start:]
        if not rest.strip(BETWEEN_CALLS):
            return
        rest_path = (*path, (start, len(text)))
        if self.messages[-1].results:
            self._begin_message(rest_path)
        self.add_words(Words(rest.strip(), rest_path))

    def _begin_message(self, path: Path) -> None:
        """Begin another message of the assistant, under the number of the one that is cut."""
        self.messages.append(RawMessage(self.messages[-1].number, "assistant", path))


def _read_tool(message: RawMessage) -> RawMessage:
    """Return a message of a tool, with each of its results parted into those that stand between marks in its text."""
    results = list[ResultAt]()
    for result in message.results:
        results += _parted_by_marks(result)
    return replace(message, results=results)


def _parted_by_marks(result: ResultAt) -> list[ResultAt]:
    """Return the results that the text of a result consists of.

    - `<tool_response>17</tool_response><tool_response>4</tool_response>`: two results
    - `<tool_response>17</tool_response>`: the result itself, with the text between the marks
    - `Observation: 17`: the result itself, with the text behind the beginning
    - anything else: the result as it is
    """
    text = result.found.content
    if not isinstance(text, str):
        return [result]
    marked = marked_results(text)
    text_path = _text_path(result)
    if consists_of(marked, text) and text_path is not None:
        if len(marked) > 1:
            return [_result_at(part, text_path) for part in marked]
        [whole] = marked
        return [result._replace(found=replace(result.found, content=whole.text, tool=whole.tool or result.found.tool))]
    untagged = untagged_result(text)
    if untagged is None:
        return [result]
    return [result._replace(found=replace(result.found, content=untagged.text))]


def _text_path(result: ResultAt) -> Path | None:
    """Return the path to the text of a message of a tool; None where it is no text of the message itself."""
    fields = result.found.beside
    for key in ("content", "value", "text"):
        if isinstance(fields, dict) and fields.get(key) is result.found.content:
            return (*result.path, key)
    return None


def _read_user(message: RawMessage) -> RawMessage:
    """Return a message that came while a call waits, with the results of its texts taken out of its words."""
    read = replace(message, words=[], results=list(message.results))
    for words in message.words:
        marked = marked_results(words.text)
        untagged = untagged_result(words.text)
        if words.path is None:
            read.words.append(words)
        elif marked:
            read.results.extend(_result_at(result, words.path) for result in marked)
            rest = without_spans(words.text, [result.span for result in marked]).strip()
            if rest:
                read.words.append(Words(rest, words.path))
        elif untagged is not None:
            read.results.append(_result_at(untagged, words.path))
        else:
            read.words.append(words)
    return read


def _result_at(marked: MarkedResult, path: Path) -> ResultAt:
    """Return a result of a text as a result of the record. path: of the text."""
    found = FoundResult(content=marked.text, tool=marked.tool)
    return ResultAt(found, (*path, marked.span))
