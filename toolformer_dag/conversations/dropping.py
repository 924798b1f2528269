"""Leave calls out of a record, with their results, so that all else stays as it is."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from toolformer_dag.conversations.forms import ALL_FORMS
from toolformer_dag.conversations.marked_messages import BETWEEN_CALLS
from toolformer_dag.conversations.messages import RecordedCall
from toolformer_dag.conversations.raw_messages import Said, read_message
from toolformer_dag.conversations.reading import FIRST_RECORDS, file_form, record_form, said_in
from toolformer_dag.conversations.record_paths import GONE, Path, without


def drop(record: Any, calls: Collection[RecordedCall], messages: Collection[Path] = ()) -> Any:
    """Return a record without these of its calls and their results, in the form that it has.

    A message that is left without words, calls and results goes too.

    - `record`: for a form in which a file is a conversation, the list of the file's records
    - `messages`: the places of messages that are left out whole (`RecordedMessage.place`)
    """
    form = (file_form(record[:FIRST_RECORDS]) if isinstance(record, list) else None) or record_form(record)
    if form is None or not (calls or messages):
        return record
    gone = set(messages)
    for call in calls:
        gone.update((call.place, *call.copies))
        if call.answered is not None:
            gone.add(call.answered)
    all_said = [said for part in said_in(form, record) for said in part]
    inside = _inside(all_said, gone)
    for said in all_said:
        paths = inside.get(said.path)
        if paths and _is_emptied(said, paths):
            gone.add(said.path)
    left = without(record, gone)
    if left is GONE:
        return [] if isinstance(record, list) else {}
    return form.after_drop(left, record) if form.after_drop is not None else left


def can_drop(form: str) -> bool:
    """Return whether calls can be left out of records in the form of this name."""
    return all(known.can_drop for known in ALL_FORMS if known.name == form)


def _inside(all_said: Sequence[Said], gone: Collection[Path]) -> dict[Path, list[Path]]:
    """Return what goes inside each message: by the way to the message, the ways from there."""
    lengths = {len(said.path) for said in all_said}
    inside = defaultdict[Path, list[Path]](list)
    for path in gone:
        for length in lengths:
            inside[path[:length]].append(path[length:])
    return inside


def _is_emptied(said: Said, gone: Collection[Path]) -> bool:
    """Return whether nothing is left of a message without what goes in it."""
    left = without(said.value, gone)
    if left is GONE:
        return True
    for message in read_message(said._replace(value=left), 0, []):
        has_results = any(result.text.strip() for result in message.results)
        if message.calls or has_results or message.text.strip(BETWEEN_CALLS):
            return False
    return True
