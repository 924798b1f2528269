"""Calls in records from which none was read: nothing that an agent did vanishes without a word."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from toolformer_dag.conversations.shapes import CALL_LISTS, PASSIVE_FIELDS, shape_of

MOST_VALUES = 100_000
"""Lists and objects of a record that are looked at."""
CALL_FIELDS = ({"name", "arguments"}, {"name", "args"}, {"function", "arguments"}, {"tool", "arguments"})
"""Fields that an object has together where it is a call, whatever it stands under."""
DEFINITIONS = (*PASSIVE_FIELDS, "tool_definitions", "tool_schemas", "evaluation_criteria", "expected_tools")
"""Fields that describe tools, or the calls that somebody expects: those were not made."""


def unread_call(record: Any) -> str | None:
    """Return where the first thing stands in a record that looks like a call, as "rejected.1.tool_calls"; else None.

    Only names of fields tell. The values nearest to the record come first; text, and what describes tools, is not
    looked into. At most MOST_VALUES lists and objects are.
    """
    waiting = deque[tuple[str, Any]]([("", record)])
    for _ in range(MOST_VALUES):
        if not waiting:
            return None
        place, value = waiting.popleft()
        if isinstance(value, Mapping) and _is_call(value):
            return place or "the record"
        for name, item in _items_of(value):
            if not isinstance(item, list | Mapping):
                continue
            item_place = f"{place}.{name}" if place else name
            if name in CALL_LISTS and item:
                return item_place
            waiting.append((item_place, item))
    return None


def _items_of(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a list by their numbers, or the fields of an object but those that describe tools."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items() if key not in DEFINITIONS]
    if isinstance(value, list):
        return [(str(index), item) for index, item in enumerate(value[:MOST_VALUES])]
    return []


def _is_call(value: Mapping[str, Any]) -> bool:
    """Return whether an object has the fields of a call."""
    shaped = shape_of(value)
    is_part = shaped is not None and bool(shaped[0].tool) and bool(shaped[0].arguments)
    has_fields = any(all(value.get(name) is not None for name in names) for names in CALL_FIELDS)
    return has_fields or (is_part and value.get("type") != "function")
