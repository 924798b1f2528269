"""Split stored messages into their role, words, calls and results, each with its path in the record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import arguments_of, find_value, parse_json, to_text
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import (
    ANSWERED_IDS,
    CALL_LISTS,
    CALL_TYPES,
    RESULT,
    RESULT_LISTS,
    SILENT_TYPES,
    TEXT_TYPES,
    TYPE_KEYS,
    WORDS,
    FoundCall,
    FoundResult,
    ShapedObject,
    find_id,
    find_shape,
    may_hold_call,
    parse_listed_call,
)
from toolformer_dag.conversations.thoughts import (
    THINKING_TYPES,
    Thought,
    find_thought_beside_content,
    get_thought_text,
    is_thought,
    marked_thoughts,
    without_thoughts,
)

CALLS = "calls"
"""The role of a message of the assistant whose content is a call or a list of calls."""
THOUGHT = "thought"
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
WRAPPERS = ("message", "data", "kwargs", "payload")
"""Fields whose object is the message itself, in logs and in messages that frameworks store."""

Fault = tuple[str, str]
"""The reason why a part of a record could not be used as it was recorded, and a detail."""
SHOWN = 80
"""Characters of what was not understood in the detail of a fault."""


class StoredMessage(NamedTuple):
    """A message, or a part of one, that stands in a record.

    - `path`: the path to it in the record
    - `value`: the message: an object, or a text
    - `role`: a role of ROLES; None where the message names it
    - `is_part`: whether the value is a part of a message, such as a content block
    - `call`, `result`: the call or the result that the value is, where its form knows that
    - `offset`: for a path to a stretch of text, the characters of the stretch before the value
    """

    path: Path
    value: Any
    role: str | None = None
    is_part: bool = False
    call: FoundCall | None = None
    result: FoundResult | None = None
    offset: int | None = None


class Words(NamedTuple):
    """Text that is no call and no result, with its path; None where it is joined from several values."""

    text: str
    path: Path | None


class CallAt(NamedTuple):
    """A call with the paths to it: several where the record repeats it, as messages of LangChain do."""

    fields: FoundCall
    paths: tuple[Path, ...]

    def with_copy(self, path: Path) -> "CallAt":
        """Return the call with the path to one more copy of it."""
        return self._replace(paths=(*self.paths, path))


class ResultAt(NamedTuple):
    """A result with the path to it.

    - `caller`: who made the call, user or assistant; None where the record does not say
    - `message_id`: the id of the message, which is that of the call in files of tau2
    """

    fields: FoundResult
    path: Path
    caller: str | None = None
    message_id: str | None = None

    @property
    def text(self) -> str:
        """The tool's answer as text."""
        return to_text(_unwrap_vercel_value(self.fields.content))


@dataclass
class RawMessage:
    """A stored message, split into words, calls and results.

    - `number`: its index in the conversation
    - `path`: the path to it in the record
    - `thoughts`: what the assistant thought before it, without the thoughts between marks in its words
    """

    number: int
    role: str
    path: Path
    thoughts: list[Thought] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)
    calls: list[CallAt] = field(default_factory=list)
    results: list[ResultAt] = field(default_factory=list)
    _index_by_id: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The words, joined."""
        return "".join(words.text for words in self.words)

    @property
    def says_something(self) -> bool:
        """Whether it has calls or words outside of thoughts."""
        return bool(self.calls) or bool(without_thoughts(self.text).strip())

    def marked_thoughts(self) -> list[Thought]:
        """Return the thoughts between marks in the words; their paths are lost where words were joined."""
        thoughts = list[Thought]()
        for words in self.words:
            thoughts += marked_thoughts(words.text, words.path)
        return thoughts

    def add_call(self, call: FoundCall, path: Path) -> None:
        """Add a call to the message, and its result if the same object holds one.

        If the call repeats an earlier one, only the path to the copy is added.
        """
        copied_index = self._find_index_of_copy(call)
        if copied_index is not None:
            self.calls[copied_index] = self.calls[copied_index].with_copy(path)
            return

        if call.id is not None:
            self._index_by_id.setdefault(call.id, len(self.calls))
        self.calls.append(CallAt(call, (path,)))

        result = call.get_held_result()
        if result is not None:
            self.results.append(ResultAt(result, path))

    def _find_index_of_copy(self, call: FoundCall) -> int | None:
        """Find a call that was added already, with the same id, tool and arguments.

        Returns:
            Its index in `calls`, or None if there is none.
        """
        index = None if call.id is None else self._index_by_id.get(call.id)
        if index is None or not _is_copy(call, self.calls[index].fields):
            return None
        return index


def _is_copy(call: FoundCall, other: FoundCall) -> bool:
    """Return whether two calls of one id have the same tool and arguments, however these are written."""
    return call.tool == other.tool and arguments_of(call.arguments) == arguments_of(other.arguments)


def raw_messages(stored_messages: Sequence[StoredMessage], faults: list[Fault]) -> list[RawMessage]:
    """Split the messages of a conversation into words, calls, results and thoughts.

    Args:
        stored_messages: The messages as they stand in the record.
        faults: What was not understood is appended to it.
    """
    messages = list[RawMessage]()
    for number, stored in enumerate(stored_messages):
        messages += read_message(stored, number, faults)
    return _with_thoughts_at_words(messages)


def _with_thoughts_at_words(messages: Sequence[RawMessage]) -> list[RawMessage]:
    """Move each thought of the assistant to its next message with words or calls.

    Thoughts wait while tools speak. They are lost if anybody else speaks first. The messages are changed in place.

    Returns:
        The messages, without those that were only a thought in the record (role THOUGHT).
    """
    waiting_thoughts = list[Thought]()
    for message in messages:
        if message.role in ("assistant", THOUGHT):
            thoughts = waiting_thoughts + message.thoughts
            if message.says_something:
                message.thoughts = thoughts
                waiting_thoughts = []
            else:  # it holds only thoughts
                message.thoughts = []
                waiting_thoughts = thoughts + message.marked_thoughts()
        elif message.role != "tool":
            waiting_thoughts = []
    return [message for message in messages if message.role != THOUGHT]


def read_message(stored: StoredMessage, number: int, faults: list[Fault]) -> list[RawMessage]:
    """Split a stored message into words, calls, results and thoughts.

    Args:
        stored: The message.
        number: The index of the message in the conversation, which faults name.
        faults: What was not understood is appended to it.

    Returns:
        Usually one message. There are several if the assistant says more after a result in the same message, and none
        if the value is not a message.
    """
    reader = _MessageReader(number, faults)
    reader.read(stored)
    return reader.parts


def _unwrap(path: Path, value: Any) -> tuple[Path, Any]:
    """Take a message out of the object that a framework or a log puts around it.

    Returns:
        The path to the inner message, and that message: from `{"kwargs": {"content": "Hi"}}` the inner object. Without
        such an outer object, the path and the value themselves.
    """
    for key in WRAPPERS:
        inner = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(inner, Mapping) and ("content" in inner or "role" in inner or "type" in inner):
            return (*path, key), inner
    return path, value


def _build_text_path(stored: StoredMessage, text: str) -> Path:
    """Return the path to a message that is a text, with the stretch that it takes in a longer text."""
    if stored.offset is None:
        return stored.path
    return (*stored.path, (stored.offset, stored.offset + len(text)))


def _find_role(envelope: Any, message: Mapping[str, Any]) -> str:
    """Find the role of a message.

    Args:
        envelope: The object around the message, which may name the writer too.
        message: The message.

    Returns:
        The role that ROLES has for the first known name, else the first name as it was recorded, else "None".
    """
    names = _list_writers(envelope, message)
    for name in names:
        role = ROLES.get(name) or ROLES.get(name.lower())
        if role is not None:
            return role

    return names[0] if names else "None"


def _list_writers(envelope: Any, message: Mapping[str, Any]) -> list[str]:
    """List the names that a message has for its writer.

    Args:
        envelope: The object around the message, whose fields come second.
        message: The message, whose fields come first.
    """
    names = []
    for fields in (message, envelope):
        for key in SPEAKERS:
            names.append(find_value(fields, (key,)))

    class_path = find_value(envelope, ("id",))
    if isinstance(class_path, list) and class_path:
        names.append(class_path[-1])  # the class of a message that LangChain has serialized

    return [name for name in names if isinstance(name, str)]


class _MessageReader:
    """Reads a stored message into `parts`, RawMessages of which the last one is filled.

    Words of the assistant behind a result begin another part. What is not understood goes to the faults.
    """

    def __init__(self, number: int, faults: list[Fault]) -> None:
        """Begin without parts. number: of the message, for faults."""
        self.parts = list[RawMessage]()
        self._number = number
        self._faults = faults
        self._part_of_id: dict[str, RawMessage] = {}
        """The part that holds the call of an id."""
        self._thoughts_of_next = list[Thought]()
        """Thoughts behind a result, for the part that the next words begin."""

    def read(self, stored: StoredMessage) -> None:
        """Split a stored message into words, calls, results and thoughts, which are added to `parts`."""
        if stored.call is not None or stored.result is not None:
            self._read_known(stored)
        elif stored.is_part:
            self._read_single_part(stored.value, stored.path, stored.role or "assistant")
        else:
            self._read_whole(stored)

        if self._thoughts_of_next:  # thoughts behind a result, and no words behind them
            self.parts[-1].thoughts += self._thoughts_of_next

    def _begin_part(self, role: str, path: Path) -> RawMessage:
        """Begin a part and return it."""
        part = RawMessage(self._number, role, path, thoughts=self._thoughts_of_next)
        self._thoughts_of_next = []
        self.parts.append(part)
        return part

    def _read_known(self, stored: StoredMessage) -> None:
        """Add the call or the result of a message whose form has parsed it already."""
        part = self._begin_part("tool" if stored.call is None else "assistant", stored.path)
        if stored.call is not None:
            part.add_call(stored.call, stored.path)
        if stored.result is not None:
            part.results.append(ResultAt(stored.result, stored.path))
        self._read_thought_beside_content(stored.value, stored.path)

    def _read_single_part(self, value: Any, path: Path, role: str) -> None:
        """Read a message that is one part: a content block, or a call that is a message of its own."""
        self._begin_part(role, path)
        self._read_part(value, path)

    def _read_whole(self, stored: StoredMessage) -> None:
        """Read a message that is a text or an object.

        A framework may have put an object around it, such as LangChain's `{"kwargs": {...}}`. Anything else, and a text
        whose role is not known from its form, is reported as a fault.
        """
        path, message = _unwrap(stored.path, stored.value)
        if isinstance(message, str) and stored.role is not None:  # a text cannot name its role itself
            self._read_text(stored, message)
        elif isinstance(message, Mapping):
            role = stored.role or _find_role(stored.value, message)
            self._read_object(message, path, role)
        else:
            self._faults.append(("no_message", f"message {self._number} is a {type(message).__name__}"))

    def _read_text(self, stored: StoredMessage, text: str) -> None:
        """Read a message that is a text. It is a result if its role is tool, else it is words."""
        part = self._begin_part(str(stored.role), stored.path)
        if part.role == "tool":
            part.results.append(ResultAt(FoundResult(text), stored.path))
        else:
            part.words.append(Words(text, _build_text_path(stored, text)))

    def _read_object(self, message: Mapping[str, Any], path: Path, role: str) -> None:
        """Read a message that is an object, by its type and role.

        - `{"type": "step-start"}` and other silent types are skipped
        - `{"type": "reasoning", ...}` is a thought, if the message has no known role
        - `{"type": "function_call", "name": ...}` is a call or a result, depending on its type
        - `{"role": "user", "content": "Hello"}` is a message that somebody wrote
        """
        kind = message.get("type")
        if kind in SILENT_TYPES:
            return

        if kind in THINKING_TYPES and role not in ROLES.values():
            self._begin_part(THOUGHT, path)
            self._add_thought(message, path)
        elif _is_item_of_shape(message):
            self._read_single_part(message, path, "assistant")
        else:
            self._read_message_of_role(message, path, role)

    def _read_message_of_role(self, message: Mapping[str, Any], path: Path, role: str) -> None:
        """Read a message that somebody wrote.

        An unknown role is reported as a fault, but the message is read all the same.
        """
        if role not in ROLES.values():
            self._faults.append(("unknown_role", f"message {self._number} is of {role!r}"))

        self._begin_part("assistant" if role == CALLS else role, path)
        self._read_fields(message, path, role)
        self._read_thought_beside_content(message, path)

    def _read_fields(self, message: Mapping[str, Any], path: Path, role: str) -> None:
        """Read the content of a message, and its lists of calls and results such as `tool_calls`.

        What the content holds depends on the role: calls if it is CALLS, results if it is "tool", else words and other
        parts. The content of a tool's message is skipped if the message also has a list of results.
        """
        is_of_vercel = bool(message.get("toolInvocations")) and not message.get("parts")
        if is_of_vercel:  # its content was written after the calls and results in `toolInvocations`
            self._read_lists(message, path)
            self._read_content(message, path)
            return

        if role == CALLS:
            self._read_calls_in_content(message, path)
        elif role != "tool":
            self._read_content(message, path)
        elif not _has_result_list(message):
            self._read_results(message, path)

        self._read_lists(message, path)

    def _read_thought_beside_content(self, message: Any, path: Path) -> None:
        """Add the assistant's thought that stands in a field beside the content, such as `reasoning_content`.

        If parts of the content are thoughts, the field repeats them, and only its path is added.
        """
        first_part = self.parts[0]
        if first_part.role != "assistant" or not isinstance(message, Mapping):
            return

        thought = find_thought_beside_content(message, path)
        if thought is None:
            return

        part_with_thoughts = next((part for part in self.parts if part.thoughts), None)
        if part_with_thoughts is None:
            first_part.thoughts.append(thought)
        else:
            repeated_thought = thought._replace(text="")
            part_with_thoughts.thoughts.append(repeated_thought)

    def _read_content(self, message: Mapping[str, Any], path: Path) -> None:
        """Read the first field of a message that holds a content."""
        for key in CONTENTS:
            content = message.get(key)
            if content is not None and content != []:
                self._read_parts(content, (*path, key))
                return

    def _read_parts(self, content: Any, path: Path) -> None:
        """Read a content: a text, a part, or a list of parts.

        Gemini puts the list into an object, `{"parts": [...]}`.
        """
        if isinstance(content, list):
            self._read_list_of_parts(content, path)
        elif isinstance(content, Mapping) and isinstance(content.get("parts"), list):
            self._read_list_of_parts(content["parts"], (*path, "parts"))
        else:
            self._read_part(content, path)

    def _read_list_of_parts(self, parts: Sequence[Any], path: Path) -> None:
        """Read the parts of a content one by one. path: of their list."""
        for index, part in enumerate(parts):
            self._read_part(part, (*path, index))

    def _read_part(self, part: Any, path: Path) -> None:
        """Read a part of a content: a text, or an object such as `{"type": "text", "text": "Warm."}`."""
        if not isinstance(part, Mapping):
            self._add_words(to_text(part), path)
        elif isinstance(part.get("message_content"), Mapping):  # OpenInference
            self._read_part_object(part["message_content"], (*path, "message_content"))
        else:
            self._read_part_object(part, path)

    def _read_part_object(self, part: Mapping[str, Any], path: Path) -> None:
        """Read a part of a content that is an object: a call, a result, a thought or words.

        Parts of silent types, such as `{"type": "step-start"}`, are skipped.
        """
        shaped = find_shape(part)
        if shaped is not None:  # a known kind of call or result, such as {"type": "tool_use", ...}
            self._read_shaped(shaped, part, path)
            return

        kind = find_value(part, TYPE_KEYS)
        if kind in SILENT_TYPES:
            return
        if is_thought(part, kind):
            self._add_thought(part, path)
            return

        was_call_or_result = kind is None and self._read_untyped(part, path)
        if not was_call_or_result:
            self._read_words(part, path, kind)

    def _read_words(self, part: Mapping[str, Any], path: Path, kind: object) -> None:
        """Read a part as words; one of an unknown type, or without a text, is kept as it is. kind: its type."""
        words = _find_words(part, path) if kind is None or kind in TEXT_TYPES else None
        if words is None:
            self._keep_unknown(part, kind)
        else:
            self._add_words(words.text, words.path)

    def _read_shaped(self, shaped: ShapedObject, part: Mapping[str, Any], path: Path) -> None:
        """Read a part of a known kind of call or result, such as `{"type": "tool_use", "name": ..., "input": ...}`.

        Args:
            shaped: The object that has the fields. It is the part, or stands in it as in `{"toolUse": {...}}`.
            part: The part.
            path: The path to the part.
        """
        if shaped.holds_json:  # {"type": "function_call", "value": '{"name": ...}'}
            self._read_listed(shaped.fields["value"], path)
            return

        call = shaped.call()
        if call is not None:
            self._add_call(call, path)
            return

        result = shaped.result()
        if result is not None:
            self.parts[-1].results.append(ResultAt(result, path))
        else:  # a call that names no tool
            self._add_unreadable(part)

    def _read_untyped(self, part: Mapping[str, Any], path: Path) -> bool:
        """Try to read a part without a type as a call or a result, by its fields.

        AutoGen writes `{"id": "1", "name": "search", "arguments": "{}"}` and `{"call_id": "1", "content": "17"}`.

        Returns:
            True if the part was a call or a result, and was added.
        """
        call = parse_listed_call(part)
        if call is not None and call.arguments is not None:
            self._add_call(call, path)
            return True

        result = _parse_untyped_result(part)
        if result is None:
            return False
        self.parts[-1].results.append(ResultAt(result, path))
        return True

    def _keep_unknown(self, part: Mapping[str, Any], kind: object) -> None:
        """Add an unknown part as words.

        It is also reported as a fault if its type, or its fields if it has none, sound like a call.
        """
        name = ", ".join(map(str, part)) if kind is None else str(kind)
        if may_hold_call(name):
            self._add_fault("unknown_part", f"content part {name[:SHOWN]}")
        self._add_words(to_text([part]), None)

    def _read_calls_in_content(self, message: Mapping[str, Any], path: Path) -> None:
        """Read a message whose content is a call or a list of calls.

        The content may be JSON, with thoughts before it. Each call of a list gets a path of its own, so that it can be
        removed alone. A single call, or calls with thoughts before them, get the path of the message.
        """
        key = _find_content_key(message)
        if key is None:
            return
        content = message[key]
        content_path = (*path, key)

        calls = content
        has_thoughts = False
        if isinstance(content, str):
            calls = without_thoughts(content)  # without the thoughts
            thoughts = marked_thoughts(content, content_path)
            self.parts[-1].thoughts += thoughts
            has_thoughts = bool(thoughts)

        is_list_alone = _is_list(content) and not has_thoughts
        self._read_listed(calls, content_path if is_list_alone else path)

    def _read_results(self, message: Mapping[str, Any], path: Path) -> None:
        """Read a message of a tool.

        Its content is a list of results if one of its parts is known as a result by its type or key. Else the whole
        message is one result.
        """
        key = _find_content_key(message) or "content"
        content = find_value(message, (*CONTENTS, *RESULT))
        if isinstance(content, list) and any(map(_is_result_part, content)):
            for index, part in enumerate(content):
                self._read_part(part, (*path, key, index))
        else:
            self._read_single_result(message, path)

    def _read_single_result(self, message: Mapping[str, Any], path: Path) -> None:
        """Read a message of a tool that is one result.

        Example: `{"role": "tool", "tool_call_id": "1", "content": "17"}`
        """
        tool = find_value(message, ("name", "tool_name", "toolName"))
        result = FoundResult(
            content=_get_result_content(message),
            id=find_id(message, ANSWERED_IDS),
            tool=tool if isinstance(tool, str) else None,
            status_fields=message,
        )
        self._add_result(result, path, message)

    def _read_lists(self, message: Mapping[str, Any], path: Path) -> None:
        """Read the fields of a message that list calls or results, such as `tool_calls`."""
        for key in CALL_LISTS:
            if message.get(key):
                self._read_listed(message[key], (*path, key))
        self._read_copies(message, path)  # LangChain repeats the calls in `additional_kwargs`

        for dotted_name in RESULT_LISTS:  # such as "observation.results": a field inside a field
            results = find_value(message, (dotted_name,))
            if isinstance(results, list):
                results_path = (*path, *dotted_name.split("."))
                self._read_listed_results(results, results_path)

        self._report_unread_calls(message)

    def _report_unread_calls(self, message: Mapping[str, Any]) -> None:
        """Report the fields of a message that hold calls and are not read."""
        for key, item in message.items():
            is_read = key in CALL_LISTS or key in CONTENTS
            if not is_read and may_hold_call(str(key)) and _has_call(item):
                self._add_fault("unknown_field", f"field {key} holds a call")

    def _read_listed_results(self, results: Sequence[Any], path: Path) -> None:
        """Read a list of results, each an object. path: of the list."""
        for index, item in enumerate(results):
            content = find_value(item, RESULT)
            result = FoundResult(content=content, id=find_id(item, ANSWERED_IDS), status_fields=item)
            self._add_result(result, (*path, index), item)

    def _read_copies(self, message: Mapping[str, Any], path: Path) -> None:
        """Read the calls in the provider's answer, which LangChain and LlamaIndex keep in `additional_kwargs`.

        They may repeat calls of the message. The old field `function_call` is read only if no other call was found.
        """
        answer = message.get("additional_kwargs")
        if not isinstance(answer, Mapping):
            return

        if answer.get("tool_calls"):
            self._read_listed(answer["tool_calls"], (*path, "additional_kwargs", "tool_calls"))
        elif answer.get("function_call") and not any(part.calls for part in self.parts):
            self._read_listed(answer["function_call"], (*path, "additional_kwargs", "function_call"))

    def _read_listed(self, calls: Any, path: Path) -> None:
        """Read a list of calls or a single call. The value, and each item of the list, may be JSON.

        Args:
            calls: The list or the call.
            path: The path to it.
        """
        opened = parse_json(calls) if isinstance(calls, str) else calls
        if not isinstance(opened, list):
            self._read_listed_call(opened, path, shown=calls if opened is None else opened)
            return

        list_path = (*path, None) if isinstance(calls, str) else path  # None opens the JSON
        for index, item in enumerate(opened):
            self._read_listed_call(item, (*list_path, index), shown=item)

    def _read_listed_call(self, item: Any, path: Path, shown: Any) -> None:
        """Read a call, which may be JSON.

        Args:
            item: The call.
            path: The path to it.
            shown: The value that a fault shows if the item is not a call.
        """
        call = parse_listed_call(parse_json(item) if isinstance(item, str) else item)
        if call is None:
            self._add_unreadable(shown)
        else:
            self._add_call(call, path)

    def _add_call(self, call: FoundCall, path: Path) -> None:
        """Add a call to the last part.

        If an earlier part holds a call with the same id, the call is added there, since it may be a copy.
        """
        part = self.parts[-1]
        if call.id is not None:
            part = self._part_of_id.setdefault(call.id, part)
        part.add_call(call, path)

    def _add_result(self, result: FoundResult, path: Path, fields: Any) -> None:
        """Add a result to the last part. fields: the object that holds it, which may name the caller."""
        result_at = ResultAt(result, path, caller=_find_requestor(fields), message_id=find_id(fields, ("id",)))
        self.parts[-1].results.append(result_at)

    def _add_words(self, text: str, path: Path | None) -> None:
        """Add words to the last part.

        If the last part is the assistant's and has results, the words begin a new part.
        """
        last = self.parts[-1]
        if last.role == "assistant" and last.results and text.strip():
            last = self._begin_part(last.role, path or last.path)
        last.words.append(Words(text, path))

    def _add_thought(self, thought: Any, path: Path) -> None:
        """Add a thought to the last part.

        If that part has results, the thought waits for the next part instead. A thought without a text is skipped.
        """
        text = get_thought_text(thought)
        thoughts = self._thoughts_of_next if self.parts[-1].results else self.parts[-1].thoughts
        if text:
            thoughts.append(Thought(text, (path,)))

    def _add_unreadable(self, call: Any) -> None:
        """Report something that should be a call and cannot be read."""
        self._add_fault("unreadable_call", str(call)[:SHOWN])

    def _add_fault(self, reason: str, detail: str) -> None:
        """Report a part of the message that was not understood."""
        self._faults.append((reason, f"message {self._number}: {detail}"))


def _is_item_of_shape(message: Mapping[str, Any]) -> bool:
    """Return whether a message is a call or a result by its type, and names no role."""
    kind = message.get("type")
    return isinstance(kind, str) and kind in CALL_TYPES and "role" not in message


def _has_result_list(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a field with a list of results."""
    return any(isinstance(find_value(message, (name,)), list) for name in RESULT_LISTS)


def _find_content_key(message: Mapping[str, Any]) -> str | None:
    """Return the first of the fields CONTENTS that a message has; None without one."""
    return next((key for key in CONTENTS if message.get(key) is not None), None)


def _find_words(part: Mapping[str, Any], path: Path) -> Words | None:
    """Find the words of a content part.

    Returns:
        The first of the fields WORDS that has a value, or None if that value is not a text or there is none.
    """
    for key in WORDS:
        text = find_value(part, (key,))
        if text is not None:
            return Words(text, (*path, *key.split("."))) if isinstance(text, str) else None
    return None


def _parse_untyped_result(part: Mapping[str, Any]) -> FoundResult | None:
    """Parse a part without a type as a result.

    Returns:
        The result, or None if the part lacks the id of the answered call or a content.
    """
    call_id = find_id(part, ANSWERED_IDS)
    content = find_value(part, RESULT)
    if call_id is None or content is None:
        return None
    return FoundResult(content=content, id=call_id, status_fields=part)


def _get_result_content(message: Mapping[str, Any]) -> Any:
    """Get the answer from a message of a tool.

    If the content is empty and the message reports an error, the error takes its place.
    """
    content = find_value(message, (*CONTENTS, *RESULT))
    error = find_value(message, ("error.message",))
    if error is not None and not content:
        content = error

    return [_unwrap_openinference_part(part) for part in content] if isinstance(content, list) else content


def _unwrap_openinference_part(part: Any) -> Any:
    """Return the content part inside the object that OpenInference puts around it; any other part unchanged."""
    return part.get("message_content", part) if isinstance(part, Mapping) else part


def _is_result_part(part: Any) -> bool:
    """Return whether a content part is a result by its type or key."""
    shaped = find_shape(part) if isinstance(part, Mapping) else None
    return shaped is not None and bool(shaped.shape.result)


def _has_call(value: Any) -> bool:
    """Tell whether a value is a call with arguments, or a list that contains one."""
    for item in value if isinstance(value, list) else [value]:
        call = parse_listed_call(item)
        if call is not None and call.arguments is not None:
            return True
    return False


def _find_requestor(result: Any) -> str | None:
    """Return who made the call of a result, user or assistant, as files of tau2 name it; None in other files."""
    requestor = find_value(result, ("requestor",))
    return requestor if requestor in ("user", "assistant") else None


def _is_list(content: Any) -> bool:
    """Return whether a content is a list, or a list in JSON."""
    opened = parse_json(content) if isinstance(content, str) else content
    return isinstance(opened, list)


def _unwrap_vercel_value(content: Any) -> Any:
    """Return the value inside a result of Vercel that names its type, as `{"type": "json", "value": ...}`."""
    if isinstance(content, Mapping) and content.keys() == {"type", "value"}:
        return content["value"]
    return content
