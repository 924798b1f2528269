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
from typing import Any, NamedTuple

from toolformer_dag.texts.written_schemas import matches, unwritable, written_values

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
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
"""The name of an argument and the sign after it: `city=`."""
_COMMA = re.compile(r"\s*,\s*")


def _finite(text: str) -> float:
    """Parse a number of JSON. Raises ValueError for NaN, infinity, and a number that overflows a float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


class BadArguments(ValueError):
    """A text that is not valid as the arguments of a tool.

    reason: why, in a short text that is the same for equal mistakes, so that reasons can be counted.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def argument_names(schema: Schema) -> list[str]:
    """Return the names of a schema's arguments in the order in which they are written, required ones first."""
    required = _required(schema)
    names = dict.fromkeys([*_properties(schema), *required])
    return sorted(names, key=lambda name: name not in required)


def _required(schema: Schema) -> list[str]:
    return list(schema.get("required") or ())


def _properties(schema: Schema) -> Mapping[str, Any]:
    return schema.get("properties") or {}


def read_arguments(text: str, schema: Schema) -> dict[str, Any]:
    """Parse the input of a call, such as `city="Rome", days=3`, and check it against the tool's schema.

    Order and white space are free. Returns `{"city": "Rome", "days": 3}`.

    Raises BadArguments with one of these reasons:
    - `bad_arguments`: the text is not of this form
    - `twice: NAME`, `unknown: NAME`, `missing: NAME`
    - `bad_arguments: NAME is no integer` and the like: a value breaks a rule of the schema
    - `bad_arguments: over_budget`: the check takes more than MAX_CHECKS rules, too much time or too deep a recursion
    """
    arguments = _named_values(text)
    _check_names(arguments, schema)
    _check_values(arguments, schema)
    return arguments


def _named_values(text: str) -> dict[str, Any]:
    """Parse names and JSON values: `city="Rome", days=3`. Raises BadArguments (`bad_arguments`, `twice: NAME`)."""
    arguments: dict[str, Any] = {}
    position = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    while position < end:
        if arguments:
            position = _matched(_COMMA, text, position).end()
        key = _matched(_KEY, text, position)
        name = key[1]
        if name in arguments:
            raise BadArguments(f"twice: {name}")
        value = _read_value(text, key.end())
        arguments[name] = value.value
        position = value.end
    return arguments


def _matched(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str]:
    """Match a pattern at a position of a text. Raises BadArguments if it does not match there."""
    match = pattern.match(text, position)
    if match is None:
        raise BadArguments("bad_arguments")
    return match


class _ReadValue(NamedTuple):
    """A JSON value that was parsed from a text."""

    value: Any
    end: int  # the position after it in the text


def _read_value(text: str, position: int) -> _ReadValue:
    """Parse the JSON value that begins at a position of a text.

    Raises BadArguments if no JSON begins there, or if it holds half a surrogate pair.
    """
    try:
        value, end = _DECODER.raw_decode(text, position)
        json.dumps(value, ensure_ascii=False).encode()  # raises ValueError for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise BadArguments("bad_arguments") from error
    return _ReadValue(value, end)


def _check_names(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Raise BadArguments for an argument that the schema does not have, or for a required one that is missing.

    Of several, the first in the alphabet is named in the reason.
    """
    takes_others = schema.get("additionalProperties") is True
    unknown = arguments.keys() - set(argument_names(schema))
    if unknown and not takes_others:
        raise BadArguments(f"unknown: {min(unknown)[:MAX_REASON]}")
    missing = set(_required(schema)) - arguments.keys()
    if missing:
        raise BadArguments(f"missing: {min(missing)[:MAX_REASON]}")


def _check_values(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Raise BadArguments if a value breaks a rule of the schema: "bad_arguments: days is below 1".

    Of several such values, the first by its path is named. Raises BadArguments with OVER_BUDGET if the check takes more
    than MAX_CHECKS rules, too long for a pattern, or too deep a recursion.
    """
    errors = _schema_errors(arguments, schema)
    if errors:
        path, error = min(errors, key=lambda path_and_error: path_and_error[0])
        subject = ".".join(path)[:MAX_REASON] or "they"  # no path: a rule about the arguments as a whole
        raise BadArguments(f"bad_arguments: {subject} {_broken_rule(error)}")


def _schema_errors(arguments: Mapping[str, Any], schema: Schema) -> list[tuple[list[str], Any]]:
    """Return jsonschema's errors, each after the path of the value that breaks a rule: ["stops", "0", "city"].

    Raises BadArguments if the check takes more than is allowed, or if a reference of the schema leads nowhere.
    """
    from referencing.exceptions import Unresolvable

    validator = _validator(json.dumps(schema))
    _budget.begin()  # the validator spends it, and raises BadArguments once it is spent
    try:
        errors = list(validator.iter_errors(dict(arguments)))
    except (RecursionError, TimeoutError) as error:
        raise BadArguments(OVER_BUDGET) from error
    except Unresolvable as error:  # in a keyword that `schema_fault` does not look at
        raise BadArguments("bad_arguments: a reference of the schema leads nowhere") from error
    return [([str(step) for step in error.absolute_path], error) for error in errors]


def _broken_rule(error: Any) -> str:
    """Return which rule a value breaks, as "is no integer", from jsonschema's error. The value is not named."""
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
def _validator(schema: str) -> Any:
    """Return a validator of the library jsonschema for a schema, given as JSON. It is safe for any schema:

    - Each rule that it applies spends 1 of `_budget`, so a check ends.
    - Patterns take linear or limited time (`matches`), and `multipleOf` is exact (`_divides`).
    - It fetches nothing from the network for a reference: its registry is empty.
    """
    from jsonschema.validators import Draft202012Validator, extend, validator_for
    from referencing import Registry

    validator_class = validator_for(json.loads(schema), Draft202012Validator)
    rules = {**validator_class.VALIDATORS, "pattern": _matches, "multipleOf": _divides}
    counted_rules = {keyword: _counted(rule) for keyword, rule in rules.items()}
    counting_class: Any = extend(validator_class, counted_rules)
    # jsonschema calls `evolve` for each schema inside the schema. Without this, those could escape the counted rules.
    counting_class.evolve = _with_same_rules(counting_class.evolve)
    return counting_class(json.loads(schema), registry=Registry())


def _with_same_rules(evolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap jsonschema's `evolve`, which makes a validator for a schema inside the schema, so that rules stay counted.

    Left to itself, jsonschema would take another validator for an inner schema with "$schema", so "$schema" is removed.

    The wrapped function raises BadArguments for an inner schema with patternProperties, because their names are matched
    without a limit of time. `schema_fault` refuses most of them before; a "$dynamicRef" is only followed here.
    """

    def evolved(validator: Any, *, schema: Any, **changes: Any) -> Any:
        if isinstance(schema, dict):
            if schema.get("patternProperties"):
                raise BadArguments("bad_arguments: the schema has patternProperties")
            schema = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
        return evolve(validator, schema=schema, **changes)

    return evolved


def _counted(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of a validator that spends 1 of `_budget` each time it is applied."""

    def counted(*arguments: Any) -> Any:
        _budget.spend()
        return rule(*arguments)

    return counted


def _matches(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error if a text does not match `pattern`: jsonschema's rule for the keyword of that name."""
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and not matches(pattern, value):
        yield ValidationError("it does not match")


def _divides(validator: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error if a number is no multiple of `divisor`: jsonschema's rule for the keyword `multipleOf`.

    Numbers are compared as exact decimals: as floats, 4.02 would be no multiple of 0.01.
    """
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError("it is no multiple")


def write_arguments(arguments: Mapping[str, Any], schema: Schema) -> str:
    """Write arguments as the input of a call, in the schema's order, without those that equal their default.

    `{"days": 3, "city": "Rome"}` becomes `city="Rome", days=3` if the city is required. Arguments that the schema does
    not have come last.
    """
    written = []
    for name in dict.fromkeys([*argument_names(schema), *arguments]):
        if name in arguments and not _is_default(name, arguments[name], schema):
            written.append(f"{name}={json.dumps(arguments[name], ensure_ascii=False)}")
    return ", ".join(written)


def _is_default(name: str, value: object, schema: Schema) -> bool:
    """Return whether an argument may be left out: it is optional, and `value` is the default in its schema."""
    value_schema = _properties(schema).get(name)
    if name in _required(schema):
        return False
    if not isinstance(value_schema, Mapping) or "default" not in value_schema:
        return False
    return json.dumps(value_schema["default"]) == json.dumps(value)


def schema_fault(schema: Schema) -> str | None:
    """Return why calls with the arguments of this schema cannot be written; None if they can.

    Refused are
    - anything but a JSON schema of an object, and schemas of more than MAX_SCHEMA_CHARACTERS
    - more than MAX_PROPERTIES names, and names that are no words
    - `patternProperties`, references that lead nowhere, and arguments that only `anyOf` and the like name
    - a schema that llguidance, the library of constrained decoding, cannot compile; its words are returned then

    Rules that decoding cannot keep to are no fault: `read_arguments` checks them afterwards.
    """
    try:
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            return f"its schema has {len(text):,} characters; at most {MAX_SCHEMA_CHARACTERS:,} are read"
        return _fault_of(text)
    except Exception as error:  # noqa: BLE001 - libraries raise anything for what is no schema
        return f"its schema cannot be read ({type(error).__name__})"


@cache
def _fault_of(text: str) -> str | None:
    """Return why a schema, given as JSON, cannot describe the named arguments of a call; None if it can.

    It has to be a valid JSON schema, of an object, whose names and values decoding can write. Cached, because each
    command loads its tools twice.
    """
    from jsonschema import FormatChecker
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = json.loads(text)
    no_formats = FormatChecker(())  # else a pattern that only other engines than Python's `re` read is refused
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema, format_checker=no_formats)
    except SchemaError as error:
        path = ".".join(str(step) for step in error.absolute_path)
        return f"its schema is none: {path[:100]}: {error.message}"[:300]
    types = schema.get("type", "object")
    if isinstance(types, str):
        types = [types]
    if "object" not in types:
        return f"its arguments are no object but {' or '.join(types)}"
    return _fault_of_names(argument_names(schema)) or _fault_of_values(text)


def _fault_of_names(names: list[str]) -> str | None:
    """Return why a call cannot have arguments of these names; None if it can."""
    if len(names) > MAX_PROPERTIES:
        return f"it takes {len(names)} arguments; a call has at most {MAX_PROPERTIES}"
    for name in names:
        if not _NAME.fullmatch(name):
            return f"the argument {name[:40]!r} is not a word, so no call can name it"
    return None


def _fault_of_values(text: str) -> str | None:
    """Return why decoding cannot write values for the arguments of a schema, given as JSON; None if it can."""
    names = argument_names(json.loads(text))
    try:
        written = written_values(text, tuple(names))
    except ValueError as error:
        return str(error)
    if written.required_in_parts:
        in_parts = ", ".join(sorted(written.required_in_parts))[:100]
        return (
            f"its arguments {in_parts} stand under anyOf, oneOf, allOf or $ref alone; a call names those of properties"
        )
    for name, value_schema in written.schemas.items():
        fault = unwritable(value_schema)
        if fault is not None:
            return f"{name}: {fault}"
    return None


def argument_rules(schema: Schema, rule: str) -> list[str]:
    """Return grammar rules that admit what `write_arguments` writes, in the syntax of Lark as llguidance reads it.

    rule: the name of the first rule. With "a0", a required `city` and an optional `days` become

        a0: a0_0 (", " a0_1)?
        a0_0: "city=" a0_0v
        a0_0v: %json {...}
        a0_1: "days=" a0_1v
        a0_1v: %json {...}

    A rule per argument, a rule for its value, and the first rule with the arguments in order.
    """
    value_schemas = written_values(json.dumps(schema), tuple(argument_names(schema))).schemas
    rule_of_argument = {name: f"{rule}_{number}" for number, name in enumerate(value_schemas)}
    lines = [f"{rule}: {_in_order(rule_of_argument, _required(schema))}"]
    for name, value_schema in value_schemas.items():
        argument_rule = rule_of_argument[name]
        lines.append(f"{argument_rule}: {json.dumps(name + '=')} {argument_rule}v")
        lines.append(f"{argument_rule}v: %json {value_schema}")
    return lines


def _in_order(rule_of_argument: Mapping[str, str], required: Collection[str]) -> str:
    """Return how the arguments of a call follow each other: 'a0_0 (", " a0_1)?' for a required and an optional one.

    rule_of_argument: argument -> the name of its rule. required: the arguments that every call needs.
    """
    required_rules = [rule for name, rule in rule_of_argument.items() if name in required]
    optional_rules = [rule for name, rule in rule_of_argument.items() if name not in required]
    if not required_rules:
        return _only_optional(optional_rules)
    return ' ", " '.join(required_rules) + _optional_after_others(optional_rules)


def _optional_after_others(rules: list[str]) -> str:
    """Return how optional arguments follow others, each after a comma: ' (", " a)? (", " b)?' for the rules a and b."""
    return "".join(f' (", " {rule})?' for rule in rules)


def _only_optional(rules: list[str]) -> str:
    """Return how optional arguments stand alone, in order or none: '(a (", " b)? | b)?' for the rules a and b."""
    if not rules:
        return '""'
    # Any of them may be the first one, which has no comma before it.
    beginnings = [rule + _optional_after_others(rules[number + 1 :]) for number, rule in enumerate(rules)]
    return f"({' | '.join(beginnings)})?"
