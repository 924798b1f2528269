"""Read the calls and results of a conversation that has no fields for calls from the marks in its texts.

Calls count in what the assistant wrote outside of its thinking, results in messages of tools, and in what a user or the
assistant's own text brings while a call waits.
"""

from collections.abc import Sequence
from dataclasses import replace

from toolformer_dag.conversations.marks import (
    MarkedCall,
    MarkedResult,
    are_whole,
    has_call_marks,
    marked_calls,
    marked_results,
    whole_result,
    without_spans,
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

    Where calls stand in fields, no text is searched for calls; where results do too, none for results. `faults`: gets
    marks of calls that cannot be read (unreadable_call), or that stand beside calls in fields (marks_beside_fields).
    """
    has_call_fields = any(message.calls for message in messages)
    has_result_fields = any(message.results for message in messages)
    if has_call_fields:
        for message in messages:
            if message.role == "assistant" and has_call_marks(message.text):
                faults.append(("marks_beside_fields", f"message {message.number}: {message.text[:SHOWN]}"))
        if has_result_fields:
            return list(messages)
    has_searches = any(SEARCH_RESULT in message.text for message in messages)
    read = list[RawMessage]()
    waiting = 0
    for message in messages:
        if message.role == "assistant" and not has_call_fields:
            parts = _read_assistant(message, has_searches, faults)
        elif message.role == "tool":
            parts = [_read_tool(message)]
        elif waiting > 0:
            parts = [_read_user(message)]
        else:
            parts = [message]
        for part in parts:
            waiting = max(0, waiting + len(part.calls) - len(part.results))
        read.extend(parts)
    return read


def _read_assistant(message: RawMessage, has_searches: bool, faults: list[Fault]) -> list[RawMessage]:
    """Return a message of the assistant with the calls of its text.

    It is several where results stand in the text too: each part ends with its results, and the next one goes on.
    """
    parts = [replace(message, words=[], calls=[], results=list(message.results))]
    for words in message.words:
        marked = marked_calls(words.text, has_searches)
        for text in marked.unread:
            faults.append(("unreadable_call", f"message {message.number}: {text[:SHOWN]}"))
        if words.path is None or not marked.calls:
            parts[-1].words.append(words)
            continue
        results = [result for result in marked_results(words.text) if result.span > marked.calls[0].span]
        _cut(parts, words.text, words.path, marked.calls, results)
    return parts


def _cut(
    parts: list[RawMessage],
    text: str,
    path: Path,
    calls: Sequence[MarkedCall],
    results: Sequence[MarkedResult],
) -> None:
    """Add the words, calls and results of a text to the last of the parts; what follows a result begins a new one."""
    position = 0
    in_order: list[MarkedCall | MarkedResult] = sorted([*calls, *results], key=lambda marked: marked.span)
    for marked in in_order:
        start, end = marked.span
        begins_new = bool(parts[-1].results) and isinstance(marked, MarkedCall)
        if begins_new or (parts[-1].results and text[position:start].strip(BETWEEN_CALLS)):
            parts.append(RawMessage(parts[-1].number, "assistant", parts[-1].path))
        if text[position:start].strip(BETWEEN_CALLS):
            parts[-1].words.append(Words(text[position:start].strip(), (*path, (position, start))))
        if isinstance(marked, MarkedCall):
            parts[-1].calls.append(CallAt(marked.found, ((*path, marked.span, *marked.inside),)))
        else:
            parts[-1].results.append(_result(marked, path))
        position = max(position, end)
    rest = text[position:].strip() if text[position:].strip(BETWEEN_CALLS) else ""
    if rest and parts[-1].results:
        parts.append(RawMessage(parts[-1].number, "assistant", (*path, (position, len(text)))))
    if rest:
        parts[-1].words.append(Words(rest, (*path, (position, len(text)))))


def _read_tool(message: RawMessage) -> RawMessage:
    """Return a message of a tool with the results between marks in its text; as it is where it has none."""
    results = list[ResultAt]()
    for result in message.results:
        content = result.found.content
        marked = marked_results(content) if isinstance(content, str) else []
        path = _content_path(result)
        if not are_whole(marked, str(content)) or path is None:
            whole = whole_result(content) if isinstance(content, str) else None
            found = result.found if whole is None else replace(result.found, content=whole.text)
            results.append(result._replace(found=found))
        elif len(marked) == 1:
            [only] = marked
            found = replace(result.found, content=only.text, tool=only.tool or result.found.tool)
            results.append(result._replace(found=found))
        else:
            results.extend(_result(part, path) for part in marked)
    return replace(message, results=results)


def _content_path(result: ResultAt) -> Path | None:
    """Return the way to the text of a message of a tool; None where it is no text of the message itself."""
    beside = result.found.beside
    for key in ("content", "value", "text"):
        if isinstance(beside, dict) and beside.get(key) is result.found.content:
            return (*result.path, key)
    return None


def _read_user(message: RawMessage) -> RawMessage:
    """Return a message that came while a call waits, with the results between marks in its text."""
    read = replace(message, words=[], results=list(message.results))
    for words in message.words:
        whole = whole_result(words.text)
        marked = marked_results(words.text)
        if words.path is None or (whole is None and not marked):
            read.words.append(words)
            continue
        if whole is not None and not marked:
            read.results.append(_result(whole, words.path))
            continue
        read.results.extend(_result(result, words.path) for result in marked)
        rest = without_spans(words.text, [result.span for result in marked]).strip()
        if rest:
            read.words.append(Words(rest, words.path))
    return read


def _result(marked: MarkedResult, path: Path) -> ResultAt:
    return ResultAt(FoundResult(marked.text, None, marked.tool, None), (*path, marked.span))
