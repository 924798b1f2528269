"""From the input of a call, one text, to the arguments of a tool."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_CHOICES = ("anyOf", "oneOf", "allOf")
_BOOLEANS = {"true": True, "false": False}


class BadArgument(ValueError):
    """An input from which the tool's arguments cannot be made; `reason` is short, for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def placeholders(template: Any) -> set[str]:
    """The names in braces anywhere in a template of strings, tables and lists."""
    if isinstance(template, str):
        return set(_PLACEHOLDER.findall(template))
    parts = template.values() if isinstance(template, Mapping) else template if isinstance(template, list) else ()
    return set().union(*map(placeholders, parts))


def split_fields(text: str, fields: re.Pattern[str] | None) -> dict[str, str]:
    """`input` and the named groups of `fields`, without white space around them.

    Raises BadArgument("does_not_match_fields") where the whole input does not match.
    """
    match = fields.fullmatch(text) if fields else None
    if fields and match is None:
        raise BadArgument("does_not_match_fields")
    groups = match.groupdict("") if match else {}
    return {"input": text} | {name: value.strip() for name, value in groups.items()}


def fill(template: Mapping[str, Any], values: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The template with its placeholders filled, each argument in the JSON type that the tool's schema names.

    Filling is a single pass: braces in a value stay as they are. A type may be named in a choice (`anyOf`, `oneOf`,
    `allOf`) or by reference within the schema (`#/$defs/Count`). Raises BadArgument("bad_argument").
    """
    properties = schema.get("properties", {})
    return {
        name: _typed(_filled(part, values), _kinds(properties.get(name), schema, frozenset()))
        for name, part in template.items()
    }


def _filled(part: Any, values: Mapping[str, str]) -> Any:
    if isinstance(part, str):
        return _PLACEHOLDER.sub(lambda match: values[match[1]], part)
    if isinstance(part, Mapping):
        return {name: _filled(below, values) for name, below in part.items()}
    return [_filled(below, values) for below in part] if isinstance(part, list) else part


def _typed(value: Any, kinds: Collection[str]) -> Any:
    if not isinstance(value, str) or "string" in kinds:
        return value
    try:
        if "number" in kinds or "integer" in kinds:
            return _number(value, whole="number" not in kinds)
        return _BOOLEANS[value.lower()] if "boolean" in kinds else value
    except (KeyError, ValueError, OverflowError) as error:
        raise BadArgument("bad_argument") from error


def _kinds(part: Any, schema: Mapping[str, Any], followed: frozenset[str]) -> set[str]:
    """The types that a part of `schema` names; a part may be true or false. `followed`: references on the way here."""
    if not isinstance(part, Mapping):
        return set()
    kind, reference = part.get("type", []), str(part.get("$ref", ""))
    below = [choice for word in _CHOICES for choice in part.get(word, ())]
    found = {kind} if isinstance(kind, str) else set(kind)
    if reference.startswith("#") and reference not in followed:
        found |= _kinds(_referred(reference, schema), schema, followed | {reference})
    return found.union(*(_kinds(choice, schema, followed) for choice in below))


def _referred(reference: str, schema: Mapping[str, Any]) -> Any:
    """What stands at `#/$defs/Count`, a JSON pointer into the schema; None where nothing does."""
    found: Any = schema
    for name in reference.split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _number(value: str, *, whole: bool) -> int | float:
    number = int(value) if whole else float(value)
    if not math.isfinite(number):  # JSON knows neither infinity nor nan
        raise ValueError(value)
    return number


def argument_names(schema: Mapping[str, Any]) -> list[str]:
    """The arguments a tool takes; one may be required and described nowhere."""
    return list(dict.fromkeys([*schema.get("properties", ()), *schema.get("required", ())]))


def only_argument(schema: Mapping[str, Any]) -> dict[str, str] | None:
    """The template of a tool with no argument, one, or one required; None for others, which need one written."""
    names = argument_names(schema)
    required = list(schema.get("required", ()))
    if len(names) > 1 and len(required) != 1:
        return None
    return dict.fromkeys(names if len(names) < 2 else required, "{input}")
