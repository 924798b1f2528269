"""Leave calls out of a record, with their results, so that all else stays as it is."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from toolformer_dag.conversations.forms import ALL_FORMS
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.marked_messages import BETWEEN_CALLS
from toolformer_dag.conversations.messages import RecordedCall
from toolformer_dag.conversations.raw_messages import StoredMessage, read_message
from toolformer_dag.conversations.reading import FIRST_RECORDS, file_form, record_form, stored_conversations
from toolformer_dag.conversations.record_paths import GONE, Path, without


def drop(record: Any, calls: Collection[RecordedCall], messages: Collection[Path] = ()) -> Any:
    """Return a record without these of its calls and their results, in the form that it has.

    A message that is left without words, calls and results goes too.

    - `record`: for a form in which a file is a conversation, the list of the file's records
    - `messages`: the paths of messages that are left out whole (`RecordedMessage.place`)
    """
    form = _form_of(record)
    if form is None or not (calls or messages):
        return record
    removed_paths = set(messages)
    for call in calls:
        removed_paths.update((call.place, *call.copies))
        if call.answered is not None:
            removed_paths.add(call.answered)
    stored_messages = list(chain.from_iterable(stored_conversations(form, record)))
    removed_of_message = _by_message(removed_paths, stored_messages)
    for stored in stored_messages:
        removed_inside = removed_of_message.get(stored.path)
        if removed_inside and _is_emptied(stored, removed_inside):
            removed_paths.add(stored.path)
    left = without(record, removed_paths)
    if left is GONE:
        return [] if isinstance(record, list) else {}
    return form.after_drop(left, record) if form.after_drop is not None else left


def _form_of(record: Any) -> Form | None:
    """Return the form of a record, or of the records of a file; None for no conversation."""
    form = file_form(record[:FIRST_RECORDS]) if isinstance(record, list) else None
    return form or record_form(record)


def can_drop(form: str) -> bool:
    """Return whether calls can be left out of records in the form of this name."""
    return all(known.can_drop for known in ALL_FORMS if known.name == form)


def _by_message(paths: Collection[Path], stored_messages: Sequence[StoredMessage]) -> dict[Path, list[Path]]:
    """Return the paths that lie in each message, by the path of the message; they begin at the message.

    As an example, of ("messages", 1, "tool_calls", 0) in the message at ("messages", 1) that is ("tool_calls", 0).
    """
    lengths = {len(stored.path) for stored in stored_messages}
    paths_of_message = defaultdict[Path, list[Path]](list)
    for path in paths:
        for length in lengths:
            paths_of_message[path[:length]].append(path[length:])
    return paths_of_message


def _is_emptied(stored: StoredMessage, removed: Collection[Path]) -> bool:
    """Return whether a message has no words, calls and results left once what lies at these paths in it is removed."""
    left = without(stored.value, removed)
    if left is GONE:
        return True
    for message in read_message(stored._replace(value=left), number=0, faults=[]):
        has_results = any(result.text.strip() for result in message.results)
        has_words = bool(message.text.strip(BETWEEN_CALLS))
        if message.calls or has_results or has_words:
            return False
    return True
