"""Paths to the values inside a record, and copies of a record without the values at some paths."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import parsed

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


def value_at(record: Any, path: Path) -> Any:
    """Return the value at a path. Raises LookupError or TypeError where there is none."""
    value = record
    for step in path:
        if step is None:
            value = parsed(value)
        elif isinstance(step, tuple):
            value = value[slice(*step)]
        else:
            value = value[step]
    return value


def without(value: Any, paths: Collection[Path]) -> Any:
    """Return a copy of a value without what lies at these paths; GONE where nothing is left.

    - An emptied list or object goes too: without ("calls", 0), {"calls": [1], "id": 2} becomes {"id": 2}.
    - Emptied text stays as "".
    - A stretch of text goes where a stretch inside it is emptied: the marks around the only call between them.
    - JSON inside text is written anew, so its spacing may change.
    """
    if not paths:
        return value
    if () in paths:
        return GONE
    by_step = _by_first_step(paths)
    if isinstance(value, str):
        return _text_without(value, by_step)
    if isinstance(value, Mapping):
        return _object_without(value, by_step)
    return _list_without(value, by_step)


def _object_without(fields: Mapping[Any, Any], by_step: Mapping[Step, list[Path]]) -> Any:
    """Return an object without what lies at paths by their first step; GONE where no field is left."""
    fields_left = {}
    for key, item in fields.items():
        item_left = without(item, by_step.get(key, ()))
        if item_left is not GONE:
            fields_left[key] = item_left
    return fields_left or GONE


def _list_without(items: Sequence[Any], by_step: Mapping[Step, list[Path]]) -> Any:
    """Return a list without what lies at paths by their first step; GONE where no item is left."""
    items_left = []
    for index, item in enumerate(items):
        item_left = without(item, by_step.get(index, ()))
        if item_left is not GONE:
            items_left.append(item_left)
    return items_left or GONE


def _text_without(text: str, by_step: Mapping[Step, list[Path]]) -> Any:
    """Return a text without some of its stretches, or without parts of the JSON that it holds."""
    if None in by_step:
        left = without(parsed(text), by_step[None])
        return GONE if left is GONE else json.dumps(left, ensure_ascii=False)
    return _without_stretches(text, by_step).text.strip()


class _TextLeft(NamedTuple):
    """A text from which stretches were removed.

    - `text`: the rest
    - `has_emptied`: whether removing something inside a stretch left nothing of it, as of marks around the only call
    """

    text: str
    has_emptied: bool


def _without_stretches(text: str, by_step: Mapping[Step, list[Path]]) -> _TextLeft:
    """Return a text without the stretches of `by_step`, or without parts of them.

    by_step: the paths to remove inside each stretch; () removes it whole.
    """
    stretches_left = dict[Span, str]()
    has_emptied = False
    for span in _spans(by_step):
        stretch_left = _stretch_without(text[slice(*span)], by_step[span])
        stretches_left[span] = stretch_left
        if not stretch_left and () not in by_step[span]:
            has_emptied = True
    return _TextLeft(_with_stretches(text, stretches_left), has_emptied)


def _with_stretches(text: str, replacements: Mapping[Span, str]) -> str:
    """Return a text with other text in place of some stretches, which are in its order and may overlap."""
    pieces = []
    position = 0
    for (start, end), replacement in replacements.items():
        pieces.append(text[position:start])
        pieces.append(replacement)
        position = max(position, end)
    pieces.append(text[position:])
    return "".join(pieces)


def _stretch_without(stretch: str, paths: Collection[Path]) -> str:
    """Return a stretch of text without what lies at these paths; "" where nothing of it, or of a part, is left."""
    if () in paths:
        return ""
    by_step = _by_first_step(paths)
    if None in by_step:
        json_left = _text_without(stretch, by_step)
        return "" if json_left is GONE else str(json_left)
    left = _without_stretches(stretch, by_step)
    return "" if left.has_emptied or not left.text.strip() else left.text


def _spans(steps: Iterable[Step]) -> list[Span]:
    """Return the steps that are stretches of text, in the order of the text."""
    return sorted(step for step in steps if isinstance(step, tuple))


def _by_first_step(paths: Collection[Path]) -> dict[Step, list[Path]]:
    """Return the rest of each path by its first step: {"a": [(0,), (1,)]} for ("a", 0) and ("a", 1)."""
    by_step = defaultdict[Step, list[Path]](list)
    for path in paths:
        by_step[path[0]].append(path[1:])
    return by_step
