"""Look for calls in records from which none was read, so that no call is skipped silently."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from toolformer_dag.conversations.shapes import CALL_LISTS, FIELDS_WITHOUT_CALLS, find_shaped_object

MAX_VALUES = 100_000
"""Lists and objects of a record that are looked at."""
CALL_FIELD_SETS = ({"name", "arguments"}, {"name", "args"}, {"function", "arguments"}, {"tool", "arguments"})
"""Fields that make an object a call where it has them together."""
SKIPPED_FIELDS = (*FIELDS_WITHOUT_CALLS, "tool_definitions", "tool_schemas", "evaluation_criteria", "expected_tools")
"""Fields that describe tools, or calls that are expected and were not made."""


def find_unread_call_path(record: Any) -> str | None:
    """Find a value in a record that looks like a call, by the names of fields.

    Outer values are searched before inner ones. Fields that describe tools are skipped, and at most MAX_VALUES lists
    and objects are looked at.

    Returns:
        The path to the value, such as "rejected.1.tool_calls", or None if there is none. For the record itself, "the
        record".
    """
    waiting_values = deque([_NestedValue(dotted_path="", name="", value=record)])
    for _ in range(MAX_VALUES):
        if not waiting_values:
            return None

        outer_value = waiting_values.popleft()
        if outer_value.is_call:
            return outer_value.dotted_path or "the record"

        for inner_value in outer_value.iter_inner_values():
            if inner_value.is_call_list:  # known by its field's name, so what it holds need not be looked at
                return inner_value.dotted_path
            waiting_values.append(inner_value)
    return None


class _NestedValue(NamedTuple):
    """A list or an object inside a record.

    Attributes:
        dotted_path: The path to it, such as "rejected.1", or "" for the record itself.
        name: The last step of the path.
    """

    dotted_path: str
    name: str
    value: Any

    @property
    def is_call_list(self) -> bool:
        """Whether the value stands in a field for calls, such as `tool_calls`, and is not empty."""
        return self.name in CALL_LISTS and bool(self.value)

    @property
    def is_call(self) -> bool:
        """Whether the value is an object with the fields of a call."""
        return isinstance(self.value, Mapping) and _has_call_fields(self.value)

    def iter_inner_values(self) -> Iterator["_NestedValue"]:
        """Yield the lists and objects among the fields or items."""
        for name, item in _list_named_items(self.value):
            if isinstance(item, list | Mapping):
                inner_path = f"{self.dotted_path}.{name}" if self.dotted_path else name
                yield _NestedValue(inner_path, name, item)


def _list_named_items(value: Any) -> list[tuple[str, Any]]:
    """List the fields of an object by their names, or the items of a list by their indexes.

    Returns:
        Pairs of a name and a value, such as ("tools", [...]) or ("0", {...}), without fields that describe tools. The
        list is empty for a value that is neither an object nor a list.
    """
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items() if key not in SKIPPED_FIELDS]
    if isinstance(value, list):
        return [(str(index), item) for index, item in enumerate(value[:MAX_VALUES])]
    return []


def _has_call_fields(fields: Mapping[str, Any]) -> bool:
    """Return whether an object looks like a call.

    Examples:
        {"name": "add", "arguments": "{}"} has a set of fields in CALL_FIELD_SETS. {"type": "tool_use", "name": "add"}
        has a type whose shape (its known fields) names a tool and arguments. {"type": "tool_result"} is no call.
    """
    for field_set in CALL_FIELD_SETS:
        if all(fields.get(name) is not None for name in field_set):
            return True

    if fields.get("type") == "function":  # the definition of a tool has this type too
        return False
    shaped_object = find_shaped_object(fields)
    if shaped_object is None:
        return False
    return bool(shaped_object.shape.tool_fields) and bool(shaped_object.shape.argument_fields)
