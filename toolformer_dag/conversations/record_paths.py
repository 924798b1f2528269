"""Paths to the values inside a record, and records without what lies at some of them."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import parsed

Step = str | int | None | tuple[int, int]
"""A step from a value to one inside it:

- a key of an object, or an index of a list
- None: a text is opened as JSON
- a pair: the first character of a stretch of text, and the one after its last
"""
Path = tuple[Step, ...]
"""The steps from a record to a value in it; () is the record itself. JSON stores it as a list, pairs as lists too.

("messages", None, 2, "content", (11, 58)) is the text from character 11 to 57 of the content of the third message,
where the messages are a list in JSON that is stored as text.
"""
GONE = object()
"""What is left of a value of which nothing is left."""


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

    - A list or an object that is emptied goes too: without ("calls", 0), {"calls": [1], "id": 2} becomes {"id": 2}.
    - Text that is emptied stays as "".
    - A stretch of text goes with a stretch inside it that is emptied, as the marks around the only call between them.
    - JSON inside text is written again, so its spacing may change.
    """
    if not paths:
        return value
    if () in paths:
        return GONE
    by_step = _by_first_step(paths)
    if isinstance(value, str):
        return _text_without(value, by_step)
    if isinstance(value, Mapping):
        left = {key: without(item, by_step.get(key, ())) for key, item in value.items()}
        return {key: item for key, item in left.items() if item is not GONE} or GONE
    items = [without(item, by_step.get(index, ())) for index, item in enumerate(value)]
    return [item for item in items if item is not GONE] or GONE


def _text_without(text: str, by_step: Mapping[Step, list[Path]]) -> Any:
    """Return a text without some of its stretches, or without parts of the JSON that it holds."""
    if None in by_step:
        left = without(parsed(text), by_step[None])
        return GONE if left is GONE else json.dumps(left, ensure_ascii=False)
    return _without_stretches(text, by_step).text.strip()


class _TextLeft(NamedTuple):
    """What is left of a text.

    - `text`: the rest
    - `has_emptied`: whether a stretch was emptied by what was removed inside it, as marks around the only call
    """

    text: str
    has_emptied: bool


def _without_stretches(text: str, by_step: Mapping[Step, list[Path]]) -> _TextLeft:
    """Remove stretches of a text, or parts of them.

    by_step: for each stretch the paths that are removed inside it; () removes it whole.
    """
    kept: list[Any] = []
    end_before = 0
    has_emptied = False
    for start, end in sorted(step for step in by_step if isinstance(step, tuple)):
        kept.append(text[end_before:start])
        paths = by_step[start, end]
        is_removed = () in paths
        left = GONE if is_removed else _stretch_without(text[start:end], paths)
        if left is not GONE:
            kept.append(left)
        elif not is_removed:
            has_emptied = True
        end_before = max(end_before, end)
    kept.append(text[end_before:])
    return _TextLeft("".join(kept), has_emptied)


def _stretch_without(stretch: str, paths: Collection[Path]) -> Any:
    """Return a stretch of text without what lies at these paths; GONE where nothing of it, or of a part, is left."""
    by_step = _by_first_step(paths)
    if None in by_step:
        return _text_without(stretch, by_step)
    left = _without_stretches(stretch, by_step)
    return GONE if left.has_emptied or not left.text.strip() else left.text


def _by_first_step(paths: Collection[Path]) -> dict[Step, list[Path]]:
    """Return the rest of each path by its first step: {"a": [(0,), (1,)]} for ("a", 0) and ("a", 1)."""
    by_step = defaultdict[Step, list[Path]](list)
    for path in paths:
        by_step[path[0]].append(path[1:])
    return by_step
