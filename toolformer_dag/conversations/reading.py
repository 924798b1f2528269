"""Read the conversations of the records of a file, in whatever form they are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms import FILE_FORMS, RECORD_FORMS
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.leftovers import find_unread_call_path
from toolformer_dag.conversations.marked_messages import extract_marked_calls
from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.conversations.pairing import pair_results_with_calls
from toolformer_dag.conversations.plain_values import find_first_value, is_nested_too_deep
from toolformer_dag.conversations.raw_messages import Fault, StoredMessage, build_raw_messages
from toolformer_dag.files import UserError
from toolformer_dag.texts.record_files import NumberedRecord

RECORD_ID_FIELDS = (
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
MAX_CALLS = 20_000
"""Calls of the longest conversation that is read; more calls are a fault."""
MAX_FIELDS_IN_FAULT = 20
"""Fields of an unknown record that a fault names."""
MAX_INNER_FIELDS_IN_FAULT = 10
"""Fields of the objects in a list of such a record that a fault names."""
MAX_RECORDS_FOR_FORM = 50
"""Records of a file in which its form is looked for: the first ones may have no sign of it."""
UNKNOWN_FORM_NAME = "unknown"
"""The form of a record that was not read."""
TOO_DEEP_DETAIL = "lists and objects stand in each other more than 100 times"


class UnknownForm(UserError):
    """A record is no conversation in a known form; the message names its fields."""


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation that was read from the records of a file.

    Attributes:
        first_record_number: The number of the first record that it was read from.
        index_in_record: Its index among the conversations of that record, or of a file that is read as a whole.
        record_id: The id in the record, or None if there is none.
        form_name: The name of the form of the record, such as "OpenAI chat".
        messages: The messages. There are none if nothing was read, and then a fault says why.
        faults: What could not be used as it was recorded: for each thing a reason such as "unreadable_call", and a
            detail.
        record_count: How many records it was read from: all of the file if that is read as a whole, else one.
    """

    first_record_number: int
    index_in_record: int
    record_id: str | None
    form_name: str
    messages: tuple[RecordedMessage, ...]
    faults: tuple[Fault, ...]
    record_count: int = 1

    @property
    def has_calls_or_faults(self) -> bool:
        """Whether a call was read, or a fault says that something could not be read."""
        return bool(self.faults) or any(message.calls for message in self.messages)


def read_conversations(records: Iterable[NumberedRecord]) -> Iterator[ReadConversation]:
    """Read the conversations in the records of a file.

    Most records are one conversation each, and are read one by one. Files in some forms are read as a whole, such as a
    log with one event per line. The first records tell whether a file is in such a form.

    Yields:
        The conversations, in the order of the file. What could not be read is in their faults, as in
        `iter_record_conversations`.
    """
    record_iterator = iter(records)
    first_records = list(islice(record_iterator, MAX_RECORDS_FOR_FORM))
    form = find_file_form([record.value for record in first_records])

    if form is None:
        for record in chain(first_records, record_iterator):
            yield from iter_record_conversations(record)
    else:
        all_records = [*first_records, *record_iterator]
        yield from _iter_file_conversations(all_records, form)


def _iter_file_conversations(records: Sequence[NumberedRecord], form: Form) -> Iterator[ReadConversation]:
    """Read the conversations of a file that is read as a whole.

    Args:
        records: All records of the file.
        form: The form of the file.

    Yields:
        The conversations. If a record is nested too deep, one without messages and with a fault.
    """
    values = [record.value for record in records]
    if any(map(is_nested_too_deep, values)):
        yield _build_unread_conversation(records[0], "too_deep", TOO_DEEP_DETAIL)
        return
    yield from _iter_conversations(records[0].number, form, values, record_count=len(values))


def find_file_form(first_records: Sequence[Any]) -> Form | None:
    """Find the form of a file whose records are read as a whole, such as a log with one event per line.

    1. A file with a record that is nested too deep, or that is a conversation itself, is not read as a whole. A span (a
       step of a program's trace) does not count, because a conversation may take several spans.
    2. Otherwise it has a form of FILE_FORMS if that recognizes one of the records.
    3. Otherwise the records may be the items of one conversation, such as one message per line. Then it is the first
       form whose records can be lists (`can_be_list`) and that recognizes the list of all these records.

    Args:
        first_records: The first records of the file.

    Returns:
        The form, or None if the file is read record by record.
    """
    if any(map(is_nested_too_deep, first_records)):
        return None
    for record in first_records:
        is_conversation = not _is_trace_span(record) and find_record_form(record) is not None
        if is_conversation:
            return None

    for record in first_records:
        for form in FILE_FORMS:
            if form.is_form_of_record(record):
                return form

    for form in RECORD_FORMS:
        if form.can_be_list and form.is_form_of_record(list(first_records)):
            return form
    return None


def _is_trace_span(record: Any) -> bool:
    """Return whether a record has attributes, as a span of a trace does."""
    return isinstance(record, Mapping) and "attributes" in record


def iter_record_conversations(numbered_record: NumberedRecord) -> Iterator[ReadConversation]:
    """Read the conversations of a record.

    Their faults are unknown_form, too_deep, too_many_calls, no_message, unknown_role (the message is kept as context),
    unreadable_call, unknown_part, unknown_field, marks_beside_fields, and the faults that `pair_results_with_calls` in
    `pairing` lists.

    Yields:
        The conversations. If there are none, one without messages whose fault says why.
    """
    record = numbered_record.value
    if is_nested_too_deep(record):
        yield _build_unread_conversation(numbered_record, "too_deep", TOO_DEEP_DETAIL)
        return

    form = find_record_form(record)
    if form is None:
        detail = f"no conversation; {describe_record_fields(record)}"
        yield _build_unread_conversation(numbered_record, "unknown_form", detail)
        return

    first_conversation, *other_conversations = _iter_conversations(numbered_record.number, form, record)
    # If the record holds a call and no conversation has one, the first reports it for the record as a whole.
    yield _add_unread_call_fault(first_conversation, other_conversations, record)
    yield from other_conversations


def _add_unread_call_fault(
    first_conversation: ReadConversation, other_conversations: Sequence[ReadConversation], record: Any
) -> ReadConversation:
    """Add a fault to the first conversation of a record if the record holds a call but none was read.

    Nothing is added if any of the conversations has a call or a fault already.

    Args:
        first_conversation: The first conversation of the record.
        other_conversations: The other conversations of the record.
        record: The record as it is stored.

    Returns:
        The first conversation, as a changed copy if the fault was added.
    """
    all_conversations = (first_conversation, *other_conversations)
    if any(conversation.has_calls_or_faults for conversation in all_conversations):
        return first_conversation

    call_path = find_unread_call_path(record)
    if call_path is None:
        return first_conversation

    fault = ("unknown_field", f"no call was read, and {call_path} holds one")
    return replace(first_conversation, faults=(fault,))


def find_record_form(record: Any) -> Form | None:
    """Find the form of a record.

    A form fits if it recognizes the record and finds a conversation in it. If several forms fit, the first one that
    finds a call is preferred, because a record may hold a task next to its messages.

    Returns:
        The form, or None if the record is not a conversation.
    """
    fitting_forms = []
    for form in RECORD_FORMS:
        if not form.is_form_of_record(record):
            continue
        if any(map(_is_conversation, list_stored_conversations(form, record))):
            fitting_forms.append(form)

    if len(fitting_forms) > 1:
        for form in fitting_forms:
            conversations = list_stored_conversations(form, record)
            if any(map(_has_any_call, conversations)):
                return form

    return fitting_forms[0] if fitting_forms else None


def _has_any_call(stored_messages: Sequence[StoredMessage]) -> bool:
    """Return whether there is a call in the messages of a conversation."""
    messages = extract_marked_calls(build_raw_messages(stored_messages, faults=[]), faults=[])
    return any(message.calls for message in messages)


def list_stored_conversations(form: Form, record_or_records: Any) -> list[list[StoredMessage]]:
    """List the conversations of a record, or of the records of a file.

    Returns:
        The stored messages of each conversation. The list is empty if a value has another type than the form expects.
    """
    try:
        return list(form.iter_conversations(record_or_records))
    except (AttributeError, LookupError, TypeError):
        return []


def _is_conversation(stored_messages: Sequence[StoredMessage]) -> bool:
    """Return whether there are messages, and one of the first three has a role."""
    if not stored_messages:
        return False
    if stored_messages[0].role is not None:  # the form knows the role
        return True
    first_messages = build_raw_messages(stored_messages[:3], faults=[])
    return any(message.role != "None" for message in first_messages)


def _iter_conversations(
    first_record_number: int, form: Form, record_or_records: Any, *, record_count: int = 1
) -> Iterator[ReadConversation]:
    """Read the conversations of a record, or of a file that is read as a whole.

    Args:
        first_record_number: The number of the record, or of the first record of the file.
        form: The form of the record or the file.
        record_or_records: The record, or the list of the file's records.
        record_count: 1, or the number of records of the file.

    Yields:
        The conversations. If there are none, one without messages and with a fault.
    """
    conversations = list_stored_conversations(form, record_or_records)
    if not conversations:
        unread_record = NumberedRecord(first_record_number, record_or_records)
        detail = _format_missing_detail(form, record_or_records, "conversation")
        yield _build_unread_conversation(unread_record, "unknown_form", detail)
        return

    for conversation_index, stored_messages in enumerate(conversations):
        messages, faults = _read_messages(stored_messages)
        if not messages and not faults:
            faults.append(("unknown_form", _format_missing_detail(form, record_or_records, "message")))

        yield ReadConversation(
            first_record_number=first_record_number,
            index_in_record=conversation_index,
            record_id=_find_conversation_id(form, record_or_records, conversation_index),
            form_name=form.name,
            messages=messages,
            faults=tuple(faults),
            record_count=record_count,
        )


def _format_missing_detail(form: Form, record_or_records: Any, missing_kind: str) -> str:
    """Format the detail of a fault about a record that has the signs of a form but lacks something.

    Args:
        form: The form.
        record_or_records: The record, or the list of a file's records.
        missing_kind: What the record lacks: "message" or "conversation".
    """
    return f"it begins as {form.name}, and holds no {missing_kind}; {describe_record_fields(record_or_records)}"


class _MessagesAndFaults(NamedTuple):
    """The messages of a conversation, and its faults."""

    messages: tuple[RecordedMessage, ...]
    faults: list[Fault]


def _read_messages(stored_messages: Sequence[StoredMessage]) -> _MessagesAndFaults:
    """Read the messages of a conversation, and pair its calls with their results.

    Returns:
        The messages and the faults. A conversation with more than MAX_CALLS calls has no messages, and a fault.
    """
    faults = list[Fault]()
    messages = extract_marked_calls(build_raw_messages(stored_messages, faults), faults)

    call_count = sum(len(message.calls) for message in messages)
    if call_count > MAX_CALLS:
        fault = ("too_many_calls", f"more than {MAX_CALLS:,} calls in a conversation")
        return _MessagesAndFaults((), [fault])

    recorded_messages = pair_results_with_calls(messages, faults)
    return _MessagesAndFaults(recorded_messages, faults)


def _find_conversation_id(form: Form, record_or_records: Any, conversation_index: int) -> str | None:
    """Find the id of a conversation.

    Args:
        form: The form of the record.
        record_or_records: The record, or the list of the file's records.
        conversation_index: The index of the conversation in it.

    Returns:
        The conversation's own id if it has one, else the id of its record, or of the first record of its file.
    """
    is_filled_list = isinstance(record_or_records, list) and bool(record_or_records)
    first_record = record_or_records[0] if is_filled_list else record_or_records
    if not form.conversations:  # the record is one conversation
        return find_record_id(first_record)

    conversations = find_first_value(record_or_records, (form.conversations,))
    has_conversation = isinstance(conversations, list) and conversation_index < len(conversations)
    conversation_id = find_record_id(conversations[conversation_index]) if has_conversation else None
    return conversation_id or find_record_id(first_record)


def read_conversation(record: Any) -> tuple[tuple[RecordedMessage, ...], list[Fault]]:
    """Read a record that is one conversation.

    Returns:
        The messages, and the faults: what could not be used as it was recorded.

    Raises:
        UnknownForm: The record is not a conversation in a known form, or is nested too deep.
    """
    conversation = next(iter_record_conversations(NumberedRecord(1, record)), None)
    if conversation is None:
        return (), []

    for reason, detail in conversation.faults:
        if reason in ("unknown_form", "too_deep"):
            raise UnknownForm(f"{detail}; write messages in OpenAI's form, or see `toolformer-dag judge --forms`")
    return conversation.messages, list(conversation.faults)


def _build_unread_conversation(numbered_record: NumberedRecord, reason: str, detail: str) -> ReadConversation:
    """Build a conversation without messages and with a fault, for a record that was not read."""
    return ReadConversation(
        first_record_number=numbered_record.number,
        index_in_record=0,
        record_id=find_record_id(numbered_record.value),
        form_name=UNKNOWN_FORM_NAME,
        messages=(),
        faults=((reason, detail),),
    )


def find_record_id(record: Any) -> str | None:
    """Find the id of a record, in a field such as `id` or `conversation_id`.

    Returns:
        The first of the fields RECORD_ID_FIELDS that is a text or a whole number, as text, or None if there is none.
    """
    if not isinstance(record, Mapping):
        return None

    for key in RECORD_ID_FIELDS:
        value = record.get(key)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, str) or is_integer:
            return str(value)
    return None


def describe_record_fields(record: Any) -> str:
    """Describe the fields of a record for a message to the user.

    Returns:
        For example `the fields are id, log [role, content]`. In brackets are the fields of the first item of a list.
    """
    if not isinstance(record, Mapping):
        return f"it is a {type(record).__name__}"

    shown_names = list(record)[:MAX_FIELDS_IN_FAULT]
    descriptions = [_describe_field(name, record[name]) for name in shown_names]
    return f"the fields are {', '.join(descriptions)}"


def _describe_field(name: object, value: Any) -> str:
    """Describe a field by its name.

    If the field holds a list of objects, the fields of the first object follow in brackets: `log [role, content]`.
    """
    is_list_of_objects = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    if not is_list_of_objects:
        return str(name)

    inner_names = [str(inner_name) for inner_name in value[0]]
    shown_names = inner_names[:MAX_INNER_FIELDS_IN_FAULT]
    return f"{name} [{', '.join(shown_names)}]"
