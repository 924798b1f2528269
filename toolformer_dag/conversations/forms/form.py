"""What a form says of itself: how a record in it is recognised, and where the messages of its conversations stand."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import parsed_field
from toolformer_dag.conversations.raw_messages import Said
from toolformer_dag.conversations.record_paths import Path, value_at

ANY = "*"
"""In a way to values: every item of a list."""
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
    - `signs`: a record is of the form if one of these is there: a way to a value such as
      `messages.*.content.*.toolUse`, which may go on with `=value`, or with `~words` that a text holds
    - `messages`: ways to the lists of messages of a conversation, one after another
    - `conversations`: the way to the list of conversations of a record; "" where the record is one
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
    read: Callable[[Any], Iterator[Said]] | None = None
    split: Callable[[Any], Iterator[list[Said]]] | None = None
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

    def parts(self, record: Any) -> Iterator[tuple[int, list[Said]]]:
        """Yield the conversations of a record, each after its number, as raw messages with the ways to them."""
        if self.split is not None:
            yield from enumerate(self.split(record))
            return
        paths: list[Path] = [()]
        if self.conversations:
            paths = list(ways(record, self.conversations + f".{ANY}"))
        for number, path in enumerate(paths):
            conversation = value_at(record, path)
            said = self.read(conversation) if self.read is not None else messages_in(conversation, self.messages)
            yield number, [message._replace(path=(*path, *message.path)) for message in said]


SYSTEM_PROMPTS = ("system", "systemInstruction", "system_instruction", "instructions", "gen_ai.system_instructions")
"""The fields that hold the system prompt: a text, its parts, or an object with them."""


def messages_in(conversation: Any, lists: tuple[str, ...]) -> Iterator[Said]:
    """Yield the messages of these lists, one list after another; a list may stand in JSON, a text is one message."""
    for way in lists:
        for path in ways(conversation, way):
            value = value_at(conversation, path)
            if way.rpartition(".")[2] in SYSTEM_PROMPTS:
                yield from system_prompt(path, value)
                continue
            opened = parsed_field(value) if isinstance(value, str) else value
            if isinstance(opened, list):
                inside: Path = (None,) if isinstance(value, str) else ()
                has_message = any(isinstance(item, Mapping) for item in opened[:MOST_WITHOUT_MESSAGE])
                for index, message in enumerate(opened if has_message else ()):
                    yield Said((*path, *inside, index), message)
            elif isinstance(value, str) and way.rpartition(".")[2] in TEXTS:
                yield Said(path, value, TEXTS[way.rpartition(".")[2]])
            elif isinstance(value, Mapping):
                yield Said(path, value)


def system_prompt(path: Path, value: Any) -> Iterator[Said]:
    """Yield a system prompt, a message for each of its parts."""
    opened = parsed_field(value) if isinstance(value, str) else value
    if isinstance(opened, list):
        inside: Path = (None,) if isinstance(value, str) else ()
        for index, part in enumerate(opened):
            yield Said((*path, *inside, index), part, "system", is_part=True)
    elif isinstance(value, str | Mapping) and value:
        yield Said(path, value, "system")


def ways(value: Any, way: str) -> Iterator[Path]:
    """Yield the ways in a value that fit one such as `simulations.*.messages`, where the value there is not null."""
    for found in _found(value, tuple(way.split(".")) if way else (), ()):
        yield found.path


class _Found(NamedTuple):
    """A value and the way to it."""

    path: Path
    value: Any


def _found(value: Any, steps: tuple[str, ...], path: Path, most: int | None = None) -> Iterator[_Found]:
    """Yield what stands at the ends of ways; text is opened as JSON near the record alone.

    path: the way to `value`. most: items of a list that are looked into; all by default.
    """
    if not steps:
        if value is not None:
            yield _Found(path, value)
        return
    step, *rest = steps
    below = tuple(rest)
    if isinstance(value, str) and value[:1] in ("[", "{") and len(path) <= OPENED_STEPS:
        yield from _found(parsed_field(value), steps, (*path, None), most)
    elif step == ANY and isinstance(value, list):
        is_read = not below or any(isinstance(item, Mapping | list) for item in value[:MOST_WITHOUT_MESSAGE])
        for index, item in enumerate(value[:most] if is_read else ()):
            yield from _found(item, below, (*path, index), most)
    elif isinstance(value, Mapping) and step in value:
        yield from _found(value[step], below, (*path, step), most)
    elif step.isdecimal() and isinstance(value, list) and int(step) < len(value):
        yield from _found(value[int(step)], below, (*path, int(step)), most)


def has_sign(record: Any, sign: str) -> bool:
    """Return whether a sign is in a record: `steps.*.observation`, `type=constructor`, `text~<function=`.

    Of lists the first MOST_SIGNED items are looked into.
    """
    way, equals, wanted = sign.partition("=") if "~" not in sign else (sign, "", "")
    way, holds, words = way.partition("~")
    for _, value in _found(record, tuple(way.split(".")) if way else (), (), MOST_SIGNED):
        if equals and str(value) == wanted:
            return True
        if holds and isinstance(value, str) and words in value:
            return True
        if not equals and not holds:
            return True
    return False


def example_text(form: Form) -> str:
    """Return the example of a form as lines of JSON."""
    records = form.example if form.is_file else [form.example]
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
