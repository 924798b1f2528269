"""Read values of records: JSON that is stored as text, contents as text, arguments as an object."""

import ast
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

LONGEST_LITERAL = 20_000
"""Characters of the longest Python literal that is read: its syntax tree takes some 500 times as much memory."""
DEEPEST = 100
"""Levels of nesting of a record that is read; recorded conversations have some twenty."""
JSON_IN_JSON = 3
"""How many times arguments may be written as JSON inside JSON."""
BEGINS_JSON = ("{", "[")
MEDIA = ("image", "image_url", "input_image", "input_audio", "audio", "video", "file", "document", "input_file")
"""Types of content parts that are no text; `[image]` and its like stand for them."""
TYPES_WITH_VALUE = ("text", "output_text", "input_text")
"""Types of content parts whose text may stand in the field `value`."""


def parse_json(text: str) -> Any:
    """Parse a text that holds an object or a list, in JSON or as a Python literal.

    Early data sets such as Hermes and glaive hold Python literals, such as `{'a': 1}`.

    Returns:
        The object or list. None for any other text, and for a value that JSON cannot hold, such as half of a surrogate
        pair.
    """
    first_character = text[:1_000].lstrip()[:1]
    if first_character not in BEGINS_JSON:
        return None

    with suppress(ValueError, RecursionError):
        return _check_json(json.loads(text))

    if len(text) <= LONGEST_LITERAL:
        literal = text.strip().replace("\n", " ")  # glaive breaks lines inside quoted text
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return _check_json(ast.literal_eval(literal))
    return None


@lru_cache(maxsize=4)
def parse_json_field(text: str) -> Any:
    """Return `parse_json(text)`, cached for the few fields of a record that every form looks into."""
    return parse_json(text)


def _check_json(value: Any) -> Any:
    """Return a value unchanged if JSON can hold it.

    Raises:
        ValueError or TypeError: JSON cannot hold the value, or it is nested too deep.
    """
    if is_too_deep(value):
        raise ValueError("too deep")
    json.dumps(value, ensure_ascii=False).encode()
    return value


def is_too_deep(value: Any) -> bool:
    """Tell whether lists and objects are nested more than DEEPEST levels deep, without recursion."""
    level = [value]  # all values at one depth
    for _ in range(DEEPEST):
        level = _list_inner_containers(level)
        if not level:
            return False
    return True


def _list_inner_containers(level: Iterable[Any]) -> list[Any]:
    """Return the objects and lists that are fields or items of these values."""
    inner = list[Any]()
    for item in level:
        if isinstance(item, Mapping):
            inner.extend(item.values())
        elif isinstance(item, list | tuple):
            inner.extend(item)
    return [item for item in inner if isinstance(item, Mapping | list | tuple)]


def find_value(value: Any, paths: tuple[str, ...]) -> Any:
    """Find the first value that is not null at some paths in an object.

    Args:
        value: The object.
        paths: Keys such as "name", or several keys with dots between them, such as "function.name".

    Returns:
        The value, or None if there is none.
    """
    for path in paths:
        inner = value
        for key in path.split("."):
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if inner is not None:
            return inner
    return None


def list_at(value: Any, path: str) -> list[Any]:
    """Return the list at a path such as `message.tool_calls`; an empty list where there is none."""
    items = find_value(value, (path,))
    return items if isinstance(items, list) else []


def to_text(content: Any) -> str:
    """Convert a content to text.

    Returns:
        The content itself if it is a text, the joined texts of its parts if all of them are texts or media such as
        images, or else its JSON. A content that is missing (None) becomes "".
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_has_text, content)):
        return "".join(map(_format_part, content))
    return json.dumps(content, ensure_ascii=False)


def _has_text(part: Any) -> bool:
    """Return whether a content part holds text, or is a medium such as an image."""
    if not isinstance(part, Mapping):
        return isinstance(part, str)
    has_text_field = any(key in part for key in ("text", "thinking", "json"))
    return has_text_field or part.get("type") in MEDIA or _has_text_as_value(part)


def _has_text_as_value(part: Mapping[str, Any]) -> bool:
    """Return whether a content part is a text that stands in the field `value`."""
    return part.get("type") in TYPES_WITH_VALUE and "value" in part


def _format_part(part: Any) -> str:
    """Convert a content part to text.

    Returns:
        The text of the part. A medium such as an image is replaced with its type in brackets, as "[image]".
    """
    if not isinstance(part, Mapping):
        return str(part)
    text = find_value(part, ("text", "text.value", "thinking"))
    if isinstance(text, str):
        return text
    if part.get("json") is not None:  # in results of Bedrock
        return to_text(part["json"])
    if _has_text_as_value(part) and isinstance(part["value"], str):
        return part["value"]
    return _format_placeholder(part)


def _format_placeholder(part: Mapping[str, Any]) -> str:
    """Return what stands for a content part without text: its type in brackets, or the part in JSON."""
    kind = part.get("type")
    return json.dumps(part, ensure_ascii=False) if kind is None else f"[{kind}]"


def arguments_of(recorded: Any) -> Any:
    """Convert the arguments of a call to an object, however they were recorded.

    - JSON is read, also JSON inside JSON: `"{\\"city\\": \\"Oslo\\"}"`
    - null and empty text become `{}`
    - nulls of an object are left out, because tables with a column per argument fill empty cells with them
    - nulls in JSON stay

    Returns:
        The object, or `{"input": recorded}` if the arguments are no object.
    """
    if recorded is None:
        return {}
    if isinstance(recorded, Mapping):
        return _without_nulls(recorded)

    value = recorded
    for _ in range(JSON_IN_JSON):  # JSON may hold a text that is JSON again
        if not isinstance(value, str):
            break
        text = value.strip()
        if text in ("", "null"):
            return {}
        value = _parse_json_text(text)  # None for a text that is no JSON

    return value if isinstance(value, Mapping) else {"input": recorded}


def _parse_json_text(text: str) -> Any:
    """Parse a text that holds an object, a list or a string in JSON.

    Returns:
        The value, or None for any other text.
    """
    if text.startswith('"'):
        with suppress(ValueError):
            return json.loads(text)
        return None
    return parse_json(text)


def _without_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an object, leaving out nulls, also in the objects inside it."""
    values = {}
    for name, value in arguments.items():
        if value is not None:
            values[name] = _without_nulls(value) if isinstance(value, Mapping) else value
    return values
