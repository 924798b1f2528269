"""Write the messages of a conversation as JSON, as the table of conversations holds them, and read them again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage


def messages_as_json(messages: Sequence[RecordedMessage]) -> str:
    """Return messages as JSON, which `parse_messages` reads again. Numbers keep all their digits."""
    return json.dumps([_build_message_fields(message) for message in messages], ensure_ascii=False)


def _build_message_fields(message: RecordedMessage) -> dict[str, Any]:
    """Return the fields of a message by name, for JSON. Only messages with thoughts have fields for these."""
    calls = [_build_call_fields(call) for call in message.calls]
    fields = {"role": message.role, "content": message.content, "place": message.place, "calls": calls}
    if not message.thoughts:
        return fields
    return {**fields, "thoughts": message.thoughts, "thought_places": message.thought_places}


def _build_call_fields(call: RecordedCall) -> dict[str, Any]:
    """Return the fields of a call by name, for JSON.

    `place`, `copies` and `answered` are paths in the record: to the call, to further copies of it and to its result.
    `number` is the index of its message in the conversation, and its own in the message.
    """
    return {
        "tool": call.tool,
        "arguments": call.arguments,
        "id": call.id,
        "number": call.number,
        "place": call.place,
        "copies": call.copies,
        "result": call.result,
        "failed": call.failed,
        "answered": call.answered,
    }


def parse_messages(messages_json: str) -> tuple[RecordedMessage, ...]:
    """Read messages from JSON that `messages_as_json` wrote. Paths in the record become tuples again, as they were."""
    messages = []
    for fields in json.loads(messages_json):
        message = RecordedMessage(
            role=fields["role"],
            content=fields["content"],
            calls=tuple(_build_call(call_fields) for call_fields in fields["calls"]),
            place=_to_hashable(fields["place"]),
            thoughts=fields.get("thoughts", ""),
            thought_places=_to_hashable(fields.get("thought_places", [])),
        )
        messages.append(message)
    return tuple(messages)


def _build_call(fields: Mapping[str, Any]) -> RecordedCall:
    """Return the call with these fields. Its places, which JSON has made lists, become tuples again."""
    places = {name: _to_hashable(fields[name]) for name in ("number", "place", "copies", "answered")}
    return RecordedCall(**{**fields, **places})


def _to_hashable(place: Any) -> Any:
    """Return a place with tuples instead of lists, as ("a", 1) for ["a", 1], so that it is hashable."""
    if not isinstance(place, list):
        return place
    return tuple(_to_hashable(item) for item in place)


def compute_conversation_digest(messages: Sequence[RecordedMessage], messages_json: str) -> str:
    """Return the hash of a conversation by which its calls are known. Thoughts do not count.

    Args:
        messages: The messages of the conversation.
        messages_json: The same messages as `messages_as_json` writes them.
    """
    if not any(message.thoughts for message in messages):
        return compute_text_digest(messages_json)
    without_thoughts = [replace(message, thoughts="") for message in messages]
    return compute_text_digest(messages_as_json(without_thoughts))


def compute_text_digest(text: str) -> str:
    """Return a hash of a text, 32 hexadecimal digits, the same on every machine and in every version."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
