"""Convert the input of a call, a text, to the arguments of an MCP tool."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import polars as pl
from pydantic import AfterValidator

from toolformer_dag.tools.tool import NoResult

WHOLE = r"\A(?:{})\z"
"""A regular expression that has to match from the first to the last character."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def placeholders(template: Any) -> set[str]:
    """Return the names in braces anywhere in a template of strings, tables and lists."""
    if isinstance(template, str):
        return set(_PLACEHOLDER.findall(template))
    parts = template.values() if isinstance(template, Mapping) else template if isinstance(template, list) else ()
    return set().union(*map(placeholders, parts))


def _linear(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Refuse what Rust's regular expressions lack: they match in linear time, where Python's may take for ever."""
    try:
        for form in (pattern.pattern, WHOLE.format(pattern.pattern)):
            pl.Series([""]).str.contains(form)
    except pl.exceptions.PolarsError as error:
        reason = " ".join(str(error).partition("This error occurred")[0].split())
        raise ValueError(
            f"{reason}; write it in the syntax of Rust's regular expressions, which have no look-around, no "
            "backreferences, and `\\z` for the end of a text"
        ) from error
    return pattern


LinearPattern = Annotated[re.Pattern[str], AfterValidator(_linear)]
"""A regular expression that is matched by Rust's engine: in linear time, without look-around and backreferences."""


def occurs(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether the pattern matches anywhere in the text."""
    return bool(pl.Series([text]).str.contains(pattern.pattern)[0])


def split_fields(text: str, fields: re.Pattern[str] | None) -> dict[str, str]:
    """Return `input` and the named groups of `fields`; groups are stripped of white space.

    Raises NoResult("does_not_match_fields") where the whole input does not match.
    """
    if fields is None:
        return {"input": text}
    whole = WHOLE.format(fields.pattern)
    if not pl.Series([text]).str.contains(whole)[0]:
        raise NoResult("does_not_match_fields")
    groups = pl.Series([text]).str.extract_groups(whole)[0] if fields.groups else {}
    return {"input": text} | {name: (groups[name] or "").strip() for name in fields.groupindex}


def fill(template: Mapping[str, Any], values: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the template's placeholders and convert each text to the JSON type that the schema names.

    - Filling is a single pass: braces in a value stay unchanged.
    - Texts in lists and tables get the types of `items` and `properties`.
    - Types are also found in choices (`anyOf`, `oneOf`, `allOf`) and references within the schema (`#/$defs/Count`).

    Raises NoResult("bad_argument").
    """
    return {name: _filled(part, values, _within([schema], name), schema) for name, part in template.items()}


def _filled(part: Any, values: Mapping[str, str], parts: Sequence[Any], schema: Mapping[str, Any]) -> Any:
    """Fill a part of the template that `parts` of `schema` describe."""
    schemas = [each for described in parts for each in _reached(described, schema, frozenset())]
    if isinstance(part, str):
        return _typed(_PLACEHOLDER.sub(lambda match: values[match[1]], part), _kinds(schemas))
    if isinstance(part, Mapping):
        return {name: _filled(below, values, _within(schemas, name), schema) for name, below in part.items()}
    items = [each["items"] for each in schemas if "items" in each]
    return [_filled(below, values, items, schema) for below in part] if isinstance(part, list) else part


def _typed(value: str, kinds: Collection[str]) -> Any:
    number = next((read for kind, read in (("number", float), ("integer", int)) if kind in kinds), None)
    if "string" in kinds or not (number or "boolean" in kinds):
        return value
    try:
        read = number(value) if number else {"true": True, "false": False}[value.lower()]
        if math.isfinite(read):
            return read
    except (KeyError, ValueError, OverflowError):
        pass
    raise NoResult("bad_argument")  # JSON knows neither infinity nor nan


def _within(schemas: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [each["properties"][name] for each in schemas if name in (each.get("properties") or {})]


def _kinds(schemas: Sequence[Mapping[str, Any]]) -> set[str]:
    types = [each.get("type", []) for each in schemas]
    return {kind for found in types for kind in ([found] if isinstance(found, str) else found)}


def _reached(part: Any, schema: Mapping[str, Any], followed: frozenset[str]) -> list[Mapping[str, Any]]:
    """Return a part of `schema` with its choices and references; boolean parts are skipped.

    `followed`: the references on the path to this part.
    """
    if not isinstance(part, Mapping):
        return []
    reference = str(part.get("$ref", ""))
    found = [part]
    if reference.startswith("#") and reference not in followed:
        found += _reached(_referred(reference, schema), schema, followed | {reference})
    choices = [choice for word in ("anyOf", "oneOf", "allOf") for choice in part.get(word, ())]
    return found + [each for choice in choices for each in _reached(choice, schema, followed)]


def _referred(reference: str, schema: Mapping[str, Any]) -> Any:
    """Resolve a JSON pointer into the schema, such as `#/$defs/Count`; None where it points nowhere."""
    found: Any = schema
    for name in reference.split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def argument_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the argument names of a tool, including required arguments that are not described."""
    return list(dict.fromkeys([*(schema.get("properties") or ()), *(schema.get("required") or ())]))


def only_argument(schema: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the template of a tool with at most one argument or exactly one required argument, else None."""
    names = argument_names(schema)
    required = list(schema.get("required") or ())
    if len(names) > 1 and len(required) != 1:
        return None
    return dict.fromkeys(names if len(names) < 2 else required, "{input}")
