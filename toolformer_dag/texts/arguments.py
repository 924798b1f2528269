"""Named arguments of a call, `city="Rome", days=3`: parse, check and write them, and give the grammar for decoding.

A tool with named arguments has a JSON schema of them: the names are its properties, the values are JSON. Arguments are
written in the schema's order, required ones first, without those that equal their default. So equal arguments are
equal texts.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from toolformer_dag.texts.written_schemas import build_value_schemas, matches, unwritable

Schema = Mapping[str, Any]
"""A JSON schema of an object: `properties`, `required`, `$defs`."""
MAX_PROPERTIES = 64
"""Arguments that a tool may have."""
MAX_SCHEMA_CHARACTERS = 100_000
"""Characters of the largest schema that is read, written as JSON."""
MAX_CHECKS = 20_000
"""Rules of a schema that are applied to the arguments of a call. A schema can double its rules at each level."""
MAX_REASON = 60
"""Characters of a name in a reason."""
_NAME = re.compile(r"[^\W\d]\w*")
"""The name of an argument: a word that does not begin with a digit."""
_NAME_AND_EQUALS = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
"""The name of an argument and the sign after it: `city=`."""
_COMMA = re.compile(r"\s*,\s*")


def _parse_finite_number(text: str) -> float:
    """Parse a number of JSON. Raises ValueError for NaN, infinity, and a number that overflows a float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


_DECODER = json.JSONDecoder(parse_float=_parse_finite_number, parse_constant=_parse_finite_number)


class BadArguments(ValueError):
    """A text that is not valid as the arguments of a tool.

    reason: why, in a short text that is the same for equal mistakes, so that reasons can be counted.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def list_argument_names(schema: Schema) -> list[str]:
    """Return the names of a schema's arguments in the order in which they are written, required ones first."""
    required = _get_required_names(schema)
    names = dict.fromkeys([*_get_properties(schema), *required])
    return sorted(names, key=lambda name: name not in required)


def _get_required_names(schema: Schema) -> list[str]:
    return list(schema.get("required") or ())


def _get_properties(schema: Schema) -> Mapping[str, Any]:
    return schema.get("properties") or {}


def parse_arguments(text: str, schema: Schema) -> dict[str, Any]:
    """Parse the input of a call, such as `city="Rome", days=3`, and check it against the tool's schema.

    The arguments may come in any order, with any white space between them.

    Returns:
        The values by name: `{"city": "Rome", "days": 3}`.

    Raises:
        BadArguments: The input is not valid. The reason is one of these:
            - `bad_arguments`: the text is not of the form `name=value, name=value`
            - `twice: NAME`, `unknown: NAME`, `missing: NAME`
            - `bad_arguments: NAME is no integer` and the like: a value breaks a rule of the schema
            - `bad_arguments: over_budget`: the check takes too long, or too many rules (MAX_CHECKS)
            - `bad_arguments: ...` about a reference or patternProperties: the schema itself cannot be applied
    """
    arguments = _parse_named_arguments(text)
    _check_names(arguments, schema)
    _check_values(arguments, schema)
    return arguments


def _parse_named_arguments(text: str) -> dict[str, Any]:
    """Parse arguments such as `city="Rome", days=3` without looking at the schema.

    Raises:
        BadArguments: A name occurs twice (`twice: NAME`), or the text has another form (`bad_arguments`).
    """
    arguments: dict[str, Any] = {}

    reader = _ArgumentReader(text.strip())
    while not reader.is_at_end:
        if arguments:
            reader.match(_COMMA)
        key = reader.match(_NAME_AND_EQUALS)
        name = key[1]
        if name in arguments:
            raise BadArguments(f"twice: {name}")
        arguments[name] = reader.json_value()
    return arguments


class _ArgumentReader:
    """Reads a text from its beginning to its end; each method raises BadArguments if the text goes on otherwise."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the whole text was read."""
        return self._position >= len(self._text)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Read what a pattern matches at the current position."""
        match = pattern.match(self._text, self._position)
        if match is None:
            raise BadArguments("bad_arguments")
        self._position = match.end()
        return match

    def json_value(self) -> Any:
        """Parse the JSON value at the current position."""
        try:
            value, self._position = _DECODER.raw_decode(self._text, self._position)
            json.dumps(value, ensure_ascii=False).encode()  # raises ValueError for half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise BadArguments("bad_arguments") from error
        return value


def _check_names(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Check that all names are in the schema, and that no required argument is missing.

    Raises:
        BadArguments: With the reason `unknown: NAME` or `missing: NAME`.
    """
    takes_any_name = schema.get("additionalProperties") is True

    unknown = arguments.keys() - set(list_argument_names(schema))
    if unknown and not takes_any_name:
        raise BadArguments(f"unknown: {_format_first_name(unknown)}")

    missing = set(_get_required_names(schema)) - arguments.keys()
    if missing:
        raise BadArguments(f"missing: {_format_first_name(missing)}")


def _format_first_name(names: Collection[str]) -> str:
    """Return the alphabetically first name, cut to MAX_REASON characters."""
    return min(names)[:MAX_REASON]


def _check_values(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Check the values against the rules of the schema.

    Raises:
        BadArguments: A value breaks a rule, as in "bad_arguments: days is below 1". If several values do,
            the reason names the one whose path in the arguments is alphabetically first.
    """
    errors = _list_schema_errors(arguments, schema)
    if not errors:
        return

    error = min(errors, key=_get_error_path)
    name = ".".join(_get_error_path(error))[:MAX_REASON]
    subject = name or "they"  # without a name, the rule is about the arguments as a whole
    raise BadArguments(f"bad_arguments: {subject} {_describe_broken_rule(error)}")


def _get_error_path(error: Any) -> list[str]:
    """Return the path of the value that a jsonschema error is about: ["stops", "0", "city"]."""
    return [str(step) for step in error.absolute_path]


def _list_schema_errors(arguments: Mapping[str, Any], schema: Schema) -> list[Any]:
    """Apply the rules of a schema to the arguments of a call.

    Returns:
        An error of the library jsonschema for each rule that a value breaks.

    Raises:
        BadArguments: The check needs too many rules, too much time or too deep a recursion (OVER_BUDGET), or
            the schema itself cannot be applied, for example because one of its references leads nowhere.
    """
    from referencing.exceptions import Unresolvable

    validator = _build_validator(json.dumps(schema))
    _budget.begin()  # MAX_CHECKS rules: each rule that the validator applies spends one; the next raises BadArguments
    try:
        return list(validator.iter_errors(dict(arguments)))
    except (RecursionError, TimeoutError) as error:  # TimeoutError: from a pattern with look-around
        raise BadArguments(OVER_BUDGET) from error
    except Unresolvable as error:  # in a keyword that `find_schema_fault` does not look at
        raise BadArguments("bad_arguments: a reference of the schema leads nowhere") from error


def _describe_broken_rule(error: Any) -> str:
    """Describe which rule a value breaks, for example "is no integer".

    Args:
        error: The error of the library jsonschema about the value.
    """
    rule = error.validator
    limit = error.validator_value  # what the schema has for this rule: 5 for `maximum`, a type or several for `type`

    match rule:
        case "type" if isinstance(limit, list):
            return f"is no {' or '.join(limit)}"
        case "type":
            return f"is no {limit}"
        case "enum" | "const":
            return "is none of its values"
        case "minimum" | "exclusiveMinimum":
            return f"is below {limit}"
        case "maximum" | "exclusiveMaximum":
            return f"is above {limit}"
        case _:
            return f"breaks {rule}"


OVER_BUDGET = "bad_arguments: over_budget"
"""The reason for arguments whose check takes more than MAX_CHECKS rules, Python's stack, or PATTERN_SECONDS."""


class _Budget(threading.local):
    """How many rules may still be applied to the arguments of one call; every thread has its own number.

    `begin` sets the number to MAX_CHECKS before the arguments of a call are checked. Each rule of a validator spends 1.
    """

    left = 0

    def begin(self) -> None:
        self.left = MAX_CHECKS

    def spend(self) -> None:
        """Count one rule. Raises BadArguments if the budget was spent before."""
        self.left -= 1
        if self.left < 0:
            raise BadArguments(OVER_BUDGET)


_budget = _Budget()


@cache
def _build_validator(schema: str) -> Any:
    """Build a jsonschema validator that takes limited time and never uses the network.

    Args:
        schema: The schema as JSON.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    parsed_schema = json.loads(schema)

    validator_class = validator_for(parsed_schema, Draft202012Validator)
    limited_class = _build_limited_validator_class(validator_class)
    no_references = Registry()  # else jsonschema would fetch them from the network
    return limited_class(parsed_schema, registry=no_references)


def _build_limited_validator_class(validator_class: Any) -> Any:
    """Copy a validator class of jsonschema so that its checks end in limited time for any schema.

    In the copy, each rule spends 1 of `_budget`, the number of rules that may still be applied to this call.
    A pattern takes limited time, and `multipleOf` is computed exactly.
    """
    from jsonschema.validators import extend

    rules = {
        **validator_class.VALIDATORS,
        "pattern": _iter_pattern_errors,
        "multipleOf": _iter_multiple_of_errors,
    }  # keyword -> function

    counted_rules = {keyword: _with_budget(rule) for keyword, rule in rules.items()}

    limited_class: Any = extend(validator_class, counted_rules)  # the class with these rules in place of its own

    # jsonschema calls `evolve` for each schema inside the schema. Without this, those could escape the counted rules.
    limited_class.evolve = _with_same_rules(limited_class.evolve)
    return limited_class


def _with_same_rules(evolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap jsonschema's method `evolve` so that rules of inner schemas are counted as well.

    jsonschema calls this method to make the validator of a schema inside another schema.
    """

    def evolve_with_same_rules(validator: Any, *, schema: Any, **changes: Any) -> Any:
        if isinstance(schema, dict):
            schema = _build_safe_inner_schema(schema)
        return evolve(validator, schema=schema, **changes)

    return evolve_with_same_rules


def _build_safe_inner_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a schema that is part of another one, without its "$schema", which would select another validator.

    Raises:
        BadArguments: The schema has patternProperties, whose names are matched without a time limit.
    """
    # `find_schema_fault` refuses most patternProperties before; a "$dynamicRef" is only followed here.
    if schema.get("patternProperties"):
        raise BadArguments("bad_arguments: the schema has patternProperties")
    return {keyword: value for keyword, value in schema.items() if keyword != "$schema"}


def _with_budget(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of a validator that spends 1 of `_budget` each time it is applied."""

    def counted(*arguments: Any) -> Any:
        _budget.spend()
        return rule(*arguments)

    return counted


def _iter_pattern_errors(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error if a text does not match `pattern`. This replaces jsonschema's rule for `pattern`."""
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and not matches(pattern, value):
        yield ValidationError("it does not match")


def _iter_multiple_of_errors(validator: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error if a number is no multiple of `divisor`. This replaces jsonschema's rule for `multipleOf`.

    The numbers are compared as exact decimals, because as floats 4.02 would be no multiple of 0.01.
    """
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError("it is no multiple")


def format_arguments(arguments: Mapping[str, Any], schema: Schema) -> str:
    """Write arguments as the input of a call, such as `city="Rome", days=3`.

    Arguments come in the order of the schema, and those that are not in it come last. An optional argument
    is left out if its value is the default.
    """
    names_in_order = dict.fromkeys([*list_argument_names(schema), *arguments])

    written = []
    for name in names_in_order:
        if name not in arguments:
            continue
        value = arguments[name]
        if not _is_default(name, value, schema):
            written.append(f"{name}={json.dumps(value, ensure_ascii=False)}")
    return ", ".join(written)


def _is_default(name: str, value: object, schema: Schema) -> bool:
    """Check whether an argument can be left out: it is optional, and its value is the default in the schema."""
    value_schema = _get_properties(schema).get(name)
    if name in _get_required_names(schema):
        return False

    if not isinstance(value_schema, Mapping) or "default" not in value_schema:
        return False
    return json.dumps(value_schema["default"]) == json.dumps(value)


def find_schema_fault(schema: Schema) -> str | None:
    """Find out why a tool with this schema of arguments cannot be called, if that is so.

    These schemas are refused:
    - anything but a JSON schema of an object, and schemas of more than MAX_SCHEMA_CHARACTERS
    - more than MAX_PROPERTIES names, and names that are no words
    - `patternProperties`, references that lead nowhere, and arguments that are named only under `anyOf` and the like
    - a schema that llguidance, the library of constrained decoding, cannot compile

    Rules that decoding cannot enforce are accepted, because `parse_arguments` checks them later.

    Returns:
        A message with the reason, or None if the tool can be called.
    """
    try:
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            return f"its schema has {len(text):,} characters; at most {MAX_SCHEMA_CHARACTERS:,} are read"
        return _find_fault_of_json(text)
    except Exception as error:  # noqa: BLE001 - libraries raise anything for what is no schema
        return f"its schema cannot be read ({type(error).__name__})"


@cache  # each command loads its tools twice
def _find_fault_of_json(schema_json: str) -> str | None:
    """Find out why a schema cannot describe the named arguments of a call.

    Args:
        schema_json: The schema as JSON.

    Returns:
        A message with the reason, or None if it can.
    """
    schema = json.loads(schema_json)
    return (
        _find_fault_of_form(schema)
        or _find_fault_of_type(schema)
        or _find_fault_of_names(list_argument_names(schema))
        or _find_fault_of_values(schema_json)
    )


def _find_fault_of_form(schema: Any) -> str | None:
    """Check that a value is a JSON schema.

    Returns:
        A message with what is wrong, or None if the value is a schema.
    """
    from jsonschema import FormatChecker
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    validator_class = validator_for(schema, Draft202012Validator)
    no_formats = FormatChecker(())  # else a pattern that Python's `re` cannot read is refused

    try:
        validator_class.check_schema(schema, format_checker=no_formats)
    except SchemaError as error:
        path = ".".join(_get_error_path(error))
        return f"its schema is none: {path[:100]}: {error.message}"[:300]
    return None


def _find_fault_of_type(schema: Schema) -> str | None:
    """Check that a schema describes an object, which is also assumed if it has no type.

    Returns:
        A message with the other type, or None for an object.
    """
    types = schema.get("type", "object")
    if isinstance(types, str):
        types = [types]

    if "object" in types:
        return None
    return f"its arguments are no object but {' or '.join(types)}"


def _find_fault_of_names(names: list[str]) -> str | None:
    """Check that a call can have arguments with these names.

    Returns:
        A message with what is wrong, or None.
    """
    if len(names) > MAX_PROPERTIES:
        return f"it takes {len(names)} arguments; a call has at most {MAX_PROPERTIES}"

    for name in names:
        if not _NAME.fullmatch(name):
            return f"the argument {name[:40]!r} is not a word, so no call can name it"
    return None


def _find_fault_of_values(schema_json: str) -> str | None:
    """Check that decoding can write a value for each argument of a schema.

    Returns:
        A message with what is wrong, or None.
    """
    names = list_argument_names(json.loads(schema_json))
    try:
        written = build_value_schemas(schema_json, tuple(names))
    except ValueError as error:
        return str(error)

    if written.required_in_parts:  # {"id"} for {"anyOf": [{"required": ["id"]}]}: no rule of the grammar would write it
        names_in_parts = ", ".join(sorted(written.required_in_parts))[:100]
        where = "stand under anyOf, oneOf, allOf or $ref alone"
        return f"its arguments {names_in_parts} {where}; a call names those of properties"

    return _find_unwritable_argument(written.schemas)


def _find_unwritable_argument(value_schemas: Mapping[str, str]) -> str | None:
    """Return the first argument whose schema llguidance cannot compile, and why: "city: REASON"; None without one."""
    for name, value_schema in value_schemas.items():
        fault = unwritable(value_schema)
        if fault is not None:
            return f"{name}: {fault}"
    return None


def build_argument_rules(schema: Schema, rule: str) -> list[str]:
    """Build grammar rules for the arguments of a tool, so that decoding writes them as `format_arguments` does.

    Args:
        schema: The schema of the arguments.
        rule: The name of the first rule.

    Returns:
        Lines in llguidance's Lark syntax. For a required `city`, an optional `days` and the rule name "a0" they are

            a0: a0_0 (", " a0_1)?
            a0_0: "city=" a0_0v
            a0_0v: %json {...}
            a0_1: "days=" a0_1v
            a0_1v: %json {...}
    """
    names = list_argument_names(schema)
    value_schemas = build_value_schemas(
        json.dumps(schema), tuple(names)
    ).schemas  # argument -> schema of its value, in JSON

    rule_of_argument = {name: f"{rule}_{number}" for number, name in enumerate(value_schemas)}
    arguments_in_order = _join_in_order(rule_of_argument, _get_required_names(schema))  # 'a0_0 (", " a0_1)?'

    lines = [f"{rule}: {arguments_in_order}"]
    for name, argument_rule in rule_of_argument.items():
        lines += _build_rules_of_argument(name, argument_rule, value_schemas[name])
    return lines


def _build_rules_of_argument(name: str, rule: str, value_schema: str) -> list[str]:
    """Return the grammar rules of one argument: `a0_0: "city=" a0_0v` and `a0_0v: %json {...}`."""
    name_and_equals = json.dumps(f"{name}=")
    return [
        f"{rule}: {name_and_equals} {rule}v",
        f"{rule}v: %json {value_schema}",
    ]


def _join_in_order(rule_of_argument: Mapping[str, str], required: Collection[str]) -> str:
    """Build the part of a grammar rule that says in which order the arguments of a call follow each other.

    Args:
        rule_of_argument: The name of the rule for each argument.
        required: The names of the required arguments, which come first.

    Returns:
        For the required rule a0_0 and the optional rule a0_1: 'a0_0 (", " a0_1)?'
    """
    required_rules = [rule for name, rule in rule_of_argument.items() if name in required]
    optional_rules = [rule for name, rule in rule_of_argument.items() if name not in required]

    if not required_rules:
        return _join_only_optional(optional_rules)
    return ' ", " '.join(required_rules) + _join_optional_after_others(optional_rules)


def _join_optional_after_others(rules: list[str]) -> str:
    """Return the rule text of optional arguments after others: ' (", " a)? (", " b)?' for the rules a and b."""
    return "".join(f' (", " {rule})?' for rule in rules)


def _join_only_optional(rules: list[str]) -> str:
    """Build the part of a grammar rule for a call whose arguments are all optional.

    Returns:
        For the rules a and b: '(a (", " b)? | b)?'
    """
    if not rules:
        return '""'

    alternatives = []
    for number, first_rule in enumerate(rules):  # any may be the first, which has no comma before it
        later_rules = rules[number + 1 :]
        alternatives.append(first_rule + _join_optional_after_others(later_rules))
    return f"({' | '.join(alternatives)})?"
