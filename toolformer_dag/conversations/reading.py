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
from toolformer_dag.conversations.raw_messages import Fault, StoredMessage, raw_messages
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
FIELDS_SHOWN = 20
"""Fields of a record that was not understood in the detail of a fault."""
INNER_FIELDS_SHOWN = 10
"""The same of the objects in one of its lists."""
FIRST_RECORDS = 50
"""Records of a file in which a form of whole files is looked for: the first may say nothing."""
UNKNOWN = "unknown"
"""The form of a conversation that was not read."""
TOO_DEEP = "lists and objects stand in each other more than 100 times"


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

    Where the first records are of a form in which a file is a conversation, as a log of a session with an event per
    line, all of them are read at once; else they are read one by one. What could not be used is among the faults of the
    conversations (`read_record`).
    """
    iterator = iter(records)
    first_records = list(islice(iterator, FIRST_RECORDS))
    form = file_form([record.value for record in first_records])
    if form is None:
        for record in chain(first_records, iterator):
            yield from read_record(record)
        return
    all_records = [*first_records, *iterator]
    values = [record.value for record in all_records]
    if any(map(is_too_deep, values)):
        yield _unread(all_records[0], "too_deep", TOO_DEEP)
    else:
        yield from _read_parts(all_records[0].number, form, values, is_file=True)


def file_form(values: Sequence[Any]) -> Form | None:
    """Return the form of a file by its first records, where the whole file is a conversation; else None.

    1. Where one of the records is a conversation itself, each is read alone: None.
    2. A form of files (FILE_FORMS) that recognises one of the records, such as an event of a session.
    3. A form of lists: the records, such as a message per line, are the items of one.
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
    """Yield the conversations of a record: at least one, which has no messages and a fault where none was read.

    Faults: unknown_form, too_deep, too_many_calls; no_message, unknown_role (read as context), unreadable_call,
    unknown_part, unknown_field, marks_beside_fields; those of `pairing.paired`.
    """
    if is_too_deep(record.value):
        yield _unread(record, "too_deep", TOO_DEEP)
        return
    form = record_form(record.value)
    if form is None:
        yield _unread(record, "unknown_form", f"no conversation; {described(record.value)}")
        return
    first, *others = _read_parts(record.number, form, record.value)
    yield _with_unread_call(first, others, record.value)
    yield from others


def _with_unread_call(first: ReadConversation, others: Sequence[ReadConversation], record: Any) -> ReadConversation:
    """Return the first conversation of a record, with a fault where the record holds a call and none was read.

    Nothing is added where there is a fault already.
    """
    conversations = [first, *others]
    has_calls = any(message.calls for conversation in conversations for message in conversation.messages)
    has_faults = any(conversation.faults for conversation in conversations)
    if has_calls or has_faults:
        return first
    place = unread_call(record)
    if place is None:
        return first
    return replace(first, faults=(("unknown_field", f"no call was read, and {place} holds one"),))


def record_form(value: Any) -> Form | None:
    """Return the form of a record; None where it is no conversation.

    That is the first form that recognises it and finds a message in it. Where several do, it is the first of them that
    finds a call: a record may hold a task or a trace beside its messages.
    """
    fitting_forms = []
    for form in FORMS:
        if form.recognises(value) and any(map(_is_conversation, stored_conversations(form, value))):
            fitting_forms.append(form)
    if len(fitting_forms) > 1:
        for form in fitting_forms:
            if any(map(_has_call, stored_conversations(form, value))):
                return form
    return fitting_forms[0] if fitting_forms else None


def _has_call(stored: Sequence[StoredMessage]) -> bool:
    """Return whether there is a call in messages."""
    return any(message.calls for message in with_marked_calls(raw_messages(stored, []), []))


def stored_conversations(form: Form, value: Any) -> list[list[StoredMessage]]:
    """Return the stored messages of each conversation of a record, or of the records of a file.

    The list is empty where the record has only the beginning of the form: something else stands where the form has an
    object or a list.
    """
    try:
        return list(form.conversations_in(value))
    except (AttributeError, LookupError, TypeError):
        return []


def _is_conversation(stored: Sequence[StoredMessage]) -> bool:
    """Return whether there is a message, and one of the first three says by whom it is."""
    if not stored:
        return False
    if stored[0].role is not None:
        return True
    first_messages = raw_messages(stored[:3], [])
    return any(message.role != "None" for message in first_messages)


def _read_parts(number: int, form: Form, value: Any, *, is_file: bool = False) -> Iterator[ReadConversation]:
    """Yield the conversations of a record, or of the records of a file; one with a fault where there are none.

    number: of the record, or of the first one of the file.
    """
    conversations = stored_conversations(form, value)
    if not conversations:
        fault = ("unknown_form", f"it begins as {form.name}, and holds no conversation; {described(value)}")
        yield ReadConversation(number, 0, id_of(value), UNKNOWN, (), (fault,))
    first_record = value[0] if isinstance(value, list) and value else value
    for part, stored in enumerate(conversations):
        faults = list[Fault]()
        messages = _read_messages(stored, faults)
        if not messages and not faults:
            faults.append(("unknown_form", f"it begins as {form.name}, and holds no message; {described(value)}"))
        yield ReadConversation(
            number=number,
            part=part,
            record_id=_part_id(form, value, part) or id_of(first_record),
            form=form.name,
            messages=messages,
            faults=tuple(faults),
            record_count=len(value) if is_file else 1,
        )


def _read_messages(stored: Sequence[StoredMessage], faults: list[Fault]) -> tuple[RecordedMessage, ...]:
    """Return the messages of a conversation with their calls, each with its result. Appends to `faults`."""
    messages = with_marked_calls(raw_messages(stored, faults), faults)
    call_count = sum(len(message.calls) for message in messages)
    if call_count > MOST_CALLS:
        faults[:] = [("too_many_calls", f"more than {MOST_CALLS:,} calls in a conversation")]
        return ()
    return paired(messages, faults)


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
    """Return a conversation without messages, with a fault, for a record that was not read."""
    return ReadConversation(record.number, 0, id_of(record.value), UNKNOWN, (), ((reason, detail),))


def id_of(record: Any) -> str | None:
    """Return the record's own id, by the first of RECORD_IDS that holds text or a whole number; None without one."""
    fields = record if isinstance(record, Mapping) else {}
    for key in RECORD_IDS:
        value = fields.get(key)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
    return None


def described(value: Any) -> str:
    """Return the shape of a record in words: `the fields are id, log [role, content]`.

    The fields inside a list of objects are those of its first item.
    """
    if not isinstance(value, Mapping):
        return f"it is a {type(value).__name__}"
    fields = []
    for name in list(value)[:FIELDS_SHOWN]:
        items = value[name]
        if isinstance(items, list) and items and isinstance(items[0], Mapping):
            inner_names = [str(inner_name) for inner_name in items[0]]
            fields.append(f"{name} [{', '.join(inner_names[:INNER_FIELDS_SHOWN])}]")
        else:
            fields.append(str(name))
    return f"the fields are {', '.join(fields)}"
