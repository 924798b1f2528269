"""Named arguments of a call, `city="Rome", days=3`: read, check, write, and say what may be written.

A tool with named arguments has a JSON schema of them. Names are its properties; values are JSON. They are written in
the schema's order, required ones first, defaults left out, so that equal arguments are equal texts.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
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
"""Rules of a schema that the arguments of one call are compared with: a schema may double its work at each level."""
MAX_REASON = 60
"""Characters of a name in a reason."""
_NAME = re.compile(r"[^\W\d]\w*")
"""A word, which does not begin with a digit: what an argument may be called."""
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
"""The name of an argument and the sign after it: `city=`."""
_COMMA = re.compile(r"\s*,\s*")


def _finite(text: str) -> float:
    """Return the number that JSON's text means; raise ValueError for NaN, infinity, and what overflows a float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


class BadArguments(ValueError):
    """Text that is not the arguments of a tool. `reason` is short and stable, for counting."""

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
    - `bad_arguments: over_budget`: the check takes more than MAX_CHECKS
    """
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
    _check_names(arguments, schema)
    _check_values(arguments, schema)
    return arguments


def _matched(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str]:
    """Match a pattern at a position. Raises BadArguments where it does not match."""
    match = pattern.match(text, position)
    if match is None:
        raise BadArguments("bad_arguments")
    return match


class _ReadValue(NamedTuple):
    value: Any
    end: int  # the position after it


def _read_value(text: str, position: int) -> _ReadValue:
    """Parse the JSON value that begins at a position. Raises BadArguments where there is none that a text can hold."""
    try:
        value, end = _DECODER.raw_decode(text, position)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise BadArguments("bad_arguments") from error
    return _ReadValue(value, end)


def _check_names(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Raise BadArguments for the first argument, by name, that the schema does not know, or that it requires."""
    takes_others = schema.get("additionalProperties") is True
    unknown = arguments.keys() - set(argument_names(schema))
    if unknown and not takes_others:
        raise BadArguments(f"unknown: {min(unknown)[:MAX_REASON]}")
    missing = set(_required(schema)) - arguments.keys()
    if missing:
        raise BadArguments(f"missing: {min(missing)[:MAX_REASON]}")


def _check_values(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Check the arguments of a call against their JSON schema.

    Raises BadArguments for the first value, by its path, that breaks a rule: "bad_arguments: days is below 1"; and
    OVER_BUDGET where checking takes too long.
    """
    from referencing.exceptions import Unresolvable

    validator = _validator(json.dumps(schema))
    _checks.begin()
    try:
        mistakes = list(validator.iter_errors(dict(arguments)))
    except (RecursionError, TimeoutError) as error:
        raise BadArguments(OVER_BUDGET) from error
    except Unresolvable as error:  # of a keyword that decoding leaves out
        raise BadArguments("bad_arguments: a reference of the schema leads nowhere") from error
    if mistakes:
        first = min(mistakes, key=lambda mistake: [str(step) for step in mistake.absolute_path])
        path = ".".join(str(step) for step in first.absolute_path)
        raise BadArguments(f"bad_arguments: {path[:MAX_REASON] or 'they'} {_in_words(first)}")


def _in_words(mistake: Any) -> str:
    """Say which rule a value breaks, such as "is no integer", without the value: reasons are counted."""
    rule = mistake.validator
    limit = mistake.validator_value
    match rule:
        case "type":
            return f"is no {limit if isinstance(limit, str) else ' or '.join(limit)}"
        case "enum" | "const":
            return "is none of its values"
        case "minimum" | "exclusiveMinimum":
            return f"is below {limit}"
        case "maximum" | "exclusiveMaximum":
            return f"is above {limit}"
        case _:
            return f"breaks {rule}"


OVER_BUDGET = "bad_arguments: over_budget"
"""The reason of arguments that cost more than MAX_CHECKS, or than Python's stack."""


class _Checks(threading.local):
    """How many rules may still be compared for the arguments that this thread checks.

    `begin` sets the number to MAX_CHECKS before each call's arguments; every rule of a validator spends one.
    """

    left = 0

    def begin(self) -> None:
        self.left = MAX_CHECKS

    def spend(self) -> None:
        """Count one comparison. Raises BadArguments where there were too many."""
        self.left -= 1
        if self.left < 0:
            raise BadArguments(OVER_BUDGET)


_checks = _Checks()


@cache
def _validator(schema: str) -> Any:
    """Return jsonschema's validator of a schema, given as JSON, whose cost is limited whatever the schema.

    It spends one of `_checks` per rule, its patterns take linear or limited time (`matches`), and it fetches nothing
    for a reference.
    """
    from jsonschema.validators import Draft202012Validator, extend, validator_for
    from referencing import Registry

    validator_class = validator_for(json.loads(schema), Draft202012Validator)
    rules = {**validator_class.VALIDATORS, "pattern": _matches, "multipleOf": _divides}
    counted_rules = {keyword: _counted(rule) for keyword, rule in rules.items()}
    counting_class: Any = extend(validator_class, counted_rules)
    counting_class.evolve = _with_same_rules(counting_class.evolve)
    return counting_class(json.loads(schema), registry=Registry())


def _with_same_rules(evolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a validator's `evolve`, by which it goes on to a part of the schema, so that it keeps its counted rules.

    A `$schema` in the part would choose another validator, and is taken out. Names of `patternProperties` are matched
    without a limit of time: a part with them, which only a reference at run time leads to, raises BadArguments.
    """

    def evolved(validator: Any, *, schema: Any, **changes: Any) -> Any:
        if isinstance(schema, dict):
            if schema.get("patternProperties"):
                raise BadArguments("bad_arguments: the schema has patternProperties")
            schema = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
        return evolve(validator, schema=schema, **changes)

    return evolved


def _counted(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of a validator that spends one of `_checks` each time it is applied."""

    def counted(*arguments: Any) -> Any:
        _checks.spend()
        return rule(*arguments)

    return counted


def _matches(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error where a text does not match: the rule of the keyword `pattern`, in jsonschema's form."""
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and not matches(pattern, value):
        yield ValidationError("it does not match")


def _divides(validator: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error where a number is no multiple: the rule of the keyword `multipleOf`, in jsonschema's form.

    Numbers are compared as they are written: as floats, 4.02 would be no multiple of 0.01.
    """
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError("it is no multiple")


def write_arguments(arguments: Mapping[str, Any], schema: Schema) -> str:
    """Write arguments as the input of a call, in the schema's order; those that equal their default are left out.

    `{"days": 3, "city": "Rome"}` becomes `city="Rome", days=3` where the city is required. Arguments that the schema
    does not know come last.
    """
    written = []
    for name in dict.fromkeys([*argument_names(schema), *arguments]):
        if name in arguments and not _is_default(name, arguments[name], schema):
            written.append(f"{name}={json.dumps(arguments[name], ensure_ascii=False)}")
    return ", ".join(written)


def _is_default(name: str, value: object, schema: Schema) -> bool:
    """Return whether an argument may be left out because the schema has this value as its default."""
    described = _properties(schema).get(name)
    if name in _required(schema) or not isinstance(described, Mapping) or "default" not in described:
        return False
    return json.dumps(described["default"]) == json.dumps(value)


def schema_fault(schema: Schema) -> str | None:
    """Return why calls with the arguments of this schema cannot be written; None where they can.

    Refused are
    - what is no JSON schema of an object, and schemas of more than MAX_SCHEMA_CHARACTERS
    - more than MAX_PROPERTIES names, and names that are no words
    - `patternProperties`, references that lead nowhere, and arguments that stand under `anyOf` and the like alone
    - what llguidance, the library of constrained decoding, cannot compile; the result is in its words then

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
    """Return why a JSON schema cannot describe the named arguments of a call, in words; None where it can.

    It has to be a schema, of an object, whose names and values decoding can write. text: the schema, as JSON. Cached:
    each command loads its tools twice.
    """
    from jsonschema import FormatChecker
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = json.loads(text)
    no_formats = FormatChecker(())  # a pattern need not be one that Python's `re` reads
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema, format_checker=no_formats)
    except SchemaError as error:
        path = ".".join(str(step) for step in error.absolute_path)
        return f"its schema is none: {path[:100]}: {error.message}"[:300]
    types = schema.get("type", "object")
    if "object" not in types:  # a name, or a list of names
        return f"its arguments are no object but {types if isinstance(types, str) else ' or '.join(types)}"
    return _fault_of_names(argument_names(schema)) or _fault_of_values(text)


def _fault_of_names(names: list[str]) -> str | None:
    """Return why a call cannot have arguments of these names; None where it can."""
    if len(names) > MAX_PROPERTIES:
        return f"it takes {len(names)} arguments; a call has at most {MAX_PROPERTIES}"
    for name in names:
        if not _NAME.fullmatch(name):
            return f"the argument {name[:40]!r} is not a word, so no call can name it"
    return None


def _fault_of_values(text: str) -> str | None:
    """Return why decoding cannot write the values of a schema, given as JSON; None where it can."""
    try:
        written = written_values(text, tuple(argument_names(json.loads(text))))
    except ValueError as error:
        return str(error)
    if written.elsewhere:
        names = ", ".join(sorted(written.elsewhere))[:100]
        return f"its arguments {names} stand under anyOf, oneOf, allOf or $ref alone; a call names those of properties"
    for name, value_schema in written.schemas.items():
        fault = unwritable(value_schema) if value_schema else None
        if fault:
            return f"{name}: {fault}"
    return None


def argument_rules(schema: Schema, rule: str) -> list[str]:
    """Return the rules of a grammar, in llguidance's form of Lark, that admits what `write_arguments` writes.

    rule: the name of the first rule. With "a0", a required `city` and an optional `days` become

        a0: a0_0 (", " a0_1)?
        a0_0: "city=" a0_0v
        a0_0v: %json {...}
        a0_1: "days=" a0_1v
        a0_1v: %json {...}
    """
    value_schemas = written_values(json.dumps(schema), tuple(argument_names(schema))).schemas
    required_names = _required(schema)
    required: list[str] = []  # names of rules
    optional: list[str] = []
    lines: list[str] = []
    writable = {name: value_schema for name, value_schema in value_schemas.items() if value_schema}
    for number, (name, value_schema) in enumerate(writable.items()):
        argument_rule = f"{rule}_{number}"
        lines.append(f"{argument_rule}: {json.dumps(name + '=')} {argument_rule}v")
        lines.append(f"{argument_rule}v: %json {value_schema}")
        group = required if name in required_names else optional
        group.append(argument_rule)
    body = _all_optional(optional)
    if required:
        body = ' ", " '.join(required) + _each_optional(optional)
    return [f"{rule}: {body}", *lines]


def _each_optional(rules: list[str]) -> str:
    """Return the right side of a rule: any of these rules, in order, each after a comma."""
    return "".join(f' (", " {rule})?' for rule in rules)


def _all_optional(rules: list[str]) -> str:
    """Return the right side of a rule: any of these rules, in order, or none; the first has no comma before it."""
    if not rules:
        return '""'
    beginnings = [rule + _each_optional(rules[number + 1 :]) for number, rule in enumerate(rules)]
    return f"({' | '.join(beginnings)})?"
