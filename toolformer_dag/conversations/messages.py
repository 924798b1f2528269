"""A recorded conversation, whatever form it was stored in: messages, with each result beside its call."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolformer_dag.conversations.record_paths import Path


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call of a tool, with its result.

    - `arguments`: usually an object; `{"input": ...}` for arguments that are none
    - `id`: the record's own name for the call; None where it has none
    - `number`: of the raw message in its conversation, and of the call in that message
    - `place`: the way to the call in its record; `copies`: the ways to it where the record has it once more
    - `result`: what the tool answered; None where no answer is recorded
    - `failed`: whether the answer says that the call failed
    - `answered`: the way to the result in the record; None without a result
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
    """What somebody said: the text without thinking, calls and results, and the calls, each with its result.

    - `role`: system, user, assistant, or another one as it was recorded
    - `place`: the way to it in its record; None of a message that is in no record
    """

    role: str
    content: str
    calls: tuple[RecordedCall, ...] = ()
    place: Path | None = field(default=None, compare=False)


def without_call(messages: Sequence[RecordedMessage], number: int, index: int) -> tuple[RecordedMessage, ...]:
    """Return the conversation in which call `index` of message `number` was never made.

    A message that is left without words and calls goes too.
    """
    message = messages[number]
    other_calls = message.calls[:index] + message.calls[index + 1 :]
    left: tuple[RecordedMessage, ...] = ()
    if other_calls or message.content.strip():
        left = (replace(message, calls=other_calls),)
    return (*messages[:number], *left, *messages[number + 1 :])


def with_result(
    messages: Sequence[RecordedMessage], number: int, index: int, result: str
) -> tuple[RecordedMessage, ...]:
    """Return the conversation in which call `index` of message `number` had another result."""
    message = messages[number]
    changed = replace(message.calls[index], result=result)
    calls = (*message.calls[:index], changed, *message.calls[index + 1 :])
    return (*messages[:number], replace(message, calls=calls), *messages[number + 1 :])


def to_openai(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield messages in OpenAI's form, each after the number of the one that it was in; results follow their calls.

    Ids have nine characters, as Mistral's templates want them. They are made of the numbers of calls, and so stay when
    another call is left out. Arguments are objects.
    """
    for number, message in enumerate(messages):
        if message.role == "user" and message.calls:  # templates know calls of the assistant alone
            yield number, {"role": "user", "content": _with_calls_in_words(message)}
            continue
        openai_message: dict[str, Any] = {"role": message.role, "content": message.content}
        calls = [
            {
                "id": _openai_id(call),
                "type": "function",
                "function": {"name": call.tool, "arguments": call.arguments},
            }
            for call in message.calls
        ]
        if calls:
            openai_message["tool_calls"] = calls
        yield number, openai_message
        for call in message.calls:
            if call.result is not None:
                yield (
                    number,
                    {"role": "tool", "tool_call_id": _openai_id(call), "name": call.tool, "content": call.result},
                )


def _with_calls_in_words(message: RecordedMessage) -> str:
    """Return what a user said and did: the words, and a line for each call with its result."""
    lines = [message.content] if message.content else []
    for call in message.calls:
        result = "" if call.result is None else f" -> {call.result}"
        lines.append(f"[{call.tool}({json.dumps(call.arguments, ensure_ascii=False)}){result}]")
    return "\n".join(lines)


def _openai_id(call: RecordedCall) -> str:
    raw_message, index = call.number
    return f"c{raw_message:05}{index:03}"
