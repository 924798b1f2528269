"""Forms of conversations: how their records are recognised, and where their messages stand."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import BEGINS_JSON, parse_json_field
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path, get_value_at

ANY = "*"
"""The step of a pattern that stands for every item of a list."""
OPENED_STEPS = 2
"""Steps from a record within which text is opened as JSON: lists of messages may be stored so, contents are not."""
MOST_SIGNED = 10_000
"""Items at the beginning of a list in which a sign is looked for."""
MOST_WITHOUT_MESSAGE = 100
"""Items at the beginning of a list that are looked at to see whether it holds messages."""
TEXTS = {"prompt": "user", "input": "user", "completion": "assistant", "response": "assistant", "output": "assistant"}
"""The role of the text in fields that may hold plain text in place of messages."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form in which conversations with tool calls are stored; docs/howto/own-form.md says how to add one.

    - `name`: its name in `judge --forms` and `trace_sources`
    - `source`: where its fields are described
    - `example`: a record in it; a list of records where `is_file`
    - `signs`: a record has the form if it has one of these: a path to a value such as `messages.*.content.*.toolUse`,
      which may end with `=value`, or with `~words` that a text contains
    - `messages`: paths to the lists of messages of a conversation, one after another
    - `conversations`: the path to the list of conversations of a record; "" where the record is one
    - `read`: yields the messages of a conversation, where paths in `messages` are not enough
    - `split`: yields the messages of each conversation of a record or a file, where `conversations` is not enough
    - `is_file`: whether the records of a file are one conversation, or several, together
    - `after_drop`: returns a record after calls were dropped, with other changes such as new numbers; its arguments are
      what is left of the record, and the record before
    - `can_drop`: whether calls can be dropped from it; else only whole conversations
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
    def takes_lists(self) -> bool:
        """Whether a list can be in this form."""
        return any(sign.startswith(f"{ANY}.") for sign in self.signs)

    def is_form_of(self, record: Any) -> bool:
        """Return whether a record is in this form."""
        return any(has_sign(record, sign) for sign in self.signs)

    def iter_conversations(self, record: Any) -> Iterator[list[StoredMessage]]:
        """Find the conversations of a record.

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

    def _list_conversation_paths(self, record: Any) -> list[Path]:
        """Return the paths of the conversations of a record; () where the record is one."""
        if not self.conversations:
            return [()]
        return list(iter_paths_matching(record, f"{self.conversations}.{ANY}"))

    def _iter_messages(self, conversation: Any) -> Iterator[StoredMessage]:
        """Return the stored messages of a conversation; their paths begin at the conversation."""
        return iter_messages_at(conversation, self.messages) if self.read is None else self.read(conversation)


SYSTEM_PROMPTS = ("system", "systemInstruction", "system_instruction", "instructions", "gen_ai.system_instructions")
"""Fields that hold the system prompt: a text, its parts, or an object with them."""


def iter_messages_at(conversation: Any, patterns: Sequence[str]) -> Iterator[StoredMessage]:
    """Find the messages at some paths in a conversation, such as "messages" or "response.output".

    A path may lead to a list of messages (maybe in JSON), to a message, to a system prompt in a field of
    SYSTEM_PROMPTS, or to plain text in a field of TEXTS.

    Yields:
        The messages, in the order of the patterns.
    """
    for pattern in patterns:
        field_name = pattern.rpartition(".")[2]
        for path in iter_paths_matching(conversation, pattern):
            yield from _iter_field_messages(field_name, path, get_value_at(conversation, path))


def _iter_field_messages(field_name: str, path: Path, value: Any) -> Iterator[StoredMessage]:
    """Yield the messages in the value of a field, such as `messages` or `prompt`, if it holds any."""
    if field_name in SYSTEM_PROMPTS:  # "Be brief."
        yield from system_prompt(path, value)
    elif isinstance(_parse_if_text(value), list):  # [{"role": "user", ...}, ...], maybe as JSON in a text
        yield from _iter_listed_messages(path, value)
    elif isinstance(value, str) and field_name in TEXTS:  # "How warm is it in Oslo?"
        yield StoredMessage(path, value, TEXTS[field_name])
    elif isinstance(value, Mapping):  # {"role": "assistant", ...}
        yield StoredMessage(path, value)


def _iter_listed_messages(path: Path, value: Any) -> Iterator[StoredMessage]:
    """Yield the items of a list of messages, which may be JSON in a text.

    Nothing is yielded if none of its first items is an object, because then it is no list of messages.
    """
    messages = _parse_if_text(value)
    if any(isinstance(message, Mapping) for message in messages[:MOST_WITHOUT_MESSAGE]):
        for index, message in enumerate(messages):
            yield StoredMessage((*_get_list_path(path, value), index), message)


def system_prompt(path: Path, value: Any) -> Iterator[StoredMessage]:
    """Yield a system prompt as one message, or as one message for each part if it is a list of parts."""
    parts = _parse_if_text(value)
    if isinstance(parts, list):
        for index, part in enumerate(parts):
            yield StoredMessage((*_get_list_path(path, value), index), part, "system", is_part=True)
    elif isinstance(value, str | Mapping) and value:
        yield StoredMessage(path, value, "system")


def _parse_if_text(value: Any) -> Any:
    """Return a value, or the JSON in a text; None for a text without JSON."""
    return parse_json_field(value) if isinstance(value, str) else value


def _get_list_path(path: Path, value: Any) -> Path:
    """Return the path of a list; the step None, which opens JSON, is added where the list is stored as text."""
    return (*path, None) if isinstance(value, str) else path


def iter_paths_matching(value: Any, pattern: str) -> Iterator[Path]:
    """Find the paths in a value that match a pattern.

    For example, "runs.*.messages" matches ("runs", 0, "messages") and ("runs", 1, "messages").

    Yields:
        The paths, except those that lead to null.
    """
    for match in _iter_matches(value, _split_pattern(pattern), ()):
        yield match.path


def _split_pattern(pattern: str) -> tuple[str, ...]:
    """Return the steps of a pattern: ("runs", "*", "messages") for "runs.*.messages"; () for "", the value itself."""
    return tuple(pattern.split(".")) if pattern else ()


class _Match(NamedTuple):
    """A value that a pattern matches, with the path to it."""

    path: Path
    value: Any


def _iter_matches(value: Any, steps: tuple[str, ...], path: Path, most: int | None = None) -> Iterator[_Match]:
    """Find the values to which some steps lead.

    For example, ("runs", "*", "id") leads to two values in {"runs": [{"id": 1}, {"id": 2}]}.

    Args:
        value: The value in which the steps begin.
        steps: The keys or indexes, or ANY for every item of a list.
        path: The path to `value` in the record.
        most: How many items of a list are searched; None for all.
    """
    if not steps:  # the value is where the pattern leads
        if value is not None:
            yield _Match(path, value)
        return

    # A text may hold JSON, if it stands at most OPENED_STEPS below the record: the same steps lead on inside it.
    if isinstance(value, str) and len(path) <= OPENED_STEPS and value[:1] in BEGINS_JSON:
        yield from _iter_matches(parse_json_field(value), steps, (*path, None), most)
        return

    for key in _list_step_keys(value, steps, most):
        yield from _iter_matches(value[key], steps[1:], (*path, key), most)


def _list_step_keys(value: Any, steps: Sequence[str], most: int | None) -> Sequence[str | int]:
    """List the keys of an object, or the indexes of a list, to which the first step of a path leads.

    Args:
        value: The object or list.
        steps: The steps of the path, such as "role", "2" or ANY.
        most: The largest number of items of a list to look into; None for all.

    Returns:
        - for "role" in an object: ("role",), or () if there is no such key
        - for "2" in a list: (2,), or () if it has fewer items
        - for ANY in a list: all indexes, but no more than `most`
    """
    step = steps[0]
    if isinstance(value, Mapping):
        return (step,) if step in value else ()
    if not isinstance(value, list):
        return ()
    if step != ANY:
        return _find_index(value, step)

    has_inner_steps = len(steps) > 1  # they lead into the items, which must be objects or lists
    if has_inner_steps and not _has_containers(value):
        return ()
    return range(len(value[:most]))


def _find_index(items: Sequence[Any], step: str) -> tuple[int, ...]:
    """Return the index that a step such as "2" names, as the only item; () where the list has no such index."""
    if not step.isdecimal():
        return ()
    index = int(step)
    return (index,) if index < len(items) else ()


def _has_containers(items: Sequence[Any]) -> bool:
    """Return whether an object or a list is among the first items of a list."""
    return any(isinstance(item, Mapping | list) for item in items[:MOST_WITHOUT_MESSAGE])


class Sign(NamedTuple):
    """A sign by which a form is recognised: a value at a path, perhaps with a certain text or with certain words in it.

    - `steps`: the path, which may have the step ANY
    - `value`: the value as text; None for any value
    - `words`: words that a text contains; None for any value
    """

    steps: tuple[str, ...]
    value: str | None = None
    words: str | None = None

    @staticmethod
    @cache
    def of(text: str) -> "Sign":
        """Return the sign "steps.*.observation", "type=constructor", or "text~<function="."""
        pattern, has_words, words = text.partition("~")
        if has_words:
            return Sign(_split_pattern(pattern), words=words)
        pattern, has_value, value = text.partition("=")
        return Sign(_split_pattern(pattern), value=value if has_value else None)

    def fits(self, value: Any) -> bool:
        """Return whether a value at the path is as the sign wants it."""
        if self.value is not None:
            return str(value) == self.value
        if self.words is not None:
            return isinstance(value, str) and self.words in value
        return True


def has_sign(record: Any, sign: str) -> bool:
    """Return whether a record has a sign such as "type=constructor" in the first MOST_SIGNED items of its lists."""
    wanted = Sign.of(sign)
    matches = _iter_matches(record, wanted.steps, path=(), most=MOST_SIGNED)
    return any(wanted.fits(match.value) for match in matches)


def format_example(form: Form) -> str:
    """Return the example of a form as lines of JSON."""
    records = form.example if form.is_file else [form.example]
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
