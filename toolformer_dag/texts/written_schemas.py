"""What constrained decoding reads of a tool's JSON schema: a schema per argument, without what it cannot keep to.

llguidance is the library of constrained decoding: it lets a model write only what a grammar admits. The whole schema is
checked afterwards, by `parse_arguments`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

_GUIDANCE_OPTIONS = {
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
_OMITTED_KEYWORDS = {
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
_PARTLY_SUPPORTED_KEYWORDS = {"pattern", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
"""Keywords of which llguidance supports only some values; each value is tried."""
PATTERN_TIMEOUT_SECONDS = 1.0
"""Seconds that a pattern with look-around may take for one text."""


def has_pattern_match(pattern: str, text: str) -> bool:
    """Check whether a regular expression matches anywhere in a text, in limited time.

    Raises:
        TimeoutError: The search took more than PATTERN_TIMEOUT_SECONDS.
        ValueError: `pattern` is not a regular expression.
    """
    import polars as pl
    import regex

    # Polars needs linear time. It gives None for a pattern that its engine does not read, such as one with look-around.
    is_contained = pl.Series([text]).str.contains(pattern, strict=False)[0]
    if is_contained is not None:
        return bool(is_contained)

    try:
        return regex.search(pattern, text, timeout=PATTERN_TIMEOUT_SECONDS) is not None
    except regex.error as error:
        raise ValueError(f"its pattern {pattern[:100]} is read by no engine ({error})") from error


@cache
def find_compile_fault(value_schema_json: str) -> str | None:
    """Find out why llguidance cannot compile a JSON schema.

    Args:
        value_schema_json: The schema, as JSON.

    Returns:
        The reason in llguidance's words, or None if it can compile the schema.
    """
    from llguidance import LLMatcher

    grammar = f"%llguidance {{}}\nstart: v\nv: %json {value_schema_json}"  # admits the values of this schema
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed:
        return None

    reason = _parse_compile_error(" ".join(messages))
    # Only the message about a schema that is too large has no reason.
    return reason or "it is too large"


def _parse_compile_error(message: str) -> str:
    r"""Extract the reason from llguidance's message about a schema that it cannot compile.

    Args:
        message: "... failed to compile JSON schema: REASON while processing json-schema: ...\n   1 | (the grammar)"

    Returns:
        A reason such as 'Unimplemented keys: ["uniqueItems"]', or "" if the message has none.
    """
    _, _, after_beginning = message.partition("compile JSON schema: ")
    before_grammar, _, _ = after_beginning.partition("\n   1 |")
    reason, _, _ = before_grammar.partition(" while processing json-schema:")

    single_line = " ".join(reason.split())
    return single_line[:200]


class WrittenValues(NamedTuple):
    """What decoding may write as the arguments of a call."""

    schemas_by_argument: dict[str, str]
    """Argument -> the schema of its value, as JSON for llguidance. Without arguments for which no value is valid."""
    required_in_parts: set[str]
    """Arguments that every call needs, but that only parts of the schema name, such as under `anyOf`."""


@cache
def build_value_schemas(schema_json: str, argument_names: tuple[str, ...]) -> WrittenValues:
    """Build a schema for each argument of a call, which decoding follows when it writes the value.

    Args:
        schema_json: The whole schema of the tool, as JSON.
        argument_names: The names of its arguments (see `list_argument_names`).

    Returns:
        The schemas, and the arguments that only parts of the schema require, such as under `anyOf`.

    Raises:
        ValueError: The schema has patternProperties, a reference that leads nowhere, a pattern that no engine
            reads or a multipleOf that is not finite, or no value is valid for a required argument.
    """
    schema = json.loads(schema_json)
    copied_schema = _copy_schema(schema)  # without keywords that llguidance does not support

    schemas_by_argument = {}
    for name in argument_names:
        value_schema = copied_schema.build_value_schema(name)
        if value_schema is not None:  # None if no value is valid
            schemas_by_argument[name] = value_schema

    for required_name in schema.get("required") or ():
        if required_name not in schemas_by_argument:
            raise ValueError(f"{required_name}: every call needs it, and no value fits")

    required_in_parts = _find_names_required_in_parts(copied_schema, set(argument_names))
    return WrittenValues(schemas_by_argument, required_in_parts)


class _CopiedSchema(NamedTuple):
    """A tool's schema without the keywords that decoding leaves out."""

    root_schema: Mapping[str, Any]  # the whole schema
    shared_schemas: Mapping[str, Any]  # the schemas that it refers to, by name

    def build_value_schema(self, argument_name: str) -> str | None:
        """Build the schema of one argument as JSON that is complete without the rest of the tool's schema.

        Returns:
            The JSON for llguidance, or None if no value is valid for this argument.
        """
        properties = self.root_schema.get("properties") or {}
        argument_schema = properties.get(argument_name, True)  # for the schema True, any value is valid
        if argument_schema is False:  # no value is valid
            return None

        keywords = argument_schema if isinstance(argument_schema, dict) else {}
        return json.dumps({**keywords, "$defs": self.shared_schemas, **_GUIDANCE_OPTIONS})


def _copy_schema(schema: Mapping[str, Any]) -> _CopiedSchema:
    """Copy a schema without the keywords that decoding ignores: annotations, and what llguidance does not support.

    Raises:
        ValueError: The schema cannot be used (see `build_value_schemas`).
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012, specification_with

    dialect = specification_with(str(schema.get("$schema")), default=DRAFT202012)  # the version of JSON Schema
    resource = dialect.create_resource(schema)
    resolver = Registry().resolver_with_root(resource)  # looks up references ("$ref") in this schema

    copier = _SchemaCopier(dialect)
    root_schema = copier.copy_schema(schema, resolver)  # also fills `copier.shared_schemas`
    return _CopiedSchema(root_schema, copier.shared_schemas)


class _SchemaCopier:
    """Copies a JSON schema without the keywords that decoding leaves out.

    Schemas to which it refers are copied into `shared_schemas`.

    Attributes:
        shared_schemas: The schemas that are referred to, by name. The names are "d0", "d1" and so on. A reference to
            the first becomes {"$ref": "#/$defs/d0"}. It grows with each `copy_schema`.
    """

    def __init__(self, dialect: Any) -> None:
        self.shared_schemas: dict[str, Any] = {}
        self._dialect = dialect  # the version of JSON Schema, from the library `referencing`
        self._names_by_schema_id: dict[int, str] = {}  # id() of a schema -> its name in `shared_schemas`

    def copy_schema(self, schema: Any, resolver: Any) -> Any:
        """Copy a schema, or a schema inside of it, with only the keywords that llguidance gets.

        Args:
            schema: The schema. True and False are schemas too.
            resolver: Looks up the references in this schema. It is an object of the library `referencing`.

        Raises:
            ValueError: A reference leads nowhere, or the schema has patternProperties, or a keyword cannot be used.
        """
        if not isinstance(schema, dict):
            return schema

        if schema.get("patternProperties"):
            raise ValueError("its schema has patternProperties, whose names are matched without a limit of time")

        resource = self._dialect.create_resource(schema)
        inner_resolver = resolver.in_subresource(resource)  # an "$id" changes what is looked up

        copied_schema = self._copy_keywords(schema, inner_resolver)

        reference = schema.get("$ref")
        if isinstance(reference, str):
            copied_schema["$ref"] = self._share_referenced_schema(reference, inner_resolver)  # "#/$defs/d0"
        self._check_dynamic_reference(schema, inner_resolver)

        return copied_schema

    def _copy_keywords(self, schema: Mapping[str, Any], resolver: Any) -> dict[str, Any]:
        """Copy the keywords of a schema that llguidance supports, with all schemas in their values."""
        copied_keywords = {}
        for keyword, value in schema.items():
            if _is_for_decoding(keyword, value):
                copied_keywords[keyword] = self._copy_value(keyword, value, resolver)
        return copied_keywords

    def _check_dynamic_reference(self, schema: Mapping[str, Any], resolver: Any) -> None:
        """Check that the "$dynamicRef" of a schema leads somewhere. Decoding leaves this keyword out.

        Raises:
            ValueError: It leads nowhere.
        """
        reference = schema.get("$dynamicRef")
        if isinstance(reference, str):
            self._share_referenced_schema(reference, resolver)

    def _copy_value(self, keyword: str, value: Any, resolver: Any) -> Any:
        """Copy the value of a keyword, with all schemas in it. A count such as 3.0 becomes 3."""
        if keyword in _KEYWORDS_WITH_NAMED_SCHEMAS:
            return {name: self.copy_schema(schema, resolver) for name, schema in value.items()}
        if keyword in _KEYWORDS_WITH_SCHEMAS:
            if isinstance(value, list):
                return [self.copy_schema(schema, resolver) for schema in value]
            return self.copy_schema(value, resolver)

        is_whole_float = isinstance(value, float) and value.is_integer()
        if keyword in _KEYWORDS_WITH_COUNTS and is_whole_float:
            return int(value)
        return value

    def _share_referenced_schema(self, reference: str, resolver: Any) -> str:
        """Copy the schema that a reference leads to into `shared_schemas`, once, and return the new reference.

        Example:
            "#/definitions/City" becomes "#/$defs/d0".

        Raises:
            ValueError: The reference leads nowhere.
        """
        target = _resolve_reference(reference, resolver)
        new_name = f"d{len(self._names_by_schema_id)}"
        # Several references may lead to the same schema, which is recognized by its identity.
        name = self._names_by_schema_id.setdefault(id(target.contents), new_name)

        if name not in self.shared_schemas:
            self.shared_schemas[name] = True  # a placeholder, because the schema may refer to itself
            self.shared_schemas[name] = self.copy_schema(target.contents, target.resolver)
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


def _find_names_required_in_parts(schema: _CopiedSchema, argument_names: set[str]) -> set[str]:
    """Find arguments because of which a tool is refused: calls need them, but decoding could not write them.

    Decoding writes only the arguments that the schema names at its top. Others are named in its parts.

    Example:
        The arguments are {"id", "name"} for {"anyOf": [{"required": ["id"]}, {"required": ["name"]}]}.

    Args:
        schema: The schema of a tool.
        argument_names: The arguments that are named at the top of the schema.

    Returns:
        The arguments of the first group of alternatives (such as `anyOf`) of which each requires some that are not in
        `argument_names`. Empty if there is no such group.
    """
    # If the top names none, the tool would seem to take no arguments. Then the optional ones of a part count too, as
    # in {"anyOf": [{"properties": {"id": {}}}]}.
    takes_no_arguments = not argument_names

    for alternatives in _group_alternatives(schema.root_schema):  # a call has to fit one alternative of each group
        unnamed_by_alternative = []
        for alternative in alternatives:
            names = _collect_required_names(alternative, schema.shared_schemas, or_all_properties=takes_no_arguments)
            unnamed_by_alternative.append(names - argument_names)
        if unnamed_by_alternative and all(unnamed_by_alternative):  # each alternative needs such an argument
            return set.union(*unnamed_by_alternative)
    return set()


def _group_alternatives(root_schema: Mapping[str, Any]) -> list[Iterable[Any]]:
    """Group the parts of a schema, so that a call has to fit at least one part of each group."""
    groups: list[Iterable[Any]] = [[part] for part in root_schema.get("allOf", ())]
    groups += [[root_schema], root_schema.get("anyOf", ()), root_schema.get("oneOf", ())]
    return groups


def _collect_required_names(
    schema_part: Any, shared_schemas: Mapping[str, Any], *, or_all_properties: bool
) -> set[str]:
    """Collect the arguments that a schema requires.

    Args:
        schema_part: The schema, or a reference to a schema in `shared_schemas`.
        shared_schemas: The schemas that may be referred to, by name.
        or_all_properties: Whether to return all properties if none is required.

    Returns:
        For {"required": ["id"], "properties": {"id": {}, "no": {}}}: {"id"}
    """
    if isinstance(schema_part, dict) and "$ref" in schema_part:
        _, _, shared_name = schema_part["$ref"].rpartition("/")  # of "#/$defs/d0"
        schema_part = shared_schemas[shared_name]
    if not isinstance(schema_part, dict):
        return set()

    if schema_part.get("required"):
        return set(schema_part["required"])
    return set(schema_part.get("properties", ())) if or_all_properties else set()


def _is_for_decoding(keyword: str, value: Any) -> bool:
    """Check whether a keyword with this value stays in the schema for llguidance, which decoding follows.

    Left out are _OMITTED_KEYWORDS, such as annotations, and numbers or patterns that llguidance cannot compile.

    Raises:
        ValueError: The value is a pattern that no engine reads, or a multipleOf that is not finite.
    """
    if keyword == "pattern":
        has_pattern_match(value, "")  # only to raise ValueError
    if keyword == "multipleOf" and not math.isfinite(value):
        raise ValueError(f"its multipleOf is no number but {value}")

    if keyword in _OMITTED_KEYWORDS:
        return False
    if keyword in _PARTLY_SUPPORTED_KEYWORDS:  # llguidance has to compile this value
        return find_compile_fault(json.dumps({keyword: value})) is None
    return True
