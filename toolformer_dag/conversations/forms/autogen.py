"""The form of messages and events of AutoGen, from version 0.4 on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import convert_to_text, find_first_value, get_list_at
from toolformer_dag.conversations.raw_messages import CALLS, ROLES, StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath, get_value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult, find_id

MESSAGES_PATHS: tuple[RecordPath, ...] = (
    ("messages",),
    ("llm_context", "messages"),
    ("llm_messages",),
    ("message_thread",),
)
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
ROLES_BY_TYPE = {
    "SystemMessage": "system",
    "MemoryQueryEvent": "system",
    "UserMessage": "user",
    "AssistantMessage": "assistant",
}
"""The role of a message by its type; for other types the source tells it."""
SKIPPED_TYPES = (
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
    messages_path = find_messages_path(record)
    messages = get_value_at(record, messages_path)
    people_names = _collect_people_names(messages)
    call_ids = _collect_call_ids(messages)

    for message_index, message in enumerate(messages):
        message_path = (*messages_path, message_index)
        if not isinstance(message, Mapping) or "type" not in message:
            yield StoredMessage(message_path, message)
            continue

        # A thought right before calls is the text that the model wrote with them. Any other thought is skipped.
        next_type = _get_type_of_message_at(messages, message_index + 1)
        event = _Event.from_message(message, message_path, people_names, next_type)
        yield from _iter_event_messages(event, call_ids)


def _get_type_of_message_at(messages: Sequence[Any], message_index: int) -> str | None:
    """Return the type of the message at an index, or None behind the last message."""
    if message_index >= len(messages):
        return None
    return _get_message_type(messages[message_index])


class _Event(NamedTuple):
    """A message or an event of AutoGen.

    Attributes:
        fields: The message or event as it is stored.
        path: The path to it in the record.
        role: The role of its writer: "user", "assistant" or "system".
        type: Its type, such as "TextMessage".
        next_type: The type of the next message or event, or None for the last one.
    """

    fields: Mapping[str, Any]
    path: RecordPath
    role: str
    type: str
    next_type: str | None

    @staticmethod
    def from_message(
        message: Mapping[str, Any], path: RecordPath, people_names: Collection[str], next_type: str | None
    ) -> "_Event":
        """Build the event for a message.

        Args:
            message: The message or event as it is stored.
            path: The path to it in the record.
            people_names: The names of the agents that are people.
            next_type: The type of the next message, or None for the last one.
        """
        return _Event(
            fields=message,
            path=path,
            role=_choose_role(message, people_names),
            type=_get_message_type(message),
            next_type=next_type,
        )

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
        """Whether the event has words. A thought counts as words if a call follows, since it is the call's text."""
        is_text_of_call = self.type == "ThoughtEvent" and self.next_type in CALL_TYPES
        return self.type in WORD_TYPES or is_text_of_call

    def build_words_message(self, role: str) -> StoredMessage:
        """Build a message of this role with the content of the event as its words."""
        words = _convert_to_words(self.content)
        return StoredMessage(self.path, {"content": words}, role)


def _collect_people_names(messages: Sequence[Any]) -> set[str]:
    """Collect the names of the agents that are people: those that were asked for input."""
    people_names = set[str]()
    for message in messages:
        if _get_message_type(message) == "UserInputRequestedEvent":
            people_names.add(str(message.get("source")))
    return people_names


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
    elif _has_unknown_calls(event.fields, call_ids):
        yield event.build_words_message(role=f"{event.type} with calls of no event")
    else:
        yield from _iter_words_or_code(event)


def _build_result_message(event: _Event) -> StoredMessage:
    """Build one message of a tool with all results of an event."""
    results = [_convert_result_to_part(result) for result in event.content]
    return StoredMessage(event.path, {"content": results}, "tool")


def _iter_words_or_code(event: _Event) -> Iterator[StoredMessage]:
    """Yield the words or the code of an event.

    An event of an unknown type gets its type as role, so that it is reported as a fault.
    """
    if event.has_words:
        yield event.build_words_message(event.role)
    elif event.type in CODE_TYPES:
        yield _build_code_message(event)
    elif event.type not in SKIPPED_TYPES:
        yield StoredMessage(event.path, event.fields, role=event.type)


def _build_code_message(event: _Event) -> StoredMessage:
    """Build the message for code: a call with the code that an agent wrote, or a result with the code's output."""
    if event.type == "CodeGenerationEvent":
        call = _build_code_call(event.fields)
        return StoredMessage(event.path, event.fields, call=call)

    result = _build_code_result(event.fields)
    return StoredMessage(event.path, event.fields, result=result)


def _iter_call_messages(event: _Event) -> Iterator[StoredMessage]:
    """Yield the thought of an event with calls, then the calls."""
    thought = event.fields.get("thought")
    if isinstance(thought, str):
        yield StoredMessage((*event.path, "thought"), thought, event.role)

    yield StoredMessage(event.path, event.fields, CALLS)


def _get_message_type(message: Any) -> str:
    """Return the type of a message without brackets: "StructuredMessage" for StructuredMessage[Answer].

    The type of a message without one is "None".
    """
    full_type = str(find_first_value(message, ("type",)))
    first_word, _, _ = full_type.partition("[")
    return first_word


def find_messages_path(record: Any) -> RecordPath:
    """Find the path to the messages of a record of AutoGen.

    Returns:
        The path, or the path where they should be if the record has none.
    """
    if isinstance(record, list):
        return ()

    for path in MESSAGES_PATHS:
        dotted_path = ".".join(map(str, path))
        if isinstance(find_first_value(record, (dotted_path,)), list):
            return path
    return MESSAGES_PATHS[0]


def _collect_call_ids(messages: Sequence[Any]) -> set[str | None]:
    """Collect the ids of all calls, except those that summaries repeat. A call without an id adds None."""
    call_ids = set[str | None]()
    for message in messages:
        has_calls = _get_message_type(message) in CALL_TYPES and isinstance(message.get("content"), list)
        if has_calls:
            call_ids.update(find_id(call, ("id",)) for call in message["content"])
    return call_ids


def _has_unknown_calls(message: Mapping[str, Any], known_call_ids: Collection[str | None]) -> bool:
    """Return whether a summary (a message with earlier calls in `tool_calls`) holds a call with none of these ids."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return False
    return any(find_id(call, ("id",)) not in known_call_ids for call in calls)


def _choose_role(message: Mapping[str, Any], people_names: Collection[str]) -> str:
    """Choose the role of a message: by its type, or else by its source.

    Args:
        message: The message.
        people_names: The names of the agents that are people, whose role is user.
    """
    role = ROLES_BY_TYPE.get(_get_message_type(message))
    if role is not None:
        return role

    source = str(message.get("source"))  # the name of the agent that wrote the message
    if source in people_names or source.lower().startswith(("user", "human")):
        return "user"
    return "system" if ROLES.get(source) == "system" else "assistant"


def _convert_result_to_part(result: Any) -> Any:
    """Convert a result of AutoGen to a content part as in other forms, by adding a type and the field `tool_call_id`.

    A result that is no object is returned unchanged.
    """
    if not isinstance(result, Mapping):
        return result
    return {**result, "type": "tool_result", "tool_call_id": result.get("call_id")}


def _build_code_call(message: Mapping[str, Any]) -> FoundCall:
    """Build a call that runs the code which an agent wrote, in one or several blocks."""
    blocks = get_list_at(message, "code_blocks")
    codes = [convert_to_text(find_first_value(block, ("code",))) for block in blocks]
    return FoundCall(tool="code", arguments={"code": "\n\n".join(codes)}, id=None)


def _build_code_result(message: Mapping[str, Any]) -> FoundResult:
    """Build a result with the output of code, which failed if its exit code is not 0."""
    output = find_first_value(message, ("result.output",))
    exit_code = find_first_value(message, ("result.exit_code",))
    has_failed = exit_code not in (0, None)
    return FoundResult(output, status_fields={"error": has_failed})


def _convert_to_words(content: Any) -> Any:
    """Convert what an agent said to a text, or to a list of texts and images.

    Example:
        ["Look:", {"data": "iVBO"}] gives ["Look:", {"type": "image"}]. A content that is neither a list nor a text
        becomes its JSON.
    """
    if not isinstance(content, list):
        return convert_to_text(content)

    parts: list[Any] = []
    for item in content:
        words = find_first_value(item, ("content",)) if isinstance(item, Mapping) else item
        if words is None:  # an object without words is an image
            parts.append({"type": "image"})
        else:
            parts.append(convert_to_text(words))
    return parts


def drop_stale_copies(record: Any, original_record: Any) -> Any:
    """Remove calls and results from summaries if the calls themselves were removed from the record.

    A summary is a message that repeats earlier calls and results. The saved state of an agent has none, so it is
    returned unchanged, as is a record without messages.

    Args:
        record: What is left of the record.
        original_record: The record with all its calls. Other forms need it.
    """
    # The path is () in a list of messages, and ("llm_context", "messages") in the state of an agent.
    messages_path = find_messages_path(record)
    is_inside_state = len(messages_path) > 1
    has_no_messages = len(messages_path) == 1 and messages_path[0] not in record
    if is_inside_state or has_no_messages:
        return record

    messages = get_value_at(record, messages_path)
    remaining_call_ids = _collect_call_ids(messages)
    changed_messages = [_remove_stale_copies(message, remaining_call_ids) for message in messages]
    if not messages_path:  # the record is the list of messages itself
        return changed_messages
    return {**record, messages_path[0]: changed_messages}


def _remove_stale_copies(message: Any, remaining_call_ids: Collection[str | None]) -> Any:
    """Copy a summary with only some of its calls and their results. A summary is a message that repeats earlier ones.

    Args:
        message: The summary. Any other message is returned unchanged.
        remaining_call_ids: The ids of the calls to keep.
    """
    if _get_message_type(message) != "ToolCallSummaryMessage":
        return message

    changed_message = dict(message)
    for list_key, id_key in (("tool_calls", "id"), ("results", "call_id")):
        copies = message.get(list_key)  # copies of earlier calls or results
        if isinstance(copies, list):
            changed_message[list_key] = [copy for copy in copies if find_id(copy, (id_key,)) in remaining_call_ids]
    return changed_message


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
