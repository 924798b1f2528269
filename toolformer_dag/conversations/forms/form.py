"""What a form says of itself: how a record in it is recognised, and where the messages of its conversations stand."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import parsed_field
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path, value_at

ANY = "*"
"""In a pattern of paths: every item of a list."""
OPENED_STEPS = 2
"""Steps from a record within which text is opened as JSON: lists of messages are stored so, what was said is not."""
MOST_SIGNED = 10_000
"""Items at the beginning of a list in which a form is recognised."""
MOST_WITHOUT_MESSAGE = 100
"""Items at the beginning of a list among which there is a message, if it holds any."""
TEXTS = {"prompt": "user", "input": "user", "completion": "assistant", "response": "assistant", "output": "assistant"}
"""The fields that may hold plain text in place of messages, with the role that said it."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form in which people store conversations with tool calls; docs/howto/own-form.md says how to add one.

    - `name`: what `judge --forms` and `trace_sources` call it
    - `source`: where its fields are described
    - `example`: a record in it; a list of records where `is_file`
    - `signs`: a record is of the form if one of these is there: a path to a value such as
      `messages.*.content.*.toolUse`, which may go on with `=value`, or with `~words` that a text holds
    - `messages`: paths to the lists of messages of a conversation, one after another
    - `conversations`: the path to the list of conversations of a record; "" where the record is one
    - `read`: yields the messages of a conversation instead, where they have to be put together
    - `split`: yields the messages of each of the conversations of a record or a file instead
    - `is_file`: the records of a file make one conversation, or several, in place of one each
    - `after_drop`: gets what is left of a record in which calls were dropped, and the record as it was; returns it with
      what else has to change then, such as numbers
    - `can_drop`: whether calls can be left out of it; else only whole conversations
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
        """Return whether a list can be in this form."""
        return any(sign.startswith(f"{ANY}.") for sign in self.signs)

    def recognises(self, record: Any) -> bool:
        """Return whether a record is in this form."""
        return any(has_sign(record, sign) for sign in self.signs)

    def conversations_in(self, record: Any) -> Iterator[list[StoredMessage]]:
        """Yield the stored messages of each conversation of a record; their paths begin at the record.

        Raises AttributeError, LookupError or TypeError where the record has something else in place of an object or a
        list.
        """
        if self.split is not None:
            yield from self.split(record)
            return
        paths: list[Path] = [()]  # the record itself
        if self.conversations:
            paths = list(paths_matching(record, f"{self.conversations}.{ANY}"))
        for path in paths:
            conversation = value_at(record, path)
            if self.read is not None:
                messages = self.read(conversation)
            else:
                messages = messages_in(conversation, self.messages)
            yield [message._replace(path=(*path, *message.path)) for message in messages]


SYSTEM_PROMPTS = ("system", "systemInstruction", "system_instruction", "instructions", "gen_ai.system_instructions")
"""The fields that hold the system prompt: a text, its parts, or an object with them."""


def messages_in(conversation: Any, patterns: Sequence[str]) -> Iterator[StoredMessage]:
    """Yield the messages that stand at paths such as "messages" or "response.output", in the order of the patterns.

    At each there is a list of messages, one message, a system prompt (under a name of SYSTEM_PROMPTS), or plain text
    (under a name of TEXTS). Lists may be stored as JSON.
    """
    for pattern in patterns:
        field_name = pattern.rpartition(".")[2]
        for path in paths_matching(conversation, pattern):
            value = value_at(conversation, path)
            if field_name in SYSTEM_PROMPTS:
                yield from system_prompt(path, value)
            elif isinstance(_opened(value), list):
                yield from _listed_messages(path, value)
            elif isinstance(value, str) and field_name in TEXTS:
                yield StoredMessage(path, value, TEXTS[field_name])
            elif isinstance(value, Mapping):
                yield StoredMessage(path, value)


def _listed_messages(path: Path, value: Any) -> Iterator[StoredMessage]:
    """Yield the items of a list of messages, or of one in JSON; none where no object is among the first of them."""
    messages = _opened(value)
    if any(isinstance(message, Mapping) for message in messages[:MOST_WITHOUT_MESSAGE]):
        for index, message in enumerate(messages):
            yield StoredMessage((*_list_path(path, value), index), message)


def system_prompt(path: Path, value: Any) -> Iterator[StoredMessage]:
    """Yield a system prompt, a message for each of its parts."""
    parts = _opened(value)
    if isinstance(parts, list):
        for index, part in enumerate(parts):
            yield StoredMessage((*_list_path(path, value), index), part, "system", is_part=True)
    elif isinstance(value, str | Mapping) and value:
        yield StoredMessage(path, value, "system")


def _opened(value: Any) -> Any:
    """Return a value, or what a text holds in JSON; None for a text without JSON."""
    return parsed_field(value) if isinstance(value, str) else value


def _list_path(path: Path, value: Any) -> Path:
    """Return the path of a list: the step None, which opens JSON, is added where it is stored as text."""
    return (*path, None) if isinstance(value, str) else path


def paths_matching(value: Any, pattern: str) -> Iterator[Path]:
    """Yield the paths in a value that match a pattern, where the value there is not null.

    As an example, "runs.*.messages" matches ("runs", 0, "messages") and ("runs", 1, "messages").
    """
    for match in _matches(value, _steps(pattern), ()):
        yield match.path


def _steps(pattern: str) -> tuple[str, ...]:
    """Return the steps of a pattern: ("runs", "*", "messages") for "runs.*.messages"; () for "", the value itself."""
    return tuple(pattern.split(".")) if pattern else ()


class _Match(NamedTuple):
    """A value that a pattern matches, and the path to it."""

    path: Path
    value: Any


def _matches(value: Any, steps: Sequence[str], path: Path, most: int | None = None) -> Iterator[_Match]:
    """Yield what stands at the ends of the paths that match `steps`; each is a key, an index, or ANY.

    As an example, the steps ("runs", "*", "id") match two values of {"runs": [{"id": 1}, {"id": 2}]}. Where the list is
    stored as JSON in a text, which is opened near the record alone (OPENED_STEPS), the paths have the step None:
    ("runs", None, 0, "id"). Lists whose first items are neither objects nor lists are not looked into.

    path: of `value` in the record. most: items of a list that are looked into; all by default.
    """
    if not steps:
        if value is not None:
            yield _Match(path, value)
        return
    step, *steps_below = steps
    may_be_json = isinstance(value, str) and value[:1] in ("[", "{")
    if may_be_json and len(path) <= OPENED_STEPS:
        yield from _matches(parsed_field(value), steps, (*path, None), most)
    elif step == ANY and isinstance(value, list):
        holds_values = any(isinstance(item, Mapping | list) for item in value[:MOST_WITHOUT_MESSAGE])
        if holds_values or not steps_below:
            for index, item in enumerate(value[:most]):
                yield from _matches(item, steps_below, (*path, index), most)
    elif isinstance(value, Mapping) and step in value:
        yield from _matches(value[step], steps_below, (*path, step), most)
    elif step.isdecimal() and isinstance(value, list) and int(step) < len(value):
        yield from _matches(value[int(step)], steps_below, (*path, int(step)), most)


class Sign(NamedTuple):
    """What a record of a form has: a value at a path, perhaps a certain one, or a text that holds certain words."""

    pattern: str
    value: str | None = None
    words: str | None = None

    @staticmethod
    def of(text: str) -> "Sign":
        """Read "steps.*.observation", "type=constructor", or "text~<function="."""
        pattern, has_words, words = text.partition("~")
        if has_words:
            return Sign(pattern, words=words)
        pattern, has_value, value = text.partition("=")
        return Sign(pattern, value=value) if has_value else Sign(pattern)

    def fits(self, value: Any) -> bool:
        """Return whether a value at the path is the one that is looked for."""
        if self.value is not None:
            return str(value) == self.value
        if self.words is not None:
            return isinstance(value, str) and self.words in value
        return True


def has_sign(record: Any, sign: str) -> bool:
    """Return whether a sign such as "type=constructor" is in a record.

    Of lists the first MOST_SIGNED items are looked into.
    """
    wanted = Sign.of(sign)
    return any(wanted.fits(match.value) for match in _matches(record, _steps(wanted.pattern), (), MOST_SIGNED))


def example_text(form: Form) -> str:
    """Return the example of a form as lines of JSON."""
    records = form.example if form.is_file else [form.example]
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
