"""Paths to the values inside a record, and copies of a record without the values at some paths."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import try_parse_json

TextSpan = tuple[int, int]
"""A span of text: the offsets of its first character and of the one behind its last."""
PathStep = str | int | None | TextSpan
"""A step from a value to one inside it:

- a key of an object, or an index of a list
- None: a text is opened as JSON
- a pair (start, end): a span of text, by character offsets
"""
RecordPath = tuple[PathStep, ...]
"""The steps from a record to a value in it; () is the record itself. JSON stores it as a list, pairs as lists too.

("messages", None, 2, "content", (11, 58)) is the text from character 11 to 57 of the content of the third message,
where the messages are a list in JSON that is stored as text.
"""
NOTHING_LEFT = object()
"""Stands for a value of which nothing is left."""


def get_value_at(record: Any, path: RecordPath) -> Any:
    """Get the value at a path in a record.

    Example:
        get_value_at({"messages": [{"content": "Hi"}]}, ("messages", 0, "content"))  # "Hi"

    Raises:
        LookupError or TypeError: There is no value at the path.
    """
    value = record
    for step in path:
        if step is None:  # the value is a text that holds JSON
            value = try_parse_json(value)
        elif isinstance(step, tuple):  # a span of a text
            start, end = step
            value = value[start:end]
        else:  # the key of an object, or the index of a list
            value = value[step]
    return value


def remove_paths(value: Any, paths: Collection[RecordPath]) -> Any:
    """Copy a value, leaving out what lies at some paths in it.

    - A list or object that becomes empty is left out too: without ("calls", 0), {"calls": [1], "id": 2} is {"id": 2}.
    - A text that becomes empty stays, as "".
    - A span of text is left out if a span inside it becomes empty: marks go with the only call between them.
    - JSON inside a text is written anew, so its spacing may change.

    Args:
        value: The value, such as a record.
        paths: Each path is a tuple of steps into the value: a key, an index, a span of text (start, end), or None,
            which opens the JSON in a text. The path () is the value itself.

    Returns:
        The copy, or NOTHING_LEFT if nothing is left.
    """
    if not paths:
        return value
    if () in paths:
        return NOTHING_LEFT

    inner_paths = _group_paths_by_first_step(paths)
    if isinstance(value, str):
        return _remove_from_text(value, inner_paths)
    if isinstance(value, Mapping):
        return _remove_from_object(value, inner_paths)
    return _remove_from_list(value, inner_paths)


def _remove_from_object(fields: Mapping[Any, Any], inner_paths_by_step: Mapping[PathStep, list[RecordPath]]) -> Any:
    """Copy an object, leaving out what lies at the paths in each field.

    Args:
        fields: The object.
        inner_paths_by_step: The paths to remove inside each field, by its key. The path () removes the field.

    Returns:
        The copy, or NOTHING_LEFT if it has no fields.
    """
    remaining_fields = {}
    for key, value in fields.items():
        remaining_value = remove_paths(value, inner_paths_by_step.get(key, ()))
        if remaining_value is not NOTHING_LEFT:
            remaining_fields[key] = remaining_value
    return remaining_fields or NOTHING_LEFT


def _remove_from_list(items: Sequence[Any], inner_paths_by_step: Mapping[PathStep, list[RecordPath]]) -> Any:
    """Copy a list, leaving out what lies at the paths in each item.

    Args:
        items: The list.
        inner_paths_by_step: The paths to remove inside each item, by its index in `items`. The path () removes the
            item.

    Returns:
        The copy, or NOTHING_LEFT if it has no items.
    """
    remaining_items = []
    for index, item in enumerate(items):
        remaining_item = remove_paths(item, inner_paths_by_step.get(index, ()))
        if remaining_item is not NOTHING_LEFT:
            remaining_items.append(remaining_item)
    return remaining_items or NOTHING_LEFT


def _remove_from_text(text: str, inner_paths_by_step: Mapping[PathStep, list[RecordPath]]) -> Any:
    """Copy a text without some of its spans, or without parts of the JSON that it holds.

    Args:
        text: The text.
        inner_paths_by_step: The paths to remove inside each span, by its offsets. Or, if the text is JSON, the paths
            to remove inside its value, by None.

    Returns:
        The text, or NOTHING_LEFT if nothing is left of its JSON. A text that is no JSON may become "".
    """
    if None not in inner_paths_by_step:
        return _remove_from_spans(text, inner_paths_by_step).text.strip()

    # The step None opens the JSON in the text.
    remaining_value = remove_paths(try_parse_json(text), inner_paths_by_step[None])
    if remaining_value is NOTHING_LEFT:
        return NOTHING_LEFT
    return json.dumps(remaining_value, ensure_ascii=False)


class _RemainingText(NamedTuple):
    """A text from which spans were removed.

    Attributes:
        text: The text that is left.
        has_emptied_span: Whether a span lost all that it held, as marks lose the only call between them.
    """

    text: str
    has_emptied_span: bool


def _remove_from_spans(text: str, inner_paths_by_span: Mapping[PathStep, list[RecordPath]]) -> _RemainingText:
    """Remove spans from a text, or parts of them.

    For example, "Hey you" and {(0, 4): [()]} give "you".

    Args:
        text: The text.
        inner_paths_by_span: The paths to remove inside each span, by its offsets. The path () removes all of the span.

    Returns:
        The text that is left, and whether a span lost all that it held although it was not to be removed as a whole.
    """
    replacements_by_span = dict[TextSpan, str]()
    has_emptied_span = False
    for span in _list_spans_in_order(inner_paths_by_span):
        start, end = span
        inner_paths = inner_paths_by_span[span]
        remaining_span_text = _remove_from_span_text(text[start:end], inner_paths)
        replacements_by_span[span] = remaining_span_text

        is_removed_whole = () in inner_paths
        if not remaining_span_text and not is_removed_whole:
            has_emptied_span = True
    return _RemainingText(_replace_spans(text, replacements_by_span), has_emptied_span)


def _replace_spans(text: str, replacements_by_span: Mapping[TextSpan, str]) -> str:
    """Replace some spans of a text.

    Args:
        text: The text.
        replacements_by_span: The new text for each span (start, end). The spans are in the order of the text, and may
            overlap.
    """
    pieces = []
    copied_end = 0  # everything before this offset is copied or replaced
    for (start, end), replacement in replacements_by_span.items():
        pieces.append(text[copied_end:start])  # empty where the span overlaps the last one
        pieces.append(replacement)
        copied_end = max(copied_end, end)
    pieces.append(text[copied_end:])
    return "".join(pieces)


def _remove_from_span_text(span_text: str, paths: Collection[RecordPath]) -> str:
    """Remove what lies at some paths in a span of text, such as a call with its marks.

    Args:
        span_text: The text of the span.
        paths: The paths inside the span, for example:
            - (): the whole span
            - (None, "calls", 0): the span is JSON, which None opens; the first of its calls is removed
            - ((11, 25), None, 1): characters 11 to 24 are a list in JSON, whose second item is removed

    Returns:
        The text that is left. It is "" if nothing is left, or if a span inside it lost all that it held: marks are
        removed with the only call between them. "<call>[CALL]</call>" without ((6, 12), None, 0) becomes "".
    """
    if () in paths:
        return ""

    inner_paths = _group_paths_by_first_step(paths)
    if None in inner_paths:  # the span is JSON
        remaining_json = _remove_from_text(span_text, inner_paths)
        return "" if remaining_json is NOTHING_LEFT else str(remaining_json)

    remaining = _remove_from_spans(span_text, inner_paths)
    if remaining.has_emptied_span or not remaining.text.strip():
        return ""
    return remaining.text


def _list_spans_in_order(path_steps: Iterable[PathStep]) -> list[TextSpan]:
    """List the steps that are spans of text, in the order of the text. Keys, indexes and None are left out."""
    return sorted(step for step in path_steps if isinstance(step, tuple))


def _group_paths_by_first_step(paths: Collection[RecordPath]) -> dict[PathStep, list[RecordPath]]:
    """Group paths by their first step: {"a": [(0,), (1,)]} for ("a", 0) and ("a", 1)."""
    inner_paths_by_step = defaultdict[PathStep, list[RecordPath]](list)
    for path in paths:
        first_step = path[0]
        inner_paths_by_step[first_step].append(path[1:])
    return inner_paths_by_step
