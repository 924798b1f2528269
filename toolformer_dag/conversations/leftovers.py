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
    """Return the way to the first thing in a record that looks like a call, such as `rejected.1.tool_calls`; else None.

    By the names of fields alone; what describes tools is passed over, and so is text.
    """
    waiting = deque[tuple[str, Any]]([("", record)])
    looked_at = 0
    while waiting and looked_at < MOST_VALUES:
        way, value = waiting.popleft()
        looked_at += 1
        if isinstance(value, list):
            below = [(str(index), item) for index, item in enumerate(value[:MOST_VALUES])]
        else:
            below = [(str(key), item) for key, item in value.items() if key not in DEFINITIONS]
            if _is_call(value):
                return way or "the record"
        for name, item in below:
            inner = f"{way}.{name}" if way else name
            if name in CALL_LISTS and isinstance(item, list | Mapping) and item:
                return inner
            if isinstance(item, list | Mapping):
                waiting.append((inner, item))
    return None


def _is_call(value: Mapping[str, Any]) -> bool:
    """Return whether an object has the fields of a call."""
    shaped = shape_of(value)
    is_part = shaped is not None and bool(shaped[0].tool) and bool(shaped[0].arguments)
    has_fields = any(all(value.get(name) is not None for name in names) for names in CALL_FIELDS)
    return has_fields or (is_part and value.get("type") != "function")
