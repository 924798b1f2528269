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


class Said(NamedTuple):
    """A raw message, or a part of one, as it stands in a record.

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
        """Add a call, or another way to one that is there already under the same id; and the result beside it."""
        if found.id is not None and found.id in self._index_by_id:
            index = self._index_by_id[found.id]
            first = self.calls[index]
            if _is_copy(found, first.found):
                self.calls[index] = CallAt(first.found, (*first.paths, path))
                return
        elif found.id is not None:
            self._index_by_id[found.id] = len(self.calls)
        self.calls.append(CallAt(found, (path,)))
        if found.has_result:
            self.results.append(ResultAt(FoundResult(found.result, found.id, found.tool, found.beside), path))


def _is_copy(call: FoundCall, other: FoundCall) -> bool:
    """Return whether two calls of one id are one call that a message holds twice, however the arguments are written."""
    return call.tool == other.tool and arguments_of(call.arguments) == arguments_of(other.arguments)


def read_message(said: Said, number: int, faults: list[Fault]) -> list[RawMessage]:
    """Return a stored message, taken apart; none where it is no message.

    It is several where the assistant goes on after a result that stands in the same message: each ends with its
    results. `faults`: gets what was met in it that was not understood; `number` names the message there.
    """
    if said.call is not None or said.result is not None:
        return [_made_by_form(said, number)]
    if said.is_part:
        reader = _MessageReader(RawMessage(number, said.role or "assistant", said.path), faults)
        reader.read_part(said.value, said.path)
        return reader.parts
    path, value = _unwrapped(said.path, said.value)
    if isinstance(value, str) and said.role is not None:
        return [_of_text(number, said, value)]
    if not isinstance(value, Mapping):
        faults.append(("no_message", f"message {number} is a {type(value).__name__}"))
        return []
    role = said.role or _role_of(said.value, value)
    kind = value.get("type")
    if kind in SILENT_TYPES or (kind in THINKING_TYPES and role not in ROLES.values()):
        return []
    if isinstance(kind, str) and kind in CALL_TYPES and "role" not in value:
        reader = _MessageReader(RawMessage(number, "assistant", path), faults)
        reader.read_part(value, path)
        return reader.parts
    if role not in ROLES.values():
        faults.append(("unknown_role", f"message {number} is of {role!r}"))
    reader = _MessageReader(RawMessage(number, "assistant" if role == CALLS else role, path), faults)
    if value.get("toolInvocations") and not value.get("parts"):  # Vercel's content follows the results beside it
        reader.read_lists(value, path)
        reader.read_content(value, path)
        return reader.parts
    if role == CALLS:
        reader.read_calls_in_content(value, path)
    elif role == "tool":
        if not any(isinstance(first_of(value, (name,)), list) for name in RESULT_LISTS):
            reader.read_results(value, path)
    else:
        reader.read_content(value, path)
    reader.read_lists(value, path)
    return reader.parts


def _made_by_form(said: Said, number: int) -> RawMessage:
    """Return the message of a call or a result that a form has found itself."""
    message = RawMessage(number, "tool" if said.call is None else "assistant", said.path)
    if said.call is not None:
        message.add_call(said.call, said.path)
    if said.result is not None:
        message.results.append(ResultAt(said.result, said.path))
    return message


def _of_text(number: int, said: Said, text: str) -> RawMessage:
    """Return a message that is a text: a result where a tool wrote it."""
    role = str(said.role)
    if role == "tool":
        return RawMessage(number, role, said.path, results=[ResultAt(FoundResult(text, None, None, None), said.path)])
    words_path = said.path if said.offset is None else (*said.path, (said.offset, said.offset + len(text)))
    return RawMessage(number, role, said.path, [Words(text, words_path)])


def _unwrapped(path: Path, value: Any) -> tuple[Path, Any]:
    """Return the message inside what frameworks and logs put around it."""
    for key in WRAPPERS:
        inner = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(inner, Mapping) and ("content" in inner or "role" in inner or "type" in inner):
            return (*path, key), inner
    return path, value


def _role_of(outer: Any, message: Mapping[str, Any]) -> str:
    """Return who wrote a message, as ROLES has it where it is known, else as it was recorded."""
    named = [first_of(fields, (key,)) for fields in (message, outer) for key in SPEAKERS]
    if isinstance(outer, Mapping) and isinstance(outer.get("id"), list) and outer["id"]:
        named.append(outer["id"][-1])  # the class of a message that LangChain has dumped
    names = [name for name in named if isinstance(name, str)]
    for name in names:
        role = ROLES.get(name) or ROLES.get(name.lower())
        if role is not None:
            return role
    return names[0] if names else "None"


class _MessageReader:
    """Fills RawMessages with what stands in a stored message; what is not understood goes to the faults.

    State: `parts`, of which the last one is filled; words of the assistant after a result begin another one.
    """

    def __init__(self, message: RawMessage, faults: list[Fault]) -> None:
        self.parts = [message]
        self._faults = faults
        self._part_of_id: dict[str, RawMessage] = {}

    def _add_call(self, found: FoundCall, path: Path) -> None:
        """Add a call to the last part, or another way to one that is in a part already."""
        part = self.parts[-1]
        if found.id is not None:
            part = self._part_of_id.setdefault(found.id, part)
        part.add_call(found, path)

    def _add_words(self, text: str, path: Path | None) -> None:
        last = self.parts[-1]
        if last.role == "assistant" and last.results and text.strip():
            last = RawMessage(last.number, last.role, path or last.path)
            self.parts.append(last)
        last.words.append(Words(text, path))

    def read_content(self, value: Mapping[str, Any], path: Path) -> None:
        """Read what a message says: text, or parts."""
        for key in CONTENTS:
            content = value.get(key)
            if content is None or content == []:
                continue
            content_path = (*path, key)
            if isinstance(content, Mapping) and isinstance(content.get("parts"), list):
                content_path = (*content_path, "parts")
                content = content["parts"]
            if isinstance(content, list):
                for index, part in enumerate(content):
                    self.read_part(part, (*content_path, index))
            elif isinstance(content, Mapping):
                self.read_part(content, content_path)
            else:
                self._add_words(text_of(content), content_path)
            return

    def read_part(self, part: Any, path: Path) -> None:
        """Read a part of a content: words, thinking, a call, a result, or something else, which is named."""
        if not isinstance(part, Mapping):
            self._add_words(text_of(part), path)
            return
        if isinstance(part.get("message_content"), Mapping):  # OpenInference
            part = part["message_content"]
            path = (*path, "message_content")
        shaped = shape_of(part)
        if shaped is not None:
            shape, fields = shaped
            if isinstance(first_of(fields, ("value",)), str) and shape.tool:  # a part with its call in JSON
                self._read_listed(fields["value"], path)
                return
            call = found_call(shape, fields) if shape.tool else None
            if call is not None:
                self._add_call(call, path)
            elif shape.result and not shape.tool:
                self.parts[-1].results.append(ResultAt(found_result(shape, fields), path))
            else:
                self._unreadable(part)
            return
        kind = first_of(part, TYPE_KEYS)
        if kind in SILENT_TYPES or kind in THINKING_TYPES or any(part.get(key) for key in THINKING_KEYS):
            return
        if kind is None and self._read_plain_part(part, path):
            return
        key = next((key for key in WORDS if first_of(part, (key,)) is not None), "")
        text = first_of(part, (key,))
        if isinstance(text, str) and (kind is None or kind in TEXT_TYPES):
            self._add_words(text, (*path, *key.split(".")))
            return
        named = str(kind) if kind is not None else ", ".join(map(str, part))
        if may_hold_call(named):
            self._faults.append(("unknown_part", f"message {self.parts[-1].number}: content part {named[:80]}"))
        self._add_words(text_of([part]), None)

    def _read_plain_part(self, part: Mapping[str, Any], path: Path) -> bool:
        """Read a part without a type that is a call or a result by its fields, as AutoGen's; return whether it is."""
        answered = id_in(part, ANSWERED_IDS)
        call = listed_call(part)
        if call is not None and call.arguments is not None:
            self._add_call(call, path)
        elif answered is not None and first_of(part, RESULT) is not None:
            self.parts[-1].results.append(ResultAt(FoundResult(first_of(part, RESULT), answered, None, part), path))
        else:
            return False
        return True

    def read_calls_in_content(self, value: Mapping[str, Any], path: Path) -> None:
        """Read a message whose content is a call or a list of calls in JSON, and nothing else."""
        for key in CONTENTS:
            content = value.get(key)
            if content is None:
                continue
            calls = visible(content) if isinstance(content, str) else content
            self._read_listed(calls, (*path, key) if calls is content and _is_list(content) else path)
            return

    def read_results(self, value: Mapping[str, Any], path: Path) -> None:
        """Read a message of a tool: results in parts, each with an id, or one result, which is the message."""
        content = first_of(value, (*CONTENTS, *RESULT))
        key = next((key for key in CONTENTS if value.get(key) is not None), "content")
        parts = content if isinstance(content, list) else []
        shaped = [shape_of(part) if isinstance(part, Mapping) else None for part in parts]
        if any(found is not None and found[0].result for found in shaped):
            for index, part in enumerate(parts):
                self.read_part(part, (*path, key, index))
            return
        tool = first_of(value, ("name", "tool_name", "toolName"))
        error = first_of(value, ("error.message",))
        if error is not None and not content:
            content = error
        if isinstance(content, list):
            content = [part.get("message_content", part) if isinstance(part, Mapping) else part for part in content]
        found = FoundResult(content, id_in(value, ANSWERED_IDS), tool if isinstance(tool, str) else None, value)
        self.parts[-1].results.append(ResultAt(found, path, _requestor(value), id_in(value, ("id",))))

    def read_lists(self, value: Mapping[str, Any], path: Path) -> None:
        """Read the fields of a message that hold calls or results beside its content."""
        for key in CALL_LISTS:
            if value.get(key):
                self._read_listed(value[key], (*path, key))
        self._read_copies(value, path)
        for name in RESULT_LISTS:
            results = first_of(value, (name,))
            for index, result in enumerate(results if isinstance(results, list) else ()):
                found = FoundResult(first_of(result, RESULT), id_in(result, ANSWERED_IDS), None, result)
                result_path = (*path, *name.split("."), index)
                self.parts[-1].results.append(ResultAt(found, result_path, _requestor(result), id_in(result, ("id",))))
        for key, item in value.items():
            if key in CALL_LISTS or key in CONTENTS or not may_hold_call(str(key)):
                continue
            for candidate in item if isinstance(item, list) else [item]:
                call = listed_call(candidate)
                if call is not None and call.arguments is not None:
                    self._faults.append(("unknown_field", f"message {self.parts[-1].number}: field {key} holds a call"))
                    break

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
        """Read a list of calls, a call, or either in JSON."""
        opened = parsed(calls) if isinstance(calls, str) else calls
        if isinstance(calls, str) and isinstance(opened, list):
            path = (*path, None)
        for index, item in enumerate(opened if isinstance(opened, list) else [opened]):
            fields = parsed(item) if isinstance(item, str) else item
            call = listed_call(fields)
            if call is None:
                self._unreadable(calls if opened is None else item)
                continue
            self._add_call(call, (*path, index) if isinstance(opened, list) else path)

    def _unreadable(self, call: Any) -> None:
        self._faults.append(("unreadable_call", f"message {self.parts[-1].number}: {str(call)[:80]}"))


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


def raw_messages(said: Sequence[Said], faults: list[Fault]) -> list[RawMessage]:
    """Return the messages of a conversation, taken apart; see `read_message` for the faults."""
    messages = []
    for number, stored in enumerate(said):
        messages.extend(read_message(stored, number, faults))
    return messages
