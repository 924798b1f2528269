"""Ways to the values inside a record, and records without what lies at some of them."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from toolformer_dag.conversations.plain_values import parsed

Step = str | int | None | tuple[int, int]
Path = tuple[Step, ...]
"""The way from a record to a value in it: a key, an index, None where a text is opened as JSON, or the first character
and the one after the last of a stretch of text. JSON can store it; a pair is a list there.

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
    """Return a copy of a value without what lies at these paths; GONE where that is all of it.

    A list or an object that is emptied by that goes too, text that is emptied stays as "". So does a stretch of text in
    which one is emptied, as the marks around the only call that stood between them. JSON inside text is written again,
    so its spacing may change.
    """
    if not paths:
        return value
    if () in paths:
        return GONE
    by_step = defaultdict[Step, list[Path]](list)
    for path in paths:
        by_step[path[0]].append(path[1:])
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
    return _without_stretches(text, by_step)[0].strip()


def _without_stretches(text: str, by_step: Mapping[Step, list[Path]]) -> tuple[str, bool]:
    """Return a text without some of its stretches, or parts of them, and whether a part emptied its stretch."""
    kept = []
    end_before = 0
    has_emptied = False
    for start, end in sorted(step for step in by_step if isinstance(step, tuple)):
        kept.append(text[end_before:start])
        paths = by_step[start, end]
        if () not in paths:
            left = _stretch_without(text[start:end], paths)
            has_emptied = has_emptied or left is GONE
            kept.append("" if left is GONE else left)
        end_before = max(end_before, end)
    kept.append(text[end_before:])
    return "".join(kept), has_emptied


def _stretch_without(stretch: str, paths: Collection[Path]) -> Any:
    """Return a stretch of text without what lies at these paths; GONE where nothing of it, or of a part, is left."""
    by_step = defaultdict[Step, list[Path]](list)
    for path in paths:
        by_step[path[0]].append(path[1:])
    if None in by_step:
        return _text_without(stretch, by_step)
    left, has_emptied = _without_stretches(stretch, by_step)
    return GONE if has_emptied or not left.strip() else left
