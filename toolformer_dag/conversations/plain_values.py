"""Values of JSON as conversations hold them: JSON inside text, contents as text, arguments as they were meant."""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

LONGEST_LITERAL = 20_000
"""Characters of a literal of Python that is read: its syntax tree takes some 500 times as much memory."""
DEEPEST = 100
"""Levels of a record that is read; what JSON of people holds has some twenty."""
JSON_IN_JSON = 3
"""How many times arguments may be written as JSON inside JSON."""
BEGINS_JSON = ("{", "[")
MEDIA = ("image", "image_url", "input_image", "input_audio", "audio", "video", "file", "document", "input_file")
"""Types of parts of contents that are no text; the type stands for them."""


def parsed(text: str) -> Any:
    """Read an object or a list in JSON, such as `{"a": 1}`, or as Python writes it: `{'a': 1}`; None for neither.

    The first data sets of Hermes and glaive hold Python's literals. None too for a value that JSON cannot hold, such as
    half of a surrogate pair.
    """
    beginning = text[:1_000].lstrip()[:1]
    if beginning not in BEGINS_JSON:
        return None
    with suppress(ValueError, RecursionError):
        return _of_json(json.loads(text))
    if len(text) <= LONGEST_LITERAL:
        one_line = text.strip().replace("\n", " ")  # glaive breaks lines inside of quoted text
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return _of_json(ast.literal_eval(one_line))
    return None


@lru_cache(maxsize=4)
def parsed_field(text: str) -> Any:
    """Return what `parsed` returns, kept for the few fields of a record that every form looks into."""
    return parsed(text)


def _of_json(value: Any) -> Any:
    """Return a value that JSON can hold. Raises ValueError or TypeError for another one, and where it is too deep."""
    if is_too_deep(value):
        raise ValueError("too deep")
    json.dumps(value, ensure_ascii=False).encode()
    return value


def is_too_deep(value: Any) -> bool:
    """Return whether lists and objects stand in each other more than DEEPEST times; takes no recursion itself."""
    level = [value]
    for _ in range(DEEPEST):
        inner = list[Any]()
        for item in level:
            if isinstance(item, Mapping):
                inner.extend(item.values())
            elif isinstance(item, list | tuple):
                inner.extend(item)
        level = [item for item in inner if isinstance(item, Mapping | list | tuple)]
        if not level:
            return False
    return True


def first_of(value: Any, paths: tuple[str, ...]) -> Any:
    """Return the first value that is there and not null, at keys such as `name` or `function.name`; else None."""
    for path in paths:
        found = value
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None


def text_of(content: Any) -> str:
    """Return a content as text: the texts of its parts, the type of a part without text in brackets, else JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_has_text, content)):
        return "".join(map(_part_text, content))
    return json.dumps(content, ensure_ascii=False)


def _has_text(part: Any) -> bool:
    """Return whether a part is text, or something such as an image that its type stands for."""
    if not isinstance(part, Mapping):
        return isinstance(part, str)
    kind = part.get("type")
    named = any(key in part for key in ("text", "thinking", "json")) or kind in MEDIA
    return named or (kind in ("text", "output_text", "input_text") and "value" in part)


def _part_text(part: Any) -> str:
    """Return the text of a part of a content, for which `_has_text` holds; "[image]" for a part that is no text."""
    if not isinstance(part, Mapping):
        return str(part)
    text = first_of(part, ("text", "text.value", "thinking"))
    if isinstance(text, str):
        return text
    if part.get("json") is not None:  # of Bedrock's results
        return text_of(part["json"])
    kind = part.get("type")
    if kind in ("text", "output_text", "input_text") and isinstance(part.get("value"), str):
        return str(part["value"])
    if kind is None:
        return json.dumps(part, ensure_ascii=False)
    return f"[{kind}]"


def arguments_of(given: Any) -> Any:
    """Return arguments as the object that they are meant to be; `{"input": ...}` where they are none.

    - JSON is read, also where it was written as JSON again: `"{\\"city\\": \\"Oslo\\"}"`
    - null, and no arguments at all, are `{}`
    - nulls in an object are left out: a table whose columns hold the arguments of all tools pads with them. Those of
      an object in JSON stay: somebody wrote them
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return _without_nulls(given)
    value = given
    for _ in range(JSON_IN_JSON):
        if not isinstance(value, str):
            break
        text = value.strip()
        if text in ("", "null"):
            return {}
        value = _json_value(text)
    return value if isinstance(value, Mapping) else {"input": given}


def _json_value(text: str) -> Any:
    """Return the object or the text that a text holds in JSON; None for anything else."""
    if text.startswith('"'):
        with suppress(ValueError):
            return json.loads(text)
        return None
    return parsed(text)


def _without_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its nulls, also in the objects inside it."""
    kept = {}
    for name, value in arguments.items():
        if value is not None:
            kept[name] = _without_nulls(value) if isinstance(value, Mapping) else value
    return kept
