"""Drop calls and their results from a record and leave everything else unchanged."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from toolformer_dag.conversations.forms import ALL_FORMS
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.marked_messages import BETWEEN_CALLS
from toolformer_dag.conversations.messages import RecordedCall
from toolformer_dag.conversations.raw_messages import RawMessage, StoredMessage, read_message
from toolformer_dag.conversations.reading import (
    FIRST_RECORDS,
    find_file_form,
    find_record_form,
    list_stored_conversations,
)
from toolformer_dag.conversations.record_paths import GONE, Path, without


def drop(record: Any, calls: Collection[RecordedCall], messages: Collection[Path] = ()) -> Any:
    """Remove calls and their results from a record.

    Everything else stays as it is stored. A message that has no words, calls and results any more is removed too.

    Args:
        record: The record. If a whole file is one conversation, the list of its records.
        calls: The calls to remove.
        messages: The paths of whole messages to remove (`RecordedMessage.place`).

    Returns:
        A copy without them. A record in no known form is returned unchanged.
    """
    form = _find_form(record)
    if form is None or not (calls or messages):
        return record

    dropped_paths = {*messages, *_iter_call_paths(calls)}
    dropped_paths.update(_list_emptied_messages(form, record, dropped_paths))

    remaining_record = without(record, dropped_paths)
    if remaining_record is GONE:  # every field or item was dropped
        return [] if isinstance(record, list) else {}

    if form.after_drop is None:
        return remaining_record
    return form.after_drop(remaining_record, record)  # mends what refers to the dropped parts, such as parents' ids


def _iter_call_paths(calls: Collection[RecordedCall]) -> Iterator[Path]:
    """Yield the paths of calls, of their copies and of their results."""
    for call in calls:
        yield call.place
        yield from call.copies
        if call.answered is not None:
            yield call.answered


def _list_emptied_messages(form: Form, record: Any, dropped_paths: Collection[Path]) -> list[Path]:
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
    dropped_by_message = _group_paths_by_message(dropped_paths, stored_messages)
    emptied_paths = []
    for stored in stored_messages:
        dropped_inside = dropped_by_message.get(stored.path)
        if dropped_inside and _is_emptied(stored, dropped_inside):
            emptied_paths.append(stored.path)
    return emptied_paths


def _find_form(record: Any) -> Form | None:
    """Return the form of a record, or of the records of a file; None where there is no conversation."""
    form = find_file_form(record[:FIRST_RECORDS]) if isinstance(record, list) else None
    return form or find_record_form(record)


def can_drop(form_name: str) -> bool:
    """Return whether calls can be dropped from records in the form of this name."""
    return all(form.can_drop for form in ALL_FORMS if form.name == form_name)


def _group_paths_by_message(
    paths: Collection[Path], stored_messages: Sequence[StoredMessage]
) -> dict[Path, list[Path]]:
    """Group paths by the message that they lead into.

    For example, the path ("messages", 1, "tool_calls", 0) gives {("messages", 1): [("tool_calls", 0)]}.

    Returns:
        By the path of each message, the rest of each path. If messages have paths of several lengths, some keys are
        not messages. That does no harm, since these are not looked up.
    """
    message_path_lengths = {len(stored.path) for stored in stored_messages}

    paths_by_message = defaultdict[Path, list[Path]](list)
    for path in paths:
        for length in message_path_lengths:
            paths_by_message[path[:length]].append(path[length:])
    return paths_by_message


def _is_emptied(stored: StoredMessage, dropped_paths: Collection[Path]) -> bool:
    """Return whether a message has no words, calls and results without what lies at these paths in it."""
    left = without(stored.value, dropped_paths)
    if left is GONE:
        return True
    messages = read_message(stored._replace(value=left), number=0, faults=[])
    return not any(map(_has_content, messages))


def _has_content(message: RawMessage) -> bool:
    """Return whether a message has calls, results that are not empty, or words."""
    has_results = any(result.text.strip() for result in message.results)
    has_words = bool(message.text.strip(BETWEEN_CALLS))
    return bool(message.calls) or has_results or has_words
