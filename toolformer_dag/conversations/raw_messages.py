"""Split stored messages into their role, words, calls and results, each with its path in the record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import (
    convert_to_text,
    find_first_value,
    normalize_arguments,
    try_parse_json,
)
from toolformer_dag.conversations.record_paths import RecordPath
from toolformer_dag.conversations.shapes import (
    ANSWERED_IDS,
    CALL_LISTS,
    RESULT_FIELDS,
    RESULT_LISTS,
    SHAPES_BY_TYPE,
    SKIPPED_TYPES,
    TEXT_FIELDS,
    TEXT_TYPES,
    TYPE_KEYS,
    FoundCall,
    FoundResult,
    ShapedObject,
    find_id,
    find_shaped_object,
    may_hold_call,
    parse_listed_call,
)
from toolformer_dag.conversations.thoughts import (
    THINKING_TYPES,
    Thought,
    find_thought_beside_content,
    get_thought_text,
    is_thought,
    list_marked_thoughts,
    remove_thoughts,
)

CALLS = "calls"
"""The role of a message of the assistant whose content is a call or a list of calls."""
THOUGHT_ROLE = "thought"
"""The role, while a conversation is read, of an item that is a thought: it belongs to the assistant's next message."""
ROLES = {
    **dict.fromkeys(("user", "human", "HumanMessage", "HumanMessageChunk", "customer"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "model", "agent", "ai", "bot", "chatbot", "chatgpt", "AIMessage", "AIMessageChunk"),
        "assistant",
    ),
    **dict.fromkeys(("system", "developer", "SystemMessage", "environment_setup"), "system"),
    **dict.fromkeys(
        (
            "tool",
            "function",
            "observation",
            "ipython",
            "tool_response",
            "function_response",
            "tool_result",
            "toolResult",
            "tool_results",
            "function_result",
            "tool response",
            "ToolMessage",
            "FunctionMessage",
        ),
        "tool",
    ),
    **dict.fromkeys(("function_call", "tool_call", "tool_calls", "function-call", "tool call"), CALLS),
}
"""The role of a message by the name that a record has for it."""
SPEAKERS = ("role", "from", "source", "sender", "author.role", "speaker", "kind", "type")
"""Fields that may name the writer of a message."""
CONTENTS = ("parts", "content", "value", "message", "text", "contents", "blocks")
"""Fields that may hold the content of a message."""
WRAPPER_FIELDS = ("message", "data", "kwargs", "payload")
"""Fields whose object is the message itself, in logs and in messages that frameworks store."""
MESSAGE_SIGNS = ("content", "role", "type")
"""Fields by which an object in one of these fields is known as a message."""

Fault = tuple[str, str]
"""The reason why a part of a record could not be used as it was recorded, and a detail."""
MAX_DETAIL_CHARACTERS = 80
"""Characters of what was not understood in the detail of a fault."""


class StoredMessage(NamedTuple):
    """A message, or a part of one, that stands in a record.

    Attributes:
        path: The path to it in the record.
        value: The message: an object, or a text.
        role: The role of the writer, such as "user", or None if the message names it itself.
        is_part: Whether the value is a part of a message, such as a content block.
        call: The call that the value is, if the form of its record has parsed it already.
        result: The result that the value is, if the form of its record has parsed it already.
        offset_in_span: If the path leads to a span of a longer text, the offset of the value in that span.
    """

    path: RecordPath
    value: Any
    role: str | None = None
    is_part: bool = False
    call: FoundCall | None = None
    result: FoundResult | None = None
    offset_in_span: int | None = None


class Words(NamedTuple):
    """Words of a message: text that is neither a call nor a result.

    Attributes:
        path: The path to the text in the record, or None if the text was joined from several values.
    """

    text: str
    path: RecordPath | None


class LocatedCall(NamedTuple):
    """A call with the paths to it: several where the record repeats it, as messages of LangChain do."""

    found_call: FoundCall
    paths: tuple[RecordPath, ...]

    def with_copy_path(self, copy_path: RecordPath) -> "LocatedCall":
        """Return the call with the path to one more copy of it."""
        return self._replace(paths=(*self.paths, copy_path))


class LocatedResult(NamedTuple):
    """A result with the path to it.

    Attributes:
        caller: Who made the call, user or assistant, or None if the record does not say.
        message_id: The id of the message, which is that of the call in files of tau2.
    """

    found_result: FoundResult
    path: RecordPath
    caller: str | None = None
    message_id: str | None = None

    @property
    def text(self) -> str:
        """The tool's answer as text."""
        return convert_to_text(_unwrap_vercel_value(self.found_result.content))


@dataclass
class RawMessage:
    """A stored message, or a piece of one, split into words, calls and results.

    A stored message is split into several pieces, which share its index, if the assistant says more after a result.

    Attributes:
        index: The index of the stored message in the conversation.
        path: The path to the message in the record.
        thoughts: What the assistant thought before the message. Thoughts between marks in its words, such as
            `<think>Hm.</think>`, are not in this list.
    """

    index: int
    role: str
    path: RecordPath
    thoughts: list[Thought] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)
    calls: list[LocatedCall] = field(default_factory=list)
    results: list[LocatedResult] = field(default_factory=list)
    _call_index_by_id: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The words, joined."""
        return "".join(words.text for words in self.words)

    @property
    def has_words_or_calls(self) -> bool:
        """Whether it has calls or words outside of thoughts."""
        return bool(self.calls) or bool(remove_thoughts(self.text).strip())

    def list_marked_thoughts(self) -> list[Thought]:
        """List the thoughts between marks in the words, such as `<think>Hm.</think>`.

        A thought in words that were joined from several values has no path.
        """
        thoughts = list[Thought]()
        for words in self.words:
            thoughts += list_marked_thoughts(words.text, words.path)
        return thoughts

    def add_call(self, call: FoundCall, call_path: RecordPath) -> None:
        """Add a call to the message, and its result if the same object in the record holds one.

        If the call repeats an earlier one, as records of LangChain do, only the path to the copy is added.
        """
        copied_index = self._find_index_of_copy(call)
        if copied_index is not None:
            copied_call = self.calls[copied_index]
            self.calls[copied_index] = copied_call.with_copy_path(call_path)
            return

        if call.id is not None:
            self._call_index_by_id.setdefault(call.id, len(self.calls))
        self.calls.append(LocatedCall(call, (call_path,)))

        result = call.build_found_result()
        if result is not None:
            self.results.append(LocatedResult(result, call_path))

    def _find_index_of_copy(self, call: FoundCall) -> int | None:
        """Find a call that was added already, with the same id, tool and arguments.

        Returns:
            Its index in `calls`, or None if there is none. A call without an id has no copies.
        """
        if call.id is None:
            return None

        index = self._call_index_by_id.get(call.id)
        if index is None:
            return None

        earlier_call = self.calls[index].found_call
        return index if _is_same_call(call, earlier_call) else None


def _is_same_call(call: FoundCall, other_call: FoundCall) -> bool:
    """Return whether two calls have the same tool and arguments, whether these are objects or JSON text."""
    if call.tool != other_call.tool:
        return False
    return bool(normalize_arguments(call.arguments) == normalize_arguments(other_call.arguments))


def build_raw_messages(stored_messages: Sequence[StoredMessage], faults: list[Fault]) -> list[RawMessage]:
    """Split the messages of a conversation into words, calls, results and thoughts.

    Args:
        stored_messages: The messages as they stand in the record.
        faults: What was not understood is appended to it.

    Returns:
        The messages, without those that were only a thought: it belongs to the assistant's next message.
    """
    messages = list[RawMessage]()
    for message_index, stored_message in enumerate(stored_messages):
        messages += split_stored_message(stored_message, message_index, faults)
    return _move_thoughts_to_next_words(messages)


def _move_thoughts_to_next_words(messages: Sequence[RawMessage]) -> list[RawMessage]:
    """Move each thought of the assistant to its next message with words or calls.

    Results of tools may stand between a thought and that message. If anybody else speaks first, the thought is lost.
    The messages are changed in place.

    Returns:
        The messages, without those that were only a thought in the record (role THOUGHT_ROLE).
    """
    waiting_thoughts = list[Thought]()
    for message in messages:
        if message.role == "tool":
            continue  # thoughts go on waiting while tools answer

        if message.role not in ("assistant", THOUGHT_ROLE):
            waiting_thoughts = []
            continue

        thoughts = waiting_thoughts + message.thoughts
        if message.has_words_or_calls:
            message.thoughts = thoughts
            waiting_thoughts = []
        else:  # the message holds only thoughts
            message.thoughts = []
            waiting_thoughts = thoughts + message.list_marked_thoughts()

    return [message for message in messages if message.role != THOUGHT_ROLE]


def split_stored_message(stored_message: StoredMessage, message_index: int, faults: list[Fault]) -> list[RawMessage]:
    """Split a stored message into words, calls, results and thoughts.

    Args:
        stored_message: The message.
        message_index: The index of the message in the conversation, which faults name.
        faults: What was not understood is appended to it.

    Returns:
        Usually one message. There are several if the assistant says more after a result in the same message, and none
        if the value is not a message.
    """
    reader = _MessageReader(message_index, faults)
    reader.split_message(stored_message)
    return reader.raw_messages


def _unwrap_message(path: RecordPath, value: Any) -> tuple[RecordPath, Any]:
    """Take a message out of the object that a framework or a log puts around it.

    Returns:
        The path to the inner message, and that message: from `{"kwargs": {"content": "Hi"}}` the inner object. Without
        such an outer object, the path and the value themselves.
    """
    if not isinstance(value, Mapping):
        return path, value

    for key in WRAPPER_FIELDS:
        inner = value.get(key)
        is_message = isinstance(inner, Mapping) and any(field_name in inner for field_name in MESSAGE_SIGNS)
        if is_message:
            return (*path, key), inner
    return path, value


def _build_text_path(stored_message: StoredMessage, text: str) -> RecordPath:
    """Build the path to the text of a message in its record.

    If the message is cut out of a longer text (say, the words of a turn without the mark before them), its span
    (start, end) there is the last step of the path.
    """
    start = stored_message.offset_in_span
    if start is None:
        return stored_message.path

    span = (start, start + len(text))
    return (*stored_message.path, span)


def _find_role(envelope: Any, message: Mapping[str, Any]) -> str:
    """Find out who wrote a message: "user", "assistant", "system" or "tool", or CALLS for a message that is a call.

    Logs name the same role differently: `{"from": "human"}` gives "user", as ROLES says.

    Args:
        envelope: The object around the message, which may name the writer too.
        message: The message.

    Returns:
        The role for the first name in ROLES. If none is known, the first recorded name, or "None" without any.
    """
    names = _list_writer_names(envelope, message)
    for name in names:
        role = ROLES.get(name) or ROLES.get(name.lower())
        if role is not None:
            return role

    return names[0] if names else "None"


def _list_writer_names(envelope: Any, message: Mapping[str, Any]) -> list[str]:
    """List the names that a message has for its writer, such as ["gpt"] for `{"from": "gpt", "value": "Hi"}`.

    Args:
        envelope: The object around the message, whose fields come second.
        message: The message, whose fields come first.
    """
    names = []
    for fields in (message, envelope):
        for key in SPEAKERS:
            names.append(find_first_value(fields, (key,)))

    # LangChain writes the path to the message's class in `id`: ["langchain", "schema", "AIMessage"].
    class_path = find_first_value(envelope, ("id",))
    if isinstance(class_path, list) and class_path:
        class_name = class_path[-1]
        names.append(class_name)

    return [name for name in names if isinstance(name, str)]


class _MessageReader:
    """Splits one stored message into raw messages: usually one.

    Everything that is read is added to the last raw message. Words of the assistant behind a result begin another one.
    What is not understood goes to the faults.

    Attributes:
        raw_messages: The raw messages so far.
    """

    def __init__(self, message_index: int, faults: list[Fault]) -> None:
        """Begin without raw messages, which are the pieces of the stored message: words, then calls, then results.

        Args:
            message_index: The index of the message in the conversation, which faults name.
            faults: What was not understood is appended to it.
        """
        self.raw_messages = list[RawMessage]()
        self._message_index = message_index
        self._faults = faults
        self._raw_message_by_call_id: dict[str, RawMessage] = {}
        """The raw message that holds the call of an id."""
        self._thoughts_of_next_message = list[Thought]()
        """Thoughts that came after a result. They go to the next raw message, which begins when words follow."""

    def split_message(self, stored_message: StoredMessage) -> None:
        """Split a stored message into words, calls, results and thoughts, which are added to `raw_messages`.

        The message may be a call or a result that was parsed while the log was read, a part of a message's content,
        such as `{"type": "text", "text": "Hi"}`, or a whole message.
        """
        if stored_message.call is not None or stored_message.result is not None:
            self._add_parsed_call_or_result(stored_message)
        elif stored_message.is_part:
            role = stored_message.role or "assistant"
            self._read_single_part_message(stored_message.value, stored_message.path, role)
        else:
            self._read_whole_message(stored_message)

        # Thoughts behind a result wait for words behind them. There were none, so they go to the last raw message.
        if self._thoughts_of_next_message:
            self.raw_messages[-1].thoughts += self._thoughts_of_next_message

    def _begin_raw_message(self, role: str, path: RecordPath) -> RawMessage:
        """Begin a raw message, with the thoughts that wait for it, and return it."""
        raw_message = RawMessage(self._message_index, role, path, thoughts=self._thoughts_of_next_message)
        self._thoughts_of_next_message = []
        self.raw_messages.append(raw_message)
        return raw_message

    def _add_parsed_call_or_result(self, stored_message: StoredMessage) -> None:
        """Add a call or a result that was recognized when the log was read, and the thought beside it."""
        role = "tool" if stored_message.call is None else "assistant"
        raw_message = self._begin_raw_message(role, stored_message.path)

        if stored_message.call is not None:
            raw_message.add_call(stored_message.call, stored_message.path)
        if stored_message.result is not None:
            raw_message.results.append(LocatedResult(stored_message.result, stored_message.path))

        self._read_thought_beside_content(stored_message.value, stored_message.path)

    def _read_single_part_message(self, content_part: Any, path: RecordPath, role: str) -> None:
        """Begin a raw message with a single part: a content block, or a call that is a message of its own."""
        self._begin_raw_message(role, path)
        self._read_content_part(content_part, path)

    def _read_whole_message(self, stored_message: StoredMessage) -> None:
        """Read a message that is a text or an object.

        A framework may have put an object around it, such as LangChain's `{"kwargs": {...}}`. Anything else, and a text
        whose role is not known from its form, is reported as a fault.
        """
        path, message = _unwrap_message(stored_message.path, stored_message.value)
        if isinstance(message, str) and stored_message.role is not None:  # a text cannot name its role itself
            self._read_text_message(stored_message, message)
        elif isinstance(message, Mapping):
            role = stored_message.role or _find_role(stored_message.value, message)
            self._read_message_object(message, path, role)
        else:
            self._faults.append(("no_message", f"message {self._message_index} is a {type(message).__name__}"))

    def _read_text_message(self, stored_message: StoredMessage, text: str) -> None:
        """Read a message that is a text. It is a result if its role is tool, else it is words."""
        raw_message = self._begin_raw_message(str(stored_message.role), stored_message.path)
        if raw_message.role == "tool":
            result = FoundResult(text)
            raw_message.results.append(LocatedResult(result, stored_message.path))
        else:
            text_path = _build_text_path(stored_message, text)
            raw_message.words.append(Words(text, text_path))

    def _read_message_object(self, message: Mapping[str, Any], path: RecordPath, role: str) -> None:
        """Read a message that is an object, by its type and role.

        - `{"type": "step-start"}` and other types that say nothing are skipped
        - `{"type": "reasoning", ...}` is a thought, if the message has no known role
        - `{"type": "function_call", "name": ...}` is a call or a result, depending on its type
        - `{"role": "user", "content": "Hello"}` is a message that somebody wrote
        """
        message_type = message.get("type")
        if message_type in SKIPPED_TYPES:
            return

        is_thought_alone = message_type in THINKING_TYPES and role not in ROLES.values()
        if is_thought_alone:
            self._begin_raw_message(THOUGHT_ROLE, path)
            self._add_thought(message, path)
        elif _is_call_or_result_item(message):
            self._read_single_part_message(message, path, "assistant")
        else:
            self._read_message_of_role(message, path, role)

    def _read_message_of_role(self, message: Mapping[str, Any], path: RecordPath, role: str) -> None:
        """Read a message that somebody wrote.

        An unknown role is reported as a fault, but the message is read all the same.

        Args:
            message: The message.
            path: The path to it.
            role: A value of ROLES, or an unknown role. CALLS stands for a message of the assistant whose content is
                a call or a list of calls.
        """
        if role not in ROLES.values():
            self._faults.append(("unknown_role", f"message {self._message_index} is of {role!r}"))

        speaker = "assistant" if role == CALLS else role
        self._begin_raw_message(speaker, path)
        self._read_content_and_lists(message, path, role)
        self._read_thought_beside_content(message, path)

    def _read_content_and_lists(self, message: Mapping[str, Any], path: RecordPath, role: str) -> None:
        """Read the content of a message, and its lists of calls and results such as `tool_calls`.

        What the content holds depends on the role: calls if it is CALLS, results if it is "tool", else words and other
        parts. The content of a tool's message is skipped if the message also has a list of results.
        """
        # Vercel's content was written after the calls and results in `toolInvocations`, so these are read first.
        is_of_vercel = bool(message.get("toolInvocations")) and not message.get("parts")
        if is_of_vercel:
            self._read_call_and_result_lists(message, path)
            self._read_content(message, path)
            return

        if role == CALLS:
            self._read_calls_in_content(message, path)
        elif role != "tool":
            self._read_content(message, path)
        elif not _has_result_list(message):
            self._read_tool_message(message, path)

        self._read_call_and_result_lists(message, path)

    def _read_thought_beside_content(self, message: Any, path: RecordPath) -> None:
        """Add the assistant's thought that stands in a field beside the content, such as `reasoning_content`.

        Some logs repeat it as a part of the content, which has been added already. Then only the path to the field is
        added.
        """
        first_message = self.raw_messages[0]
        if first_message.role != "assistant" or not isinstance(message, Mapping):
            return

        thought = find_thought_beside_content(message, path)
        if thought is None:
            return

        for raw_message in self.raw_messages:
            if raw_message.thoughts:
                repeated_thought = thought._replace(text="")
                raw_message.thoughts.append(repeated_thought)
                return

        first_message.thoughts.append(thought)

    def _read_content(self, message: Mapping[str, Any], path: RecordPath) -> None:
        """Read the content of a message, in the first of its fields CONTENTS that is neither null nor []."""
        for key in CONTENTS:
            content = message.get(key)
            if content is not None and content != []:
                self._read_content_parts(content, (*path, key))
                return

    def _read_content_parts(self, content: Any, content_path: RecordPath) -> None:
        """Read a content: a text, a part, or a list of parts.

        Gemini puts the list into an object, `{"parts": [...]}`.
        """
        if isinstance(content, list):
            self._read_list_of_parts(content, content_path)
        elif isinstance(content, Mapping) and isinstance(content.get("parts"), list):
            self._read_list_of_parts(content["parts"], (*content_path, "parts"))
        else:
            self._read_content_part(content, content_path)

    def _read_list_of_parts(self, parts: Sequence[Any], parts_path: RecordPath) -> None:
        """Read the parts of a content one by one, in their order."""
        for index, part in enumerate(parts):
            self._read_content_part(part, (*parts_path, index))

    def _read_content_part(self, content_part: Any, path: RecordPath) -> None:
        """Read a part of a content: a text, or an object such as `{"type": "text", "text": "Warm."}`."""
        if not isinstance(content_part, Mapping):
            self._add_words(convert_to_text(content_part), path)
        elif isinstance(content_part.get("message_content"), Mapping):  # OpenInference
            self._read_content_part_object(content_part["message_content"], (*path, "message_content"))
        else:
            self._read_content_part_object(content_part, path)

    def _read_content_part_object(self, content_part: Mapping[str, Any], path: RecordPath) -> None:
        """Read a part of a content that is an object: a call, a result, a thought or words.

        Parts of types that say nothing, such as `{"type": "step-start"}`, are skipped.
        """
        shaped_object = find_shaped_object(content_part)
        if shaped_object is not None:  # a known kind of call or result, such as {"type": "tool_use", ...}
            self._read_shaped_part(shaped_object, content_part, path)
            return

        part_type = find_first_value(content_part, TYPE_KEYS)
        if part_type in SKIPPED_TYPES:
            return
        if is_thought(content_part, part_type):
            self._add_thought(content_part, path)
            return

        was_call_or_result = part_type is None and self._try_read_untyped_part(content_part, path)
        if not was_call_or_result:
            self._read_part_as_words(content_part, path, part_type)

    def _read_part_as_words(self, content_part: Mapping[str, Any], path: RecordPath, part_type: object) -> None:
        """Read a part of a content, such as `{"type": "text", "text": "Warm."}`, as words.

        A part of an unknown type, or without a text, becomes words too: its JSON, or its type in brackets.

        Args:
            content_part: The part.
            path: The path to the part.
            part_type: The type of the part, or None if it names none.
        """
        may_be_text = part_type is None or part_type in TEXT_TYPES
        words = _find_part_words(content_part, path) if may_be_text else None
        if words is None:
            self._add_unknown_part_as_words(content_part, part_type)
        else:
            self._add_words(words.text, words.path)

    def _read_shaped_part(self, shaped_object: ShapedObject, content_part: Mapping[str, Any], path: RecordPath) -> None:
        """Read the call or the result in a part of a message's content, and add it to the message.

        A call that names no tool is reported as a fault.

        Args:
            shaped_object: The object with the fields. It is the part, as in `{"type": "tool_use", "name": ...}`, or
                stands in it, as in `{"toolUse": {"name": ...}}`.
            content_part: The part.
            path: The path to the part.
        """
        if shaped_object.has_json_value:  # a call in JSON: {"type": "function_call", "value": '{"name": ...}'}
            self._read_listed_calls(shaped_object.fields["value"], path)
            return

        call = shaped_object.parse_call()
        if call is not None:
            self._add_call(call, path)
            return

        result = shaped_object.parse_result()
        if result is not None:
            self.raw_messages[-1].results.append(LocatedResult(result, path))
        else:  # a call that names no tool
            self._report_unreadable_call(content_part)

    def _try_read_untyped_part(self, content_part: Mapping[str, Any], path: RecordPath) -> bool:
        """Try to read a part without a type as a call or a result, by its fields.

        AutoGen writes `{"id": "1", "name": "search", "arguments": "{}"}` and `{"call_id": "1", "content": "17"}`.

        Returns:
            True if the part was a call or a result, and was added.
        """
        call = parse_listed_call(content_part)
        if call is not None and call.arguments is not None:
            self._add_call(call, path)
            return True

        result = _parse_untyped_result(content_part)
        if result is None:
            return False
        self.raw_messages[-1].results.append(LocatedResult(result, path))
        return True

    def _add_unknown_part_as_words(self, content_part: Mapping[str, Any], part_type: object) -> None:
        """Add an unknown part as words.

        It is also reported as a fault if its type, or its fields if it has none, sound like a call.
        """
        field_names = ", ".join(map(str, content_part))
        name = field_names if part_type is None else str(part_type)
        if may_hold_call(name):
            self._report_fault("unknown_part", f"content part {name[:MAX_DETAIL_CHARACTERS]}")

        text = convert_to_text([content_part])
        self._add_words(text, path=None)

    def _read_calls_in_content(self, message: Mapping[str, Any], path: RecordPath) -> None:
        """Read a message whose content is a call or a list of calls. It may be JSON, with thoughts before it.

        A path tells what can be removed from the record. Each call of the list '[{"name": "a"}, {"name": "b"}]' gets a
        path of its own. A single call, or calls with thoughts before them, get the path of the whole message.
        """
        content_key = _find_content_key(message)
        if content_key is None:
            return
        content = message[content_key]
        content_path = (*path, content_key)

        written_calls = content  # a list, an object, or JSON in a text
        thoughts = list[Thought]()
        if isinstance(content, str):
            written_calls = remove_thoughts(content)
            thoughts = list_marked_thoughts(content, content_path)
            self.raw_messages[-1].thoughts += thoughts  # the raw message that was begun for this message

        is_list_alone = _is_list_or_json_list(content) and not thoughts
        calls_path = content_path if is_list_alone else path
        self._read_listed_calls(written_calls, calls_path)

    def _read_tool_message(self, message: Mapping[str, Any], path: RecordPath) -> None:
        """Read a message of a tool, which is one result or a list of results.

        It is a list if one of the parts of its content is known as a result by its type or key, as in
        `{"role": "tool", "content": [{"type": "tool_result", ...}, ...]}`. Else the whole message is one result.
        """
        content = find_first_value(message, (*CONTENTS, *RESULT_FIELDS))
        is_list_of_results = isinstance(content, list) and any(map(_is_result_part, content))
        if not is_list_of_results:
            self._read_single_result(message, path)
            return

        # No key is found for a list in a field such as `output`, of RESULT_FIELDS alone. Its paths say "content" too.
        content_key = _find_content_key(message) or "content"
        for index, content_part in enumerate(content):
            self._read_content_part(content_part, (*path, content_key, index))

    def _read_single_result(self, message: Mapping[str, Any], path: RecordPath) -> None:
        """Read a message of a tool that is one result.

        Example: `{"role": "tool", "tool_call_id": "1", "content": "17"}`
        """
        tool = find_first_value(message, ("name", "tool_name", "toolName"))
        result = FoundResult(
            content=_get_result_content(message),
            id=find_id(message, ANSWERED_IDS),
            tool=tool if isinstance(tool, str) else None,
            status_fields=message,
        )
        self._add_result(result, path, message)

    def _read_call_and_result_lists(self, message: Mapping[str, Any], path: RecordPath) -> None:
        """Read the fields of a message that list calls or results, such as `tool_calls`."""
        for key in CALL_LISTS:
            if message.get(key):
                self._read_listed_calls(message[key], (*path, key))

        # LangChain repeats the calls in `additional_kwargs`. These come second, to be known as copies.
        self._read_additional_kwargs_calls(message, path)

        for dotted_name in RESULT_LISTS:  # such as "observation.results": a field inside a field
            results = find_first_value(message, (dotted_name,))
            if isinstance(results, list):
                results_path = (*path, *dotted_name.split("."))
                self._read_listed_results(results, results_path)

        self._report_unread_call_fields(message)

    def _report_unread_call_fields(self, message: Mapping[str, Any]) -> None:
        """Report the fields of a message that hold calls and are not read."""
        for key, value in message.items():
            is_read = key in CALL_LISTS or key in CONTENTS
            if is_read:
                continue
            if may_hold_call(str(key)) and _has_call(value):
                self._report_fault("unknown_field", f"field {key} holds a call")

    def _read_listed_results(self, results: Sequence[Any], results_path: RecordPath) -> None:
        """Read a list of results, such as `[{"tool_call_id": "1", "content": "17"}]`."""
        for index, result_object in enumerate(results):
            result = FoundResult(
                content=find_first_value(result_object, RESULT_FIELDS),
                id=find_id(result_object, ANSWERED_IDS),
                status_fields=result_object,
            )
            self._add_result(result, (*results_path, index), result_object)

    def _read_additional_kwargs_calls(self, message: Mapping[str, Any], path: RecordPath) -> None:
        """Read the calls in the provider's answer, which LangChain and LlamaIndex keep in `additional_kwargs`.

        They may repeat calls of the message. The old field `function_call` is read only if no other call was found.
        """
        provider_answer = message.get("additional_kwargs")
        if not isinstance(provider_answer, Mapping):
            return

        answer_path = (*path, "additional_kwargs")
        if provider_answer.get("tool_calls"):
            self._read_listed_calls(provider_answer["tool_calls"], (*answer_path, "tool_calls"))
            return

        has_calls_already = any(raw_message.calls for raw_message in self.raw_messages)
        if provider_answer.get("function_call") and not has_calls_already:
            self._read_listed_calls(provider_answer["function_call"], (*answer_path, "function_call"))

    def _read_listed_calls(self, calls: Any, calls_path: RecordPath) -> None:
        """Read a list of calls or a single call, such as the value of `tool_calls`.

        The value may be JSON, and so may each item of it.

        Args:
            calls: The list or the call.
            calls_path: The path to it. The first call of a list in JSON has the path (*calls_path, None, 0), where None
                stands for parsing the JSON.
        """
        is_json = isinstance(calls, str)
        parsed_calls = try_parse_json(calls) if is_json else calls  # None for a text that is no JSON
        if not isinstance(parsed_calls, list):
            # A single call is removed with the JSON around it, so its path needs no step None.
            value_shown_in_fault = calls if parsed_calls is None else parsed_calls
            self._read_listed_call(parsed_calls, calls_path, value_shown_in_fault)
            return

        list_path = (*calls_path, None) if is_json else calls_path  # the step None opens JSON
        for index, item in enumerate(parsed_calls):
            self._read_listed_call(item, (*list_path, index), fault_value=item)

    def _read_listed_call(self, item: Any, path: RecordPath, fault_value: Any) -> None:
        """Read a call, which may be JSON.

        Args:
            item: The call.
            path: The path to it.
            fault_value: The value that a fault shows if the item is not a call.
        """
        parsed_item = try_parse_json(item) if isinstance(item, str) else item
        call = parse_listed_call(parsed_item)
        if call is None:
            self._report_unreadable_call(fault_value)
        else:
            self._add_call(call, path)

    def _add_call(self, call: FoundCall, call_path: RecordPath) -> None:
        """Add a call to the last raw message.

        If an earlier raw message holds a call with the same id, the call is added there, since it may be a copy.
        """
        raw_message = self.raw_messages[-1]
        if call.id is not None:
            raw_message = self._raw_message_by_call_id.setdefault(call.id, raw_message)
        raw_message.add_call(call, call_path)

    def _add_result(self, result: FoundResult, result_path: RecordPath, result_object: Any) -> None:
        """Add a result to the last raw message.

        Args:
            result: The result.
            result_path: The path to it.
            result_object: The object in the record that holds the result. It may name the caller, and have an id.
        """
        located_result = LocatedResult(
            result,
            result_path,
            caller=_find_result_caller(result_object),
            message_id=find_id(result_object, ("id",)),
        )
        self.raw_messages[-1].results.append(located_result)

    def _add_words(self, text: str, path: RecordPath | None) -> None:
        """Add words to the last raw message.

        If that is the assistant's and has results already, the words begin a new raw message, unless they are blank.

        Args:
            text: The words.
            path: The path to them, or None if they stand at no single place in the record.
        """
        raw_message = self.raw_messages[-1]
        has_own_results = raw_message.role == "assistant" and bool(raw_message.results)
        if has_own_results and text.strip():
            raw_message = self._begin_raw_message(raw_message.role, path or raw_message.path)
        raw_message.words.append(Words(text, path))

    def _add_thought(self, thought: Any, path: RecordPath) -> None:
        """Add a thought to the last raw message.

        If that has results already, the thought waits for the next raw message. A thought without a text is skipped.
        """
        text = get_thought_text(thought)
        if not text:
            return

        last_message = self.raw_messages[-1]
        thoughts = self._thoughts_of_next_message if last_message.results else last_message.thoughts
        thoughts.append(Thought(text, (path,)))

    def _report_unreadable_call(self, call: Any) -> None:
        """Report something that should be a call and cannot be read."""
        self._report_fault("unreadable_call", str(call)[:MAX_DETAIL_CHARACTERS])

    def _report_fault(self, reason: str, detail: str) -> None:
        """Report a part of the message that was not understood."""
        self._faults.append((reason, f"message {self._message_index}: {detail}"))


def _is_call_or_result_item(message: Mapping[str, Any]) -> bool:
    """Return whether a message is a call or a result by its type, and names no role."""
    message_type = message.get("type")
    has_known_type = isinstance(message_type, str) and message_type in SHAPES_BY_TYPE
    return has_known_type and "role" not in message


def _has_result_list(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a field with a list of results."""
    return any(isinstance(find_first_value(message, (name,)), list) for name in RESULT_LISTS)


def _find_content_key(message: Mapping[str, Any]) -> str | None:
    """Return the first of the fields CONTENTS that a message has, or None if there is none."""
    return next((key for key in CONTENTS if message.get(key) is not None), None)


def _find_part_words(content_part: Mapping[str, Any], part_path: RecordPath) -> Words | None:
    """Find the words of a content part.

    Returns:
        The first of the fields TEXT_FIELDS that has a value, or None if that value is not a text or there is none.
    """
    for dotted_name in TEXT_FIELDS:  # such as "text.value": a field inside a field
        text = find_first_value(content_part, (dotted_name,))
        if text is None:
            continue
        if not isinstance(text, str):
            return None
        return Words(text, (*part_path, *dotted_name.split(".")))
    return None


def _parse_untyped_result(content_part: Mapping[str, Any]) -> FoundResult | None:
    """Parse a part without a type as a result.

    Returns:
        The result, or None if the part lacks the id of the answered call or a content.
    """
    call_id = find_id(content_part, ANSWERED_IDS)
    content = find_first_value(content_part, RESULT_FIELDS)
    if call_id is None or content is None:
        return None
    return FoundResult(content=content, id=call_id, status_fields=content_part)


def _get_result_content(message: Mapping[str, Any]) -> Any:
    """Get the answer from a message of a tool.

    If the content is empty and the message reports an error, the error takes its place.
    """
    content = find_first_value(message, (*CONTENTS, *RESULT_FIELDS))
    error = find_first_value(message, ("error.message",))
    if error is not None and not content:
        content = error

    if isinstance(content, list):
        return [_unwrap_openinference_part(part) for part in content]
    return content


def _unwrap_openinference_part(content_part: Any) -> Any:
    """Return the content part inside `{"message_content": {...}}` of OpenInference. Any other part stays unchanged."""
    if not isinstance(content_part, Mapping):
        return content_part
    return content_part.get("message_content", content_part)


def _is_result_part(content_part: Any) -> bool:
    """Return whether a content part is a result by its type or key."""
    if not isinstance(content_part, Mapping):
        return False
    shaped_object = find_shaped_object(content_part)
    return shaped_object is not None and bool(shaped_object.shape.result_fields)


def _has_call(value: Any) -> bool:
    """Return whether a value is a call with arguments, or a list that contains one."""
    items = value if isinstance(value, list) else [value]
    for item in items:
        call = parse_listed_call(item)
        if call is not None and call.arguments is not None:
            return True
    return False


def _find_result_caller(result_object: Any) -> str | None:
    """Return who made the call of a result: "user" or "assistant" in files of tau2, None in other files."""
    requestor = find_first_value(result_object, ("requestor",))
    return requestor if requestor in ("user", "assistant") else None


def _is_list_or_json_list(content: Any) -> bool:
    """Return whether a content is a list, or a list in JSON."""
    value = try_parse_json(content) if isinstance(content, str) else content
    return isinstance(value, list)


def _unwrap_vercel_value(content: Any) -> Any:
    """Return the value inside a result of Vercel that names its type, as `{"type": "json", "value": ...}`."""
    if isinstance(content, Mapping) and content.keys() == {"type", "value"}:
        return content["value"]
    return content
