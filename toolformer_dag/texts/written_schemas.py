"""What constrained decoding reads of a tool's JSON schema: a schema per argument, without what it cannot keep to.

llguidance is the library of constrained decoding: it lets a model write only what a grammar admits. The whole schema is
checked afterwards, by `parse_arguments`.
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
        "key_separator": ": ",  # without these three, white space is free
        "lenient": True,  # keywords that it does not know are no error
        "coerce_one_of": True,  # `oneOf` is read as `anyOf`
    }
}
"""llguidance's options for every schema: JSON is written as `json.dumps` does it."""
_KEYWORDS_WITH_NAMED_SCHEMAS = {"properties", "dependentSchemas", "dependencies"}
"""Keywords that hold schemas by name: {"properties": {"city": {...}}}."""
_KEYWORDS_WITH_SCHEMAS = {
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
"""Keywords that hold a schema or a list of schemas: {"items": {...}}, {"anyOf": [{...}, {...}]}."""
_KEYWORDS_WITH_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
"""Keywords that hold a whole number. JSON Schema allows 3.0 there, llguidance only 3."""
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
"""Keywords that decoding does not need: those for references, which are resolved before, and annotations."""
_PARTLY_SUPPORTED = {"pattern", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
"""Keywords of which llguidance supports only some values; each value is tried."""
PATTERN_SECONDS = 1.0
"""Seconds that a pattern with look-around may take for one text."""


def matches(pattern: str, value: str) -> bool:
    """Check whether a regular expression matches anywhere in a text, in limited time.

    Raises:
        TimeoutError: The search took more than PATTERN_SECONDS.
        ValueError: `pattern` is not a regular expression.
    """
    import polars as pl
    import regex

    contained = pl.Series([value]).str.contains(pattern, strict=False)[0]  # in linear time
    if contained is not None:  # None: polars' engine does not read the pattern, such as one with look-around
        return bool(contained)

    try:
        return regex.search(pattern, value, timeout=PATTERN_SECONDS) is not None
    except regex.error as error:
        raise ValueError(f"its pattern {pattern[:100]} is read by no engine ({error})") from error


@cache
def unwritable(value_schema: str) -> str | None:
    """Find out why llguidance cannot compile a JSON schema.

    Args:
        value_schema: The schema, as JSON.

    Returns:
        The reason in llguidance's words, or None if it can compile the schema.
    """
    from llguidance import LLMatcher

    grammar = f"%llguidance {{}}\nstart: v\nv: %json {value_schema}"  # admits the values of this schema
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed:
        return None

    reason = _parse_compile_error(
        " ".join(messages)
    )  # "" for a message without a reason: only if the schema is too large
    return reason or "it is too large"


def _parse_compile_error(message: str) -> str:
    r"""Extract the reason from llguidance's message about a schema that it cannot compile.

    Args:
        message: "... failed to compile JSON schema: REASON while processing json-schema: ...\n   1 | (the grammar)"

    Returns:
        A reason such as 'Unimplemented keys: ["uniqueItems"]', or "" if the message has none.
    """
    _, _, reason = message.partition("compile JSON schema: ")
    reason, _, _ = reason.partition("\n   1 |")
    reason, _, _ = reason.partition(" while processing json-schema:")
    return " ".join(reason.split())[:200]


class WrittenValues(NamedTuple):
    """What decoding may write as the arguments of a call."""

    schemas: dict[str, str]
    """Argument -> the schema of its value, as JSON for llguidance. Without arguments for which no value is valid."""
    required_in_parts: set[str]
    """Arguments that every call needs, but that only parts of the schema name, such as under `anyOf`."""


@cache
def build_value_schemas(text: str, names: tuple[str, ...]) -> WrittenValues:
    """Build a schema for each argument of a call, which decoding follows when it writes the value.

    Args:
        text: The whole schema of the tool, as JSON.
        names: The names of its arguments (see `list_argument_names`).

    Raises:
        ValueError: The schema has patternProperties, a reference that leads nowhere, a pattern that no engine
            reads or a multipleOf that is not finite, or no value is valid for a required argument.
    """
    schema = json.loads(text)
    copied = _copy_schema(schema)  # without keywords that llguidance cannot keep to

    schemas = {}
    for name in names:
        value_schema = copied.value_schema(name)
        if value_schema is not None:  # None: no value is valid
            schemas[name] = value_schema

    for name in schema.get("required") or ():
        if name not in schemas:
            raise ValueError(f"{name}: every call needs it, and no value fits")

    required_in_parts = _find_required_in_parts(copied, set(names))  # only parts such as `anyOf` name these arguments
    return WrittenValues(schemas, required_in_parts)


class _CopiedSchema(NamedTuple):
    """A tool's schema without the keywords that decoding leaves out."""

    root: Mapping[str, Any]  # the whole schema
    shared: Mapping[str, Any]  # the schemas that it refers to, by name

    def value_schema(self, argument: str) -> str | None:
        """Build the schema of one argument as JSON that is complete without the rest of the tool's schema.

        Returns:
            The JSON for llguidance, or None if no value is valid for this argument.
        """
        properties = self.root.get("properties") or {}
        schema = properties.get(argument, True)  # True: any value is valid
        if schema is False:
            return None

        keywords = schema if isinstance(schema, dict) else {}
        return json.dumps({**keywords, "$defs": self.shared, **_WRITTEN})


def _copy_schema(schema: Mapping[str, Any]) -> _CopiedSchema:
    """Copy a schema without the keywords that decoding ignores: annotations, and what llguidance does not support.

    Raises:
        ValueError: The schema cannot be used (see `build_value_schemas`).
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012, specification_with

    dialect = specification_with(str(schema.get("$schema")), default=DRAFT202012)  # the version of JSON Schema

    copier = _SchemaCopier(dialect)
    resolver = Registry().resolver_with_root(dialect.create_resource(schema))  # looks up "$ref" in this schema
    root = copier.copy(schema, resolver)  # also collects the schemas that "$ref" leads to in `copier.shared`
    return _CopiedSchema(root, copier.shared)


class _SchemaCopier:
    """Copies a JSON schema without the keywords that decoding leaves out, and moves what it refers to into `shared`.

    shared: name -> a schema that is referred to. The names are d0, d1 and so on; a reference to the first becomes
        {"$ref": "#/$defs/d0"}. It grows with each `copy`.
    """

    def __init__(self, dialect: Any) -> None:
        self.shared: dict[str, Any] = {}
        self._dialect = dialect  # the version of JSON Schema, from the library `referencing`
        self._names: dict[int, str] = {}  # id of a referred schema -> its name in `shared`

    def copy(self, schema: Any, resolver: Any) -> Any:
        """Copy a schema, or a schema inside of it, with only the keywords that llguidance gets.

        Args:
            schema: The schema. True and False are schemas too.
            resolver: Looks up the references in this schema. It is an object of the library `referencing`.

        Raises:
            ValueError: A reference leads nowhere, or the schema has patternProperties, or a keyword cannot be used.
        """
        if not isinstance(schema, dict):  # True and False are schemas too
            return schema
        if schema.get("patternProperties"):
            raise ValueError("its schema has patternProperties, whose names are matched without a limit of time")

        resource = self._dialect.create_resource(schema)
        inner_resolver = resolver.in_subresource(resource)  # an "$id" changes what is looked up

        copied = self._copy_keywords(schema, inner_resolver)

        reference = schema.get("$ref")
        if isinstance(reference, str):
            copied["$ref"] = self._share_referenced_schema(
                reference, inner_resolver
            )  # "#/$defs/d0", a copy in `shared`
        self._check_dynamic_reference(schema, inner_resolver)  # raises ValueError if it leads nowhere

        return copied

    def _copy_keywords(self, schema: Mapping[str, Any], resolver: Any) -> dict[str, Any]:
        """Return copies of the keywords of a schema that llguidance gets."""
        copied = {}
        for keyword, value in schema.items():
            if _is_for_decoding(keyword, value):
                copied[keyword] = self._copy_value(keyword, value, resolver)
        return copied

    def _check_dynamic_reference(self, schema: Mapping[str, Any], resolver: Any) -> None:
        """Raise ValueError if the "$dynamicRef" of a schema, which decoding leaves out, leads nowhere."""
        reference = schema.get("$dynamicRef")
        if isinstance(reference, str):
            self._share_referenced_schema(reference, resolver)

    def _copy_value(self, keyword: str, value: Any, resolver: Any) -> Any:
        """Copy the value of a keyword, with all schemas in it. A count such as 3.0 becomes 3."""
        if keyword in _KEYWORDS_WITH_NAMED_SCHEMAS:
            return {name: self.copy(schema, resolver) for name, schema in value.items()}
        if keyword in _KEYWORDS_WITH_SCHEMAS:
            if isinstance(value, list):
                return [self.copy(schema, resolver) for schema in value]
            return self.copy(value, resolver)
        if keyword in _KEYWORDS_WITH_COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _share_referenced_schema(self, reference: str, resolver: Any) -> str:
        """Copy the schema that a reference leads to into `shared`, once, and return the new reference.

        Example:
            "#/definitions/City" becomes "#/$defs/d0".

        Raises:
            ValueError: The reference leads nowhere.
        """
        target = _resolve_reference(reference, resolver)
        new_name = f"d{len(self._names)}"
        name = self._names.setdefault(id(target.contents), new_name)  # by identity: several references may lead to it

        if name not in self.shared:
            self.shared[name] = True  # a placeholder while it is copied, because it may refer to itself
            self.shared[name] = self.copy(target.contents, target.resolver)
        return f"#/$defs/{name}"


def _resolve_reference(reference: str, resolver: Any) -> Any:
    """Look up what a reference in a schema leads to.

    Returns:
        An object with `contents`, and with a `resolver` for the references in them.

    Raises:
        ValueError: The reference leads nowhere.
    """
    from referencing.exceptions import Unresolvable

    try:
        return resolver.lookup(reference)
    except Unresolvable as error:
        raise ValueError(f"its reference {reference:.100} leads nowhere") from error


def _find_required_in_parts(schema: _CopiedSchema, names: set[str]) -> set[str]:
    """Find arguments that every call needs but that are named only in parts of the schema, such as under `anyOf`.

    Args:
        names: The arguments that the schema names as a whole.

    Returns:
        The arguments that are not in `names`. For {"anyOf": [{"required": ["id"]}, {"required": ["name"]}]} these
        are {"id", "name"}. Only the first such part of the schema is considered, because one is enough to
        refuse the schema.
    """
    # Without any name the tool would seem to take no arguments, so the optional ones of the parts count too, as in
    # {"anyOf": [{"properties": {"id": {}}}]}.
    takes_no_arguments = not names

    for alternatives in _group_alternatives(schema.root):  # a call has to fit one alternative of each group
        unnamed_by_alternative = []
        for part in alternatives:
            part_names = _collect_required_names(part, schema.shared, or_all_properties=takes_no_arguments)
            unnamed_by_alternative.append(part_names - names)
        if unnamed_by_alternative and all(unnamed_by_alternative):  # each alternative needs such an argument
            return set.union(*unnamed_by_alternative)
    return set()


def _group_alternatives(root: Mapping[str, Any]) -> list[Iterable[Any]]:
    """Return groups of parts of a schema: a call has to fit at least one part of each group."""
    groups: list[Iterable[Any]] = [[part] for part in root.get("allOf", ())]
    groups += [[root], root.get("anyOf", ()), root.get("oneOf", ())]
    return groups


def _collect_required_names(part: Any, shared: Mapping[str, Any], *, or_all_properties: bool) -> set[str]:
    """Collect the arguments that a schema requires.

    Args:
        part: The schema, or a reference to a schema in `shared`.
        shared: The schemas that may be referred to, by name.
        or_all_properties: Whether to return all properties if none is required.

    Returns:
        For {"required": ["id"], "properties": {"id": {}, "no": {}}}: {"id"}
    """
    if isinstance(part, dict) and "$ref" in part:
        _, _, shared_name = part["$ref"].rpartition("/")  # of "#/$defs/d0"
        part = shared[shared_name]
    if not isinstance(part, dict):
        return set()

    if part.get("required"):
        return set(part["required"])
    return set(part.get("properties", ())) if or_all_properties else set()


def _is_for_decoding(keyword: str, value: Any) -> bool:
    """Check whether llguidance gets a keyword of a schema with this value.

    Raises:
        ValueError: The value is a pattern that no engine reads, or a multipleOf that is not finite.
    """
    if keyword == "pattern":
        matches(value, "")  # only to raise ValueError
    if keyword == "multipleOf" and not math.isfinite(value):
        raise ValueError(f"its multipleOf is no number but {value}")

    if keyword in _LEFT_OUT:
        return False
    if keyword in _PARTLY_SUPPORTED:  # llguidance has to compile this value
        return unwritable(json.dumps({keyword: value})) is None
    return True
