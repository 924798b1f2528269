"""Read the conversations of the records of a file, in whatever form they are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from toolformer_dag.conversations.forms import FILE_FORMS, FORMS
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.leftovers import unread_call
from toolformer_dag.conversations.marked_messages import with_marked_calls
from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.conversations.pairing import paired
from toolformer_dag.conversations.plain_values import is_too_deep
from toolformer_dag.conversations.raw_messages import Fault, Said, raw_messages
from toolformer_dag.files import UserError
from toolformer_dag.texts.record_files import NumberedRecord

RECORD_IDS = (
    "id",
    "conversation_id",
    "trajectory_id",
    "trace_id",
    "session_id",
    "instance_id",
    "task_id",
    "uuid",
)
"""The fields that may hold the id of a record, in the order in which they are looked for."""
MOST_CALLS = 20_000
"""Calls of a conversation that is read; one with more is a fault."""
FIRST_RECORDS = 50
"""Records of a file in which a form of whole files is looked for: the first may say nothing."""
UNKNOWN = "unknown"


class UnknownForm(UserError):
    """A record that is no conversation in a known form; the message names the fields that were found."""


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation that was read from the records of a file.

    - `number`: of its first record
    - `part`: which of the conversations of that record, or of that file, it is, from 0
    - `record_id`: the record's own id; None where it has none
    - `form`: the name of its form
    - `messages`: none where nothing was read, for which there is a fault
    - `faults`: what could not be used as it was recorded
    - `record_count`: how many records it was read from: all of the file where that is one conversation, else one
    """

    number: int
    part: int
    record_id: str | None
    form: str
    messages: tuple[RecordedMessage, ...]
    faults: tuple[Fault, ...]
    record_count: int = 1


def read_conversations(records: Iterable[NumberedRecord]) -> Iterator[ReadConversation]:
    """Yield the conversations of the records of one file, in their order.

    Where the first records are of a form in which a file is a conversation, all of them are read at once; else they are
    read one by one. Faults beside those of `read_record`: none.
    """
    iterator = iter(records)
    first = list(islice(iterator, FIRST_RECORDS))
    form = file_form([record.value for record in first])
    if form is None:
        for record in chain(first, iterator):
            yield from read_record(record)
        return
    read = [*first, *iterator]
    whole = [record.value for record in read]
    if any(map(is_too_deep, whole)):
        yield _unread(read[0], "too_deep", "lists and objects stand in each other more than 100 times")
        return
    yield from _read_parts(read[0].number, form, whole, is_file=True)


def file_form(values: Sequence[Any]) -> Form | None:
    """Return the form of a file by its first records, where the file is a conversation; else None.

    That is a form of sessions, or one of lists: a message, an event or a step per line is a list of them. Where one of
    the records is a conversation, each is read alone, whatever ids of sessions and spans stand beside the messages.
    """
    if any(map(is_too_deep, values)):
        return None
    if any(record_form(value) is not None for value in values if not _is_span(value)):
        return None
    for value in values:
        for form in FILE_FORMS:
            if form.recognises(value):
                return form
    for form in FORMS:
        if form.takes_lists and form.recognises(list(values)):
            return form
    return None


def _is_span(value: Any) -> bool:
    """Return whether a record has attributes, as spans do: these may hold messages."""
    return isinstance(value, Mapping) and "attributes" in value


def read_record(record: NumberedRecord) -> Iterator[ReadConversation]:
    """Yield the conversations of a record; one without messages, with a fault, where there are none.

    Faults: unknown_form, too_deep, too_many_calls; no_message, unknown_role (read as context), unreadable_call,
    unknown_part, unknown_field, marks_beside_fields; those of `pairing.paired`.
    """
    if is_too_deep(record.value):
        yield _unread(record, "too_deep", "lists and objects stand in each other more than 100 times")
        return
    form = record_form(record.value)
    if form is None:
        yield _unread(record, "unknown_form", f"no conversation; {described(record.value)}")
        return
    conversations = list(_read_parts(record.number, form, record.value))
    if not any(message.calls for conversation in conversations for message in conversation.messages):
        unread = unread_call(record.value)
        if unread is not None and not any(conversation.faults for conversation in conversations):
            fault = ("unknown_field", f"no call was read, and {unread} holds one")
            conversations[0] = replace(conversations[0], faults=(fault,))
    yield from conversations


def record_form(value: Any) -> Form | None:
    """Return the form of a record: the first that recognises it and finds a message in it; None where there is none.

    Of several such forms, the first that finds a call: a record may hold a task or a trace beside its messages.
    """
    fitting = [form for form in FORMS if form.recognises(value) and any(map(_is_conversation, said_in(form, value)))]
    if len(fitting) > 1:
        for form in fitting:
            if any(map(_has_call, said_in(form, value))):
                return form
    return fitting[0] if fitting else None


def _has_call(said: list[Said]) -> bool:
    """Return whether there is a call in messages."""
    return any(message.calls for message in with_marked_calls(raw_messages(said, []), []))


def said_in(form: Form, value: Any) -> list[list[Said]]:
    """Return the raw messages of each conversation of a record, or of the records of a file.

    None at all where the record only begins as the form has it, and something else stands where the form has an object
    or a list.
    """
    try:
        return [said for _, said in form.parts(value)]
    except (AttributeError, LookupError, TypeError):
        return []


def _is_conversation(said: list[Said]) -> bool:
    """Return whether there is a message, and the first one says by whom it is."""
    if not said:
        return False
    if said[0].role is not None:
        return True
    faults = list[Fault]()
    [*messages] = raw_messages(said[:3], faults)
    return any(message.role != "None" for message in messages)


def _read_parts(number: int, form: Form, value: Any, *, is_file: bool = False) -> Iterator[ReadConversation]:
    """Yield the conversations of a record, or of the records of a file; one with a fault where there are none."""
    conversations = said_in(form, value)
    if not conversations:
        fault = ("unknown_form", f"it begins as {form.name}, and holds no conversation; {described(value)}")
        yield ReadConversation(number, 0, id_of(value), UNKNOWN, (), (fault,))
    for part, said in enumerate(conversations):
        faults = list[Fault]()
        messages = with_marked_calls(raw_messages(said, faults), faults)
        if sum(len(message.calls) for message in messages) > MOST_CALLS:
            faults = [("too_many_calls", f"more than {MOST_CALLS:,} calls in a conversation")]
            messages = []
        recorded = paired(messages, faults)
        if not recorded and not faults:
            faults.append(("unknown_form", f"it begins as {form.name}, and holds no message; {described(value)}"))
        record_id = _part_id(form, value, part) or id_of(value[0] if isinstance(value, list) and value else value)
        record_count = len(value) if is_file else 1
        yield ReadConversation(number, part, record_id, form.name, recorded, tuple(faults), record_count)


def _part_id(form: Form, value: Any, part: int) -> str | None:
    """Return the id of one of the conversations of a record; None where the record is one."""
    if not form.conversations:
        return None
    found: Any = value
    for key in form.conversations.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return id_of(found[part]) if isinstance(found, list) and part < len(found) else None


def read_conversation(record: Any) -> tuple[tuple[RecordedMessage, ...], list[Fault]]:
    """Return the messages of a record that is one conversation, and its faults. Raises UnknownForm."""
    for read in read_record(NumberedRecord(1, record)):
        for reason, detail in read.faults:
            if reason in ("unknown_form", "too_deep"):
                raise UnknownForm(f"{detail}; write messages in OpenAI's form, or see `toolformer-dag judge --forms`")
        return read.messages, list(read.faults)
    return (), []


def _unread(record: NumberedRecord, reason: str, detail: str) -> ReadConversation:
    return ReadConversation(record.number, 0, id_of(record.value), UNKNOWN, (), ((reason, detail),))


def id_of(record: Any) -> str | None:
    """Return the record's own id, by the first of RECORD_IDS that holds text or a whole number; None without one."""
    fields = record if isinstance(record, Mapping) else {}
    for key in RECORD_IDS:
        value = fields.get(key)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
    return None


def described(value: Any, levels: int = 2) -> str:
    """Return the shape of a record in words: `the fields are id, log [role, content]`."""
    if not isinstance(value, Mapping):
        return f"it is a {type(value).__name__}"
    fields = []
    for name in list(value)[:20]:
        inner = value[name]
        if isinstance(inner, list) and inner and isinstance(inner[0], Mapping) and levels > 1:
            fields.append(f"{name} [{', '.join(map(str, list(inner[0])[:10]))}]")
        else:
            fields.append(str(name))
    return f"the fields are {', '.join(fields)}"
