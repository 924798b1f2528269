"""What decoding keeps of a JSON schema: a document for llguidance per argument; the rest is checked afterwards."""

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

_WRITTEN = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",  # else white space is free
        "lenient": True,
        "coerce_one_of": True,  # `read_arguments` checks what decoding does not
    }
}
_NESTED = {
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "properties", "dependentSchemas", "propertyNames"),
    *("additionalProperties", "unevaluatedProperties", "items", "prefixItems", "contains"),
    *("additionalItems", "unevaluatedItems", "dependencies"),
}
"""Keywords of a schema that hold schemas: one, a list, or by name."""
_BY_NAME = {"properties", "dependentSchemas", "dependencies"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
"""Keywords with whole numbers, which JSON Schema lets be written as 3.0, and decoding does not."""
_LEFT_OUT = {
    *("$schema", "$id", "id", "$anchor", "$defs", "definitions", "x-guidance"),
    *("title", "description", "default", "examples"),
}
"""What decoding needs nothing of: references are resolved before, and annotations rule nothing."""
_TRIED = {"pattern", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
"""Keywords of which decoding takes some values alone."""
PATTERN_SECONDS = 1.0


def matches(pattern: str, value: str) -> bool:
    """Search by Rust's engine, or for look-around by one that has a limit of time; Python's may take for ever.

    Raises TimeoutError, and ValueError for what is no pattern.
    """
    import polars as pl
    import regex

    contained = pl.Series([value]).str.contains(pattern, strict=False)[0]
    if contained is not None:
        return bool(contained)
    try:
        return regex.search(pattern, value, timeout=PATTERN_SECONDS) is not None
    except regex.error as error:
        raise ValueError(f"its pattern {pattern[:100]} is read by no engine ({error})") from error


@cache
def unwritable(value: str) -> str | None:
    """Return in llguidance's words why decoding cannot keep to the schema of a value; None where it can."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(f"%llguidance {{}}\nstart: v\nv: %json {value}")
    message = " ".join(messages).partition("compile JSON schema: ")[2]
    message = message.partition("\n   1 |")[0].partition(" while processing json-schema:")[0]  # a listing follows it
    return (" ".join(message.split())[:200] or "it is too large") if failed else None


@cache
def written_values(text: str, names: tuple[str, ...]) -> tuple[dict[str, str], set[str]]:
    """Return by argument the schema that decoding keeps to, as JSON, "" for one that may have no value.

    And which arguments every call needs that stand in parts of the schema alone. `text`: the whole schema. Raises
    ValueError for a reference that leads nowhere, a pattern that no engine reads, a multipleOf that is not finite,
    patternProperties, and a required one without a value.
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012, specification_with

    whole = json.loads(text)
    dialect = specification_with(str(whole.get("$schema")), default=DRAFT202012)
    parts = _Parts(dialect)
    root = parts.kept(whole, Registry().resolver_with_root(dialect.create_resource(whole)))
    described = root.get("properties") or {}
    values = {name: described.get(name, True) for name in names}
    more = {"$defs": parts.shared, **_WRITTEN}
    documents = {name: {**value, **more} if isinstance(value, dict) else more for name, value in values.items()}
    written = {name: json.dumps(documents[name]) if values[name] is not False else "" for name in names}
    for name in filter(lambda name: not written[name], whole.get("required") or ()):
        raise ValueError(f"{name}: every call needs it, and no value fits")
    return written, parts.apart(root, set(names))


class _Parts:
    """Parts of a schema without what decoding leaves out. `shared`: the targets of references, by new names."""

    def __init__(self, dialect: Any) -> None:
        self.shared: dict[str, Any] = {}
        self._dialect = dialect
        self._names: dict[int, str] = {}

    def kept(self, part: Any, resolver: Any) -> Any:
        """Return a part with its references resolved, of those in the whole schema. Raises ValueError."""
        if not isinstance(part, dict):
            return part
        if part.get("patternProperties"):
            raise ValueError("its schema has patternProperties, whose names are matched without a limit of time")
        resolver = resolver.in_subresource(self._dialect.create_resource(part))
        fields = {key: self._below(key, value, resolver) for key, value in part.items() if _is_kept(key, value)}
        if isinstance(part.get("$ref"), str):
            fields["$ref"] = self._target(part["$ref"], resolver)
        if isinstance(part.get("$dynamicRef"), str):
            self._target(part["$dynamicRef"], resolver)  # decoding leaves it out; it has to lead somewhere all the same
        return fields

    def _below(self, key: str, value: Any, resolver: Any) -> Any:
        if key not in _NESTED:
            return int(value) if key in _COUNTS and isinstance(value, float) and value.is_integer() else value
        if key in _BY_NAME:
            return {name: self.kept(one, resolver) for name, one in value.items()}
        return [self.kept(one, resolver) for one in value] if isinstance(value, list) else self.kept(value, resolver)

    def _target(self, pointer: str, resolver: Any) -> str:
        from referencing.exceptions import Unresolvable

        try:
            target = resolver.lookup(pointer)
        except Unresolvable as error:
            raise ValueError(f"its reference {pointer:.100} leads nowhere") from error
        name = self._names.setdefault(id(target.contents), f"d{len(self._names)}")
        if name not in self.shared:
            self.shared[name] = True  # it may refer to itself
            self.shared[name] = self.kept(target.contents, target.resolver)
        return f"#/$defs/{name}"

    def apart(self, root: Mapping[str, Any], names: set[str]) -> set[str]:
        """Return arguments that every call needs and that are not among `names`, those at the top."""
        each = [[one] for one in (*root.get("allOf", ()), root)]
        arms = (*each, root.get("anyOf", ()), root.get("oneOf", ()))
        groups = [[self._asked(arm, not names) - names for arm in group] for group in arms]
        return next((set.union(*group) for group in groups if group and all(group)), set())

    def _asked(self, arm: Any, any_name: bool) -> set[str]:
        if isinstance(arm, dict) and "$ref" in arm:
            arm = self.shared[arm["$ref"].rpartition("/")[2]]
        described = arm if isinstance(arm, dict) else {}
        return set(described.get("required") or (described.get("properties", ()) if any_name else ()))


def _is_kept(key: str, value: Any) -> bool:
    """Return whether decoding may keep to a keyword. Raises ValueError for one that nothing can be compared with."""
    if key == "pattern":
        matches(value, "")
    if key == "multipleOf" and not math.isfinite(value):
        raise ValueError(f"its multipleOf is no number but {value}")
    return key not in _LEFT_OUT and not (key in _TRIED and unwritable(json.dumps({key: value})))
