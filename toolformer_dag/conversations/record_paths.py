"""Paths to the values inside a record, and copies of a record without the values at some paths."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import parse_json

Span = tuple[int, int]
"""A stretch of text: the offsets of its first character and of the one behind its last."""
Step = str | int | None | Span
"""A step from a value to one inside it:

- a key of an object, or an index of a list
- None: a text is opened as JSON
- a pair (start, end): a stretch of text, by character offsets
"""
Path = tuple[Step, ...]
"""The steps from a record to a value in it; () is the record itself. JSON stores it as a list, pairs as lists too.

("messages", None, 2, "content", (11, 58)) is the text from character 11 to 57 of the content of the third message,
where the messages are a list in JSON that is stored as text.
"""
GONE = object()
"""Stands for a value of which nothing is left."""


def get_value_at(record: Any, path: Path) -> Any:
    """Get the value at a path in a record.

    Example:
        get_value_at({"messages": [{"content": "Hi"}]}, ("messages", 0, "content"))  # "Hi"

    Raises:
        LookupError or TypeError: There is no value at the path.
    """
    value = record
    for step in path:
        if step is None:  # the value is a text that holds JSON
            value = parse_json(value)
        elif isinstance(step, tuple):  # a stretch of a text
            start, end = step
            value = value[start:end]
        else:  # the key of an object, or the index of a list
            value = value[step]
    return value


def without(value: Any, paths: Collection[Path]) -> Any:
    """Copy a value, leaving out what lies at some paths in it.

    - A list or object that becomes empty is left out too: without ("calls", 0), {"calls": [1], "id": 2} is {"id": 2}.
    - A text that becomes empty stays, as "".
    - A stretch of text is left out if a stretch inside it becomes empty: marks go with the only call between them.
    - JSON inside a text is written anew, so its spacing may change.

    Args:
        value: The value.
        paths: Each path is a tuple of steps into the value: a key, an index, a stretch of text (start, end), or None,
            which opens the JSON in a text. The path () is the value itself.

    Returns:
        The copy, or GONE if nothing is left.
    """
    if not paths:
        return value
    if () in paths:
        return GONE

    inner_paths = _group_paths_by_first_step(paths)
    if isinstance(value, str):
        return _without_in_text(value, inner_paths)
    if isinstance(value, Mapping):
        return _without_in_object(value, inner_paths)
    return _without_in_list(value, inner_paths)


def _without_in_object(fields: Mapping[Any, Any], inner_paths: Mapping[Step, list[Path]]) -> Any:
    """Copy an object, leaving out what lies at the paths in each field.

    Returns:
        The copy, or GONE if no field is left.
    """
    fields_left = {}
    for key, item in fields.items():
        item_left = without(item, inner_paths.get(key, ()))
        if item_left is not GONE:
            fields_left[key] = item_left
    return fields_left or GONE


def _without_in_list(items: Sequence[Any], inner_paths: Mapping[Step, list[Path]]) -> Any:
    """Copy a list, leaving out what lies at the paths in each item.

    Returns:
        The copy, or GONE if no item is left.
    """
    items_left = []
    for index, item in enumerate(items):
        item_left = without(item, inner_paths.get(index, ()))
        if item_left is not GONE:
            items_left.append(item_left)
    return items_left or GONE


def _without_in_text(text: str, inner_paths: Mapping[Step, list[Path]]) -> Any:
    """Return a text without some of its stretches, or without parts of the JSON that it holds."""
    if None in inner_paths:  # the text is JSON
        left = without(parse_json(text), inner_paths[None])
        return GONE if left is GONE else json.dumps(left, ensure_ascii=False)
    return _without_stretches(text, inner_paths).text.strip()


class _TextLeft(NamedTuple):
    """A text from which stretches were removed.

    - `text`: the rest
    - `has_emptied`: whether a stretch lost all that it held, as marks lose the only call between them
    """

    text: str
    has_emptied: bool


def _without_stretches(text: str, inner_paths: Mapping[Step, list[Path]]) -> _TextLeft:
    """Remove stretches from a text, or parts of them.

    For example, "Hey you" and {(0, 4): [()]} give "you".

    Args:
        text: The text.
        inner_paths: For each stretch, by its offsets, the paths to remove inside it. The path () removes all of it.
    """
    replacements = dict[Span, str]()
    has_emptied = False
    for span in _list_spans(inner_paths):
        start, end = span
        stretch_left = _without_in_stretch(text[start:end], inner_paths[span])
        replacements[span] = stretch_left

        is_removed_whole = () in inner_paths[span]
        if not stretch_left and not is_removed_whole:
            has_emptied = True
    return _TextLeft(_with_stretches(text, replacements), has_emptied)


def _with_stretches(text: str, replacements: Mapping[Span, str]) -> str:
    """Replace some stretches of a text.

    Args:
        text: The text.
        replacements: The new text for each stretch. The stretches are in the order of the text, and may overlap.
    """
    pieces = []
    copied_end = 0  # the text before it is copied or replaced
    for (start, end), replacement in replacements.items():
        pieces.append(text[copied_end:start])  # empty where the stretch overlaps the last one
        pieces.append(replacement)
        copied_end = max(copied_end, end)
    pieces.append(text[copied_end:])
    return "".join(pieces)


def _without_in_stretch(stretch: str, paths: Collection[Path]) -> str:
    """Remove what lies at some paths in a stretch of text, such as a call with its marks.

    Args:
        stretch: The text of the stretch.
        paths: The paths inside the stretch, for example:
            - (): the whole stretch
            - (None, "calls", 0): the stretch is JSON, which None opens; the first of its calls is removed
            - ((11, 25), None, 1): characters 11 to 24 are a list in JSON, whose second item is removed

    Returns:
        The text that is left. It is "" if nothing is left, or if a stretch inside it lost all that it held: marks are
        removed with the only call between them.
    """
    if () in paths:
        return ""

    inner_paths = _group_paths_by_first_step(paths)
    if None in inner_paths:  # the stretch is JSON
        json_left = _without_in_text(stretch, inner_paths)
        return "" if json_left is GONE else str(json_left)

    left = _without_stretches(stretch, inner_paths)
    if left.has_emptied or not left.text.strip():
        return ""
    return left.text


def _list_spans(steps: Iterable[Step]) -> list[Span]:
    """Return the steps that are stretches of text, in the order of the text."""
    return sorted(step for step in steps if isinstance(step, tuple))


def _group_paths_by_first_step(paths: Collection[Path]) -> dict[Step, list[Path]]:
    """Return the rest of each path by its first step: {"a": [(0,), (1,)]} for ("a", 0) and ("a", 1)."""
    inner_paths = defaultdict[Step, list[Path]](list)
    for path in paths:
        inner_paths[path[0]].append(path[1:])
    return inner_paths
