"""Forms of conversations: how their records are recognised, and where their messages stand."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import JSON_OPENING_BRACKETS, try_parse_json_cached
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath, get_value_at

ANY_ITEM = "*"
"""The step of a pattern that stands for every item of a list."""
MAX_JSON_TEXT_DEPTH = 2
"""Steps from a record within which text is opened as JSON: lists of messages may be stored so, contents are not."""
MAX_ITEMS_WITH_SIGN = 10_000
"""Items at the beginning of a list in which a sign is looked for."""
MAX_ITEMS_BEFORE_MESSAGE = 100
"""Items at the beginning of a list that are looked at to see whether it holds messages."""
ROLES_BY_TEXT_FIELD = {
    "prompt": "user",
    "input": "user",
    "completion": "assistant",
    "response": "assistant",
    "output": "assistant",
}
"""The role of the text in fields that may hold plain text in place of messages."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form in which a program or a data set stores conversations with tool calls.

    docs/howto/own-form.md says how to add one.

    Attributes:
        name: The name of the form in `judge --forms` and `trace_sources`.
        source: The address of a page that describes its fields.
        example: A record in the form, or a list of records if `is_file` is true.
        signs: A record has the form if it has one of these: a path to a value such as `messages.*.content.*.toolUse`,
            which may end with `=value`, or with `~words` that a text contains.
        messages: Paths to the lists of messages of a conversation, one after another.
        conversations: The path to the list of conversations of a record, or "" if the record is one.
        read: A function that yields the messages of a conversation, for forms whose messages are not at simple paths.
        split: A function that yields the messages of each conversation of a record or a file, for forms whose
            conversations are not at a simple path.
        is_file: Whether all records of a file are read together, as one conversation or several.
        after_drop: A function that mends a record after calls were dropped, such as the numbers of its steps. Its
            arguments are what is left of the record, and the record before.
        can_drop: Whether single calls can be dropped from a record. If not, only whole conversations can.
    """

    name: str
    source: str
    example: Any = field(repr=False)
    signs: tuple[str, ...]
    messages: tuple[str, ...] = ()
    conversations: str = ""
    read: Callable[[Any], Iterator[StoredMessage]] | None = None
    split: Callable[[Any], Iterator[list[StoredMessage]]] | None = None
    is_file: bool = False
    after_drop: Callable[[Any, Any], Any] | None = None
    can_drop: bool = True

    @property
    def can_be_list(self) -> bool:
        """Whether a list can be in this form."""
        return any(sign.startswith(f"{ANY_ITEM}.") for sign in self.signs)

    def is_form_of_record(self, record: Any) -> bool:
        """Return whether a record is in this form."""
        return any(has_sign(record, sign) for sign in self.signs)

    def iter_conversations(self, record: Any) -> Iterator[list[StoredMessage]]:
        """Find the conversations of a record in this form: one, or those in a list at the path `conversations`.

        Yields:
            The stored messages of each conversation. Their paths begin at the record.

        Raises:
            AttributeError, LookupError or TypeError: A value of the record has another type than expected.
        """
        if self.split is not None:  # the form divides its records itself
            yield from self.split(record)
            return

        for path in self._list_conversation_paths(record):
            messages = self._iter_messages(get_value_at(record, path))
            yield [message._replace(path=(*path, *message.path)) for message in messages]

    def _list_conversation_paths(self, record: Any) -> list[RecordPath]:
        """List the paths to the conversations of a record. The only path is () if the record is one conversation."""
        if not self.conversations:
            return [()]
        return list(iter_paths_matching(record, f"{self.conversations}.{ANY_ITEM}"))

    def _iter_messages(self, conversation: Any) -> Iterator[StoredMessage]:
        """Return an iterator over the stored messages of a conversation, whose paths begin at the conversation."""
        if self.read is not None:  # the form reads its conversations itself
            return self.read(conversation)
        return iter_messages_at(conversation, self.messages)


SYSTEM_PROMPT_FIELDS = (
    "system",
    "systemInstruction",
    "system_instruction",
    "instructions",
    "gen_ai.system_instructions",
)
"""Fields that hold the system prompt: a text, its parts, or an object with them."""


def iter_messages_at(conversation: Any, path_patterns: Sequence[str]) -> Iterator[StoredMessage]:
    """Find the messages at some paths in a conversation, such as "messages" or "response.output".

    A path may lead to a list of messages (maybe in JSON), to a message, to a system prompt in a field of
    SYSTEM_PROMPT_FIELDS, or to plain text in a field of ROLES_BY_TEXT_FIELD.

    Yields:
        The messages, in the order of the patterns.
    """
    for pattern in path_patterns:
        _, _, field_name = pattern.rpartition(".")  # the last step: "output" in "response.output"
        for path in iter_paths_matching(conversation, pattern):
            value = get_value_at(conversation, path)
            yield from _iter_field_messages(field_name, path, value)


def _iter_field_messages(field_name: str, path: RecordPath, value: Any) -> Iterator[StoredMessage]:
    """Yield the messages in the value of a field, such as `messages` or `prompt`, if it holds any.

    Args:
        field_name: The name of the field, which tells the role of plain text.
        path: The path to the field.
        value: Its value: a list of messages (maybe in JSON), a message, or a text.
    """
    if field_name in SYSTEM_PROMPT_FIELDS:  # "Be brief."
        yield from iter_system_prompt_messages(path, value)
    elif isinstance(_parse_json_if_text(value), list):  # [{"role": "user", ...}, ...], maybe as JSON in a text
        yield from _iter_listed_messages(path, value)
    elif isinstance(value, str) and field_name in ROLES_BY_TEXT_FIELD:  # "How warm is it in Oslo?"
        yield StoredMessage(path, value, ROLES_BY_TEXT_FIELD[field_name])
    elif isinstance(value, Mapping):  # {"role": "assistant", ...}
        yield StoredMessage(path, value)


def _iter_listed_messages(path: RecordPath, value: Any) -> Iterator[StoredMessage]:
    """Yield the items of a list of messages, which may be JSON in a text.

    Nothing is yielded if none of its first items is an object, because then it is no list of messages.
    """
    messages = _parse_json_if_text(value)
    first_items = messages[:MAX_ITEMS_BEFORE_MESSAGE]
    if not any(isinstance(item, Mapping) for item in first_items):
        return

    list_path = _build_list_path(path, value)
    for index, message in enumerate(messages):
        yield StoredMessage((*list_path, index), message)


def iter_system_prompt_messages(path: RecordPath, value: Any) -> Iterator[StoredMessage]:
    """Yield a system prompt as one message, or as one message for each part if it is a list of parts.

    Args:
        path: The path to the system prompt.
        value: The system prompt: a text, an object, or a list of parts (maybe in JSON). Nothing is yielded for any
            other value, or for an empty one.
    """
    parts = _parse_json_if_text(value)
    if isinstance(parts, list):
        list_path = _build_list_path(path, value)
        for index, part in enumerate(parts):
            yield StoredMessage((*list_path, index), part, "system", is_part=True)
    elif isinstance(value, str | Mapping) and value:
        yield StoredMessage(path, value, "system")


def _parse_json_if_text(value: Any) -> Any:
    """Parse a value if it is a text with JSON.

    Returns:
        The object or list in the JSON, None for any other text, or the value itself if it is no text.
    """
    return try_parse_json_cached(value) if isinstance(value, str) else value


def _build_list_path(path: RecordPath, value: Any) -> RecordPath:
    """Return the path to a list, with the step None, which opens JSON, if the list is stored as text.

    Args:
        path: The path to the value that holds the list.
        value: The list, or a text with the list in JSON.
    """
    return (*path, None) if isinstance(value, str) else path


def iter_paths_matching(value: Any, pattern: str) -> Iterator[RecordPath]:
    """Find the paths in a value that match a pattern.

    For example, "runs.*.messages" matches ("runs", 0, "messages") and ("runs", 1, "messages").

    Yields:
        The paths, except those that lead to null.
    """
    for match in _iter_matches(value, _split_pattern(pattern), ()):
        yield match.path


def _split_pattern(pattern: str) -> tuple[str, ...]:
    """Split a pattern into its steps: "runs.*.messages" into ("runs", "*", "messages"), and "" into no steps."""
    return tuple(pattern.split(".")) if pattern else ()


class _Match(NamedTuple):
    """A value that a pattern matches, with the path to it."""

    path: RecordPath
    value: Any


def _iter_matches(
    value: Any, pattern_steps: tuple[str, ...], path: RecordPath, max_items: int | None = None
) -> Iterator[_Match]:
    """Find the values to which some steps lead.

    For example, ("runs", "*", "id") leads to two values in {"runs": [{"id": 1}, {"id": 2}]}.

    Args:
        value: The value in which the steps begin.
        pattern_steps: The keys or indexes, or ANY_ITEM for every item of a list.
        path: The path to `value` in the record.
        max_items: How many items of a list are searched, or None for all.

    Yields:
        The values that are not null, with their paths in the record.
    """
    if not pattern_steps:  # the value is where the pattern leads
        if value is not None:
            yield _Match(path, value)
        return

    # A text near the record's root may hold JSON, in which the same steps lead on. The step None opens it.
    is_near_root = len(path) <= MAX_JSON_TEXT_DEPTH
    if isinstance(value, str) and is_near_root and value[:1] in JSON_OPENING_BRACKETS:
        json_value = try_parse_json_cached(value)
        yield from _iter_matches(json_value, pattern_steps, (*path, None), max_items)
        return

    later_steps = pattern_steps[1:]
    for key in _list_step_keys(value, pattern_steps, max_items):
        yield from _iter_matches(value[key], later_steps, (*path, key), max_items)


def _list_step_keys(value: Any, pattern_steps: Sequence[str], max_items: int | None) -> Sequence[str | int]:
    """List the keys of an object, or the indexes of a list, to which the first step of a path leads.

    Args:
        value: The object or list.
        pattern_steps: The steps of the path, such as "role", "2" or ANY_ITEM.
        max_items: The largest number of items of a list to look into, or None for all.

    Returns:
        - for "role" in an object: ("role",), or () if there is no such key
        - for "2" in a list: (2,), or () if it has fewer items
        - for ANY_ITEM in a list: all indexes, but no more than `max_items`
    """
    first_step = pattern_steps[0]
    if isinstance(value, Mapping):
        return (first_step,) if first_step in value else ()
    if not isinstance(value, list):
        return ()
    if first_step != ANY_ITEM:
        return _find_index(value, first_step)

    has_inner_steps = len(pattern_steps) > 1  # they lead into the items, which must be objects or lists
    if has_inner_steps and not _has_objects_or_lists(value):
        return ()
    return range(len(value[:max_items]))


def _find_index(items: Sequence[Any], step: str) -> tuple[int, ...]:
    """Find the index of a list that a step such as "2" names.

    Returns:
        The index as the only item, (2,), or () if the step names none or the list has fewer items.
    """
    if not step.isdecimal():
        return ()

    index = int(step)
    return (index,) if index < len(items) else ()


def _has_objects_or_lists(items: Sequence[Any]) -> bool:
    """Return whether an object or a list is among the first items of a list."""
    return any(isinstance(item, Mapping | list) for item in items[:MAX_ITEMS_BEFORE_MESSAGE])


class Sign(NamedTuple):
    """A sign by which a form is recognised: a value at a path, perhaps with a certain text or with certain words in it.

    Attributes:
        path_steps: The steps of the path, of which ANY_ITEM leads to every item of a list.
        expected_text: The value must be this as text, or None for any value.
        contained_text: The value must be a text with these words in it, or None for any value.
    """

    path_steps: tuple[str, ...]
    expected_text: str | None = None
    contained_text: str | None = None

    @staticmethod
    @cache
    def from_text(sign_text: str) -> "Sign":
        """Parse a sign by which the form of a record is recognized.

        Examples:
            - "steps.*.observation": there is a value at this path, where "*" is any item of a list
            - "type=constructor": the value at "type" is "constructor"
            - "text~<function=": the value at "text" is a text that contains "<function="
        """
        pattern, tilde, contained_text = sign_text.partition("~")
        if tilde:
            return Sign(_split_pattern(pattern), contained_text=contained_text)

        pattern, equals_sign, value = sign_text.partition("=")
        return Sign(_split_pattern(pattern), expected_text=value if equals_sign else None)

    def matches_value(self, value: Any) -> bool:
        """Return whether a value at the sign's path has the text that the sign wants. If it wants none, any fits."""
        if self.expected_text is not None:
            return str(value) == self.expected_text
        if self.contained_text is not None:
            return isinstance(value, str) and self.contained_text in value
        return True


def has_sign(record: Any, sign_text: str) -> bool:
    """Return whether a record has a sign such as "type=constructor".

    Only the first MAX_ITEMS_WITH_SIGN items of a list are searched.
    """
    sign = Sign.from_text(sign_text)
    matches = _iter_matches(record, sign.path_steps, path=(), max_items=MAX_ITEMS_WITH_SIGN)
    return any(sign.matches_value(match.value) for match in matches)


def format_example(form: Form) -> str:
    """Format the example of a form as JSON, one record per line."""
    records = form.example if form.is_file else [form.example]
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
