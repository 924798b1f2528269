"""A recorded conversation as messages whose calls hold their results, whatever form it was stored in."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolformer_dag.conversations.record_paths import Path


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call of a tool, with its result.

    - `tool`: the tool's name
    - `arguments`: usually an object; `{"input": ...}` for arguments that are no object
    - `id`: the id of the call in its record; None without one
    - `number`: the index of the raw message in its conversation, and of the call in that message
    - `place`: the path to the call in its record
    - `copies`: the paths to further copies of the call in its record
    - `result`: what the tool answered; None where no answer is recorded
    - `failed`: whether the answer reports a failure
    - `answered`: the path to the result in the record; None without a result
    """

    tool: str
    arguments: Any
    id: str | None = None
    number: tuple[int, int] = (0, 0)
    place: Path = ()
    copies: tuple[Path, ...] = ()
    result: str | None = None
    failed: bool = False
    answered: Path | None = None


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A message of a recorded conversation.

    - `role`: system, user, assistant, or another role as it was recorded
    - `content`: the text, without thoughts, calls and results
    - `calls`: the calls that the message makes, each with its result
    - `place`: the path to the message in its record; None for a message without a record
    - `thoughts`: what the assistant thought before this message; "" without thoughts, and for messages of others
    - `thought_places`: the paths to these thoughts in the record
    """

    role: str
    content: str
    calls: tuple[RecordedCall, ...] = ()
    place: Path | None = field(default=None, compare=False)
    thoughts: str = ""
    thought_places: tuple[Path, ...] = field(default=(), compare=False)


def without_call(messages: Sequence[RecordedMessage], number: int, index: int) -> tuple[RecordedMessage, ...]:
    """Remove a call from a conversation.

    Its message is removed too if nothing else is in it.

    Args:
        messages: The conversation.
        number: The index of the message.
        index: The index of the call in that message.
    """
    message = messages[number]
    remaining_calls = message.calls[:index] + message.calls[index + 1 :]

    remaining_message: tuple[RecordedMessage, ...] = ()
    if remaining_calls or message.content.strip():
        remaining_message = (replace(message, calls=remaining_calls),)
    return (*messages[:number], *remaining_message, *messages[number + 1 :])


def with_result(
    messages: Sequence[RecordedMessage], number: int, index: int, result: str
) -> tuple[RecordedMessage, ...]:
    """Replace the result of a call in a conversation.

    Args:
        messages: The conversation.
        number: The index of the message.
        index: The index of the call in that message.
        result: The new result.
    """
    message = messages[number]
    changed_call = replace(message.calls[index], result=result)
    calls = (*message.calls[:index], changed_call, *message.calls[index + 1 :])
    changed_message = replace(message, calls=calls)
    return (*messages[:number], changed_message, *messages[number + 1 :])


def to_openai(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Convert a conversation to messages in OpenAI's form.

    Call ids have nine characters, as Mistral's chat templates require. They stay the same if another call is left out.

    Yields:
        The index of the recorded message, and a message made from it. The results of calls are messages of their own.
    """
    for number, message in enumerate(messages):
        for openai_message in _iter_openai_messages(message):
            yield number, openai_message


def _iter_openai_messages(message: RecordedMessage) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form, then a message for each result of its calls."""
    if message.role == "user" and message.calls:
        # Chat templates accept only calls of the assistant, so that calls of the user are written as text.
        yield {"role": "user", "content": _format_content_with_calls(message)}
        return
    yield _to_openai_message(message)
    for call in message.calls:
        if call.result is not None:
            yield _to_openai_result(call)


def _to_openai_message(message: RecordedMessage) -> dict[str, Any]:
    """Return a message in OpenAI's form with its calls, without their results."""
    openai_message: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        openai_message["tool_calls"] = [_to_openai_call(call) for call in message.calls]
    return openai_message


def _to_openai_call(call: RecordedCall) -> dict[str, Any]:
    """Return a call as an item of OpenAI's `tool_calls`."""
    return {
        "id": _build_openai_id(call),
        "type": "function",
        "function": {"name": call.tool, "arguments": call.arguments},
    }


def _to_openai_result(call: RecordedCall) -> dict[str, Any]:
    """Return the result of a call as OpenAI's message of a tool."""
    return {"role": "tool", "tool_call_id": _build_openai_id(call), "name": call.tool, "content": call.result}


def _format_content_with_calls(message: RecordedMessage) -> str:
    """Write a message and its calls as one text.

    Each call is a line, such as `[search({"q": "Oslo"}) -> 7 degrees]`.
    """
    lines = []
    if message.content:
        lines.append(message.content)

    for call in message.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        result = "" if call.result is None else f" -> {call.result}"
        lines.append(f"[{call.tool}({arguments}){result}]")
    return "\n".join(lines)


def _build_openai_id(call: RecordedCall) -> str:
    """Return an id that is made of the number of a call: "c00002001" for (2, 1)."""
    message_number, call_index = call.number
    return f"c{message_number:05}{call_index:03}"
