"""Look for calls in records from which none was read, so that no call is skipped silently."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from toolformer_dag.conversations.shapes import CALL_LISTS, PASSIVE_FIELDS, find_shape

MOST_VALUES = 100_000
"""Lists and objects of a record that are looked at."""
CALL_FIELDS = ({"name", "arguments"}, {"name", "args"}, {"function", "arguments"}, {"tool", "arguments"})
"""Fields that make an object a call where it has them together."""
DEFINITIONS = (*PASSIVE_FIELDS, "tool_definitions", "tool_schemas", "evaluation_criteria", "expected_tools")
"""Fields that describe tools, or calls that are expected and were not made."""


def find_unread_call(record: Any) -> str | None:
    """Find a value in a record that looks like a call, by the names of fields.

    Outer values are searched before inner ones. Fields that describe tools are skipped, and at most MOST_VALUES lists
    and objects are looked at.

    Returns:
        The path to the value, such as "rejected.1.tool_calls", or None if there is none.
    """
    waiting = deque([_Value(path="", name="", value=record)])
    for _ in range(MOST_VALUES):
        if not waiting:
            return None

        outer = waiting.popleft()
        if outer.is_call:
            return outer.path or "the record"

        for inner in outer.iter_inner_values():
            if inner.is_call_list:  # by its field's name, so what it holds need not be looked at
                return inner.path
            waiting.append(inner)
    return None


class _Value(NamedTuple):
    """A list or an object inside a record.

    - `path`: the path to it, such as "rejected.1"; "" for the record itself
    - `name`: the last step of the path
    """

    path: str
    name: str
    value: Any

    @property
    def is_call_list(self) -> bool:
        """Whether the value stands in a field for calls."""
        return self.name in CALL_LISTS and bool(self.value)

    @property
    def is_call(self) -> bool:
        """Whether the value is an object with the fields of a call."""
        return isinstance(self.value, Mapping) and _has_call_fields(self.value)

    def iter_inner_values(self) -> Iterator["_Value"]:
        """Yield the lists and objects among the fields or items."""
        for name, item in _list_items(self.value):
            if isinstance(item, list | Mapping):
                path = f"{self.path}.{name}" if self.path else name
                yield _Value(path, name, item)


def _list_items(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a list by their indexes, or the fields of an object except those that describe tools."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items() if key not in DEFINITIONS]
    if isinstance(value, list):
        return [(str(index), item) for index, item in enumerate(value[:MOST_VALUES])]
    return []


def _has_call_fields(fields: Mapping[str, Any]) -> bool:
    """Return whether an object is a call, by its fields or by its shape."""
    if any(all(fields.get(name) is not None for name in names) for names in CALL_FIELDS):
        return True
    shaped = find_shape(fields)
    has_call_shape = shaped is not None and bool(shaped.shape.tool) and bool(shaped.shape.arguments)
    return has_call_shape and fields.get("type") != "function"  # a definition of a tool has this type too
