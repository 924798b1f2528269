"""Read values of records: JSON that is stored as text, contents as text, arguments as an object."""

import ast
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

MAX_LITERAL_LENGTH = 20_000
"""Characters of the longest Python literal that is read: its syntax tree takes some 500 times as much memory."""
MAX_NESTING_DEPTH = 100
"""Levels of nesting of a record that is read; recorded conversations have some twenty."""
MAX_JSON_LAYERS = 3
"""How many times arguments may be written as JSON inside JSON."""
JSON_OPENING_BRACKETS = ("{", "[")
MEDIA_TYPES = ("image", "image_url", "input_image", "input_audio", "audio", "video", "file", "document", "input_file")
"""Types of content parts that are no text; `[image]` and its like stand for them."""
TEXT_TYPES_WITH_VALUE = ("text", "output_text", "input_text")
"""Types of content parts whose text may stand in the field `value`."""


def try_parse_json(text: str) -> Any:
    """Parse a text that holds an object or a list, in JSON or as a Python literal.

    Early data sets such as Hermes and glaive hold Python literals, such as `{'a': 1}`.

    Returns:
        The object or list. None for any other text, and for a value that JSON cannot hold, such as half of a surrogate
        pair.
    """
    first_character = text[:1_000].lstrip()[:1]
    if first_character not in JSON_OPENING_BRACKETS:
        return None

    with suppress(ValueError, RecursionError):
        return _validate_json_value(json.loads(text))

    if len(text) <= MAX_LITERAL_LENGTH:
        literal = text.strip().replace("\n", " ")  # glaive breaks lines inside quoted text
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return _validate_json_value(ast.literal_eval(literal))
    return None


@lru_cache(maxsize=4)
def try_parse_json_cached(text: str) -> Any:
    """Do what `try_parse_json` does, with a cache for the few fields of a record that every form looks into."""
    return try_parse_json(text)


def _validate_json_value(value: Any) -> Any:
    """Return a value unchanged if JSON can hold it.

    Raises:
        ValueError: The value is nested too deep, or holds text that UTF-8 cannot encode.
        TypeError: JSON cannot hold the value, such as a set.
    """
    if is_nested_too_deep(value):
        raise ValueError("too deep")

    json.dumps(value, ensure_ascii=False).encode()  # only to see whether it fails
    return value


def is_nested_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than MAX_NESTING_DEPTH levels deep.

    The value is searched level by level, without recursion, since recursion would fail on values nested very deep.
    """
    values_at_depth = [value]
    for _ in range(MAX_NESTING_DEPTH):
        values_at_depth = _list_inner_containers(values_at_depth)
        if not values_at_depth:
            return False
    return True


def _list_inner_containers(containers: Iterable[Any]) -> list[Any]:
    """List the objects and lists that are fields or items of these objects and lists, one level deeper."""
    inner_values = list[Any]()
    for container in containers:
        if isinstance(container, Mapping):
            inner_values.extend(container.values())
        elif isinstance(container, list | tuple):
            inner_values.extend(container)
    return [inner for inner in inner_values if isinstance(inner, Mapping | list | tuple)]


def find_first_value(value: Any, dotted_paths: tuple[str, ...]) -> Any:
    """Find the first value that is not null at some paths in an object.

    Args:
        value: The object.
        dotted_paths: Keys such as "name", or several keys with dots between them, such as "function.name".

    Returns:
        The value, or None if there is none.
    """
    for dotted_path in dotted_paths:
        inner_value = value
        for key in dotted_path.split("."):
            inner_value = inner_value.get(key) if isinstance(inner_value, Mapping) else None
        if inner_value is not None:
            return inner_value
    return None


def get_list_at(value: Any, dotted_path: str) -> list[Any]:
    """Return the list at a path such as `message.tool_calls`, or an empty list if there is none."""
    items = find_first_value(value, (dotted_path,))
    return items if isinstance(items, list) else []


def convert_to_text(content: Any) -> str:
    """Convert a content to text.

    Returns:
        The content itself if it is a text, the joined texts of its parts if all of them are texts or media such as
        images, or else its JSON. A content that is missing (None) becomes "".
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content

    is_list_of_parts = isinstance(content, list) and all(map(_is_text_or_media, content))
    if is_list_of_parts:
        return "".join(map(_convert_part_to_text, content))
    return json.dumps(content, ensure_ascii=False)


def _is_text_or_media(content_part: Any) -> bool:
    """Return whether a content part holds text, or is a medium such as an image."""
    if not isinstance(content_part, Mapping):
        return isinstance(content_part, str)

    if any(key in content_part for key in ("text", "thinking", "json")):
        return True
    if content_part.get("type") in MEDIA_TYPES:
        return True
    return _has_text_in_value_field(content_part)


def _has_text_in_value_field(content_part: Mapping[str, Any]) -> bool:
    """Return whether a content part is a text that stands in the field `value`: `{"type": "text", "value": "Hi"}`."""
    return content_part.get("type") in TEXT_TYPES_WITH_VALUE and "value" in content_part


def _convert_part_to_text(content_part: Any) -> str:
    """Convert a content part to text.

    Returns:
        The text of the part. A medium such as an image is replaced with its type in brackets, as "[image]".
    """
    if not isinstance(content_part, Mapping):
        return str(content_part)

    text = find_first_value(content_part, ("text", "text.value", "thinking"))
    if isinstance(text, str):
        return text

    if content_part.get("json") is not None:  # in results of Bedrock
        return convert_to_text(content_part["json"])

    if _has_text_in_value_field(content_part) and isinstance(content_part["value"], str):
        return content_part["value"]

    return _build_part_placeholder(content_part)


def _build_part_placeholder(content_part: Mapping[str, Any]) -> str:
    """Build the text that stands for a content part without text: its type as "[image]", or its JSON without a type."""
    part_type = content_part.get("type")
    if part_type is None:
        return json.dumps(content_part, ensure_ascii=False)
    return f"[{part_type}]"


def normalize_arguments(recorded_arguments: Any) -> Any:
    """Convert the arguments of a call to an object, however they were recorded.

    - JSON is read, also JSON inside JSON: `"{\\"city\\": \\"Oslo\\"}"`
    - null and empty text become `{}`
    - nulls of an object are left out, because tables with a column per argument fill empty cells with them
    - nulls in JSON stay

    Returns:
        The object, or `{"input": recorded_arguments}` if the arguments are no object.
    """
    if recorded_arguments is None:
        return {}
    if isinstance(recorded_arguments, Mapping):
        return _remove_nulls(recorded_arguments)

    value = recorded_arguments
    for _ in range(MAX_JSON_LAYERS):  # JSON may hold a text that is JSON again
        if not isinstance(value, str):
            break
        text = value.strip()
        if text in ("", "null"):
            return {}
        value = _try_parse_json_text(text)  # None for a text that is no JSON

    return value if isinstance(value, Mapping) else {"input": recorded_arguments}


def _try_parse_json_text(text: str) -> Any:
    """Parse a text that holds an object, a list or a string in JSON.

    Returns:
        The value, or None for any other text.
    """
    if text.startswith('"'):
        with suppress(ValueError):
            return json.loads(text)
        return None
    return try_parse_json(text)


def _remove_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an object, leaving out nulls, also in the objects inside it: {"a": 1, "b": None} becomes {"a": 1}."""
    remaining_arguments = {}
    for name, value in arguments.items():
        if value is None:
            continue
        remaining_arguments[name] = _remove_nulls(value) if isinstance(value, Mapping) else value
    return remaining_arguments
