"""A recorded conversation as messages whose calls hold their results, whatever form it was stored in."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolformer_dag.conversations.record_paths import RecordPath


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call of a tool, with its result.

    Attributes:
        tool: The tool's name.
        arguments: The arguments as an object, which is `{"input": ...}` if they were no object in the record.
        id: The id of the call in its record, or None if there is none.
        number: The index of the raw message in its conversation, and of the call in that message.
        place: The path to the call in its record.
        copies: The paths to further copies of the call in its record.
        result: What the tool answered, or None if no answer is recorded.
        failed: Whether the answer reports a failure.
        answered: The path to the result in the record, or None without a result.
    """

    tool: str
    arguments: Any
    id: str | None = None
    number: tuple[int, int] = (0, 0)
    place: RecordPath = ()
    copies: tuple[RecordPath, ...] = ()
    result: str | None = None
    failed: bool = False
    answered: RecordPath | None = None


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A message of a recorded conversation.

    Attributes:
        role: The role of the writer: "system", "user", "assistant", or another one as it was recorded.
        content: The text, without thoughts, calls and results.
        calls: The calls that the message makes, each with its result.
        place: The path to the message in its record, or None for a message without a record.
        thoughts: What the assistant thought before this message. It is "" without thoughts, and for messages of others.
        thought_places: The paths to these thoughts in the record.
    """

    role: str
    content: str
    calls: tuple[RecordedCall, ...] = ()
    place: RecordPath | None = field(default=None, compare=False)
    thoughts: str = ""
    thought_places: tuple[RecordPath, ...] = field(default=(), compare=False)


def remove_call(
    messages: Sequence[RecordedMessage], message_index: int, call_index: int
) -> tuple[RecordedMessage, ...]:
    """Copy a conversation without one of its calls.

    The message of the call is left out too if nothing else is in it.

    Args:
        messages: The conversation.
        message_index: The index of the message.
        call_index: The index of the call in that message.
    """
    messages_before = messages[:message_index]
    message = messages[message_index]
    messages_behind = messages[message_index + 1 :]

    remaining_calls = message.calls[:call_index] + message.calls[call_index + 1 :]
    is_emptied = not remaining_calls and not message.content.strip()
    if is_emptied:
        return (*messages_before, *messages_behind)

    changed_message = replace(message, calls=remaining_calls)
    return (*messages_before, changed_message, *messages_behind)


def replace_result(
    messages: Sequence[RecordedMessage], message_index: int, call_index: int, new_result: str
) -> tuple[RecordedMessage, ...]:
    """Copy a conversation with another result for one of its calls.

    Args:
        messages: The conversation.
        message_index: The index of the message.
        call_index: The index of the call in that message.
        new_result: The new result.
    """
    message = messages[message_index]
    changed_call = replace(message.calls[call_index], result=new_result)
    changed_calls = (*message.calls[:call_index], changed_call, *message.calls[call_index + 1 :])

    changed_message = replace(message, calls=changed_calls)
    return (*messages[:message_index], changed_message, *messages[message_index + 1 :])


def iter_indexed_openai_messages(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Convert a conversation to messages in OpenAI's form.

    Call ids have nine characters, as Mistral's chat templates require. They stay the same if another call is left out.

    Yields:
        The index of the recorded message, and a message made from it. The results of calls are messages of their own.
    """
    for message_index, message in enumerate(messages):
        for openai_message in _iter_openai_messages(message):
            yield message_index, openai_message


def _iter_openai_messages(message: RecordedMessage) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form, then a message for each result of its calls."""
    if message.role == "user" and message.calls:
        # Chat templates accept only calls of the assistant, so that calls of the user are written as text.
        yield {"role": "user", "content": _format_content_with_calls(message)}
        return

    yield _build_openai_message(message)
    for call in message.calls:
        if call.result is not None:
            yield _build_openai_result(call)


def _build_openai_message(message: RecordedMessage) -> dict[str, Any]:
    """Build a message in OpenAI's form with its calls, without their results."""
    openai_message: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        openai_message["tool_calls"] = [_build_openai_call(call) for call in message.calls]
    return openai_message


def _build_openai_call(call: RecordedCall) -> dict[str, Any]:
    """Build the item for a call in OpenAI's list `tool_calls`."""
    return {
        "id": _build_openai_call_id(call),
        "type": "function",
        "function": {"name": call.tool, "arguments": call.arguments},
    }


def _build_openai_result(call: RecordedCall) -> dict[str, Any]:
    """Build the message in OpenAI's form that brings the result of a call."""
    return {"role": "tool", "tool_call_id": _build_openai_call_id(call), "name": call.tool, "content": call.result}


def _format_content_with_calls(message: RecordedMessage) -> str:
    """Write a message and its calls as one text.

    Each call is a line, such as `[search({"q": "Oslo"}) -> 7 degrees]`.
    """
    lines = []
    if message.content:
        lines.append(message.content)

    for call in message.calls:
        arguments_json = json.dumps(call.arguments, ensure_ascii=False)
        result_text = "" if call.result is None else f" -> {call.result}"
        lines.append(f"[{call.tool}({arguments_json}){result_text}]")
    return "\n".join(lines)


def _build_openai_call_id(call: RecordedCall) -> str:
    """Build the id of a call from its number: "c00002001" for (2, 1), the second call of the third raw message."""
    message_index, call_index = call.number
    return f"c{message_index:05}{call_index:03}"
