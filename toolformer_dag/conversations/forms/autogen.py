"""Messages and events of AutoGen, from version 0.4 on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import first_of, text_of
from toolformer_dag.conversations.raw_messages import CALLS, ROLES, StoredMessage
from toolformer_dag.conversations.record_paths import Path, value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult, id_in

LISTS: tuple[Path, ...] = (("messages",), ("llm_context", "messages"), ("llm_messages",), ("message_thread",))
"""Where what AutoGen stores has its messages: a result of a run, the state of an agent, that of a group's manager."""
CALL_TYPES = ("ToolCallRequestEvent", "AssistantMessage")
RESULT_TYPES = ("ToolCallExecutionEvent", "FunctionExecutionResultMessage")
WORD_TYPES = (
    "TextMessage",
    "MultiModalMessage",
    "StopMessage",
    "HandoffMessage",
    "ToolCallSummaryMessage",
    "StructuredMessage",
    "MemoryQueryEvent",
    "SystemMessage",
    "UserMessage",
    "AssistantMessage",
)
"""The types of messages that say something; `StructuredMessage[Answer]` counts as its first word."""
ROLE_OF_TYPE = {
    "SystemMessage": "system",
    "MemoryQueryEvent": "system",
    "UserMessage": "user",
    "AssistantMessage": "assistant",
}
"""By whom a message is where its type says it; elsewhere its source does."""
SILENT_TYPES = (
    "ModelClientStreamingChunkEvent",
    "UserInputRequestedEvent",
    "SelectSpeakerEvent",
    "SelectorEvent",
    "ThoughtEvent",
)
"""Types that say nothing: pieces of a message that follows, who speaks next, and thinking that no call follows."""
SIGN_TYPES = (*CALL_TYPES, *RESULT_TYPES, "TextMessage", "ModelClientStreamingChunkEvent", "UserMessage")
"""Types that make a list one of AutoGen's."""


def autogen_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages and events of AutoGen: their type says what they hold, their source is any agent's name."""
    path = messages_path(record)
    messages = value_at(record, path)
    people = set[str]()
    for message in messages:
        if _type_of(message) == "UserInputRequestedEvent":
            people.add(str(message.get("source")))
    call_ids = _call_ids(messages)
    for number, message in enumerate(messages):
        message_path: Path = (*path, number)
        if not isinstance(message, Mapping) or "type" not in message:
            yield StoredMessage(message_path, message)
            continue
        next_type = _type_of(messages[number + 1]) if number + 1 < len(messages) else None
        role = ROLE_OF_TYPE.get(_type_of(message)) or _role_of(str(message.get("source")), people)
        yield from _messages_of(message, message_path, role=role, next_type=next_type, call_ids=call_ids)


def _messages_of(
    message: Mapping[str, Any], path: Path, *, role: str, next_type: str | None, call_ids: Collection[str | None]
) -> Iterator[StoredMessage]:
    """Yield what a message or an event says, calls and returns; nothing for a type that says nothing.

    A thought before a call is the text that the model wrote beside it; one before an answer is its thinking. A summary
    repeats calls of events; with others, as where the events were not kept, it is a message of an unknown role, which
    is reported. So is a message of an unknown type.
    """
    kind = _type_of(message)
    content = message.get("content")
    if kind in CALL_TYPES and isinstance(content, list):
        if isinstance(message.get("thought"), str):
            yield StoredMessage((*path, "thought"), message["thought"], role)
        yield StoredMessage(path, message, CALLS)
    elif kind in RESULT_TYPES and isinstance(content, list):
        yield StoredMessage(path, {"content": [_typed_result(part) for part in content]}, "tool")
    elif _has_other_calls(message, call_ids):
        yield StoredMessage(path, {"content": _words(content)}, f"{kind} with calls of no event")
    elif kind in WORD_TYPES or (kind == "ThoughtEvent" and next_type in CALL_TYPES):
        yield StoredMessage(path, {"content": _words(content)}, role)
    elif kind == "CodeGenerationEvent":
        yield StoredMessage(path, message, call=_code_call(message))
    elif kind == "CodeExecutionEvent":
        exit_code = first_of(message, ("result.exit_code",))
        failure = {"error": exit_code not in (0, None)}
        result = FoundResult(first_of(message, ("result.output",)), status_fields=failure)
        yield StoredMessage(path, message, result=result)
    elif kind not in SILENT_TYPES:
        yield StoredMessage(path, message, role=kind)


def _type_of(message: Any) -> str:
    """Return the type of a message without what stands in brackets: StructuredMessage for StructuredMessage[Answer]."""
    return str(first_of(message, ("type",))).partition("[")[0]


def messages_path(record: Any) -> Path:
    """Return the path to the messages of what AutoGen has stored; to where they should stand if there are none."""
    if isinstance(record, list):
        return ()
    for path in LISTS:
        if isinstance(first_of(record, (".".join(map(str, path)),)), list):
            return path
    return LISTS[0]


def _call_ids(messages: Sequence[Any]) -> set[str | None]:
    """Return the ids of all calls but those that summaries repeat."""
    ids = set[str | None]()
    for message in messages:
        if _type_of(message) in CALL_TYPES and isinstance(message.get("content"), list):
            ids.update(id_in(call, ("id",)) for call in message["content"])
    return ids


def _has_other_calls(message: Mapping[str, Any], call_ids: Collection[str | None]) -> bool:
    """Return whether a summary holds a call that is none of these."""
    calls = message.get("tool_calls")
    return isinstance(calls, list) and any(id_in(call, ("id",)) not in call_ids for call in calls)


def _role_of(source: str, people: Collection[str]) -> str:
    """Return the role of an agent: people are named so, or were asked for input; the rest are assistants."""
    if source in people or source.lower().startswith(("user", "human")):
        return "user"
    return "system" if ROLES.get(source) == "system" else "assistant"


def _typed_result(part: Any) -> Any:
    """Return a result of AutoGen with the type and the id that a part of a content has elsewhere."""
    if not isinstance(part, Mapping):
        return part
    return {**part, "type": "tool_result", "tool_call_id": part.get("call_id")}


def _code_call(message: Mapping[str, Any]) -> FoundCall:
    """Return the code that an agent wrote to be run, as a call."""
    blocks = message.get("code_blocks")
    code = [text_of(first_of(block, ("code",))) for block in (blocks if isinstance(blocks, list) else [])]
    return FoundCall(tool="code", arguments={"code": "\n\n".join(code)}, id=None)


def _words(content: Any) -> Any:
    """Return what a message says: text, texts and images, texts of a memory, or an object as JSON."""
    if not isinstance(content, list):
        return text_of(content)
    parts: list[Any] = []
    for part in content:
        words = first_of(part, ("content",)) if isinstance(part, Mapping) else part
        parts.append({"type": "image"} if words is None else text_of(words))
    return parts


def autogen_without_copies(record: Any, before: Any) -> Any:
    """Return a record whose summaries repeat only calls that are left, and their results.

    before: the record as it was; it is not needed here. What has no summaries, the state of an agent, is returned as it
    is.
    """
    path = messages_path(record)
    is_agent_state = len(path) > 1 or (len(path) == 1 and path[0] not in record)
    if is_agent_state:
        return record
    messages = value_at(record, path)
    left_ids = _call_ids(messages)
    changed = [_summary_without_copies(message, left_ids) for message in messages]
    return {**record, path[0]: changed} if path else changed


def _summary_without_copies(message: Any, left_ids: Collection[str | None]) -> Any:
    """Return a summary without the calls, and the results, whose ids are not among these; another message as it is."""
    if _type_of(message) != "ToolCallSummaryMessage":
        return message
    changed = dict(message)
    for key, id_key in (("tool_calls", "id"), ("results", "call_id")):
        if isinstance(message.get(key), list):
            changed[key] = [copy for copy in message[key] if id_in(copy, (id_key,)) in left_ids]
    return changed


FORMS = (
    Form(
        name="AutoGen messages",
        source="https://microsoft.github.io/autogen/stable/reference/python/autogen_agentchat.messages.html",
        signs=(
            *(f"{pattern}.type={kind}" for pattern in ("messages.*", "*") for kind in SIGN_TYPES),
            "llm_context.messages",
            "llm_messages",
            "message_thread",
        ),
        read=autogen_messages,
        after_drop=autogen_without_copies,
        example={
            "messages": [
                {"type": "TextMessage", "source": "user", "content": "How warm is it in Oslo?"},
                {
                    "type": "ToolCallRequestEvent",
                    "source": "forecaster",
                    "content": [{"id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}],
                },
                {
                    "type": "ToolCallExecutionEvent",
                    "source": "forecaster",
                    "content": [{"call_id": "c1", "name": "weather", "content": "7 degrees", "is_error": False}],
                },
                {"type": "TextMessage", "source": "forecaster", "content": "It is 7 degrees in Oslo."},
            ]
        },
    ),
)
