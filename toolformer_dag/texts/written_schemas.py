"""What decoding keeps of a JSON schema: a document for llguidance per argument; the rest is checked afterwards.

llguidance is the library that lets a model write only what a grammar admits.
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

_WRITTEN = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",  # else white space is free
        "lenient": True,
        "coerce_one_of": True,  # `read_arguments` checks what decoding does not
    }
}
"""llguidance's options for every document: JSON is written as `json.dumps` does it."""
_BY_NAME = {"properties", "dependentSchemas", "dependencies"}
"""Keywords that hold schemas by name."""
_NESTED = _BY_NAME | {
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "prefixItems",
    "contains",
    "additionalItems",
    "unevaluatedItems",
}
"""Keywords that hold schemas: one, a list, or by name."""
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
"""Keywords with whole numbers, which JSON Schema lets be written as 3.0, and decoding does not."""
_LEFT_OUT = {
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$defs",
    "definitions",
    "x-guidance",
    "title",
    "description",
    "default",
    "examples",
}
"""Keywords that decoding does not need: references are resolved before, and annotations rule nothing."""
_TRIED = {"pattern", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
"""Keywords of which decoding takes some values alone."""
PATTERN_SECONDS = 1.0
"""Seconds that a pattern with look-around may take for one text."""


def matches(pattern: str, value: str) -> bool:
    """Return whether a regular expression matches somewhere in a text, in limited time.

    Rust's engine, which polars has, searches in linear time. It reads no look-around: such patterns are searched with
    a limit of time. Python's `re` may take for ever. Raises TimeoutError, and ValueError for what is no pattern.
    """
    import polars as pl
    import regex

    contained = pl.Series([value]).str.contains(pattern, strict=False)[0]
    if contained is not None:  # None: Rust's engine does not read the pattern
        return bool(contained)
    try:
        return regex.search(pattern, value, timeout=PATTERN_SECONDS) is not None
    except regex.error as error:
        raise ValueError(f"its pattern {pattern[:100]} is read by no engine ({error})") from error


@cache
def unwritable(value_schema: str) -> str | None:
    """Return, in llguidance's words, why decoding cannot keep to the schema of a value (JSON); None where it can."""
    from llguidance import LLMatcher

    grammar = f"%llguidance {{}}\nstart: v\nv: %json {value_schema}"
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed:
        return None
    # Around the reason stand the name of the step, a listing of the grammar, and the place in the schema.
    reason = " ".join(messages).partition("compile JSON schema: ")[2]
    reason = reason.partition("\n   1 |")[0].partition(" while processing json-schema:")[0]
    return " ".join(reason.split())[:200] or "it is too large"


class WrittenValues(NamedTuple):
    """What decoding may write as the arguments of a call."""

    schemas: dict[str, str]
    """By argument, the document for llguidance, as JSON; "" for an argument that can have no value."""
    elsewhere: set[str]
    """Arguments that every call needs, and that stand in parts of the schema alone, such as under `anyOf`."""


@cache
def written_values(text: str, names: tuple[str, ...]) -> WrittenValues:
    """Return what decoding keeps of a schema.

    text: the whole schema, as JSON. names: its arguments (`argument_names`).

    Raises ValueError for a reference that leads nowhere, a pattern that no engine reads, a multipleOf that is not
    finite, patternProperties, and a required argument without a possible value.
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012, specification_with

    schema = json.loads(text)
    dialect = specification_with(str(schema.get("$schema")), default=DRAFT202012)
    parts = _KeptParts(dialect)
    resolver = Registry().resolver_with_root(dialect.create_resource(schema))
    root = parts.kept(schema, resolver)
    properties = root.get("properties") or {}

    # Every document is complete: it has the parts that references in it lead to, and the options.
    additions = {"$defs": parts.shared, **_WRITTEN}
    schemas = {}
    for name in names:
        value_schema = properties.get(name, True)
        if value_schema is False:
            schemas[name] = ""
        elif isinstance(value_schema, dict):
            schemas[name] = json.dumps({**value_schema, **additions})
        else:
            schemas[name] = json.dumps(additions)
    for name in schema.get("required") or ():
        if not schemas[name]:
            raise ValueError(f"{name}: every call needs it, and no value fits")
    return WrittenValues(schemas, _needed_elsewhere(root, parts.shared, set(names)))


class _KeptParts:
    """Copies the parts of one schema without what decoding leaves out, and collects the parts that references lead to.

    `shared` grows while parts are copied: the target of each reference so far, by a new name, d0, d1 and so on. A
    reference becomes `#/$defs/d0`.
    """

    def __init__(self, dialect: Any) -> None:
        self.shared: dict[str, Any] = {}
        self._dialect = dialect
        self._names: dict[int, str] = {}  # id of a target -> its name in `shared`

    def kept(self, part: Any, resolver: Any) -> Any:
        """Return a copy of a part of the schema. `resolver`: looks up references from that part. Raises ValueError."""
        if not isinstance(part, dict):
            return part
        if part.get("patternProperties"):
            raise ValueError("its schema has patternProperties, whose names are matched without a limit of time")
        resolver = resolver.in_subresource(self._dialect.create_resource(part))
        copy = {}
        for keyword, value in part.items():
            if _is_kept(keyword, value):
                copy[keyword] = self._kept_value(keyword, value, resolver)
        if isinstance(part.get("$ref"), str):
            copy["$ref"] = self._shared_target(part["$ref"], resolver)
        if isinstance(part.get("$dynamicRef"), str):
            # Decoding leaves it out; it has to lead somewhere all the same.
            self._shared_target(part["$dynamicRef"], resolver)
        return copy

    def _kept_value(self, keyword: str, value: Any, resolver: Any) -> Any:
        """Return a copy of what a keyword holds: schemas, or a plain value."""
        if keyword in _BY_NAME:
            return {name: self.kept(schema, resolver) for name, schema in value.items()}
        if keyword in _NESTED:
            if isinstance(value, list):
                return [self.kept(schema, resolver) for schema in value]
            return self.kept(value, resolver)
        if keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _shared_target(self, reference: str, resolver: Any) -> str:
        """Copy what a reference leads to into `shared`, unless it is there; return the new reference."""
        from referencing.exceptions import Unresolvable

        try:
            target = resolver.lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"its reference {reference:.100} leads nowhere") from error
        name = self._names.setdefault(id(target.contents), f"d{len(self._names)}")
        if name not in self.shared:
            self.shared[name] = True  # holds the place meanwhile: a part may refer to itself
            self.shared[name] = self.kept(target.contents, target.resolver)
        return f"#/$defs/{name}"


def _needed_elsewhere(root: Mapping[str, Any], shared: Mapping[str, Any], names: set[str]) -> set[str]:
    """Return arguments that every call needs and that are not among `names`, the properties at the top of the schema.

    root: the schema as decoding keeps it. shared: its parts, by the names in their references.

    A call keeps to the root, to each part of `allOf`, and to one part of `anyOf` and of `oneOf`. Where each part of
    such a group needs an argument that is not at the top, every call needs one. The first such group counts: for
    `{"anyOf": [{"required": ["id"]}, {"required": ["name"]}]}` it is {"id", "name"}.
    """
    groups: list[Iterable[Any]] = [[part] for part in root.get("allOf", ())]
    groups += [[root], root.get("anyOf", ()), root.get("oneOf", ())]
    for group in groups:
        needed = [_needed(part, shared, any_property=not names) - names for part in group]
        if needed and all(needed):
            return set.union(*needed)
    return set()


def _needed(part: Any, shared: Mapping[str, Any], *, any_property: bool) -> set[str]:
    """Return the arguments that a part of a schema requires.

    any_property: where it requires none, return all its properties. A schema without arguments at the top would
    otherwise seem to be that of a tool without arguments.
    """
    if isinstance(part, dict) and "$ref" in part:
        part = shared[part["$ref"].rpartition("/")[2]]
    if not isinstance(part, dict):
        return set()
    if part.get("required"):
        return set(part["required"])
    return set(part.get("properties", ())) if any_property else set()


def _is_kept(keyword: str, value: Any) -> bool:
    """Return whether decoding may keep to a keyword. Raises ValueError for one that nothing can be compared with."""
    if keyword == "pattern":
        matches(value, "")
    if keyword == "multipleOf" and not math.isfinite(value):
        raise ValueError(f"its multipleOf is no number but {value}")
    if keyword in _LEFT_OUT:
        return False
    return keyword not in _TRIED or not unwritable(json.dumps({keyword: value}))
