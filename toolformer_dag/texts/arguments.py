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

from toolformer_dag.texts.written_schemas import build_value_schemas, find_compile_fault, has_pattern_match

Schema = Mapping[str, Any]
"""A JSON schema of an object: `properties`, `required`, `$defs`."""
MAX_ARGUMENTS = 64
"""Arguments that a tool may have."""
MAX_SCHEMA_CHARACTERS = 100_000
"""Characters of the largest schema that is read, written as JSON."""
MAX_RULE_CHECKS = 20_000
"""Rules of a schema that are applied to the arguments of a call. A schema can double its rules at each level."""
MAX_REASON_NAME_CHARACTERS = 60
"""Characters of a name in a reason."""
_ARGUMENT_NAME_PATTERN = re.compile(r"[^\W\d]\w*")
"""The name of an argument: a word that does not begin with a digit."""
_ARGUMENT_NAME_AND_EQUALS_PATTERN = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
"""The name of an argument and the sign after it: `city=`."""
_COMMA_PATTERN = re.compile(r"\s*,\s*")


def _parse_finite_number(text: str) -> float:
    """Parse a number of JSON.

    Raises:
        ValueError: The number is NaN or infinite, or overflows a float.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


_JSON_DECODER = json.JSONDecoder(parse_float=_parse_finite_number, parse_constant=_parse_finite_number)


class BadArguments(ValueError):
    """A text that is not valid as the arguments of a tool.

    Attributes:
        reason: Why it is not valid. The text is short and the same for equal mistakes, so that reasons can be counted.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def list_argument_names(schema: Schema) -> list[str]:
    """Return the names of a schema's arguments in the order in which they are written, required ones first."""
    required_names = _get_required_names(schema)
    distinct_names = dict.fromkeys([*_get_properties(schema), *required_names])
    return sorted(distinct_names, key=lambda name: name not in required_names)


def _get_required_names(schema: Schema) -> list[str]:
    """Return the names of the arguments without which a call is not valid."""
    return list(schema.get("required") or ())


def _get_properties(schema: Schema) -> Mapping[str, Any]:
    """Return the schema of each argument by its name."""
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
            - `bad_arguments: over_budget`: the check takes too long, or too many rules (MAX_RULE_CHECKS)
            - `bad_arguments: ...` about a reference or patternProperties: the schema itself cannot be applied
    """
    arguments = _parse_named_arguments(text)
    _check_argument_names(arguments, schema)
    _check_argument_values(arguments, schema)
    return arguments


def _parse_named_arguments(text: str) -> dict[str, Any]:
    """Parse arguments such as `city="Rome", days=3` without looking at the schema.

    Raises:
        BadArguments: A name occurs twice (`twice: NAME`), or the text has another form (`bad_arguments`).
    """
    arguments: dict[str, Any] = {}

    reader = _ArgumentReader(text.strip())
    while not reader.is_at_end:
        if arguments:  # before all arguments but the first
            reader.read_match(_COMMA_PATTERN)

        name_and_equals = reader.read_match(_ARGUMENT_NAME_AND_EQUALS_PATTERN)
        name = name_and_equals[1]
        if name in arguments:
            raise BadArguments(f"twice: {name}")

        arguments[name] = reader.read_json_value()
    return arguments


class _ArgumentReader:
    """Reads the arguments of a call from the beginning of the text to its end, one part after another."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the whole text was read."""
        return self._position >= len(self._text)

    def read_match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Read the part of the text that a pattern matches at the current position, and move behind it.

        Raises:
            BadArguments: The pattern does not match there.
        """
        match = pattern.match(self._text, self._position)
        if match is None:
            raise BadArguments("bad_arguments")
        self._position = match.end()
        return match

    def read_json_value(self) -> Any:
        """Parse the JSON value at the current position, and move behind it.

        Raises:
            BadArguments: There is no JSON value, or it holds half a surrogate pair, which no text can hold.
        """
        try:
            value, self._position = _JSON_DECODER.raw_decode(self._text, self._position)
            json.dumps(value, ensure_ascii=False).encode()  # raises ValueError for half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise BadArguments("bad_arguments") from error
        return value


def _check_argument_names(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Check that all names are in the schema, and that no required argument is missing.

    Raises:
        BadArguments: With the reason `unknown: NAME` or `missing: NAME`.
    """
    takes_any_name = schema.get("additionalProperties") is True

    unknown_names = arguments.keys() - set(list_argument_names(schema))
    if unknown_names and not takes_any_name:
        raise BadArguments(f"unknown: {_format_first_name(unknown_names)}")

    missing_names = set(_get_required_names(schema)) - arguments.keys()
    if missing_names:
        raise BadArguments(f"missing: {_format_first_name(missing_names)}")


def _format_first_name(names: Collection[str]) -> str:
    """Return the alphabetically first name, cut to MAX_REASON_NAME_CHARACTERS."""
    return min(names)[:MAX_REASON_NAME_CHARACTERS]


def _check_argument_values(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Check the values against the rules of the schema.

    Raises:
        BadArguments: A value breaks a rule, as in "bad_arguments: days is below 1". If several values do,
            the reason names the one whose path in the arguments is alphabetically first.
    """
    errors = _list_schema_errors(arguments, schema)
    if not errors:
        return

    error = min(errors, key=_get_error_path)
    dotted_path = ".".join(_get_error_path(error))
    subject = dotted_path[:MAX_REASON_NAME_CHARACTERS] or "they"  # without a path, it is about all arguments together
    raise BadArguments(f"bad_arguments: {subject} {_describe_broken_rule(error)}")


def _get_error_path(error: Any) -> list[str]:
    """Return the path of the value that a jsonschema error is about: ["stops", "0", "city"]."""
    return [str(step) for step in error.absolute_path]


def _list_schema_errors(arguments: Mapping[str, Any], schema: Schema) -> list[Any]:
    """Apply the rules of a schema to the arguments of a call.

    Returns:
        An error of the library jsonschema for each rule that a value breaks.

    Raises:
        BadArguments: The check needs too many rules, too much time or too deep a recursion (OVER_BUDGET_REASON), or
            the schema itself cannot be applied, for example because one of its references leads nowhere.
    """
    from referencing.exceptions import Unresolvable

    validator = _build_validator(json.dumps(schema))
    # Each rule that the validator applies spends one of MAX_RULE_CHECKS. One more raises BadArguments.
    _rule_budget.reset()
    try:
        return list(validator.iter_errors(dict(arguments)))
    except (RecursionError, TimeoutError) as error:  # a pattern with look-around raises TimeoutError
        raise BadArguments(OVER_BUDGET_REASON) from error
    except Unresolvable as error:  # for a reference in a keyword that `find_schema_fault` does not look at
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


OVER_BUDGET_REASON = "bad_arguments: over_budget"
"""The reason for arguments whose check takes more than MAX_RULE_CHECKS rules, Python's stack, or too much time."""


class _RuleBudget(threading.local):
    """The number of rules that may still be applied to the arguments of one call. Every thread has its own number.

    `reset` sets the number to MAX_RULE_CHECKS before the arguments of a call are checked. Each rule of a validator
    spends one.
    """

    remaining_rules = 0

    def reset(self) -> None:
        """Allow MAX_RULE_CHECKS further rules."""
        self.remaining_rules = MAX_RULE_CHECKS

    def spend_one_rule(self) -> None:
        """Count a rule that is about to be applied.

        Raises:
            BadArguments: No further rule may be applied.
        """
        self.remaining_rules -= 1
        if self.remaining_rules < 0:
            raise BadArguments(OVER_BUDGET_REASON)


_rule_budget = _RuleBudget()


@cache
def _build_validator(schema_json: str) -> Any:
    """Build a jsonschema validator that takes limited time and never uses the network.

    Args:
        schema_json: The schema as JSON.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    parsed_schema = json.loads(schema_json)

    validator_class = validator_for(parsed_schema, Draft202012Validator)
    limited_class = _build_limited_validator_class(validator_class)
    empty_registry = Registry()  # without it, jsonschema would fetch referenced schemas from the network
    return limited_class(parsed_schema, registry=empty_registry)


def _build_limited_validator_class(validator_class: Any) -> Any:
    """Copy a validator class of jsonschema so that its checks end in limited time for any schema.

    In the copy, each rule spends one of `_rule_budget`, the number of rules that may still be applied to this call.
    A pattern takes limited time, and `multipleOf` is computed exactly.
    """
    from jsonschema.validators import extend

    rules_by_keyword = {
        **validator_class.VALIDATORS,
        "pattern": _iter_pattern_errors,
        "multipleOf": _iter_multiple_of_errors,
    }
    counted_rules = {keyword: _wrap_rule_with_budget(rule) for keyword, rule in rules_by_keyword.items()}
    limited_class: Any = extend(validator_class, counted_rules)

    # jsonschema calls `evolve` for each schema inside the schema. Without this, those could escape the counted rules.
    limited_class.evolve = _wrap_evolve_with_counted_rules(limited_class.evolve)
    return limited_class


def _wrap_evolve_with_counted_rules(evolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap jsonschema's method `evolve` so that the rules of inner schemas are limited in number as well.

    jsonschema calls this method to make the validator of a schema inside another schema, such as the one of an
    argument. Each rule that is applied counts against the budget of the whole check (`_rule_budget`).
    """

    def evolve_with_same_rules(validator: Any, *, schema: Any, **changes: Any) -> Any:
        """Make the validator of an inner schema, which is of the class of `validator` and so counts rules too.

        A "$schema" in the inner schema would make jsonschema choose another class.
        """
        if isinstance(schema, dict):
            schema = _build_safe_inner_schema(schema)
        return evolve(validator, schema=schema, **changes)

    return evolve_with_same_rules


def _build_safe_inner_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a schema that is part of another one, without its "$schema", which would select another validator.

    Raises:
        BadArguments: The schema has patternProperties, whose names are matched without a time limit.
    """
    # `find_schema_fault` has refused most patternProperties before. But where a "$dynamicRef" leads is only known while
    # values are checked, so the schemas there are checked here.
    if schema.get("patternProperties"):
        raise BadArguments("bad_arguments: the schema has patternProperties")
    return {keyword: value for keyword, value in schema.items() if keyword != "$schema"}


def _wrap_rule_with_budget(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rule of a validator, so that it spends one of `_rule_budget` each time it is applied."""

    def counted_rule(*arguments: Any) -> Any:
        """Count the rule, then apply it. Raises BadArguments if no further rule may be applied."""
        _rule_budget.spend_one_rule()
        return rule(*arguments)

    return counted_rule


def _iter_pattern_errors(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error if a text does not match a pattern. This replaces jsonschema's rule for `pattern`.

    Raises:
        TimeoutError: The search for the pattern took too long.
        ValueError: The pattern is not a regular expression.
    """
    from jsonschema.exceptions import ValidationError

    if not isinstance(value, str):
        return
    if not has_pattern_match(pattern, value):
        yield ValidationError("it does not match")


def _iter_multiple_of_errors(validator: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error if a number is not a multiple of another one. This replaces jsonschema's rule for `multipleOf`.

    The numbers are compared as exact decimals, because as floats 4.02 would be no multiple of 0.01.
    """
    from jsonschema.exceptions import ValidationError

    if not validator.is_type(value, "number"):
        return
    remainder = Fraction(str(value)) % Fraction(str(divisor))
    if remainder:
        yield ValidationError("it is no multiple")


def format_arguments(arguments: Mapping[str, Any], schema: Schema) -> str:
    """Write arguments as the input of a call, such as `city="Rome", days=3`.

    Arguments come in the order of the schema, and those that are not in it come last. An optional argument
    is left out if its value is the default.
    """
    names_in_order = dict.fromkeys([*list_argument_names(schema), *arguments])

    written_arguments = []
    for name in names_in_order:
        if name not in arguments:
            continue
        value = arguments[name]
        if not _can_omit_argument(name, value, schema):
            value_json = json.dumps(value, ensure_ascii=False)
            written_arguments.append(f"{name}={value_json}")
    return ", ".join(written_arguments)


def _can_omit_argument(argument_name: str, value: object, schema: Schema) -> bool:
    """Check whether an argument can be left out: it is optional, and its value is the default in the schema."""
    if argument_name in _get_required_names(schema):
        return False

    value_schema = _get_properties(schema).get(argument_name)
    if not isinstance(value_schema, Mapping) or "default" not in value_schema:
        return False
    # As JSON, 1 and True differ, which are equal in Python.
    return json.dumps(value_schema["default"]) == json.dumps(value)


def find_schema_fault(schema: Schema) -> str | None:
    """Find out why a tool with this schema of arguments cannot be called, if that is so.

    These schemas are refused:
    - anything but a JSON schema of an object, and schemas of more than MAX_SCHEMA_CHARACTERS
    - more than MAX_ARGUMENTS names, and names that are not words
    - `patternProperties`, references that lead nowhere, and arguments that are named only under `anyOf` and the like
    - a schema that llguidance, the library of constrained decoding, cannot compile

    Rules that decoding cannot enforce are accepted, because `parse_arguments` checks them later.

    Returns:
        A message with the reason, or None if the tool can be called.
    """
    try:
        schema_json = json.dumps(schema)
        if len(schema_json) > MAX_SCHEMA_CHARACTERS:
            return f"its schema has {len(schema_json):,} characters; at most {MAX_SCHEMA_CHARACTERS:,} are read"
        return _find_schema_json_fault(schema_json)
    except Exception as error:  # noqa: BLE001 - for values that are not schemas, libraries raise any error
        return f"its schema cannot be read ({type(error).__name__})"


@cache  # each command loads its tools twice
def _find_schema_json_fault(schema_json: str) -> str | None:
    """Find out why a schema cannot describe the named arguments of a call.

    Args:
        schema_json: The schema as JSON.

    Returns:
        A message with the reason, or None if the schema can.
    """
    schema = json.loads(schema_json)
    return (
        _find_invalid_schema_fault(schema)
        or _find_schema_type_fault(schema)
        or _find_argument_name_fault(list_argument_names(schema))
        or _find_argument_value_fault(schema_json)
    )


def _find_invalid_schema_fault(schema: Any) -> str | None:
    """Check that a value is a JSON schema.

    Returns:
        A message with what is wrong, or None if the value is a schema.
    """
    from jsonschema import FormatChecker
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    validator_class = validator_for(schema, Draft202012Validator)
    no_formats = FormatChecker(())  # with formats, a pattern that Python's `re` cannot read would be refused

    try:
        validator_class.check_schema(schema, format_checker=no_formats)
    except SchemaError as error:
        path = ".".join(_get_error_path(error))
        return f"its schema is none: {path[:100]}: {error.message}"[:300]
    return None


def _find_schema_type_fault(schema: Schema) -> str | None:
    """Check that a schema describes an object. A schema without a type is assumed to do so.

    Returns:
        A message with the types that it describes instead, or None.
    """
    types = schema.get("type", "object")
    if isinstance(types, str):
        types = [types]

    if "object" in types:
        return None
    return f"its arguments are no object but {' or '.join(types)}"


def _find_argument_name_fault(argument_names: list[str]) -> str | None:
    """Check that a call can have arguments with these names.

    Returns:
        A message with what is wrong, or None.
    """
    if len(argument_names) > MAX_ARGUMENTS:
        return f"it takes {len(argument_names)} arguments; a call has at most {MAX_ARGUMENTS}"

    for name in argument_names:
        if not _ARGUMENT_NAME_PATTERN.fullmatch(name):
            return f"the argument {name[:40]!r} is not a word, so no call can name it"
    return None


def _find_argument_value_fault(schema_json: str) -> str | None:
    """Check that decoding can write a value for each argument of a schema.

    Returns:
        A message with what is wrong, or None.
    """
    argument_names = list_argument_names(json.loads(schema_json))
    try:
        written_values = build_value_schemas(schema_json, tuple(argument_names))
    except ValueError as error:
        return str(error)

    # Such as {"id"} for {"anyOf": [{"required": ["id"]}]}. No rule of the grammar would write these arguments.
    if written_values.required_in_parts:
        names_in_parts = ", ".join(sorted(written_values.required_in_parts))[:100]
        where = "stand under anyOf, oneOf, allOf or $ref alone"
        return f"its arguments {names_in_parts} {where}; a call names those of properties"

    return _find_unwritable_argument_fault(written_values.schemas_by_argument)


def _find_unwritable_argument_fault(value_schemas_by_argument: Mapping[str, str]) -> str | None:
    """Find the first argument for which decoding cannot write a value, because llguidance cannot compile its schema.

    Returns:
        The argument and the reason, such as "city: it is too large", or None if there is no such argument.
    """
    for name, value_schema in value_schemas_by_argument.items():
        fault = find_compile_fault(value_schema)
        if fault is not None:
            return f"{name}: {fault}"
    return None


def build_argument_grammar_rules(schema: Schema, rule_name: str) -> list[str]:
    """Build grammar rules for the arguments of a tool, so that decoding writes them as `format_arguments` does.

    Args:
        schema: The schema of the arguments.
        rule_name: The name of the first rule.

    Returns:
        Lines in llguidance's Lark syntax. For a required `city`, an optional `days` and the rule name "a0" they are

            a0: a0_0 (", " a0_1)?
            a0_0: "city=" a0_0v
            a0_0v: %json {...}
            a0_1: "days=" a0_1v
            a0_1v: %json {...}
    """
    argument_names = tuple(list_argument_names(schema))
    written_values = build_value_schemas(json.dumps(schema), argument_names)
    value_schemas = written_values.schemas_by_argument  # the schema of each argument's value, in JSON

    rule_names = {name: f"{rule_name}_{number}" for number, name in enumerate(value_schemas)}  # {"city": "a0_0"}
    arguments_in_order = _join_argument_rules(rule_names, _get_required_names(schema))  # 'a0_0 (", " a0_1)?'

    lines = [f"{rule_name}: {arguments_in_order}"]
    for argument_name, argument_rule in rule_names.items():
        lines += _build_grammar_rules_of_argument(argument_name, argument_rule, value_schemas[argument_name])
    return lines


def _build_grammar_rules_of_argument(argument_name: str, rule_name: str, value_schema_json: str) -> list[str]:
    """Return the grammar rules of one argument: `a0_0: "city=" a0_0v` and `a0_0v: %json {...}`."""
    name_and_equals = json.dumps(f"{argument_name}=")
    return [
        f"{rule_name}: {name_and_equals} {rule_name}v",
        f"{rule_name}v: %json {value_schema_json}",
    ]


def _join_argument_rules(rule_names_by_argument: Mapping[str, str], required_names: Collection[str]) -> str:
    """Build the part of a grammar rule that says in which order the arguments of a call follow each other.

    Args:
        rule_names_by_argument: The name of the rule for each argument.
        required_names: The names of the required arguments, which come first.

    Returns:
        For the required rule a0_0 and the optional rule a0_1: 'a0_0 (", " a0_1)?'
    """
    required_rules = [rule for name, rule in rule_names_by_argument.items() if name in required_names]
    optional_rules = [rule for name, rule in rule_names_by_argument.items() if name not in required_names]

    if not required_rules:
        return _join_only_optional_rules(optional_rules)
    return ' ", " '.join(required_rules) + _join_optional_rules_after_others(optional_rules)


def _join_optional_rules_after_others(rule_names: list[str]) -> str:
    """Return the rule text of optional arguments after others: ' (", " a)? (", " b)?' for the rules a and b."""
    return "".join(f' (", " {rule})?' for rule in rule_names)


def _join_only_optional_rules(rule_names: list[str]) -> str:
    """Build the part of a grammar rule for a call whose arguments are all optional.

    Returns:
        For the rules a and b: '(a (", " b)? | b)?'
    """
    if not rule_names:
        return '""'

    alternatives = []
    # Any argument may be the first one, which has no comma before it.
    for number, first_rule in enumerate(rule_names):
        later_rules = rule_names[number + 1 :]
        alternatives.append(first_rule + _join_optional_rules_after_others(later_rules))
    return f"({' | '.join(alternatives)})?"
