"""Take a stored message apart into its role, words, calls and results, each with the way to it in the record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolformer_dag.conversations.marks import visible
from toolformer_dag.conversations.plain_values import arguments_of, first_of, parsed, text_of
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import (
    ANSWERED_IDS,
    CALL_LISTS,
    CALL_TYPES,
    RESULT,
    RESULT_LISTS,
    SILENT_TYPES,
    TEXT_TYPES,
    THINKING_KEYS,
    THINKING_TYPES,
    TYPE_KEYS,
    WORDS,
    FoundCall,
    FoundResult,
    Shape,
    found_call,
    found_result,
    id_in,
    listed_call,
    may_hold_call,
    shape_of,
)

CALLS = "calls"
"""The role of a message whose content is a call, or a list of calls, of the assistant."""
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
"""The roles of messages by the names that records have for them."""
SPEAKERS = ("role", "from", "source", "sender", "author.role", "speaker", "kind", "type")
"""The fields that may say who wrote a message."""
CONTENTS = ("parts", "content", "value", "message", "text", "contents", "blocks")
"""The fields that may hold what a message says."""
WRAPPERS = ("message", "data", "kwargs", "payload")
"""The fields whose object is the message itself, in logs and in what frameworks store."""

Fault = tuple[str, str]
"""Why something of a record could not be used as it was recorded, and a detail."""
SHOWN = 80
"""Characters of what was not understood in the detail of a fault."""


class StoredMessage(NamedTuple):
    """A message, or a part of one, as it stands in a record.

    - `path`: to it in the record
    - `value`: the message itself: an object, or a text
    - `role`: as ROLES has it; None where the message says it itself
    - `is_part`: whether the value is a part of a message, such as a content block
    - `call`, `result`: what the value is, where a form knows that better than its fields say
    - `offset`: where the path is a stretch of text, how many characters of it stand before the value
    """

    path: Path
    value: Any
    role: str | None = None
    is_part: bool = False
    call: FoundCall | None = None
    result: FoundResult | None = None
    offset: int | None = None


class Words(NamedTuple):
    """Text that is no call and no result, and the way to it; None where it is put together of several values."""

    text: str
    path: Path | None


class CallAt(NamedTuple):
    """A call and the ways to it: several where the record has it twice, as LangChain's messages do."""

    found: FoundCall
    paths: tuple[Path, ...]


class ResultAt(NamedTuple):
    """A result and the way to it.

    - `by`: who made the call, where the record says so; None elsewhere
    - `message_id`: the id of the message itself, which in tau2's files is that of the call
    """

    found: FoundResult
    path: Path
    by: str | None = None
    message_id: str | None = None

    @property
    def text(self) -> str:
        """Return what the tool answered, as text."""
        return text_of(_vercel_value(self.found.content))


@dataclass
class RawMessage:
    """A stored message, taken apart; `number`: which of its conversation it is, from 0."""

    number: int
    role: str
    path: Path
    words: list[Words] = field(default_factory=list)
    calls: list[CallAt] = field(default_factory=list)
    results: list[ResultAt] = field(default_factory=list)
    _index_by_id: dict[str | None, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the words, one after another."""
        return "".join(words.text for words in self.words)

    def add_call(self, found: FoundCall, path: Path) -> None:
        """Add a call and the result beside it.

        Where the message has the same call already, under the same id, only the path is added to that call.
        """
        first_of_id = None if found.id is None else self._index_by_id.get(found.id)
        if first_of_id is not None:
            first = self.calls[first_of_id]
            if _is_copy(found, first.found):
                self.calls[first_of_id] = CallAt(first.found, (*first.paths, path))
                return
        if found.id is not None and first_of_id is None:
            self._index_by_id[found.id] = len(self.calls)
        self.calls.append(CallAt(found, (path,)))
        if found.has_result:
            result = FoundResult(content=found.result, id=found.id, tool=found.tool, beside=found.beside)
            self.results.append(ResultAt(result, path))


def _is_copy(call: FoundCall, other: FoundCall) -> bool:
    """Return whether two calls of one id are one call that a message holds twice, however the arguments are written."""
    return call.tool == other.tool and arguments_of(call.arguments) == arguments_of(other.arguments)


def read_message(stored: StoredMessage, number: int, faults: list[Fault]) -> list[RawMessage]:
    """Return a stored message, taken apart; an empty list where it is no message.

    It becomes several where the assistant goes on after a result that stands in the same message: each ends with its
    results. Appends to `faults` what was not understood; `number` names the message there.
    """
    if stored.call is not None or stored.result is not None:
        return [_made_by_form(stored, number)]
    if stored.is_part:
        return _read_as_part(stored.value, stored.path, number, stored.role or "assistant", faults)
    path, value = _unwrapped(stored.path, stored.value)
    if isinstance(value, str) and stored.role is not None:
        return [_of_text(number, stored, value)]
    if not isinstance(value, Mapping):
        faults.append(("no_message", f"message {number} is a {type(value).__name__}"))
        return []
    role = stored.role or _role_of(stored.value, value)
    is_known_role = role in ROLES.values()
    kind = value.get("type")
    if kind in SILENT_TYPES or (kind in THINKING_TYPES and not is_known_role):
        return []
    is_call = isinstance(kind, str) and kind in CALL_TYPES and "role" not in value
    if is_call:
        return _read_as_part(value, path, number, "assistant", faults)
    if not is_known_role:
        faults.append(("unknown_role", f"message {number} is of {role!r}"))
    reader = _MessageReader(RawMessage(number, "assistant" if role == CALLS else role, path), faults)
    reader.read_fields(value, path, role)
    return reader.parts


def _read_as_part(value: Any, path: Path, number: int, role: str, faults: list[Fault]) -> list[RawMessage]:
    """Return a message that consists of one part, such as a content block or a call that is a message of its own."""
    reader = _MessageReader(RawMessage(number, role, path), faults)
    reader.read_part(value, path)
    return reader.parts


def _made_by_form(stored: StoredMessage, number: int) -> RawMessage:
    """Return the message of a call or a result that a form has found itself."""
    message = RawMessage(number, "tool" if stored.call is None else "assistant", stored.path)
    if stored.call is not None:
        message.add_call(stored.call, stored.path)
    if stored.result is not None:
        message.results.append(ResultAt(stored.result, stored.path))
    return message


def _of_text(number: int, stored: StoredMessage, text: str) -> RawMessage:
    """Return a message that is a text: a result where a tool wrote it."""
    role = str(stored.role)
    if role == "tool":
        return RawMessage(number, role, stored.path, results=[ResultAt(FoundResult(text), stored.path)])
    words_path = stored.path if stored.offset is None else (*stored.path, (stored.offset, stored.offset + len(text)))
    return RawMessage(number, role, stored.path, [Words(text, words_path)])


def _unwrapped(path: Path, value: Any) -> tuple[Path, Any]:
    """Return the message inside what frameworks and logs put around it."""
    for key in WRAPPERS:
        inner = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(inner, Mapping) and ("content" in inner or "role" in inner or "type" in inner):
            return (*path, key), inner
    return path, value


def _role_of(envelope: Any, message: Mapping[str, Any]) -> str:
    """Return who wrote a message, as ROLES has it where it is known, else as it was recorded; "None" where nobody says.

    envelope: what the record has around the message, whose fields may say it too.
    """
    names = []
    for fields in (message, envelope):
        for key in SPEAKERS:
            names.append(first_of(fields, (key,)))
    if isinstance(envelope, Mapping) and isinstance(envelope.get("id"), list) and envelope["id"]:
        names.append(envelope["id"][-1])  # the class of a message that LangChain has dumped
    recorded_names = [name for name in names if isinstance(name, str)]
    for name in recorded_names:
        role = ROLES.get(name) or ROLES.get(name.lower())
        if role is not None:
            return role
    return recorded_names[0] if recorded_names else "None"


class _MessageReader:
    """Fills RawMessages with what stands in a stored message; what is not understood goes to the faults.

    State: `parts`, the messages so far, of which the last one is filled. Words of the assistant behind a result begin
    another one.
    """

    def __init__(self, message: RawMessage, faults: list[Fault]) -> None:
        """Begin with a message without words, calls and results."""
        self.parts = [message]
        self._faults = faults
        self._part_of_id: dict[str, RawMessage] = {}
        """The message with the call of an id."""

    def read_fields(self, value: Mapping[str, Any], path: Path, role: str) -> None:
        """Read all fields of a message that may say something. role: as ROLES has it."""
        is_of_vercel = bool(value.get("toolInvocations")) and not value.get("parts")
        if is_of_vercel:  # its content follows the results in the other field
            self.read_lists(value, path)
            self.read_content(value, path)
            return
        if role == CALLS:
            self.read_calls_in_content(value, path)
        elif role == "tool":
            lists_results = any(isinstance(first_of(value, (name,)), list) for name in RESULT_LISTS)
            if not lists_results:
                self.read_results(value, path)
        else:
            self.read_content(value, path)
        self.read_lists(value, path)

    def read_content(self, value: Mapping[str, Any], path: Path) -> None:
        """Read what a message says: text, a part or a list of parts, in the first of CONTENTS that holds something."""
        for key in CONTENTS:
            content = value.get(key)
            if content is not None and content != []:
                self._read_content(content, (*path, key))
                return

    def _read_content(self, content: Any, path: Path) -> None:
        """Read a text, a part, a list of parts, or an object with such a list (Gemini's `{"parts": [...]}`)."""
        if isinstance(content, Mapping) and isinstance(content.get("parts"), list):
            path = (*path, "parts")
            content = content["parts"]
        if isinstance(content, list):
            for index, part in enumerate(content):
                self.read_part(part, (*path, index))
        elif isinstance(content, Mapping):
            self.read_part(content, path)
        else:
            self._add_words(text_of(content), path)

    def read_part(self, part: Any, path: Path) -> None:
        """Read a part of a content: words, thinking, a call, or a result.

        As examples, `{"type": "text", "text": "Warm."}` and `{"type": "tool_use", "name": "search", "input": {}}`. What
        is none of these is kept as words, and is a fault (unknown_part) where its type sounds like a call.
        """
        if not isinstance(part, Mapping):
            self._add_words(text_of(part), path)
            return
        if isinstance(part.get("message_content"), Mapping):  # OpenInference
            part = part["message_content"]
            path = (*path, "message_content")
        shaped = shape_of(part)
        if shaped is not None:
            shape, fields = shaped
            self._read_shaped(shape, fields, part, path)
            return
        kind = first_of(part, TYPE_KEYS)
        is_silent = kind in SILENT_TYPES or kind in THINKING_TYPES or any(part.get(key) for key in THINKING_KEYS)
        if is_silent:
            return
        if kind is None and self._read_untyped(part, path):
            return
        if kind is None or kind in TEXT_TYPES:
            for key in WORDS:
                text = first_of(part, (key,))
                if text is not None and not isinstance(text, str):
                    break
                if isinstance(text, str):
                    self._add_words(text, (*path, *key.split(".")))
                    return
        self._keep_unknown(part, kind)

    def _read_shaped(self, shape: Shape, fields: Mapping[str, Any], part: Mapping[str, Any], path: Path) -> None:
        """Read a part that is a call or a result by its type or key. fields: the object with its fields."""
        holds_json = bool(shape.tool) and isinstance(first_of(fields, ("value",)), str)
        if holds_json:
            self._read_listed(fields["value"], path)
            return
        call = found_call(shape, fields) if shape.tool else None
        if call is not None:
            self._add_call(call, path)
        elif shape.result and not shape.tool:
            self.parts[-1].results.append(ResultAt(found_result(shape, fields), path))
        else:
            self._add_unreadable(part)

    def _read_untyped(self, part: Mapping[str, Any], path: Path) -> bool:
        """Read a part without a type that is a call or a result by its fields; return whether it is.

        AutoGen's `{"id": "1", "name": "search", "arguments": "{}"}` and `{"call_id": "1", "content": "17"}`.
        """
        call = listed_call(part)
        if call is not None and call.arguments is not None:
            self._add_call(call, path)
            return True
        answered_id = id_in(part, ANSWERED_IDS)
        content = first_of(part, RESULT)
        if answered_id is None or content is None:
            return False
        found = FoundResult(content=content, id=answered_id, beside=part)
        self.parts[-1].results.append(ResultAt(found, path))
        return True

    def _keep_unknown(self, part: Mapping[str, Any], kind: object) -> None:
        """Keep a part that was not understood as words; a fault where its type, or its fields, sound like a call."""
        name = ", ".join(map(str, part)) if kind is None else str(kind)
        if may_hold_call(name):
            self._add_fault("unknown_part", f"content part {name[:SHOWN]}")
        self._add_words(text_of([part]), None)

    def read_calls_in_content(self, value: Mapping[str, Any], path: Path) -> None:
        """Read a message whose content is a call or a list of calls in JSON, and nothing else."""
        key = next((key for key in CONTENTS if value.get(key) is not None), None)
        if key is None:
            return
        content = value[key]
        calls = visible(content) if isinstance(content, str) else content  # without thinking
        has_thinking = calls is not content
        # The calls of a list lie in it; a single call, or one behind thinking, is the message.
        calls_path = path if has_thinking or not _is_list(content) else (*path, key)
        self._read_listed(calls, calls_path)

    def read_results(self, value: Mapping[str, Any], path: Path) -> None:
        """Read a message of a tool: several results, each a part with an id, or one, which is the message."""
        parts_key = next((key for key in CONTENTS if value.get(key) is not None), "content")
        parts = first_of(value, (*CONTENTS, *RESULT))
        if isinstance(parts, list) and any(map(_is_result_part, parts)):
            for index, part in enumerate(parts):
                self.read_part(part, (*path, parts_key, index))
        else:
            self._read_one_result(value, path)

    def _read_one_result(self, value: Mapping[str, Any], path: Path) -> None:
        """Read a message of a tool that is one result: `{"role": "tool", "tool_call_id": "1", "content": "17"}`."""
        content = first_of(value, (*CONTENTS, *RESULT))
        error = first_of(value, ("error.message",))
        if error is not None and not content:
            content = error
        if isinstance(content, list):  # OpenInference has an object around each part
            content = [part.get("message_content", part) if isinstance(part, Mapping) else part for part in content]
        tool = first_of(value, ("name", "tool_name", "toolName"))
        found = FoundResult(
            content=content,
            id=id_in(value, ANSWERED_IDS),
            tool=tool if isinstance(tool, str) else None,
            beside=value,
        )
        self._add_result(found, path, value)

    def read_lists(self, value: Mapping[str, Any], path: Path) -> None:
        """Read the fields of a message that hold calls or results beside its content, such as `tool_calls`."""
        for key in CALL_LISTS:
            if value.get(key):
                self._read_listed(value[key], (*path, key))
        self._read_copies(value, path)
        for name in RESULT_LISTS:
            results = first_of(value, (name,))
            if isinstance(results, list):
                self._read_listed_results(results, (*path, *name.split(".")))
        for key, item in value.items():
            is_read = key in CALL_LISTS or key in CONTENTS
            if not is_read and may_hold_call(str(key)) and _holds_call(item):
                self._add_fault("unknown_field", f"field {key} holds a call")

    def _read_listed_results(self, results: Sequence[Any], path: Path) -> None:
        """Read a list of results, each an object. path: of the list."""
        for index, result in enumerate(results):
            content = first_of(result, RESULT)
            found = FoundResult(content=content, id=id_in(result, ANSWERED_IDS), beside=result)
            self._add_result(found, (*path, index), result)

    def _read_copies(self, value: Mapping[str, Any], path: Path) -> None:
        """Read what LangChain and LlamaIndex keep of a provider's answer: the calls, or a copy of them by their ids."""
        kept = value.get("additional_kwargs")
        if not isinstance(kept, Mapping):
            return
        if kept.get("tool_calls"):
            self._read_listed(kept["tool_calls"], (*path, "additional_kwargs", "tool_calls"))
        elif kept.get("function_call") and not any(part.calls for part in self.parts):
            self._read_listed(kept["function_call"], (*path, "additional_kwargs", "function_call"))

    def _read_listed(self, calls: Any, path: Path) -> None:
        """Read a list of calls, a call, or either in JSON; an item may be JSON too.

        path: of `calls`. The step None, which opens JSON, is added to it for a list in JSON.
        """
        opened = parsed(calls) if isinstance(calls, str) else calls
        if not isinstance(opened, list):
            self._read_listed_call(opened, path, shown=calls if opened is None else opened)
            return
        list_path = (*path, None) if isinstance(calls, str) else path
        for index, item in enumerate(opened):
            self._read_listed_call(item, (*list_path, index), shown=item)

    def _read_listed_call(self, item: Any, path: Path, shown: Any) -> None:
        """Read a call, or a call in JSON. shown: what the fault shows where it is none."""
        call = listed_call(parsed(item) if isinstance(item, str) else item)
        if call is None:
            self._add_unreadable(shown)
        else:
            self._add_call(call, path)

    def _add_call(self, found: FoundCall, path: Path) -> None:
        """Add a call to the last part; a copy of a call, by its id, to the part with that."""
        part = self.parts[-1]
        if found.id is not None:
            part = self._part_of_id.setdefault(found.id, part)
        part.add_call(found, path)

    def _add_result(self, found: FoundResult, path: Path, fields: Any) -> None:
        """Add a result to the last part. fields: of the object that holds it, which may say who called."""
        result = ResultAt(found, path, by=_requestor(fields), message_id=id_in(fields, ("id",)))
        self.parts[-1].results.append(result)

    def _add_words(self, text: str, path: Path | None) -> None:
        """Add words to the last part; words of the assistant behind a result begin another part."""
        last = self.parts[-1]
        if last.role == "assistant" and last.results and text.strip():
            last = RawMessage(last.number, last.role, path or last.path)
            self.parts.append(last)
        last.words.append(Words(text, path))

    def _add_unreadable(self, call: Any) -> None:
        """Report something that should be a call and cannot be read."""
        self._add_fault("unreadable_call", str(call)[:SHOWN])

    def _add_fault(self, reason: str, detail: str) -> None:
        """Report what was not understood of this message."""
        self._faults.append((reason, f"message {self.parts[-1].number}: {detail}"))


def _is_result_part(part: Any) -> bool:
    """Return whether a part of a content is a result by its type or key."""
    shaped = shape_of(part) if isinstance(part, Mapping) else None
    return shaped is not None and bool(shaped[0].result)


def _holds_call(value: Any) -> bool:
    """Return whether a value is a call with arguments, or a list with one."""
    for candidate in value if isinstance(value, list) else [value]:
        call = listed_call(candidate)
        if call is not None and call.arguments is not None:
            return True
    return False


def _requestor(result: Any) -> str | None:
    """Return who made the call of a result, as tau2's files say it; None elsewhere."""
    by = first_of(result, ("requestor",))
    return by if by in ("user", "assistant") else None


def _is_list(content: Any) -> bool:
    """Return whether a content is a list of calls, or a list of them in JSON."""
    return isinstance(parsed(content) if isinstance(content, str) else content, list)


def _vercel_value(content: Any) -> Any:
    """Return what is inside a result that says its own type, as `{"type": "json", "value": ...}` of Vercel does."""
    if isinstance(content, Mapping) and content.keys() == {"type", "value"}:
        return content["value"]
    return content


def raw_messages(stored_messages: Sequence[StoredMessage], faults: list[Fault]) -> list[RawMessage]:
    """Return the messages of a conversation, taken apart; see `read_message` for the faults."""
    messages = []
    for number, stored in enumerate(stored_messages):
        messages.extend(read_message(stored, number, faults))
    return messages
