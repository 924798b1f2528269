"""Read the conversations of the records of a file, in whatever form they are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms import FILE_FORMS, FORMS
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.leftovers import find_unread_call
from toolformer_dag.conversations.marked_messages import with_marked_calls
from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.conversations.pairing import paired
from toolformer_dag.conversations.plain_values import find_value, is_too_deep
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
"""Fields that may hold the id of a record, in the order in which they are looked for."""
MOST_CALLS = 20_000
"""Calls of the longest conversation that is read; more calls are a fault."""
FIELDS_SHOWN = 20
"""Fields of an unknown record that a fault names."""
INNER_FIELDS_SHOWN = 10
"""Fields of the objects in a list of such a record that a fault names."""
FIRST_RECORDS = 50
"""Records of a file in which its form is looked for: the first ones may have no sign of it."""
UNKNOWN = "unknown"
"""The form of a record that was not read."""
TOO_DEEP = "lists and objects stand in each other more than 100 times"


class UnknownForm(UserError):
    """A record is no conversation in a known form; the message names its fields."""


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation that was read from the records of a file.

    - `number`: the number of its first record
    - `part`: its index among the conversations of that record, or of a file that is read as a whole
    - `record_id`: the id in the record; None without one
    - `form`: the name of its form
    - `messages`: empty where nothing was read, for which there is a fault
    - `faults`: what could not be used as it was recorded
    - `record_count`: how many records it was read from: all of the file where that is read as a whole, else one
    """

    number: int
    part: int
    record_id: str | None
    form: str
    messages: tuple[RecordedMessage, ...]
    faults: tuple[Fault, ...]
    record_count: int = 1

    @property
    def has_calls_or_faults(self) -> bool:
        """Whether a call was read, or a fault tells that something could not be read."""
        return bool(self.faults) or any(message.calls for message in self.messages)


def read_conversations(records: Iterable[NumberedRecord]) -> Iterator[ReadConversation]:
    """Read the conversations in the records of a file.

    Most records are one conversation each, and are read one by one. Files in some forms are read as a whole, such as a
    log with one event per line. The first records tell whether a file is in such a form.

    Yields:
        The conversations, in the order of the file. What could not be read is in their faults, as in `read_record`.
    """
    iterator = iter(records)
    first_records = list(islice(iterator, FIRST_RECORDS))
    form = find_file_form([record.value for record in first_records])

    if form is None:
        for record in chain(first_records, iterator):
            yield from read_record(record)
    else:
        yield from _read_file([*first_records, *iterator], form)


def _read_file(records: Sequence[NumberedRecord], form: Form) -> Iterator[ReadConversation]:
    """Yield the conversations of a file that is read as a whole."""
    values = [record.value for record in records]
    if any(map(is_too_deep, values)):
        yield _build_unread_conversation(records[0], "too_deep", TOO_DEEP)
        return
    yield from _iter_conversations(records[0].number, form, values, record_count=len(values))


def find_file_form(values: Sequence[Any]) -> Form | None:
    """Find the form of a file whose records are read as a whole, such as a log with one event per line.

    1. A file with a record that is nested too deep, or that is a conversation itself, is not read as a whole. A span of
       a trace does not count as a conversation: it may hold messages, but a conversation may take several spans.
    2. Else the form may be one of FILE_FORMS, if it recognises one of the records.
    3. Else it may be a form of lists, if it recognises the records as one list, such as one message per line.

    Args:
        values: The first records of the file.

    Returns:
        The form, or None if the file is read record by record.
    """
    if any(map(is_too_deep, values)):
        return None
    for value in values:
        if not _is_span(value) and find_record_form(value) is not None:
            return None

    for value in values:
        for form in FILE_FORMS:
            if form.is_form_of(value):
                return form

    for form in FORMS:
        if form.takes_lists and form.is_form_of(list(values)):
            return form
    return None


def _is_span(value: Any) -> bool:
    """Return whether a record has attributes, as a span of a trace does; these may hold messages."""
    return isinstance(value, Mapping) and "attributes" in value


def read_record(record: NumberedRecord) -> Iterator[ReadConversation]:
    """Read the conversations of a record.

    Their faults are unknown_form, too_deep, too_many_calls, no_message, unknown_role (the message is kept as context),
    unreadable_call, unknown_part, unknown_field, marks_beside_fields, and the faults of `pairing.paired`.

    Yields:
        The conversations. If there are none, one without messages whose fault says why.
    """
    if is_too_deep(record.value):
        yield _build_unread_conversation(record, "too_deep", TOO_DEEP)
        return

    form = find_record_form(record.value)
    if form is None:
        yield _build_unread_conversation(record, "unknown_form", f"no conversation; {described(record.value)}")
        return

    first, *others = _iter_conversations(record.number, form, record.value)
    # If the record holds a call and no conversation has one, the first reports it for the record as a whole.
    yield _with_unread_call(first, others, record.value)
    yield from others


def _with_unread_call(first: ReadConversation, others: Sequence[ReadConversation], record: Any) -> ReadConversation:
    """Add a fault to the first conversation of a record if the record holds a call but none was read.

    Nothing is added if any of the conversations has a call or a fault already.

    Args:
        first: The first conversation.
        others: The other conversations.
        record: The record.

    Returns:
        The first conversation.
    """
    if any(conversation.has_calls_or_faults for conversation in (first, *others)):
        return first
    call_path = find_unread_call(record)
    if call_path is None:
        return first
    return replace(first, faults=(("unknown_field", f"no call was read, and {call_path} holds one"),))


def find_record_form(value: Any) -> Form | None:
    """Find the form of a record.

    A form fits if it recognises the record and finds a conversation in it. If several forms fit, the first one that
    finds a call is preferred, because a record may hold a task next to its messages.

    Returns:
        The form, or None if the record is not a conversation.
    """
    fitting_forms = []
    for form in FORMS:
        if form.is_form_of(value) and any(map(_is_conversation, list_stored_conversations(form, value))):
            fitting_forms.append(form)

    if len(fitting_forms) > 1:
        for form in fitting_forms:
            if any(map(_has_call, list_stored_conversations(form, value))):
                return form

    return fitting_forms[0] if fitting_forms else None


def _has_call(stored: Sequence[StoredMessage]) -> bool:
    """Return whether there is a call in the messages of a conversation."""
    messages = with_marked_calls(raw_messages(stored, faults=[]), faults=[])
    return any(message.calls for message in messages)


def list_stored_conversations(form: Form, value: Any) -> list[list[StoredMessage]]:
    """List the conversations of a record, or of the records of a file.

    Returns:
        The stored messages of each conversation. The list is empty if a value has another type than the form expects.
    """
    try:
        return list(form.iter_conversations(value))
    except (AttributeError, LookupError, TypeError):
        return []


def _is_conversation(stored: Sequence[StoredMessage]) -> bool:
    """Tell whether there are messages, and one of the first three names its role."""
    if not stored:
        return False
    if stored[0].role is not None:
        return True
    first_messages = raw_messages(stored[:3], faults=[])
    return any(message.role != "None" for message in first_messages)


def _iter_conversations(number: int, form: Form, value: Any, *, record_count: int = 1) -> Iterator[ReadConversation]:
    """Read the conversations of a record, or of a file that is read as a whole.

    Args:
        number: The number of the record, or of the first record of the file.
        form: The form of the record or the file.
        value: The record, or the list of the file's records.
        record_count: 1, or the number of records of the file.

    Yields:
        The conversations. If there are none, one without messages and with a fault.
    """
    conversations = list_stored_conversations(form, value)
    if not conversations:
        yield _build_unread_conversation(
            NumberedRecord(number, value), "unknown_form", _describe_missing(form, value, "conversation")
        )
        return

    for part, stored in enumerate(conversations):
        messages = _read_messages(stored)
        if messages.is_empty:
            messages.faults.append(("unknown_form", _describe_missing(form, value, "message")))

        yield ReadConversation(
            number=number,
            part=part,
            record_id=_find_id_of_part(form, value, part),
            form=form.name,
            messages=messages.messages,
            faults=tuple(messages.faults),
            record_count=record_count,
        )


def _describe_missing(form: Form, value: Any, missing: str) -> str:
    """Return the detail of a fault about a record that has the signs of a form but no message, or no conversation."""
    return f"it begins as {form.name}, and holds no {missing}; {described(value)}"


class _Messages(NamedTuple):
    """The messages of a conversation, and its faults."""

    messages: tuple[RecordedMessage, ...]
    faults: list[Fault]

    @property
    def is_empty(self) -> bool:
        """Whether there are neither messages nor faults."""
        return not self.messages and not self.faults


def _read_messages(stored: Sequence[StoredMessage]) -> _Messages:
    """Read the messages of a conversation, and pair its calls with their results.

    Returns:
        The messages and the faults. A conversation with more than MOST_CALLS calls has no messages, and a fault.
    """
    faults = list[Fault]()
    messages = with_marked_calls(raw_messages(stored, faults), faults)

    call_count = sum(len(message.calls) for message in messages)
    if call_count > MOST_CALLS:
        return _Messages((), [("too_many_calls", f"more than {MOST_CALLS:,} calls in a conversation")])
    return _Messages(paired(messages, faults), faults)


def _find_id_of_part(form: Form, value: Any, part: int) -> str | None:
    """Find the id of a conversation.

    Args:
        form: The form of the record.
        value: The record, or the list of the file's records.
        part: The index of the conversation in it.

    Returns:
        The conversation's own id if it has one, else the id of its record, or of the first record of its file.
    """
    first_record = value[0] if isinstance(value, list) and value else value
    if not form.conversations:
        return find_record_id(first_record)

    conversations = find_value(value, (form.conversations,))
    has_part = isinstance(conversations, list) and part < len(conversations)
    part_id = find_record_id(conversations[part]) if has_part else None
    return part_id or find_record_id(first_record)


def read_conversation(record: Any) -> tuple[tuple[RecordedMessage, ...], list[Fault]]:
    """Read a record that is one conversation.

    Returns:
        The messages, and the faults: what could not be used as it was recorded.

    Raises:
        UnknownForm: The record is not a conversation in a known form, or is nested too deep.
    """
    for conversation in read_record(NumberedRecord(1, record)):
        for reason, detail in conversation.faults:
            if reason in ("unknown_form", "too_deep"):
                raise UnknownForm(f"{detail}; write messages in OpenAI's form, or see `toolformer-dag judge --forms`")
        return conversation.messages, list(conversation.faults)
    return (), []


def _build_unread_conversation(record: NumberedRecord, reason: str, detail: str) -> ReadConversation:
    """Build a conversation without messages and with a fault, for a record that was not read."""
    return ReadConversation(
        number=record.number,
        part=0,
        record_id=find_record_id(record.value),
        form=UNKNOWN,
        messages=(),
        faults=((reason, detail),),
    )


def find_record_id(record: Any) -> str | None:
    """Find the id of a record.

    Returns:
        The first of the fields RECORD_IDS that is a text or a whole number, as text, or None if there is none.
    """
    fields = record if isinstance(record, Mapping) else {}
    for key in RECORD_IDS:
        value = fields.get(key)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
    return None


def described(value: Any) -> str:
    """Describe the fields of a record for a message to the user.

    Returns:
        For example `the fields are id, log [role, content]`. In brackets are the fields of the first item of a list.
    """
    if not isinstance(value, Mapping):
        return f"it is a {type(value).__name__}"
    fields = [_describe_field(name, value[name]) for name in list(value)[:FIELDS_SHOWN]]
    return f"the fields are {', '.join(fields)}"


def _describe_field(name: object, value: Any) -> str:
    """Return the name of a field, with the fields of the first object where it holds a list: `log [role, content]`."""
    is_list_of_objects = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    if not is_list_of_objects:
        return str(name)
    inner_names = [str(inner_name) for inner_name in value[0]]
    return f"{name} [{', '.join(inner_names[:INNER_FIELDS_SHOWN])}]"
