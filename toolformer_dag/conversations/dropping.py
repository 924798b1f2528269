"""Drop calls and their results from a record and leave everything else unchanged."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from toolformer_dag.conversations.forms import ALL_FORMS
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.marked_messages import CHARACTERS_BETWEEN_CALLS
from toolformer_dag.conversations.messages import RecordedCall
from toolformer_dag.conversations.raw_messages import RawMessage, StoredMessage, split_stored_message
from toolformer_dag.conversations.reading import (
    MAX_RECORDS_FOR_FORM,
    find_file_form,
    find_record_form,
    list_stored_conversations,
)
from toolformer_dag.conversations.record_paths import NOTHING_LEFT, RecordPath, remove_paths


def drop_calls(record: Any, calls: Collection[RecordedCall], message_paths: Collection[RecordPath] = ()) -> Any:
    """Remove calls and their results from a record.

    Everything else stays as it is stored. A message that has no words, calls and results any more is removed too.

    Args:
        record: The record. If a whole file is one conversation, the list of its records.
        calls: The calls to remove.
        message_paths: The paths of whole messages to remove (`RecordedMessage.place`).

    Returns:
        A copy without them. A record in no known form is returned unchanged.
    """
    form = _find_form(record)
    if form is None or not (calls or message_paths):
        return record

    dropped_paths = {*message_paths, *_iter_call_paths(calls)}
    dropped_paths.update(_list_emptied_message_paths(form, record, dropped_paths))

    remaining_record = remove_paths(record, dropped_paths)
    if remaining_record is NOTHING_LEFT:  # every field or item was dropped
        return [] if isinstance(record, list) else {}

    # Some forms must mend what refers to the dropped parts, such as the ids of parents.
    if form.after_drop is None:
        return remaining_record
    return form.after_drop(remaining_record, record)


def _iter_call_paths(calls: Collection[RecordedCall]) -> Iterator[RecordPath]:
    """Yield the paths to calls, to their copies and to their results."""
    for call in calls:
        yield call.place
        yield from call.copies
        if call.answered is not None:
            yield call.answered


def _list_emptied_message_paths(form: Form, record: Any, dropped_paths: Collection[RecordPath]) -> list[RecordPath]:
    """List the messages that say nothing any more once some paths are removed.

    For example, {"role": "assistant", "tool_calls": [...]} says nothing without its only call.

    Args:
        form: The form of the record.
        record: The record.
        dropped_paths: The paths to be removed.

    Returns:
        The paths of these messages.
    """
    stored_messages = list(chain.from_iterable(list_stored_conversations(form, record)))
    dropped_paths_by_message = _group_paths_by_message(dropped_paths, stored_messages)

    emptied_message_paths = []
    for stored_message in stored_messages:
        paths_in_message = dropped_paths_by_message.get(stored_message.path)
        if paths_in_message and _is_emptied_message(stored_message, paths_in_message):
            emptied_message_paths.append(stored_message.path)
    return emptied_message_paths


def _find_form(record: Any) -> Form | None:
    """Find out in which form (of which program or data set, such as OpenAI's) a record stores a conversation.

    Args:
        record: The record. If a whole file is one conversation, the list of its records.

    Returns:
        The form, or None if the record is not a conversation.
    """
    if isinstance(record, list):
        file_form = find_file_form(record[:MAX_RECORDS_FOR_FORM])
        if file_form is not None:
            return file_form
    return find_record_form(record)


def can_drop_calls(form_name: str) -> bool:
    """Return whether single calls can be dropped from records in the form of this name."""
    return all(form.can_drop for form in ALL_FORMS if form.name == form_name)


def _group_paths_by_message(
    paths: Collection[RecordPath], stored_messages: Sequence[StoredMessage]
) -> dict[RecordPath, list[RecordPath]]:
    """Group paths by the message that they lead into.

    For example, the path ("messages", 1, "tool_calls", 0) gives {("messages", 1): [("tool_calls", 0)]}.

    Returns:
        By the path of each message, the rest of each path. If messages have paths of several lengths, some keys are
        not messages. That does no harm, since these are not looked up.
    """
    message_path_lengths = {len(stored_message.path) for stored_message in stored_messages}

    inner_paths_by_message = defaultdict[RecordPath, list[RecordPath]](list)
    for path in paths:
        for length in message_path_lengths:
            message_path, inner_path = path[:length], path[length:]
            inner_paths_by_message[message_path].append(inner_path)
    return inner_paths_by_message


def _is_emptied_message(stored_message: StoredMessage, dropped_paths: Collection[RecordPath]) -> bool:
    """Return whether a message has no words, calls and results any more once some paths in it are removed.

    Args:
        stored_message: The message.
        dropped_paths: The paths to be removed, which begin at the message.
    """
    remaining_value = remove_paths(stored_message.value, dropped_paths)
    if remaining_value is NOTHING_LEFT:
        return True

    remaining_message = stored_message._replace(value=remaining_value)
    raw_messages = split_stored_message(remaining_message, message_index=0, faults=[])
    return not any(map(_has_content, raw_messages))


def _has_content(message: RawMessage) -> bool:
    """Return whether a message has calls, results that are not empty, or words."""
    has_results = any(result.text.strip() for result in message.results)
    has_words = bool(message.text.strip(CHARACTERS_BETWEEN_CALLS))
    return bool(message.calls) or has_results or has_words
