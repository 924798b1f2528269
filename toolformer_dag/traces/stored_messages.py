"""The messages of a conversation as JSON, as the table of conversations holds them."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from toolformer_dag.traces.conversations import RecordedCall, RecordedMessage


def messages_as_json(messages: Sequence[RecordedMessage]) -> str:
    """Return messages as JSON, which `messages_of` reads again; numbers keep all their digits."""
    fields = []
    for message in messages:
        calls = [_call_fields(call) for call in message.calls]
        fields.append(
            {"role": message.role, "content": message.content, "raw_number": message.raw_number, "calls": calls}
        )
    return json.dumps(fields, ensure_ascii=False)


def _call_fields(call: RecordedCall) -> dict[str, Any]:
    return {
        "tool": call.tool,
        "arguments": call.arguments,
        "id": call.id,
        "place": call.place,
        "result": call.result,
        "failed": call.failed,
        "answered": call.answered,
    }


def messages_of(stored: str) -> tuple[RecordedMessage, ...]:
    """Return the messages that `messages_as_json` wrote."""
    messages = []
    for fields in json.loads(stored):
        calls = tuple(_call(call_fields) for call_fields in fields["calls"])
        messages.append(RecordedMessage(fields["role"], fields["content"], calls, fields["raw_number"]))
    return tuple(messages)


def _call(fields: Mapping[str, Any]) -> RecordedCall:
    places = {name: _hashable(fields[name]) for name in ("place", "answered")}
    return RecordedCall(**{**fields, **places})


def _hashable(place: Any) -> Any:
    """Return a place with tuples where JSON has made lists: places are compared and kept in sets."""
    return tuple(_hashable(item) for item in place) if isinstance(place, list) else place


def text_digest(text: str) -> str:
    """Return a hash under which something is stored, the same on every machine and in every version."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
