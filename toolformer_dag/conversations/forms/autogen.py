"""The form of messages and events of AutoGen, from version 0.4 on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import find_value, list_at, to_text
from toolformer_dag.conversations.raw_messages import CALLS, ROLES, StoredMessage
from toolformer_dag.conversations.record_paths import Path, get_value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult, find_id

LISTS: tuple[Path, ...] = (("messages",), ("llm_context", "messages"), ("llm_messages",), ("message_thread",))
"""Paths to the messages in the result of a run, in the state of an agent, and in the state of a group's manager."""
CALL_TYPES = ("ToolCallRequestEvent", "AssistantMessage")
RESULT_TYPES = ("ToolCallExecutionEvent", "FunctionExecutionResultMessage")
CODE_TYPES = ("CodeGenerationEvent", "CodeExecutionEvent")
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
"""The role of a message by its type; for other types the source tells it."""
SILENT_TYPES = (
    "ModelClientStreamingChunkEvent",
    "UserInputRequestedEvent",
    "SelectSpeakerEvent",
    "SelectorEvent",
    "ThoughtEvent",
)
"""Types that are skipped: chunks of the next message, the choice of a speaker, thinking before an answer."""
SIGN_TYPES = (*CALL_TYPES, *RESULT_TYPES, "TextMessage", "ModelClientStreamingChunkEvent", "UserMessage")
"""Types by which a list is recognised as AutoGen's."""


def iter_autogen_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the words, calls and results in the messages and events of AutoGen.

    An event is, for example, `{"type": "ToolCallRequestEvent", "source": "forecaster", "content": [...]}`. A message
    without a type is yielded as it is.
    """
    path = messages_path(record)
    messages = get_value_at(record, path)
    people = _collect_people(messages)  # the names of the agents that are people
    call_ids = _collect_call_ids(messages)

    for number, message in enumerate(messages):
        message_path = (*path, number)
        if isinstance(message, Mapping) and "type" in message:
            next_type = _get_type_at(messages, number + 1)  # a thought before calls is their text, any other is skipped
            event = _Event.of(message, message_path, people, next_type)
            yield from _iter_event_messages(event, call_ids)
        else:
            yield StoredMessage(message_path, message)


def _get_type_at(messages: Sequence[Any], number: int) -> str | None:
    """Return the type of a message by its number; None behind the last one."""
    return _get_message_type(messages[number]) if number < len(messages) else None


class _Event(NamedTuple):
    """A message or an event of AutoGen, with its type and that of the next one; None for the last."""

    fields: Mapping[str, Any]
    path: Path
    role: str
    type: str
    next_type: str | None

    @staticmethod
    def of(fields: Mapping[str, Any], path: Path, people: Collection[str], next_type: str | None) -> "_Event":
        """Return the event of a message. people: the names of the agents that are people."""
        return _Event(fields, path, _choose_role(fields, people), type=_get_message_type(fields), next_type=next_type)

    @property
    def content(self) -> Any:
        """The content of the event."""
        return self.fields.get("content")

    @property
    def has_calls(self) -> bool:
        """Whether the content is a list of calls."""
        return self.type in CALL_TYPES and isinstance(self.content, list)

    @property
    def has_results(self) -> bool:
        """Whether the content is a list of results."""
        return self.type in RESULT_TYPES and isinstance(self.content, list)

    @property
    def has_words(self) -> bool:
        """Whether the event has words; a thought before a call is the text that the model wrote with the call."""
        is_text_of_call = self.type == "ThoughtEvent" and self.next_type in CALL_TYPES
        return self.type in WORD_TYPES or is_text_of_call

    def words(self, role: str) -> StoredMessage:
        """Return the content of the event as words of a role."""
        return StoredMessage(self.path, {"content": _to_words(self.content)}, role)


def _collect_people(messages: Sequence[Any]) -> set[str]:
    """Return the names of the agents that were asked for input: people."""
    people = set[str]()
    for message in messages:
        if _get_message_type(message) == "UserInputRequestedEvent":
            people.add(str(message.get("source")))
    return people


def _iter_event_messages(event: _Event, call_ids: Collection[str | None]) -> Iterator[StoredMessage]:
    """Yield the words, calls or results of an event, if it has any.

    A summary repeats earlier calls and their results. If it has a call that stands nowhere else, it gets an unknown
    role, so that it is reported as a fault.

    Args:
        event: The event.
        call_ids: The ids of all calls outside of summaries.
    """
    if event.has_calls:
        yield from _iter_call_messages(event)
    elif event.has_results:
        yield _build_result_message(event)
    elif _has_other_calls(event.fields, call_ids):
        yield event.words(role=f"{event.type} with calls of no event")
    else:
        yield from _iter_other_messages(event)


def _build_result_message(event: _Event) -> StoredMessage:
    """Return the results of an event as one message of a tool."""
    results = [_typed_result(part) for part in event.content]
    return StoredMessage(event.path, {"content": results}, "tool")


def _iter_other_messages(event: _Event) -> Iterator[StoredMessage]:
    """Yield the words or the code of an event.

    An event of an unknown type gets its type as role, so that it is reported as a fault.
    """
    if event.has_words:
        yield event.words(event.role)
    elif event.type in CODE_TYPES:
        yield _build_code_message(event)
    elif event.type not in SILENT_TYPES:
        yield StoredMessage(event.path, event.fields, role=event.type)


def _build_code_message(event: _Event) -> StoredMessage:
    """Return the code that an agent wrote as a call, or its output as the result."""
    if event.type == "CodeGenerationEvent":
        return StoredMessage(event.path, event.fields, call=_build_code_call(event.fields))
    return StoredMessage(event.path, event.fields, result=_build_code_result(event.fields))


def _iter_call_messages(event: _Event) -> Iterator[StoredMessage]:
    """Yield the thought of an event with calls, then the calls."""
    thought = event.fields.get("thought")
    if isinstance(thought, str):
        yield StoredMessage((*event.path, "thought"), thought, event.role)
    yield StoredMessage(event.path, event.fields, CALLS)


def _get_message_type(message: Any) -> str:
    """Return the type of a message without its brackets: StructuredMessage for StructuredMessage[Answer]."""
    return str(find_value(message, ("type",))).partition("[")[0]


def messages_path(record: Any) -> Path:
    """Find the path to the messages of a record of AutoGen.

    Returns:
        The path, or the path where they should be if the record has none.
    """
    if isinstance(record, list):
        return ()
    for path in LISTS:
        if isinstance(find_value(record, (".".join(map(str, path)),)), list):
            return path
    return LISTS[0]


def _collect_call_ids(messages: Sequence[Any]) -> set[str | None]:
    """Return the ids of all calls, except those that summaries repeat."""
    ids = set[str | None]()
    for message in messages:
        if _get_message_type(message) in CALL_TYPES and isinstance(message.get("content"), list):
            ids.update(find_id(call, ("id",)) for call in message["content"])
    return ids


def _has_other_calls(message: Mapping[str, Any], call_ids: Collection[str | None]) -> bool:
    """Return whether a summary holds a call with none of these ids."""
    calls = message.get("tool_calls")
    return isinstance(calls, list) and any(find_id(call, ("id",)) not in call_ids for call in calls)


def _choose_role(message: Mapping[str, Any], people: Collection[str]) -> str:
    """Choose the role of a message: by its type, or else by its source.

    Args:
        message: The message.
        people: The names of the agents that are people, whose role is user.
    """
    role = ROLE_OF_TYPE.get(_get_message_type(message))
    if role is not None:
        return role

    source = str(message.get("source"))
    if source in people or source.lower().startswith(("user", "human")):
        return "user"
    return "system" if ROLES.get(source) == "system" else "assistant"


def _typed_result(part: Any) -> Any:
    """Return a result of AutoGen with the type and the field for the id that content parts have in other forms."""
    if not isinstance(part, Mapping):
        return part
    return {**part, "type": "tool_result", "tool_call_id": part.get("call_id")}


def _build_code_call(message: Mapping[str, Any]) -> FoundCall:
    """Return the code that an agent wrote, as a call that runs it."""
    code = [to_text(find_value(block, ("code",))) for block in list_at(message, "code_blocks")]
    return FoundCall(tool="code", arguments={"code": "\n\n".join(code)}, id=None)


def _build_code_result(message: Mapping[str, Any]) -> FoundResult:
    """Return the output of code, which failed where its exit code is not 0."""
    exit_code = find_value(message, ("result.exit_code",))
    has_failed = exit_code not in (0, None)
    return FoundResult(find_value(message, ("result.output",)), status_fields={"error": has_failed})


def _to_words(content: Any) -> Any:
    """Convert a content to words.

    Returns:
        A text, or for a list its items as texts and images. An object becomes its JSON.
    """
    if not isinstance(content, list):
        return to_text(content)
    parts: list[Any] = []
    for part in content:
        words = find_value(part, ("content",)) if isinstance(part, Mapping) else part
        parts.append({"type": "image"} if words is None else to_text(words))
    return parts


def drop_stale_copies(record: Any, before: Any) -> Any:
    """Remove calls and results from summaries that repeat them, if the calls themselves were removed.

    The state of an agent has no summaries and is returned unchanged, as is a record without messages.

    Args:
        record: What is left of the record.
        before: The record with all its calls, which is not needed here.
    """
    path = messages_path(record)  # () in a list of messages, ("llm_context", "messages") in the state of an agent
    is_inside_state = len(path) > 1
    has_no_messages = len(path) == 1 and path[0] not in record
    if is_inside_state or has_no_messages:
        return record

    messages = get_value_at(record, path)
    left_ids = _collect_call_ids(messages)
    changed = [_without_stale_copies(message, left_ids) for message in messages]
    return {**record, path[0]: changed} if path else changed


def _without_stale_copies(message: Any, left_ids: Collection[str | None]) -> Any:
    """Keep only some calls and their results in a summary.

    Args:
        message: The summary. Any other message is returned unchanged.
        left_ids: The ids of the calls to keep.
    """
    if _get_message_type(message) != "ToolCallSummaryMessage":
        return message

    changed = dict(message)
    for key, id_key in (("tool_calls", "id"), ("results", "call_id")):
        if isinstance(message.get(key), list):
            changed[key] = [copy for copy in message[key] if find_id(copy, (id_key,)) in left_ids]
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
        read=iter_autogen_messages,
        after_drop=drop_stale_copies,
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
